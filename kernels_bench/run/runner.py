"""Measures points one after another, and writes each to the journal before the next begins."""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fastroof.errors import MeasureError
from kernels_bench.journal import Journal, done_keys, starts
from kernels_bench.protocol import Clock, DeviceState, Monitor, Point, Prepared, Provider, Timer, Timing
from kernels_bench.replays import relative_iqr, suspicion
from kernels_bench.run.check import check_points, check_result
from kernels_bench.run.journaled_run import JournaledRun
from kernels_bench.run.run_options import RunOptions, RunReport, measuring_order
from kernels_bench.sentinels import SOAK, SOAK_US, repeatability

MAX_FAILURES: Final = 10
"""Failures in a row after which a provider is not used any more."""

_LOST: Final = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "uncorrectable ecc error",
    "device is lost",
    "gpu is lost",
    "cuda error: unknown error",
)
"""CUDA errors after which nothing more runs in this process."""


def measure(
    points: Sequence[Point],
    providers: Sequence[Provider],
    timer: Timer,
    monitor: Monitor,
    clock: Clock,
    journal: Path,
    options: RunOptions,
) -> RunReport:
    """Measure every point that the journal does not have yet."""
    if not providers:
        raise MeasureError("no provider works here; `kernels-bench providers` lists the reasons")
    with Journal(journal, clock) as book:
        return _Run(points, providers, timer, monitor, clock, book, options).go()


