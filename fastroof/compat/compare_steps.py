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
    """One step: decodes of ``batch_size`` requests at ``tokens`` of kv_len, or a prompt of ``tokens``.

    Attributes
    ----------
    phase : str
        ``decode`` or ``prefill``.
    batch_size, tokens : int
        Requests; for decode the kv_len of each, the new token included, for prefill the new tokens.
    """

    phase: Literal["decode", "prefill"]
    batch_size: int
    tokens: int

    @property
    def new_tokens(self) -> int:
        """Rows of the step's GEMMs."""
        return self.batch_size if self.phase == "decode" else self.tokens


@dataclass(frozen=True)
class MethodTime:
    """One method's time of a step.

    Attributes
    ----------
    method : str
        One of ``METHODS``.
    components_us : mapping of str to float
        Time by component, all of ``COMPONENTS``, us; empty where the method has no answer.
    total_us : float
        The step, us; NaN where the method has no answer.
    why_not : str
        Why it has none; empty where it has.
    """

    method: str
    components_us: Mapping[str, float]
    total_us: float
    why_not: str = ""


@dataclass(frozen=True)
class Difference:
    """One cause of a difference of more than 10 % between a method and fastroof.

    Attributes
    ----------
    method, component : str
        Where the difference is.
    cause : str
        Name of the cause, or ``unexplained``.
    us : float
        What it adds to the component (or takes from it), us.
    sentence : str
        The cause in words, with the numbers of this case.
    """

    method: str
    component: str
    cause: str
    us: float
    sentence: str


@dataclass(frozen=True)
class ComparedStep:
    """A step, timed by every method.

    Attributes
    ----------
    step : Step
        The step.
    times : tuple of MethodTime
        One a method, in the order of ``METHODS``.
    differences : tuple of Difference
        Causes of every component's difference of more than 10 %, by method and component.
    """

    step: Step
    times: tuple[MethodTime, ...]
    differences: tuple[Difference, ...]

    def time(self, method: str) -> MethodTime:
        """One method's time."""
        return self.times[METHODS.index(method)]


@dataclass(frozen=True)
class Comparison:
    """Steps of one model on one GPU configuration, timed by every method.

    Attributes
    ----------
    model, gpu : str
        Names.
    layout : Layout
        How it is split over GPUs; steps are those of one attention-data-parallel rank.
    dtype : str
        Format of the layers' GEMMs.
    runtime : str
        What fastroof's times hold beside kernels: ``kernels``, which is nothing.
    constants : mapping of str to mapping
        By method, the hardware constants it was given.
    trees : mapping of str to str
        By method, where its tables are from.
    steps : tuple of ComparedStep
        Decodes, then prefills, as they were asked for.
    """

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
    """What the methods time a step with.

    Attributes
    ----------
    plan, datasheet : StepPlan
        fastroof's plans.
    tables : Tables
        The tables that ``plan`` is compiled from.
    model : ComparedModel
        Its sizes.
    dtype : str
        Format of the layers' GEMMs.
    infersim : InfersimTables
        Its tree.
    roofline_v2 : RooflineV2Tables or None
        Its tree; None where it has no answer.
    model_config, hardware : mapping
        What roofline V2 is given.
    hf_config : mapping
        What InferSim is given.
    own_trees : mapping of str to bool
        By method, whether its tree has the rows of ``tables``.
    infersim_dtype : str
        Format of the GEMMs whose MFUs InferSim's tree has, as their peak tells; empty where it does not.
    why_not : mapping of str to str
        By method, why it cannot represent the case.
    """

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
