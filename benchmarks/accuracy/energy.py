"""``python -m benchmarks.accuracy energy``: fit what kernels draw to measured power, and judge it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import TableError
from fastroof.load.families import codes_of
from fastroof.operators.operator import Columns, Operator
from fastroof.operators.power import Draw
from fastroof.operators.registry import OPERATORS
from fastroof.units import US_PER_S

EPILOG: Final = """\b
Examples:
  python -m benchmarks.accuracy energy --package aisimulate_core
  python -m benchmarks.accuracy energy --package aisimulate_core --runs leaderboard/public/data/models

--package is the folder of the installed aisimulate (Apache-2.0); --runs that of the ML.ENERGY leaderboard's
files, one a model (github.com/ml-energy/leaderboard), which no constant is fitted to.

\b
JSON: draws [operator, rows, noise, floor, busy, compute, memory, own, unseen] and runs [gpu, model, runs,
watts, watts_bias, joules, joules_bias], errors as fractions.
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


def _rows_of(operator: Operator, file: Any, path: Path, gpu: GpuSpec) -> PowerRows | None:
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
    """Fit shares of at least 0 by least squares: the best of all subsets of the four."""
    left = np.concatenate([one.terms * np.sqrt(one.weight)[:, None] for one in rows])
    share = np.concatenate([_share(one.watts, gpu) * np.sqrt(one.weight) for one in rows])
    squares, products = left.T @ left, left.T @ share
    best, least = np.zeros(4), np.inf
    for subset in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in range(1, 5)):
        at = list(subset)
        shares = np.zeros(4)
        shares[at] = np.linalg.lstsq(squares[np.ix_(at, at)], products[at], rcond=None)[0]
        loss = float(shares @ squares @ shares - 2.0 * shares @ products)
        if (shares >= 0.0).all() and loss < least:
            best, least = shares, loss
    return Draw(*(round(float(share), 3) for share in best))


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
    """Whether an operator has enough rows for a draw of its own; links have few."""
    return found.rows >= LEAST_ROWS or OPERATORS[found.operator].over_link
