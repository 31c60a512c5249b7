"""``python -m benchmarks.accuracy energy``: fit what kernels draw to measured power, and judge it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import typer

from benchmarks.accuracy.fit import non_negative_least_squares
from fastroof import StepPlan, compile_plan
from fastroof.arrays import Bools, Floats, Longs
from fastroof.cli.options import Json
from fastroof.cli.output import print_json, print_line, print_table
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import FastroofError, TableError
from fastroof.load.families import codes_of
from fastroof.operators.external_rows import PackageFile
from fastroof.operators.operator import Columns, Operator
from fastroof.operators.power import DRAWS, GAP, OTHER, Draw
from fastroof.operators.registry import OPERATORS
from fastroof.plan import energy as plan_energy
from fastroof.serving import estimate
from fastroof.units import US_PER_S

EPILOG: Final = """\b
Examples:
  python -m benchmarks.accuracy energy --package aisimulate_core
  python -m benchmarks.accuracy energy --package aisimulate_core --runs leaderboard/public/data/models

--package is the folder of the installed aisimulate (Apache-2.0); --runs that of the ML.ENERGY leaderboard's
files, one a model (github.com/ml-energy/leaderboard). Every second model chooses one constant, the power of
gaps between kernels; the others judge all of them.

\b
Biases are means of ln(predicted / measured). "held out" is the error of each half of an operator's kernels by
a fit to the other half, "by others" by a fit to all other operators.

\b
JSON: draws [operator, rows, noise, own, unseen, floor, busy, compute, memory], other, gap, and runs [gpu,
model, runs, watts, watts_bias, watts_rms, joules, joules_bias, itl_bias], errors as fractions.
"""

SYSTEM: Final = ("b200_sxm", "b200")
"""The package's system with power columns, and its GPU."""

LEAST_ROWS: Final = 1000
"""Operators with fewer rows over memory get the draw of all rows."""

UTILISATIONS: Final = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BEYOND_LAUNCH: Final = (0.0, 0.2, 0.5, 0.8, 0.95)
"""Edges of the bins that count alike: half of the rows are small kernels."""

FEW: Final = 5
"""Rows of a bin below which it counts less."""


class PowerRows(NamedTuple):
    """Measured rows of one operator and engine: what a draw is made of, and the power, W."""

    operator: str
    terms: Floats
    watts: Floats
    kernel: Longs
    weight: Floats

    def some(self, keep: Bools) -> PowerRows:
        """Return some of the rows."""
        weight = self.weight[keep]
        return PowerRows(
            self.operator, self.terms[keep], self.watts[keep], self.kernel[keep], weight / weight.sum()
        )


def power_rows(package: Path) -> list[PowerRows]:
    """Read every row with a power of the package."""
    gpu, found = load_gpu(SYSTEM[1]), []
    for operator in OPERATORS.values():
        for file in operator.package_files:
            places = sorted(
                (package / "systems" / "data" / SYSTEM[0]).glob(f"{file.folder}/*/*/{file.file}.parquet")
            )
            for path in places:
                rows = _rows_of(operator, file, path, gpu)
                if rows is not None:
                    found.append(rows)
    if not found:
        raise TableError(f"{package} has no tables with a power column for {SYSTEM[0]}")
    return found


def _rows_of(operator: Operator, file: PackageFile, path: Path, gpu: GpuSpec) -> PowerRows | None:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if "power" not in table.column_names:
        return None
    raw = {
        name: np.asarray(table[name].to_pylist(), object)
        if str(table[name].type) == "string"
        else table[name].to_numpy()
        for name in table.column_names
    }
    rows = file.convert(raw)
    keep = raw["power"] > 0.0
    for left_out in rows.left_out.values():
        keep = keep & ~left_out
    columns = {name: values[keep] for name, values in rows.columns.items()}
    return _terms(operator, columns, raw["power"][keep], gpu) if keep.any() else None


