"""``fastroof validate``: predictions of serving beside what was measured end to end.

``fastroof tables validate`` is another command: it looks for what is wrong in measured kernels.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.named_plans import gpu_and_tables
from fastroof.cli.options import Gpu, Json, OneSource, TablesPath
from fastroof.cli.output import console, counted, print_json, print_table
from fastroof.cli.own_runs import EngineArgs, OwnModel, Runs, own_runs_of
from fastroof.errors import FastroofError, MissingTableError

if TYPE_CHECKING:
    from fastroof.serving.evidence.measured import Measured
    from fastroof.serving.evidence.prediction_errors import ErrorGroup, PredictedTime, Validation
    from fastroof.serving.evidence.rows import ServingRow

PEERS: Final = ("aiconfigurator",)
ALL: Final = "all"

EPILOG: Final = """\b
Examples:
  fastroof validate
  fastroof validate --by tp --runtime kernels
  fastroof validate --leave-one-model-out --plot validation.png
  fastroof validate --rows my_runs.csv --gpu h100
  fastroof validate --runs results/ --engine-args serve.txt --gpu h100 --runtime mine.toml
  fastroof validate --gpu all --leave-one-model-out --min-rows 10

Errors are relative to what was measured; bias is their signed mean. fitted: yes where the profile's
constants were fitted to these rows. aic is aiconfigurator-core on the same rows. tpot: time per output token;
ttft: time to first token; decode, prefill, mixed, unequal: single steps, decode that of one client too.
throughput: output tokens a second; e2e: whole requests; tpot p90: a percentile, where requests are single.

\b
JSON: version, gpu, tables_hash, runtime, leave_one_model_out, frontends {data set: what TTFT was given},
frontends_us_per_token {data set: us},
groups: one object a data set and quantity [dataset, quantity, by, fitted, rows, mape, median, p90, bias,
aic_rows, aic_mape, aic_bias, kind, all errors as fractions], left_out [source, reason, rows,
quantity: empty where it is all of a row].

\b
Of --gpu all: version, runtime, leave_out, gpus, gpus_left_out {gpu: why}, rows, runs (distinct), represented,
left_out {reason: rows}, totals, groups: one object a kind, model, gpu, engine, version, dtype and quantity
[rows, mape, median, p90, bias, aic_rows, aic_mape, beside_mape, fitted]. rows = represented + left_out.
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
    leave_one_gpu_out: Annotated[
        bool, typer.Option("--leave-one-gpu-out", help="The same of GPUs; needs --gpu all.")
    ] = False,
    leave_one_version_out: Annotated[
        bool,
        typer.Option("--leave-one-version-out", help="The same of an engine's versions; needs --gpu all."),
    ] = False,
    min_rows: Annotated[
        int, typer.Option(help="Of --gpu all: show groups of at least so many rows.", min=1)
    ] = 1,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Of --gpu all: print the tables as Markdown.")
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
    """Judge predictions by measured serving."""
    from fastroof.load.by_name import missing_tables
    from fastroof.serving.evidence.validation import run_validation

    if peer is not None and peer not in PEERS:
        raise FastroofError(f"--peer is {' or '.join(PEERS)}, got {peer!r}")
    if plot is not None:
        from fastroof.report import check_picture

        check_picture(plot)
    split = _split(model=leave_one_model_out, gpu=leave_one_gpu_out, version=leave_one_version_out)
    if gpu == ALL:
        given = {
            "--dataset": dataset, "--rows": rows, "--steps": steps, "--by": by, "--peer": peer,
            "--tables": tables, "--source": source, "--runs": runs, "--engine-args": engine_args,
            "--model": model,
        }  # fmt: skip
        one_gpu_only = [name for name, value in given.items() if value]
        if one_gpu_only:
            raise FastroofError(f"{', '.join(one_gpu_only)} is of one GPU: --gpu all takes no such option")
        _validate_all(runtime, split, min_rows, markdown, csv_path, plot, as_json)
        return
    if markdown or min_rows > 1 or split in ("gpu", "version"):
        raise FastroofError(
            "--leave-one-gpu-out, --leave-one-version-out, --min-rows and --markdown need --gpu all, "
            f"got --gpu {gpu or 'of this machine'}"
        )
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
        from fastroof.report.serving import draw_validation

        save_figure(draw_validation(report), plot)
    if as_json:
        print_json(_document(report, groups))
    else:
        _print(report, groups)


def _split(**splits: bool) -> str | None:
    """What is left out of the fits."""
    asked = [name for name, is_asked in splits.items() if is_asked]
    if len(asked) > 1:
        options = ", ".join(f"--leave-one-{name}-out" for name in asked)
        raise FastroofError(f"one split at a time: got {options}")
    return asked[0] if asked else None


def _validate_all(
    runtime: str,
    split: str | None,
    min_rows: int,
    markdown: bool,
    csv_path: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Judge all GPUs that something was measured on."""
    from fastroof.cli.validate_all import markdown_groups, print_report
    from fastroof.serving.evidence.whole_sample import report_document, validate_gpus

    if as_json and markdown:
        raise FastroofError("--json and --markdown are two forms of one answer: give one of them")
    report = validate_gpus(
        runtime=runtime,
        leave_out=split,
        progress=None if as_json else lambda words: typer.echo(words, err=True),
    )
    if csv_path is not None:
        _write_csv(csv_path, report.times)
    if plot is not None:
        from fastroof.report import save_figure
        from fastroof.report.serving import draw_sample

        save_figure(draw_sample(report), plot)
    if as_json:
        print_json(report_document(report, min_rows))
    elif markdown:
        typer.echo(markdown_groups(report, min_rows))
    else:
        print_report(report, min_rows)


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
        "frontends_us_per_token": {name: front.token_us for name, front in report.frontends.items()},
        "frontends": {name: front._asdict() for name, front in report.frontends.items()},
        "groups": [{"by" if k == "values" else k: v for k, v in g._asdict().items()} for g in groups],
        "left_out": [entry._asdict() for entry in report.left_out],
    }


def _write_csv(path: Path, rows: Sequence[PredictedTime]) -> None:
    from fastroof.atomic_files import write_errors, write_whole

    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(rows[0]._fields if rows else ()), "error", "aic_error"])
    for row in rows:
        cells = (*row, row.error, row.aic_error)
        writer.writerow([_cell(value) for value in cells])
    with write_errors(f"--csv {path}"):
        write_whole(path, text.getvalue())


def _cell(value: Any) -> Any:
    from fastroof.columns import guarded

    if isinstance(value, str):
        return guarded(value)
    return "" if isinstance(value, float) and math.isnan(value) else value


def _print(report: Validation, groups: Sequence[ErrorGroup]) -> None:
    out = console()
    how = "constants fitted without each row's model" if report.unseen else f"runtime {report.runtime}"
    out.print(f"{report.gpu}, {counted(len(report.rows), 'prediction')}, {how}\n", soft_wrap=True)
    by = list(groups[0].values) if groups else []
    columns = (
        "quantity",
        "data set",
        *by,
        "kind",
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
            group.kind,
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
        print_table(
            columns,
            text,
            left=("quantity", "data set", "model", "engine", "kind", "fitted"),
            least=("fitted", "its bias", "aic", "p90", "median"),
        )
    else:
        out.print("nothing could be judged")
    given = {name: front for name, front in report.frontends.items() if any(front)}
    if given:
        out.print("\nin TTFT for the test bench, as runs of other models say:", soft_wrap=True)
    for name, front in given.items():
        out.print(f"  {name}: {front}", soft_wrap=True)
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
