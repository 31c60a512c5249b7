"""``fastroof sweep``: the main job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fastroof.cli.output import console, duration, percent, print_json, print_table
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.sweep import BestStep, SweepSummary

__all__ = ["register"]

LOG_EVERY_S: Final = 5.0

EPILOG: Final = """\b
Examples:
  fastroof sweep
  fastroof sweep my.toml -o my.parquet --threads 8

The specification is TOML; the packaged one, fastroof/sweep/default.toml, explains every key. The columns of
the results are listed with their units in fastroof.columns.SWEEP_COLUMNS.

\b
JSON: output, plans, evaluations, evaluations_per_s, rows, evaluate_s, total_s, infeasible (evaluations beyond
memory, and beyond the TPOT limit), skipped (reason: names), best: one object a plan [model, tp, dtype,
kv_dtype, kv_len, batch_size, step_us, tokens_per_s, tokens_per_s_per_gpu, limited_by, origin,
relative_error (of the step's time), standing (best of its model in tokens/s a GPU, or tie: no further from it
than their errors)], batch_size 0 and nulls where no batch is within the limits.
"""

Progress = Callable[[int, int], None]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep", epilog=EPILOG)(sweep)


def sweep(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC.toml]", help="What to sweep; without it the packaged sweep."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the results go: .parquet or .csv.")
    ] = Path("results.parquet"),
    threads: Annotated[int | None, typer.Option(help="Threads to use.  [default: all processors]")] = None,
    engine: Annotated[str, typer.Option(help="Where the sweep runs: local.")] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Time millions of steps, keep the best batches.

    Every combination of model, tensor-parallel size, dtype, batch size and context is one decode step.

    The best throughput of each model, split and dtype within the limit on time per output token and within
    memory is printed at the end.
    """
    from fastroof import run_sweep

    with _progress(quiet=as_json) as progress:
        summary = run_sweep(
            spec, output, engine, threads=_all_processors() if threads is None else threads, progress=progress
        )
    if as_json:
        print_json({**asdict(summary), "evaluations_per_s": summary.evaluations_per_s})
    else:
        _print(summary)


def _all_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress]:
    """Show progress on standard error: a bar on a terminal, a line now and then in a log."""
    if quiet:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("sweep", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("plans", markup=False), TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console(stderr=True)) as bar:
            task = bar.add_task("sweep", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _LineLog()


class _LineLog:
    """Progress as lines: the first plan, the last, and one every few seconds between."""

    def __init__(self) -> None:
        self.said_at = 0.0
        self.said = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done != self.said and (done == total or now - self.said_at >= LOG_EVERY_S):
            self.said_at, self.said = now, done
            typer.echo(f"sweep: {done} of {total} plans", err=True)


def _print(summary: SweepSummary) -> None:
    out = console()
    kv_dtypes = {best.kv_dtype for best in summary.best}
    kv_lens = {best.kv_len for best in summary.best}
    columns = [
        "model",
        "tp",
        "dtype",
        "batch",
        "ms a step",
        "tokens/s",
        "tokens/s a GPU",
        "limited by",
        "origin",
    ]
    if len(kv_dtypes) > 1:
        columns.insert(3, "kv dtype")
    if len(kv_lens) > 1:
        columns.insert(columns.index("batch"), "kv_len")
    if any(best.relative_error is not None for best in summary.best):
        columns.insert(columns.index("tokens/s"), "error")
        columns.insert(columns.index("limited by"), "standing")
    at = f" at kv_len {min(kv_lens):,}" if len(kv_lens) == 1 else ""
    out.print(f"Best throughput{at} within the limits:\n", soft_wrap=True)
    rows = [[_cell(best, name) for name in columns] for best in summary.best]
    print_table(columns, rows, left=("model", "dtype", "kv dtype", "standing", "limited by", "origin"))
    out.print()
    for reason, names in summary.skipped.items():
        out.print(f"left out, {reason}: {', '.join(names)}", soft_wrap=True)
    beyond = ", ".join(f"{count:,} beyond {limit}" for limit, count in summary.infeasible.items() if count)
    out.print(
        f"{summary.evaluations:,} steps timed for {summary.plans} plans in {duration(summary.evaluate_s)}: "
        f"{summary.evaluations_per_s / 1e6:.1f} million a second" + (f" ({beyond})" if beyond else ""),
        soft_wrap=True,
    )
    out.print(
        f"{summary.rows:,} rows in {summary.output}; {duration(summary.total_s)} in all", soft_wrap=True
    )


def _cell(best: BestStep, column: str) -> str:
    if column == "batch":
        return f"{best.batch_size:,}" if best.batch_size else "-"
    if column == "ms a step":
        return "-" if best.step_us is None else f"{best.step_us / US_PER_MS:.2f}"
    if column == "tokens/s":
        return "-" if best.tokens_per_s is None else f"{best.tokens_per_s:,.0f}"
    if column == "tokens/s a GPU":
        return "-" if best.tokens_per_s_per_gpu is None else f"{best.tokens_per_s_per_gpu:,.0f}"
    if column == "error":
        return "-" if best.relative_error is None else f"+- {percent(best.relative_error)}"
    if column == "standing":
        return best.standing or ""
    if column == "kv_len":
        return f"{best.kv_len:,}"
    return str(getattr(best, column.replace(" ", "_")) or "-")
