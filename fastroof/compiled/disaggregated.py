"""The loop behind disaggregated estimates: prefill workers hand requests over to decode workers.

Clients cycle through prefill, link and decode. The number that decode at once is found by search: the more
decode, the higher the rate, and the more clients there are in all three places. The formulas are those of
:func:`fastroof.serving.estimate_disaggregated`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled import serving_options as S
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.mean_steps import (
    draft_decode_us,
    draft_prompt_us,
    mean_decode_step_us,
    prompt_steps_us,
)
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import FrontEndTimes, front_end_us, held_tokens
from fastroof.compiled.steps import PlanParts, open_plan
from fastroof.compiled.verification import Speculation, decode_steps, open_speculation

CODE_PREFILL_KV = 6
"""One prompt alone is larger than the KV cache of a prefill worker."""
CODE_DECODE_SEQS = 7
"""A decode step of more sequences than the plan times."""

# rows of the answer; tokens are those of all clients
TTFT_US, TPOT_US, REQUEST_US, TOKENS_PER_US, WAIT_US, PREFILL_US, TRANSFER_US = range(7)
PREFILL_BATCH, PREFILL_LOAD, LINK_LOAD, DECODES, DECODE_STEP_US, KV_LEN, KV_LOAD = range(7, 14)
DISAGGREGATED_ROWS = 14

TRIALS = 100
CLOSE = 1e-10
"""Relative error at which the search ends; over random scenarios the median is 6 trials, the mean 11."""

MAX_LOAD = 1.0 - 1e-9
"""Largest utilization of a queue whose length is computed."""


class LinkOptions(NamedTuple):
    """Options of all scenarios of a call."""

    prefill_kv_tokens: float
    decode_kv_tokens: float
    max_num_seqs: float
    osl_reserved: float
    is_chunked: bool
    transfer_us_per_token: float
    prefill_window: float = 0.0
    decode_window: float = 0.0
    transfer_window: float = 0.0
    prefill_window_share: float = 0.0
    decode_window_share: float = 0.0
    transfer_window_share: float = 0.0
    prefill_state_tokens: float = 0.0
    decode_state_tokens: float = 0.0
    transfer_state_tokens: float = 0.0
    front_end: FrontEndTimes = S.NO_FRONT_END


class PrefillWorker(NamedTuple):
    """One worker's smallest and largest batch of prompts, and a step's ``tokens``."""

    one_us: float
    most: float
    most_us: float
    tokens: float


class PrefillTime(NamedTuple):
    """A prompt's wait at a prefill worker, and its batch's prompts and time."""

    wait_us: float
    batch: float
    batch_us: float


@jit_inline
def _transfer_us(isl: float, options: LinkOptions) -> float:
    """Time to send a prompt's KV cache and state from one worker to another, us."""
    window, share = options.transfer_window, options.transfer_window_share
    held = held_tokens(isl, window, share, options.transfer_state_tokens)
    return held * options.transfer_us_per_token


@jit_inline
def _prefill_held(tokens: float, options: LinkOptions) -> float:
    """Return the tokens' worth of KV cache and state of a sequence on a prefill worker."""
    window, share = options.prefill_window, options.prefill_window_share
    return held_tokens(tokens, window, share, options.prefill_state_tokens)


@jit_inline
def _decode_held(tokens: float, options: LinkOptions) -> float:
    """Return the tokens' worth of KV cache and state of a sequence on a decode worker."""
    window, share = options.decode_window, options.decode_window_share
    return held_tokens(tokens, window, share, options.decode_state_tokens)


