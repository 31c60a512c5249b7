"""``fastroof validate``: predictions of serving beside what was measured end to end.

``fastroof tables validate`` is another command: it looks for what is wrong in measured kernels.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.options import Gpu, Json, OneSource, TablesPath
from fastroof.cli.output import console, counted, print_json, print_table
from fastroof.cli.own_runs import EngineArgs, OwnModel, Runs, own_runs_of
from fastroof.errors import FastroofError, MissingTableError

if TYPE_CHECKING:
    from fastroof.serving.evidence.measured import Measured
    from fastroof.serving.evidence.prediction_errors import ErrorGroup, PredictedTime, Validation
    from fastroof.serving.evidence.rows import ServingRow

__all__ = ["register"]

PEERS: Final = ("aiconfigurator",)

EPILOG: Final = """\b
Examples:
  fastroof validate
  fastroof validate --by tp --runtime kernels
  fastroof validate --leave-one-model-out --plot validation.png
  fastroof validate --rows my_runs.csv --gpu h100
  fastroof validate --runs results/ --engine-args serve.txt --gpu h100 --runtime mine.toml

Errors are relative to what was measured; bias is their signed mean. fitted: yes where the profile's
constants were fitted to these rows. aic is aiconfigurator-core on the same rows. tpot: time per output token;
ttft: time to first token; decode, prefill, mixed, unequal: single steps, decode that of one client too.
throughput: output tokens a second; e2e: whole requests; tpot p90: a percentile, where requests are single.

\b
JSON: version, gpu, tables_hash, runtime, leave_one_model_out, frontends_us_per_token {data set: us},
groups: one object a data set and quantity [dataset, quantity, by, fitted, rows, mape, median, p90, bias,
aic_rows, aic_mape, aic_bias, all errors as fractions], left_out [source, reason, rows,
quantity: empty where it is all of a row].
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("validate", epilog=EPILOG)(validate)


def validate(
    gpu: Gpu = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Judge only this data set; repeatable.  [default: all]")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(help="CSV of own measured rows to judge instead; columns: bench_data/README.md."),
    ] = None,
    steps: Annotated[
        Path | None, typer.Option(help="steps.csv of kernels-bench steps to judge instead, or beside --rows.")
    ] = None,
    runs: Runs = None,
    engine_args: EngineArgs = None,
    model: OwnModel = None,
    runtime: Annotated[
        str, typer.Option(help="Profile, or .toml file; auto: that of each row's engine.")
    ] = "auto",
    leave_one_model_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-model-out", help="Predict each model by constants fitted to the other models."
        ),
    ] = False,
    by: Annotated[str, typer.Option(help="Keep apart too, with commas: tp,model,engine_version ...")] = "",
    peer: Annotated[
        str | None, typer.Option(help="aiconfigurator: ask the installed package, not its shipped answers.")
    ] = None,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", metavar="PATH", help="Write every row and its prediction.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted against measured: .png or .svg.")] = None,
    as_json: Json = False,
    tables: TablesPath = None,
    source: OneSource = None,
) -> None:
    """Judge predictions by measured serving.

    TTFT and TPOT of serving engines, and whole steps, that were measured end to end, beside predictions.
    """
    from fastroof.load.by_name import missing_tables
    from fastroof.serving.evidence.validation import run_validation

    if peer is not None and peer not in PEERS:
        raise FastroofError(f"--peer is {' or '.join(PEERS)}, got {peer!r}")
    if plot is not None:
        from fastroof.report import check_picture

        check_picture(plot)
    if runs and rows is not None:
        raise FastroofError("--runs stands instead of --rows; give one of them")
    if not runs and (engine_args is not None or model is not None):
        raise FastroofError("--engine-args and --model go with --runs")
    own = own_runs_of(runs, engine_args, {"gpu": gpu, "model": model}, warn=not as_json) if runs else None
    gpu = own.engines[0].gpu if own is not None else gpu
    spec, measured_kernels = gpu_and_tables(gpu, tables, source)
    if measured_kernels is None:
        raise MissingTableError(missing_tables(spec.name))
    report = run_validation(
        _rows(rows if own is None else own.rows, steps, dataset),
        measured_kernels,
        runtime=runtime,
        leave_one_model_out=leave_one_model_out,
        ask_aiconfigurator=peer is not None,
        progress=None if as_json else lambda words: typer.echo(words, err=True),
    )
    groups = report.errors([name.strip() for name in by.split(",") if name.strip()])
    if csv_path is not None:
        _write_csv(csv_path, report.rows)
    if plot is not None:
        from fastroof.report import save_figure
        from fastroof.report.serving_plot import draw_validation

        save_figure(draw_validation(report), plot)
    if as_json:
        print_json(_document(report, groups))
    else:
        _print(report, groups)


