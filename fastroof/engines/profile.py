"""What is known of a serving engine: what it adds to its kernels, how it schedules, how it keeps memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from fastroof.checks import is_number, whole_number
from fastroof.engines.layouts import ANY_LAYOUT, LayoutRules
from fastroof.engines.memory import DATASHEET_MEMORY, KV_RESERVATIONS, KvMemory
from fastroof.engines.mixed_attention import MixedAttention
from fastroof.engines.serving_errors import NO_ERRORS, ServingErrors
from fastroof.engines.versions import check_range, holds_for, is_version
from fastroof.errors import PlanError

__all__ = [
    "FP8_SCALES",
    "GEMM_SMOOTHINGS",
    "KV_RESERVATIONS",
    "STEP_ORDERS",
    "CostForm",
    "EngineProfile",
    "KernelChoices",
    "KvMemory",
    "LayerCost",
    "NotFitted",
    "OperatorKernel",
    "Scheduling",
    "StepCosts",
]

GEMM_SMOOTHINGS: Final = ("none", "median3")
FP8_SCALES: Final = ("dynamic", "static")
SHARED_EXPERTS: Final = ("apart", "beside")
LATENT_ATTENTION: Final = ("whole", "parts")
STEP_ORDERS: Final = ("mixed", "prefill_first")
"""Whether prompts share steps with decodes, or run ahead of them in steps of their own."""

CHOSEN: Final = ("form", "gemm_smoothing", "fp8_scales")
"""What rows may choose when costs are fitted."""

LAYOUT_KEYS: Final = ("tp", "pp", "dp", "moe_tp", "ep")
MOST: Final = 2**20
"""Most tokens or requests that a step holds."""


def _check_number(name: str, value: Any) -> float:
    if not is_number(value) or value < 0:
        raise PlanError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def _check_size(name: str, value: Any) -> None:
    whole_number(name, value, most=MOST, error=PlanError)


def _check_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise PlanError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise PlanError(f"{name} must be a text, got {value!r}")


@dataclass(frozen=True)
class LayerCost:
    """What a layer of one architecture takes beside its kernels: kernels of it that no table has.

    Attributes
    ----------
    architecture : str
        Hugging Face class of the models: ``"GlmMoeDsaForCausalLM"``.
    layer_us : float
        Added to every step for each layer, us.
    versions : str
        Of the engine, such as ``>=0.5.9,<0.5.10``; empty for all of its profile's.
    evidence : str
        On which runs it was found, and how well it held on those of another GPU.
    """

    architecture: str
    layer_us: float
    versions: str = ""
    evidence: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no cost of an architecture."""
        for key in ("architecture", "versions", "evidence"):
            _check_text(key, getattr(self, key))
        if not self.architecture:
            raise PlanError("a cost of layers needs the architecture that it is of")
        object.__setattr__(self, "layer_us", _check_number("layer_us", self.layer_us))
        check_range(self.versions)


@dataclass(frozen=True)
class StepCosts:
    """What a step costs beside its kernels: ``max(kernels + added, floor x layers)``.

    All that is constant within a plan, as the costs of its layers and all-reduces, is one number of it.

    Attributes
    ----------
    step_us : float
        Added to every step, us: scheduling, input preparation, launching a CUDA graph.
    sequence_us : float
        Added for every sequence whose logits a step needs, us: sampling, detokenising, bookkeeping.
    prefill_us : float
        Added to a step that holds prefill, us.
    prefill_floor_layer_us : float
        A step that holds prefill takes at least this a layer, us: kernels that are launched one by one,
        without a CUDA graph, are not faster than the host.
    allreduce_us : float
        Added for every all-reduce of a step, us: GPUs that wait for each other.
    layer_us : float
        Added to every step for each layer, us: launching its kernels from the host.
    prefill_layer_us : float
        Added to a step that holds prefill for each layer, us: the same where only decodes run in CUDA
        graphs.
    residual : float
        Relative standard error that is left on models which a fit has not seen; 0 where unknown.
    """

    step_us: float = 0.0
    sequence_us: float = 0.0
    prefill_us: float = 0.0
    prefill_floor_layer_us: float = 0.0
    allreduce_us: float = 0.0
    layer_us: float = 0.0
    prefill_layer_us: float = 0.0
    residual: float = 0.0
    layers: tuple[LayerCost, ...] = ()

    def __post_init__(self) -> None:
        """Refuse costs that are no costs, in profiles that were built or changed by hand too."""
        for cost in fields(self):
            if cost.name != "layers":
                object.__setattr__(self, cost.name, _check_number(cost.name, getattr(self, cost.name)))
        object.__setattr__(self, "layers", tuple(self.layers))

    def of_step_us(self, architecture: str, layers: float, allreduces: int) -> float:
        """What is added to every step of a model, us: its sequences and prompts aside.

        Of an architecture's costs in several versions the last counts: the newest.

        Examples
        --------
        >>> costs = StepCosts(step_us=100.0, allreduce_us=2.0, layers=(LayerCost("Some", 5.0),))
        >>> costs.of_step_us("Some", 10.0, 20), costs.of_step_us("Other", 10.0, 20)
        (190.0, 140.0)
        """
        own_us = next(
            (one.layer_us for one in reversed(self.layers) if one.architecture == architecture), 0.0
        )
        return self.step_us + self.allreduce_us * allreduces + (self.layer_us + own_us) * layers

    def of_prefill_us(self, layers: float) -> float:
        """What is added to a step that holds prefill, us."""
        return self.prefill_us + self.prefill_layer_us * layers


