"""``kernels-bench run`` and ``resume``: measure a grid, or continue a run."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.errors import MeasureError
from kernels_bench.command_options import (
    EXIT_INTERRUPTED,
    EXIT_UNFINISHED,
    HostGpu,
    PointsSeed,
    check_deadline,
    listed,
)

if TYPE_CHECKING:
    from kernels_bench.protocol import Point
    from kernels_bench.run.request import Request
    from kernels_bench.run.run_options import Progress, RunReport

PLAIN_EVERY_S: Final = 10.0

Deadline = Annotated[float | None, typer.Option(help="Maximum seconds, writing the tables included.")]


def run(
    grid: Annotated[str | None, typer.Argument(help="Grid, by name or TOML file.  [default: h100]")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the journal and the tables.")
    ] = None,
    gpu: HostGpu = None,
    budget: Annotated[
        float | None, typer.Option(help="Seconds to spend; points of the lowest priority are dropped.")
    ] = None,
    deadline: Deadline = None,
    seed: PointsSeed = 0,
    providers: Annotated[
        str,
        typer.Option(help="Providers by preference, comma-separated.  [default: all that work, except cpu]"),
    ] = "",
    only: Annotated[str, typer.Option(help="Operators, comma-separated.  [default: all]")] = "",
    resume_from: Annotated[
        Path | None, typer.Option("--resume", metavar="JOURNAL", help="Continue this journal.")
    ] = None,
) -> None:
    """Measure the points of a grid, and write the tables that fastroof reads.

    Each point is appended to OUTPUT/journal-<run>.jsonl as it finishes: `kernels-bench resume OUTPUT`
    continues a run that was killed. OUTPUT is then a folder for fastroof.load_tables. Exit codes: 0 done or
    at the deadline, 1 the device was lost or no provider is left (resume continues), 2 an error,
    130 interrupted.
    """
    from kernels_bench.run.request import Request

    request = Request(grid, gpu, listed(providers), listed(only), seed, budget)
    if resume_from is not None:
        if request != Request() or output is not None:
            raise MeasureError(
                "--resume takes all options but --deadline from the journal; leave the others out"
            )
        _go_on(resume_from, deadline)
    elif output is None:
        raise MeasureError("give -o FOLDER, where the journal and the tables go")
    else:
        _measure(request, output, None, deadline)


def resume(
    output: Annotated[Path, typer.Argument(help="Output folder of the run, or its journal.")],
    deadline: Deadline = None,
) -> None:
    """Continue a run that was killed, interrupted or stopped at its deadline, with the same options."""
    from kernels_bench.journal import find_journals

    if output.is_file():
        _go_on(output, deadline)
        return
    journals = find_journals(output)
    if not journals:
        raise MeasureError(f"{output} holds no journal-*.jsonl: nothing was begun there")
    _go_on(journals[-1], deadline)


def _go_on(journal: Path, deadline_s: float | None) -> None:
    from kernels_bench.run.request import request_of

    _measure(request_of(journal), journal.resolve().parent, journal, deadline_s)


def _measure(request: Request, output: Path, journal: Path | None, deadline_s: float | None) -> None:
    from kernels_bench.run.session import run_request

    check_deadline(deadline_s)
    with terminable(), Reporter() as reporter:
        report, written = run_request(
            request,
            output,
            resume=journal,
            deadline_s=deadline_s,
            on_start=reporter.start,
            on_progress=reporter.progress,
            say=reporter.say,
        )
    print_report(report, "points", written, output)
    if report.left:
        typer.echo(f"kernels-bench resume {output} measures what is left")
    if report.reason == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if report.reason in ("device lost", "no provider"):
        raise typer.Exit(EXIT_UNFINISHED)


def print_report(report: RunReport, words: str, journal: Path, output: Path) -> None:
    """Print what a run did; ``words`` names what it measured."""
    skipped = ", ".join(f"{count} {kind}" for kind, count in sorted(report.skipped.items()) if count)
    typer.echo(
        f"{report.reason}: {report.measured:,} {words} measured in {report.elapsed_s:.1f} s "
        f"({report.remeasured} of them twice), {report.before:,} before, "
        f"skipped {skipped or 'none'}, {report.left:,} left"
    )
    for sentinel in report.sentinels:
        typer.echo(
            f"  sentinel {sentinel.key}: {sentinel.median_us:.2f} us over {sentinel.rounds} rounds, "
            f"spread {sentinel.spread:.1%}, drift {sentinel.drift:+.1%}"
        )
    typer.echo(f"journal {journal}; tables {output}: fastroof.load_tables({str(output)!r})")


@contextmanager
def terminable() -> Iterator[None]:
    """Treat the signal by which a cluster ends a job as Ctrl-C: the tables are still written."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Reporter:
    """Shows the progress of a run on standard error: a bar on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._printed_at = time.monotonic()

    def __enter__(self) -> Reporter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            console = Console(stderr=True, markup=False, highlight=False)
            words = TextColumn("{task.description}", markup=False)
            self._bar = Progress(BarColumn(), MofNCompleteColumn(), words, console=console)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, points: Sequence[Point], title: str) -> None:
        """Return what begins."""
        self.say(f"{len(points):,} points on {title}")
        if self._bar is not None:
            self._task = self._bar.add_task("", total=len(points))

    def progress(self, progress: Progress) -> None:
        """Show one point more."""
        left = f"{progress.left_s:.0f} s left" if progress.left_s == progress.left_s else ""
        took = "skipped" if progress.latency_us is None else f"{progress.latency_us:.2f} us"
        if self._bar is not None:
            words = f"{left}  {progress.point.operator} {took}"
            self._bar.update(self._task, completed=progress.done, description=words)
        elif time.monotonic() - self._printed_at >= PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            self.say(f"{progress.done:,} of {progress.total:,} points, {progress.skipped:,} skipped, {left}")

    def say(self, sentence: str) -> None:
        """Write one line."""
        if self._bar is not None:
            self._bar.console.print(sentence)
        else:
            typer.echo(sentence, err=True)
