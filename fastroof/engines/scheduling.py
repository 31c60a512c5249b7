"""How an engine fills a step by default, and its options that let prompts wait."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from fastroof.checks import is_whole_number, one_of, whole_number
from fastroof.engines.values import MOST, check_fields, check_range
from fastroof.errors import PlanError

STEP_ORDERS: Final = ("mixed", "prefill_first")
"""Whether prompts share steps with decodes, or run before them in separate steps."""

PAUSES: Final = {"prefill_schedule_interval": 1, "prefill_decode_interval": 0, "min_free_slots_delay": 0}
"""Options that let prompts wait for steps or slots, and their value if off."""


class StepLimits(NamedTuple):
    """Limits on a step's tokens and on running requests; ``asked_seqs`` is None for the engine's own."""

    tokens: int
    seqs: int
    asked_seqs: int | None


@dataclass(frozen=True)
class PromptPause:
    """An engine's option that lets prompts wait.

    Attributes
    ----------
    option : str
        Its name, one of :data:`PAUSES`.
    versions : str
        Range of the engine's versions that have it.
    alone : str
        Range in which it also applies without ranks that share experts; empty for the same.
    """

    option: str
    versions: str = ""
    alone: str = ""

    def __post_init__(self) -> None:
        one_of("option", self.option, tuple(PAUSES), PlanError)
        check_fields(self)
        check_range(self.alone)


@dataclass(frozen=True)
class Scheduling:
    """How an engine fills a step, by its defaults.

    Attributes
    ----------
    order : str
        ``mixed``: prompts share steps with decodes; ``prefill_first``: prompts run in separate steps, and
        decodes only if no prompt waits.
    chunked_prefill : bool
        Whether prompts are split if a step has no room for the whole.
    max_num_batched_tokens : int
        Maximum tokens per step; of prompts, if they run first.
    max_num_seqs : int
        Maximum number of concurrent requests.
    async_scheduling : bool
        Whether a step is scheduled while the previous one runs, so that requests that ended or arrived
        meanwhile are noticed one step late.
    prefill_schedule_interval, prefill_decode_interval, min_free_slots_delay : int
        Steps or slots that prompts wait for, as in :class:`fastroof.simulation.EngineSettings`.
    pauses : tuple of PromptPause
        Which of these the engine has, and in which versions; empty for any.
    by_card : bool
        Whether the limits of tokens and requests are those of a GPU's memory, by the rules of ``[memory]``.
    states_overlap_with : tuple of str
        Settings of :meth:`EngineProfile.started_with` without which steps of models with recurrent states do
        not overlap, unless they have a row of ``state_buffers`` in ``[memory]``; empty if they always do.
    """

    order: str = "mixed"
    chunked_prefill: bool = True
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    async_scheduling: bool = False
    prefill_schedule_interval: int = 1
    prefill_decode_interval: int = 0
    min_free_slots_delay: int = 0
    pauses: tuple[PromptPause, ...] = ()
    by_card: bool = False
    states_overlap_with: tuple[str, ...] = ()

    def of_model(self, waits: bool) -> Scheduling:
        """Return the schedule of a model, whose states may have to wait for the step before."""
        overlaps = self.async_scheduling and not (waits and self.states_overlap_with)
        return replace(self, async_scheduling=overlaps, states_overlap_with=())

    def started_with(self, settings: Collection[str]) -> Scheduling:
        """Return the schedule of an engine that settings start."""
        overlaps = not set(settings).isdisjoint(self.states_overlap_with)
        return replace(self, states_overlap_with=()) if overlaps else self

    @property
    def pauses_on(self) -> dict[str, int]:
        """Options that let prompts wait and are on."""
        own = {name: getattr(self, name) for name in PAUSES}
        return {name: value for name, value in own.items() if value != PAUSES[name]}

    def in_order(self, order: object) -> Scheduling:
        """Return it with another order of steps; unchanged for None, or for what is refused elsewhere."""
        return replace(self, order=order) if isinstance(order, str) and order in STEP_ORDERS else self

    def step_limits(self, max_num_batched_tokens: Any = None, max_num_seqs: Any = None) -> StepLimits:
        """Return the limits given, else the engine's own.

        Decodes count against the tokens of a mixed step, so fewer tokens than the engine's own requests lower
        that default. Several limits on tokens, or an invalid one, do not.
        """
        tokens, seqs = max_num_batched_tokens, max_num_seqs
        if tokens is None:
            tokens = self.max_num_batched_tokens
        if seqs is None and self.order == "mixed" and is_whole_number(tokens, most=self.max_num_seqs - 1):
            seqs = int(tokens)
        return StepLimits(tokens, self.max_num_seqs if seqs is None else seqs, seqs)

    def largest_step(self, max_num_batched_tokens: int, decode_tokens: int) -> int:
        """Return the tokens of the largest step, of prompts or of ``decode_tokens`` without prompts."""
        if self.order == "mixed":
            return max_num_batched_tokens
        return max(max_num_batched_tokens, decode_tokens)

    def plan_sizes(
        self, max_num_batched_tokens: int, max_num_seqs: int, draft_tokens: int = 0
    ) -> dict[str, Any]:
        """Return the sizes of a plan that times every step within these limits."""
        largest = self.largest_step(max_num_batched_tokens, max_num_seqs * (1 + draft_tokens))
        return {"max_num_batched_tokens": largest, "max_num_seqs": max_num_seqs}

    @property
    def hides_host(self) -> bool:
        """Whether the host launches a step of prompts while the decode step before it runs."""
        return self.async_scheduling and self.order == "prefill_first"

    def __post_init__(self) -> None:
        for name, off in PAUSES.items():
            whole_number(name, getattr(self, name), off, MOST, PlanError)
        one_of("order", self.order, STEP_ORDERS, PlanError)
        check_fields(self)
        whole_number("max_num_batched_tokens", self.max_num_batched_tokens, most=MOST, error=PlanError)
        whole_number("max_num_seqs", self.max_num_seqs, most=MOST, error=PlanError)


MIXED_STEPS: Final = Scheduling()
"""The default: prompts, split where needed, share steps with decodes."""
