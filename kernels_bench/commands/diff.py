"""``kernels-bench diff``: two table sets point by point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kernels_bench.command_options import SET_WORDS, Json, print_json, print_table
from kernels_bench.output.diff import Difference, KeyDifference, diff_tables
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
    keys: Annotated[bool, typer.Option("--keys", help="Also print a line per dtype and head shape.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Plot the ratios to this .png or .svg file.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two table sets point by point: latency of B over latency of A."""
    one, other = load_table_set(a), load_table_set(b)
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


def _print_difference(difference: Difference, keys: bool) -> None:
    typer.echo(f"A: {difference.a}\nB: {difference.b}\nratios are latency of B / latency of A\n")
    heads = ("operator", "common", "only A", "only B", "median", "p10", "p90")
    print_table(heads, [(d.operator, *_figures(d)) for d in difference.operators])
    if keys:
        typer.echo()
        rows = [(d.operator, _words(d.key), *_figures(d)) for d in difference.keys]
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
