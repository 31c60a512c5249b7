"""Options of serving estimates, their codes, and the rows of their answers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastroof.compiled.expert_rows import ONE_RANK, RankRules
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.request_sums import MAX_KV_LEN

KvRoom = Any
"""Room for KV cache: (blocks, blocks of a block's tokens in layers without a window, the same in windowed
layers, tokens that those reserve at most, blocks of a sequence whatever its length, tokens of a block in both
kinds of layers, most sequences).

A tuple of eight integers, or such a row of an array; (tokens, 1, 0, 0, 0, 1, 1, MAX_KV_LEN) counts tokens.
"""


@jit_inline
def held_parts(room: KvRoom, kv_len: int) -> int:
    """Count the blocks that a sequence takes."""
    full, within = int(room[5]), int(room[6])
    held = int(room[1]) * ((kv_len + full - 1) // full) + int(room[4])
    return held + int(room[2]) * ((min(kv_len, int(room[3])) + within - 1) // within)


@jit_inline
def longest_held(room: KvRoom, sequences: int) -> int:
    """Return the longest length at which ``sequences`` fit, at most MAX_KV_LEN."""
    blocks = int(room[0]) // sequences
    if sequences > room[7] or held_parts(room, 1) > blocks:
        return 0
    low, high = 1, MAX_KV_LEN
    while low < high:
        middle = (low + high + 1) // 2
        if held_parts(room, middle) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


@jit_inline
def held_tokens(tokens: float, window: float, window_share: float, state_tokens: float) -> float:
    """Return a sequence's KV cache and state in tokens' worth; a share of its bytes is within a window."""
    return tokens - window_share * max(tokens - window, 0.0) + state_tokens


CODE_SIZES = 1
"""An invalid size."""
CODE_KV = 2
"""One request alone is larger than the KV cache."""
CODE_WHOLE_PROMPT = 3
"""Prompts are not chunked and one is larger than a step."""
CODE_TOKENS = 4
"""A step with more tokens than the plan covers."""
CODE_SEQS = 5
"""A step with more sequences than the plan covers."""

# rows of the answer; tokens are those of all clients
TTFT_US, TPOT_US, REQUEST_US, TOKENS_PER_US, WAIT_US, DECODE_STEP_US, MIXED_STEP_US = range(7)
EFFECTIVE_CONCURRENCY, MIXED_SHARE, DECODES, PREFILL_TOKENS, PROMPTS, KV_LEN = range(7, 13)
ESTIMATE_ROWS = 13


AT_RANDOM = -1.0
"""``ServingOptions.steps_met`` of requests that arrive at random times, not as another one ends; less the
number of steps that an asynchronous scheduler has made ahead by then."""


@jit_inline
def steps_ahead(steps_met: float) -> float:
    """Return the steps made ahead that a request waits for in addition to the rest of the running one."""
    return max(AT_RANDOM - steps_met, 0.0)


@jit_inline
def steps_waited(steps_met: float) -> float:
    """Return the steps before the first that may have an arriving prompt, a running one counted whole."""
    return 1.0 + steps_ahead(steps_met) if steps_met < 0.0 else steps_met


@jit_inline
def async_steps(steps_met: float) -> float:
    """Return the steps that an asynchronous scheduler has made ahead."""
    return steps_ahead(steps_met) if steps_met < 0.0 else steps_met


class FrontEndTimes(NamedTuple):
    """Time of a request outside the engine, of a prompt token, and of a request on the API server, us."""

    request_us: float = 0.0
    token_us: float = 0.0
    server_us: float = 0.0


NO_FRONT_END = FrontEndTimes()
NOTICED = 0.02
"""Share of the clients outside the engine from which the engine is estimated again without them."""


@jit_inline
def front_end_us(front_end: FrontEndTimes, isl: float, clients: float, engine_us: float) -> float:
    """Return the time of a request outside the engine, us; an API server has one thread for all clients."""
    alone_us = front_end.request_us + front_end.server_us + front_end.token_us * isl
    return max(alone_us, front_end.server_us * clients - engine_us)


class ServingOptions(NamedTuple):
    """Options of all scenarios of a call; 0 requests per client is the steady state alone."""

    max_kv_tokens: float
    max_num_seqs: float
    osl_reserved: float
    is_chunked: bool
    requests_per_client: float
    front_end: FrontEndTimes = NO_FRONT_END
    window: float = 0.0
    window_share: float = 0.0
    state_tokens: float = 0.0
    is_prefill_first: bool = False
    length_spread: float = 0.0
    wait_steps: float = 0.0
    steps_met: float = AT_RANDOM
    rules: RankRules = ONE_RANK
    batches: float = 1.0
    pause_steps: float = 0.0
    is_closed: bool = True


@jit
def most_admitted(
    isl: float, budget: float, is_chunked: bool, tokens: float, is_prefill_first: bool
) -> float:
    """Return how many requests fit a step's budget, ``tokens`` each, the newest still with its prompt."""
    if is_prefill_first:
        # the budget is for prompts alone
        return math.inf if is_chunked or isl <= budget else 0.0
    # a whole prompt starts if the decodes leave room for it
    room = budget if is_chunked else budget - isl + 1.0
    return (room + (tokens - 1.0)) / tokens


@jit_inline
def held_room(tokens: float, options: ServingOptions) -> float:
    """Return a request's KV cache and state in tokens' worth."""
    return held_tokens(tokens, options.window, options.window_share, options.state_tokens)
