"""Options, progress and report of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastroof.units import GIB
from kernels_bench.protocol import Point
from kernels_bench.sentinels import SENTINEL_EVERY, SentinelRepeat


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    done: int
    total: int
    # Of the done ones, those without a row.
    skipped: int
    point: Point
    # What it took, us; None where it was skipped.
    latency_us: float | None
    # Estimate for the rest, s; NaN if unknown.
    left_s: float


@dataclass(frozen=True)
class RunOptions:
    """How to measure."""

    gpu: str
    # Name of the run; a resumed run keeps it.
    run_id: str
    seed: int = 0
    # Seconds from now after which nothing may run any more.
    deadline_s: float | None = None
    # Seconds before the deadline that the caller needs for itself, to write tables.
    reserve_s: float = 0.0
    # Device memory for the inputs of one point.
    max_bytes: int = 16 * GIB
    # Measured at the start, about every ``sentinel_every`` points, and at the end.
    sentinels: tuple[Point, ...] = ()
    sentinel_every: int = SENTINEL_EVERY
    estimate_s: Callable[[Point], float] | None = None
    # Further facts for the start line: versions, grid, command, commit.
    start: Mapping[str, Any] = field(default_factory=dict)
    # Called after each point; called with each sentence for the user.
    on_progress: Callable[[Progress], None] | None = None
    say: Callable[[str], None] | None = None


@dataclass(frozen=True)
class RunReport:
    """What a run did."""

    # Why it ended: ``complete``, ``deadline``, ``interrupted``, ``device lost`` or ``no provider``.
    reason: str
    # Points that got a row now, and those of them that were measured twice.
    measured: int
    remeasured: int
    # Points skipped now, by kind: oom, unsupported, reference, error.
    skipped: Mapping[str, int]
    before: int
    left: int
    elapsed_s: float
    sentinels: tuple[SentinelRepeat, ...] = ()


def measuring_order(points: Sequence[Point], seed: int) -> list[Point]:
    """Return points in the order they are measured: by priority, and at random within one."""
    shuffled = sorted(points, key=lambda p: p.key)
    random.Random(seed).shuffle(shuffled)
    return sorted(shuffled, key=lambda p: p.priority)
