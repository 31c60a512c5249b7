"""Measures models one after the other, each in a worker process, and shares the time among them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO, Any, Final

from fastroof.errors import MeasureError
from kernels_bench.providers.vllm_experts import vllm_version
from kernels_bench.run.card import CPU, measured_gpu
from kernels_bench.run.facts import now_iso, run_facts
from kernels_bench.run.monitor import HostMonitor, open_monitor
from kernels_bench.vllm_steps.core import LEVELS
from kernels_bench.vllm_steps.model_folder import EngineModel
from kernels_bench.vllm_steps.record import check_folder, open_journal, read_records, write_files
from kernels_bench.vllm_steps.worker import ENVIRONMENT, Task

LOG_FILE: Final = "vllm.log"
GRACE_S: Final = 15.0
"""A worker that is not done this long after its time is killed."""
LOOK_EVERY_S: Final = 0.5

Record = Mapping[str, Any]
StartWorker = Callable[[Task, IO[bytes]], "subprocess.Popen[bytes]"]


@dataclass(frozen=True)
class EngineOptions:
    """How to measure."""

    # Name of the GPU or its gpu.toml; ``cpu`` for vLLM's CPU build on tiny sizes.
    gpu: str | None = None
    deadline_s: float | None = None
    # Seconds without which no model is begun: it takes so long to its first step.
    least_s: float = 70.0
    # Where to begin in :data:`kernels_bench.vllm_steps.core.LEVELS`.
    level: int = 0
    loops: bool = True
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    on_record: Callable[[Record], None] = lambda record: None


@dataclass
class EngineReport:
    """Steps that were measured now and before, and why the run stopped early or failed."""

    measured: int = 0
    present: int = 0
    problems: list[str] = field(default_factory=list)


def start_worker(task: Task, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the process that measures a model; what vLLM prints goes to the log."""
    command = [sys.executable, "-m", "kernels_bench.vllm_steps.worker", task.to_json()]
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
    )


def measure_engine_steps(
    models: Sequence[EngineModel], folder: Path, options: EngineOptions, start: StartWorker = start_worker
) -> EngineReport:
    """Measure the steps that a folder lacks, and write steps.csv and steps.toml.

    A model that measures nothing is tried again one level lower, and the models after it begin there.
    """
    begun_s = monotonic()
    if start is start_worker and importlib.util.find_spec("vllm") is None:
        raise MeasureError(
            "vllm is not installed: pip install vllm==0.26.0; a host without network takes a bundle "
            "(kernels-bench bundle)"
        )
    on_cpu = options.gpu == CPU
    facts = (HostMonitor() if on_cpu else open_monitor()).facts()
    gpu = measured_gpu(options.gpu, facts, on_cpu).name
    check_folder(folder, gpu)
    with _appending(folder) as append:
        facts_run = run_facts()
        facts_run["versions"] |= {"vllm": vllm_version()}
        facts_run["environment"] = {**ENVIRONMENT, **facts_run["environment"]}
        append({"type": "start", "gpu": gpu, "device": dict(facts), **facts_run})
    report = EngineReport(present=_num_steps(folder))
    run = _Run(folder, options, start, on_cpu, begun_s)
    level = options.level
    with tempfile.TemporaryDirectory(prefix="kernels_bench_models_") as configs:
        for place, model in enumerate(models):
            while True:
                left_s = run.left_s()
                if left_s is not None and left_s < options.least_s:
                    run.stopped(model, f"deadline: {left_s:.0f} s left, a model needs {options.least_s:g} s")
                    break
                share_s = run.share_s(left_s, place, len(models))
                if run.measure(model, Path(configs), level, share_s) or level + 1 == len(LEVELS):
                    break
                level += 1
    with _appending(folder) as append:
        append({"type": "end", "finished": now_iso()})
    report.measured = _num_steps(folder) - report.present
    report.problems = run.problems
    return report


class _Run:
    """One call of :func:`measure_engine_steps`."""

    def __init__(
        self, folder: Path, options: EngineOptions, start: StartWorker, on_cpu: bool, begun_s: float
    ) -> None:
        self.folder, self.options, self.on_cpu = folder, options, on_cpu
        self.problems: list[str] = []
        self._start = start
        self._begun_s = begun_s
        self._seen = len(read_records(folder))

    def left_s(self) -> float | None:
        deadline_s = self.options.deadline_s
        return None if deadline_s is None else deadline_s - (monotonic() - self._begun_s)

    def share_s(self, left_s: float | None, place: int, num_models: int) -> float | None:
        """The first model is worth most and gets half of the time; the others share the rest."""
        if left_s is None:
            return None
        fitting = max(1, min(num_models - place, int(left_s // max(self.options.least_s, 1e-3))))
        if fitting == 1:
            return left_s
        return left_s / 2 if place == 0 else left_s / fitting

    def measure(self, model: EngineModel, configs: Path, level: int, seconds: float | None) -> bool:
        """Run one worker; return whether the model has all that this level can give."""
        before = _num_steps(self.folder)
        task = Task(
            model=model.name,
            weights=model.spec.checkpoint.dtype,
            config_folder=str(model.write(configs)),
            output=str(self.folder),
            max_position=model.spec.max_position,
            level=level,
            seconds=seconds,
            on_cpu=self.on_cpu,
            loops=self.options.loops,
            engine_args=dict(self.options.engine_args),
        )
        code = self._wait(task)
        if code:
            with _appending(self.folder) as append:
                reason = "killed after its time" if code is TIMED_OUT else f"exit code {code}"
                append({"type": "failed", "model": model.name, "level": level, "reason": reason})
        self._look()
        return code == 0 or _num_steps(self.folder) > before

    def stopped(self, model: EngineModel, reason: str) -> None:
        with _appending(self.folder) as append:
            append({"type": "stopped", "model": model.name, "reason": reason})
        self._look()

    def _wait(self, task: Task) -> int:
        """Wait for a worker, and show its records as they come; return its exit code."""
        end_s = None if task.seconds is None else monotonic() + task.seconds + GRACE_S
        with (self.folder / LOG_FILE).open("ab") as log:
            process = self._start(task, log)
            try:
                while True:
                    try:
                        return process.wait(LOOK_EVERY_S)
                    except subprocess.TimeoutExpired:
                        self._look()
                    if end_s is not None and monotonic() > end_s:
                        return TIMED_OUT
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def _look(self) -> None:
        records = read_records(self.folder)
        for record in records[self._seen :]:
            if record["type"] in ("failed", "stopped"):
                self.problems.append(f"{record['model']}: {record['reason']}")
            self.options.on_record(record)
        self._seen = len(records)


TIMED_OUT: Final = -1000


@contextmanager
def _appending(folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open the journal for some lines; the files follow it."""
    with open_journal(folder) as journal:
        yield journal.append
        write_files(folder, journal.records)


def _num_steps(folder: Path) -> int:
    return sum(record["type"] == "step" for record in read_records(folder))
