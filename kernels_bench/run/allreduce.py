"""Measures collectives, which need several GPUs and so a process each: every rank launches the same calls."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from fastroof.errors import MeasureError
from fastroof.units import DTYPE_BYTES
from kernels_bench.journal import Journal, done_keys
from kernels_bench.operators.communication import ALLREDUCE, BY_RANKS, COLLECTIVE
from kernels_bench.protocol import Clock, DeviceState, Monitor, Point, Timing
from kernels_bench.providers.vllm_experts import vllm_version
from kernels_bench.replays import relative_iqr, summarise, suspicion
from kernels_bench.run.allreduce_points import MODES
from kernels_bench.run.allreduce_rank import Answer, Order
from kernels_bench.run.allreduce_ranks import (
    POINT_TIMEOUT_S,
    START_TIMEOUT_S,
    RanksTimeoutError,
    SpawnedRanks,
)
from kernels_bench.run.check import BOUNDS
from kernels_bench.run.collective_calls import COLLECTIVE_CALLS
from kernels_bench.run.journaled_run import JournaledRun
from kernels_bench.run.run_options import RunOptions, RunReport, measuring_order

START_S: Final = 15.0
"""What the ranks of a world are expected to take to meet, until the first did."""
POINT_S: Final = 1.0
DTYPES: Final = ("bf16", "fp16")

OpenRanks = Callable[[int, str, float], SpawnedRanks]


def slowest_rank(answers: Sequence[Answer]) -> Timing:
    """Merge what the ranks timed: the timing of the one with the largest median.

    >>> fast, slow = Answer((9.0, 4.0, 4.0), 2), Answer((9.0, 6.0, 6.0), 2)
    >>> slowest_rank([fast, slow]).latency_us
    3.0
    """
    if len({(one.calls, len(one.replays_us)) for one in answers}) != 1:
        counts = ", ".join(f"{len(one.replays_us)} replays of {one.calls} calls" for one in answers)
        raise MeasureError(f"the ranks did not time the same calls: {counts}")
    timings = [summarise(one.replays_us, one.calls) for one in answers]
    return max(timings, key=lambda timing: timing.latency_us)


def joined(first: RunReport, second: RunReport) -> RunReport:
    """Return what two parts of a run did together."""
    return replace(
        first,
        reason=first.reason if first.reason != "complete" else second.reason,
        measured=first.measured + second.measured,
        remeasured=first.remeasured + second.remeasured,
        skipped=dict(Counter(first.skipped) + Counter(second.skipped)),
        before=first.before + second.before,
        left=first.left + second.left,
        elapsed_s=first.elapsed_s + second.elapsed_s,
    )


def measure_allreduce(
    points: Sequence[Point],
    backend: str,
    monitor: Monitor,
    clock: Clock,
    journal: Path,
    options: RunOptions,
    open_ranks: OpenRanks = SpawnedRanks,
) -> RunReport:
    """Measure every all-reduce and other collective that the journal does not have yet."""
    if other := [p.key for p in points if p.operator not in BY_RANKS]:
        raise MeasureError(f"{other[0]} is not a collective")
    with Journal(journal, clock) as book:
        return _Run(points, backend, monitor, clock, book, options, open_ranks).go()


class _Run(JournaledRun):
    """One call of :func:`measure_allreduce`."""

    def __init__(
        self,
        points: Sequence[Point],
        backend: str,
        monitor: Monitor,
        clock: Clock,
        book: Journal,
        options: RunOptions,
        open_ranks: OpenRanks,
    ) -> None:
        super().__init__(measuring_order(points, options.seed), book, clock, options)
        self.backend, self.monitor, self.open_ranks = backend, monitor, open_ranks
        self.failed: dict[str, str] = {}
        self.start_s, self.point_s = START_S, POINT_S

    def go(self) -> RunReport:
        facts = dict(self.monitor.facts())
        self.refuse_other_device(facts)
        done = done_keys(self.book.records) & set(self.points)
        self.before = len(done)
        queue = [p for p in self.points.values() if p.key not in done]
        names = {p.operator for p in self.points.values()}
        self.start(facts, part=COLLECTIVE if names == {COLLECTIVE} else ALLREDUCE, backend=self.backend)
        try:
            reason = self._worlds(queue)
        except KeyboardInterrupt:
            reason = "interrupted"
        return self.ended(reason)

    def _worlds(self, queue: Sequence[Point]) -> str:
        late = False
        worlds: dict[tuple[str, int], list[Point]] = {}
        for point in queue:
            if not self._skip_unfit(point):
                worlds.setdefault((self._launcher(point), point.values["num_gpus"]), []).append(point)
        for (launcher, num_gpus), mine in sorted(worlds.items()):
            if self._left_s() < self.start_s + self.point_s:
                return "deadline"
            try:
                late |= self._world(launcher, num_gpus, mine)
            except RanksTimeoutError:
                if self._left_s() > 0:
                    raise
                return "deadline"
        return "deadline" if late else "complete"

    def _launcher(self, point: Point) -> str:
        """Who launches a point, empty for a mode that is not measured here."""
        mode = point.values.get("mode")
        return self.backend if mode is None else MODES[self.backend].get(mode, "")

    def _world(self, launcher: str, num_gpus: int, points: Sequence[Point]) -> bool:
        """Measure the points of one world; whether the deadline left some."""
        before_s = self.clock()
        ranks = self.open_ranks(num_gpus, launcher, min(START_TIMEOUT_S, self._left_s()))
        try:
            self.start_s = self.clock() - before_s
            for point in points:
                if self._left_s() < self.point_s:
                    return True
                before_s = self.clock()
                latency_us = self._point(point, ranks)
                # The longest so far: a deadline should hold for the largest message too.
                self.point_s = max(self.point_s, self.clock() - before_s)
                tried = self.measured + self.skipped.total()
                left = len(self.points) - self.before - tried
                self.tell(point, latency_us, self.elapsed_s() / tried * left)
        finally:
            ranks.close()
        return False

    def _point(self, point: Point, ranks: SpawnedRanks) -> float | None:
        """Measure or skip one point; return its latency in us, None where it was skipped."""
        if point.family in self.failed:
            self.skip(point, "reference", self.failed[point.family])
            return None
        timed = self._timed(point, ranks)
        if isinstance(timed, str):
            self.say(f"out of memory, skipped: {point.key}")
            self.skip(point, "oom", timed)
            return None
        timing, state, remeasured, error, kernel = timed
        bound = BOUNDS[point.values["dtype"]]
        if timing is None:
            reason = (
                f"{kernel} is wrong at {point.key}: relative error {error:.3g} "
                f"against float64, the bound is {bound:g}"
            )
            self.say(f"reference check failed, {point.family} is not measured any further: {reason}")
            self.failed[point.family] = reason
            self.skip(point, "reference", reason)
            return None
        row = {"key": point.key, "operator": point.operator, "values": dict(point.values), **asdict(timing)}
        provider = "vllm" if self._launcher(point) == "vllm" else "torch"
        row |= {"provider": provider, "kernel": kernel, **asdict(state)}
        order, at_s = self.order[point.key], self.elapsed_s()
        self.book.append({"type": "row", **row, "remeasured": remeasured, "order": order, "at_s": at_s})
        self.measured += 1
        self.remeasured += remeasured
        return timing.latency_us

    def _timed(
        self, point: Point, ranks: SpawnedRanks
    ) -> str | tuple[Timing | None, DeviceState, bool, float, str]:
        """Time a point, once more where its replays are far apart; a sentence where memory ran out."""
        v = point.values
        seed = zlib.crc32(point.key.encode()) ^ self.options.seed
        mode, collective = v.get("mode", self.backend), v.get("collective", "all_reduce")
        order = Order(v["dtype"], mode, v["message_bytes"], seed, self.options.max_bytes, collective)
        kept: list[tuple[Timing, DeviceState]] = []
        while len(kept) < 2:
            answers = ranks.time(order, min(POINT_TIMEOUT_S, max(0.0, self._left_s())))
            error = max(one.error for one in answers)
            kernel = answers[0].kernel or ranks.ready.kernel.replace("all_reduce", collective)
            if any(one.out_of_memory for one in answers):
                return "out of memory on some rank"
            if not error <= BOUNDS[v["dtype"]]:
                return None, DeviceState(), False, error, kernel
            kept.append((slowest_rank(answers), self.monitor.read()))
            if not any(suspicion(*kept[-1], ())):
                break
        timing, state = min(kept, key=lambda one: relative_iqr(one[0]))
        return timing, state, len(kept) > 1, error, kernel

    def _skip_unfit(self, point: Point) -> bool:
        """Skip a point that no rank could time; whether it was."""
        v = point.values
        collective, reason = v.get("collective", "all_reduce"), None
        element_bytes = DTYPE_BYTES.get(v["dtype"], 1)
        if v["dtype"] not in DTYPES:
            reason = f"collectives are measured in {', '.join(DTYPES)}, not {v['dtype']}"
        elif not (launcher := self._launcher(point)):
            reason = f"{self.backend} is measured as {', '.join(MODES[self.backend])}, not {v['mode']}"
        elif launcher == "vllm" and not vllm_version():
            reason = f"mode {v['mode']} is an engine's own all-reduce: it needs vllm, mode nccl does not"
        elif v["message_bytes"] % element_bytes:
            reason = f"a message of {v['message_bytes']} B is not a whole number of elements"
        elif collective == "all_reduce" and v["dtype"] != "bf16":
            reason = f"all-reduce is measured in bf16, not {v['dtype']}"
        elif COLLECTIVE_CALLS[collective].is_shared and v["message_bytes"] % (element_bytes * v["num_gpus"]):
            reason = f"a message of {v['message_bytes']} B has no equal part for each of {v['num_gpus']} GPUs"
        if reason is not None:
            self.skip(point, "unsupported", reason)
        return reason is not None

    def _left_s(self) -> float:
        """Seconds until the deadline less what the caller needs, infinite without one."""
        deadline_s = self.options.deadline_s
        if deadline_s is None:
            return float("inf")
        return deadline_s - self.options.reserve_s - self.elapsed_s()
