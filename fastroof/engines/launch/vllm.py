"""vLLM: ``vllm serve`` and ``vllm bench serve``.

Arguments as ``vllm/engine/arg_utils.py``, ``vllm/entrypoints/*/cli_args.py`` and
``vllm/benchmarks/serve.py`` of the releases define them (tests/engines/arguments/vllm-*.toml). All releases
take the same ones, except the modules of LoRA adapters.
"""

from __future__ import annotations

import json
from typing import Any, Final

from fastroof.engines.launch.settings import ALL_MODULES, MTP, BenchmarkLoad, Command, LaunchSettings
from fastroof.engines.values import holds_for

TITLE: Final = "vLLM"
RELEASES: Final = ("0.33.0", "0.31.0", "0.28.0", "0.24.0", "0.19.0", "0.13.0", "0.12.0")
IMAGE: Final = "vllm/vllm-openai:v{release}"
HEALTH: Final = "/health"

_ONLINE: Final = {"fp8": "fp8"}
"""Formats to which the engine can quantise 16-bit weights while loading."""

_KV_DTYPES: Final = {"bf16": "bfloat16", "fp8": "fp8"}

_LORA_MODULES: Final = ">=0.19"
"""Versions with ``--lora-target-modules``."""


def server(settings: LaunchSettings, release: str) -> Command:
    """Return the command that serves one copy in a release."""
    unsaid = []
    arguments: list[tuple[str, ...]] = [
        (settings.shown_model,),
        ("--tensor-parallel-size", str(settings.tp)),
    ]
    if settings.pp > 1:
        arguments.append(("--pipeline-parallel-size", str(settings.pp)))
    if settings.dp > 1:
        arguments.append(("--data-parallel-size", str(settings.dp)))
    if settings.ep > 1:
        arguments.append(("--enable-expert-parallel",))
    arguments += [
        # all stages of a pipeline share one scheduler
        ("--max-num-seqs", str(settings.max_num_seqs * settings.pp)),
        ("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
        ("--max-model-len", str(settings.max_context)),
        ("--kv-cache-dtype", "auto" if settings.is_own_kv_dtype else _KV_DTYPES[settings.kv_dtype]),
    ]
    arguments += settings.pause_arguments
    if settings.memory_fraction:
        arguments.append(("--gpu-memory-utilization", f"{settings.memory_fraction:g}"))
    if settings.kv_cache_bytes:
        arguments.append(("--kv-cache-memory-bytes", str(settings.kv_cache_bytes)))
    if settings.lora_rank:
        arguments += [
            ("--enable-lora",),
            ("--max-lora-rank", str(settings.lora_rank)),
            ("--max-loras", str(settings.max_loras)),
        ]
        if settings.lora_modules and holds_for(_LORA_MODULES, release):
            named = settings.lora_modules != (ALL_MODULES,)
            arguments += [("--lora-target-modules", *settings.lora_modules)] * named
        elif settings.lora_modules != (ALL_MODULES,):
            unsaid.append(settings.unnamed_modules)
    if not settings.is_own_dtype:
        if settings.checkpoint_dtype == "bf16" and settings.dtype in _ONLINE:
            arguments.append(("--quantization", _ONLINE[settings.dtype]))
        else:
            unsaid.append(settings.missing_format(TITLE))
    drafts, why = _drafts(settings)
    if drafts:
        arguments.append(("--speculative-config", json.dumps(drafts)))
    if why:
        unsaid.append(why)
    if settings.role:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        arguments.append(("--kv-transfer-config", json.dumps(transfer)))
        unsaid.append(f"the {settings.role}-only role: vLLM leaves that to a router in front of both kinds")
    arguments.append(("--port", str(settings.port)))
    return Command(("vllm", "serve"), tuple(arguments), unsaid=tuple(unsaid))


def _drafts(settings: LaunchSettings) -> tuple[dict[str, Any], str]:
    if not settings.num_draft_tokens:
        return {}, ""
    if settings.draft == MTP:
        return {"method": "mtp", "num_speculative_tokens": settings.num_draft_tokens}, ""
    return {}, f"{settings.num_draft_tokens} draft tokens by {settings.draft}: see --speculative-config"


def benchmark(load: BenchmarkLoad, release: str) -> Command:
    """Return the command that measures one copy of a release."""
    own = load.isl - load.prefix_tokens
    prefix = [("--random-prefix-len", str(load.prefix_tokens))] if load.prefix_tokens else []
    return Command(
        ("vllm", "bench", "serve"),
        (
            ("--model", load.model),
            ("--base-url", f"http://127.0.0.1:{load.port}"),
            ("--dataset-name", "random"),
            ("--random-input-len", str(own)),
            *prefix,
            ("--random-output-len", str(load.osl)),
            ("--ignore-eos",),
            load.load,
            ("--num-prompts", str(load.prompts)),
            ("--percentile-metrics", "ttft,tpot,itl,e2el"),
        ),
    )
