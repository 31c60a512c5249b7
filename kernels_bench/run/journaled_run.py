"""What every run does around its points: the journal, what was skipped, the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastroof.errors import MeasureError
from kernels_bench.journal import Journal, starts
from kernels_bench.protocol import Clock, Point
from kernels_bench.run.run_options import Progress, RunOptions, RunReport
from kernels_bench.sentinels import SentinelRepeat


class JournaledRun:
    """A run that appends to a journal."""

    def __init__(self, points: Sequence[Point], book: Journal, clock: Clock, options: RunOptions) -> None:
        self.book, self.clock, self.options = book, clock, options
        self.points = {point.key: point for point in points}
        self.order = {key: i for i, key in enumerate(self.points)}
        self.before = self.measured = self.remeasured = 0
        self.skipped: Counter[str] = Counter()
        self.started_s = clock()

    def refuse_other_device(self, facts: Mapping[str, Any]) -> None:
        """Refuse the journal of another GPU."""
        for start in starts(self.book.records):
            gpu_names = start.get("facts", {}).get("gpu_name"), facts.get("gpu_name")
            if start["gpu"] != self.options.gpu or (all(gpu_names) and gpu_names[0] != gpu_names[1]):
                raise MeasureError(
                    f"{self.book.path} was measured on {start['gpu']} ({gpu_names[0]}), this is "
                    f"{self.options.gpu} ({gpu_names[1]}): one journal holds one GPU, give another -o"
                )

    def start(self, facts: Mapping[str, Any], **part: Any) -> bool:
        """Write how the run begins, and ``part`` of what; return whether it continues an earlier one."""
        options, resumed = self.options, bool(starts(self.book.records))
        self.book.append(
            {
                "type": "start",
                "run_id": options.run_id,
                "gpu": options.gpu,
                "facts": facts,
                "seed": options.seed,
                "resumed": resumed,
                "num_points": len(self.points),
                **part,
                **options.start,
            }
        )
        return resumed

    def skip(self, point: Point, kind: str, reason: str) -> None:
        """Write that a point has no row, and why: ``kind`` is oom, unsupported, reference or error."""
        skip = {"operator": point.operator, "values": dict(point.values), "reason": reason, "kind": kind}
        self.book.append({"type": "skip", "key": point.key, **skip})
        self.skipped[kind] += 1

    def ended(self, reason: str, sentinels: Sequence[SentinelRepeat] = ()) -> RunReport:
        """Write why the run ended, and return what it did."""
        report = RunReport(
            reason=reason,
            measured=self.measured,
            remeasured=self.remeasured,
            skipped=dict(self.skipped),
            before=self.before,
            left=len(self.points) - self.before - self.measured - self.skipped.total(),
            elapsed_s=self.elapsed_s(),
            sentinels=tuple(sentinels),
        )
        facts_run = {name: value for name, value in asdict(report).items() if name != "sentinels"}
        self.book.append({"type": "end", "run_id": self.options.run_id, **facts_run})
        return report

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self.clock() - self.started_s

    def tell(self, point: Point, latency_us: float | None, left_s: float) -> None:
        """Tell whoever watches where the run stands after a point."""
        if self.options.on_progress is None:
            return
        skipped = self.skipped.total()
        done = self.before + self.measured + skipped
        self.options.on_progress(Progress(done, len(self.points), skipped, point, latency_us, left_s))

    def say(self, sentence: str) -> None:
        """Print a sentence for the user."""
        if self.options.say is not None:
            self.options.say(sentence)
