"""What an engine adds to its kernels: costs of a step, rules for some of them, and how they are fitted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from fastroof.checks import one_of
from fastroof.engines.values import (
    check_fields,
    check_number,
    check_range,
    includes_newest,
)
from fastroof.errors import PlanError
from fastroof.units import PS_PER_US

LAYERS_OF: Final = {"DeepseekV32ForCausalLM": "GlmMoeDsaForCausalLM"}
"""Architectures without measured runs, and those whose layers engines run by the same code: SGLang has one
class for the sparse attention of DeepSeek-V3.2 and GLM-5 with its indexer (is_deepseek_nsa of 0.5.9,
is_deepseek_dsa of 0.5.20)."""

UNSEEN_LAYERS_ERROR: Final = 0.32
"""Relative standard error of steps with a cost of another architecture's layers, in addition to the others:
public runs of DeepSeek-V3.2 on SGLang took 1.1 to 2.5 times as long as without it, taken as 80 % of them."""


@dataclass(frozen=True)
class LayerCost:
    """Time that a layer of one architecture adds to its measured kernels: kernels without a table.

    Attributes
    ----------
    architecture : str
        Hugging Face class of the models: ``"GlmMoeDsaForCausalLM"``.
    layer_us : float
        Time added to every step per layer, us.
    versions : str
        Range of engine versions, such as ``>=0.5.9,<0.5.10``; empty for all of its profile's.
    evidence : str
        The runs it was found on, and how well it held on those of another GPU.
    """

    architecture: str
    layer_us: float
    versions: str = ""
    evidence: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.architecture:
            raise PlanError("a cost of layers needs its architecture")


RULED: Final = ("kernel_us", "prefill_floor_layer_us")
"""Costs that a :class:`CostRule` may set."""


@dataclass(frozen=True)
class CostRule:
    """A cost of some architectures, GPUs or versions, from other evidence than a profile's fitted runs.

    Attributes
    ----------
    cost : str
        Name of the cost, one of :data:`RULED`. ``prefill_floor_layer_us`` replaces
        ``prefill_floor_kernel_us`` too.
    us : float
        Its value, us.
    architectures, gpus : tuple of str
        Hugging Face classes of models, and GPUs; empty for any.
    versions : str
        Range of engine versions; empty for all of its profile's.
    chosen_on : str
        Bench whose runs chose it; empty for none.
    evidence : str
        The runs it was found on.
    """

    cost: str
    us: float
    architectures: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    versions: str = ""
    chosen_on: str = ""
    evidence: str = ""

    def __post_init__(self) -> None:
        one_of("cost", self.cost, RULED, PlanError)
        check_fields(self, " of rules")

    def is_for(self, architecture: str, gpu: str) -> bool:
        """Return whether it is the cost of a model on a GPU."""
        return (
            includes_newest(self.versions)
            and architecture in (self.architectures or (architecture,))
            and gpu in (self.gpus or (gpu,))
        )


def layers_of(architecture: str) -> str:
    """Return the architecture whose layers an engine runs for a model: its own, or one of LAYERS_OF."""
    return LAYERS_OF.get(architecture, architecture)


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step in addition to its kernels: ``max(kernels + added, floor)``.

    Costs that are constant within a plan, such as those of layers and all-reduces, form one number of it.

    Attributes
    ----------
    step_us : float
        Time added to every step, us: scheduling, input preparation, launching a CUDA graph.
    sequence_us : float
        Time added per sequence whose logits a step needs, us: sampling, detokenising, bookkeeping.
    logit_ps : float
        Time added per logit that a step samples from (sequences times vocabulary), ps: gathering logits of
        GPUs, converting and sampling them.
    prefill_us : float
        Time added to a step that contains prefill, us.
    prefill_floor_layer_us : float
        Minimum time per layer of a step that contains prefill, us: kernels launched one by one, without
        a CUDA graph, are not faster than the host.
    prefill_floor_kernel_us : float
        The same per kernel that the step launches, us.
    allreduce_us : float
        Time added per all-reduce of a step, us: GPUs that wait for each other.
    layer_us : float
        Time added to every step per layer, us: launching its kernels from the host.
    kernel_us : float
        Time added to every step per kernel of a decode step, us: the pause between two kernels. Not if an
        engine is started with fused kernels.
    prefill_layer_us : float
        Time added to a step that contains prefill per layer, us: the same if only decodes run in CUDA
        graphs.
    residual : float
        Relative standard error on models unseen by the fit; 0 if unknown.
    layers : tuple of LayerCost
        Costs of the layers of some architectures.
    rules : tuple of CostRule
        Costs of some models, GPUs and versions; the first that applies counts.
    """

    step_us: float = 0.0
    sequence_us: float = 0.0
    logit_ps: float = 0.0
    prefill_us: float = 0.0
    prefill_floor_layer_us: float = 0.0
    allreduce_us: float = 0.0
    layer_us: float = 0.0
    prefill_layer_us: float = 0.0
    kernel_us: float = 0.0
    prefill_floor_kernel_us: float = 0.0
    residual: float = 0.0
    layers: tuple[LayerCost, ...] = ()
    rules: tuple[CostRule, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def of_plan(self, architecture: str, gpu: str) -> StepCosts:
        """Return the costs of a model on a GPU, by the rules that apply."""
        found: dict[str, Any] = {
            rule.cost: rule.us for rule in reversed(self.rules) if rule.is_for(architecture, gpu)
        }
        if "prefill_floor_layer_us" in found:
            found["prefill_floor_kernel_us"] = 0.0
        return replace(self, **found, rules=())

    def times(self, share: float, names: Collection[str]) -> StepCosts:
        """Return the costs with a share of some of them, and of all layers'."""
        shares: dict[str, Any] = {name: getattr(self, name) * share for name in names}
        layers = tuple(replace(one, layer_us=one.layer_us * share) for one in self.layers)
        return replace(self, **shares, layers=layers)

    def of_step_us(self, architecture: str, layers: float, allreduces: float, kernels: float = 0.0) -> float:
        """Return the time added to every step of a model, us, without its sequences and prompts.

        If an architecture has costs in several versions, the last that has no end applies.

        Examples
        --------
        >>> costs = StepCosts(step_us=100.0, allreduce_us=2.0, layers=(LayerCost("Some", 5.0),))
        >>> costs.of_step_us("Some", 10.0, 20), costs.of_step_us("Other", 10.0, 20)
        (190.0, 140.0)
        """
        own_us = next(
            (
                one.layer_us
                for one in reversed(self.layers)
                if one.architecture == layers_of(architecture) and includes_newest(one.versions)
            ),
            0.0,
        )
        added_us = self.step_us + self.allreduce_us * allreduces + self.layer_us * layers
        # what an architecture lacks includes its pauses
        return added_us + max(own_us * layers, self.kernel_us * kernels)

    def of_sequence_us(self, vocab: int) -> float:
        """Return the time added per sequence whose logits a step needs, us.

        Examples
        --------
        >>> StepCosts(sequence_us=5.0, logit_ps=60.0).of_sequence_us(200_000)
        17.0
        """
        return self.sequence_us + self.logit_ps * vocab / PS_PER_US

    def of_other_layers(self, architecture: str) -> bool:
        """Return whether a model's steps have a cost that was found for another architecture's layers."""
        alike = layers_of(architecture)
        known = (one for one in self.layers if one.architecture == alike and includes_newest(one.versions))
        return alike != architecture and any(one.layer_us for one in known)

    def of_prefill_us(self, layers: float) -> float:
        """Return the time added to a step that contains prefill, us."""
        return self.prefill_us + self.prefill_layer_us * layers

    def of_prefill_floor_us(self, layers: float, kernels: float) -> float:
        """Return the minimum time of a step that contains prefill, us."""
        return self.prefill_floor_layer_us * layers + self.prefill_floor_kernel_us * kernels


NO_COSTS: Final = StepCosts()


@dataclass(frozen=True)
class NotFitted:
    """Runs that an engine's costs are not fitted to, because they are not informative.

    Attributes
    ----------
    reason : str
        Reason: a defect of a version, or of a table that was found without these runs.
    model, gpu, format, versions : str
        Conditions: a model in all of its formats, a GPU, a format, a range of the engine's versions;
        empty for any.
    """

    reason: str
    model: str = ""
    gpu: str = ""
    format: str = ""
    versions: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.reason:
            raise PlanError("runs that are not fitted need a reason")


@dataclass(frozen=True)
class CostForm:
    """Which costs are fitted to measured rows.

    Attributes
    ----------
    costs : tuple of str
        Names of :class:`StepCosts` fields; the others stay 0.
    given : tuple of str
        Names of costs that other evidence than these rows sets: a fit leaves them as they are.
    chosen_on : tuple of (str, str, float)
        Given costs that runs of a bench chose, the bench, and what evidence without it says, us.
    layers : tuple of (str, str)
        Architectures whose layers have a separate cost, and the range of versions; empty for any.
    left_out : tuple of NotFitted
        Runs that are evaluated but not fitted.
    newest : str
        Newest version of the fitted runs; empty if unknown.
    later_share : float
        Share of each fitted cost that later versions have.
    """

    costs: tuple[str, ...]
    layers: tuple[tuple[str, str], ...] = ()
    left_out: tuple[NotFitted, ...] = ()
    given: tuple[str, ...] = ()
    chosen_on: tuple[tuple[str, str, float], ...] = ()
    newest: str = ""
    later_share: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.newest:
            check_range(f">={self.newest}")
        if self.later_share > 1.0:
            raise PlanError(f"later_share must be a number from 0 to 1, got {self.later_share!r}")
        known = [cost.name for cost in fields(StepCosts) if cost.type == "float" and cost.name != "residual"]
        for name in (*self.costs, *self.given):
            one_of("a cost to fit", name, known, PlanError)
        object.__setattr__(self, "chosen_on", tuple(self._chosen(one) for one in self.chosen_on))
        layers = tuple(tuple(pair) if isinstance(pair, list | tuple) else (pair,) for pair in self.layers)
        if not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in layers):
            raise PlanError(
                f"layers to fit must be pairs of an architecture and a range, got {self.layers!r}"
            )
        for _, versions in layers:
            check_range(versions)
        object.__setattr__(self, "layers", layers)

    def _chosen(self, row: Any) -> tuple[str, str, float]:
        """Return a checked row of ``chosen_on``."""
        parts = tuple(row) if isinstance(row, list | tuple) else ()
        if len(parts) != 3 or parts[0] not in self.given or not isinstance(parts[1], str):
            raise PlanError(f"chosen_on must have rows of a given cost, a bench and us, got {row!r}")
        return parts[0], parts[1], check_number("chosen_on", parts[2])
