"""One rank of a collective: the process of one GPU, which times what the parent orders.

A collective hangs where one rank calls it and another does not. So whatever a rank finds out alone (its
memory, how long a call took, how far off a sum is) is agreed on with the others before anyone acts on it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Final

from fastroof.units import DTYPE_BYTES, US_PER_MS, US_PER_S
from kernels_bench.providers.device import oom_as_memory_error, torch_dtype
from kernels_bench.providers.rotating import L2_MULTIPLE, count_sets
from kernels_bench.replays import pilot_calls, schedule
from kernels_bench.run.check import BOUNDS, relative_error
from kernels_bench.run.collective_calls import COLLECTIVE_CALLS, VllmAllreduce, received

CHECKED_ELEMENTS: Final = 2**20
"""Of a message so many first and last elements are checked: every chunk of a small one, both ends of a
large one."""
PROOF_ROTATED_BYTES: Final = 1024
"""On a CPU, so that the smallest messages rotate there too."""


@dataclass(frozen=True)
class World:
    """The ranks that call together."""

    num_gpus: int
    # Who launches: ``nccl`` or ``vllm``, on the CPU ``gloo``.
    backend: str
    # A file that is not there yet, by which the ranks find each other.
    meeting_file: str
    # After which a collective that some rank never joins fails.
    timeout_s: float


@dataclass(frozen=True)
class Order:
    """A point to time; ``collective`` is a key of :data:`COLLECTIVE_CALLS`."""

    dtype: str
    mode: str
    message_bytes: int
    seed: int
    max_bytes: int
    collective: str = "all_reduce"


@dataclass(frozen=True)
class Ready:
    """A rank's answer once it has met the others."""

    kernel: str
    device: str


@dataclass(frozen=True)
class Answer:
    """What a rank timed, or why the ranks agreed not to."""

    # Duration of each replay, us, the first ones to be dropped included.
    replays_us: tuple[float, ...] = ()
    calls: int = 0
    # Relative error of the result, the largest over the ranks.
    error: float = 0.0
    # Whether some rank had no room for the buffers.
    out_of_memory: bool = False
    # What ran, where it depends on the message; else :attr:`Ready.kernel`.
    kernel: str = ""


@dataclass(frozen=True)
class Broken:
    """Why a rank ends."""

    reason: str


