"""Data of a comparison: steps, each method's time by component, and the known causes of differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from fastroof.compat.infersim import InfersimTables
from fastroof.compat.roofline_v2 import RooflineV2Tables
from fastroof.compat.roofline_v2.steps import NO_EXPERTS
from fastroof.errors import ModelError
from fastroof.models import Layout, ModelSpec
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.mlp import GatedMlp
from fastroof.operators.calls import Experts, Gemm
from fastroof.plan import StepPlan
from fastroof.plan.curves import DATASHEET_SOURCE, component_of
from fastroof.run import StepBatch
from fastroof.units import DTYPE_BYTES

LAYER_GEMMS: Final = ("qkv", "o", "gate_up", "down", "experts", "shared_gate_up", "shared_down")
INFERSIM_DTYPES: Final = ("bf16", "fp8", "fp8_block")
"""Formats that InferSim supports: two bytes per weight with the fp16 peak, or one with the fp8 peak."""


class ComparedModel(NamedTuple):
    """Sizes of a model whose layers are all identical."""

    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    experts: RoutedExperts | None

    @classmethod
    def of(cls, model: ModelSpec) -> ComparedModel:
        """Return a model's sizes."""
        if model.window is not None:
            raise ModelError(
                f"{model.name} attends within a window of {model.window} tokens, but the compared methods "
                "support full attention only; use compare(model.with_full_attention(), ...)"
            )
        kind = model.only_kind
        attention, mlp = kind.attention, kind.mlp
        if not (isinstance(attention, GroupedQueryAttention) and isinstance(mlp, GatedMlp | RoutedExperts)):
            raise ModelError(
                f"{model.name} cannot be compared: its layers are {kind.name}; all methods support only "
                "grouped-query attention over all tokens, with a gated MLP or with experts; "
                "fastroof.compat.infersim supports MLA"
            )
        return cls(
            model.num_layers,
            model.hidden,
            attention.num_q_heads,
            attention.num_kv_heads,
            attention.head_dim,
            mlp.intermediate,
            mlp if isinstance(mlp, RoutedExperts) else None,
        )


def gemm_dtype(plan: StepPlan) -> str:
    """Return the format of all GEMMs of a plan's layers except the router; several are joined by commas."""
    calls = (curve.operator for curve in plan.row_curves)
    dtypes = {call.dtype for call in calls if isinstance(call, Gemm | Experts) and call.role in LAYER_GEMMS}
    return ", ".join(sorted(dtypes))


def obstacles(model: ComparedModel, layout: Layout, dtype: str) -> dict[str, str]:
    """Return why a method cannot represent a case, by method; empty if it can."""
    roofline = ""
    if model.experts:
        roofline = f"{NO_EXPERTS}; and its tables have no MFUs of experts"
    elif dtype != "bf16":
        roofline = f"GEMMs and attention share one peak and one weight size: bf16, not {dtype}"
    infersim = ""
    if dtype not in INFERSIM_DTYPES:
        infersim = f"its GEMMs are all bf16 or all fp8, not {dtype}"
    elif model.experts and not model.experts.is_gated:
        infersim = "its experts have three projections, these two"
    elif model.experts and (layout.ep, layout.moe_tp) != (layout.dp, layout.tp):
        infersim = (
            f"it splits experts like attention: each over tp GPUs, and groups over the dp ranks; here "
            f"that is ep {layout.dp} with moe_tp {layout.tp}, not ep {layout.ep} with moe_tp {layout.moe_tp}"
        )
    return {"roofline_v2": roofline, "infersim": infersim}


def is_fp8(dtype: str) -> bool:
    """Return whether a format of GEMMs is an fp8 format."""
    return DTYPE_BYTES[dtype] < DTYPE_BYTES["bf16"]


COMPONENTS: Final = (
    "linear", "experts", "attention", "communication", "lm_head", "elementwise", "memory", "overhead",
)  # fmt: skip
"""Parts of a step. ``experts`` are routed and shared experts with their router; ``memory`` is the time of
roofline V2's bytes of the whole step beyond its FLOPs."""

REPORTED_FROM: Final = 0.1
"""Differences from this share of fastroof's time on are reported."""

_NO_LM_HEAD: Final = "no LM head"
_NO_NORMS: Final = "no norms, rotary embedding, KV write or activation"
_CLASS: Final = "one efficiency and launch time for every kernel of a class"

