r"""Frontier, the simulator that grew from Vidur's tree: a plan as its execution time predictor.

Import this module before Frontier reads its command line, or run it in place of ``frontier.main``::

    python -m fastroof.backends.frontier ...

The predictor takes the place of ``DUMMY``, for which Frontier registers none: it is chosen if ``dummy`` is
the type of an ``execution_time_predictor_config``.

Dense models are timed in the clusters MONOLITHIC, PREFILL and DECODE, in which Frontier asks once a step.
What a plan is not asked for as a whole step is refused: experts, which Frontier asks for layer by layer with
the tokens that it routed to each; DECODE_ATTN and DECODE_FFN, likewise; pipeline stages; steps that verify
draft tokens. KV transfers stay those of Frontier's own ``kv_cache_transfer_config``.

Interface: NetX-lab/Frontier (MIT) at a4b22df, which it was run with: frontier/execution_time_predictor,
frontier/entities, frontier/scheduler/replica_stage_scheduler, frontier/metrics, frontier/config.
"""

# No `from __future__ import annotations`: Frontier makes options of the annotations, which must be types.
import dataclasses
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, Optional  # noqa: F401  Frontier evaluates inherited annotations in this module

from fastroof.backends.vidur.terms import NO_TERMS, TERM_OF, LazyTerms, PlanOptions, option, register
from fastroof.errors import BackendError
from fastroof.plan import StepPlan
from fastroof.units import US_PER_MS

try:
    _types: Any = import_module("frontier.types")
    _config: Any = import_module("frontier.config")
    _entities: Any = import_module("frontier.entities")
    _predictors: Any = import_module("frontier.execution_time_predictor")
    _DUMMY: Final = _types.ExecutionTimePredictorType.DUMMY
    _Cluster: Final = _types.ClusterType
    _Registry: Final = _predictors.ExecutionTimePredictorRegistry
    # asked for here, so that a frontier without them is refused below
    _config.BaseExecutionTimePredictorConfig, _entities.ExecutionTime  # noqa: B018
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"{error}: fastroof.backends.frontier needs Frontier's source tree on PYTHONPATH"
    ) from error


_NO_TERMS: Final = NO_TERMS | dict.fromkeys(
    ("expert_parallel_communication_time", "moe_gating_time", "moe_shuffling_time"), 0.0
)


@dataclasses.dataclass
class FastroofExecutionTimePredictorConfig(PlanOptions, _config.BaseExecutionTimePredictorConfig):  # type: ignore[misc]
    """Options of the predictor: ``--fastroof_execution_time_predictor_config_<name>`` on the command line.

    ``enable_dummy_mode`` is Frontier's own: true, so that separate clusters train no models in addition to
    this predictor.
    """

    enable_dummy_mode: bool = option(True, "Train no models; left true.")

    @staticmethod
    def get_type() -> Any:
        """Return the member of Frontier's enumeration that this stands for."""
        return _DUMMY


class StepExecutionTime(LazyTerms, _entities.ExecutionTime):  # type: ignore[misc]
    """A step as Frontier's ExecutionTime: the total at once, the terms when one of them is first read.

    ``total_time`` is the plan's step in seconds, rounded once, and so are ``model_time`` and
    ``diagnostic_total_time``: all of it is the GPU's. Terms (ms) are those of one layer, the all-reduces at
    their mean; embedding, last norm, LM head and what the engine's profile adds are in ``sampler_e2e_time``.
    """

    def __init__(self, plan: StepPlan, new_tokens: Sequence[int], context_len: Sequence[int]) -> None:
        self._id = _entities.ExecutionTime.generate_id()
        self._plan = plan
        self._new_tokens = new_tokens
        self._context_len = context_len
        self._total_us = plan.step_scalar(new_tokens, context_len)

    @property
    def model_time(self) -> float:
        """The whole step, s."""
        return self.total_time

    @property
    def diagnostic_total_time(self) -> float:
        """The whole step, s: Frontier's own would count ``sampler_e2e_time`` twice."""
        return self.total_time

    def _set_terms(self) -> None:
        layers = self._plan.model.num_layers
        super().__init__(layers, is_moe=False, **self._terms_ms(layers))

    def _terms_ms(self, layers: int) -> dict[str, float]:
        terms = dict(_NO_TERMS)
        in_layers_us = 0.0
        requests = zip(self._new_tokens, self._context_len, strict=True)
        for operator in self._plan.explain(requests).operators:
            term = TERM_OF.get(operator.role)
            if term is not None:
                terms[term] += operator.total_us / (US_PER_MS * layers)
                in_layers_us += operator.total_us
        terms["tensor_parallel_communication_time"] /= 2.0  # counted after attention and after the MLP
        terms["sampler_e2e_time"] = max(0.0, self._total_us - in_layers_us) / US_PER_MS
        return terms


