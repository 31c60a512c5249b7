"""Measured runs and steps of a GPU: those in bench_data, otherwise aiconfigurator-core's sample."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.accuracy.published_rows import shipped_bench_runs, shipped_open_loop, shipped_throughput
from benchmarks.accuracy.rows import dataset_names, shipped_rows, shipped_steps
from benchmarks.accuracy.silicon_sample import read_silicon_sample
from fastroof.config.paths import bench_data_root
from fastroof.documents import read_toml
from fastroof.errors import TableError
from fastroof.evidence.rows import LeftOut, ServedModel, ServingRow
from fastroof.evidence.steps.measured_steps import MeasuredStep
from fastroof.load.aiconfigurator import MODULES
from fastroof.load.sources import SERVING_FOLDER


class Measured(NamedTuple):
    """Measured runs and steps of one GPU."""

    rows: tuple[ServingRow, ...]
    steps: tuple[MeasuredStep, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    independent: tuple[ServedModel, ...] = ()

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names of all data sets."""
        of_steps = dict.fromkeys(step.dataset for step in self.steps)
        return (*dataset_names(self.rows), *of_steps, *dict.fromkeys(row.dataset for row in self.independent))

    def pick(self, datasets: Sequence[str]) -> Measured:
        """Return the given data sets."""
        unknown = [name for name in datasets if name not in self.datasets]
        if unknown:
            there = ", ".join(self.datasets) or "none"
            raise TableError(f"no data set {', '.join(map(repr, unknown))}; there is {there}")
        steps = tuple(step for step in self.steps if step.dataset in datasets)
        rows = tuple(row for row in self.rows if row.dataset in datasets)
        independent = tuple(row for row in self.independent if row.dataset in datasets)
        return Measured(rows, steps, independent=independent)


def measured_on(gpu: str, root: Path | None = None) -> Measured:
    """Read all measured rows and steps of a GPU."""
    rows, steps = shipped_rows(gpu, root), shipped_steps(gpu, root)
    independent = (
        *shipped_throughput(gpu, root),
        *shipped_open_loop(gpu, root),
        *shipped_bench_runs(gpu, root),
    )
    if rows or steps or not any(map(importlib.util.find_spec, MODULES)):
        return Measured(rows, steps, _shipped_left_out(gpu, root), independent)
    try:
        sample, left_out, _ = read_silicon_sample(gpu)
    except TableError:
        # the sample lacks this GPU
        return Measured((), steps, independent=independent)
    return Measured(sample, steps, left_out, independent)


def _shipped_left_out(gpu: str, root: Path | None) -> tuple[LeftOut, ...]:
    """Return rows that the conversion of each file left out, from its TOML."""
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER
    left_out = []
    for path in sorted(folder.glob("*.toml")):
        content = read_toml(path, TableError)
        try:
            reasons = content.get("left_out", {})
            left_out += [LeftOut(path.stem, str(reason), int(rows)) for reason, rows in reasons.items()]
        except (AttributeError, TypeError, ValueError) as error:
            raise TableError(f"{path}: cannot be read as the provenance of serving rows: {error}") from None
    return tuple(left_out)
