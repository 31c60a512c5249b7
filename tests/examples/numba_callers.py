"""Your own serving engine, in a loop that Numba compiles.

Run it with ``python -m tests.examples.numba_callers``. :func:`fastroof.simulate` has schedulers
of the engines that are supported; to try another one, copy :func:`serve` and change the marked line.
Here that is the order in which waiting requests are admitted. What to take over from it:

* ``step_us, data = fastroof.numba_step(plan)`` once. ``data`` goes into the loop as an argument, so that one
  compiled loop serves every plan.
* What a step holds is written into two arrays that are made before the loop, and their first places are
  handed on: a step allocates nothing.
* A step that the plan cannot time (beyond its ``max_num_batched_tokens`` or ``max_num_seqs``) is NaN. Nothing
  is raised, so the loop checks, and returns what it finds.
* The clock is a float64 of microseconds, a sum of steps: the same steps in the same order have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numba
import numpy as np

import fastroof
from fastroof.arrays import Floats, Ints


def serve(
    plan: fastroof.StepPlan,
    arrival_us: Floats,
    input_tokens: Ints,
    output_tokens: Ints,
    *,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 1024,
    shortest_first: bool = False,
) -> tuple[Floats, Floats, int]:
    """Serve requests with chunked prefill, running ones before waiting ones; KV memory is not counted.

    Parameters
    ----------
    plan : StepPlan
        What times steps.
    arrival_us : ndarray of float64, shape (requests,)
        Ascending.
    input_tokens, output_tokens : ndarray of int64, shape (requests,)
        Prompts, and outputs with their first token.
    max_num_batched_tokens, max_num_seqs : int
        Tokens and requests of a step; no more requests than tokens.
    shortest_first : bool
        Whether the shortest waiting prompt is admitted next, or the one that came first.

    Returns
    -------
    first_us, last_us : ndarray of float64
        When each request had its first and its last token, on the clock of the arrivals.
    steps : int
        Steps that ran.

    Raises
    ------
    PlanRangeError
        If a step is larger than the plan, or a sequence longer than any.

    Examples
    --------
    >>> import fastroof, numpy as np
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> first_us, last_us, steps = serve(plan, np.array([0.0]), np.array([1000]), np.array([2]))
    >>> bool(first_us[0] == plan.prefill_us(1000)), steps
    (True, 2)
    """
    step_us, data = fastroof.numba_step(plan)
    first_us, last_us = np.full(len(arrival_us), np.nan), np.full(len(arrival_us), np.nan)
    requests = arrival_us, input_tokens, output_tokens
    steps = _serve(
        step_us, data, *requests, max_num_batched_tokens, max_num_seqs, shortest_first, first_us, last_us
    )
    if steps < 0:
        raise fastroof.PlanRangeError(
            f"step {-steps} is larger than {plan}: compile it with max_num_batched_tokens of at least "
            f"{max_num_batched_tokens} and max_num_seqs of at least {max_num_seqs}"
        )
    return first_us, last_us, steps


@numba.njit(nogil=True, error_model="numpy")
def _serve(
    step_us: Callable[..., float],
    data: Floats,
    arrival_us: Floats,
    input_tokens: Ints,
    output_tokens: Ints,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    shortest_first: bool,
    first_us: Floats,
    last_us: Floats,
) -> int:
    """Write first and last tokens. Returns the steps; less than 0 at one that has no time."""
    requests = len(arrival_us)
    computed, generated = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    waiting, running = np.empty(requests, np.int64), np.empty(max_num_seqs, np.int64)
    new_tokens, context_len = np.empty(max_num_seqs, np.int64), np.empty(max_num_seqs, np.int64)
    arrived, admitted, batch_size, steps, now_us = 0, 0, 0, 0, 0.0
    while True:
        while arrived < requests and arrival_us[arrived] <= now_us:
            waiting[arrived] = arrived
            arrived += 1
        if batch_size == 0 and admitted == arrived:
            if arrived == requests:
                return steps
            now_us = arrival_us[arrived]  # an idle engine starts at the next arrival
            continue

        # ---- the scheduler: which requests run in this step, and how many tokens of each
        budget = max_num_batched_tokens
        for slot in range(batch_size):
            request = running[slot]
            new_tokens[slot] = min(input_tokens[request] + generated[request] - computed[request], budget)
            budget -= new_tokens[slot]
        while budget > 0 and batch_size < max_num_seqs and admitted < arrived:
            chosen = admitted
            if shortest_first:  # here goes a policy of your own
                for place in range(admitted + 1, arrived):
                    if input_tokens[waiting[place]] < input_tokens[waiting[chosen]]:
                        chosen = place
            request = waiting[chosen]
            for place in range(chosen, admitted, -1):  # those that wait on keep their order
                waiting[place] = waiting[place - 1]
            admitted += 1
            running[batch_size] = request
            new_tokens[batch_size] = min(input_tokens[request], budget)
            budget -= new_tokens[batch_size]
            batch_size += 1

        # ---- the step, timed by the plan
        for slot in range(batch_size):
            context_len[slot] = computed[running[slot]]
        took_us = step_us(data, new_tokens[:batch_size], context_len[:batch_size])
        steps += 1
        if np.isnan(took_us):
            return -steps
        now_us += took_us

        # ---- its end: tokens, and requests that leave
        kept = 0
        for slot in range(batch_size):
            request = running[slot]
            computed[request] += new_tokens[slot]
            if computed[request] == input_tokens[request] + generated[request]:
                generated[request] += 1
                if generated[request] == 1:
                    first_us[request] = now_us
                if generated[request] == output_tokens[request]:
                    last_us[request] = now_us
                    continue
            running[kept] = request
            kept += 1
        batch_size = kept


def main() -> None:
    """Serve 10,000 requests first come first served, and shortest prompt first."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    random = np.random.default_rng(1)
    requests, per_s = 10_000, 20.0
    arrival_us = random.exponential(1e6 / per_s, requests).cumsum()
    input_tokens = random.lognormal(6.6, 0.8, requests).astype(np.int64).clip(16, 16_384)
    output_tokens = random.lognormal(5.0, 0.7, requests).astype(np.int64).clip(1, 2_048)
    for shortest_first in (False, True):
        arguments = plan, arrival_us, input_tokens, output_tokens
        serve(*arguments, shortest_first=shortest_first)  # compiles
        began_s = time.perf_counter()
        first_us, _, steps = serve(*arguments, shortest_first=shortest_first)
        took_s = time.perf_counter() - began_s
        ttft_ms = (first_us - arrival_us) / 1e3
        p50, p99 = np.percentile(ttft_ms, [50, 99])
        order = "shortest prompt first" if shortest_first else "first come, first served"
        print(f"{order}: TTFT p50 {p50:.1f} ms, p99 {p99:.0f} ms; {took_s / steps * 1e9:.0f} ns a step")


if __name__ == "__main__":
    main()
