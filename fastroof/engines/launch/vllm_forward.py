"""``vllm bench forward``: the command that measures exact steps of a model, each as one CUDA graph.

Arguments as vllm/benchmarks/forward of vLLM 0.33.0 defines them, the first release that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from typing import Final

from fastroof.engines.launch.settings import Command, LaunchSettings, options
from fastroof.engines.launch.vllm import KV_DTYPES, TITLE, rank_options

FIRST_RELEASE: Final = "0.33.0"

MOST_OF_CACHE: Final = 0.8
"""Share of the predicted KV cache that a case may take: the bench stops at a case that does not fit."""


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
    settings: LaunchSettings, steps: Mapping[str, Sequence[tuple[int, int]]], output: str
) -> Command:
    """Return the command that measures steps, with exact lengths, and writes a JSON file."""
    gpus = settings.tp * settings.dp
    program: tuple[str, ...] = ("vllm", "bench", "forward")
    if gpus > 1:
        program = ("torchrun", f"--nproc-per-node={gpus}", "-m", "vllm.entrypoints.cli.main", *program[1:])
    kv_dtype = KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype)
    arguments = options(
        ("--model", settings.model),
        ("--tensor-parallel-size", settings.tp > 1 and settings.tp),
        *rank_options(settings),
        ("--quantization", settings.online_dtype),
        ("--kv-cache-dtype", not settings.is_own_kv_dtype and kv_dtype),
        # vLLM does not start if a sequence of the model's own length does not fit
        ("--max-model-len", max(new + context for requests in steps.values() for new, context in requests)),
        *(("--case", case_text(requests, name)) for name, requests in steps.items()),
        ("--kv-len-jitter", "0"),
        ("--exclude-drafter", True),
        ("--output-json", output),
    )
    return Command(program, tuple(arguments), unsaid=tuple(filter(None, [settings.missing_format(TITLE)])))