CAUSES: Final = {
    "roofline_v2": {
        "linear": "unfused, unsplit GEMMs over tp, at interpolated MFUs, with a floor of their bytes",
        "attention": "interpolated MFUs of the nearest measured heads; a prefill's square / 1.8",
        "communication": "no all-reduce",
        "lm_head": _NO_LM_HEAD,
        "elementwise": _NO_NORMS,
        "memory": "the bytes of the whole step, if they take longer than its FLOPs",
        "overhead": "100 us a layer over tp; the engine `kernels` has none",
    },
    "infersim": {
        "linear": "MFUs of the row below to 3 decimals, or a default; 1,024 GFLOP/s in a TFLOP/s",
        "experts": "even routing at one row's MFU, or a default; all of a GPU's experts are read; no router",
        "attention": "MFUs of one row to 3 decimals, or a default, with a floor of its KV; causal work / 1.8",
        "communication": "bytes at the link's rate without launches; one all-reduce a layer, and an exchange",
        "lm_head": _NO_LM_HEAD,
        "elementwise": _NO_NORMS,
        "overhead": "5 ms a decode step and 30 ms a prefill; the engine `kernels` has none",
    },
    "datasheet": dict.fromkeys(
        ("linear", "experts", "attention", "communication", "lm_head", "elementwise"), _CLASS
    ),
}  # fmt: skip
"""The cause of each method's difference, by component."""

METHODS: Final = ("fastroof", "roofline_v2", "infersim", "datasheet")
"""The methods in display order."""


@dataclass(frozen=True)
class Step:
    """One step: ``batch_size`` decodes at a kv_len of ``tokens``, or a prompt of ``tokens``."""

    phase: Literal["decode", "prefill"]
    batch_size: int
    tokens: int

    @property
    def new_tokens(self) -> int:
        """Rows of the step's GEMMs."""
        return self.batch_size if self.phase == "decode" else self.tokens


@dataclass(frozen=True)
class MethodTime:
    """One method's time of a step."""

    method: str
    components_us: Mapping[str, float]
    total_us: float
    why_not: str = ""


@dataclass(frozen=True)
class Difference:
    """A component in which a method differs from fastroof by more than 10 %."""

    method: str
    component: str
    us: float
    cause: str


def differences(own: MethodTime, other: MethodTime) -> list[Difference]:
    """Return the components in which a method differs from fastroof by more than 10 %."""
    apart_us = {name: other.components_us[name] - own.components_us[name] for name in COMPONENTS}
    return [
        Difference(other.method, name, us, CAUSES[other.method].get(name, "unexplained"))
        for name, us in apart_us.items()
        if abs(us) > REPORTED_FROM * own.components_us[name]
    ]


@dataclass(frozen=True)
class ComparedStep:
    """A step, timed by every method."""

    step: Step
    times: tuple[MethodTime, ...]
    differences: tuple[Difference, ...]

    def time(self, method: str) -> MethodTime:
        """Return one method's time."""
        return next(time for time in self.times if time.method == method)


@dataclass(frozen=True)
class Comparison:
    """Steps of one model on one GPU configuration, timed by every method."""

    model: str
    gpu: str
    layout: Layout
    dtype: str
    engine: str
    constants: Mapping[str, Mapping[str, float]]
    trees: Mapping[str, str]
    steps: tuple[ComparedStep, ...]

    @property
    def tp(self) -> int:
        """GPUs that share each layer's attention."""
        return self.layout.tp


@dataclass(frozen=True, eq=False)
class Case:
    """The inputs with which all methods time a step."""

    plan: StepPlan
    datasheet: StepPlan
    model: ComparedModel
    dtype: str
    infersim: InfersimTables
    roofline_v2: RooflineV2Tables | None
    model_config: Mapping[str, Any]
    hardware: Mapping[str, Any]
    hf_config: Mapping[str, Any]
    why_not: Mapping[str, str]

    @property
    def layout(self) -> Layout:
        """Layout of the model."""
        return self.plan.layout


def requests_of(step: Step) -> list[tuple[int, int]]:
    """Return the requests of a step as (new_tokens, context_len)."""
    if step.phase == "decode":
        return [(1, step.tokens - 1)] * step.batch_size
    return [(step.tokens, 0)] * step.batch_size


def plan_time(method: str, plan: StepPlan, step: Step) -> MethodTime:
    """Return the time of a step by component, from a plan."""
    requests = requests_of(step)
    components = dict.fromkeys(COMPONENTS, 0.0)
    of_role = {curve.operator.role: component_of(curve.operator) for curve in plan.row_curves}
    for part in plan.explain(requests).operators:
        name = "overhead" if part.role == "runtime" else of_role.get(part.role, "attention")
        components[name] += part.total_us
    total_us = float(plan.run(StepBatch.from_requests([requests])).latency_us[0])
    return MethodTime(method, components, total_us)


def modelled_components(plan: StepPlan, step: Step) -> list[str]:
    """Return the components of a step that are partly from the datasheet, in component order."""
    of_role = {curve.operator.role: component_of(curve.operator) for curve in plan.row_curves}
    parts = plan.explain(requests_of(step)).operators
    modelled = {of_role.get(part.role, "attention") for part in parts if part.source == DATASHEET_SOURCE}
    return [component for component in COMPONENTS if component in modelled]
