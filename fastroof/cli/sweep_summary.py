"""What a sweep came to, as a person reads it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from fastroof.cli.capacity_tables import print_capacities
from fastroof.cli.output import console, duration, percent, print_json, print_table
from fastroof.interrupts import BeforeTheEnd
from fastroof.sweep.deployments.summary import INFEASIBLE
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.sweep import BestStep, CapacitySummary, DeploymentSummary, StepSummary

__all__ = ["layout_words", "print_summary", "resumable", "say_where"]

MOST_GROUPS: Final = 40
"""Groups whose best deployment is printed; all are in the file."""


def print_summary(
    summary: StepSummary | DeploymentSummary | CapacitySummary, *, as_json: bool, quiet: bool
) -> None:
    """Print what a sweep came to, for a person, as JSON, or not at all."""
    if as_json:
        print_json(summary.document())
    elif not quiet:
        _PRINTED[summary.kind](summary)


def _print_steps(summary: StepSummary) -> None:
    """Print the best step of each plan, and the counts."""
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
    for size in ("ep", "dp", "pp"):
        if any(getattr(best, size) > 1 for best in summary.best):
            columns.insert(2, size)
    if len(kv_lens) > 1:
        columns.insert(columns.index("batch"), "kv_len")
    if any(best.relative_error is not None for best in summary.best):
        columns.insert(columns.index("tokens/s"), "error")
        columns.insert(columns.index("limited by"), "standing")
    at = f" at kv_len {min(kv_lens):,}" if len(kv_lens) == 1 else ""
    out.print(f"Best throughput{at} within the limits, runtime {summary.runtime}:\n", soft_wrap=True)
    rows = [[_step_cell(best, name) for name in columns] for best in summary.best]
    print_table(columns, rows, left=("model", "dtype", "kv dtype", "standing", "limited by", "origin"))
    out.print()
    _print_skipped(summary.skipped)
    beyond = ", ".join(f"{count:,} beyond {limit}" for limit, count in summary.infeasible.items() if count)
    out.print(
        f"{summary.evaluations:,} steps timed for {summary.plans} plans in {duration(summary.evaluate_s)}: "
        f"{summary.evaluations_per_s / 1e6:.1f} million a second" + (f" ({beyond})" if beyond else ""),
        soft_wrap=True,
    )
    out.print(
        f"{summary.rows:,} rows in {summary.output}; {duration(summary.total_s)} in all", soft_wrap=True
    )


def _print_skipped(skipped: dict[str, tuple[str, ...]]) -> None:
    for reason, names in skipped.items():
        console().print(f"left out, {INFEASIBLE.get(reason, reason)}: {', '.join(names)}", soft_wrap=True)


def _step_cell(best: BestStep, column: str) -> str:
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


def layout_words(row: dict[str, Any]) -> str:
    """Say on how many GPUs a deployment is, and how: ``4 x tp 2``, or ``1 + 3 x tp 2`` workers."""
    from fastroof.models.layout import split_words

    split = split_words(row)
    if row["mode"] == "aggregated":
        return f"{row['replicas']} x {split}"
    return f"{row['prefill_workers']} prefill + {row['decode_workers']} decode x {split}"


def _print_deployments(summary: DeploymentSummary) -> None:
    """Print the best deployment of each group, and the counts."""
    out = console()
    best = summary.best[:MOST_GROUPS]
    names = ["model", "GPUs", "layout", "dtype", "clients", "TTFT ms", "TPOT ms", "tokens/s a GPU"]
    names += ["tokens/s a user", "bound by"]
    extra = {"kv_dtype": "kv dtype", "runtime": "runtime", "max_batched_tokens": "token budget",
             "prefix_hit": "prefix hit"}  # fmt: skip
    varied = {column: name for column, name in extra.items() if len({row[column] for row in best}) > 1}
    names[4:4] = list(varied.values())
    if len({(row["isl"], row["osl"]) for row in best}) > 1:
        names[1:1] = ["isl", "osl"]
    if any(row["request_rate_per_s"] is not None for row in best):
        names.insert(names.index("clients"), "requests/s")
    if any(row["cost_per_million_tokens"] is not None for row in best):
        names.insert(names.index("bound by"), "cost of 1M tokens")
    if best:
        at = ""
        if "isl" not in names:
            at = f" at isl {best[0]['isl']:,}, osl {best[0]['osl']:,}"
        runtime = "" if "runtime" in varied else f", runtime {best[0]['runtime']}"
        out.print(f"Best deployments{at} within the limits{runtime}:\n", soft_wrap=True)
        rows = [[_deployment_cell(row, name, varied) for name in names] for row in best]
        print_table(names, rows, left=("model", "GPUs", "layout", "dtype", "kv dtype", "runtime", "bound by"))
        if len(summary.best) > len(best):
            out.print(f"and {len(summary.best) - len(best):,} more groups", soft_wrap=True)
    else:
        out.print("No deployment is within the limits.", soft_wrap=True)
    out.print()
    _print_skipped(summary.skipped)
    out.print(
        f"{summary.candidates:,} deployments estimated in {duration(summary.total_s)}: "
        f"{summary.feasible:,} are possible and within the limits",
        soft_wrap=True,
    )
    for reason, count in sorted(summary.infeasible.items(), key=lambda pair: -pair[1]):
        out.print(f"  {count:>13,} are not: {INFEASIBLE[reason]}", soft_wrap=True)
    out.print(f"{summary.rows:,} rows in {summary.output}", soft_wrap=True)


def _deployment_cell(row: dict[str, Any], name: str, varied: dict[str, str]) -> str:
    if name == "GPUs":
        return f"{row['total_gpus']} x {row['gpu']}"
    if name == "layout":
        return layout_words(row)
    columns = {
        "isl": "isl", "osl": "osl", "clients": "concurrency", "TTFT ms": "ttft_ms", "TPOT ms": "tpot_ms",
        "tokens/s a GPU": "tokens_per_s_per_gpu", "tokens/s a user": "tokens_per_s_per_user",
        "bound by": "bound", "requests/s": "requests_per_s", "cost of 1M tokens": "cost_per_million_tokens",
        **{shown: column for column, shown in varied.items()},
    }  # fmt: skip
    value = row[columns.get(name, name)]
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 or value.is_integer() else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


_PRINTED: Final[dict[str, Callable[[Any], None]]] = {
    "steps": _print_steps,
    "deployments": _print_deployments,
    "capacities": print_capacities,
}
"""What prints a summary, by its kind of sweep."""


def say_where(output: Path, what: str) -> None:
    """Say on standard error, before a sweep begins, which file it will write that nobody named."""
    there = ", in place of the one there" if output.exists() else ""
    typer.echo(f"{what}: its rows go to {output}{there}; -o names another file", err=True)


@contextmanager
def resumable(output: Path) -> Iterator[None]:
    """Print how to go on with a sweep where Ctrl-C ends it."""
    # now, and not while the process is about to end
    from fastroof.sweep.checkpoint import parts_folder

    print_once = cache(partial(_say_how_to_resume, parts_folder(output)))
    with BeforeTheEnd(print_once):
        try:
            yield
        except KeyboardInterrupt:
            print_once()
            raise


def _say_how_to_resume(folder: Path) -> None:
    if not folder.is_dir():
        typer.echo("interrupted before there was anything to keep", err=True)
        return
    words = [
        "fastroof",
        *(word for word in sys.argv[1:] if word not in ("--resume", "--restart")),
        "--resume",
    ]
    typer.echo(f"interrupted; what is done is kept in {folder}. To continue: {shlex.join(words)}", err=True)