class FastroofExecutionTimePredictor:
    """What Frontier's stage schedulers ask how long a batch takes.

    Parameters
    ----------
    predictor_config : FastroofExecutionTimePredictorConfig
        Options of the plan.
    replica_config : frontier.config.ReplicaConfig
        Its model, device, attn_tensor_parallel_size, attn_data_parallel_size and num_pipeline_stages.
    cluster_type : frontier.types.ClusterType, optional
        MONOLITHIC, PREFILL or DECODE; what else Frontier passes is not read.

    Raises
    ------
    BackendError
        For experts, pipeline stages, data parallelism, the clusters DECODE_ATTN and DECODE_FFN, or if the
        plan's model has another number of layers than the replica's.
    FastroofError
        If there is no such plan: see :func:`fastroof.compile_plan`.

    Attributes
    ----------
    plan : StepPlan
        What times a batch.
    """

    def __init__(
        self, predictor_config: Any, replica_config: Any, *_: Any, cluster_type: Any = None, **_others: Any
    ) -> None:
        _refuse_cluster(cluster_type)
        for name in ("num_pipeline_stages", "attn_data_parallel_size"):
            if (size := getattr(replica_config, name)) != 1:
                raise BackendError(
                    f"{name}={size}: Frontier asks for a part of the step that a plan does not time; "
                    f"use {name}=1 with attn_tensor_parallel_size"
                )
        if replica_config.model_config.is_moe:
            raise BackendError(
                f"{replica_config.model_name} has experts: Frontier asks for their layers one by one, with "
                "the tokens that it routed to each expert, and a plan times whole steps; use a dense model"
            )
        self.plan = predictor_config.compiled(
            replica_config.model_name, replica_config.device, replica_config.attn_tensor_parallel_size
        )
        layers, wanted = self.plan.model.num_layers, replica_config.model_config.num_layers
        if layers != wanted:
            raise BackendError(
                f"{self.plan.model.name} has {layers} layers, and the replica's {replica_config.model_name} "
                f"{wanted}: Frontier plans memory by the replica's; name the same model in both"
            )
        self._num_layers_per_pipeline_stage = layers  # read by Frontier's schedulers

    def predict_stage_execution_time(
        self, batch: Any, stage_id: int, cluster_type: Any, num_layers: int = 1, layer_id: int = 0
    ) -> StepExecutionTime:
        """Time a batch of Frontier's.

        Parameters
        ----------
        batch : frontier.entities.Batch
            Its ``num_tokens`` and ``requests``.
        stage_id, layer_id : int
            0, the only stage, and its first layer.
        cluster_type : frontier.types.ClusterType
            Which cluster asks.
        num_layers : int
            All layers.

        Returns
        -------
        StepExecutionTime
            Its ``total_time`` is ``plan.step_scalar`` of the batch, s.

        Raises
        ------
        BackendError
            If only some layers are asked for, or requests verify draft tokens.
        PlanRangeError
            If the batch is larger than max_num_batched_tokens or max_num_seqs.

        Notes
        -----
        MONOLITHIC counts the first output token as processed when the prefill ends, before it went through
        the model, so a decode's context is one less; DECODE does not count it.
        """
        _refuse_cluster(cluster_type)
        if num_layers != self._num_layers_per_pipeline_stage:
            raise BackendError(
                f"num_layers={num_layers} of {self._num_layers_per_pipeline_stage}: a plan times whole steps"
            )
        ahead = 1 if cluster_type == _Cluster.MONOLITHIC else 0
        context_len = []
        for request in batch.requests:
            if request.spec_decode_enabled:
                raise BackendError(
                    "a request verifies draft tokens: Frontier does not tell them from a chunk of a prompt; "
                    "disable speculative_decoding_config"
                )
            processed = request.num_processed_tokens
            context_len.append(processed - (ahead if processed > request.num_prefill_tokens else 0))
        return StepExecutionTime(self.plan, batch.num_tokens, context_len)


def _refuse_cluster(cluster_type: Any) -> None:
    if cluster_type in (_Cluster.DECODE_ATTN, _Cluster.DECODE_FFN):
        raise BackendError(
            f"cluster {cluster_type.name}: Frontier asks for attention and MLP of one layer apart, and a "
            "plan times whole steps; use co-location, or prefill-decode disaggregation (PREFILL and DECODE)"
        )


register(_Registry, _DUMMY, FastroofExecutionTimePredictor, "Frontier")

if __name__ == "__main__":
    import_module("frontier.main").main()
