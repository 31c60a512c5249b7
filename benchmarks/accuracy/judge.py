"""``python -m benchmarks.accuracy judge``: compare predictions with the shipped measured runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.accuracy.measured import Measured
from benchmarks.accuracy.rows import read_rows
from benchmarks.accuracy.validation import run_validation
from benchmarks.accuracy.whole_sample import (
    RunGroup,
    SampleValidation,
    Totals,
    report_document,
    validate_gpus,
)
from fastroof.cli.gpu_tables import measured_tables
from fastroof.cli.options import Gpu, Json, Source, TablesPath
from fastroof.cli.output import counted, print_json, print_line, print_table
from fastroof.cli.validate import (
    By,
    CsvPath,
    Plot,
    Profile,
    columns_of,
    document,
    print_groups,
    print_left_out,
    write_csv,
    write_extras,
)
from fastroof.errors import FastroofError
from fastroof.evidence.prediction_errors import ErrorGroup, Validation
from fastroof.evidence.steps.measured_steps import read_steps
from fastroof.report import check_picture

PEERS: Final = ("aiconfigurator",)
ALL: Final = "all"

EPILOG: Final = """\b
Examples:
  python -m benchmarks.accuracy judge
  python -m benchmarks.accuracy judge --by tp --engine kernels
  python -m benchmarks.accuracy judge --leave-one-model-out --plot validation.png
  python -m benchmarks.accuracy judge --rows my_runs.csv --gpu h100
  python -m benchmarks.accuracy judge --gpu all --leave-one-model-out --min-rows 10

Errors are relative to the measured time; bias is their signed mean. fitted: the profile's constants were
fitted to these rows. aic: aiconfigurator-core on the same rows. tpot: time per output token;
ttft: time to first token; decode, prefill, mixed, unequal: single steps, decode that of one client too.
throughput: output tokens/s; e2e: whole requests; tpot p90: a percentile of single requests.

\b
JSON: version, gpu, tables_hash, engine, leave_one_model_out, groups: one object per data set and quantity
[dataset, quantity, by, fitted, rows, mape, median, p90, bias, aic_rows, aic_mape, aic_bias, kind, all errors
as fractions], left_out [source, reason, rows, quantity: empty if it is the whole row].

\b
With --gpu all: version, engine, leave_out, gpus, gpus_left_out {gpu: why}, rows, runs (distinct),
represented, left_out {reason: rows}, totals, groups: one object per kind, model, gpu, engine, version, dtype
and quantity [rows, mape, median, p90, bias, aic_rows, aic_mape, compared_mape, fitted].
rows = represented + left_out.
"""


def main(
    gpu: Gpu = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Judge only this data set; repeatable.  [default: all]")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="CSV of your own measured rows; columns: benchmarks/accuracy/rows.py.")
    ] = None,
    steps: Annotated[
        Path | None, typer.Option(help="steps.csv of `kernels-bench steps`, alone or with --rows.")
    ] = None,
    engine: Profile = "auto",
    leave_one_model_out: Annotated[
        bool,
        typer.Option("--leave-one-model-out", help="Predict each model with constants fitted to the others."),
    ] = False,
    leave_one_gpu_out: Annotated[
        bool, typer.Option("--leave-one-gpu-out", help="Likewise for GPUs; needs --gpu all.")
    ] = False,
    leave_one_version_out: Annotated[
        bool, typer.Option("--leave-one-version-out", help="Likewise for engine versions; needs --gpu all.")
    ] = False,
    leave_one_bench_out: Annotated[
        bool, typer.Option("--leave-one-bench-out", help="Likewise for benchmarks; needs --gpu all.")
    ] = False,
    min_rows: Annotated[int, typer.Option(help="With --gpu all: minimum rows of a group.", min=1)] = 1,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --gpu all: print the tables as Markdown.")
    ] = False,
    by: By = "",
    peer: Annotated[
        str | None,
        typer.Option(
            help="aiconfigurator: query the installed package instead of using its shipped answers."
        ),
    ] = None,
    csv_path: CsvPath = None,
    plot: Plot = None,
    as_json: Json = False,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Compare predictions with measured serving."""
    if peer is not None and peer not in PEERS:
        raise FastroofError(f"--peer is {' or '.join(PEERS)}, got {peer!r}")
    if plot is not None:
        check_picture(plot)
    split = _split(
        model=leave_one_model_out,
        gpu=leave_one_gpu_out,
        version=leave_one_version_out,
        bench=leave_one_bench_out,
    )
    if gpu == ALL:
        given = {
            "--dataset": dataset, "--rows": rows, "--steps": steps, "--by": by, "--peer": peer,
            "--tables": tables, "--source": source,
        }  # fmt: skip
        one_gpu_only = [name for name, value in given.items() if value]
        if one_gpu_only:
            raise FastroofError(
                f"{', '.join(one_gpu_only)} need a single GPU; they cannot be combined with --gpu all"
            )
        _validate_all(engine, split, min_rows, markdown, csv_path, plot, as_json)
        return
    if markdown or min_rows > 1 or split in ("gpu", "version", "bench"):
        raise FastroofError(
            "--leave-one-gpu-out, --leave-one-version-out, --leave-one-bench-out, --min-rows and --markdown "
            f"need --gpu all, "
            f"got --gpu {gpu or 'of this machine'}"
        )
    _, measured_kernels = measured_tables(gpu, tables, source)
    report = run_validation(
        _rows(rows, steps, dataset),
        measured_kernels,
        engine=engine,
        leave_one_model_out=leave_one_model_out,
        with_aiconfigurator=peer is not None,
        progress=None if as_json else lambda words: typer.echo(words, err=True),
    )
    groups = report.errors(columns_of(by))
    write_extras(report, csv_path, plot)
    if as_json:
        print_json(document(report, groups) | {"leave_one_model_out": report.unseen})
    else:
        _print(report, groups)


