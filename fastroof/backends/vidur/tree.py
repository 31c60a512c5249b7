r"""Vidur's source tree and its forks: a plan as their execution time predictor, without a patch.

Import this module before Vidur reads its command line, or run it in place of ``vidur.main``::

    python -m fastroof.backends.vidur.tree --execution_time_predictor_config_type dummy \
        --replica_config_device h100 --replica_config_model_name meta-llama/Meta-Llama-3-8B

The predictor takes the place of ``DUMMY``, a member of Vidur's ``ExecutionTimePredictorType`` for which the
tree registers nothing. Interface: microsoft/vidur, vidur/entities, vidur/types and
vidur/execution_time_predictor at 82f0840, vidur/config at 8afeaf0 and e7d4261.
"""

# No `from __future__ import annotations`: Vidur makes options of the annotations, which must be types.
import dataclasses
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from fastroof.backends.vidur.terms import (
    NO_TERMS,
    TERM_OF,
    LazyTerms,
    PlanOptions,
    installed_vidur,
    option,
    register,
)
from fastroof.errors import BackendError, UnsupportedModelError
from fastroof.models import DenseModel, ModelSpec
from fastroof.plan import StepPlan
from fastroof.units import US_PER_MS, US_PER_S

try:
    if find_spec("vidur._native"):
        raise ImportError("it has a native core")
    _types: Any = import_module("vidur.types")
    _config: Any = import_module("vidur.config")
    _entities: Any = import_module("vidur.entities")
    _predictors: Any = import_module("vidur.execution_time_predictor")
    _DUMMY: Final = _types.ExecutionTimePredictorType.DUMMY
    _Registry: Final = _predictors.ExecutionTimePredictorRegistry
    # asked for here, so that a vidur without them is refused below
    _config.BaseExecutionTimePredictorConfig, _entities.ExecutionTime  # noqa: B018
except (ImportError, AttributeError) as error:
    raise (SystemExit if __name__ == "__main__" else ImportError)(
        f"fastroof.backends.vidur.tree needs Vidur's source tree or a fork of it, and {installed_vidur()} "
        f"({error}): put the checkout on PYTHONPATH, without PyPI's package in the environment, which hides "
        "it; for that package use fastroof.backends.vidur.native"
    ) from None


@dataclasses.dataclass
class FastroofExecutionTimePredictorConfig(PlanOptions, _config.BaseExecutionTimePredictorConfig):  # type: ignore[misc]
    """Options of the predictor: ``--fastroof_execution_time_predictor_config_<name>`` on the command line.

    Attributes
    ----------
    tables, source : str
        Folder of measured tables instead of the shipped, and which source of them; empty for the defaults.
        ``datasheet`` times a GPU of which nothing was measured by rooflines of its peaks.
    method : str
        As :func:`fastroof.compile_plan` takes it.
    """

    tables: str = option("", "Folder of measured tables, or datasheet.")
    source: str = option("", "Which source of the tables.")
    method: str = option("roofline", "How tables are looked up.")

    @staticmethod
    def get_type() -> Any:
        """Return the member of Vidur's enumeration that this stands for."""
        return _DUMMY


class StepExecutionTime(LazyTerms, _entities.ExecutionTime):  # type: ignore[misc]
    """A step as Vidur's ExecutionTime: the total at once, the terms when one of them is first read.

    ``total_time`` is the plan's step in seconds, rounded once. Vidur's formulas hold over the terms (ms):
    operators of a layer in theirs, embedding, last norm and LM head in ``sampler_e2e_time``, what the
    engine's profile adds in ``schedule_time``, the all-reduces at their mean.
    """

    def __init__(
        self,
        predictor: "FastroofExecutionTimePredictor",
        new_tokens: Sequence[int],
        context_len: Sequence[int],
    ) -> None:
        self._id = _entities.ExecutionTime.generate_id()
        self._predictor = predictor
        self._new_tokens = new_tokens
        self._context_len = context_len
        self._total_us = predictor.step_us(new_tokens, context_len)

    @property
    def model_time(self) -> float:
        """The layers, s."""
        predictor = self._predictor
        kernels_us = self._total_us
        if predictor.kernels is not predictor.plan:
            kernels_us = predictor.kernels_us(self._new_tokens, self._context_len)
        return (kernels_us - predictor.outside_layers_us(self._new_tokens)) / US_PER_S

    def _set_terms(self) -> None:
        terms = self._predictor.terms_ms(self._new_tokens, self._context_len, self._total_us)
        super().__init__(self._predictor.num_layers, **terms)


