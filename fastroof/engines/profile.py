"""What is known of a serving engine: what it adds to its kernels, how it schedules, how it keeps memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from fastroof.engines.data_parallel import ONE_SUM, DataParallel
from fastroof.engines.kernel_choices import (
    ANY_KERNELS,
    KernelChoices,
)
from fastroof.engines.memory import ANY_LAYOUT, DATASHEET_MEMORY, KvMemory, LayoutRules
from fastroof.engines.values import (
    NO_ERRORS,
    ServingErrors,
    check_number,
    check_one_of,
    check_range,
    check_size,
    check_text,
    holds_for,
    is_version,
)
from fastroof.errors import PlanError

STEP_ORDERS: Final = ("mixed", "prefill_first")
"""Whether prompts share steps with decodes, or run before them in separate steps."""

CHOSEN: Final = ("form", "gemm_smoothing", "fp8_scales")
"""What rows may choose when costs are fitted."""


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
        """Refuse an invalid cost of an architecture."""
        for key in ("architecture", "versions", "evidence"):
            check_text(key, getattr(self, key))
        if not self.architecture:
            raise PlanError("a cost of layers needs the architecture that it is of")
        object.__setattr__(self, "layer_us", check_number("layer_us", self.layer_us))
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
        """Refuse invalid costs, also in profiles built by hand."""
        for cost in fields(self):
            if cost.name != "layers":
                object.__setattr__(self, cost.name, check_number(cost.name, getattr(self, cost.name)))
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
        ``mixed``: prompts share steps with decodes; ``prefill_first``: prompts run in separate steps, and
        decodes only when none waits.
    chunked_prefill : bool
        Whether prompts are cut where a step has no room for the whole.
    max_num_batched_tokens : int
        Tokens that a step holds at most; of prompts, where they run first.
    max_num_seqs : int
        Maximum number of concurrent requests.
    async_scheduling : bool
        Whether a step is scheduled while the one before it runs, so that what has ended or come meanwhile is
        seen a step late. For simulations only: the closed form has no equivalent.
    """

    order: str = "mixed"
    chunked_prefill: bool = True
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        """Refuse an invalid schedule."""
        check_one_of("order", self.order, STEP_ORDERS)
        for name in ("chunked_prefill", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be true or false, got {getattr(self, name)!r}")
        check_size("max_num_batched_tokens", self.max_num_batched_tokens)
        check_size("max_num_seqs", self.max_num_seqs)


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
            check_text(key.name, getattr(self, key.name))
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
        Architectures whose layers have their own cost, and the range of versions; empty for any.
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
            check_one_of("a cost to fit", name, known)
        object.__setattr__(self, "costs", tuple(self.costs))
        object.__setattr__(self, "outlier", check_number("outlier", self.outlier))
        if isinstance(self.chosen, str):
            raise PlanError(f"chosen must be a list of names, got {self.chosen!r}")
        for name in self.chosen:
            check_one_of("what is chosen", name, CHOSEN)
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
        The engine that it describes; empty for the plain sum of kernels.
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
    data_parallel : DataParallel
        Which ranks of attention data parallelism wait for each other, and what their experts compute.
    errors : ServingErrors
        How far off its serving estimates are on runs that no fit has seen.
    fit : CostForm, optional
        How its costs are fitted to measured rows; None if they are not.
    evidence : mapping
        What the costs were fitted on, by which command, and their confidence intervals.
    """

    name: str
    engine: str = ""
    versions: str = ""
    costs: StepCosts = StepCosts()
    scheduling: Scheduling = Scheduling()
    memory: KvMemory = DATASHEET_MEMORY
    kernels: KernelChoices = ANY_KERNELS
    layout: LayoutRules = ANY_LAYOUT
    data_parallel: DataParallel = ONE_SUM
    errors: ServingErrors = NO_ERRORS
    fit: CostForm | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse invalid names and ranges; the parts check themselves."""
        for key in ("name", "engine", "versions"):
            check_text(key, getattr(self, key))
        check_range(self.versions)
        if not isinstance(self.evidence, Mapping):
            raise PlanError(f"evidence must be a table, got {self.evidence!r}")

    def at(self, version: str) -> EngineProfile:
        """Return the engine as it is in one of its versions: without other versions' layers and kernels.

        A build that is not a version gets only what all versions have.
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