def _split(**splits: bool) -> str | None:
    """Return what to leave out of the fits."""
    chosen = [name for name, is_chosen in splits.items() if is_chosen]
    if len(chosen) > 1:
        options = ", ".join(f"--leave-one-{name}-out" for name in chosen)
        raise FastroofError(f"one split at a time: got {options}")
    return chosen[0] if chosen else None


def _validate_all(
    engine: str,
    split: str | None,
    min_rows: int,
    markdown: bool,
    csv_path: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Validate all GPUs with measured runs."""
    if as_json and markdown:
        raise FastroofError("--json and --markdown exclude each other")
    report = validate_gpus(
        engine=engine,
        leave_out=split,
        progress=None if as_json else lambda words: typer.echo(words, err=True),
    )
    if csv_path is not None:
        write_csv(csv_path, report.times)
    write_extras(report.together(), None, plot)
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


def _print(report: Validation, groups: Sequence[ErrorGroup]) -> None:
    how = "constants fitted without each row's model" if report.unseen else f"engine {report.engine}"
    print_line(f"{report.gpu}, {counted(len(report.rows), 'prediction')}, {how}\n")
    print_groups(groups)
    print_left_out(report)


COLUMNS: Final = (
    "model", "gpu", "engine", "version", "format", "kind", "rows", "MAPE", "median", "p90", "bias", "aic",
)  # fmt: skip
_TITLES: Final = {
    "tpot": "Time per output token",
    "ttft": "Time to first token, without queueing",
    "decode": "Time per output token, one request in flight",
}


def print_report(report: SampleValidation, min_rows: int) -> None:
    """Print the groups of each quantity (worst first), totals, and rows that were not judged."""
    print_line(
        f"{report.represented} of {counted(report.runs, 'distinct run')} on "
        f"{counted(len(report.gpus), 'GPU')}, {_how(report)}"
    )
    for quantity, groups in _by_quantity(report.groups(min_rows)).items():
        print_line(f"\n{_TITLES.get(quantity, quantity)}\n")
        print_table(COLUMNS, [_cells(group) for group in groups], left=COLUMNS[:6])
    print_line()
    for total in report.totals():
        for line in _total_lines(total):
            print_line(line)
    for gpu, why in report.absent.items():
        print_line(f"\n{gpu} is left out: {why}")
    print_line(f"\nnot judged: {counted(sum(report.left_out.values()), 'row')}")
    for reason, rows in report.left_out.items():
        print_line(f"  {rows:>4}  {reason}")


def markdown_groups(report: SampleValidation, min_rows: int) -> str:
    """Return the same as Markdown: a table per quantity, and the totals as a list."""
    lines = [f"{report.represented} of {report.runs} distinct runs, {_how(report)}.", ""]
    for total in report.totals():
        lines += [f"* {line.strip()}" for line in _total_lines(total)]
    lines += ["", *_by_engine(report.groups())]
    for quantity, groups in _by_quantity(report.groups(min_rows)).items():
        lines += ["", f"**{_TITLES.get(quantity, quantity)}**", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * 6}{'---:|' * (len(COLUMNS) - 6)}"]
        lines += [f"| {' | '.join(_cells(group))} |" for group in groups]
    return "\n".join(lines)


def _by_engine(groups: Sequence[RunGroup]) -> list[str]:
    """Return TPOT errors of judged runs by GPU and engine, with the worst group."""
    members: dict[tuple[str, str], list[RunGroup]] = {}
    for group in groups:
        if (group.quantity, group.kind) == ("tpot", "judged"):
            members.setdefault((group.gpu, group.engine), []).append(group)
    columns = ("gpu", "engine", "runs", "groups", "TPOT MAPE", "bias", "aic", "the worst group")
    lines = [f"| {' | '.join(columns)} |", "|---|---|---:|---:|---:|---:|---:|---|"]
    for (gpu, engine), some in sorted(members.items()):
        runs, answered = sum(group.rows for group in some), sum(group.aic_rows for group in some)
        mape, bias = (
            sum(group.rows * value for group, value in zip(some, values, strict=True)) / runs
            for values in ([group.mape for group in some], [group.bias for group in some])
        )
        aic = sum(group.aic_rows * group.aic_mape for group in some if group.aic_rows)
        compared = f"{aic / answered:.1%}" if answered else ""
        worst = max(some, key=lambda group: group.mape)
        named = (
            f"{worst.model} {worst.dtype}, {worst.version or 'no version'}: {worst.mape:.1%} of {worst.rows}"
        )
        cells = (gpu, engine, f"{runs}", f"{len(some)}", f"{mape:.1%}", f"{bias:+.1%}", compared, named)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _how(report: SampleValidation) -> str:
    if report.split:
        return f"constants fitted without each run's {report.split}"
    return f"engine {report.engine}"


def _by_quantity(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    found: dict[str, list[RunGroup]] = {}
    for group in groups:
        found.setdefault(group.quantity, []).append(group)
    return found


def _cells(group: RunGroup) -> tuple[str, ...]:
    compared = "" if not group.aic_rows else f"{group.aic_mape:.1%}"
    if group.aic_rows not in (0, group.rows):
        compared += f" of {group.aic_rows}"
    fitted = " (fitted)" if group.fitted else ""
    return (
        group.model, group.gpu, group.engine, group.version, group.dtype, f"{group.kind}{fitted}",
        f"{group.rows}", f"{group.mape:.1%}", f"{group.median:.1%}", f"{group.p90:.1%}",
        f"{group.bias:+.1%}", compared,
    )  # fmt: skip


def _total_lines(total: Totals) -> list[str]:
    """Return totals in words, for TPOT with the list of poor groups."""
    which = total.kinds[0] if len(total.kinds) == 1 else "of all kinds"
    lines = [
        f"{total.quantity.upper()} of {counted(total.rows, 'run')} {which}: MAPE {_share(total.mape)}, "
        f"bias {total.bias:+.1%}; median of {counted(total.groups, 'group')} of 10 runs or more "
        f"{_share(total.median_of_groups)}; ahead of aiconfigurator-core in {_share(total.ahead, 0)} of the "
        f"{total.compared_groups} that it answers ({_share(total.compared_mape)} against "
        f"{_share(total.aic_mape)} over its runs)"
    ]
    if total.quantity == "tpot" and total.poor:
        lines.append(f"  above 25 %: {'; '.join(total.poor)}")
    return lines


def _share(value: float, digits: int = 1) -> str:
    return "none" if math.isnan(value) else f"{value:.{digits}%}"
