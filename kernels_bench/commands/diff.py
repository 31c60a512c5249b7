"""``kernels-bench diff``: two table sets point by point."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fastroof.errors import MeasureError
from kernels_bench.command_options import SET_WORDS, Json, print_json, print_table
from kernels_bench.output.diff import (
    Agreement,
    Difference,
    KeyDifference,
    compare_campaigns,
    diff_tables,
)
from kernels_bench.output.table_sets import gpu_of, load_table_set


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("diff", short_help="Compare two table sets point by point.")(_diff)


def _diff(
    a: Annotated[str, typer.Argument(metavar="A", help=f"The one set: {SET_WORDS}.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other set.")],
    operator: Annotated[
        list[str] | None, typer.Option(help="Compare only this operator; repeatable.")
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="Also print a line per dtype and head shape that both have.")
    ] = False,
    campaigns: Annotated[
        bool, typer.Option("--campaigns", help="Compare B with each source of A: which one agrees best.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Plot the ratios to this .png or .svg file.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two table sets point by point: latency of B over latency of A."""
    one, other = load_table_set(a), load_table_set(b)
    if campaigns:
        if keys or plot is not None:
            raise MeasureError("--campaigns sums up by family; it goes with --operator and --json only")
        agreements = compare_campaigns(one, other, operator)
        if as_json:
            print_json([asdict(agreement) for agreement in agreements])
        else:
            _print_agreements(a, b, agreements)
        return
    difference = diff_tables(one, other, names=(a, b), operators=operator)
    if plot is not None:
        from kernels_bench.output.diff_plot import save_difference

        save_difference(difference, gpu_of(one), plot)
    if as_json:
        print_json(difference.as_dict())
        return
    _print_difference(difference, keys)
    if plot is not None:
        typer.echo(f"\nplot: {plot}")


def _print_agreements(a: str, b: str, agreements: list[Agreement]) -> None:
    typer.echo(f"A: each source of {a}\nB: {b}\nratios are latency of B / latency of A\n")
    if not agreements:
        typer.echo("no point is in both; sources with exactly the rows of B are left out")
        return
    heads = (
        "operator", "family", "source", "common", "median", "p10", "p90", "rms", "points of all", "rms", "",
    )  # fmt: skip
    rows = []
    for one in agreements:
        ratios = (f"{ratio:.3f}" for ratio in (one.median, one.p10, one.p90))
        shared = ("", "") if one.shared_rms is None else (f"{one.shared:,}", f"{one.shared_rms:.1%}")
        mark = "closest" if one.is_closest else ""
        place = (one.operator, one.family, one.source)
        rows.append((*place, f"{one.common:,}", *ratios, f"{one.rms:.1%}", *shared, mark))
    print_table(heads, rows, left=3)
    typer.echo("\nclosest: least rms of ln ratio at the points that all sources with 8 or more have")


def _print_difference(difference: Difference, keys: bool) -> None:
    typer.echo(f"A: {difference.a}\nB: {difference.b}\nratios are latency of B / latency of A\n")
    heads = ("operator", "common", "only A", "only B", "median", "p10", "p90")
    common = [d for d in difference.operators if d.common]
    print_table(heads, [(d.operator, *_figures(d)) for d in common])
    for side, has_any in (("A", "only_a"), ("B", "only_b")):
        names = [d.operator for d in difference.operators if not d.common and getattr(d, has_any)]
        if names:
            typer.echo(f"only {side}: {', '.join(names)}")
    if keys:
        typer.echo()
        rows = [(d.operator, _words(d.key), *_figures(d)) for d in difference.keys if d.common]
        print_table(("operator", "key", *heads[1:]), rows, left=2)
    for d in difference.operators:
        if d.worst:
            typer.echo(f"\nfarthest apart, {d.operator}:")
        for point in d.worst:
            sizes = {k: v for k, v in point.items() if k not in ("a_us", "b_us", "ratio")}
            typer.echo(
                f"  {point['ratio']:.3g}: {point['a_us']:.6g} us, {point['b_us']:.6g} us at {_words(sizes)}"
            )


def _figures(d: KeyDifference) -> tuple[str, ...]:
    ratios = ("" if ratio is None else f"{ratio:.3f}" for ratio in (d.median, d.p10, d.p90))
    return (f"{d.common:,}", f"{d.only_a:,}", f"{d.only_b:,}", *ratios)


def _words(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
