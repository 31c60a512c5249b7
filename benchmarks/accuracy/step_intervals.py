"""``python -m benchmarks.accuracy step-intervals``: errors and intervals of measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from benchmarks.accuracy.rows import shipped_steps
from fastroof.arrays import Floats
from fastroof.cli.gpu_tables import measured_tables
from fastroof.cli.options import Gpu, Json, Source, TablesPath
from fastroof.cli.output import attribute, print_json, print_line, print_records
from fastroof.cli.validate import Profile
from fastroof.engines import load_engine
from fastroof.errors import TableError
from fastroof.evidence.predictions import Plans
from fastroof.evidence.steps.measured_steps import MeasuredStep
from fastroof.evidence.validation import step_profile
from fastroof.run.batch import StepBatch
from fastroof.tables import Tables
from fastroof.uncertainty.leave_one_out import NORMAL_80

EPILOG: Final = """\b
Examples:
  python -m benchmarks.accuracy step-intervals --gpu h100
  python -m benchmarks.accuracy step-intervals --gpu h100 --engine kernels

An interval is the step's time and 1.28 standard errors of its plan; that of several steps timed together has
the mean of theirs, since a plan errs alike in steps that are alike.

\b
JSON: gpu, tables_hash, groups [dataset, phase, steps, mape, median, bias, held, all but steps as fractions].
"""


class StepErrors(NamedTuple):
    """Errors of the steps of one data set and phase, as shares of the measured times."""

    dataset: str
    phase: str
    steps: int
    mape: float
    median: float
    bias: float
    held: float


def step_errors(steps: Sequence[MeasuredStep], tables: Tables, engine: str = "auto") -> list[StepErrors]:
    """Judge whole steps of an engine with their stated intervals."""
    one = None if engine == "auto" else load_engine(engine)
    plans = Plans(tables)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for step in steps:
        if step.timed != "engine" or step.left_out:
            continue
        plan = plans.get(step, step_profile(step, one))
        times = plan.run(StepBatch.from_requests([step.requests, *step.timed_together]), with_error=True)
        assert times.relative_error is not None
        us = times.latency_us
        error = float((times.relative_error * us).sum() / us.sum())
        predicted = float(us.mean()) / step.latency_us
        # errors of a plan are of its logarithm
        is_held = abs(math.log(predicted)) <= NORMAL_80 * error
        found.setdefault((step.dataset, step.phase), []).append((predicted - 1.0, float(is_held)))
    if not found:
        raise TableError(f"no steps of an engine were measured on {tables.gpu.name}")
    return [_errors(*key, np.array(values)) for key, values in found.items()]


def _errors(dataset: str, phase: str, values: Floats) -> StepErrors:
    errors, held = values.T
    sizes = np.abs(errors)
    return StepErrors(
        dataset,
        phase,
        len(errors),
        float(sizes.mean()),
        float(np.median(sizes)),
        float(errors.mean()),
        float(held.mean()),
    )


def main(
    gpu: Gpu = None,
    engine: Profile = "auto",
    as_json: Json = False,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Judge measured engine steps, and how often their 80 % intervals hold."""
    spec, measured_kernels = measured_tables(gpu, tables, source)
    groups = step_errors(shipped_steps(spec.name), measured_kernels, engine)
    if as_json:
        document = {"gpu": spec.name, "tables_hash": measured_kernels.content_hash}
        print_json(document | {"groups": [group._asdict() for group in groups]})
        return
    print_line(f"{spec.name}, engine {engine}\n")
    columns = {
        "data set": attribute("dataset"),
        "steps": attribute("phase"),
        "number": attribute("steps", ","),
        **{head: attribute(head.lower(), ".1%") for head in ("MAPE", "median")},
        "bias": attribute("bias", "+.1%"),
        "in 80 %": attribute("held", ".1%"),
    }
    print_records(groups, columns, left=("data set", "steps"))