def _terms(operator: Operator, columns: Columns, watts: Floats, gpu: GpuSpec) -> PowerRows | None:
    """Return the four terms of each row: 1, time beyond the launch, and both utilisations."""
    work, us = operator.work(columns, gpu), np.asarray(columns["latency_us"], np.float64)
    compute = np.nan_to_num(work.flops / work.peak_flops_per_s) / us * US_PER_S
    memory = work.moved_bytes / work.bandwidth_bytes_per_s / us * US_PER_S
    kernel = (
        codes_of([columns[key.name] for key in operator.keys]) if operator.keys else np.zeros(len(us), int)
    )
    launch_us = np.full(kernel.max() + 1, np.inf)
    np.minimum.at(launch_us, kernel, us)
    busy = 1.0 - launch_us[kernel] / us
    possible = np.isfinite(compute + memory) & (compute <= 1.0) & (memory <= operator.bandwidth_slack)
    if not operator.over_link:
        # no bytes: a difference of two measurements
        possible &= work.moved_bytes > 0.0
    if not possible.any():
        return None
    memory = np.zeros_like(memory) if operator.over_link else np.minimum(memory, 1.0)
    terms = np.stack([np.ones_like(us), busy, compute, memory], axis=1)
    edges = (BEYOND_LAUNCH, UTILISATIONS, UTILISATIONS)
    bins = codes_of([np.digitize(terms[:, i + 1], edge) for i, edge in enumerate(edges)])
    in_bin = np.bincount(bins[possible], minlength=bins.max() + 1)[bins]
    weight = 1.0 / np.maximum(in_bin, FEW)
    return PowerRows(operator.name, terms, watts, kernel, weight).some(possible)


def fitted(rows: Sequence[PowerRows], gpu: GpuSpec) -> Draw:
    """Fit shares of at least 0 by least squares."""
    root = np.concatenate([np.sqrt(one.weight) for one in rows])
    terms = np.concatenate([one.terms for one in rows]) * root[:, None]
    share = np.concatenate([_share(one.watts, gpu) for one in rows]) * root
    return Draw(*(round(float(share), 3) for share in non_negative_least_squares(terms, share)))


def _share(watts: Floats, gpu: GpuSpec) -> Floats:
    return np.clip((watts - gpu.idle_w) / (gpu.tdp_w - gpu.idle_w), 0.0, 1.0)


def error(draw: Draw, rows: PowerRows, gpu: GpuSpec) -> float:
    """Return the mean absolute relative error of rows, each bin alike."""
    predicted = gpu.idle_w + (gpu.tdp_w - gpu.idle_w) * np.minimum(rows.terms @ np.array(draw), 1.0)
    return float(rows.weight @ np.abs(predicted / rows.watts - 1.0))


def noise(rows: PowerRows) -> float:
    """Return the mean relative difference of a kernel's rows that do nearly the same in the same time."""
    order = np.lexsort((rows.terms[:, 1], rows.kernel))
    terms, watts, kernel = rows.terms[order], rows.watts[order], rows.kernel[order]
    alike = (kernel[1:] == kernel[:-1]) & (np.abs(np.diff(terms, axis=0)) < 0.01).all(axis=1)
    ratio = np.abs(np.log(watts[1:] / watts[:-1]))[alike]
    return float(ratio.mean() / np.sqrt(2.0)) if alike.any() else float("nan")


class FittedDraw(NamedTuple):
    """One operator's draw with its errors: on kernels held out of the fit, and by other operators' rows."""

    operator: str
    rows: int
    noise: float
    draw: Draw
    own: float
    unseen: float


def fitted_draws(rows: Sequence[PowerRows], gpu: GpuSpec) -> tuple[list[FittedDraw], Draw]:
    """Fit every operator, and all together."""
    found = []
    for name in dict.fromkeys(one.operator for one in rows):
        own, others = ([one for one in rows if (one.operator == name) == is_own] for is_own in (True, False))
        count = sum(len(one.watts) for one in own)
        errors, seen = [], []
        halves = [
            ([one.some(one.kernel % 2 == k) for one in own if (one.kernel % 2 == k).any()]) for k in (0, 1)
        ]
        for fit_on, judged in (halves, halves[::-1]):
            if fit_on and judged:
                draw = fitted(fit_on, gpu)
                errors += [error(draw, one, gpu) for one in judged]
        unseen = fitted(others, gpu)
        seen = [error(unseen, one, gpu) for one in own]
        found.append(
            FittedDraw(
                name, count, float(np.nanmean([noise(one) for one in own])), fitted(own, gpu),
                float(np.mean(errors)) if errors else float("nan"), float(np.mean(seen)),
            )
        )  # fmt: skip
    return found, fitted(rows, gpu)


