"""``python -m benchmarks.accuracy judge``: predictions compared with the measured rows that ship."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.accuracy.measured import Measured
from benchmarks.accuracy.rows import read_rows
from benchmarks.accuracy.validate_all import markdown_groups, print_report
from benchmarks.accuracy.validation import GpuValidation, run_validation
from benchmarks.accuracy.whole_sample import report_document, validate_gpus
from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.options import Gpu, Json, OneSource, TablesPath
from fastroof.cli.output import console, counted, print_json
from fastroof.cli.validate import columns_of, document, print_groups, print_left_out, write_csv, write_extras
from fastroof.errors import FastroofError, MissingTableError
from fastroof.load.by_name import missing_tables
from fastroof.report import check_picture, save_figure
from fastroof.serving.evidence.measured_steps import read_steps
from fastroof.serving.evidence.prediction_errors import ErrorGroup

PEERS: Final = ("aiconfigurator",)
ALL: Final = "all"

EPILOG: Final = """\b
Examples:
  python -m benchmarks.accuracy judge
  python -m benchmarks.accuracy judge --by tp --runtime kernels
  python -m benchmarks.accuracy judge --leave-one-model-out --plot validation.png
  python -m benchmarks.accuracy judge --rows my_runs.csv --gpu h100
  python -m benchmarks.accuracy judge --gpu all --leave-one-model-out --min-rows 10

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


def main(
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
    """Judge predictions by measured serving.

    TTFT and TPOT of serving engines, and whole steps, that were measured end to end, beside predictions.
    """
    if peer is not None and peer not in PEERS:
        raise FastroofError(f"--peer is {' or '.join(PEERS)}, got {peer!r}")
    if plot is not None:
        check_picture(plot)
    split = _split(model=leave_one_model_out, gpu=leave_one_gpu_out, version=leave_one_version_out)
    if gpu == ALL:
        given = {
            "--dataset": dataset, "--rows": rows, "--steps": steps, "--by": by, "--peer": peer,
            "--tables": tables, "--source": source,
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
    spec, measured_kernels = gpu_and_tables(gpu, tables, source)
    if measured_kernels is None:
        raise MissingTableError(missing_tables(spec.name))
    report = run_validation(
        _rows(rows, steps, dataset),
        measured_kernels,
        runtime=runtime,
        leave_one_model_out=leave_one_model_out,
        ask_aiconfigurator=peer is not None,
        progress=None if as_json else lambda words: typer.echo(words, err=True),
    )
    groups = report.errors(columns_of(by))
    write_extras(report, csv_path, plot)
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
    if as_json and markdown:
        raise FastroofError("--json and --markdown are two forms of one answer: give one of them")
    report = validate_gpus(
        runtime=runtime,
        leave_out=split,
        progress=None if as_json else lambda words: typer.echo(words, err=True),
    )
    if csv_path is not None:
        write_csv(csv_path, report.times)
    if plot is not None:
        from benchmarks.accuracy.sample_plot import draw_sample

        save_figure(draw_sample(report), plot)
    if as_json:
        print_json(report_document(report, min_rows))
    elif markdown:
        typer.echo(markdown_groups(report, min_rows))
    else:
        print_report(report, min_rows)


def _rows(rows: Path | None, steps: Path | None, datasets: list[str] | None) -> Measured | list[str] | None:
    if rows is None and steps is None:
        return datasets
    given = Measured(() if rows is None else read_rows(rows), () if steps is None else read_steps(steps))
    return given if datasets is None else given.pick(datasets)


def _document(report: GpuValidation, groups: Sequence[ErrorGroup]) -> dict[str, Any]:
    return document(report, groups) | {
        "leave_one_model_out": report.unseen,
        "frontends_us_per_token": {name: front.token_us for name, front in report.frontends.items()},
        "frontends": {name: front._asdict() for name, front in report.frontends.items()},
    }


def _print(report: GpuValidation, groups: Sequence[ErrorGroup]) -> None:
    out = console()
    how = "constants fitted without each row's model" if report.unseen else f"runtime {report.runtime}"
    out.print(f"{report.gpu}, {counted(len(report.rows), 'prediction')}, {how}\n", soft_wrap=True)
    print_groups(groups)
    given = {name: front for name, front in report.frontends.items() if any(front)}
    if given:
        out.print("\nin TTFT for the test bench, as runs of other models say:", soft_wrap=True)
    for name, front in given.items():
        out.print(f"  {name}: {front}", soft_wrap=True)
    print_left_out(report)
