"""Step times for Vidur as it is on PyPI (0.0.26), whose ExecutionTime is native.

In Python a plan becomes the predictor of a simulation in one argument::

    import fastroof
    from fastroof.backends.vidur.native import FastroofPredictorConfig
    from vidur.config import ClusterConfig, ReplicaConfig, SimulationConfig
    from vidur.simulator import Simulator

    plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels", tp=1)
    replica = ReplicaConfig("meta-llama/Llama-3-8B", num_pipeline_stages=1, tensor_parallel_size=plan.tp)
    cluster = ClusterConfig(replica_config=replica)
    config = SimulationConfig(
        cluster_config=cluster, execution_time_predictor_config=FastroofPredictorConfig.of(plan)
    )
    Simulator(config).run()

On the command line this module takes the place of ``vidur.main``, with one more set of options::

    python -m fastroof.backends.vidur.native --execution_time_predictor_config_type dummy
        --fastroof_predictor_config_model llama-3.1-8b --replica_config_num_pipeline_stages 1 ...

Names and units are those of the package vidur 0.0.26: terms of an ExecutionTime are ms a layer,
``pipeline_parallel_communication_time`` is ms a step, ``total_time`` is s.
"""

# No `from __future__ import annotations`: Vidur's command line reads the types of a config's fields.
import os
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from typing import Any, Final

from fastroof.backends.plan_facts import check_dense
from fastroof.backends.releases import warn_of_release
from fastroof.backends.vidur.terms import (
    COMPILE_OPTIONS,
    TERM_OF,
    PlanOptions,
    installed_vidur,
    option,
    register,
)
from fastroof.errors import BackendError
from fastroof.models import DenseModel
from fastroof.plan import StepPlan
from fastroof.units import US_PER_MS

try:
    from vidur._native.entities import ExecutionTime
    from vidur.config import BaseExecutionTimePredictorConfig
    from vidur.entities import KVParallelBatch
    from vidur.execution_time_predictor import BaseExecutionTimePredictor, ExecutionTimePredictorRegistry
    from vidur.types import ExecutionTimePredictorType
except ImportError as error:
    raise (SystemExit if __name__ == "__main__" else ImportError)(
        f"fastroof.backends.vidur.native needs the vidur of PyPI, and {installed_vidur()} ({error}): "
        "pip install vidur==0.0.26 (Python 3.11 to 3.13, 1.3 GB with what it needs), without a checkout on "
        "PYTHONPATH; for the source tree use fastroof.backends.vidur.tree"
    ) from None

warn_of_release("vidur/native.py")


_NO_LAYER_TERMS: Final = (0.0,) * 13
_TERMS: Final = (
    "attention_rope_execution_time",
    "attention_kv_cache_save_execution_time",
    "attention_decode_execution_time",
    "attention_prefill_execution_time",
    "attention_layer_pre_proj_execution_time",
    "attention_layer_post_proj_execution_time",
    "mlp_layer_up_proj_execution_time",
    "mlp_layer_down_proj_execution_time",
    "mlp_layer_act_execution_time",
    "attn_norm_time",
    "mlp_norm_time",
    "add_time",
    "tensor_parallel_communication_time",
)
# Vidur shows its own term for the KV write, but leaves it out of the sum
_TERM_OF: Final = TERM_OF | {"kv_write": "attention_rope_execution_time"}
_SAME_SIZE: Final = {
    "num_layers": "num_layers",
    "num_q_heads": "num_q_heads",
    "num_kv_heads": "num_kv_heads",
    "embedding_dim": "hidden",
    "mlp_hidden_dim": "intermediate",
}


