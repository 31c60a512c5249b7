"""How a run is asked for, where it stands and what it did."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastroof.units import GIB
from kernels_bench.output.repeatability import SentinelRepeat
from kernels_bench.points import Point
from kernels_bench.sentinels import SENTINEL_EVERY

__all__ = ["Progress", "RunOptions", "RunReport", "measuring_order"]


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes
    ----------
    done, total : int
        Points that need nothing more, and points of the grid.
    skipped : int
        Of the done ones, those without a row.
    point : Point
        The last one.
    latency_us : float or None
        What it took, us; None where it was skipped.
    left_s : float
        Estimate for the rest, s; NaN where there is none.
    """

    done: int
    total: int
    skipped: int
    point: Point
    latency_us: float | None
    left_s: float


@dataclass(frozen=True)
class RunOptions:
    """How to measure.

    Attributes
    ----------
    gpu : str
        Name of the GPU, for the tables.
    run_id : str
        Name of the run; a resumed run keeps it.
    seed : int
        Of the order of points and of the inputs.
    deadline_s : float, optional
        Seconds from now after which nothing may run any more.
    reserve_s : float
        Seconds before the deadline that the caller needs for itself, to write tables.
    max_bytes : int
        Device memory for the inputs of one point.
    sentinels : tuple of Point
        Measured at the start, about every ``sentinel_every`` points, and at the end.
    sentinel_every : int
        Points between two rounds.
    estimate_s : callable, optional
        Seconds that measuring a point is expected to take.
    start : mapping
        Further facts for the start line: versions, grid, command, commit.
    on_progress, say : callable, optional
        Called after each point; called with each sentence that a person should read.
    """

    gpu: str
    run_id: str
    seed: int = 0
    deadline_s: float | None = None
    reserve_s: float = 0.0
    max_bytes: int = 16 * GIB
    sentinels: tuple[Point, ...] = ()
    sentinel_every: int = SENTINEL_EVERY
    estimate_s: Callable[[Point], float] | None = None
    start: Mapping[str, Any] = field(default_factory=dict)
    on_progress: Callable[[Progress], None] | None = None
    say: Callable[[str], None] | None = None


@dataclass(frozen=True)
class RunReport:
    """What a run did.

    Attributes
    ----------
    reason : str
        Why it ended: ``complete``, ``deadline``, ``interrupted``, ``device lost`` or ``no provider``.
    measured, remeasured : int
        Points that got a row now, and those of them that were measured twice.
    skipped : mapping of str to int
        Points skipped now, by kind: oom, unsupported, reference, error.
    before, left : int
        Points that were done before, and points that are not done.
    elapsed_s : float
        Seconds it took.
    sentinels : tuple of SentinelRepeat
        How the sentinels repeated over this journal.
    """

    reason: str
    measured: int
    remeasured: int
    skipped: Mapping[str, int]
    before: int
    left: int
    elapsed_s: float
    sentinels: tuple[SentinelRepeat, ...] = ()


def measuring_order(points: Sequence[Point], seed: int) -> list[Point]:
    """Return points in the order they are measured: by priority, and at random within one.

    Parameters
    ----------
    points : sequence of Point
        The grid.
    seed : int
        The same seed gives the same order.

    Returns
    -------
    list of Point
        Random, so that drift falls on no axis of a table; by priority, so that a deadline leaves out what
        a budget would have.
    """
    shuffled = sorted(points, key=lambda p: p.key)
    random.Random(seed).shuffle(shuffled)
    return sorted(shuffled, key=lambda p: p.priority)
