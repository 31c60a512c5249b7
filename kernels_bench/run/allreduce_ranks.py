"""All ranks of an all-reduce, seen from the process that spawns them: none may keep it waiting."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any, Final

from fastroof.errors import MeasureError
from kernels_bench.run.allreduce_rank import Answer, Broken, Order, Ready, World, run_rank

START_TIMEOUT_S: Final = 180.0
"""torch is imported and NCCL set up once a process; on a slow file system that takes a minute."""
POINT_TIMEOUT_S: Final = 60.0
"""A point takes well under a second, so after this some rank hangs."""
END_S: Final = 5.0


class RanksTimeoutError(MeasureError):
    """Ranks that have not answered in time."""


class SpawnedRanks:
    """One process a GPU."""

    def __init__(
        self,
        num_gpus: int,
        backend: str,
        timeout_s: float = START_TIMEOUT_S,
        target: Callable[[int, World, Connection], None] = run_rank,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kernels_bench-")
        world = World(num_gpus, backend, str(Path(self._folder.name) / "meeting"), POINT_TIMEOUT_S)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._broken = False
        # A forked child could not use CUDA where the parent has.
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(num_gpus):
                ours, theirs = context.Pipe()
                process = context.Process(target=target, args=(rank, world, theirs), daemon=True)
                process.start()
                theirs.close()  # so that the end of the process is the end of the pipe
                self._pipes.append(ours)
                self._processes.append(process)
            ready: list[Ready] = self._answers("to meet", timeout_s)
            if len({one.device for one in ready}) > 1:
                names = ", ".join(one.device for one in ready)
                raise MeasureError(
                    f"the GPUs differ ({names}): one table holds one GPU, so choose alike ones by "
                    "CUDA_VISIBLE_DEVICES"
                )
        except BaseException:
            self.close()
            raise
        self.ready = ready[0]

    def time(self, order: Order, timeout_s: float = POINT_TIMEOUT_S) -> list[Answer]:
        """Have all ranks time a point; one answer a rank, in their order."""
        what = f"for {order.message_bytes} B ({order.mode})"
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(order)
            except OSError:
                raise self._died(rank, what) from None
        answers: list[Answer] = self._answers(what, timeout_s)
        return answers

    def close(self) -> None:
        """End every rank: by asking, then by force."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        # Where one failed, the others wait for it within a collective.
        ends = monotonic() + (0.0 if self._broken else END_S)
        for process in self._processes:
            process.join(max(0.0, ends - monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def _answers(self, what: str, timeout_s: float) -> list[Any]:
        """Wait for one message of each rank; the first that fails or dies ends the wait."""
        self._broken = True  # until all have answered
        ends = monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            silent = [rank for rank in range(len(self._pipes)) if rank not in answers]
            heard = wait([self._pipes[rank] for rank in silent], max(0.0, ends - monotonic()))
            if not heard:
                names = ", ".join(map(str, silent))
                raise RanksTimeoutError(
                    f"rank {names} of {len(self._pipes)} did not answer {what} within {timeout_s:g} s: "
                    "it hangs; earlier rows are safe, run again to continue"
                )
            for rank in silent:
                if self._pipes[rank] not in heard:
                    continue
                try:
                    message = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise self._died(rank, what) from None
                if isinstance(message, Broken):
                    raise MeasureError(
                        f"rank {rank} of {len(self._pipes)} failed {what}: {message.reason}; rows before "
                        "are kept, run again to continue"
                    )
                answers[rank] = message
        self._broken = False
        return [answers[rank] for rank in sorted(answers)]

    def _died(self, rank: int, what: str) -> MeasureError:
        process = self._processes[rank]
        process.join(END_S)
        return MeasureError(
            f"rank {rank} of {len(self._pipes)} died {what} (exit code {process.exitcode}); rows before are "
            "kept, run again to continue"
        )
