"""What measuring costs before anything runs: seconds and device memory, and what a budget leaves out.

The rates of :mod:`kernels_bench.operators` are what kernels of the H100 were seen to reach, as shares of
a card's datasheet peaks, so that another card's points get an estimate too. They plan a run; they never
become a row of a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.config.gpu import GpuSpec
from fastroof.errors import MeasureError
from fastroof.operators.registry import OPERATORS
from fastroof.units import PEAK_DTYPE, US_PER_S
from kernels_bench.operators.operator import MeasuredOperator
from kernels_bench.operators.registry import MEASURED
from kernels_bench.protocol import Point
from kernels_bench.providers.device import largest_cache_bytes
from kernels_bench.providers.rotating import L2_MULTIPLE, MAX_SETS
from kernels_bench.replays import pilot_calls, schedule
from kernels_bench.sentinels import SENTINEL_EVERY, SOAK, SOAK_US

SETUP_S: Final = 6e-3
"""Making one set of inputs and reading the device's state."""
SET_S: Final = 20e-6
"""Making each further set: a few small tensors."""
CAPTURE_S: Final = 5e-6
"""Capturing one call into a graph."""

USABLE_MEMORY: Final = 0.9
"""Share of the memory that points may fill; the rest is for the CUDA context, libraries and workspaces."""

SENTINEL_PRIORITY: Final = 0
"""Points of this priority are sentinels: repeated through a run and never dropped."""


class Estimate(NamedTuple):
    """What one point is expected to take."""

    # Of one call, from the roofline at rates that kernels reach.
    latency_us: float
    # Of measuring it, set-up and warm-up included.
    seconds: float
    device_bytes: int


def estimate_all(points: Sequence[Point], gpu: GpuSpec) -> list[Estimate]:
    """Estimate what each point takes.

    >>> from fastroof.config import load_gpu
    >>> point = Point("gemm", {"dtype": "bf16", "m": 4096, "n": 4096, "k": 4096})
    >>> round(estimate_all([point], load_gpu("h100"))[0].latency_us)
    233
    """
    estimates: list[Estimate | None] = [None] * len(points)
    rows_of: dict[str, list[int]] = {}
    for i, point in enumerate(points):
        rows_of.setdefault(point.operator, []).append(i)
    for name, rows in rows_of.items():
        of_operator = _estimate_operator(MEASURED[name], [points[i] for i in rows], gpu)
        for i, one in zip(rows, of_operator, strict=True):
            estimates[i] = one
    return [one for one in estimates if one is not None]


