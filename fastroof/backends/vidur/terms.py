"""Terms, options and steps that the adapters of Vidur and of Frontier, which grew from it, share."""

# No `from __future__ import annotations`: the simulators make options of the annotations, as types.
import dataclasses
from typing import Any, Final

from fastroof.defaults import DEFAULT_ENGINE
from fastroof.errors import BackendError
from fastroof.operators.calls import Role
from fastroof.units import US_PER_S

TERM_OF: Final[dict[Role, str]] = {
    "attention_norm": "attn_norm_time",
    "qkv_quantise": "attention_layer_pre_proj_execution_time",
    "qkv": "attention_layer_pre_proj_execution_time",
    "qk_norm": "attention_rope_execution_time",
    "rope": "attention_rope_execution_time",
    "kv_write": "attention_kv_cache_save_execution_time",
    "decode_attention": "attention_decode_execution_time",
    "prefill_attention": "attention_prefill_execution_time",
    "o_quantise": "attention_layer_post_proj_execution_time",
    "o": "attention_layer_post_proj_execution_time",
    "mlp_norm": "mlp_norm_time",
    "gate_up_quantise": "mlp_layer_up_proj_execution_time",
    "gate_up": "mlp_layer_up_proj_execution_time",
    "activation": "mlp_layer_act_execution_time",
    "down_quantise": "mlp_layer_down_proj_execution_time",
    "down": "mlp_layer_down_proj_execution_time",
    "attention_allreduce": "tensor_parallel_communication_time",
    "mlp_allreduce": "tensor_parallel_communication_time",
    # of a mixture of experts, which Vidur has no terms of its own for
    "router": "mlp_layer_up_proj_execution_time",
    "experts": "mlp_layer_up_proj_execution_time",
    "shared_gate_up_quantise": "mlp_layer_up_proj_execution_time",
    "shared_gate_up": "mlp_layer_up_proj_execution_time",
    "shared_gate": "mlp_layer_up_proj_execution_time",
    "shared_activation": "mlp_layer_act_execution_time",
    "shared_down_quantise": "mlp_layer_down_proj_execution_time",
    "shared_down": "mlp_layer_down_proj_execution_time",
    "experts_down_quantise": "mlp_layer_up_proj_execution_time",
    "experts_down": "mlp_layer_up_proj_execution_time",
    "experts_up_quantise": "mlp_layer_down_proj_execution_time",
    "experts_up": "mlp_layer_down_proj_execution_time",
    # of latent, sparse and linear attention
    "q_down_quantise": "attention_layer_pre_proj_execution_time",
    "q_down": "attention_layer_pre_proj_execution_time",
    "q_up_quantise": "attention_layer_pre_proj_execution_time",
    "q_up": "attention_layer_pre_proj_execution_time",
    "kv_up_quantise": "attention_layer_pre_proj_execution_time",
    "kv_up": "attention_layer_pre_proj_execution_time",
    "latent_products": "attention_layer_pre_proj_execution_time",
    "index": "attention_layer_pre_proj_execution_time",
    "state_in_quantise": "attention_layer_pre_proj_execution_time",
    "state_in": "attention_layer_pre_proj_execution_time",
    "state_conv": "attention_rope_execution_time",
    "state_gate": "attention_layer_post_proj_execution_time",
    "state_out_quantise": "attention_layer_post_proj_execution_time",
    "state_out": "attention_layer_post_proj_execution_time",
    "hyper_connection": "attn_norm_time",
    "attention_gate": "attention_layer_post_proj_execution_time",
    "qk_norm_allreduce": "tensor_parallel_communication_time",
    "attention_scatter": "tensor_parallel_communication_time",
    "experts_gather": "tensor_parallel_communication_time",
    "experts_dispatch": "tensor_parallel_communication_time",
    "experts_combine": "tensor_parallel_communication_time",
    "experts_scatter": "tensor_parallel_communication_time",
    "tokens_gather": "tensor_parallel_communication_time",
    "kv_gather": "tensor_parallel_communication_time",
}
"""Vidur's term of each call of a plan, by its role, that runs in every layer."""

NO_TERMS: Final = dict.fromkeys(
    (
        *TERM_OF.values(),
        "add_time",  # part of the fused norms
        "pipeline_parallel_communication_time",
        "schedule_time",
        "sampler_e2e_time",
        "prepare_inputs_e2e_time",
        "process_model_outputs_time",
        "ray_comm_time",
    ),
    0.0,
)
"""Every term of a source tree's ExecutionTime, at 0."""


def option(default: Any, help_text: str) -> Any:
    """Return a field that is an option of a simulator's command line."""
    return dataclasses.field(default=default, metadata={"help": help_text})


COMPILE_OPTIONS: Final = ("dtype", "kv_dtype", "engine", "max_num_batched_tokens", "max_num_seqs")
"""Options that are arguments of :func:`fastroof.compile_plan` and attributes of its plans."""


@dataclasses.dataclass
class PlanOptions:
    """Options of a predictor that compiles a plan for a simulated replica.

    Attributes
    ----------
    model : str
        A preset of fastroof or the path of a config.json; empty for the replica's model.
    gpu : str
        A GPU of fastroof or the path of a gpu.toml; empty for the replica's device.
    tables : str
        Folder of measured tables instead of the shipped, empty for those.
    dtype, kv_dtype, engine : str
        As :func:`fastroof.compile_plan` takes them.
    max_num_batched_tokens, max_num_seqs : int
        The largest batch to time.
    """

    model: str = option("", "Preset or config.json, instead of the replica's model.")
    gpu: str = option("", "GPU of fastroof, instead of the replica's device.")
    tables: str = option("", "Folder of measured tables.")
    dtype: str = option("auto", "Linear layers: auto (the checkpoint's), bf16, fp8, fp8_block, ...")
    kv_dtype: str = option("auto", "KV cache: auto (the engine's own), bf16 or fp8.")
    engine: str = option(DEFAULT_ENGINE, "What an engine adds to its kernels.")
    max_num_batched_tokens: int = option(8192, "Most tokens of a batch.")
    max_num_seqs: int = option(1024, "Most requests of a batch.")

    def compile_options(self) -> dict[str, Any]:
        """Return the arguments of :func:`fastroof.compile_plan` that have the same name here."""
        return {name: getattr(self, name) for name in COMPILE_OPTIONS}


class LazyTerms:
    """A step whose total is known at once, and whose terms are computed when one of them is first read."""

    _id: int
    _total_us: float
    _has_terms = False

    @property
    def total_time(self) -> float:
        """The whole step, s."""
        return self._total_us / US_PER_S

    def _set_terms(self) -> None:
        """Set the terms by the constructor of the simulator's class."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # called only for attributes that are not set yet
        if name.startswith("__") or self._has_terms or "_total_us" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._has_terms = True
        own_id = self._id
        self._set_terms()
        self._id = own_id
        return getattr(self, name)


def register(registry: Any, kind: Any, predictor: type, program: str) -> None:
    """Register a predictor for ``DUMMY``; a key that is taken keeps its class, silently."""
    registry.register(kind, predictor)
    if registry.get_class(kind) is not predictor:
        raise BackendError(
            f"this {program} already has a predictor for DUMMY, {registry.get_class(kind).__name__}: "
            "ExecutionTimePredictorRegistry.unregister(ExecutionTimePredictorType.DUMMY) removes it"
        )
