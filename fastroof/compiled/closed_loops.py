"""Closed loops of clients for sweeps: with a prefix cache, by number of clients or by request rate.

A replica (fastroof.compiled.serving), or prefill and decode workers (fastroof.compiled.disaggregated), are
estimated into one row of means.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.compiled import disaggregated
from fastroof.compiled import serving_options as serving_options_module
from fastroof.compiled.disaggregated import DISAGGREGATED_ROWS, LinkOptions, disaggregated_estimates
from fastroof.compiled.expert_rows import RankRules
from fastroof.compiled.jit import jit
from fastroof.compiled.serving import serving_estimates
from fastroof.compiled.serving_options import (
    DECODE_STEP_US,
    EFFECTIVE_CONCURRENCY,
    ESTIMATE_ROWS,
    MIXED_STEP_US,
    NO_FRONT_END,
    FrontEndTimes,
    ServingOptions,
    front_end_us,
    held_tokens,
    most_admitted,
)
from fastroof.compiled.steps import open_plan
from fastroof.compiled.verification import open_speculation

# outcomes of a candidate
FEASIBLE, MEMORY, CONTEXT, RATE, TTFT, TPOT, REQUEST, KV_SHARE_OVER, GPUS, PLAN_SIZE, WHOLE_PROMPT = range(11)
CODES = 11

# rows of the answers
CONCURRENCY, REQUEST_RATE, TTFT_MS, TPOT_MS, REQUEST_MS, TOKENS_PER_S, PER_GPU, PER_USER = range(8)
REQUESTS_PER_S, COST, EFFECTIVE, DECODE_STEP_MS, MIXED_STEP_MS, MIXED_SHARE, WAIT_MS, KV_SHARE = range(8, 16)
# mean steps of one replica or worker
DECODES, PREFILL_TOKENS, PROMPTS, KV_LEN = range(16, 20)
# the limit on requests that it runs with, and the room that this leaves
MAX_SEQS, ROOM = 20, 21
ANSWERS = 22

# rows that both kinds of estimate fill
MEAN_TTFT_US, MEAN_TPOT_US, MEAN_REQUEST_US, MEAN_TOKENS_PER_US, MEAN_WAIT_US = range(5)
MEAN_DECODE_STEP_US, MEAN_MIXED_STEP_US, MEAN_SHARE, MEAN_EFFECTIVE, MEAN_KV_SHARE = range(5, 10)
MEAN_DECODES, MEAN_PREFILL, MEAN_PROMPTS, MEAN_KV_LEN = range(10, 14)
MEANS = 14

MOST_CLIENTS = 2.0**20
"""Number of clients beyond which a rate counts as out of reach."""
CLOSE = 1e-6
"""Relative tolerance of a closed loop's rate."""
FAR = 0.8
"""Share of a rate that the most clients must reach; fewer clients make less, except for jumps of kernels."""


class DeploymentOptions(NamedTuple):
    """Settings of all candidates of a plan; a missing limit is inf."""

    is_disaggregated: bool
    is_rate: bool
    tp: float
    max_position: float
    osl_reserved: float
    is_chunked: bool
    transfer_us_per_token: float
    us_per_ms: float
    us_per_s: float
    gpu_price: float
    """Price of a GPU second, times a million; NaN without a price."""
    ttft_ms: float
    tpot_ms: float
    request_ms: float
    kv_share: float
    total_gpus: float
    objective: int
    window: float
    """Window of windowed layers, tokens, and the share of KV bytes within it: on workers and in transfers."""
    transfer_window: float
    window_share: float
    transfer_window_share: float
    state_tokens: float
    """State of a sequence in tokens' worth of KV cache: on workers and in transfers."""
    transfer_state_tokens: float
    is_prefill_first: bool
    length_spread: float
    steps_met: float
    rules: RankRules
    batches: float
    front_end: FrontEndTimes = NO_FRONT_END


class Scratch(NamedTuple):
    """Scratch arrays of one thread."""

    sizes: Floats
    aggregated: Floats
    disaggregated: Floats
    mean: Floats
    answer: Floats
    digits: Longs


class Sizes(NamedTuple):
    """One candidate; ``new`` of its ``isl`` tokens are not in the prefix cache."""

    replicas: float
    prefill_workers: float
    decode_workers: float
    isl: float
    new: float
    osl: float
    load: float
    budget: float
    max_num_seqs: float
    max_kv_tokens: float


