"""The process that measures one model: ``python -m kernels_bench.vllm_steps.worker TASK``, a task as JSON.

A process of its own, since a crash then costs one model, and only its end returns the device's memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof.errors import MeasureError
from kernels_bench.bundle.stand_ins import replace_broken
from kernels_bench.journal import Journal
from kernels_bench.protocol import Monitor
from kernels_bench.providers.vllm_experts import vllm_version
from kernels_bench.vllm_steps.core import LEVELS, VllmCore
from kernels_bench.vllm_steps.points import LOOP_CLIENTS, TINY, TINY_LOOP_CLIENTS, EnginePoint, default_points
from kernels_bench.vllm_steps.record import done_loops, done_points, open_journal, step_record, write_files
from kernels_bench.vllm_steps.timing import closed_loop, time_point

POINT_S: Final = 2.0
"""A point is not begun with less time left: most take half of it."""
LOOP_S: Final = 12.0
TINY_LOOP_S: Final = 1.0
LOOP_SHARE: Final = 0.15
"""At most this much of the time goes to one closed loop."""

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "DG_JIT_USE_NVRTC": "1",  # DeepGEMM compiles a kernel a shape; with nvcc that takes longer
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # or it compiles those of every size first
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of a worker, if not set: one process, no network."""


@dataclass(frozen=True)
class Task:
    """What a worker is to do."""

    # What steps.csv calls the model, and the format of its checkpoint.
    model: str
    weights: str
    # Folders of its config.json and of the journal.
    config_folder: str
    output: str
    max_position: int
    # Place in :data:`kernels_bench.vllm_steps.core.LEVELS`.
    level: int = 0
    seconds: float | None = None
    # Whether vLLM's CPU build runs, on tiny sizes.
    on_cpu: bool = False
    loops: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as the worker's argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Read the worker's argument."""
        return cls(**json.loads(text))


class Plan(NamedTuple):
    """What one worker measures, in this order."""

    points: Sequence[EnginePoint]
    loop_clients: Sequence[int]
    loop_s: float
    seconds: float | None = None

    @classmethod
    def of(cls, task: Task, used_s: float) -> Plan:
        """Return the plan of a task of whose time ``used_s`` is spent."""
        left_s = None if task.seconds is None else task.seconds - used_s
        clients = TINY_LOOP_CLIENTS if task.on_cpu else LOOP_CLIENTS
        loop_s = TINY_LOOP_S if task.on_cpu else LOOP_S
        if left_s is not None:
            loop_s = min(loop_s, LOOP_SHARE * max(0.0, left_s))
        return cls(TINY if task.on_cpu else default_points(), clients if task.loops else (), loop_s, left_s)


def measure_points(
    task: Task,
    engine: VllmCore,
    version: str,
    journal: Journal,
    monitor: Monitor,
    plan: Plan,
    seconds: Callable[[], float] = time.monotonic,
) -> None:
    """Time the points that the journal lacks, then the closed loops, for as long as there is time."""
    folder, facts, loop_s = Path(task.output), engine.facts, plan.loop_s
    end_s = None if plan.seconds is None else seconds() + plan.seconds

    def append(record: dict[str, Any]) -> None:
        journal.append(record)
        write_files(folder, journal.records)

    def has_time(needed_s: float) -> bool:
        return end_s is None or seconds() + needed_s <= end_s

    done, done_clients = done_points(journal.records, task.model), done_loops(journal.records, task.model)
    todo = [point for point in plan.points if point not in done]
    left_loops = [clients for clients in plan.loop_clients if clients not in done_clients]
    for place, point in enumerate(todo):
        where = {"model": task.model, "phase": point.phase, "sizes": point.sizes}
        if not has_time(POINT_S + loop_s * len(left_loops)):
            reason = f"deadline: {len(todo) - place} of {len(todo)} steps are left"
            append({"type": "stopped", "model": task.model, "reason": reason})
            break
        if reason := engine.unfit(point):
            append({"type": "unfit", **where, "reason": reason})
            continue
        try:
            timing = time_point(engine, point)
        except MeasureError as error:
            append({"type": "unfit", **where, "reason": str(error)})
            continue
        record = step_record(task.model, point, timing, facts, version, task.level, task.weights)
        append(record | asdict(monitor.read()))
    for clients in left_loops:
        if has_time(loop_s):
            seen = closed_loop(engine, clients, loop_s, min(task.max_position, 5120))
            append({"type": "closed_loop", "model": task.model, **seen, **asdict(monitor.read())})


def work(task: Task, begun_s: float) -> None:
    """Start the engine and measure; what fails is the journal's last line."""
    from kernels_bench.run.monitor import HostMonitor, open_monitor

    with open_journal(Path(task.output)) as journal:
        try:
            folder, level = Path(task.config_folder), task.level
            engine = VllmCore(folder, task.max_position, level, task.engine_args, task.on_cpu)
            failed = engine.fill_cache()
            init = {"level": level, "init_s": time.monotonic() - begun_s, "caches_not_filled": failed}
            journal.append({"type": "engine", "model": task.model, **init, **engine.facts})
            monitor: Monitor = HostMonitor() if task.on_cpu else open_monitor()
            plan = Plan.of(task, time.monotonic() - begun_s)
            measure_points(task, engine, vllm_version(), journal, monitor, plan)
            engine.close()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"[:2000]
            journal.append({"type": "failed", "model": task.model, "level": task.level, "reason": reason})
            write_files(Path(task.output), journal.records)
            raise


def main(text: str) -> None:
    """Measure, and end at once: threads of the executor need not end."""
    begun_s, task = time.monotonic(), Task.from_json(text)
    eager = {"TORCHDYNAMO_DISABLE": "1"} if task.on_cpu and task.level == len(LEVELS) - 1 else {}
    for name, value in {**ENVIRONMENT, **eager}.items():
        os.environ.setdefault(name, value)
    if broken := replace_broken():
        print(f"cannot be imported, replaced by stand-ins: {', '.join(broken)}")
    code = 0
    try:
        work(task, begun_s)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
