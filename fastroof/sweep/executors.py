"""Executors: threads of this process, or tasks of a Ray cluster, which yield results of units in order."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from fastroof.errors import SweepError
from fastroof.sweep.kind import GpuTables, SweepKind
from fastroof.sweep.packed_results import packed_results, unpacked_results
from fastroof.sweep.units import UnitResult, WorkUnit

UNITS_AHEAD: Final = 2
"""Units per thread that are submitted ahead, which bounds the finished results in memory."""


def local_results(
    sweep: SweepKind,
    units: Sequence[WorkUnit],
    tables_by_gpu: Mapping[str, GpuTables],
    threads: int = 1,
) -> Generator[UnitResult, None, None]:
    """Evaluate units in threads of this process, and yield their results in order."""
    if threads == 1:
        for unit in units:
            yield sweep.evaluate(unit, tables_by_gpu)
        return
    waiting: deque[Future[UnitResult]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for unit in units:
            if len(waiting) == UNITS_AHEAD * threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(sweep.evaluate, unit, tables_by_gpu))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


TASK_EVALUATIONS: Final = 10**7
"""Minimum work of a task, in step evaluations: Ray's overhead is about a millisecond per task."""
TASKS_AHEAD: Final = 4
"""Tasks per processor that are submitted ahead, so that a retried task does not stall the others."""
TASK_RETRIES: Final = 10
"""Ray's own retries of a task whose worker or node was lost."""
ROUNDS: Final = 3
"""Resubmissions of a task that Ray has given up."""
CONNECT_S: Final = 10.0


def task_units(
    sweep: SweepKind, units: Sequence[WorkUnit], task_evaluations: int = TASK_EVALUATIONS
) -> list[list[WorkUnit]]:
    """Group units into tasks of at least ``task_evaluations`` each; the last may have fewer."""
    tasks: list[list[WorkUnit]] = []
    room = 0
    for unit in units:
        if room <= 0:
            tasks.append([])
            room = task_evaluations
        tasks[-1].append(unit)
        room -= unit.size * sweep.steps_per_evaluation
    return tasks


def evaluate_task(
    sweep: SweepKind, units: Sequence[WorkUnit], tables_by_gpu: Mapping[str, GpuTables]
) -> bytes:
    """Evaluate units in a worker, and drop rows that cannot be in the results."""
    results = [sweep.evaluate(unit, tables_by_gpu) for unit in units]
    return packed_results(sweep, units, results)


def ray_results(
    sweep: SweepKind,
    units: Sequence[WorkUnit],
    tables_by_gpu: Mapping[str, GpuTables],
    *,
    address: str | None = None,
    processors: int | None = None,
    task_evaluations: int = TASK_EVALUATIONS,
) -> Generator[UnitResult, None, None]:
    """Evaluate units on the workers of a Ray cluster, and yield their results in order."""
    if not units:
        return
    ray = _imported()
    with _connected(ray, address, processors):
        task = ray.remote(num_cpus=1, max_retries=TASK_RETRIES)(evaluate_task)
        shared = ray.put(sweep), ray.put(dict(tables_by_gpu))
        lost = (
            ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError,
            ray.exceptions.OutOfMemoryError,
        )  # fmt: skip
        waiting: deque[tuple[list[WorkUnit], Any]] = deque()

        def submitted(units: list[WorkUnit]) -> Any:
            return task.remote(shared[0], units, shared[1])

        def next_results() -> list[UnitResult]:
            part, reference = waiting.popleft()
            for again in range(ROUNDS + 1):
                try:
                    return list(unpacked_results(ray.get(reference)).values())
                except ray.exceptions.RayTaskError as error:
                    # an error of the work itself would occur again
                    raise error.cause from None
                except lost:
                    if again < ROUNDS:
                        reference = submitted(part)
            raise SweepError(
                f"Ray lost the units {part[0].number} to {part[-1].number} repeatedly: its workers are "
                "killed, or their nodes run out of memory"
            )

        try:
            for part in task_units(sweep, units, task_evaluations):
                # nodes may join and leave
                processors = max(1, int(ray.cluster_resources().get("CPU", 1)))
                if len(waiting) >= TASKS_AHEAD * processors:
                    yield from next_results()
                waiting.append((part, submitted(part)))
            while waiting:
                yield from next_results()
        finally:
            for _, reference in waiting:
                ray.cancel(reference)


def _imported() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise SweepError("executor='ray' needs Ray: pip install 'fastroof[ray]'") from None
    return ray


@contextlib.contextmanager
def _connected(ray: Any, address: str | None, processors: int | None) -> Iterator[None]:
    """Use the connected cluster or the one at an address, or start a local one."""
    if ray.is_initialized():
        if address is not None:
            raise SweepError(f"Ray is already connected: omit address, got {address!r}")
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        options |= {"num_cpus": processors, "include_dashboard": False}
    else:
        _check_address(address)
        options["address"] = address
    try:
        # a local cluster sends no usage reports unless the user enables them
        with _environment("RAY_USAGE_STATS_ENABLED", "0"):
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "Ray cannot be started" if address is None else f"no Ray cluster at {address!r}"
        raise SweepError(f"{where} ({error})") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Reject an address where nothing listens; Ray would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise SweepError(f"no Ray cluster at {address!r} ({error})") from None


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within a block, unless it is already set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
