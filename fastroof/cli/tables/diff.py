"""``fastroof tables diff``: two campaigns at the points that both measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from fastroof.cli.options import Json
from fastroof.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastroof.load.table_diff import Comparison

__all__ = ["register"]

SETS: Final = "GPU, GPU/SOURCE, a folder, or package:GPU/BACKEND/VERSION of aiconfigurator-core"

EPILOG: Final = """\b
Example:
  fastroof tables diff package:h100/vllm/0.24.0 package:h100/sglang/0.5.14 --operator gemm

\b
Ratios are latency of B / latency of A; rms is of their logarithm. Flagged: a median beyond 1.5 either way
over at least 8 points. A region holds sizes within a factor of 8.

\b
JSON: a, b, families and regions: objects [operator, family, region, points, only_a, only_b, median, rms,
p10, p90, is_flagged].
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("diff", epilog=EPILOG, short_help="Compare two campaigns at common points.")(diff)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=f"The one set: {SETS}.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other set.")],
    operator: Annotated[list[str] | None, typer.Option(help="Compare only this one; repeatable.")] = None,
    regions: Annotated[
        bool, typer.Option("--regions", help="A line for every region, not only flagged ones.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare the same kernels of two engines or two versions."""
    from fastroof.load.named import load_named
    from fastroof.load.table_diff import diff_tables

    difference = diff_tables(load_named(a), load_named(b), names=(a, b), operators=operator)
    if as_json:
        print_json(difference.as_dict())
        return
    console().print(f"A: {difference.a}\nB: {difference.b}", soft_wrap=True)
    heads = ("operator", "family", "common", "only A", "only B", "median", "rms", "p10", "p90", "flag")
    print_table(heads, [_row(d) for d in difference.families], left=("operator", "family"))
    shown = [d for d in difference.regions if regions or d.is_flagged]
    if shown:
        console().print()
        regional = ("operator", "family", "region", "common", *heads[5:])
        rows = [(*_row(d)[:2], _words(d.region), *_row(d)[2:3], *_row(d)[5:]) for d in shown]
        print_table(regional, rows, left=regional[:3])
    families, in_regions = (
        f"{sum(d.is_flagged for d in part)} of {len(part)}"
        for part in (difference.families, difference.regions)
    )
    console().print(f"flagged: {families} families, {in_regions} regions", soft_wrap=True)


def _row(d: Comparison) -> tuple[str, ...]:
    ratios = tuple("" if value is None else f"{value:.3f}" for value in (d.median, d.rms, d.p10, d.p90))
    counts = (f"{d.points:,}", f"{d.only_a:,}", f"{d.only_b:,}")
    return (d.operator, " ".join(d.family.values()), *counts, *ratios, "flag" if d.is_flagged else "")


def _words(region: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {band}" for name, band in region.items())
