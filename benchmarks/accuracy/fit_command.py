"""``python -m benchmarks.accuracy fit``: fit an engine's profile to measured rows."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.accuracy.calibration import RESAMPLES, Calibration, calibrate
from benchmarks.accuracy.fit_errors import DatasetErrors
from benchmarks.accuracy.rows import read_rows, shipped_rows
from fastroof import gpu_names
from fastroof.cli.calibrate import Bootstrap, FitSource, FitTables, Output
from fastroof.cli.gpu_tables import tables_of
from fastroof.cli.options import GPU_NAMES, Json
from fastroof.cli.output import print_facts, print_json, print_line, print_records, print_table
from fastroof.errors import FastroofError
from fastroof.evidence.profile_file import check_profile_path, write_profile
from fastroof.tables import Tables

DEFAULT_ENGINE: Final = "vllm"
EVERY_GPU: Final = "all"

EPILOG: Final = """\b
Examples:
  python -m benchmarks.accuracy fit --engine vllm --gpu all
  python -m benchmarks.accuracy fit --engine vllm --rows my_runs.csv --output mine.toml
  fastroof step --model llama-3.1-8b --engine mine.toml --decode 64x4096

Rows are a CSV with the columns dataset, gpu, engine, model, dtype, kv_dtype, tp, isl, osl, concurrency,
tpot_ms and the optional ones of benchmarks/accuracy/rows.py. Rows with a reason in left_out are not fitted.

Each data set of a GPU has the same weight, errors are relative, and all models and tp share the costs.
Intervals are 95 %, from a bootstrap over (model, tp, GPU). Which costs an engine has is in its profile.
Unseen errors: costs are fitted without the model, GPU, version or bench.
Admission-limited, speculative and defective runs are not fitted; their number is printed.

\b
JSON: profile (its parts), evidence (command, hashes, intervals, fits without each model, GPU, version, bench,
errors, data sets), costs: a list [name, us, low_us, high_us], datasets: a list [dataset, rows, models, gpus,
tps, and mape and bias of kernels, fitted and unseen as fractions], without, without_gpu, without_version,
without_bench (name: costs), output (the profile written, or null).
"""


def main(
    engine: Annotated[
        str | None, typer.Option(help="Profile whose rows to fit, such as vllm-0.12.  [default: vllm]")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Fit only this data set; repeatable.  [default: all]")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(help="CSV of measured rows.  [default: those that ship with the GPU's tables]"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            *GPU_NAMES, help="GPU, or which one if a folder holds several; all: every GPU with runs."
        ),
    ] = None,
    tables: FitTables = None,
    source: FitSource = None,
    output: Output = None,
    bootstrap: Bootstrap = None,
    as_json: Json = False,
) -> None:
    """Fit an engine's profile to measured serving."""
    if output is not None:
        check_profile_path(output)
    engine = engine or DEFAULT_ENGINE
    loaded = _tables(engine, gpu, tables, source)
    options: list[tuple[str, Any]] = [("--engine", engine), *(("--dataset", name) for name in dataset or ())]
    options += [("--rows", rows), ("--gpu", gpu), ("--tables", tables), ("--source", source)]
    options += [("--bootstrap", bootstrap)]
    given = [str(word) for option in options if option[1] is not None for word in option]
    fitted = calibrate(
        [row for name in loaded for row in shipped_rows(name)] if rows is None else read_rows(rows),
        loaded,
        engine,
        datasets=dataset,
        resamples=RESAMPLES if bootstrap is None else bootstrap,
        name=None if output is None else output.stem,
        command=shlex.join(["fastroof", "calibrate", *given]),
    )
    if output is not None:
        write_profile(fitted.profile, output)
    if as_json:
        print_json(_document(fitted, output))
        return
    _print(fitted)
    if output is not None:
        typer.echo(f"\nwritten to {output}: --engine {output} uses it")


