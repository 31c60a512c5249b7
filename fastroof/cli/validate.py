"""``fastroof validate``: compare predictions with measured runs and whole steps.

``fastroof tables validate`` is another command: it checks the measured kernels themselves.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.checkout import CheckoutCommand
from fastroof.cli.gpu_tables import measured_tables
from fastroof.cli.options import Gpu, Json, Source, TablesPath
from fastroof.cli.output import attribute, counted, print_json, print_line, print_records
from fastroof.cli.own_runs import MOST_NAMED, OWN_DATA, own_runs_of
from fastroof.command_group import GroupValues, taking, warn

if TYPE_CHECKING:
    from fastroof.evidence.prediction_errors import (
        ComparedRun,
        ErrorGroup,
        PredictedTime,
        RunFigure,
        Validation,
    )
    from fastroof.evidence.steps.measured_steps import MeasuredStep

EPILOG: Final = """\b
Examples:
  fastroof validate --runs results/ --engine-args serve.txt --gpu h100 --engine mine.toml
  fastroof validate --steps steps.csv --gpu h100 --plot validation.png
  fastroof validate --steps forward.json --engine-args forward.txt --gpu h100

--steps forward.json is what `vllm bench forward` wrote, forward.txt its command line. For a step, `fastroof
step --measure` prints both commands.

Runs with draft tokens need their number and the mean tokens per step: from the engine's arguments and the
run's file, or from --num-draft-tokens, --accepted and --draft.

Without --runs and --steps it judges the shipped profiles by the runs that they were fitted to. That needs a
checkout of fastroof and takes other options: python -m benchmarks.accuracy judge --help.

Each run's means are printed next to their predictions and the range of 8 in 10 public runs that no cost was
fitted to; requests in flight (running) are the rate times the mean latency.

Errors are relative to the measured time; bias is their signed mean. tpot: time per output token; ttft: time
to first token; decode, prefill, mixed, unequal: single steps, decode also of one client.

\b
JSON: version, gpu, tables_hash, engine,
groups: one object per data set and quantity [dataset, quantity, by, fitted, rows, mape, median, p90, bias,
aic_rows, aic_mape, aic_bias, kind, all errors as fractions], left_out [source, reason, rows,
quantity: empty if it is the whole row], runs [run, verdict, ttft, tpot, tokens_per_s, running: measured,
predicted, low, high, slower_than (share of such engines)], compared (what was timed of the steps of each
data set).
"""


Profile = Annotated[
    str,
    typer.Option(
        help="Profile to judge, or .toml file, and the engine of runs whose arguments name none; auto: the "
        "profile of each run's engine."
    ),
]
By = Annotated[
    str, typer.Option(help="Further columns to group by, comma-separated: tp,model,engine_version ...")
]
CsvPath = Annotated[
    Path | None, typer.Option("--csv", metavar="PATH", help="Write every row with its prediction.")
]
Plot = Annotated[Path | None, typer.Option(help="Plot to write, predicted against measured: .png or .svg.")]


SETTINGS: Final = {"cls": CheckoutCommand}


@taking(data=OWN_DATA)
def validate(
    *,
    gpu: Gpu = None,
    data: GroupValues,
    engine: Profile = "auto",
    by: By = "",
    csv_path: CsvPath = None,
    plot: Plot = None,
    as_json: Json = False,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Compare predictions with measured serving.

    Compares TTFT and TPOT of your own runs (--runs), and times of whole steps (--steps), with predictions.
    """
    from fastroof.engines import load_engine
    from fastroof.evidence.validation import other_versions, validate_own

    if plot is not None:
        from fastroof.report import check_picture

        check_picture(plot)
    judged = "" if engine == "auto" else load_engine(engine).engine
    own = own_runs_of(data, gpu, None, by_default=judged, warn=not as_json)
    gpu = (own.gpu or None) if data["runs"] or gpu is None else gpu
    _, measured_kernels = measured_tables(gpu, tables, source)
    for words in other_versions(own.rows, engine):
        warn(words)
    report = validate_own(
        own.rows,
        own.steps,
        measured_kernels,
        engine=engine,
        progress=None if as_json else lambda words: typer.echo(words, err=True),
    )
    groups = report.errors(columns_of(by))
    write_extras(report, csv_path, plot)
    if as_json:
        print_json(document(report, groups) | {"runs": of_runs(report), "compared": compared(own.steps)})
    else:
        count = counted(len(report.rows), "prediction")
        print_line(f"{report.gpu}, {count}, engine {report.engine}\n")
        print_runs(report.runs)
        print_groups(groups)
        for dataset, words in compared(own.steps).items():
            print_line(f"\n{dataset}: {words}")
        print_left_out(report)


def compared(steps: Sequence[MeasuredStep]) -> dict[str, str]:
    """Return what is compared of each source of steps."""
    from fastroof.evidence.steps.measured_steps import TIMED_WORDS

    return {step.dataset: TIMED_WORDS[step.timed] for step in steps}


