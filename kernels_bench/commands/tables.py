"""Commands on what was measured: tables, merge, validate, diff and export."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fastroof.units import GB, TFLOP
from kernels_bench.grid.grid import load_grid
from kernels_bench.journal import read_journal
from kernels_bench.output.diff import Difference, KeyDifference, diff_tables
from kernels_bench.output.table_sets import gpu_of, journals_of, load_table_set
from kernels_bench.output.validate import Validation, validate_tables

__all__ = ["register"]

EXIT_INVALID = 1

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the source that is written.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the source that the folder holds.")]
Rank = Annotated[
    int | None,
    typer.Option(help="Place among the sources of the GPU: the lowest serves an operator; 100 by default."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
SET_WORDS = (
    "a folder of tables, a journal (.jsonl) or the folder of a run, the name of a GPU, or gpu:source as in "
    "h100:kernels_bench"
)


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command("tables")(_tables)
    app.command("merge")(_merge)
    app.command("validate")(_validate)
    app.command("diff")(_diff)
    export = typer.Typer(help="Write measured tables in the layout of another program.", no_args_is_help=True)
    export.callback()(lambda: None)
    export.command("infersim")(_export_infersim)
    app.add_typer(export, name="export")


# -- tables and merge ----------------------------------------------------------------------------


def _tables(
    journals: Annotated[list[str], typer.Argument(help="Journals, or the folder of a run.")],
    output: Output,
    overwrite: Overwrite = False,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Turn the journals of one run into a source that fastroof loads."""
    from kernels_bench.output.tables import write_tables

    paths = [path for word in journals for path in journals_of(word) or [Path(word)]]
    written = write_tables(paths, output, overwrite=overwrite, rank=rank)
    if as_json:
        _print_json(
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


def _merge(
    runs: Annotated[list[str], typer.Argument(help=f"Two or more of these: {SET_WORDS}.")],
    output: Output,
    prefer: Annotated[
        str,
        typer.Option(help="Providers, best first, as in vllm,flashinfer: which of them to take at a point."),
    ] = "",
    overwrite: Overwrite = False,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Merge several runs of one GPU: the median of their medians, with how far they are apart."""
    from kernels_bench.output.merge import merge_runs, write_merged

    merged = merge_runs(runs, [word.strip() for word in prefer.split(",") if word.strip()])
    folder = write_merged(merged, output, overwrite=overwrite, rank=rank)
    operators = merged.provenance["operators"]
    if as_json:
        _print_json({"folder": str(folder), "gpu": merged.gpu, "operators": operators, "notes": merged.notes})
        return
    rows = []
    for operator, summary in operators.items():
        apart = summary.get("run_spread", {})
        shares = [f"{apart[name]:.1%}" if name in apart else "" for name in ("median", "p90", "max")]
        rows.append((operator, f"{summary['rows']:,}", f"{summary['rows_of_several_runs']:,}", *shares))
    _print_table(("operator", "rows", "of several runs", "runs apart", "p90", "most"), rows)
    for note in merged.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{folder}: {merged.provenance['rows']:,} rows of {merged.gpu}, {len(runs)} runs")


# -- validate ------------------------------------------------------------------------------------


def _validate(
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
        _print_json(validation.as_dict())
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
    typer.echo()
    ceilings = [
        (
            ceiling.operator,
            ceiling.dtype,
            f"{ceiling.rows:,}",
            _scaled(ceiling.flops_per_s, TFLOP),
            _share(ceiling.mfu),
            _scaled(ceiling.bytes_per_s, GB),
            _share(ceiling.bandwidth_share),
        )
        for ceiling in validation.ceilings
    ]
    heads = ("operator", "dtype or kind", "rows", "most TFLOP/s", "of peak", "most GB/s", "of bandwidth")
    _print_table(heads, ceilings, left=2)
    if validation.coverage:
        typer.echo()
        covered = [
            (g.group or g.operator, *(f"{n:,}" for n in (g.points, g.measured, g.skipped, g.missing)))
            for g in validation.coverage
        ]
        _print_table(("group of the grid", "points", "measured", "skipped", "missing"), covered)
    typer.echo(f"\n{validation.gpu}: gravest finding: {validation.severity}")


# -- diff ----------------------------------------------------------------------------------------


def _diff(
    a: Annotated[str, typer.Argument(metavar="A", help=f"The one set: {SET_WORDS}.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other set.")],
    operator: Annotated[
        list[str] | None, typer.Option(help="Compare only this operator; may be given again.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="A line for each dtype and head shape too.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into this .png or .svg file.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two table sets point by point: latency of B over latency of A."""
    one, other = load_table_set(a), load_table_set(b)
    difference = diff_tables(one, other, names=(a, b), operators=operator)
    if plot is not None:
        from kernels_bench.output.diff_plot import save_difference

        save_difference(difference, gpu_of(one), plot)
    if as_json:
        _print_json(difference.as_dict())
        return
    _print_difference(difference, keys)
    if plot is not None:
        typer.echo(f"\nplot: {plot}")


def _print_difference(difference: Difference, keys: bool) -> None:
    typer.echo(f"A: {difference.a}\nB: {difference.b}\nratios are latency of B / latency of A\n")
    heads = ("operator", "common", "only A", "only B", "median", "p10", "p90")
    _print_table(heads, [(d.operator, *_figures(d)) for d in difference.operators])
    if keys:
        typer.echo()
        rows = [(d.operator, _words(d.key), *_figures(d)) for d in difference.keys]
        _print_table(("operator", "key", *heads[1:]), rows, left=2)
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


# -- export --------------------------------------------------------------------------------------


def _export_infersim(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The tree that is written.")],
    tables: Annotated[str, typer.Option(help=f"What to export: {SET_WORDS}.")] = "h100",
    gemm_dtype: Annotated[
        str | None,
        typer.Option(help="GEMMs to write: InferSim has one GEMM file a GPU. bf16 where there are some."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace this GPU's folders.")] = False,
    as_json: Json = False,
) -> None:
    """Write tables as the tree that InferSim reads."""
    from kernels_bench.output.export_infersim import export_infersim

    export = export_infersim(load_table_set(tables), folder, gemm_dtype=gemm_dtype, overwrite=overwrite)
    if as_json:
        _print_json(
            {
                "folder": str(export.root),
                "gpu": export.gpu,
                "rows": dict(export.rows),
                "left_out": dict(export.left_out),
                "rounds_to_zero": export.rounds_to_zero,
            }
        )
        return
    for why, count in export.left_out.items():
        typer.echo(f"left out {count:,} rows: {why}")
    if export.rounds_to_zero:
        typer.echo(
            f"note: {export.rounds_to_zero:,} rows have an MFU that InferSim rounds to 0.0 and divides by"
        )
    typer.echo(f"{export.root}: {sum(export.rows.values()):,} rows in {len(export.rows)} files")


# -- printing ------------------------------------------------------------------------------------


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scaled(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.4g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Print a table, its first columns to the left."""
    cells = [tuple(heads), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    for row in cells:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(padded).rstrip())
