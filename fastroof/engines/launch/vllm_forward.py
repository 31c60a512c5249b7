"""``vllm bench forward``: the command that measures exact steps of a model, each as one CUDA graph.

Arguments as vllm/benchmarks/forward of vLLM 0.33.0 defines them, the first release that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from fastroof.engines.launch.settings import Command

FIRST_RELEASE: Final = "0.33.0"

_ONLINE: Final = ("fp8",)
_KV_DTYPES: Final = {"bf16": "bfloat16", "fp8": "fp8"}


class ForwardModel(NamedTuple):
    """A model on its GPUs, as ``vllm bench forward`` runs it; formats that are not the checkpoint's."""

    model: str
    tp: int
    dp: int
    ep: int
    dtype: str
    checkpoint_dtype: str
    kv_dtype: str
    checkpoint_kv_dtype: str


def case_text(requests: Iterable[tuple[int, int]], name: str) -> str:
    """Return a step of (new tokens, tokens in the cache) as ``--case`` takes it."""
    parts = []
    for (new, context), same in groupby(requests):
        count = len(list(same))
        # of a prefill after a context: computed by chunks before it, not found in the prefix cache
        chunk = "c" if new > 1 and context else ""
        size = f"{new}@{new + context}{chunk}" if context else f"{new}"
        parts.append(f"{count}*{size}" if count > 1 else size)
    return f"{name}={','.join(parts)}"


def forward_command(served: ForwardModel, cases: Sequence[str], output: str) -> Command:
    """Return the command that measures cases, with exact lengths, and writes a JSON file."""
    gpus = served.tp * served.dp
    unsaid = []
    program: tuple[str, ...] = ("vllm", "bench", "forward")
    if gpus > 1:
        program = ("torchrun", f"--nproc-per-node={gpus}", "-m", "vllm.entrypoints.cli.main", *program[1:])
    arguments: list[tuple[str, ...]] = [("--model", served.model)]
    if served.tp > 1:
        arguments.append(("--tensor-parallel-size", str(served.tp)))
    if served.dp > 1:
        arguments.append(("--data-parallel-size", str(served.dp)))
    if served.ep > 1:
        arguments.append(("--enable-expert-parallel",))
    if served.dtype != served.checkpoint_dtype:
        if served.checkpoint_dtype == "bf16" and served.dtype in _ONLINE:
            arguments.append(("--quantization", served.dtype))
        else:
            unsaid.append(f"weights in {served.dtype}: the checkpoint's are {served.checkpoint_dtype}")
    if served.kv_dtype != served.checkpoint_kv_dtype:
        arguments.append(("--kv-cache-dtype", _KV_DTYPES.get(served.kv_dtype, served.kv_dtype)))
    arguments += [("--case", case) for case in cases]
    arguments += [("--kv-len-jitter", "0"), ("--exclude-drafter",), ("--output-json", output)]
    return Command(program, tuple(arguments), unsaid=tuple(unsaid))
