"""``vllm bench forward``: the command that measures exact steps of a model, each as one CUDA graph.

Arguments as vllm/benchmarks/forward of vLLM 0.33.0 defines them, the first release that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from typing import Final, NamedTuple

from fastroof.engines.launch.settings import Command

FIRST_RELEASE: Final = "0.33.0"

MOST_OF_CACHE: Final = 0.8
"""Share of the predicted KV cache that a case may take: the bench stops at a case that does not fit."""

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
    auto_kv_dtype: str


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


def step_grid(max_kv_tokens: int, longest: int) -> dict[str, list[tuple[int, int]]]:
    """Return steps of all kinds that fit a KV cache and a model's longest sequence, by name."""
    grid = {
        f"decode-{batch}x{kv}": [(1, kv - 1)] * batch
        for batch, kv in product((1, 4, 16, 64, 256), (1024, 4096, 16384))
    }
    grid |= {f"prefill-{new}": [(new, 0)] for new in (128, 512, 2048, 8192)}
    grid["chunk-2048x8192"] = [(2048, 6144)]
    grid |= {f"mixed-2048+{batch}x2048": [(2048, 0), *[(1, 2047)] * batch] for batch in (8, 64)}
    return {
        name: requests
        for name, requests in grid.items()
        if sum(map(sum, requests)) <= MOST_OF_CACHE * max_kv_tokens and max(map(sum, requests)) <= longest
    }


def forward_command(
    served: ForwardModel, steps: Mapping[str, Sequence[tuple[int, int]]], output: str
) -> Command:
    """Return the command that measures steps, with exact lengths, and writes a JSON file."""
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
    if served.kv_dtype != served.auto_kv_dtype:
        arguments.append(("--kv-cache-dtype", _KV_DTYPES.get(served.kv_dtype, served.kv_dtype)))
    # vLLM does not start if a sequence of the model's own length does not fit
    longest = max(new + context for requests in steps.values() for new, context in requests)
    arguments.append(("--max-model-len", str(longest)))
    arguments += [("--case", case_text(requests, name)) for name, requests in steps.items()]
    arguments += [("--kv-len-jitter", "0"), ("--exclude-drafter",), ("--output-json", output)]
    return Command(program, tuple(arguments), unsaid=tuple(unsaid))