@dataclass
class FastroofPredictorConfig(PlanOptions, BaseExecutionTimePredictorConfig):  # type: ignore[misc]
    """What a simulation asks for, to have its step times from fastroof.

    :meth:`of` takes a plan that is there; without it one is compiled from the fields, for the replica's
    ``tensor_parallel_size``. The fields that Vidur's own base adds, of profiles and their regressions,
    are not read, but for ``cache_dir``. How much KV cache there is stays Vidur's to say, which counts
    2 bytes a weight: ``CacheConfig(num_blocks=plan.memory.max_kv_tokens // 16)`` says it as the plan does.
    Its blocks are of all layers: if some keep a window of a sequence, more fits than it admits, and
    next to states ``plan.memory.tokens_beside_states`` of its largest batch are left.

    Attributes
    ----------
    model, gpu : str
        As for :func:`fastroof.compile_plan`.
    source : str
        Which source of the tables; empty for those that ship. ``max_num_batched_tokens`` and
        ``max_num_seqs`` must be no less than what the scheduler puts into a step.
    by_operator : bool
        Whether each step is broken down into Vidur's terms, for ``store_operation_metrics``; a call
        then takes some 150 us instead of 2 to 4.
    """

    # Vidur writes all that is in __dict__ to config.json, which a plan would not fit into.
    __slots__ = ("_plan",)

    model: str = option("llama-3.1-8b", "Preset, or path of a config.json.")
    gpu: str = option("h100", "GPU, or path of a gpu.toml.")
    source: str = option("", "Only this source of the tables.")
    by_operator: bool = option(False, "Break steps down for the operation metrics; slower.")

    @staticmethod
    def get_type() -> Any:
        """Vidur's unused type: ``dummy`` on the command line."""
        return ExecutionTimePredictorType.DUMMY

    @classmethod
    def of(cls, plan: StepPlan, **fields: Any) -> "FastroofPredictorConfig":
        """Use a plan that is compiled.

        Parameters
        ----------
        plan : StepPlan
            Of the replica's model and tensor-parallel size.
        **fields
            Others of the config's fields, as ``by_operator=True``.

        Returns
        -------
        FastroofPredictorConfig
            With the plan's names in its fields, and the hash of its rows for tables: config.json will
            say what was simulated.
        """
        config = cls(
            model=plan.model.name,
            gpu=plan.gpu.name,
            tables=plan.tables_hash or "datasheet",
            **{name: getattr(plan, name) for name in COMPILE_OPTIONS},
            **fields,
        )
        config._plan = plan
        return config

    def plan(self, tp: int) -> StepPlan:
        """Return the plan given, or compile the fields' for ``tp`` GPUs."""
        given: StepPlan | None = getattr(self, "_plan", None)
        return self.compiled(self.model, self.gpu, tp) if given is None else given


class FastroofPredictor:
    """Vidur's predictor: ``get_execution_time(batch, pipeline_stage)`` from a plan.

    Parameters
    ----------
    predictor_config : FastroofPredictorConfig
        Which plan.
    replica_config, cache_config : ReplicaConfig, CacheConfig
        Vidur's own; the plan must be of the replica's model and tensor-parallel size.

    Raises
    ------
    BackendError
        If the replica has several pipeline stages or KV-parallel groups, which no plan times, or the
        plan is of another model or tensor-parallel size.

    Notes
    -----
    A step is one term, the only one that Vidur neither multiplies by layers nor adds twice:
    ``pipeline_parallel_communication_time``. So ``total_time`` is the plan's time but for the rounding of
    us to ms and ms to s, and a step costs one call of ``plan.step_scalar``. With ``by_operator`` the
    terms of a layer are the plan's operators, and that term is what a step has once: embedding, last
    norm, LM head and what the engine adds. Vidur counts the all-reduce of a layer twice, so its term is
    half of both; residual adds are part of the norms, and ``add_time`` is 0.
    """

    def __init__(self, predictor_config: Any, replica_config: Any, cache_config: Any) -> None:
        plan = predictor_config.plan(replica_config.tensor_parallel_size)
        _check_replica(plan, replica_config)
        self.plan = plan
        self._layers = plan.model.num_layers
        self._step_us = plan.step_scalar
        self._by_operator = predictor_config.by_operator
        # the schedulers with deadlines keep a file of their own there
        self._cache_dir = predictor_config.cache_dir
        os.makedirs(self._cache_dir, exist_ok=True)

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> Any:
        """Time a step.

        Parameters
        ----------
        batch : Batch or KVParallelBatch
            Vidur's own.
        pipeline_stage : int
            0: there is one.

        Returns
        -------
        vidur._native.entities.ExecutionTime
            ``total_time`` is the step, s.

        Raises
        ------
        PlanRangeError
            If the step is larger than the plan.
        BackendError
            If the batch lists another number of KV lengths than of requests.
        """
        if isinstance(batch, KVParallelBatch):
            (batch,) = batch.batch_mapping.values()
        new_tokens = batch.num_q_tokens
        context_len = _context_len(batch, new_tokens)
        if self._by_operator:
            return self._operator_times(new_tokens, context_len)
        return ExecutionTime(
            self._layers, *_NO_LAYER_TERMS, self._step_us(new_tokens, context_len) / US_PER_MS
        )

    def _operator_times(self, new_tokens: list[int], context_len: list[int]) -> Any:
        step = self.plan.explain(zip(new_tokens, context_len, strict=True))
        layer_ms = dict.fromkeys(_TERMS, 0.0)
        for operator in step.operators:
            term = _TERM_OF.get(operator.role)
            if term is not None:
                layer_ms[term] += operator.total_us / self._layers / US_PER_MS
        layer_ms["tensor_parallel_communication_time"] /= 2
        terms = tuple(layer_ms.values())
        layers_ms = ExecutionTime(self._layers, *terms, 0.0).model_time_ms
        return ExecutionTime(self._layers, *terms, step.total_us / US_PER_MS - layers_ms)

    def to_dict(self) -> dict[str, str]:
        """Say what the times depend on: schedulers with deadlines keep theirs by a hash of it."""
        return {"fastroof": self.plan.version, "plan": sha256(self.plan.arena.tobytes()).hexdigest()}