def _estimate_operator(operator: MeasuredOperator, points: Sequence[Point], gpu: GpuSpec) -> list[Estimate]:
    columns = {name: np.array([point.values[name] for point in points]) for name in operator.columns}
    work = OPERATORS[operator.name].work({**columns, "latency_us": np.ones(len(points))}, gpu)
    compute_s = work.flops / (work.peak_flops_per_s * operator.flops_shares(columns))
    move_s = work.moved_bytes / (work.bandwidth_bytes_per_s * operator.bandwidth_share)
    latency_us = (operator.launch_us + np.fmax(compute_s, move_s) * US_PER_S).tolist()
    one_set = operator.set_bytes(columns, work.moved_bytes)
    sets = np.minimum(L2_MULTIPLE * largest_cache_bytes(gpu) // one_set + 1, MAX_SETS).astype(np.int64)
    sets[~operator.rotates(columns)] = 1
    held = sets * one_set
    fill_s = held / operator.fill_bytes_per_s(columns)
    each = zip(latency_us, sets.tolist(), held.tolist(), fill_s.tolist(), strict=True)
    return [
        Estimate(call_us, _seconds(call_us, num_sets) + made_s, math.ceil(held_bytes))
        for call_us, num_sets, held_bytes, made_s in each
    ]


def _seconds(call_us: float, num_sets: int) -> float:
    """Seconds a point takes; a first graph is captured to find how long a call takes, then the timed one."""
    timed = schedule(call_us, num_sets)
    captured = pilot_calls(num_sets) + timed.calls
    replays_us = (timed.warm_up + timed.replays) * timed.calls * call_us
    return SETUP_S + SET_S * (num_sets - 1) + CAPTURE_S * captured + replays_us / US_PER_S


def first_call_seconds(points: Sequence[Point]) -> list[float]:
    """Estimate what first calls take beyond their points: imports, and kernels that are compiled.

    >>> first_call_seconds([Point("gemm", {"dtype": "bf16", "m": 1, "n": 64, "k": 64})])
    [0.0]
    """
    seen: set[tuple[Any, ...]] = set()
    seconds = []
    for point in points:
        operator = MEASURED[point.operator]
        first_s = 0.0
        shape = operator.compiled_shape(point.values)
        parts = [(("import",), operator.import_s), *([] if shape is None else [(shape, operator.compile_s)])]
        for part, part_s in parts:
            if (point.operator, *part) not in seen:
                seen.add((point.operator, *part))
                first_s += part_s
        seconds.append(first_s)
    return seconds


def run_seconds(points: Sequence[Point], gpu: GpuSpec) -> float:
    """Seconds of measuring all points, with first calls, and the sentinels again every 200 points."""
    seconds = [one.seconds for one in estimate_all(points, gpu)]
    sentinel_s = _round_seconds(points, seconds)
    return sum(seconds) + sum(first_call_seconds(points)) + _sentinel_rounds(len(points)) * sentinel_s


def _round_seconds(points: Sequence[Point], seconds: Sequence[float]) -> float:
    """Return the seconds of a round of sentinels."""
    soaks_us = sum(SOAK_US for point in points if point.group == SOAK)
    of_points = zip(points, seconds, strict=True)
    return sum(s for p, s in of_points if p.priority == SENTINEL_PRIORITY) + soaks_us / US_PER_S


def _sentinel_rounds(num_points: int) -> int:
    """Rounds beyond the sentinels' own places in the grid."""
    return math.ceil(num_points / SENTINEL_EVERY)


def unfit(points: Sequence[Point], gpu: GpuSpec) -> list[tuple[Point, str]]:
    """Return the points that a GPU cannot measure, with reasons."""
    usable_bytes = USABLE_MEMORY * gpu.hbm_bytes
    left_out = []
    for point, one in zip(points, estimate_all(points, gpu), strict=True):
        dtype = point.values.get("dtype", "bf16")
        computes = MEASURED[point.operator].computes_in_dtype
        if computes and PEAK_DTYPE.get(dtype) not in gpu.peak_flops_per_s:
            left_out.append((point, f"{gpu.title} has no units for {dtype}"))
        elif one.device_bytes > usable_bytes:
            reason = (
                f"needs {one.device_bytes:,} B of device memory, "
                f"{gpu.title} has {usable_bytes:,.0f} B for points ({USABLE_MEMORY:.0%} of its memory)"
            )
            left_out.append((point, reason))
    return left_out


def fit_budget(points: Sequence[Point], gpu: GpuSpec, budget_s: float) -> tuple[list[Point], list[Point]]:
    """Drop whole points until the rest is estimated to fit a number of seconds."""
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise MeasureError(f"a budget is a number of seconds above zero, got {budget_s!r}")
    seconds = [one.seconds for one in estimate_all(points, gpu)]
    rank = _ranks(points)
    order = sorted(range(len(points)), key=lambda i: (points[i].priority, rank[i], i))
    sentinel_s = _round_seconds(points, seconds)
    chosen: set[int] = set()
    total_s = 0.0
    for i, first_s in zip(order, first_call_seconds([points[i] for i in order]), strict=True):
        total_s += seconds[i] + first_s
        if total_s + _sentinel_rounds(len(chosen) + 1) * sentinel_s > budget_s:
            if points[i].priority == SENTINEL_PRIORITY:
                need_s = 2 * sentinel_s
                raise MeasureError(
                    f"a budget of {budget_s:g} s is too short for the sentinels alone, "
                    f"which take {need_s:.2g} s"
                )
            break
        chosen.add(i)
    kept = [point for i, point in enumerate(points) if i in chosen]
    return kept, [point for i, point in enumerate(points) if i not in chosen]


def _ranks(points: Sequence[Point]) -> list[float]:
    """Place of each point in its line, from 0 (kept to the end) towards 1 (dropped first)."""
    rows_by_line: dict[tuple[Any, ...], list[int]] = {}
    for i, point in enumerate(points):
        rows_by_line.setdefault(_line(point), []).append(i)
    rank = [0.0] * len(points)
    for rows in rows_by_line.values():
        for place, position in enumerate(_ends_then_halves(len(rows))):
            rank[rows[position]] = place / len(rows)
    return rank


def _line(point: Point) -> tuple[Any, ...]:
    operator = MEASURED[point.operator]
    keys = tuple(point.values[column.name] for column in operator.schema.keys)
    return point.group, point.operator, *keys, *operator.line(point.values)


def _ends_then_halves(count: int) -> list[int]:
    """Order positions 0 to count - 1: both ends, the middle, the middles of the halves, ..."""
    order = [0, count - 1] if count > 1 else [0]
    gaps = [(0, count - 1)]
    while gaps:
        halves = []
        for low, high in gaps:
            middle = (low + high) // 2
            if middle != low:
                order.append(middle)
                halves += [(low, middle), (middle, high)]
        gaps = halves
    return order