def run_rank(rank: int, world: World, pipe: Connection) -> None:
    """Meet the other ranks and answer every order on the pipe; None ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to act on
    try:
        member = _Member(rank, world)
        pipe.send(member.ready())
        while (order := pipe.recv()) is not None:
            pipe.send(member.answer(order))
        member.leave()
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        with contextlib.suppress(OSError):
            pipe.send(Broken(f"{type(error).__name__}: {words}"))


class _Member:
    """A rank that has joined its group."""

    def __init__(self, rank: int, world: World) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.world = rank, world
        self.on_gpu = world.backend != "gloo" and torch.cuda.is_available()
        options: dict[str, Any] = {}
        if self.on_gpu:
            torch.cuda.set_device(rank)
            self.device = torch.device("cuda", rank)
            options["device_id"] = self.device  # communicators are made now, not within a capture
            cuda: Any = torch.cuda
            self.stream = cuda.Stream()
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(1)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
        backend = "nccl" if self.on_gpu else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"file://{world.meeting_file}",
            rank=rank,
            world_size=world.num_gpus,
            timeout=timedelta(seconds=world.timeout_s),
            **options,
        )
        dist.barrier()
        self.vllm = VllmAllreduce(rank, world.num_gpus, backend) if world.backend == "vllm" else None

    def ready(self) -> Ready:
        torch = self.torch
        if not self.on_gpu:
            return Ready(f"gloo all_reduce (torch {torch.__version__})", "cpu")
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return Ready(f"nccl all_reduce {version}", torch.cuda.get_device_name(self.device))

    def leave(self) -> None:
        self.dist.destroy_process_group()

    def answer(self, order: Order) -> Answer:
        if not self.on_gpu:
            return self._answer(order)
        with self.torch.cuda.stream(self.stream):
            return self._answer(order)

    def _answer(self, order: Order) -> Answer:
        """Check one result, then time: warm-up, fresh inputs, replays."""
        try:
            with oom_as_memory_error():
                messages, outputs, checked = self._buffers(order)
        except MemoryError:
            messages = None
        if self._most(0.0 if messages is not None else 1.0) > 0:
            return Answer(out_of_memory=True)
        kernel = "" if self.vllm is None else f"vllm all-reduce, {self.vllm.kernel(messages[0])}"
        error = self._error(order, messages, outputs, checked)
        if not error <= BOUNDS[order.dtype]:
            return Answer(error=error, kernel=kernel)
        num_sets = len(messages)
        pilot = pilot_calls(num_sets)
        for _ in range(2):  # the second finds communicators and buffers ready
            pilot_us = self._replays_us(self._eager(order, messages, outputs, pilot), 1)[0]
        plan = schedule(self._most(pilot_us) / pilot, num_sets)
        launches = self._eager(order, messages, outputs, plan.calls)
        graph = self._capture(launches) if self.on_gpu else None
        replay = launches if graph is None else graph.replay
        try:
            for _ in range(plan.warm_up):
                replay()
            self._fill(messages, order, self.rank)
            replays_us = self._replays_us(replay, plan.replays)
        finally:
            if graph is not None:
                graph.reset()
        return Answer(tuple(replays_us), plan.calls, error, kernel=kernel)

    # -- inputs and what becomes of them -------------------------------------------------------------

    def _buffers(self, order: Order) -> tuple[Any, Any, Any]:
        """Return this rank's rotating inputs and outputs, and in float64 what the first should leave."""
        torch, call, num_gpus = self.torch, COLLECTIVE_CALLS[order.collective], self.world.num_gpus
        rotated_bytes = PROOF_ROTATED_BYTES
        if self.on_gpu:
            rotated_bytes = int(L2_MULTIPLE * torch.cuda.get_device_properties(self.device).L2_cache_size)
        elements = int(order.message_bytes // DTYPE_BYTES[order.dtype])
        left = call.output_elements(elements, num_gpus)
        set_bytes = math.ceil((elements + left) * DTYPE_BYTES[order.dtype])
        # Half: the inputs of the other ranks are made once more, for the check.
        num_sets = count_sets(set_bytes, rotated_bytes, order.max_bytes // 2)
        # One allocation each, which NCCL has to register once.
        made = {"dtype": torch_dtype(order.dtype), "device": self.device}
        messages = torch.empty((num_sets, elements), **made)
        outputs = torch.full((num_sets, left), float("nan"), **made) if left else messages
        other = torch.empty_like(messages)
        parts = []
        for rank in range(num_gpus):
            self._fill(other, order, rank)
            parts.append(self._ends(received(call, other[0], self.rank, num_gpus)).double())
        del other
        self._fill(messages, order, self.rank)
        expected = sum(parts[1:], parts[0]) if call.adds else torch.cat(parts)
        return messages, outputs, expected.cpu().numpy()

    def _fill(self, messages: Any, order: Order, rank: int) -> None:
        """Fill with what any rank can make again: one kind of GPU draws the same from one seed."""
        generator = self.torch.Generator(self.device).manual_seed(order.seed * self.world.num_gpus + rank)
        messages.normal_(generator=generator).mul_(COLLECTIVE_CALLS[order.collective].scale)

    def _ends(self, message: Any) -> Any:
        if message.numel() <= 2 * CHECKED_ELEMENTS:
            return message
        return self.torch.cat((message[:CHECKED_ELEMENTS], message[-CHECKED_ELEMENTS:]))

    def _error(self, order: Order, messages: Any, outputs: Any, expected: Any) -> float:
        """Relative error of one result, the largest over the ranks; infinite where a number is not finite."""
        left = self._launch(order)(messages[0], outputs[0])
        is_sum = COLLECTIVE_CALLS[order.collective].adds
        parts = [left] if is_sum else left.chunk(self.world.num_gpus)
        result = self.torch.cat([self._ends(part) for part in parts]).double()
        error = relative_error(result.cpu().numpy(), expected)
        return self._most(error if error == error else float("inf"))

    def _most(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        cell = self.torch.tensor([value], dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(cell, op=self.dist.ReduceOp.MAX)
        return float(cell.item())

    def _launch(self, order: Order) -> Callable[[Any, Any], Any]:
        """Return a function of a message and an output, which returns where the result is left."""
        if self.vllm is not None:
            reduce = self.vllm.reduce
            return lambda message, output: reduce(message)
        dist, launch = self.dist, COLLECTIVE_CALLS[order.collective].launch
        return lambda message, output: launch(dist, message, output) or output

    # -- time ----------------------------------------------------------------------------------------

    def _eager(self, order: Order, messages: Any, outputs: Any, calls: int) -> Callable[[], None]:
        sets = list(zip(messages, outputs, strict=True))  # indexing a tensor would be timed too
        launch = self._launch(order)

        def replay() -> None:
            for index in range(calls):
                launch(*sets[index % len(sets)])

        return replay

    def _capture(self, launch: Callable[[], None]) -> Any:
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        known = contextlib.nullcontext() if self.vllm is None else self.vllm.capture(self.stream)
        # thread_local: NCCL's watchdog thread queries events meanwhile.
        with known, torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            launch()
        return graph

    def _replays_us(self, replay: Callable[[], None], count: int) -> list[float]:
        """Time replays that all ranks begin together; after the first the calls keep them together."""
        if not self.on_gpu:
            self.dist.barrier()
            stamps = [perf_counter()]
            for _ in range(count):
                replay()
                stamps.append(perf_counter())
            return [(b - a) * US_PER_S for a, b in pairwise(stamps)]
        cuda: Any = self.torch.cuda
        events = [cuda.Event(enable_timing=True) for _ in range(count + 1)]
        self.stream.synchronize()
        self.dist.barrier()
        events[0].record(self.stream)
        for event in events[1:]:
            replay()
            event.record(self.stream)
        self.stream.synchronize()
        return [a.elapsed_time(b) * US_PER_MS for a, b in pairwise(events)]
