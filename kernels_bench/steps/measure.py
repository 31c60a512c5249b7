"""Measures whole steps of a model and writes steps.csv: what a sum of kernels is judged by."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.atomic_files import write_whole
from fastroof.documents import read_toml
from fastroof.errors import MeasureError
from fastroof.load.steps_file import STEPS_FILE
from fastroof.load.write import toml_text
from fastroof.models import DenseModel
from kernels_bench.protocol import Clock, Monitor, Timer, Timing
from kernels_bench.replays import relative_iqr, suspicion
from kernels_bench.run.check import relative_error
from kernels_bench.steps.step_attention import StepBackend
from kernels_bench.steps.step_model import StepModel
from kernels_bench.steps.step_points import StepPoint, expected_seconds, step_bytes
from kernels_bench.steps.step_rows import append_step, read_steps, step_key

PROVENANCE_FILE: Final = "steps.toml"

STEP_BOUNDS: Final = {"bf16": 2e-2, "fp32": 1e-5, "fp8": 8e-2, "fp8_block": 8e-2}
"""Largest relative Frobenius error of the logits of a two-layer step.

bf16 rounds about 20 times one after the other (at most 2**-9 each, 6e-3 in all where it was measured);
a wrong head, page, position or weight begins near 1e-1. fp32 accumulates 2**-24, 4e-7 where measured.

In fp8 an input that bf16 rounds otherwise may be quantised to the next of e4m3's numbers, 6 to 12 % apart, so
that a step and its reference differ by up to what quantising adds, 2.6e-2 an operand, one layer after the
other. The bound is that of experts in fp8, whose GEMMs follow each other too (run.check.BOUNDS).
Measured on a CPU: 3.6e-2 to 4.5e-2 over four seeds; scales that are 10 % off give 0.17. What is not a linear
layer is checked in bf16 first, by the tighter bound.
"""

CHECK_POINT: Final = StepPoint("mixed", (1, 1, 1, 40, 7), (127, 20, 0, 0, 33))
"""Decodes of unequal lengths, one of them a request's first token, a prefill, and a chunk after a prefix."""
LOST_DEVICE: Final = "CUDA error"
"""What torch's message begins with when a kernel has failed on the device."""

CHECK_LAYERS: Final = 2
CHECK_HIDDEN: Final = 512
CHECK_VOCAB: Final = 1000


@dataclass(frozen=True)
class StepSkip:
    """A step without a row, and why: ``kind`` is oom, unsupported or error."""

    new_tokens: str
    context_len: str
    kind: str
    reason: str


@dataclass(frozen=True)
class StepOptions:
    """How to measure steps."""

    # Name of the GPU.
    gpu: str
    # Seed of the order, the weights and the inputs.
    seed: int = 0
    # Seconds from now; a step that is not expected to be done by then is not begun.
    deadline_s: float | None = None
    # Memory that weights and a step may take; a step above it is skipped untried.
    usable_bytes: int | None = None
    # Called with each step and its outcome.
    on_step: Callable[[StepPoint, Timing | StepSkip], None] = lambda point, outcome: None


@dataclass
class StepsReport:
    """What measuring steps came to."""

    # Rows written now, and rows that were there before.
    measured: int = 0
    present: int = 0
    # Steps without a row.
    skips: list[StepSkip] = field(default_factory=list)
    # Why it stopped early; empty where it came to the end.
    stopped: str = ""


def check_step(spec: DenseModel, backend: StepBackend, seed: int) -> float:
    """Compare a small model's step with a naive float64 one, on the kernels that will be timed.

    With weights in fp8, first with weights in bf16.
    """
    if backend.fp8 is not None:
        check_step(spec, replace(backend, fp8=None), seed)
    small = replace(
        spec,
        num_layers=CHECK_LAYERS,
        hidden=CHECK_HIDDEN,
        intermediate=2 * CHECK_HIDDEN,
        num_q_heads=2 * spec.group_size,
        num_kv_heads=2,
        vocab=CHECK_VOCAB,
        sliding_window=None,
    )
    step = StepModel(small, backend, seed).prepare(CHECK_POINT, seed)
    try:
        step.run(0)
        error = relative_error(step.result(0), step.reference(0))
    except RuntimeError as wrong:
        words = next(iter(str(wrong).splitlines()), type(wrong).__name__)
        raise MeasureError(f"a two-layer step on {backend.provider} fails: {words}") from None
    finally:
        step.close()
    bound = STEP_BOUNDS[backend.row_dtype]
    if not error <= bound:
        raise MeasureError(
            f"a two-layer step on {backend.provider} is {error:.2g} off its float64 reference, the bound is "
            f"{bound:g}: nothing is timed; try other --providers"
        )
    return error