@dataclass(frozen=True)
class Scheduling:
    """What an engine puts into a step, by its own defaults.

    Attributes
    ----------
    order : str
        ``mixed``: prompts share steps with decodes; ``prefill_first``: prompts run in steps of their own, and
        decodes only when none waits.
    chunked_prefill : bool
        Whether prompts are cut where a step has no room for the whole.
    max_num_batched_tokens : int
        Tokens that a step holds at most; of prompts, where they run first.
    max_num_seqs : int
        Requests that run at once at most.
    """

    order: str = "mixed"
    chunked_prefill: bool = True
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024

    def __post_init__(self) -> None:
        """Refuse what is no schedule."""
        _check_one_of("order", self.order, STEP_ORDERS)
        if not isinstance(self.chunked_prefill, bool):
            raise PlanError(f"chunked_prefill must be true or false, got {self.chunked_prefill!r}")
        _check_size("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_size("max_num_seqs", self.max_num_seqs)


@dataclass(frozen=True)
class OperatorKernel:
    """Which measured kernel an engine runs for an operator, where.

    Attributes
    ----------
    operator : str
        As tables call it, such as ``gemm``.
    versions : str
        Of which versions of the engine, a range within the profile's; empty for all of them. One with a range
        counts in a profile that was loaded for a version, as ``vllm-0.17.0``.
    gpu, format : str
        Of which GPU, and of linear layers of which dtype; empty for any.
    architecture : str
        Of which models: a Hugging Face class, such as ``MiniMaxM2ForCausalLM``; empty for any.
    layout : tuple of (str, int)
        Of which sizes of the layout, such as ``("tp", 8)``; those that are not named may be any. In a
        TOML a table, ``{tp = 8}``.
    source : str
        The source of the tables that measured it; empty where the tables' own choice does.
    required : bool
        Whether tables that serve another source's rows are refused; else they stand for it.
    shared_experts : str
        Of the operator ``moe``: how shared experts run with these kernels, where not as
        :class:`KernelChoices` says; empty where so.
    engine : str
        The engine whose measured kernels stand for it, whatever their source is called.
    reason : str
        Why they do, where they are another engine's.
    version, dtype, kernel : str
        Of the library, that the kernel computes in, and its name: what a reader can check a source by.
    """

    operator: str
    gpu: str = ""
    format: str = ""
    layout: tuple[tuple[str, int], ...] = ()
    source: str = ""
    engine: str = ""
    reason: str = ""
    version: str = ""
    dtype: str = ""
    kernel: str = ""
    versions: str = ""
    architecture: str = ""
    required: bool = True
    shared_experts: str = ""

    def __post_init__(self) -> None:
        """Refuse what names no kernel."""
        for key in fields(self):
            if key.name not in ("layout", "required"):
                _check_text(key.name, getattr(self, key.name))
        if not self.operator:
            raise PlanError("a kernel needs the operator that it is of")
        if not isinstance(self.required, bool):
            raise PlanError(f"required must be true or false, got {self.required!r}")
        if self.shared_experts:
            _check_one_of("shared_experts", self.shared_experts, SHARED_EXPERTS)
        check_range(self.versions)
        try:
            sizes = tuple(dict(self.layout).items())
        except (TypeError, ValueError):
            raise PlanError(f"layout must be a table such as {{tp = 8}}, got {self.layout!r}") from None
        for name, size in sizes:
            _check_one_of("a key of layout", name, LAYOUT_KEYS)
            _check_size(f"layout {name}", size)
        object.__setattr__(self, "layout", sizes)

    def is_for(
        self, operator: str, gpu: str, dtype: str, layout: Mapping[str, int], architecture: str = ""
    ) -> bool:
        """Whether it is run for an operator on a GPU, in a format and layout, by models of a class."""
        return (
            self.operator == operator
            and self.versions == ""
            and self.gpu in ("", gpu)
            and self.format in ("", dtype)
            and self.architecture in ("", architecture)
            and all(layout.get(name, 1) == size for name, size in self.layout)
        )

    def of_version(self, version: str) -> OperatorKernel | None:
        """Return the kernel as a version of the engine has it; None if its range does not hold it."""
        if not self.versions:
            return self
        return replace(self, versions="") if holds_for(self.versions, version) else None


@dataclass(frozen=True)
class KernelChoices:
    """Which kernels an engine runs.

    Attributes
    ----------
    gemm_smoothing : str
        How small bf16 GEMMs are smoothed along m before they are summed: none or median3.
    fp8_scales : str
        Whether fp8 GEMMs find the scale of their input (dynamic) or know it (static).
    shared_experts : str
        Whether shared experts have a time of their own (apart), or run beside the routed ones in steps of
        decodes, which then take as long as the longer of both (beside).
    latent_attention : str
        How blocks of latent attention are timed: as they were measured, projections and all, where the tables
        have sound ones (whole), or projections, absorbed products and attention each by itself (parts).
    engines : tuple of str
        Whose measured kernels stand for its own where a GPU has none of its own, the nearest first; its own
        always come first.
    operators : tuple of OperatorKernel
        Operators whose kernel is known; of several that apply the first counts. A plan reads them from the
        source or engine that is named, and refuses tables that serve a named source's from another.
    mixed_attention : tuple of MixedAttention
        How long decodes attend at least in steps that prefill too, by GPU; of several that apply the first
        counts, and where none does decodes take as long as by themselves.
    """

    gemm_smoothing: str = "none"
    fp8_scales: str = "dynamic"
    shared_experts: str = "apart"
    latent_attention: str = "parts"
    engines: tuple[str, ...] = ()
    operators: tuple[OperatorKernel, ...] = ()
    mixed_attention: tuple[MixedAttention, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be chosen."""
        if isinstance(self.engines, str) or not all(isinstance(name, str) for name in self.engines):
            raise PlanError(f"engines must be a list of names, got {self.engines!r}")
        object.__setattr__(self, "engines", tuple(self.engines))
        _check_one_of("gemm_smoothing", self.gemm_smoothing, GEMM_SMOOTHINGS)
        _check_one_of("fp8_scales", self.fp8_scales, FP8_SCALES)
        _check_one_of("shared_experts", self.shared_experts, SHARED_EXPERTS)
        _check_one_of("latent_attention", self.latent_attention, LATENT_ATTENTION)
        object.__setattr__(self, "operators", tuple(self.operators))
        object.__setattr__(self, "mixed_attention", tuple(self.mixed_attention))

    def mixed_attention_ns(self, gpu: str, head_dim: int, kv_dtype: str) -> float:
        """Return what decodes take at least beside prefill, ns a query head, KV token and layer; or 0."""
        known = (one.ns for one in self.mixed_attention if one.is_for(gpu, head_dim, kv_dtype))
        return next(known, 0.0)

    def of(
        self, operator: str, gpu: str, dtype: str, layout: Mapping[str, int], architecture: str = ""
    ) -> OperatorKernel | None:
        """Return the kernel of an operator on a GPU, in a format and layout; None where it is not known."""
        return next((k for k in self.operators if k.is_for(operator, gpu, dtype, layout, architecture)), None)

    def of_version(self, version: str) -> KernelChoices:
        """Return the choices of one version of the engine: those of its range come before those of any."""
        ranged = [(k.versions != "", k.of_version(version)) for k in self.operators]
        kept = [k for is_ranged, k in sorted(ranged, key=lambda one: not one[0]) if k is not None]
        if not any(is_ranged and k is not None for is_ranged, k in ranged):
            return self
        return replace(self, operators=tuple(kept))


@dataclass(frozen=True)
class NotFitted:
    """Runs that an engine's costs are not fitted to, since they say nothing of them.

    Attributes
    ----------
    reason : str
        Why: a defect of a version, or of a table that was found without these runs.
    model, gpu, format, versions : str
        Which: of a model with all of its formats, on a GPU, in a format, in a range of the engine's versions;
        empty for any.
    """

    reason: str
    model: str = ""
    gpu: str = ""
    format: str = ""
    versions: str = ""

    def __post_init__(self) -> None:
        """Refuse what names no runs."""
        for key in fields(self):
            _check_text(key.name, getattr(self, key.name))
        if not self.reason:
            raise PlanError("runs that are not fitted need a reason")
        check_range(self.versions)


@dataclass(frozen=True)
class CostForm:
    """Which of its costs are fitted to measured rows, and how much a row that lies far off counts.

    Attributes
    ----------
    costs : tuple of str
        Of :class:`StepCosts`; the others stay 0.
    outlier : float
        Relative error from which the squared error grows like the absolute one (soft L1); 0 for plain
        least squares.
    chosen : tuple of str
        What the rows choose, of ``form`` (both of these), ``gemm_smoothing`` and ``fp8_scales``; the others
        are as the profile has them.
    layers : tuple of (str, str)
        Architectures whose layers have a cost of their own, and the range of versions; empty for any.
    left_out : tuple of NotFitted
        Runs that are judged, and not fitted.
    """

    costs: tuple[str, ...]
    outlier: float = 0.0
    chosen: tuple[str, ...] = ()
    layers: tuple[tuple[str, str], ...] = ()
    left_out: tuple[NotFitted, ...] = ()

    def __post_init__(self) -> None:
        """Refuse costs that there are not."""
        known = [cost.name for cost in fields(StepCosts) if cost.name not in ("residual", "layers")]
        for name in self.costs:
            _check_one_of("a cost to fit", name, known)
        object.__setattr__(self, "costs", tuple(self.costs))
        object.__setattr__(self, "outlier", _check_number("outlier", self.outlier))
        if isinstance(self.chosen, str):
            raise PlanError(f"chosen must be a list of what is, got {self.chosen!r}")
        for name in self.chosen:
            _check_one_of("what is chosen", name, CHOSEN)
        object.__setattr__(self, "chosen", tuple(self.chosen))
        layers = tuple(tuple(pair) if isinstance(pair, list | tuple) else (pair,) for pair in self.layers)
        if not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in layers):
            raise PlanError(
                f"layers to fit must be pairs of an architecture and a range, got {self.layers!r}"
            )
        for _, versions in layers:
            check_range(versions)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "left_out", tuple(self.left_out))


@dataclass(frozen=True)
class EngineProfile:
    """A serving engine, in a range of its versions.

    Attributes
    ----------
    name : str
        What the profile is called: the ``runtime`` of a plan.
    engine : str
        The engine that it describes; empty where it is none, as the sum of kernels alone.
    versions : str
        Of that engine, such as ``>=0.12,<0.14``; empty for any.
    costs : StepCosts
        What a step costs beside its kernels.
    scheduling : Scheduling
        What a step holds.
    memory : KvMemory
        How memory is reserved, and KV cache of it.
    kernels : KernelChoices
        Which kernels it runs.
    layout : LayoutRules
        Which layouts it accepts, and what its GPUs send each other.
    errors : ServingErrors
        How far off its serving estimates are on runs that no fit has seen.
    fit : CostForm, optional
        How its costs are fitted to measured rows; None where none are.
    evidence : mapping
        What the costs were fitted on, by which command, and their confidence intervals.
    """

    name: str
    engine: str = ""
    versions: str = ""
    costs: StepCosts = StepCosts()
    scheduling: Scheduling = Scheduling()
    memory: KvMemory = DATASHEET_MEMORY
    kernels: KernelChoices = KernelChoices()
    layout: LayoutRules = ANY_LAYOUT
    errors: ServingErrors = NO_ERRORS
    fit: CostForm | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse what is no name or range; the parts have seen to themselves."""
        for key in ("name", "engine", "versions"):
            _check_text(key, getattr(self, key))
        check_range(self.versions)
        if not isinstance(self.evidence, Mapping):
            raise PlanError(f"evidence must be a table, got {self.evidence!r}")

    def at(self, version: str) -> EngineProfile:
        """Return the engine as it is in one of its versions: without other versions' layers and kernels.

        A build that is no version has what all versions have alone.
        """
        is_known = is_version(version)
        layers = tuple(
            one
            for one in self.costs.layers
            if not one.versions or (is_known and holds_for(one.versions, version))
        )
        kernels = self.kernels.of_version(version) if is_known else self.kernels
        if layers == self.costs.layers and kernels is self.kernels:
            return self
        return replace(self, costs=replace(self.costs, layers=layers), kernels=kernels)

    def kernels_alone(self) -> EngineProfile:
        """Return the engine without what it adds to its kernels."""
        return replace(self, costs=StepCosts(residual=self.costs.residual))
