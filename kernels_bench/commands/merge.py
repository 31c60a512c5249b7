"""``kernels-bench merge``: several runs of one GPU into one source."""

from __future__ import annotations

from typing import Annotated

import typer

from kernels_bench.command_options import (
    SET_WORDS,
    Engine,
    Format,
    Json,
    Output,
    Overwrite,
    Rank,
    listed,
    print_json,
    print_table,
)


def merge(
    runs: Annotated[list[str], typer.Argument(help=f"Two or more of these: {SET_WORDS}.")],
    output: Output,
    prefer: Annotated[
        str,
        typer.Option(help="Providers by preference, such as vllm,flashinfer, if several measured a point."),
    ] = "",
    overwrite: Overwrite = False,
    rank: Rank = None,
    engine: Engine = "",
    file_format: Format = "csv",
    as_json: Json = False,
) -> None:
    """Merge several runs of one GPU: the median of their medians, with how far they are apart."""
    from kernels_bench.output.merge import merge_runs, write_merged

    merged = merge_runs(runs, listed(prefer))
    folder = write_merged(
        merged, output, overwrite=overwrite, rank=rank, engine=engine, file_format=file_format
    )
    operators = merged.provenance["operators"]
    if as_json:
        print_json({"folder": str(folder), "gpu": merged.gpu, "operators": operators, "notes": merged.notes})
        return
    rows = []
    for operator, summary in operators.items():
        apart = summary.get("run_spread", {})
        shares = [f"{apart[name]:.1%}" if name in apart else "" for name in ("median", "p90", "max")]
        rows.append((operator, f"{summary['rows']:,}", f"{summary['rows_of_several_runs']:,}", *shares))
    print_table(("operator", "rows", "of several runs", "runs apart", "p90", "most"), rows)
    for note in merged.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{folder}: {merged.provenance['rows']:,} rows of {merged.gpu}, {len(runs)} runs")
