"""Settings of a simulated engine: how it schedules, and how many requests and blocks it has room for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.checks import is_number, is_whole_number, one_of, shown, true_or_false, whole_number
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.engines.scheduling import PAUSES, STEP_ORDERS
from fastroof.errors import SimulationError

if TYPE_CHECKING:
    from fastroof.memory.plan_memory import PlanMemory
    from fastroof.plan import StepPlan
    from fastroof.plan.speculation import SpeculatedPlan
    from fastroof.traces.trace import Trace

MOST_BLOCKS: Final = 2**40
"""Maximum number of KV blocks."""

MOST_SLOTS: Final = 2**16
"""Maximum number of running requests."""

MOST_BLOCK_TOKENS: Final = 2**16
"""Maximum number of tokens per block."""

MOST_REPLICAS: Final = 4096
"""Maximum number of replicas."""

_FLAGS: Final = ("chunked_prefill", "admit_whole_prompt", "reserve_output", "async_scheduling")


MOST_STEP_TOKENS: Final = 2**40
"""Maximum number of tokens per step."""

MOST_PAUSE: Final = 2**20
"""Maximum number of steps or slots that prompts wait for."""


@dataclass(frozen=True)
class EngineSettings:
    """How one engine schedules.

    Attributes
    ----------
    max_num_batched_tokens : int
        Maximum number of new tokens per step.
    max_num_seqs : int
        Maximum number of running requests.
    num_gpu_blocks : int
        Blocks of KV cache for requests. vLLM reserves one of the blocks that it prints.
    block_size : int
        Tokens per block.
    order : str
        ``mixed``: prompts share steps with decodes; ``prefill_first``: a step holds only prompts while one
        can be computed, else only decodes.
    chunked_prefill : bool
        Whether prompts are cut if a step has no room for all of one.
    admit_whole_prompt : bool
        Whether a request starts only when its whole prompt has room, though blocks are taken chunk by chunk.
    reserve_output : bool
        Whether a request takes the blocks of its prompt and whole output when it starts, so that none is
        preempted.
    async_scheduling : bool
        Whether a step is scheduled while the previous one runs: arrivals and freed slots and blocks are seen
        a step later.
    timeout_s : float
        Seconds after arrival at which a client gives up an unfinished request.
    prefill_schedule_interval : int
        Prompts are computed at most once every so many steps while requests decode, unless some had no room
        in the last step that took any (vLLM; only with ``order="mixed"``).
    prefill_decode_interval : int
        Decode steps after a step with prompts before the next (SGLang; only with ``order="prefill_first"``).
    min_free_slots_delay : int
        Waiting prompts start once at least so many of ``max_num_seqs`` are free, or no request decodes
        (SGLang; only with ``order="prefill_first"``).

    Raises
    ------
    SimulationError
        If a setting is invalid, or settings contradict each other.

    Examples
    --------
    >>> EngineSettings(2048, 256, 10_000).block_size
    16
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    num_gpu_blocks: int
    block_size: int = 16
    order: str = "mixed"
    chunked_prefill: bool = True
    admit_whole_prompt: bool = True
    reserve_output: bool = False
    async_scheduling: bool = False
    timeout_s: float = math.inf
    prefill_schedule_interval: int = 1
    prefill_decode_interval: int = 0
    min_free_slots_delay: int = 0

    def __post_init__(self) -> None:
        for name, most in (
            ("max_num_batched_tokens", MOST_STEP_TOKENS),
            ("max_num_seqs", MOST_SLOTS),
            ("num_gpu_blocks", MOST_BLOCKS),
            ("block_size", MOST_BLOCK_TOKENS),
        ):
            number = whole_number(name, getattr(self, name), most=most, error=SimulationError)
            object.__setattr__(self, name, number)
        one_of("order", self.order, STEP_ORDERS, SimulationError)
        for name in _FLAGS:
            true_or_false(name, getattr(self, name), SimulationError)
        for name, off in PAUSES.items():
            value = whole_number(name, getattr(self, name), off, MOST_PAUSE, SimulationError)
            object.__setattr__(self, name, value)
            order = "mixed" if name == "prefill_schedule_interval" else "prefill_first"
            if value != off and order != self.order:
                raise SimulationError(
                    f'{name} {value} needs order="{order}", got order="{self.order}"; leave it at {off}'
                )
        timeout_s = self.timeout_s
        is_time = isinstance(timeout_s, Real) and timeout_s == math.inf
        if not is_time and (not is_number(timeout_s) or timeout_s <= 0.0):
            raise SimulationError(
                f"timeout_s must be seconds above 0, or inf for no limit; got {shown(timeout_s)}"
            )
        object.__setattr__(self, "timeout_s", float(timeout_s))
        if self.order == "mixed" and self.max_num_seqs > self.max_num_batched_tokens:
            raise SimulationError(
                f"max_num_seqs {self.max_num_seqs:,} must not be above max_num_batched_tokens "
                f"{self.max_num_batched_tokens:,}: a mixed step has a token for each running request"
            )
        if self.order == "prefill_first" and not self.admit_whole_prompt:
            raise SimulationError('order="prefill_first" admits whole prompts: leave admit_whole_prompt on')

    @property
    def pause_steps(self) -> int:
        """Number of decode steps between two steps with prompts."""
        return max(self.prefill_schedule_interval - 1, self.prefill_decode_interval)

    @classmethod
    def of_plan(
        cls,
        plan: StepPlan,
        *,
        kv_len: float | None = None,
        drafts: SpeculatedPlan | None = None,
        **given: Any,
    ) -> EngineSettings:
        """Return settings of a plan's engine, with some given.

        Parameters
        ----------
        plan : StepPlan
            Its engine's profile and memory set the defaults.
        kv_len : float, optional
            Mean tokens of a running request, by which states and windows are set aside (default: 2,176).
        drafts : SpeculatedPlan, optional
            The plan with its draft tokens, which take memory and tokens of a step.
        **given
            Attributes of :class:`EngineSettings`; by default the engine's. Requests are by default at most as
            many as a step has tokens for.

        Raises
        ------
        SimulationError
            If a setting is unknown or invalid, steps are larger than the plan, or its memory has no room.

        Examples
        --------
        >>> import fastroof
        >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
        >>> settings = EngineSettings.of_plan(plan, max_num_seqs=128)
        >>> settings.max_num_seqs, settings.max_num_batched_tokens, settings.async_scheduling
        (128, 8192, True)
        """
        from fastroof.memory.gpu_memory import NO_DRAFTS
        from fastroof.plan.calls import rank_rules
        from fastroof.plan.compile import check_plan
        from fastroof.plan.start import check_room

        check_plan("plan", plan, SimulationError)
        unknown = given.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise SimulationError(
                f"an engine has no setting {', '.join(sorted(unknown))}; "
                f"it has {', '.join(cls.__dataclass_fields__)}"
            )
        scheduling, rule = plan.profile.scheduling, plan.profile.memory
        # invalid values are refused with the other settings
        tokens: Any = given.get("max_num_batched_tokens")
        limits = scheduling.in_order(given.get("order")).step_limits(tokens, given.get("max_num_seqs"))
        seqs: Any = limits.asked_seqs
        most_seqs = int(seqs) if is_whole_number(seqs) else None
        most_tokens = int(tokens) if is_whole_number(tokens, most=plan.max_num_batched_tokens) else None
        held = NO_DRAFTS if drafts is None else drafts.drafts
        memory = plan.memory_of(max_num_batched_tokens=most_tokens, max_num_seqs=most_seqs, drafts=held)
        settings: dict[str, Any] = {
            "max_num_batched_tokens": limits.tokens,
            "max_num_seqs": limits.seqs,
            "block_size": memory.block_tokens if memory.full_parts else rule.block_tokens,
            "order": scheduling.order,
            "chunked_prefill": scheduling.chunked_prefill,
            "reserve_output": rule.kv_reservation == "full",
            "async_scheduling": scheduling.async_scheduling,
            **{name: getattr(scheduling, name) for name in PAUSES},
        }
        settings |= {name: value for name, value in given.items() if value is not None}
        # checked before they are used to compute the memory
        chosen = cls(**{"num_gpu_blocks": 1, **settings})
        plan.profile.refuse_pauses(
            {name: getattr(chosen, name) for name in PAUSES},
            bool(rank_rules(plan).in_lockstep),
            SimulationError,
        )
        if drafts is not None:
            chosen = _with_room_for(
                chosen, plan, drafts.tokens, is_given=given.get("max_num_seqs") is not None
            )
        tokens_of, seqs_of = "max_num_batched_tokens", "max_num_seqs"
        for name, limit in ((tokens_of, tokens_of), (seqs_of, seqs_of), (seqs_of, tokens_of)):
            most, whose = getattr(plan, limit), "" if name == limit else f"{limit} "
            if getattr(chosen, name) > most:
                raise SimulationError(
                    f"{name} {getattr(chosen, name):,} is above the plan's {whose}{most:,}: compile it with "
                    f"{limit}={getattr(chosen, name)}, or give a smaller {name}"
                )
        if "num_gpu_blocks" in settings:
            return chosen
        check_room(plan, memory, most_seqs, SimulationError)
        chosen = replace(chosen, max_num_seqs=int(memory.most_running(chosen.max_num_seqs)))
        return replace(chosen, num_gpu_blocks=_blocks_of(chosen, memory, kv_len))