def measure_steps(
    spec: DenseModel,
    points: Sequence[StepPoint],
    backend: StepBackend,
    timer: Timer,
    monitor: Monitor,
    clock: Clock,
    folder: Path,
    options: StepOptions,
) -> StepsReport:
    """Measure the steps that a folder lacks, in seeded random order."""
    began_s = clock.seconds()
    path = folder / STEPS_FILE
    present = {step_key(row) for row in read_steps(path)}
    if others := {row["gpu"] for row in read_steps(path)} - {options.gpu}:
        raise MeasureError(
            f"{path} holds steps of {', '.join(sorted(others))}, this GPU is {options.gpu}: give another -o"
        )
    report = StepsReport()
    element_bytes = 2 if backend.dtype == "bf16" else 4
    todo = []
    for point in points:
        row = _row(spec, backend, options.gpu, point)
        if step_key(row) in present:
            report.present += 1
            continue
        needed = step_bytes(point, spec, element_bytes, backend.weights)
        if options.usable_bytes is not None and needed > options.usable_bytes:
            reason = f"needs about {needed:,} B with the weights, of {options.usable_bytes:,} B"
            _skip(report, point, "oom", reason, options.on_step)
            continue
        todo.append(point)
    if not todo:
        return report
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model = StepModel(spec, backend, options.seed)
    except MemoryError as error:
        raise MeasureError(f"the weights of {spec.name} do not fit this device: {error}") from None
    late = 0
    for place in np.random.default_rng(options.seed).permutation(len(todo)):
        point = todo[place]
        ends_s = clock.seconds() - began_s + expected_seconds(point, spec, backend.weights)
        if options.deadline_s is not None and ends_s > options.deadline_s:
            late += 1  # a shorter one may still fit
            continue
        outcome = _measure_one(model, point, timer, monitor, options.seed)
        if isinstance(outcome, StepSkip):
            report.skips.append(outcome)
            if LOST_DEVICE in outcome.reason:
                report.stopped = "the device reports an error that no later call survives"
        else:
            append_step(path, {**_row(spec, backend, options.gpu, point), **_columns(outcome)})
            report.measured += 1
        options.on_step(point, outcome)
        if report.stopped:
            return report
    if late:
        report.stopped = f"deadline: {late} of {len(todo)} steps are left"
    return report


def _skip(
    report: StepsReport,
    point: StepPoint,
    kind: str,
    reason: str,
    on_step: Callable[[StepPoint, Timing | StepSkip], None],
) -> None:
    skip = StepSkip(point.new_text, point.context_text, kind, reason)
    report.skips.append(skip)
    on_step(point, skip)


def _measure_one(
    model: StepModel, point: StepPoint, timer: Timer, monitor: Monitor, seed: int
) -> Timing | StepSkip:
    def skip(kind: str, error: Exception) -> StepSkip:
        return StepSkip(point.new_text, point.context_text, kind, f"{type(error).__name__}: {error}")

    try:
        step = model.prepare(point, seed)
    except MemoryError as error:
        return skip("oom", error)
    except MeasureError as error:
        return skip("unsupported", error)
    try:
        timing = timer.time(step)
        if any(suspicion(timing, monitor.read(), [])):
            again = timer.time(step)
            timing = min(timing, again, key=relative_iqr)
        if not np.isfinite(step.result(0)).all():
            # Random weights keep activations small: NaN means that something was not written.
            return StepSkip(point.new_text, point.context_text, "error", "the step's logits are not finite")
    except MemoryError as error:
        return skip("oom", error)
    except (MeasureError, RuntimeError) as error:
        return skip("error", error)
    finally:
        step.close()
    return timing


def _row(spec: DenseModel, backend: StepBackend, gpu: str, point: StepPoint) -> dict[str, Any]:
    return {
        "model": spec.name,
        "gpu": gpu,
        "tp": 1,
        "dtype": backend.row_dtype,
        "kv_dtype": backend.dtype,
        "phase": point.phase,
        "new_tokens": point.new_text,
        "context_len": point.context_text,
        "num_requests": len(point.new_tokens),
        "num_tokens": point.num_tokens,
        "provider": backend.provider,
    }


def _columns(timing: Timing) -> dict[str, Any]:
    return {
        "latency_us": timing.latency_us,
        "p25_us": timing.p25_us,
        "p75_us": timing.p75_us,
        "min_us": timing.min_us,
        "num_replays": timing.num_replays,
    }


def write_provenance(
    folder: Path,
    report: StepsReport,
    spec: DenseModel,
    backend: StepBackend,
    *,
    gpu: str,
    error: float,
    facts: Mapping[str, Any],
) -> Path:
    """Add one run to steps.toml."""
    path = folder / PROVENANCE_FILE
    runs: dict[str, Any] = {}
    if path.exists():
        runs = dict(read_toml(path, MeasureError).get("runs", {}))
    run = {
        "model": spec.name,
        "provider": backend.provider,
        "dtype": backend.row_dtype,
        "weights": "random",
        "command": shlex.join(["kernels-bench", *sys.argv[1:]]),
        "check_relative_error": error,
        "measured": report.measured,
        "present": report.present,
        "stopped": report.stopped,
        "skips": [vars(skip) for skip in report.skips],
        "versions": dict(backend.versions),
        **facts,
    }
    text = toml_text({"gpu": gpu, "runs": {**runs, f"run_{len(runs) + 1}": run}})
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path