def _rows(
    rows: Path | Sequence[ServingRow] | None, steps: Path | None, datasets: list[str] | None
) -> Measured | list[str] | None:
    if rows is None and steps is None:
        return datasets
    from fastroof.serving.evidence.measured import Measured
    from fastroof.serving.evidence.measured_steps import read_steps
    from fastroof.serving.evidence.rows import read_rows

    listed = read_rows(rows) if isinstance(rows, Path) else tuple(rows or ())
    given = Measured(listed, () if steps is None else read_steps(steps))
    return given if datasets is None else given.pick(datasets)


def _document(report: Validation, groups: Sequence[ErrorGroup]) -> dict[str, Any]:
    return {
        "version": report.version,
        "gpu": report.gpu,
        "tables_hash": report.tables_hash,
        "runtime": report.runtime,
        "leave_one_model_out": report.unseen,
        "frontends_us_per_token": dict(report.frontends),
        "groups": [{"by" if k == "values" else k: v for k, v in g._asdict().items()} for g in groups],
        "left_out": [entry._asdict() for entry in report.left_out],
    }


def _write_csv(path: Path, rows: Sequence[PredictedTime]) -> None:
    from fastroof.whole_files import whole_file

    with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(rows[0]._fields if rows else ()), "error", "aic_error"])
        for row in rows:
            cells = (*row, row.error, row.aic_error)
            writer.writerow(["" if isinstance(c, float) and math.isnan(c) else c for c in cells])


def _print(report: Validation, groups: Sequence[ErrorGroup]) -> None:
    out = console()
    how = "constants fitted without each row's model" if report.unseen else f"runtime {report.runtime}"
    out.print(f"{report.gpu}, {counted(len(report.rows), 'prediction')}, {how}\n", soft_wrap=True)
    by = list(groups[0].values) if groups else []
    columns = (
        "quantity",
        "data set",
        *by,
        "rows",
        "MAPE",
        "median",
        "p90",
        "bias",
        "aic",
        "its bias",
        "fitted",
    )
    text = [
        (
            group.quantity,
            group.dataset,
            *(_words(value) for value in group.values.values()),
            f"{group.rows}",
            *(f"{share:.1%}" for share in (group.mape, group.median, group.p90)),
            f"{group.bias:+.1%}",
            _peer(group, f"{group.aic_mape:.1%}"),
            f"{group.aic_bias:+.1%}" if group.aic_rows else "",
            "yes" if group.fitted else "no",
        )
        for group in groups
    ]
    if groups:
        print_table(columns, text, left=("quantity", "data set", "model", "engine", "fitted"))
    else:
        out.print("nothing could be judged")
    given = {name: us for name, us in report.frontends.items() if us > 0.0}
    if given:
        listed = ", ".join(f"{us:.0f} to {name}" for name, us in given.items())
        out.print(
            f"\nfront end in TTFT, us per prompt token, from the other data sets: {listed}", soft_wrap=True
        )
    if report.left_out:
        whole = sum(entry.rows for entry in report.left_out if not entry.quantity)
        part = ", and a part of others" if any(entry.quantity for entry in report.left_out) else ""
        out.print(f"\nnot judged: {counted(whole, 'row')}{part}", soft_wrap=True)
    for entry in report.left_out:
        part = f"{entry.quantity} of " if entry.quantity else ""
        out.print(f"  {entry.rows:>4}  {part}{entry.source}: {entry.reason}", soft_wrap=True)


def _words(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _peer(group: ErrorGroup, share: str) -> str:
    """Its error, and on how many rows where those are not all."""
    if not group.aic_rows:
        return ""
    return share if group.aic_rows == group.rows else f"{share} of {group.aic_rows}"