def _context_len(batch: Any, new_tokens: list[int]) -> list[int]:
    """Tokens in the KV cache before the step, of each request.

    Schedulers with KV-parallel groups give the tokens processed before the step as ``num_kv_tokens``, the
    others those after it. Either way a decode's count has the token that the step before it produced,
    whose keys and values this step writes.
    """
    kv_tokens = batch.num_kv_tokens
    after_step = batch.num_active_kvp_groups is None
    if not batch.num_prefill_tokens:
        ahead = 1 + after_step
        return [count - ahead for count in kv_tokens]
    if len(kv_tokens) != len(new_tokens):
        raise BackendError(
            f"a batch of {len(new_tokens)} requests has {len(kv_tokens)} num_kv_tokens: the orca scheduler "
            "of vidur 0.0.26 leaves out those of new requests; another scheduler will do"
        )
    counts = zip(new_tokens, kv_tokens, batch.requests, strict=True)
    return [
        kv - after_step * new - (request is not None and request.is_prefill_complete)
        for new, kv, request in counts
    ]


def _check_replica(plan: StepPlan, replica: Any) -> None:
    for name in ("num_pipeline_stages", "kv_parallel_size"):
        if (size := getattr(replica, name)) != 1:
            raise BackendError(
                f"{name} is {size}: fastroof times tensor parallelism, and has no measured transfers between "
                f"stages or groups; set --replica_config_{name} 1"
            )
    if plan.tp != replica.tensor_parallel_size:
        raise BackendError(
            f"the plan has tp={plan.tp}, the replica tensor_parallel_size={replica.tensor_parallel_size}: "
            "give both the same"
        )
    check_dense(plan, "Vidur's replica")
    theirs, ours = replica.model_config, DenseModel.of(plan.model)
    differ = [
        f"{name} {getattr(theirs, name)} and {getattr(ours, own)}"
        for name, own in _SAME_SIZE.items()
        if getattr(theirs, name) != getattr(ours, own)
    ]
    if differ:
        raise BackendError(
            f"the replica runs {theirs.get_name()}, the plan {ours.name}, which is another model "
            f"({'; '.join(differ)}): name the replica's (--fastroof_predictor_config_model)"
        )


# Registered only for isinstance: a step is one call here, not Vidur's fifteen for its parts.
BaseExecutionTimePredictor.register(FastroofPredictor)
register(ExecutionTimePredictorRegistry, ExecutionTimePredictorType.DUMMY, FastroofPredictor, "Vidur")

if __name__ == "__main__":
    import_module("vidur.main").main()
