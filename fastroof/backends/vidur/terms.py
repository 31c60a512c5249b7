"""Terms, options and steps that the adapters of Vidur and of Frontier, which grew from it, share."""

# No `from __future__ import annotations`: the simulators make options of the annotations, as types.
import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from fastroof.config import load_gpu
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.errors import BackendError
from fastroof.plan import StepPlan, compile_plan
from fastroof.tables import load_tables
from fastroof.units import US_PER_S

TERM_OF: Final[dict[str, str]] = {
    role: term
    for term, roles in {
        "attn_norm_time": "attention_norm hyper_connection",
        "attention_layer_pre_proj_execution_time": (
            "qkv_quantise qkv q_down_quantise q_down q_up_quantise q_up kv_up_quantise kv_up "
            "latent_products index state_in_quantise state_in engram engram_quantise engram_in"
        ),
        "attention_rope_execution_time": "qk_norm rope state_conv",
        "attention_kv_cache_save_execution_time": "kv_write",
        "attention_decode_execution_time": "decode_attention",
        "attention_prefill_execution_time": "prefill_attention",
        "attention_layer_post_proj_execution_time": (
            "o_quantise o state_gate state_out_quantise state_out attention_gate"
        ),
        "mlp_norm_time": "mlp_norm",
        "mlp_layer_up_proj_execution_time": (
            "gate_up_quantise gate_up router experts shared_gate_up_quantise shared_gate_up shared_gate "
            "experts_down_quantise experts_down"
        ),
        "mlp_layer_act_execution_time": "activation shared_activation",
        "mlp_layer_down_proj_execution_time": (
            "down_quantise down shared_down_quantise shared_down experts_up_quantise experts_up"
        ),
        "tensor_parallel_communication_time": (
            "attention_allreduce mlp_allreduce qk_norm_allreduce attention_scatter experts_gather "
            "experts_dispatch experts_combine experts_scatter tokens_gather kv_gather engram_allreduce"
        ),
    }.items()
    for role in roles.split()
}
"""Vidur's term of each call of a plan, by its role, that runs in every layer; experts count as an MLP."""

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


def installed_vidur() -> str:
    """Name the vidur that is imported. Trees have no ``__init__.py``: any package of that name hides them."""
    spec = find_spec("vidur")
    if spec is None or not spec.submodule_search_locations:
        return "no vidur is installed"
    folder = Path(spec.submodule_search_locations[0])
    return f"{folder} is {'the vidur of PyPI' if any(folder.glob('_native*')) else 'a source tree'}"


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
    kv_dtype: str = option("auto", "KV cache: auto (the engine's own), bf16, fp8, nvfp4, ...")
    engine: str = option(DEFAULT_ENGINE, "What an engine adds to its kernels.")
    max_num_batched_tokens: int = option(8192, "Most tokens of a batch.")
    max_num_seqs: int = option(1024, "Most requests of a batch.")

    def compiled(self, model: Any, device: str, tp: int, **options: Any) -> StepPlan:
        """Compile the plan of a replica, whose model and device count unless an option names others."""
        gpu = load_gpu(self.gpu or device)
        tables: Any = self.tables or gpu.name
        if tables != "datasheet":
            tables = load_tables(tables, gpu=gpu.name, source=getattr(self, "source", None) or None)
        given = {name: getattr(self, name) for name in COMPILE_OPTIONS} | options
        return compile_plan(self.model or model, gpu, tables, tp=tp, **given)


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
