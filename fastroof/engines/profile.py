"""A serving engine's profile: costs added to its kernels, scheduling, memory and evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Protocol

from fastroof.checks import one_of
from fastroof.engines.data_parallel import ONE_SUM, DataParallel
from fastroof.engines.front_end import NO_FRONT_END, FrontEnd, front_end_of
from fastroof.engines.kernel_choices import ANY_KERNELS, KernelChoices
from fastroof.engines.layout_rules import ANY_LAYOUT, LayoutRules
from fastroof.engines.lora import ANY_LORA, LoraRules
from fastroof.engines.memory import DATASHEET_MEMORY, KvMemory
from fastroof.engines.memory_by_card import Card, first_row
from fastroof.engines.scheduling import MIXED_STEPS, PAUSES, Scheduling
from fastroof.engines.values import (
    NEWEST,
    NO_ERRORS,
    ServingErrors,
    check_fields,
    check_names,
    check_number,
    check_range,
    check_text,
    holds_for,
    includes_newest,
    is_beyond,
    is_version,
    of_version,
    range_around,
    range_edges,
)
from fastroof.errors import FastroofError, PlanError
from fastroof.units import PS_PER_US


class GpuMemory(Protocol):
    """A GPU's name and memory."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def hbm_bytes(self) -> int:
        """Bytes of its memory, by the datasheet."""


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
        """Reject an invalid cost."""
        check_fields(self)
        if not self.architecture:
            raise PlanError("a cost of layers needs its architecture")
        check_range(self.versions)


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
        """Reject an invalid rule."""
        one_of("cost", self.cost, RULED, PlanError)
        check_fields(self, " of rules")
        check_range(self.versions)

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
        """Reject invalid costs, also in profiles built by hand."""
        check_fields(self)
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "rules", tuple(self.rules))

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


STARTS: Final = ("graphs", "no_graphs", "fused", "no_prefix_cache", "extra_buffer")
"""What an engine's flags may ask for: steps with prefill in CUDA graphs, or never in them, kernels that fuse
all-reduces with norms, which also leave no pause between kernels, and what lets steps of models with
recurrent states overlap (:class:`fastroof.engines.scheduling.Scheduling`)."""


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
        """Reject conditions that match no runs."""
        check_fields(self)
        if not self.reason:
            raise PlanError("runs that are not fitted need a reason")
        check_range(self.versions)


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
        """Reject unknown costs, and a share above 1."""
        check_text("newest", self.newest)
        if self.newest:
            check_range(f">={self.newest}")
        if check_number("later_share", self.later_share) > 1.0:
            raise PlanError(f"later_share must be a number from 0 to 1, got {self.later_share!r}")
        known = [cost.name for cost in fields(StepCosts) if cost.type == "float" and cost.name != "residual"]
        object.__setattr__(self, "given", check_names("given", self.given))
        for name in (*self.costs, *self.given):
            one_of("a cost to fit", name, known, PlanError)
        object.__setattr__(self, "costs", tuple(self.costs))
        object.__setattr__(self, "chosen_on", tuple(self._chosen(one) for one in self.chosen_on))
        layers = tuple(tuple(pair) if isinstance(pair, list | tuple) else (pair,) for pair in self.layers)
        if not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in layers):
            raise PlanError(
                f"layers to fit must be pairs of an architecture and a range, got {self.layers!r}"
            )
        for _, versions in layers:
            check_range(versions)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "left_out", tuple(self.left_out))

    def _chosen(self, row: Any) -> tuple[str, str, float]:
        """Return a checked row of ``chosen_on``."""
        parts = tuple(row) if isinstance(row, list | tuple) else ()
        if len(parts) != 3 or parts[0] not in self.given or not isinstance(parts[1], str):
            raise PlanError(f"chosen_on must have rows of a given cost, a bench and us, got {row!r}")
        return parts[0], parts[1], check_number("chosen_on", parts[2])