def _tables(engine: str, gpu: str | None, tables: str | None, source: str | None) -> dict[str, Tables]:
    """Return tables by GPU: of one, or of all with shipped runs of an engine."""
    if gpu != EVERY_GPU:
        one = tables_of(tables, gpu, source)
        return {one.gpu.name: one}
    if tables is not None:
        raise FastroofError("--gpu all reads every GPU's own tables; leave --tables out")
    ran = [name for name in gpu_names() if any(r.engine_profile.name == engine for r in shipped_rows(name))]
    return {name: tables_of(name, None, source) for name in ran}


def _document(fitted: Calibration, output: Path | None) -> dict[str, Any]:
    profile = asdict(fitted.profile)
    return {
        "evidence": profile.pop("evidence"),
        "profile": profile,
        "costs": [cost._asdict() for cost in fitted.costs],
        "datasets": [one._asdict() for one in fitted.datasets],
        **{
            "without" if split == "model" else f"without_{split}": {
                left_out: asdict(other.costs) for left_out, other in profiles.items()
            }
            for split, profiles in fitted.without.items()
        },
        "output": None if output is None else str(output),
    }


def _print(fitted: Calibration) -> None:
    profile, kernels = fitted.profile, fitted.profile.kernels
    facts = {
        "profile": profile.name,
        "engine": fitted.engine,
        "kernels": f"gemm_smoothing {kernels.gemm_smoothing}, fp8_scales {kernels.fp8_scales}",
        "costs": ", ".join(profile.fit.costs if profile.fit else ()) or "none",
        "residual": _residual(profile.costs.residual),
    }
    print_facts(facts)
    for why, rows in profile.evidence["not_fitted"].items():
        print_line(f"not fitted, {rows}: {why}")
    print_line()
    ranges = {
        cost.name: sorted(getattr(other.costs, cost.name, 0.0) for other in fitted.without["model"].values())
        for cost in fitted.costs
    }
    print_table(
        ("cost", "us", "95 % interval", "one model left out"),
        [
            (cost.name, f"{cost.us:.3g}", _range(cost.low_us, cost.high_us), _range(*ranges[cost.name]))
            for cost in fitted.costs
        ],
        left=("cost",),
    )
    print_line()
    columns: dict[str, Callable[[DatasetErrors], str]] = {
        "data set": lambda one: one.dataset,
        "rows": lambda one: str(one.rows),
        "gpu": lambda one: " ".join(one.gpus),
        "tp": lambda one: " ".join(map(str, one.tps)),
        "kernels": lambda one: _error(one.kernels_mape, one.kernels_bias),
        "fitted": lambda one: _error(one.fitted_mape, one.fitted_bias),
        "unseen model": lambda one: _error(one.unseen_mape, one.unseen_bias),
        "unseen gpu": lambda one: _error(one.unseen_gpu_mape, one.unseen_gpu_bias),
        "version": lambda one: _error(one.unseen_version_mape, one.unseen_version_bias),
        "bench": lambda one: _error(one.unseen_bench_mape, one.unseen_bench_bias),
    }
    print_records(fitted.datasets, columns, left=("data set", "gpu", "tp"))
    print_line("MAPE and (bias) of the time per output token")
    for what, errors in fitted.profile.evidence["errors"].items():
        print_line(f"{what.replace('_', ' ')}: {errors['mape']:.1%} over {errors['rows']:.0f} rows")


def _residual(residual: float) -> str:
    if not residual:
        return "unknown: needs runs of another model"
    return f"{residual * 100.0:.1f} % standard error on unseen models"


def _range(*ends: float) -> str:
    if not ends or math.isnan(ends[0]):
        return "-"
    return f"{ends[0]:.3g} to {ends[-1]:.3g}"


def _error(mape: float, bias: float) -> str:
    return "-" if math.isnan(mape) else f"{mape * 100.0:.1f} % ({bias * 100.0:+.1f})"