def of_runs(report: Validation) -> list[dict[str, Any]]:
    """Return the figures and the verdict of each run for JSON."""
    from fastroof.evidence.prediction_errors import verdicts

    return [
        {
            "run": run.run,
            "verdict": next(iter(verdicts([run]))),
            **{one.quantity: dict(zip(one._fields[1:], one[1:], strict=True)) for one in run.figures},
        }
        for run in report.runs
    ]


def columns_of(by: str) -> list[str]:
    """Return the columns that ``--by`` names."""
    return [name.strip() for name in by.split(",") if name.strip()]


def write_extras(report: Validation, csv_path: Path | None, plot: Path | None) -> None:
    """Write the files of ``--csv`` and ``--plot``."""
    if csv_path is not None:
        write_csv(csv_path, report.rows)
    if plot is not None:
        from fastroof.report import save_figure
        from fastroof.report.serving import draw_validation

        save_figure(draw_validation(report), plot)


def document(report: Validation, groups: Sequence[ErrorGroup]) -> dict[str, Any]:
    """Return a report for JSON."""
    return {
        **{name: getattr(report, name) for name in ("version", "gpu", "tables_hash", "engine")},
        "groups": [{"by" if k == "values" else k: v for k, v in g._asdict().items()} for g in groups],
        "left_out": [entry._asdict() for entry in report.left_out],
    }


def write_csv(path: Path, rows: Sequence[PredictedTime]) -> None:
    """Write every row with its prediction."""
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


FIGURES: Final = {"ttft": "TTFT ms", "tpot": "TPOT ms", "tokens_per_s": "tokens/s", "running": "running"}


def print_runs(runs: Sequence[ComparedRun]) -> None:
    """Print the figures of runs next to their predictions, then the verdicts."""
    from fastroof.evidence.own_runs import few
    from fastroof.evidence.prediction_errors import verdicts

    if not runs:
        return
    columns: dict[str, Callable[[tuple[ComparedRun, RunFigure]], str]] = {
        "run": lambda one: one[0].run if one[1] is one[0].figures[0] else "",
        "mean": lambda one: FIGURES[one[1].quantity],
        "measured": lambda one: f"{one[1].measured:,.4g}",
        "predicted": lambda one: f"{one[1].predicted:,.4g}",
        "8 in 10 such runs": lambda one: _bounds(one[1]),
    }
    shown = runs[:MOST_NAMED]
    print_records([(run, one) for run in shown for one in run.figures], columns, left=("run", "mean"))
    print_line()
    for words, names in verdicts(runs).items():
        print_line(f"{few(names)}: {words}")
    if len(runs) > MOST_NAMED:
        print_line(f"the other {len(runs) - MOST_NAMED} runs are in --json")
    print_line()


def _bounds(one: RunFigure) -> str:
    is_known = not math.isnan(one.low) and one.low < one.high
    return f"{one.low:,.4g} to {one.high:,.4g}" if is_known else ""


def print_groups(groups: Sequence[ErrorGroup]) -> None:
    """Print errors by group as a table."""
    if not groups:
        print_line("nothing could be judged")
        return
    columns: dict[str, Callable[[ErrorGroup], str]] = {
        "quantity": attribute("quantity"),
        "data set": attribute("dataset"),
        **{name: partial(_value_words, name) for name in groups[0].values},
        "kind": attribute("kind"),
        "rows": attribute("rows"),
        **{head: attribute(head.lower(), ".1%") for head in ("MAPE", "median", "p90")},
        "bias": attribute("bias", "+.1%"),
        "aic": lambda group: _peer(group, f"{group.aic_mape:.1%}"),
        "its bias": lambda group: f"{group.aic_bias:+.1%}" if group.aic_rows else "",
        "fitted": lambda group: "yes" if group.fitted else "no",
    }
    print_records(
        groups,
        columns,
        left=("quantity", "data set", "model", "engine", "kind", "fitted"),
        least=("fitted", "its bias", "aic", "p90", "median"),
    )


def print_left_out(report: Validation) -> None:
    """Print the rows that were not judged, by reason."""
    if report.left_out:
        whole = sum(entry.rows for entry in report.left_out if not entry.quantity)
        part = ", and a part of others" if any(entry.quantity for entry in report.left_out) else ""
        print_line(f"\nnot judged: {counted(whole, 'row')}{part}")
    for entry in report.left_out:
        part = f"{entry.quantity} of " if entry.quantity else ""
        print_line(f"  {entry.rows:>4}  {part}{entry.source}: {entry.reason}")


def _value_words(name: str, group: ErrorGroup) -> str:
    value = group.values[name]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _peer(group: ErrorGroup, share: str) -> str:
    """Return its error, and its number of rows if not all."""
    if not group.aic_rows:
        return ""
    return share if group.aic_rows == group.rows else f"{share} of {group.aic_rows}"