@jit
def _prefill_worker(
    arena: Floats, plan: PlanParts, isl: float, budget: float, options: LinkOptions
) -> PrefillWorker:
    """Time the smallest and the largest batch of whole prompts."""
    there = open_speculation(arena, plan)
    # the draft reads prompts here; the decode worker's drafts tokens
    drafts = Speculation(1.0, 1.0, 1.0, there.head_at, there.head_last, 0, 0, there.draft_at, 1.0)
    held = _prefill_held(isl, options)
    most = max(math.floor(min(budget / isl, options.prefill_kv_tokens / held)), 1.0)
    one = prompt_steps_us(arena, plan, drafts, isl, budget, 0.0, 0.0, 0.0)
    full = prompt_steps_us(arena, plan, drafts, isl, budget, most - 1.0, 0.0, 0.0)
    one_us, full_us = one.us, full.us
    if drafts.draft_at > 0:
        one_us += draft_prompt_us(arena, drafts, isl, 1.0, budget, 0.0, 0.0)
        full_us += draft_prompt_us(arena, drafts, isl, 1.0, budget, most - 1.0, 0.0)
    return PrefillWorker(one_us, most, full_us, full.tokens)


@jit
def _decode_us(
    arena: Floats, plan: PlanParts, speculation: Speculation, decodes: float, isl: float, osl: float
) -> float:
    """Time a decode worker's mean step, including its draft's steps, us."""
    step_us = mean_decode_step_us(arena, plan, speculation, decodes, isl, osl)
    if speculation.draft_at > 0:
        step_us += draft_decode_us(arena, speculation, decodes, isl, osl)
    return step_us


@jit
def _prefill_time(worker: PrefillWorker, arrivals: float) -> PrefillTime:
    """Time a prompt at a prefill worker with ``arrivals`` per us."""
    more_us = (worker.most_us - worker.one_us) / max(worker.most - 1.0, 1.0)
    batch = 1.0
    batch_us = worker.one_us
    busy = 0.0
    # two numbers that depend on each other
    for _ in range(4):
        busy = min(arrivals * batch_us / batch, 1.0)
        rest = 1.0 - busy * arrivals * more_us
        batch = worker.most
        if rest > 0.0:
            meanwhile = (1.0 + busy * arrivals * (worker.one_us - more_us)) / rest
            batch = min(max(meanwhile, 1.0), worker.most)
        batch_us = worker.one_us + (batch - 1.0) * more_us
    load = min(arrivals * worker.most_us / worker.most, MAX_LOAD)
    longer = max(1.0 / ((1.0 - load * load) * worker.most) - 1.0, 0.0)
    wait_us = 0.5 * (busy * batch_us + longer * (1.0 + load) * worker.most_us)
    return PrefillTime(wait_us, batch, batch_us)