@dataclass(frozen=True)
class EngineProfile:
    """A serving engine in a range of its versions.

    Attributes
    ----------
    name : str
        Name of the profile: the ``engine`` of a plan.
    engine : str
        The engine that it describes; empty for the plain sum of kernels.
    versions : str
        Range of the engine's versions, such as ``>=0.12,<0.14``; empty for any.
    costs : StepCosts
        Costs of a step in addition to its kernels.
    scheduling : Scheduling
        How a step is filled.
    memory : KvMemory
        How memory and KV cache are reserved.
    kernels : KernelChoices
        Which kernels it runs.
    layout : LayoutRules
        Which layouts it accepts, and what its GPUs send each other.
    data_parallel : DataParallel
        Which ranks of attention data parallelism wait for each other, and what their experts compute.
    front_end : FrontEnd
        What requests pass before and after its scheduler; not part of steps.
    lora : LoraRules
        How it holds and runs LoRA adapters.
    errors : ServingErrors
        Errors of its serving estimates on runs that no fit has seen.
    fit : CostForm, optional
        How its costs are fitted to measured rows; None if they are not.
    evidence : mapping
        What the costs were fitted on, the command, and confidence intervals.
    validated : str
        Newest version of measured runs that the costs were fitted to or that judge them; empty if unknown.
    version : str
        The version that it was narrowed to; empty for the newest.
    rules : str
        Range around that version in which its rules do not change; empty for the newest.
    cost_share : float
        Share of the fitted costs that this version has: less than 1 if it is later than all fitted runs.
    """

    name: str
    engine: str = ""
    versions: str = ""
    costs: StepCosts = StepCosts()
    scheduling: Scheduling = MIXED_STEPS
    memory: KvMemory = DATASHEET_MEMORY
    kernels: KernelChoices = ANY_KERNELS
    layout: LayoutRules = ANY_LAYOUT
    data_parallel: DataParallel = ONE_SUM
    front_end: FrontEnd = NO_FRONT_END
    lora: LoraRules = ANY_LORA
    errors: ServingErrors = NO_ERRORS
    fit: CostForm | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)
    validated: str = ""
    version: str = ""
    rules: str = ""
    cost_share: float = 1.0

    def __post_init__(self) -> None:
        """Reject invalid names and ranges; the parts check themselves."""
        check_fields(self)
        check_range(self.versions)
        check_range(self.rules)
        for version in filter(None, (self.validated, self.version)):
            check_range(f">={version}")
        if not isinstance(self.evidence, Mapping):
            raise PlanError(f"evidence must be a table, got {self.evidence!r}")

    @property
    def rule_ranges(self) -> tuple[str, ...]:
        """Ranges of versions in which its limits, memory and graphs differ."""
        return (
            self.versions,
            *self.memory.ranges,
            *(one.versions for one in self.kernels.prefill_graphs),
            *(one.versions for one in self.kernels.fused_norms),
            *(one.versions for one in self.data_parallel.graphs),
            *(one.versions for one in self.costs.rules),
        )

    @property
    def rule_versions(self) -> str:
        """Range of versions that have the rules of this profile: ``>=0.26,<0.28``."""
        if self.rules:
            return self.rules
        if includes_newest(self.versions):
            return range_around(self.rule_ranges, NEWEST)
        inside = [edge for edge in range_edges(self.rule_ranges) if holds_for(self.versions, edge)]
        return range_around(self.rule_ranges, inside[-1]) if inside else self.versions

    def beyond(self, validated: str) -> str:
        """Return the newest validated version if this profile is of a newer one, else an empty string."""
        if not validated:
            return ""
        version = self.version or (NEWEST if includes_newest(self.versions) else validated)
        return validated if is_beyond(version, validated) else ""

    def words(self, validated: str) -> str:
        """Return name, versions and the end of evidence: ``vllm >=0.33 (not validated beyond 0.28)``."""
        beyond = self.beyond(validated)
        words = [f"not validated beyond {beyond}"] if beyond else []
        if self.cost_share < 1.0 and self.fit is not None:
            share = "half" if self.cost_share == 0.5 else f"{self.cost_share:g}"
            words.append(f"{share} of the costs of {self.fit.newest}")
        title = f"{self.name} {self.rule_versions}".rstrip()
        return f"{title} ({', '.join(words)})" if words else title

    @property
    def title(self) -> str:
        """Name, range of versions, and the end of measured runs if this is of a newer version."""
        return self.words(self.validated)

    @property
    def facts(self) -> dict[str, str | None]:
        """The same for JSON."""
        return {
            "engine": self.name,
            "engine_versions": self.rule_versions,
            "not_validated_beyond": self.beyond(self.validated) or None,
        }

    def refuse_pauses(
        self, given: Mapping[str, int], shares_experts: bool, error: type[FastroofError]
    ) -> None:
        """Raise if an option that lets prompts wait is on, and this version of the engine lacks it."""
        if not self.engine:
            return
        for option, value in given.items():
            if value == PAUSES[option]:
                continue
            known = next((one for one in self.scheduling.pauses if one.option == option), None)
            version = self.version or NEWEST
            if known is None:
                why = f"{self.engine} has no such option"
            elif not holds_for(known.versions, version):
                why = f"{self.engine} has it in versions {known.versions}"
            elif not shares_experts and not holds_for(known.alone, version):
                why = f"{self.engine} applies it without ranks that share experts in versions {known.alone}"
            else:
                continue
            raise error(f"{option} {value} is invalid for {self.name} {self.rule_versions}: {why}")

    def at(self, version: str) -> EngineProfile:
        """Return the engine as of one of its versions: without other versions' layers and kernels.

        Without a version it is the newest. A build that is not a version has only what all versions have.
        """
        if not version:
            return self._later(NEWEST if includes_newest(self.versions) else "")
        known = version if is_version(version) else ""
        layers, kernels = of_version(self.costs.layers, known), self.kernels.at(known)
        rules = of_version(self.costs.rules, known)
        memory = self.memory.at(known) if known else self.memory
        ranks = self.data_parallel.at(known)
        costs = replace(self.costs, layers=layers, rules=rules)
        is_same = costs == self.costs and kernels is self.kernels
        is_same = is_same and memory is self.memory and ranks is self.data_parallel
        if is_same and not (known and self.engine):
            return self
        around = range_around(self.rule_ranges, known) if known else ""
        parts: dict[str, Any] = {"costs": costs, "kernels": kernels, "memory": memory, "data_parallel": ranks}
        return replace(self, **parts, version=known, rules=around)._later(known)

    def _later(self, version: str) -> EngineProfile:
        """Return the engine with the share of its fitted costs that a version has; once."""
        fit = self.fit
        if not version or fit is None or not fit.newest or self.cost_share < 1.0 or fit.later_share == 1.0:
            return self
        if not is_beyond(version, fit.newest):
            return self
        return replace(self, costs=self.costs.times(fit.later_share, fit.costs), cost_share=fit.later_share)

    def of_plan(self, architecture: str, gpu: Card, has_states: bool) -> EngineProfile:
        """Return the engine as it runs a model on a GPU: its costs, and whether steps overlap."""
        # with more states, or without prefix cache, recurrent states need no wait
        waits = has_states and first_row(self.memory.state_buffers, gpu, architecture) is None
        costs = self.costs.of_plan(architecture, gpu.name)
        return replace(self, costs=costs, scheduling=self.scheduling.of_model(waits))

    def on(self, gpu: GpuMemory, ranks: int = 1) -> EngineProfile:
        """Return the engine with its default limits on a GPU, those of one rank of attention.

        ``ranks`` are those that share experts: :meth:`fastroof.models.ModelSpec.ranks`.
        """
        own = self.scheduling
        if not own.by_card:
            return self
        tokens, seqs = self.memory.default_limits(
            gpu.name, gpu.hbm_bytes, own.max_num_batched_tokens, own.max_num_seqs
        )
        if self.memory.ranks_share_tokens:
            tokens = max(tokens // max(ranks, 1), 1)
        scheduling = replace(own, max_num_batched_tokens=tokens, max_num_seqs=seqs, by_card=False)
        return replace(self, scheduling=scheduling)

    def started_with(self, settings: Collection[str]) -> EngineProfile:
        """Return the engine as these settings start it, of :data:`STARTS` and what prevents graphs.

        Examples
        --------
        >>> from fastroof.engines import load_engine
        >>> len(load_engine("sglang-0.5.10").started_with({"lora"}).kernels.prefill_graphs)
        0
        """
        graphs = self.kernels.prefill_graphs
        if "graphs" in settings:
            graphs = tuple(one.forced() for one in graphs)
        elif "no_graphs" in settings:
            graphs = ()
        else:
            graphs = tuple(one for one in graphs if not set(settings) & set(one.not_with))
        costs, scheduling = self.costs, self.scheduling.started_with(settings)
        if "fused" in settings:
            rules = tuple(rule for rule in costs.rules if rule.cost != "kernel_us")
            costs = replace(costs, kernel_us=0.0, rules=rules)
        kernels = replace(self.kernels, prefill_graphs=graphs)
        if (costs, scheduling, kernels) == (self.costs, self.scheduling, self.kernels):
            return self
        return replace(self, costs=costs, scheduling=scheduling, kernels=kernels)

    def behind(self, front_end: str | float) -> EngineProfile:
        """Return the engine behind a front end: plain, dynamo, none, or milliseconds a request."""
        return replace(self, front_end=front_end_of(front_end, self.front_end, self.name))

    def kernels_alone(self) -> EngineProfile:
        """Return the engine without costs in addition to its kernels."""
        return replace(self, costs=StepCosts(residual=self.costs.residual), cost_share=1.0)

    def without_bench(self, bench: str) -> EngineProfile:
        """Return the engine with given costs that no run of a bench chose."""
        chosen = {cost: us for cost, by, us in (self.fit.chosen_on if self.fit else ()) if by == bench}
        # fused kernels have no pauses, whoever chose these
        known: dict[str, Any] = {cost: us for cost, us in chosen.items() if getattr(self.costs, cost)}
        rules = tuple(rule for rule in self.costs.rules if rule.chosen_on != bench)
        if not known and rules == self.costs.rules:
            return self
        return replace(self, costs=replace(self.costs, **known, rules=rules))

    def unfitted(self) -> EngineProfile:
        """Return the engine with only those costs that no fit of its rows changes."""
        given = {name: getattr(self.costs, name) for name in (self.fit.given if self.fit else ())}
        costs = StepCosts(residual=self.costs.residual, rules=self.costs.rules, **given)
        return replace(self, costs=costs, cost_share=1.0)
