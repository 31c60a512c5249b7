"""Capacities, as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fastroof.cli.output import console, duration, percent, print_table

if TYPE_CHECKING:
    from fastroof.sweep import CapacitySummary

__all__ = ["limit_words", "print_capacities", "range_words"]

MOST_GROUPS: Final = 40
"""Groups whose best deployment is printed; all are in the file."""

_NAMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def limit_words(name: str) -> str:
    """Write a limit's name: ``p99 TTFT`` for ``ttft_p99_ms``."""
    what, _, rest = name.partition("_p")
    if what not in _NAMES or not rest.endswith("_ms"):
        return name
    return f"p{rest.removesuffix('_ms').replace('_', '.')} {_NAMES[what]}"


def range_words(row: Mapping[str, Any]) -> str:
    """Write what an error of the steps makes of a rate."""
    if row["relative_error"] is None:
        return "unknown"
    return f"{row['low']:,.4g} to {row['high']:,.4g}"


def print_capacities(summary: CapacitySummary) -> None:
    """Print the best deployment of each group, and the counts."""
    from fastroof.sweep.capacities.summary import LOST

    out = console()
    best = summary.best[:MOST_GROUPS]
    if best:
        out.print("Most requests a second of a GPU within the limits:\n", soft_wrap=True)
        _print_rows(best)
        if len(summary.best) > len(best):
            out.print(f"and {len(summary.best) - len(best):,} more groups", soft_wrap=True)
    else:
        out.print("No deployment keeps the limits at any rate.", soft_wrap=True)
    out.print()
    for reason, said in summary.skipped.items():
        out.print(f"left out, {LOST[reason]}: {'; '.join(said)}", soft_wrap=True)
    out.print(
        f"capacities of {summary.candidates:,} deployments in {duration(summary.total_s)}: "
        f"{summary.feasible:,} keep the limits",
        soft_wrap=True,
    )
    for reason, count in sorted(summary.infeasible.items(), key=lambda pair: -pair[1]):
        out.print(f"  {count:>9,} do not: {LOST[reason]}", soft_wrap=True)
    out.print(f"{summary.rows:,} rows in {summary.output}", soft_wrap=True)


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    from fastroof.models.layout import split_words

    columns = (
        "model", "GPUs", "layout", "dtype", "runtime", "tokens a step", "requests at once",
        "requests/s a GPU", "requests/s", "one error", "limited by",
    )  # fmt: skip
    cells = [
        (
            row["model"],
            f"{row['total_gpus']} x {row['gpu']}",
            f"{row['replicas']} x {split_words(row)}",
            row["dtype"],
            row["runtime"],
            f"{row['max_batched_tokens']:,}",
            f"{row['max_seqs']:,}",
            f"{row['requests_per_s_per_gpu']:,.4g}",
            f"{row['requests_per_s']:,.4g}",
            range_words(row),
            limit_words(row["limit"]),
        )
        for row in rows
    ]
    print_table(columns, cells, left=("model", "GPUs", "layout", "dtype", "runtime", "limited by"))
    sampled = [row["sampling_error"] for row in rows if row["sampling_error"] is not None]
    if sampled:
        console().print(f"\nother draws change them by up to {percent(max(sampled))}", soft_wrap=True)