def new_scratch() -> Scratch:
    """Allocate one thread's scratch arrays."""
    return Scratch(
        np.empty((6, 1)), np.empty((ESTIMATE_ROWS, 1)), np.empty((DISAGGREGATED_ROWS, 1)),
        np.empty(MEANS), np.empty(ANSWERS), np.empty(6, np.int64),
    )  # fmt: skip


@jit
def _read_times(estimate: Floats, mean: Floats) -> None:
    """Copy the leading rows that both kinds of estimate share, up to waiting."""
    for row in range(MEAN_WAIT_US + 1):
        mean[row] = estimate[row, 0]


@jit
def mean_held(isl: float, osl: float, options: DeploymentOptions) -> float:
    """Return a request's mean KV cache and state, in tokens' worth."""
    output = options.osl_reserved * osl
    return held_tokens(isl + output, options.window, options.window_share, options.state_tokens)


@jit
def _aggregated(
    arena: Floats, sizes: Sizes, clients: float, options: DeploymentOptions, scratch: Scratch
) -> int:
    """Estimate one replica into ``scratch.mean``. Returns a code."""
    held = mean_held(sizes.isl, sizes.osl, options)
    given = scratch.sizes
    given[0, 0] = sizes.isl
    given[1, 0] = sizes.new
    given[2, 0] = sizes.osl
    given[3, 0] = clients
    given[4, 0] = sizes.budget
    serving_options = ServingOptions(
        sizes.max_kv_tokens,
        sizes.max_num_seqs,
        options.osl_reserved,
        options.is_chunked,
        0.0,
        options.front_end,
        options.window,
        options.window_share,
        options.state_tokens,
        options.is_prefill_first,
        options.length_spread,
        0.0,
        options.steps_met,
        options.rules,
        options.batches,
        0.0,
        True,
    )
    code, _, _ = serving_estimates(
        arena, given[0], given[1], given[2], given[3], given[4], serving_options, scratch.aggregated
    )
    estimate = scratch.aggregated
    mean = scratch.mean
    _read_times(estimate, mean)
    mean[MEAN_DECODE_STEP_US] = estimate[DECODE_STEP_US, 0]
    mean[MEAN_MIXED_STEP_US] = estimate[MIXED_STEP_US, 0]
    mean[MEAN_SHARE] = estimate[serving_options_module.MIXED_SHARE, 0]
    mean[MEAN_EFFECTIVE] = estimate[EFFECTIVE_CONCURRENCY, 0]
    mean[MEAN_KV_SHARE] = estimate[EFFECTIVE_CONCURRENCY, 0] * held / sizes.max_kv_tokens
    mean[MEAN_DECODES] = estimate[serving_options_module.DECODES, 0]
    mean[MEAN_PREFILL] = estimate[serving_options_module.PREFILL_TOKENS, 0]
    mean[MEAN_PROMPTS] = estimate[serving_options_module.PROMPTS, 0]
    mean[MEAN_KV_LEN] = estimate[serving_options_module.KV_LEN, 0]
    return code


@jit
def _disaggregated(
    arena: Floats, sizes: Sizes, clients: float, options: DeploymentOptions, scratch: Scratch
) -> int:
    """Estimate prefill and decode workers into ``scratch.mean``. Returns a code."""
    given = scratch.sizes
    given[0, 0] = sizes.isl
    given[1, 0] = sizes.osl
    given[2, 0] = clients
    given[3, 0] = sizes.prefill_workers
    given[4, 0] = sizes.decode_workers
    given[5, 0] = sizes.budget
    link = LinkOptions(
        sizes.max_kv_tokens,
        sizes.max_kv_tokens,
        sizes.max_num_seqs,
        options.osl_reserved,
        options.is_chunked,
        options.transfer_us_per_token,
        options.window,
        options.window,
        options.transfer_window,
        options.window_share,
        options.window_share,
        options.transfer_window_share,
        options.state_tokens,
        options.state_tokens,
        options.transfer_state_tokens,
        options.front_end,
    )
    code, _, _ = disaggregated_estimates(arena, arena, given, link, scratch.disaggregated)
    estimate = scratch.disaggregated
    mean = scratch.mean
    _read_times(estimate, mean)
    mean[MEAN_DECODE_STEP_US] = estimate[disaggregated.DECODE_STEP_US, 0]
    mean[MEAN_MIXED_STEP_US] = 0.0
    mean[MEAN_SHARE] = 0.0
    # requests at a decode worker, and those in prefill or transfer
    busy_us = mean[MEAN_REQUEST_US] - mean[MEAN_WAIT_US]
    mean[MEAN_EFFECTIVE] = clients * busy_us / mean[MEAN_REQUEST_US]
    mean[MEAN_KV_SHARE] = estimate[disaggregated.KV_LOAD, 0]
    mean[MEAN_DECODES] = estimate[disaggregated.DECODES, 0]
    mean[MEAN_PREFILL] = 0.0
    mean[MEAN_PROMPTS] = 0.0
    mean[MEAN_KV_LEN] = estimate[disaggregated.KV_LEN, 0]
    return code


