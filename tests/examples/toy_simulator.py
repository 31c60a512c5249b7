"""A simulator of your own: running requests first, then waiting ones as they came, in chunks.

Run it with ``python -m tests.examples.toy_simulator``; ``serve`` of ``fastroof/backends/c/simulate.c`` is the
same in C. :func:`fastroof.simulate` differs only where memory is short: here requests wait for all of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import fastroof


def serve(
    plan: fastroof.StepPlan,
    arrival_us: Sequence[float],
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
    *,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> tuple[list[float], list[float]]:
    """Return when each request had its first and its last token, us; arrivals ascend."""
    count = len(arrival_us)
    computed, generated, first_us, last_us = [0] * count, [0] * count, [0.0] * count, [0.0] * count
    running: list[int] = []
    waiting, now_us, room = 0, 0.0, plan.memory.max_kv_tokens
    whole = [one + other for one, other in zip(input_tokens, output_tokens, strict=True)]
    assert max(whole) <= room
    while waiting < count or running:
        if not running:  # an idle engine starts at the next arrival
            now_us = max(now_us, arrival_us[waiting])
        left, new_tokens, place = max_num_batched_tokens, [], 0
        while True:
            if place == len(running):  # all that run have their tokens: admit another one, or run the step
                if waiting == count or arrival_us[waiting] > now_us or left == 0 or place == max_num_seqs:
                    break
                if room < whole[waiting]:
                    break
                room -= whole[waiting]
                running.append(waiting)
                waiting += 1
            one = running[place]
            new_tokens.append(min(input_tokens[one] + generated[one] - computed[one], left))
            left -= new_tokens[-1]
            place += 1
        now_us += plan.step_scalar(new_tokens, [computed[one] for one in running])  # context: in the KV cache
        for one, tokens in zip(running, new_tokens, strict=True):
            computed[one] += tokens
            if computed[one] == input_tokens[one] + generated[one]:  # it has a token
                generated[one] += 1
                first_us[one] = first_us[one] or now_us
                if generated[one] == output_tokens[one]:
                    last_us[one] = now_us
                    room += whole[one]
        running = [one for one in running if generated[one] < output_tokens[one]]
    return first_us, last_us


def main() -> None:
    """Serve what simulate.c serves, 2,000 requests of it, and compare with fastroof.simulate."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    count = 2000
    trace = fastroof.Trace([0.125 * i for i in range(count)], [1024] * count, [128] * count)
    arrival_us = (trace.arrival_s * 1e6).tolist()
    first_us, last_us = serve(plan, arrival_us, trace.input_tokens.tolist(), trace.output_tokens.tolist())
    ttft_ms = [(first - arrived) / 1e3 for first, arrived in zip(first_us, arrival_us, strict=True)]
    print(
        f"TTFT {mean(ttft_ms):.3f} ms mean, {ttft_ms[-1]:.3f} of the last; {last_us[-1] / 1e6:.3f} s in all"
    )
    served = fastroof.simulate(plan, trace, max_num_batched_tokens=2048, max_num_seqs=256).requests
    seen_ms = served.column("ttft_ms").to_pylist()
    apart_ms = max(abs(own - other) for own, other in zip(ttft_ms, seen_ms, strict=True))
    print(f"fastroof.simulate: every TTFT within {apart_ms:.1g} ms")


if __name__ == "__main__":
    main()
