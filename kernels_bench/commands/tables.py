"""``kernels-bench tables``, ``merge``, ``validate`` and ``export``: what becomes of the rows of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

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
from kernels_bench.grid.grid import load_grid
from kernels_bench.journal import read_journal
from kernels_bench.output.table_sets import gpu_of, journals_of, load_table_set
from kernels_bench.output.validate import Validation, validate_tables

EXIT_INVALID: Final = 1
LAYOUTS: Final = {"infersim": "InferSim", "roofline": "roofline V2"}


def tables(
    journals: Annotated[list[str], typer.Argument(help="Journals, or the folder of a run.")],
    output: Output,
    overwrite: Overwrite = False,
    rank: Rank = None,
    engine: Engine = "",
    file_format: Format = "csv",
    as_json: Json = False,
) -> None:
    """Turn the journals of one run into a source that fastroof loads."""
    from kernels_bench.output.tables import write_tables

    paths = [path for word in journals for path in journals_of(word) or [Path(word)]]
    written = write_tables(
        paths, output, overwrite=overwrite, rank=rank, engine=engine, file_format=file_format
    )
    if as_json:
        print_json(
            {
                "folder": str(written.folder),
                "gpu": written.gpu,
                "rows": dict(written.rows),
                "skipped": written.skipped,
                "left_out": dict(written.left_out),
            }
        )
        return
    for operator, rows in written.rows.items():
        typer.echo(f"{operator:<26}{rows:>8,} rows")
    for key, why in written.left_out.items():
        typer.echo(f"left out: {key}: {why}")
    skipped = f", {written.skipped:,} points skipped" if written.skipped else ""
    typer.echo(f"{written.folder}: {sum(written.rows.values()):,} rows of {written.gpu}{skipped}")


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


def validate(
    where: Annotated[str, typer.Argument(help=f"What to check: {SET_WORDS}.")],
    grid: Annotated[
        str | None, typer.Option(help="Grid whose points should be there: a TOML file or a name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check tables before they are used. Exit code 1 where they must not be."""
    tables = load_table_set(where)
    lines = [line for journal in journals_of(where) for line in read_journal(journal)]
    validation = validate_tables(
        tables,
        gpu_of(tables),
        None if grid is None else load_grid(grid).points(),
        skipped=[line["key"] for line in lines if line["type"] == "skip"],
        sentinels=[line["key"] for line in lines if line["type"] == "sentinel"],
    )
    if as_json:
        print_json(validation.as_dict())
    else:
        _print_validation(validation)
    if validation.severity == "error":
        raise typer.Exit(EXIT_INVALID)


def _print_validation(validation: Validation) -> None:
    for report in validation.reports:
        typer.echo(f"{report.operator}: {report.rows:,} rows in {report.file}")
        for finding in report.findings:
            typer.echo(f"  {finding.severity:<8}{finding.kind}: {finding.message}")
    if validation.findings:
        typer.echo("the whole set")
    for finding in validation.findings:
        typer.echo(f"  {finding.severity:<8}{finding.kind}: {finding.message}")
    if validation.sentinels:
        typer.echo()
        repeats = [
            (
                str(one["key"]).partition(" ")[0],
                str(one["run"]),
                str(one.get("rounds", "")),
                f"{one['spread']:.1%}",
                f"{one['drift']:+.1%}",
            )
            for one in validation.sentinels
        ]
        print_table(("sentinel", "run", "rounds", "spread", "drift"), repeats, left=2)
    if validation.coverage:
        typer.echo()
        covered = [
            (g.group or g.operator, *(f"{n:,}" for n in (g.points, g.measured, g.skipped, g.missing)))
            for g in validation.coverage
        ]
        print_table(("group of the grid", "points", "measured", "skipped", "missing"), covered)
    typer.echo(f"\n{validation.gpu}: gravest finding: {validation.severity}")


def export(
    layout: Annotated[Literal["infersim", "roofline"], typer.Argument(help="Whose tree is written.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The tree that is written.")],
    tables: Annotated[str, typer.Option(help=f"What to export: {SET_WORDS}.")] = "h100",
    gemm_dtype: Annotated[
        str | None,
        typer.Option(help="dtype of the GEMMs: there is one file per GPU.  [default: bf16 if measured]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace this GPU's folders.")] = False,
    as_json: Json = False,
) -> None:
    """Write tables as the tree that InferSim or roofline V2 reads.

    Roofline V2 has decodes in a file per heads and GPUs (-tpN): those of 8 and 2 heads are in
    32-8-128-tp4.csv if prefills of 32 and 8 heads were measured, and in the file of each other such pair.
    Windows, prefixes, KV caches other than bf16, MLA and experts are left out.
    """
    from kernels_bench.output.export_trees import READ_AS_ZERO, export_tree

    program = LAYOUTS[layout]
    written = export_tree(load_table_set(tables), folder, program, gemm_dtype=gemm_dtype, overwrite=overwrite)
    if as_json:
        print_json(
            {
                "folder": str(written.root),
                "gpu": written.gpu,
                "rows": dict(written.rows),
                "left_out": dict(written.left_out),
                "read_as_zero": written.read_as_zero,
            }
        )
        return
    for why, count in written.left_out.items():
        typer.echo(f"left out {count:,} rows: {why}")
    if written.read_as_zero:
        typer.echo(f"note: {written.read_as_zero:,} {READ_AS_ZERO[program]}")
    typer.echo(f"{written.root}: {sum(written.rows.values()):,} rows in {len(written.rows)} files")
