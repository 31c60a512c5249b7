"""Gain of fitting few runs, on the public sample: each larger group represents a user's cluster.

``python -m benchmarks.accuracy learning-curve`` prints the table of README.md.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.accuracy.run_kinds import speculative_runs
from benchmarks.accuracy.silicon_sample import read_silicon_sample
from fastroof.errors import FastroofError
from fastroof.evidence.few_runs import SIZES, Costs, learning_curve
from fastroof.evidence.kernel_times import COSTS, KernelTimes, kernel_times, predicted_us
from fastroof.evidence.rows import ServingRow
from fastroof.tables import Tables, load_tables
from fastroof.units import US_PER_MS

GPUS: Final = ("h100", "h200", "b200")
LEAST_RUNS: Final = 30
DRAWS: Final = 20


class ClusterCurve(NamedTuple):
    """One group of the sample as a cluster: an engine version and a model in one format."""

    gpu: str
    engine: str
    version: str
    model: str
    dtype: str
    runs: int
    kernels: float
    packaged: float
    by_size: dict[int, float]


def curves_on(gpu: str, draws: int = DRAWS) -> list[ClusterCurve]:
    """Fit drawn subsets of each group's runs on a GPU, and validate on the other runs."""
    tables = load_tables(gpu)
    groups: dict[tuple[str, ...], list[ServingRow]] = defaultdict(list)
    for row in read_silicon_sample(gpu)[0]:
        if not row.left_out and not row.is_disaggregated and row.tpot_ms > 0.0:
            groups[row.engine, row.engine_version, row.model, row.dtype].append(row)
    curves = []
    for (engine, version, model, dtype), rows in sorted(groups.items()):
        if len(rows) < LEAST_RUNS:
            continue
        kept, times = _times(rows, tables)
        speculative = speculative_runs(kept, (predicted_us(times, {}) / US_PER_MS).tolist())
        plain = np.array([not reason for reason in speculative], np.bool_)
        if plain.sum() < LEAST_RUNS:
            continue
        times = times.pick(plain)
        packaged = _packaged(kept[0])
        points = learning_curve(times, packaged, draws=draws)
        by_size = {point.runs: point.mape for point in points if point.draws}
        curves.append(
            ClusterCurve(
                gpu,
                engine,
                version,
                model,
                dtype,
                int(plain.sum()),
                _mape(times, {}),
                _mape(times, packaged),
                by_size,
            )
        )
        print(curves[-1], file=sys.stderr)
    return curves


def _times(rows: list[ServingRow], tables: Tables) -> tuple[list[ServingRow], KernelTimes]:
    """Return the rows with a plan, and their kernel times."""
    alike: dict[Any, list[ServingRow]] = defaultdict(list)
    for row in rows:
        alike[row.layout, row.kv_dtype].append(row)
    kept: list[ServingRow] = []
    parts = []
    for group in alike.values():
        try:
            parts.append(kernel_times(group, tables, group[0].engine_profile))
        except FastroofError:
            continue
        kept += group
    if not parts:
        return [], kernel_times([], tables, rows[0].engine_profile)
    columns: list[Any] = [
        None if column[0] is None else np.concatenate(column) for column in zip(*parts, strict=True)
    ]
    return kept, KernelTimes(*columns)


def _packaged(row: ServingRow) -> Costs:
    """Return the packaged costs of a row, fitted without its model; times have those that are given."""
    profile = row.engine_profile
    without = profile.evidence.get("without_model", {}).get(row.model)
    if without is not None:
        without = {name: us for name, us in without.items() if name in COSTS}
    given = profile.fit.given if profile.fit else ()
    costs = {name: getattr(profile.costs, name) for name in COSTS if name not in given}
    return dict(without) if without is not None else {name: us for name, us in costs.items() if us}


def _mape(times: KernelTimes, costs: Costs) -> float:
    return float(np.abs(predicted_us(times, costs) / times.measured_us - 1.0).mean())


def print_curves(curves: list[ClusterCurve]) -> None:
    """Print medians over groups by engine and version."""
    by_version: dict[tuple[str, str], list[ClusterCurve]] = defaultdict(list)
    for curve in curves:
        by_version[curve.engine, curve.version].append(curve)
    sizes = " | ".join(f"{size} runs" for size in SIZES)
    print(f"| engine, version | GPUs | groups | runs | kernels alone | packaged | {sizes} |")
    print("| --- | --- | --- | --- | --- | --- |" + " --- |" * len(SIZES))
    together = [(("all", ""), curves)] if curves else []
    for (engine, version), of_version in [*sorted(by_version.items()), *together]:
        gpus = " ".join(dict.fromkeys(curve.gpu for curve in of_version))
        runs = sum(curve.runs for curve in of_version)
        cells = [
            _percent([curve.kernels for curve in of_version]),
            _percent([curve.packaged for curve in of_version]),
            *(_percent([c.by_size[size] for c in of_version if size in c.by_size]) for size in SIZES),
        ]
        name = f"{engine} {version}".strip()
        print(f"| {name} | {gpus} | {len(of_version)} | {runs} | " + " | ".join(cells) + " |")


def _percent(errors: list[float]) -> str:
    return f"{float(np.median(errors)):.1%}" if errors else ""


def main() -> None:
    """Fit few runs of each group of the public sample; print errors on its other runs."""
    print_curves([curve for gpu in GPUS for curve in curves_on(gpu)])