@jit
def _scenario(
    prefill_arena: Floats,
    prefill: PlanParts,
    decode_arena: Floats,
    decode: PlanParts,
    sizes: Any,
    options: LinkOptions,
    out: Any,
) -> tuple[int, float]:
    """Estimate one scenario into its column of the answer. Returns a code and the size it concerns."""
    isl, osl, clients, prefill_workers, decode_workers, budget = sizes
    if not (1.0 <= isl <= MAX_KV_LEN and 2.0 <= osl <= MAX_KV_LEN):
        return S.CODE_SIZES, 0.0
    if not (1.0 <= clients <= MAX_KV_LEN and 1.0 <= budget <= MAX_KV_LEN):
        return S.CODE_SIZES, 0.0
    if not (1.0 <= prefill_workers <= MAX_KV_LEN and 1.0 <= decode_workers <= MAX_KV_LEN):
        return S.CODE_SIZES, 0.0
    held = _decode_held(isl + osl, options)
    if held > options.decode_kv_tokens or isl + osl > MAX_KV_LEN:
        return S.CODE_KV, held
    held = _prefill_held(isl, options)
    if held > options.prefill_kv_tokens:
        return CODE_PREFILL_KV, held
    if not options.is_chunked and isl > budget:
        return S.CODE_WHOLE_PROMPT, isl
    speculation = open_speculation(decode_arena, decode)
    gaps = osl - 1.0
    output_steps = decode_steps(osl, speculation.accepted)
    others = (clients - 1.0) / clients
    transfer_us = _transfer_us(isl, options)
    # without a bound: workers share no API server
    front_us = front_end_us(options.front_end, isl, 0.0, 0.0)
    worker = _prefill_worker(prefill_arena, prefill, isl, budget, options)
    prefill_rate = prefill_workers * worker.most / worker.most_us
    link_rate = prefill_workers / transfer_us if transfer_us > 0.0 else math.inf
    rate_limit = min(prefill_rate, link_rate)
    a_request = _decode_held(isl + options.osl_reserved * osl, options)
    most = min(options.decode_kv_tokens / a_request, options.max_num_seqs)

    low = 0.0
    high = min(clients / decode_workers, most)
    at = high
    too_few = 1.0
    too_many = 0.0
    high_moved = False
    rate = 0.0
    decode_us = 0.0
    decoding = 1.0
    prompt = PrefillTime(0.0, 1.0, worker.one_us)
    trial = 0
    while True:
        # besides itself, a decoding request shares its worker with an even share of the others
        decoding = min(max(1.0 / decode_workers + at * others, 1.0), most)
        decode_us = _decode_us(decode_arena, decode, speculation, decoding, isl, osl)
        rate = decode_workers * at / (output_steps * decode_us)
        prompt = _prefill_time(worker, rate * others / prefill_workers)
        there = rate * (front_us + prompt.wait_us + prompt.batch_us + transfer_us) + decode_workers * at
        # scaled to -1 to 1, since queues near their limit have any length
        over = max(
            there / clients - 1.0 if there < clients else 1.0 - clients / there, rate / rate_limit - 1.0
        )
        trial += 1
        if abs(over) <= CLOSE or (trial == 1 and over < 0.0) or trial == TRIALS:
            break
        # regula falsi, the retained end weighted by half (Illinois); occasional bisection, so that it cannot
        # stall
        if over > 0.0:
            too_few *= 0.5 if high_moved else 1.0
            high, too_many, high_moved = at, over, True
        else:
            too_many *= 1.0 if high_moved else 0.5
            low, too_few, high_moved = at, -over, False
        share = 0.5 if trial % 4 == 0 else too_few / (too_few + too_many)
        at = low + (high - low) * share
    # Little's law: clients over requests a second is the time from one request to the next
    ttft_us = max(clients / rate - output_steps * decode_us, front_us + prompt.batch_us + transfer_us)
    request_us = ttft_us + output_steps * decode_us
    out[TTFT_US] = ttft_us
    out[TPOT_US] = decode_us * (output_steps / gaps)
    out[REQUEST_US] = request_us
    out[TOKENS_PER_US] = clients * osl / request_us
    out[WAIT_US] = ttft_us - (front_us + prompt.batch_us + transfer_us)
    out[PREFILL_US] = prompt.batch_us
    out[TRANSFER_US] = transfer_us
    out[PREFILL_BATCH] = prompt.batch
    out[PREFILL_LOAD] = rate / prefill_rate
    out[LINK_LOAD] = rate / link_rate
    out[DECODES] = decoding
    out[DECODE_STEP_US] = decode_us
    out[KV_LEN] = isl + 0.5 * osl
    out[KV_LOAD] = at * a_request / options.decode_kv_tokens
    if worker.most > prefill.max_num_seqs:
        return S.CODE_SEQS, worker.most
    if worker.tokens > prefill.max_num_batched_tokens:
        return S.CODE_TOKENS, worker.tokens
    if decoding > min(decode.max_num_seqs, decode.max_num_batched_tokens / speculation.tokens):
        return CODE_DECODE_SEQS, decoding
    return 0, 0.0


@jit
def disaggregated_estimates(
    prefill_arena: Floats, decode_arena: Floats, scenarios: Floats, options: LinkOptions, out: Floats
) -> tuple[int, int, float]:
    """Estimate scenarios into ``out``, a column each; its rows are named above."""
    prefill = open_plan(prefill_arena)
    decode = open_plan(decode_arena)
    for i in range(scenarios.shape[1]):
        sizes = (
            scenarios[0, i],
            scenarios[1, i],
            scenarios[2, i],
            scenarios[3, i],
            scenarios[4, i],
            scenarios[5, i],
        )
        code, needed = _scenario(prefill_arena, prefill, decode_arena, decode, sizes, options, out[:, i])
        if code != 0:
            return code, i, needed
    return 0, 0, 0.0
