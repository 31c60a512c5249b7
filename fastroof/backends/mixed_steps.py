"""What prompts add to running decodes, for programs that add the time of prompts to that of decodes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.backends.plan_facts import check_decodes_alone
from fastroof.checks import is_number, shown, whole_number
from fastroof.errors import BackendError, PlanRangeError
from fastroof.plan.start import check_room
from fastroof.run import StepBatch
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

MAX_BATCH_SIZE: Final = 256
"""Default max_num_seqs of Dynamo's mocker and AISimulate."""

BLOCK_TOKENS: Final = 64
"""Their default block_size."""

SIMULATED_REQUESTS: Final = 2000

size_of = partial(whole_number, error=BackendError)


def sizes_of(
    plan: StepPlan,
    program: str,
    max_isl: int | None,
    max_batch_size: int,
    max_context: int | None,
    beside: tuple[int, int] | None,
) -> tuple[int, int, int, tuple[int, int] | None]:
    """Return the most new tokens, requests and context of a profile, and the decodes next to its prompts."""
    running = None if beside is None else _running(plan, beside)
    if running is None:
        check_decodes_alone(plan, program)
    most_new = size_of("max_isl", plan.max_num_batched_tokens if max_isl is None else max_isl, 2)
    most_batch = size_of("max_batch_size", max_batch_size, 1)
    for name, size, limit in (
        ("max_isl", most_new, "max_num_batched_tokens"),
        ("max_batch_size", most_batch, "max_num_seqs"),
    ):
        if size > getattr(plan, limit):
            raise PlanRangeError(
                f"{name} is {size}, the plan times up to {getattr(plan, limit)}: "
                f"compile_plan(..., {limit}={size}) or a smaller {name}"
            )
    longest = size_of("max_context", plan.model.max_position if max_context is None else max_context, 2)
    if running is not None:
        most_new = min(most_new, plan.max_num_batched_tokens - running[0])
    return most_new, most_batch, longest, running


def added_us(
    plan: StepPlan, counts: Longs, new_tokens: Longs, context_len: Longs, beside: tuple[int, int] | None
) -> Floats:
    """Time steps of prompts, ``counts`` of them each, or what they add to running decodes.

    Both read the weights, which a real step reads once: that is what ``beside`` takes off the prompts.
    """
    if beside is None:
        return plan.step_us(StepBatch(new_tokens, context_len, np.r_[0, np.cumsum(counts)]))
    decodes, kv_len = beside
    starts = np.repeat(np.cumsum(counts) - counts, decodes)
    new, before = np.insert(new_tokens, starts, 1), np.insert(context_len, starts, kv_len - 1)
    together_us = plan.step_us(StepBatch(new, before, np.r_[0, np.cumsum(counts + decodes)]))
    # a jagged kernel may be faster for more rows; the program's times are never below 0
    return np.maximum(together_us - plan.decode_us(decodes, kv_len), 0.0)


def settings_of(plan: StepPlan, max_batch_size: int = MAX_BATCH_SIZE) -> EngineSettings:
    """Return fastroof's engine as the programs': synchronous, with their blocks."""
    check_room(plan, plan.memory, max_batch_size, BackendError)
    return EngineSettings(
        num_gpu_blocks=plan.memory.tokens_beside_states(max_batch_size) // BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_num_seqs=max_batch_size,
        async_scheduling=False,
    )


def decodes_beside(
    plan: StepPlan,
    *,
    rate_per_s: float,
    prompt_len: int,
    output_len: int,
    max_batch_size: int = MAX_BATCH_SIZE,
) -> tuple[int, int]:
    """Find the decodes that run next to prompts at a rate of requests: ``beside`` of a profile.

    Parameters
    ----------
    plan : StepPlan
        What times the steps.
    rate_per_s : float
        Requests a second, which come at random.
    prompt_len, output_len : int
        Tokens of each request.
    max_batch_size : int
        The program's max_num_seqs.

    Returns
    -------
    (int, int)
        Mean number of decodes, 1 to max_batch_size, and the tokens that each attends to.

    Raises
    ------
    BackendError
        If the rate is not a positive number, or a length is not an integer of at least 1.
    SimulationError
        If the engine never has room for such a request.

    Notes
    -----
    By Little's law, the rate times the mean time between the first and the last token, of 2,000 requests that
    fastroof simulates in the program's engine: synchronous, with chunked prefill and blocks of 64 tokens.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> decodes, kv_len = decodes_beside(plan, rate_per_s=20, prompt_len=1024, output_len=128)
    >>> 30 <= decodes <= 38, kv_len
    (True, 1088)
    """
    prompt, output = size_of("prompt_len", prompt_len, 1), size_of("output_len", output_len, 1)
    if not is_number(rate_per_s) or not 0 < rate_per_s < np.inf:
        raise BackendError(
            f"rate_per_s must be a positive number of requests a second, got {shown(rate_per_s)}"
        )
    arrival_s = np.random.default_rng(0).exponential(1 / rate_per_s, SIMULATED_REQUESTS).cumsum()
    trace = Trace(arrival_s, np.full(SIMULATED_REQUESTS, prompt), np.full(SIMULATED_REQUESTS, output))
    batch = size_of("max_batch_size", max_batch_size, 1)
    seen = run_engine(plan, trace, settings_of(plan, batch))
    decodes = rate_per_s * float((seen.last_us - seen.first_us).mean()) / US_PER_S
    return min(max(1, round(decodes)), batch), prompt + output // 2


def _running(plan: StepPlan, beside: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(beside, tuple) or len(beside) != 2:
        raise BackendError(
            f"beside must be the decodes that run and their tokens, as (32, 4096), got {beside!r}"
        )
    decodes, kv_len = map(size_of, ("the decodes of beside", "the tokens of beside"), beside)
    most = min(plan.max_num_seqs, plan.max_num_batched_tokens - 1)
    if decodes > most:
        raise PlanRangeError(
            f"{decodes} decodes with new tokens are more than the {most} that the plan times"
        )
    return decodes, kv_len