class _Run(JournaledRun):
    """One call of :func:`measure`."""

    def __init__(
        self,
        points: Sequence[Point],
        providers: Sequence[Provider],
        timer: Timer,
        monitor: Monitor,
        clock: Clock,
        book: Journal,
        options: RunOptions,
    ) -> None:
        super().__init__(measuring_order(points, options.seed), book, clock, options)
        self.providers, self.timer, self.monitor = providers, timer, monitor
        self.families: dict[str, list[Point]] = {}
        for point in self.points.values():
            self.families.setdefault(point.family, []).append(point)
        self.failed_checks: dict[tuple[str, str], str | None] = {}
        self.failures: dict[str, list[Point]] = {p.name: [] for p in providers}
        self.stopped: set[str] = set()
        self.clocks_mhz: list[float] = []
        self.round = 1 + max((r["round"] for r in book.records if r["type"] == "sentinel"), default=-1)
        self.dead_sentinels: set[str] = set()
        self.since_sentinels = 0
        self.lost = self.late = self.orphaned = False
        self.round_s = 0.0
        self.spent_s, self.expected_s = 0.0, 0.0

    # -- the run -----------------------------------------------------------------------------------

    def go(self) -> RunReport:
        facts = dict(self.monitor.facts())
        self.refuse_other_device(facts)
        self._warn_of_other_versions()
        done = done_keys(self.book.records) & set(self.points)
        self.before = len(done)
        self.queue = deque(point for key, point in self.points.items() if key not in done)
        estimate_s = self.options.estimate_s or (lambda point: 0.0)
        self.estimates = {p.key: estimate_s(p) for p in self.queue}
        self.queued_s = sum(self.estimates.values())
        if self.start(facts):
            self.say(
                f"resumed: {self.before} of {len(self.points)} points were done, {len(self.queue)} are left"
            )
        try:
            reason = self._loop()
        except KeyboardInterrupt:
            reason = "interrupted"
        lines = [r for r in self.book.records if r["type"] == "sentinel"]
        return self.ended(reason, repeatability(self.options.run_id, lines))

    def _loop(self) -> str:
        if not self.queue:
            return "complete"
        self._sentinels()
        while self.queue and not self.lost:
            if self._is_late(0.0):
                self.late = True
                break
            point = self.queue.popleft()
            expected_s = self.estimates[point.key]
            self.queued_s -= expected_s
            if self._is_late(expected_s * max(1.0, self._pace())):
                self.late = True  # a shorter one may still fit
                continue
            before_s = self.clock()
            latency_us = self._point(point)
            self.spent_s += self.clock() - before_s
            self.expected_s += expected_s
            estimated = self.options.estimate_s is not None
            self.tell(point, latency_us, self.queued_s * self._pace() if estimated else float("nan"))
            if self.since_sentinels >= self.options.sentinel_every and not self.lost:
                self._sentinels()
        if self.lost:
            return "device lost"
        if self.since_sentinels:
            self._sentinels()
        if self.late:
            return "deadline"
        return "no provider" if self.orphaned else "complete"

    def _warn_of_other_versions(self) -> None:
        for start in starts(self.book.records)[-1:]:
            versions, now = start.get("versions", {}), self.options.start.get("versions", {})
            changed = [f"{n} {versions.get(n)} -> {v}" for n, v in now.items() if versions.get(n) != v]
            if changed:
                self.say(f"warning: versions changed since the run began: {', '.join(changed)}")

    # -- one point ---------------------------------------------------------------------------------

    def _point(self, point: Point) -> float | None:
        """Measure or skip one point; return its latency in us, None where it was skipped."""
        provider, refusals, was_stopped = self._choose(point)
        if provider is None:
            if was_stopped:
                self.orphaned = True  # not this point's fault: a resumed run may have the provider back
            else:
                self.skip(point, "unsupported", "; ".join(refusals))
            return None
        try:
            wrong = self._failed_check(provider, point)
            if wrong is not None:
                self.skip(point, "reference", wrong)
                return None
            timed = self._timed(provider, point)
        except MemoryError as error:
            self.say(f"out of memory, skipped: {point.key}")
            self.skip(point, "oom", _words(error) or "out of memory")
            return None
        except Exception as error:
            self._failed(provider, point, error)
            return None
        self.failures[provider.name].clear()
        self.book.append({"type": "row", **timed, "order": self.order[point.key]})
        self.measured += 1
        self.remeasured += timed["remeasured"]
        self.since_sentinels += 1
        return float(timed["latency_us"])

    def _choose(self, point: Point) -> tuple[Provider | None, list[str], bool]:
        """Return the first provider that takes a point, why the others don't, and if a stopped one would."""
        refusals: list[str] = []
        was_stopped = False
        for provider in self.providers:
            reason = refusal(provider, point)
            if reason is None and provider.name not in self.stopped:
                return provider, refusals, was_stopped
            was_stopped |= reason is None
            refusals.append(f"{provider.name}: {reason or 'stopped after failing'}")
        return None, refusals, was_stopped

    def _failed_check(self, provider: Provider, point: Point) -> str | None:
        """Return why a family's check failed, None where it passed; run it where it was not run yet."""
        key = provider.name, point.family
        if key not in self.failed_checks:
            self.failed_checks[key] = self._check_family(provider, point)
        return self.failed_checks[key]

    def _check_family(self, provider: Provider, point: Point) -> str | None:
        family = self.families.get(point.family, [point])
        mine = [p for p in family if self._choose(p)[0] is provider]
        too_large: MemoryError | None = None
        checked = 0
        candidates = check_points(mine)
        for candidate in candidates:
            try:
                prepared = self._prepare(provider, candidate)
                with _closing(prepared):
                    check = check_result(candidate, prepared)
            except MemoryError as error:
                too_large = error
                continue
            checked += 1
            if not check.passed:
                reason = (
                    f"{provider.name} ({prepared.kernel}) is wrong at {candidate.key}: relative error "
                    f"{check.error:.3g} against float64, the bound is {check.bound:g}"
                )
                self.say(f"reference check failed, {point.family} is not measured: {reason}")
                return reason
        if candidates and not checked and too_large is not None:
            raise too_large
        return None

    def _timed(self, provider: Provider, point: Point, warm_up_us: float = 0.0) -> dict[str, Any]:
        """Time a point, once more where the first time is suspicious, and return its row."""
        prepared = self._prepare(provider, point)
        limited_us = self.monitor.power_limited_us()
        with _closing(prepared):
            timing, state = self.timer.time(prepared, self.monitor.read, warm_up_us)
            remeasured = any(suspicion(timing, state, self.clocks_mhz))
            if remeasured:
                again = self.timer.time(prepared, self.monitor.read, warm_up_us)
                # The steadier of the two, whichever is faster: choosing by latency would favour luck.
                timing, state = min((timing, state), again, key=self._unsteadiness)
        return {
            "key": point.key,
            "operator": point.operator,
            "values": dict(point.values),
            **asdict(timing),
            "provider": provider.name,
            "kernel": prepared.kernel,
            **prepared.columns,
            **asdict(state),
            "power_limited_us": self.monitor.power_limited_us() - limited_us,
            "remeasured": remeasured,
            "at_s": self.elapsed_s(),
        }

    def _unsteadiness(self, measured: tuple[Timing, DeviceState]) -> tuple[int, float]:
        timing, state = measured
        return sum(suspicion(timing, state, self.clocks_mhz)), relative_iqr(timing)

    def _prepare(self, provider: Provider, point: Point) -> Prepared:
        # From the key, so that a point has the same inputs whenever it is measured.
        seed = zlib.crc32(point.key.encode()) ^ self.options.seed
        return provider.prepare(point, seed, self.options.max_bytes)

    def _failed(self, provider: Provider, point: Point, error: Exception) -> None:
        reason = f"{provider.name}: {type(error).__name__}: {_words(error)}"
        self.skip(point, "error", reason)
        self.say(f"failed, skipped: {point.key}: {reason}")
        failures = self.failures[provider.name]
        failures.append(point)
        if any(words in str(error).lower() for words in _LOST):
            self.lost = True
            self.say("the device is lost to this process; a resumed run continues in a new one")
        elif len(failures) >= MAX_FAILURES:
            self.stopped.add(provider.name)
            self.say(
                f"{provider.name} failed {len(failures)} times in a row and is not used any more: {reason}"
            )
            self._retry(failures)

    def _retry(self, failures: Sequence[Point]) -> None:
        """Queue the points of a stopped provider again where another one takes them."""
        again = [p for p in failures if self._choose(p)[0] is not None]
        self.queue.extend(again)
        self.queued_s += sum(self.estimates[p.key] for p in again)
        self.skipped["error"] -= len(again)

    # -- sentinels, time and words -------------------------------------------------------------------

    def _sentinels(self) -> None:
        clocks, before_s = [], self.clock()
        for point in self.options.sentinels:
            if point.key in self.dead_sentinels:
                continue
            try:
                provider, refusals, _ = self._choose(point)
                wrong = "; ".join(refusals) if provider is None else self._failed_check(provider, point)
                if provider is None or wrong is not None:
                    raise MeasureError(wrong or "no provider takes it")
                self.clocks_mhz = []  # a sentinel is not held against the sentinels
                timed = self._timed(provider, point, SOAK_US if point.group == SOAK else 0.0)
            except Exception as error:
                self.dead_sentinels.add(point.key)
                self.say(f"sentinel left out: {point.key}: {_words(error)}")
                continue
            self.book.append({"type": "sentinel", **timed, "round": self.round, "order": -1})
            clocks.append(timed["sm_clock_mhz"])
        self.clocks_mhz = clocks
        self.round += 1
        self.since_sentinels = 0
        self.round_s = self.clock() - before_s

    def _is_late(self, need_s: float) -> bool:
        """Whether something of ``need_s``, the last sentinels and the reserve would pass the deadline."""
        deadline_s, after_s = self.options.deadline_s, self.round_s + self.options.reserve_s
        return deadline_s is not None and self.elapsed_s() + need_s + after_s > deadline_s

    def _pace(self) -> float:
        """Seconds that points took over what was expected of them."""
        return self.spent_s / self.expected_s if self.expected_s else 1.0


def refusal(provider: Provider, point: Point) -> str | None:
    """Return why a provider does not take a point, be it that it fails to answer; None if it takes it."""
    try:
        return provider.refuses(point)
    except Exception as error:
        return f"{type(error).__name__}: {_words(error)}"


@contextlib.contextmanager
def _closing(prepared: Prepared) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # on a lost device even freeing fails
            prepared.close()


def _words(error: BaseException) -> str:
    """First line of an error's message: CUDA errors continue with advice for debugging."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