def shipped(found: FittedDraw) -> bool:
    """Whether an operator has enough rows for its own fit; links have few."""
    return found.rows >= LEAST_ROWS or OPERATORS[found.operator].over_link


TASKS: Final = {"lm-arena-chat": 200, "gpqa": 250}
"""Tasks of the leaderboard that are judged, and their mean prompt tokens: assumed, its files have none."""

ENGINE: Final = "vllm-0.12"
"""The profile closest to the runs' vLLM 0.11.1."""

MOST_SEQS: Final = 4096


class JudgedRun(NamedTuple):
    """A run and its prediction: watts of a GPU, joules per output token, ms between tokens."""

    gpu: str
    model: str
    watts: float
    joules: float
    itl_ms: float
    predicted_watts: float
    predicted_joules: float
    predicted_itl_ms: float
    watts_without_gap: float


class RunErrors(NamedTuple):
    """Errors of a model's runs on a GPU: of watts, of joules per token and of the time between tokens."""

    gpu: str
    model: str
    runs: int
    watts: float
    watts_bias: float
    watts_rms: float
    joules: float
    joules_bias: float
    itl_bias: float


_VARIANTS: Final = re.compile(r"-(Instruct|Thinking|FP8|2507|it|0528)(?=-|$)")


def seen_runs(folder: Path) -> list[JudgedRun]:
    """Predict the power and energy of every run of models that are known here."""
    found: list[JudgedRun] = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("task") not in TASKS:
            continue
        plans: dict[tuple[Any, ...], StepPlan | None] = {}
        runs = (_seen_run(document, run, plans) for run in document["configurations"])
        found += [run for run in runs if run is not None]
    if not found:
        raise TableError(f"{folder} has no runs of {' or '.join(TASKS)} that can be predicted")
    return found


def halves(runs: Sequence[JudgedRun]) -> tuple[list[JudgedRun], list[JudgedRun]]:
    """Split runs by model, every second one: those that choose :data:`GAP`, and those that judge."""
    choosing = sorted({run.model for run in runs})[::2]
    return [run for run in runs if run.model in choosing], [run for run in runs if run.model not in choosing]


def fitted_gap(runs: Sequence[JudgedRun]) -> float:
    """Return the share that a gap draws, by least squares of relative errors of watts."""
    without, measured, whole = (
        np.array([getattr(run, name) for run in runs])
        for name in ("watts_without_gap", "watts", "predicted_watts")
    )
    slope = (whole - without) / GAP / measured
    return float(slope @ (1.0 - without / measured) / (slope @ slope))


def run_errors(runs: Sequence[JudgedRun]) -> list[RunErrors]:
    """Judge every model's runs on each GPU, and all of each GPU."""
    found = []
    for gpu in sorted({run.gpu for run in runs}):
        of_gpu = [run for run in runs if run.gpu == gpu]
        models = sorted({run.model for run in of_gpu})
        groups = {model: [run for run in of_gpu if run.model == model] for model in models}
        for model, group in (*groups.items(), ("all", of_gpu)):
            logs = np.array([_logs(run) for run in group])
            sizes, bias = np.abs(np.expm1(logs)).mean(axis=0).tolist(), logs.mean(axis=0).tolist()
            rms = float(np.sqrt((logs[:, 0] ** 2).mean()))
            found.append(
                RunErrors(gpu, model, len(group), sizes[0], bias[0], rms, sizes[1], bias[1], bias[2])
            )
    return found


def _logs(run: JudgedRun) -> tuple[float, ...]:
    """Logs of predicted over measured: watts, joules, time between tokens."""
    pairs = (
        (run.predicted_watts, run.watts),
        (run.predicted_joules, run.joules),
        (run.predicted_itl_ms, run.itl_ms),
    )
    return tuple(float(np.log(one / other)) for one, other in pairs)