@jit
def closed_loop(
    arena: Floats, sizes: Sizes, clients: float, options: DeploymentOptions, scratch: Scratch
) -> int:
    """Estimate a replica, or prefill and decode workers, for at least one client. Returns the outcome."""
    if options.is_disaggregated:
        code = _disaggregated(arena, sizes, max(clients, 1.0), options, scratch)
    else:
        code = _aggregated(arena, sizes, max(clients, 1.0 / options.batches), options, scratch)
    # sizes and memory were checked before
    return FEASIBLE if code == 0 else PLAN_SIZE


@jit
def _most_clients(sizes: Sizes, options: DeploymentOptions, tokens: float) -> float:
    """Return the number of clients beyond which the rate no longer grows."""
    if options.is_disaggregated:
        return MOST_CLIENTS
    held = mean_held(sizes.isl, sizes.osl, options)
    begun = most_admitted(sizes.new, sizes.budget, options.is_chunked, tokens, options.is_prefill_first)
    return max(min(sizes.max_kv_tokens / held, sizes.max_num_seqs, begun, MOST_CLIENTS), 1.0)


@jit
def solve_rate(
    arena: Floats, sizes: Sizes, rate: float, options: DeploymentOptions, scratch: Scratch
) -> tuple[int, float]:
    """Find how many clients make ``rate`` requests/us in a closed loop. Returns a code and the number."""
    mean = scratch.mean
    code = closed_loop(arena, sizes, 1.0, options, scratch)
    if code != FEASIBLE:
        return code, 0.0
    most = _most_clients(sizes, options, open_speculation(arena, open_plan(arena)).tokens)
    low = 1.0
    short = 1.0 - 1.0 / (mean[MEAN_REQUEST_US] * rate)
    if short <= 0.0:
        # fewer than one: a client that pauses between requests
        return FEASIBLE, rate * mean[MEAN_REQUEST_US]
    at = min(rate * mean[MEAN_REQUEST_US], most)
    code = closed_loop(arena, sizes, most, options, scratch)
    # those whose request is outside the engine take no room in it
    served = most * options.batches / options.rules.ranks
    outside_us = front_end_us(options.front_end, sizes.isl, served, mean[MEAN_REQUEST_US])
    if outside_us > 0.0 and not options.is_disaggregated:
        most *= mean[MEAN_REQUEST_US] / max(mean[MEAN_REQUEST_US] - outside_us, 1.0)
        code = closed_loop(arena, sizes, most, options, scratch)
    if code == FEASIBLE and most / (mean[MEAN_REQUEST_US] * rate) < FAR:
        return RATE, 0.0
    over = 0.0
    while True:
        code = closed_loop(arena, sizes, at, options, scratch)
        if code != FEASIBLE:
            return code, 0.0
        over = at / (mean[MEAN_REQUEST_US] * rate) - 1.0
        if over >= 0.0:
            break
        if at >= most:
            # all there is, up to rounding
            return (FEASIBLE, at) if over > -CLOSE else (RATE, 0.0)
        low = at
        short = -over
        at = min(max(rate * mean[MEAN_REQUEST_US], 1.5 * at), most)
    high = at
    trial = 0
    while over > CLOSE and high - low > CLOSE * high:
        trial += 1
        at = 0.5 * (low + high) if trial % 3 == 2 else low + (high - low) * (short / (short + over))
        code = closed_loop(arena, sizes, at, options, scratch)
        excess = at / (mean[MEAN_REQUEST_US] * rate) - 1.0
        if excess >= 0.0:
            high, over, short = at, excess, 0.5 * short
        else:
            low, short, over = at, -excess, 0.5 * over
    if at != high:
        # measured kernels are jagged: the rate may lie in a jump; this is its far side
        code = closed_loop(arena, sizes, high, options, scratch)
    return code, high
