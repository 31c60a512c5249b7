"""What a comparison consists of: steps, each method's time of them by component, and reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fastroof.compat.compare_models import ComparedModel
from fastroof.compat.infersim import InfersimTables
from fastroof.compat.roofline_v2 import RooflineV2Tables
from fastroof.models import Layout
from fastroof.plan import StepPlan
from fastroof.tables import Tables

__all__ = [
    "COMPONENTS",
    "METHODS",
    "Case",
    "ComparedStep",
    "Comparison",
    "Difference",
    "MethodTime",
    "Step",
]

COMPONENTS: Final = (
    "linear", "experts", "attention", "communication", "lm_head", "elementwise", "memory", "overhead",
)  # fmt: skip
"""Parts of a step. ``experts`` are routed and shared ones, with their router; ``memory`` is what
roofline V2's bytes of the whole step take beyond its FLOPs."""

METHODS: Final = ("fastroof", "roofline_v2", "infersim", "datasheet")
"""The methods, in the order in which they are shown."""


@dataclass(frozen=True)
class Step:
    """One step: decodes of ``batch_size`` requests at ``tokens`` of kv_len, or a prompt of ``tokens``."""

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
    """One cause of a difference of more than 10 % between a method and fastroof."""

    method: str
    component: str
    cause: str
    us: float
    sentence: str


@dataclass(frozen=True)
class ComparedStep:
    """A step, timed by every method."""

    step: Step
    times: tuple[MethodTime, ...]
    differences: tuple[Difference, ...]

    def time(self, method: str) -> MethodTime:
        """One method's time."""
        return self.times[METHODS.index(method)]


@dataclass(frozen=True)
class Comparison:
    """Steps of one model on one GPU configuration, timed by every method."""

    model: str
    gpu: str
    layout: Layout
    dtype: str
    runtime: str
    constants: Mapping[str, Mapping[str, float]]
    trees: Mapping[str, str]
    steps: tuple[ComparedStep, ...]

    @property
    def tp(self) -> int:
        """GPUs that share each layer's attention."""
        return self.layout.tp


@dataclass(frozen=True, eq=False)
class Case:
    """What the methods time a step with."""

    plan: StepPlan
    datasheet: StepPlan
    tables: Tables
    model: ComparedModel
    dtype: str
    infersim: InfersimTables
    roofline_v2: RooflineV2Tables | None
    model_config: Mapping[str, Any]
    hardware: Mapping[str, Any]
    hf_config: Mapping[str, Any]
    own_trees: Mapping[str, bool] = field(default_factory=dict)
    infersim_dtype: str = ""
    why_not: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """How the model is split."""
        return self.plan.layout