def _seen_run(
    document: dict[str, Any], run: dict[str, Any], plans: dict[tuple[Any, ...], StepPlan | None]
) -> JudgedRun | None:
    """Predict a run; None if its model is not known or it does not fit."""
    split, gpus = run["parallelization"], run["num_gpus"]
    dp, ep = split["data_parallel"], split["expert_parallel"]
    key = (run["gpu_model"].lower(), gpus, dp, ep)
    if key not in plans:
        plans[key] = _plan(document["model_id"], *key)
    plan = plans[key]
    clients = run["avg_batch_size"]
    if plan is None or not 1 <= clients / dp <= MOST_SEQS:
        return None
    try:
        isl, osl = TASKS[document["task"]], run["avg_output_len"]
        seen = estimate(plan, isl, osl, clients, max_num_seqs=MOST_SEQS, with_energy=True)
        with patch.object(plan_energy, "GAP", 0.0):
            without = estimate(plan, isl, osl, clients, max_num_seqs=MOST_SEQS, with_energy=True)
    except FastroofError:
        # more than the KV cache holds
        return None
    rate = seen.tokens_per_s_per_gpu
    model = _VARIANTS.sub("", document["model_id"].rpartition("/")[2])
    measured = (run["avg_power_watts"] / gpus, run["energy_per_token_joules"], run["median_itl_ms"])
    predicted = (seen.joules_per_token * rate, seen.joules_per_token, seen.tpot_ms)
    return JudgedRun(plan.gpu.name, model, *measured, *predicted, without.joules_per_token * rate)


def _plan(model: str, gpu: str, gpus: int, dp: int, ep: int) -> StepPlan | None:
    """Compile the plan of a run: attention is split by tp, experts by ep; None if the model is not known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compile_plan(
                model, gpu, tp=gpus // dp, dp=dp, ep=ep, engine=ENGINE, allow_modelled=True,
                max_num_seqs=MOST_SEQS,
            )  # fmt: skip
        except FastroofError:
            return None


def main(
    package: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder of aisimulate_core, whose tables have power columns."),
    ],
    runs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Files of the ML.ENERGY leaderboard's models.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit the power that kernels draw, and judge it on held-out kernels and on whole runs."""
    gpu = load_gpu(SYSTEM[1])
    found, other = fitted_draws(power_rows(package), gpu)
    choosing, judging = halves([] if runs is None else seen_runs(runs))
    gap = fitted_gap(choosing) if choosing else None
    judged = run_errors(judging)
    if as_json:
        rows = [one._asdict() | one.draw._asdict() for one in found]
        draws = [{name: value for name, value in row.items() if name != "draw"} for row in rows]
        whole = {"draws": draws, "other": other._asdict(), "gap": gap}
        print_json(whole | {"runs": [one._asdict() for one in judged]})
        return
    _print_draws(found, other)
    if gap is not None:
        names = ", ".join(dict.fromkeys(run.model for run in choosing))
        words = f"gap: {gap:.3f} by {len(choosing)} runs of {names} (shipped: {GAP:g})"
        print_line(f"\n{words}; the other models judge:\n")
        _print_runs(judged)


def _print_draws(found: Sequence[FittedDraw], other: Draw) -> None:
    columns = ("operator", "rows", "noise", *Draw._fields, "held out", "by others", "shipped")
    rows = []
    for one in found:
        ships = DRAWS.get(one.operator) if shipped(one) else None
        words = "as other" if ships is None else "yes" if ships == one.draw else "differs"
        own = "" if np.isnan(one.own) else f"{one.own:.1%}"
        cells = (f"{one.noise:.1%}", *(f"{share:.3f}" for share in one.draw), own)
        rows.append((one.operator, f"{one.rows:,}", *cells, f"{one.unseen:.1%}", words))
    words = "yes" if other == OTHER else "differs"
    rows.append(("other", "", "", *(f"{share:.3f}" for share in other), "", "", words))
    print_table(columns, rows, left=("operator", "shipped"))


def _print_runs(judged: Sequence[RunErrors]) -> None:
    columns = ("GPU", "model", "runs", "W", "W bias", "RMS ln W", "J a token", "J bias", "ITL bias")
    rows = [
        (
            one.gpu, one.model, f"{one.runs}", f"{one.watts:.1%}", f"{one.watts_bias:+.1%}",
            f"{one.watts_rms:.2f}", f"{one.joules:.1%}", f"{one.joules_bias:+.1%}", f"{one.itl_bias:+.1%}",
        )
        for one in judged
    ]  # fmt: skip
    print_table(columns, rows, left=("GPU", "model"))