# Vidur asks for nothing but get_execution_time. Its base class wants a method for each term, and forks
# want further ones: a predictor that derives from it would suit one of them.
class FastroofExecutionTimePredictor:
    """What Vidur's schedulers ask how long a batch takes.

    Parameters
    ----------
    predictor_config : FastroofExecutionTimePredictorConfig
        Options of the plan.
    replica_config : vidur.config.ReplicaConfig
        Its model, device, tensor_parallel_size and num_pipeline_stages.
    replica_scheduler_config, metrics_config : object, optional
        As Vidur passes them; not read, nor is what a fork adds to them.

    Raises
    ------
    BackendError
        If the replica has pipeline stages.
    UnsupportedModelError
        If its model's MLP has no gate.
    FastroofError
        If there is no such plan: see :func:`fastroof.compile_plan`.

    Attributes
    ----------
    plan : StepPlan
        What times a batch.
    kernels : StepPlan
        The same without what the engine's profile adds; ``plan`` itself if it adds nothing.
    num_layers : int
        Layers of the model.
    """

    def __init__(
        self,
        predictor_config: Any,
        replica_config: Any,
        replica_scheduler_config: Any = None,
        metrics_config: Any = None,
        **_others: Any,
    ) -> None:
        stages = replica_config.num_pipeline_stages
        if stages != 1:
            raise BackendError(
                f"num_pipeline_stages={stages}: a plan times the whole step, and nothing was measured of "
                "sending activations from stage to stage; use num_pipeline_stages=1 with tensor_parallel_size"
            )
        self.plan = _compile(predictor_config, replica_config)
        bare = self.plan.profile.kernels_alone()
        self.kernels = self.plan
        if bare != self.plan.profile:
            self.kernels = _compile(predictor_config, replica_config, engine=bare)
        # compiled here, not when the first batch is timed
        self.step_us, self.kernels_us = self.plan.step_scalar, self.kernels.step_scalar
        self.num_layers = self.plan.model.num_layers
        self._of_tokens_us = _once_a_step_us(self.kernels, "tokens", self.plan.max_num_batched_tokens)
        self._of_sequences_us = _once_a_step_us(self.kernels, "sequences", self.plan.max_num_seqs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FastroofExecutionTimePredictor":
        # Forks that look ahead copy a scheduler, and its predictor with it; this one never changes.
        return self

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> StepExecutionTime:
        """Time a batch of Vidur's.

        Parameters
        ----------
        batch : vidur.entities.Batch
            Its ``num_tokens`` and ``requests``.
        pipeline_stage : int
            0, the only one.

        Returns
        -------
        StepExecutionTime
            Its ``total_time`` is ``plan.step_scalar`` of the batch, s.

        Raises
        ------
        PlanRangeError
            If the batch is larger than max_num_batched_tokens or max_num_seqs.

        Notes
        -----
        Vidur counts the first output token as processed when the prefill ends, before it went through the
        model (vidur/entities/request.py@82f0840, ``on_batch_end``). After that ``num_processed_tokens`` is
        what a decode attends to, itself included, and one more than its context. A request that was
        preempted starts from 0 with all its tokens as prefill, the last output token among them.
        """
        context_len = [
            request.num_processed_tokens - 1 if request._is_prefill_complete else request.num_processed_tokens
            for request in batch.requests
        ]
        return StepExecutionTime(self, batch.num_tokens, context_len)

    def outside_layers_us(self, new_tokens: Sequence[int]) -> float:
        """Time embedding, last norm and LM head of a batch, us."""
        return self._of_tokens_us[sum(new_tokens)] + self._of_sequences_us[len(new_tokens)]

    def terms_ms(
        self, new_tokens: Sequence[int], context_len: Sequence[int], total_us: float
    ) -> dict[str, float]:
        """Break a batch down into Vidur's terms: ms, of a layer or of the step as Vidur has it."""
        step = self.kernels.explain(zip(new_tokens, context_len, strict=True))
        terms = dict(NO_TERMS)
        layer_ms = 1.0 / (US_PER_MS * self.num_layers)
        for operator in step.operators:
            term = TERM_OF.get(operator.role)
            if term is None:
                terms["sampler_e2e_time"] += operator.total_us / US_PER_MS
            else:
                terms[term] += operator.total_us * layer_ms
        terms["tensor_parallel_communication_time"] /= 2.0  # Vidur counts it after attention and after MLP
        terms["schedule_time"] = (total_us - step.total_us) / US_PER_MS
        return terms


def _compile(config: Any, replica: Any, **changed: Any) -> StepPlan:
    model = config.model or _model_of(replica)
    options = {"method": config.method, **changed}
    return config.compiled(model, replica.device, replica.tensor_parallel_size, **options)  # type: ignore[no-any-return]


def _model_of(replica: Any) -> ModelSpec:
    """Read the replica's model, so that plan and Vidur's memory planner speak of the same sizes."""
    name, sizes = replica.model_name, replica.model_config
    if not sizes.use_gated_mlp:
        raise UnsupportedModelError(
            f"{name}: fastroof times gated MLPs, and use_gated_mlp is False; choose another model_name"
        )
    return DenseModel(
        name=name,
        architecture="LlamaForCausalLM",
        num_layers=sizes.num_layers,
        hidden=sizes.embedding_dim,
        intermediate=sizes.mlp_hidden_dim,
        num_q_heads=sizes.num_q_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.embedding_dim // sizes.num_q_heads,
        vocab=sizes.vocab_size,
        tie_embeddings=False,
        qkv_bias=sizes.use_qkv_bias,
        o_bias=sizes.use_bias,
        mlp_bias=sizes.use_bias,
        qk_norm=False,
        sliding_window=None,
        max_position=sizes.max_position_embeddings,
        torch_dtype=None,
    ).spec()


def _once_a_step_us(plan: StepPlan, rows: str, most: int) -> list[float]:
    """Time the operators outside the layers by their rows: entry i for i of them, us."""
    total_us = np.zeros(most + 1)
    for curve in plan.row_curves:
        if curve.operator.rows == rows and curve.operator.role not in TERM_OF:
            total_us += curve.operator.times * np.interp(np.arange(most + 1), curve.axis, curve.value)
    return total_us.tolist()


register(_Registry, _DUMMY, FastroofExecutionTimePredictor, "Vidur")

if __name__ == "__main__":
    import_module("vidur.main").main()
