"""Executors: threads of this process, or tasks of a Ray cluster, which yield results of units in order."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
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
STOP_S: Final = 0.5
"""Wait for a driver that was interrupted."""
_CONTINUE: Final = "--resume continues with what is done"


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
    """Evaluate units on the workers of a Ray cluster, and yield their results in order.

    Ray prints messages of its own, and ends a process whose node is lost, so it is driven by another process
    unless this one is connected already.
    """
    if not units:
        return
    job = sweep, task_units(sweep, units, task_evaluations), tables_by_gpu
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        if address is not None:
            raise SweepError(f"Ray is already connected: omit address, got {address!r}")
        packed = _task_results(*job)
    elif importlib.util.find_spec("ray") is None:
        raise SweepError("executor='ray' needs Ray: pip install 'fastroof[ray]'")
    elif address is None:
        options = {"address": "local", "num_cpus": processors, "include_dashboard": False}
        packed = _of_driver((options, *job))
    else:
        _check_address(address)
        packed = _of_driver(({"address": address}, *job))
    try:
        for content in packed:
            yield from unpacked_results(content).values()
    finally:
        packed.close()


def _task_results(
    sweep: SweepKind, tasks: Sequence[Sequence[WorkUnit]], tables_by_gpu: Mapping[str, GpuTables]
) -> Generator[bytes, None, None]:
    """Evaluate tasks on the cluster that this process is connected to, and yield their packed results."""
    import ray
    import ray.exceptions

    task = ray.remote(num_cpus=1, max_retries=TASK_RETRIES)(evaluate_task)
    shared = ray.put(sweep), ray.put(dict(tables_by_gpu))
    lost = (
        ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError,
        ray.exceptions.OutOfMemoryError,
    )  # fmt: skip
    waiting: deque[tuple[Sequence[WorkUnit], Any]] = deque()

    def submitted(units: Sequence[WorkUnit]) -> Any:
        return task.remote(shared[0], units, shared[1])

    def next_result() -> bytes:
        part, reference = waiting.popleft()
        for again in range(ROUNDS + 1):
            try:
                content: bytes = ray.get(reference)
                return content
            except ray.exceptions.RayTaskError as error:
                # an error of the work itself would occur again
                raise error.cause from None
            except lost:
                if again < ROUNDS:
                    reference = submitted(part)
        raise SweepError(
            f"Ray lost the units {part[0].number} to {part[-1].number} repeatedly: its workers are killed, "
            f"or their nodes run out of memory; {_CONTINUE}"
        )

    try:
        for part in tasks:
            # nodes may join and leave
            processors = max(1, int(ray.cluster_resources().get("CPU", 1)))
            if len(waiting) >= TASKS_AHEAD * processors:
                yield next_result()
            waiting.append((part, submitted(part)))
        while waiting:
            yield next_result()
    finally:
        for _, reference in waiting:
            ray.cancel(reference)


def _of_driver(job: tuple[Any, ...]) -> Generator[bytes, None, None]:
    """Yield the packed results of a job's tasks from a process that connects to Ray; raise its errors."""
    here, there = multiprocessing.Pipe()
    code = f"from fastroof.sweep.executors import drive_ray; drive_ray({there.fileno()})"
    path = os.pathsep.join(filter(None, sys.path))
    # a local cluster sends no usage reports unless the user enables them
    environment = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ, "PYTHONPATH": path}
    driver = subprocess.Popen(
        [sys.executable, "-P", "-c", code], env=environment, pass_fds=[there.fileno()],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    there.close()
    try:
        here.send(job)
        while (answer := here.recv()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            yield answer
        driver.wait()
    except (EOFError, ConnectionError):
        raise SweepError(f"Ray ended: this node or the cluster's head was lost; {_CONTINUE}") from None
    finally:
        here.close()
        # it stops a cluster that it started, perhaps after this process has ended
        driver.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(STOP_S)


def drive_ray(pipe: int) -> None:
    """Connect to Ray, evaluate the tasks of the job that a pipe gives, and send back results or an error."""
    with multiprocessing.connection.Connection(pipe) as parent:
        options, *job = parent.recv()
        try:
            with _connected(options):
                for content in _task_results(*job):
                    parent.send(content)
            parent.send(None)
        except BrokenPipeError:
            return
        except Exception as error:
            parent.send(error)


@contextlib.contextmanager
def _connected(options: Mapping[str, Any]) -> Iterator[None]:
    """Connect to a cluster, or start a local one, within a block."""
    try:
        import ray
        import ray.exceptions

        ray.init(log_to_driver=False, logging_level="error", **options)
    except (ImportError, ConnectionError, RuntimeError, ValueError) as error:
        address = options["address"]
        where = "Ray cannot be started" if address == "local" else f"no Ray cluster at {address!r}"
        raise SweepError(f"{where} ({error})") from None
    try:
        yield
    except ray.exceptions.RayError as error:
        reason = str(error).partition("\n")[0]
        raise SweepError(f"Ray failed ({reason}); {_CONTINUE}") from None
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
