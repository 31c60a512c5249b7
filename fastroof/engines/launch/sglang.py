"""SGLang: ``sglang serve`` and ``python -m sglang.benchmark.serving``, or what earlier releases call them.

Arguments as ``sglang/srt/server_args.py``, ``sglang/srt/arg_groups/fields`` and
``sglang/benchmark/serving.py`` of the releases define them (tests/engines/arguments/sglang-*.toml).
"""

from __future__ import annotations

from typing import Final

from fastroof.engines.launch.settings import MTP, BenchmarkLoad, Command, LaunchSettings
from fastroof.engines.values import holds_for
from fastroof.units import GIB

TITLE: Final = "SGLang"
RELEASES: Final = ("0.5.23", "0.5.22", "0.5.21", "0.5.20", "0.5.14", "0.5.9")
IMAGE: Final = "lmsysorg/sglang:v{release}"
HEALTH: Final = "/health"

_SERVE: Final = ">=0.5.10"
"""Versions that recommend ``sglang serve`` instead of the server's module."""

_BENCHMARK: Final = ">=0.5.15"
"""Versions whose benchmark is ``sglang.benchmark.serving``."""

_ATTENTION_DP: Final = ">=0.5.22"
"""Versions with ``--attn-dp-size`` for ranks that share experts, not ``--dp-size --enable-dp-attention``."""

_ONLINE: Final = {"fp8": "fp8"}
"""Formats to which the engine can quantise 16-bit weights while loading."""

_KV_DTYPES: Final = {"bf16": "bf16", "fp8": "fp8_e4m3"}


def server(settings: LaunchSettings, release: str) -> Command:
    """Return the command that serves one copy in a release."""
    unsaid = []
    shares_experts = settings.dp > 1 and settings.has_experts
    # tp counts all GPUs of a stage if ranks share experts; for a dense model dp makes copies
    tp = settings.tp * settings.dp if shares_experts else settings.tp
    arguments: list[tuple[str, ...]] = [
        ("--model-path", settings.shown_model),
        ("--tp-size", str(tp)),
    ]
    if settings.pp > 1:
        arguments.append(("--pp-size", str(settings.pp)))
    if shares_experts and holds_for(_ATTENTION_DP, release):
        arguments.append(("--attn-dp-size", str(settings.dp)))
    elif settings.dp > 1:
        arguments.append(("--dp-size", str(settings.dp)))
        arguments += [("--enable-dp-attention",)] * shares_experts
    if settings.ep > 1:
        arguments.append(("--ep-size", str(settings.ep)))
    # with data-parallel attention the chunk and requests are divided by ranks, requests also by stages
    ranks = settings.dp if shares_experts else 1
    arguments += [
        ("--max-running-requests", str(settings.max_num_seqs * ranks * settings.pp)),
        ("--chunked-prefill-size", str(settings.max_num_batched_tokens * ranks)),
        ("--max-prefill-tokens", str(settings.max_num_batched_tokens)),
        ("--context-length", str(settings.max_context)),
        ("--kv-cache-dtype", "auto" if settings.is_own_kv_dtype else _KV_DTYPES[settings.kv_dtype]),
    ]
    arguments += settings.pause_arguments
    if settings.memory_fraction:
        arguments.append(("--mem-fraction-static", f"{settings.memory_fraction:g}"))
    if settings.lora_rank:
        arguments += [
            ("--enable-lora",),
            ("--max-lora-rank", str(settings.lora_rank)),
            ("--max-loras-per-batch", str(settings.max_loras)),
        ]
        if settings.lora_modules:
            arguments.append(("--lora-target-modules", *settings.lora_modules))
        else:
            unsaid.append(settings.unnamed_modules)
    if not settings.is_own_dtype:
        if settings.checkpoint_dtype == "bf16" and settings.dtype in _ONLINE:
            arguments.append(("--quantization", _ONLINE[settings.dtype]))
        else:
            unsaid.append(settings.missing_format(TITLE))
    if settings.num_draft_tokens and settings.draft == MTP:
        arguments += [
            ("--speculative-algorithm", "NEXTN"),
            ("--speculative-num-steps", str(settings.num_draft_tokens)),
            ("--speculative-eagle-topk", "1"),
            ("--speculative-num-draft-tokens", str(settings.num_draft_tokens + 1)),
        ]
    elif settings.num_draft_tokens:
        unsaid.append(
            f"{settings.num_draft_tokens} draft tokens by {settings.draft}: see --speculative-algorithm"
        )
    if settings.kv_cache_bytes:
        unsaid.append(f"{settings.kv_cache_bytes / GIB:g} GiB of KV cache: see --max-total-tokens")
    if settings.role:
        arguments.append(("--disaggregation-mode", settings.role))
        unsaid.append("the router between prefill and decode copies")
    arguments.append(("--port", str(settings.port)))
    is_command = holds_for(_SERVE, release)
    program = ("sglang", "serve") if is_command else ("python3", "-m", "sglang.launch_server")
    return Command(program, tuple(arguments), unsaid=tuple(unsaid))


def benchmark(load: BenchmarkLoad, release: str) -> Command:
    """Return the command that measures one copy of a release."""
    unsaid: tuple[str, ...] = ()
    if load.prefix_tokens:
        unsaid = (
            f"prompts that begin with the same {load.prefix_tokens:,} tokens: see --dataset-name "
            "generated-shared-prefix",
        )
    module = "sglang.benchmark.serving" if holds_for(_BENCHMARK, release) else "sglang.bench_serving"
    return Command(
        ("python3", "-m", module),
        (
            ("--backend", "sglang"),
            ("--base-url", f"http://127.0.0.1:{load.port}"),
            ("--model", load.model),
            ("--dataset-name", "random-ids"),
            ("--random-input-len", str(load.isl)),
            ("--random-output-len", str(load.osl)),
            # equal minimum and maximum give all requests the same length
            ("--random-range-ratio", "1"),
            load.load,
            ("--num-prompts", str(load.prompts)),
        ),
        unsaid=unsaid,
    )
