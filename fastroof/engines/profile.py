"""A serving engine's profile: costs added to its kernels, scheduling, memory and evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from fastroof.engines.costs import NO_COSTS, CostForm, StepCosts
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
    check_range,
    holds_for,
    includes_newest,
    is_beyond,
    is_version,
    of_version,
    range_around,
    range_edges,
)
from fastroof.errors import FastroofError, PlanError


class GpuMemory(Protocol):
    """A GPU's name and memory."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def hbm_bytes(self) -> int:
        """Bytes of its memory, by the datasheet."""


STARTS: Final = ("graphs", "no_graphs", "fused", "no_prefix_cache", "extra_buffer")
"""What an engine's flags may ask for: steps with prefill in CUDA graphs, or never in them, kernels that fuse
all-reduces with norms, which also leave no pause between kernels, and what lets steps of models with
recurrent states overlap (:class:`fastroof.engines.scheduling.Scheduling`)."""


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
    costs: StepCosts = NO_COSTS
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
        check_fields(self)
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

    def unfitted(self) -> EngineProfile:
        """Return the engine with only those costs that no fit of its rows changes."""
        given = {name: getattr(self.costs, name) for name in (self.fit.given if self.fit else ())}
        costs = StepCosts(residual=self.costs.residual, rules=self.costs.rules, **given)
        return replace(self, costs=costs, cost_share=1.0)