def _with_room_for(
    settings: EngineSettings, plan: StepPlan, tokens: int, *, is_given: bool
) -> EngineSettings:
    """Return settings whose requests may all verify so many tokens in one step."""
    limit = plan.max_num_batched_tokens
    where = f"the plan's max_num_batched_tokens {limit:,}"
    if settings.order == "mixed":
        limit = settings.max_num_batched_tokens
        where = f"max_num_batched_tokens {limit:,}"
    if settings.max_num_seqs * tokens <= limit:
        return settings
    if is_given or limit < tokens:
        raise SimulationError(
            f"max_num_seqs {settings.max_num_seqs:,} x {tokens} tokens that each request verifies are above "
            f"{where}; use at most {limit // tokens:,} requests, fewer draft tokens or larger steps"
        )
    return replace(settings, max_num_seqs=limit // tokens)


TYPICAL_TOKENS: Final = 2176
"""Tokens of a running request by default: 2,048 of a prompt and half of 256."""


def _blocks_of(settings: EngineSettings, memory: PlanMemory, kv_len: float | None) -> int:
    """Return how many blocks of tokens a plan's memory has room for.

    States, and what windowed layers keep, are set aside for as many requests of ``kv_len`` tokens as fit.
    """
    if not memory.token_parts:
        return MOST_BLOCKS
    length = min(max(round(TYPICAL_TOKENS if kv_len is None else kv_len), 1), MAX_KV_LEN)
    a_request = int(memory.parts_per_request(length))
    if memory.full_parts:
        growing = memory.full_parts * -(-length // memory.block_tokens)
        running = min(settings.max_num_seqs, memory.parts // a_request)
        left = memory.parts - running * (a_request - growing)
        tokens = left * memory.block_tokens // memory.full_parts
    else:
        tokens = memory.parts * length // a_request
    return min(max(tokens // settings.block_size, 1), MOST_BLOCKS)


def running_tokens(trace: Trace, plan: StepPlan, reserve_output: bool | None = None) -> float:
    """Return the mean tokens of a trace's running requests, as serving estimates count them."""
    if not len(trace):
        return TYPICAL_TOKENS
    if reserve_output is None:
        reserved = plan.profile.memory.osl_reserved
    else:
        reserved = 1.0 if true_or_false("reserve_output", reserve_output, SimulationError) else 0.5
    return float(trace.input_tokens.mean() + reserved * trace.output_tokens.mean())


LOOK_STEPS: Final = 8
"""Cost of a router's look at one replica, in steps.

Measured: a look 10 to 70 ns, 250 with 4,096 replicas beyond the caches; a step 8 to 40 ns.
"""


def simulated_steps(
    trace: Trace, settings: EngineSettings, replicas: int = 1, router: str = "round_robin", ranks: int = 1
) -> int:
    """Return an upper bound of a simulation's steps, with a router's looks counted as steps."""
    chunks = -(-trace.input_tokens.astype(np.int64) // settings.max_num_batched_tokens)
    steps = int(trace.output_tokens.sum(dtype=np.int64)) + int(chunks.sum())
    has_feedback = trace.is_closed or trace.has_parents
    return routed_steps(steps, len(trace), has_feedback, replicas, router, ranks)


def routed_steps(
    steps: int, requests: int, has_feedback: bool, replicas: int, router: str = "round_robin", ranks: int = 1
) -> int:
    """Return :func:`simulated_steps` from the number of requests and their steps on one engine."""
    if replicas == 1:
        return steps * ranks
    looks = replicas * requests
    if has_feedback:
        steps *= replicas
    elif router == "round_robin":
        return (steps + looks) * ranks
    return (steps + LOOK_STEPS * looks) * ranks
