"""Times one engine step, from the return of one step to that of the next, and a closed loop of clients."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final

from fastroof.errors import MeasureError
from fastroof.units import MS_PER_S, US_PER_S
from kernels_bench.protocol import Timing
from kernels_bench.replays import summarise
from kernels_bench.vllm_steps.core import VllmCore
from kernels_bench.vllm_steps.points import (
    MIXED_REPEATS,
    PREFILL_REPEATS,
    STEPS_BETWEEN,
    TIMED_STEPS,
    WARM_STEPS,
    EnginePoint,
)

_LEFT_OUT: Final = "a step leaves requests out: the KV cache or a limit does not hold the batch"
_MAX_EMPTY: Final = 40
_LONG_S: Final = 2.0
"""Prefills that took this long together are enough after three."""


def time_point(engine: VllmCore, point: EnginePoint) -> Timing:
    """Time one point, or raise a MeasureError if the engine does not run it as one step."""
    times = {"decode": _decode_us, "prefill": _prefill_us, "mixed": _mixed_us}[point.phase](engine, point)
    return summarise(times, calls=1, dropped=0)


def _next_step(engine: VllmCore) -> dict[str, tuple[int, bool]]:
    """Run steps until one returns tokens: with asynchronous scheduling the first returns none."""
    for _ in range(_MAX_EMPTY):
        if got := engine.step():
            return dict(got)
    raise MeasureError("the engine runs steps without tokens")


def _run_until(engine: VllmCore, names: Sequence[str], steps: int) -> None:
    """Run until all requests have had a token in each of ``steps`` steps."""
    for _ in range(steps + _MAX_EMPTY):
        steps -= set(names) <= engine.step().keys()
        if steps <= 0:
            return
    raise MeasureError(_LEFT_OUT)


def _add_decodes(engine: VllmCore, point: EnginePoint, count: int, steps: int) -> list[str]:
    start = point.start_len
    return [engine.add(start, start - 1, WARM_STEPS + steps + 40) for _ in range(count)]


def _decode_us(engine: VllmCore, point: EnginePoint) -> list[float]:
    count = point.sizes[0]
    names = _add_decodes(engine, point, count, TIMED_STEPS)
    times: list[float] = []
    try:
        _run_until(engine, names, WARM_STEPS)
        last = perf_counter()
        for _ in range(TIMED_STEPS):
            is_whole = len(_next_step(engine)) == count
            now = perf_counter()
            if not is_whole:
                raise MeasureError(_LEFT_OUT)
            times.append((now - last) * US_PER_S)
            last = now
    finally:
        engine.abort(names)
    return times


def _prefill_us(engine: VllmCore, point: EnginePoint) -> list[float]:
    """Time from a request's being added to its first token, with nothing else to do."""
    new, cached = point.sizes
    times: list[float] = []
    for _ in range(PREFILL_REPEATS):
        engine.synchronize()
        name = engine.add(new + cached, cached, 1)
        begun = perf_counter()
        _run_until(engine, [name], 1)
        times.append((perf_counter() - begun) * US_PER_S)
        engine.abort([name])
        if len(times) > 2 and sum(times) > _LONG_S * US_PER_S:
            break
    return times[1:]


def _mixed_us(engine: VllmCore, point: EnginePoint) -> list[float]:
    """Time the step that returns the first token of a request that is added while decodes run."""
    new, count, _ = point.sizes
    names = _add_decodes(engine, point, count, MIXED_REPEATS * (STEPS_BETWEEN + 2))
    times: list[float] = []
    try:
        _run_until(engine, names, WARM_STEPS)
        for _ in range(MIXED_REPEATS):
            engine.synchronize()
            late = engine.add(new, 0, 1)
            last = perf_counter()
            for _ in range(_MAX_EMPTY):  # steps in flight end first
                got = engine.step()
                now = perf_counter()
                if late in got:
                    break
                last = now if got else last
            else:
                raise MeasureError(_LEFT_OUT)
            times.append((now - last) * US_PER_S)
            for _ in range(STEPS_BETWEEN - 1):
                engine.step()
    finally:
        engine.abort(names)
    return times[1:]


def closed_loop(engine: VllmCore, clients: int, seconds: float, max_tokens: int) -> dict[str, Any]:
    """Run clients with one request each at a time, of chat-like lengths, and return what they saw.

    Prompts have 148 tokens in the median, outputs 181, both log-normal, and at most ``max_tokens`` together.
    No prefix is shared. Quantiles are of requests that began after a quarter of the time.
    """
    draw = random.Random(clients)
    seen: dict[str, list[float]] = {}
    lengths: dict[str, tuple[int, int]] = {}

    def begin() -> None:
        prompt = int(min(4096, 3 * max_tokens // 4, max(8, draw.lognormvariate(5.0, 1.1))))
        tokens = int(min(1024, max_tokens // 4, max(8, draw.lognormvariate(5.2, 0.8))))
        name = engine.add(prompt, 0, tokens)
        seen[name], lengths[name] = [perf_counter()], (prompt, tokens)

    step_us: list[float] = []
    requests: list[dict[str, float]] = []
    num_tokens = 0
    for _ in range(clients):
        begin()
    begun = last = perf_counter()
    while last - begun < seconds:
        got = engine.step()
        now = perf_counter()
        step_us.append((now - last) * US_PER_S)
        last = now
        for name, (new, is_finished) in got.items():
            num_tokens += new
            if name not in seen:
                continue
            if new:
                seen[name].append(now)
            if is_finished:
                at, (prompt, tokens) = seen.pop(name), lengths.pop(name)
                requests.append({
                    "prompt": prompt, "tokens": tokens, "begin_s": round(at[0] - begun, 5),
                    "ttft_ms": round((at[1] - at[0]) * MS_PER_S, 4),
                    "tpot_ms": round((at[-1] - at[1]) / max(1, tokens - 1) * MS_PER_S, 5),
                })  # fmt: skip
                begin()
    engine.abort(list(seen))
    steady = [one for one in requests if one["begin_s"] > 0.25 * seconds]
    return {
        "clients": clients, "seconds": last - begun, "steps": len(step_us), "num_requests": len(requests),
        "output_tokens_per_s": num_tokens / (last - begun),
        "ttft_ms": _quantiles([one["ttft_ms"] for one in steady]),
        "tpot_ms": _quantiles([one["tpot_ms"] for one in steady]), "step_us": _quantiles(step_us),
        "requests": requests,
    }  # fmt: skip


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "mean": statistics.fmean(values)}
