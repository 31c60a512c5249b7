"""Which all-reduces and other collectives are measured: messages, modes, and as many GPUs as there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastroof.errors import MeasureError
from kernels_bench.operators.communication import ALLREDUCE, COLLECTIVE
from kernels_bench.protocol import Point

NUM_GPUS: Final = (2, 4, 8)
MESSAGE_BYTES: Final = {"nccl": [2**n for n in range(8, 30)], "gloo": [2**n for n in range(8, 17, 2)]}
"""Messages by backend; gloo proves the harness on a CPU."""
MODES: Final = {"nccl": {"graph": "vllm", "nccl": "nccl"}, "gloo": {"eager": "gloo"}}
"""Modes of all-reduces on GPUs and on a CPU, and who launches each: ``graph`` is an engine's own."""


def allreduce_points(worlds: Sequence[int], backend: str = "nccl") -> list[Point]:
    """Return what is measured without a grid: messages of 2**8 to 2**29 bytes.

    >>> len(allreduce_points([2, 4, 8]))
    132
    >>> allreduce_points([2])[0].values
    {'dtype': 'bf16', 'num_gpus': 2, 'mode': 'graph', 'message_bytes': 256}
    """
    return [
        Point(
            ALLREDUCE, {"dtype": "bf16", "num_gpus": n, "mode": mode, "message_bytes": size}, 1, "all-reduce"
        )
        for n in worlds
        for mode in MODES[backend]
        for size in MESSAGE_BYTES[backend]
    ]


def collective_points(worlds: Sequence[int], backend: str = "nccl") -> list[Point]:
    """Return which all-gathers, reduce-scatters and all-to-all exchanges are measured without a grid.

    >>> len(collective_points([2, 4, 8]))
    198
    >>> collective_points([2], "gloo")[-1].values
    {'dtype': 'fp16', 'collective': 'alltoall', 'num_gpus': 2, 'message_bytes': 65536}
    """
    return [
        Point(
            COLLECTIVE, {"dtype": "fp16", "collective": name, "num_gpus": n, "message_bytes": size}, 2, name
        )
        for n in worlds
        for name in ("all_gather", "reduce_scatter", "alltoall")
        for size in MESSAGE_BYTES[backend]
    ]


def points_by_ranks(operator: str, worlds: Sequence[int], backend: str = "nccl") -> list[Point]:
    """Return the points of an operator that ranks measure together: allreduce or collective."""
    of = {ALLREDUCE: allreduce_points, COLLECTIVE: collective_points}
    return of[operator](worlds, backend)


def visible_gpus() -> int:
    """Count the GPUs that torch sees here; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def usable_worlds(wanted: Sequence[int], num_visible: int) -> list[int]:
    """Return the numbers of GPUs to measure with, ascending.

    >>> usable_worlds((), 5)
    [2, 4]
    """
    if small := [n for n in wanted if n < 2]:
        raise MeasureError(f"--gpus {small[0]}: an all-reduce needs at least 2 GPUs")
    most = max(wanted, default=NUM_GPUS[0])
    if most > num_visible:
        raise MeasureError(
            f"all-reduce over {most} GPUs: torch sees {num_visible} here (nvidia-smi, CUDA_VISIBLE_DEVICES); "
            "ask for fewer, or leave it to another source"
        )
    return sorted(set(wanted)) or [n for n in NUM_GPUS if n <= num_visible]
