"""vLLM: ``vllm serve`` and ``vllm bench serve``.

Arguments as ``vllm/engine/arg_utils.py``, ``vllm/entrypoints/*/cli_args.py`` and
``vllm/benchmarks/serve.py`` of the releases define them (tests/engines/arguments/vllm-*.toml). All releases
take the same ones, except the modules of LoRA adapters.
"""

from __future__ import annotations

import json
from typing import Final

from fastroof.engines.launch.settings import (
    ALL_MODULES,
    MISSING_MODULES,
    SIDE_HOST,
    SIDE_PORTS,
    BenchmarkLoad,
    Command,
    LaunchSettings,
    Servers,
    options,
    url_router,
)
from fastroof.engines.values import holds_for

TITLE: Final = "vLLM"
RELEASES: Final = ("0.33.0", "0.31.0", "0.28.0", "0.24.0", "0.19.0", "0.13.0", "0.12.0")
IMAGE: Final = "vllm/vllm-openai:v{release}"
HEALTH: Final = "/health"
SIDE_PORT: Final = 5600
"""Where NIXL of the first rank listens; those of other ranks take the ports after it."""

ROUTER: Final = "vllm-router 0.1.17"
ROUTER_IMAGE: Final = "vllm/vllm-router:v0.1.17"

_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}

KV_DTYPES: Final = {"bf16": "bfloat16"}
"""Formats of the KV cache whose names differ."""

_LORA_MODULES: Final = ">=0.19"
"""Versions with ``--lora-target-modules``."""

_HEADS: Final = {"eagle3": ">=0.12", "dflash": ">=0.24", "dspark": ">=0.28"}
"""Methods of draft heads and the versions whose arguments were read with them."""


def server(settings: LaunchSettings, release: str) -> Command:
    """Return the command that serves one copy in a release."""
    drafted = settings.own_drafts(_HEADS, release)
    drafts = {"method": settings.draft_method or "mtp", "num_speculative_tokens": drafted}
    if settings.draft_method:
        drafts |= {"model": settings.draft}
        drafts |= {"draft_tensor_parallel_size": settings.draft_tp} if settings.draft_tp else {}
    transfer = {"kv_connector": "NixlConnector", "kv_role": _ROLES.get(settings.role)}
    has_modules = settings.lora_rank > 0 and settings.lora_modules != (ALL_MODULES,)
    is_named = bool(settings.lora_modules) and holds_for(_LORA_MODULES, release)
    kv_dtype = KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype)
    arguments = options(
        ("--tensor-parallel-size", settings.tp),
        ("--pipeline-parallel-size", settings.pp > 1 and settings.pp),
        *rank_options(settings),
        # all stages of a pipeline share one scheduler
        ("--max-num-seqs", settings.max_num_seqs * settings.pp),
        ("--max-num-batched-tokens", settings.max_num_batched_tokens),
        ("--max-model-len", settings.max_context),
        ("--kv-cache-dtype", "auto" if settings.is_own_kv_dtype else kv_dtype),
        *settings.pause_options,
        ("--gpu-memory-utilization", settings.memory_fraction),
        ("--kv-cache-memory-bytes", settings.kv_cache_bytes),
        ("--enable-lora", settings.lora_rank > 0),
        ("--max-lora-rank", settings.lora_rank),
        ("--max-loras", settings.lora_rank and settings.max_loras),
        ("--lora-target-modules", has_modules and is_named and settings.lora_modules),
        ("--quantization", settings.online_dtype),
        ("--speculative-config", drafted and json.dumps(drafts)),
        ("--kv-transfer-config", settings.role and json.dumps(transfer)),
        *settings.listen_options,
    )
    unsaid = (
        MISSING_MODULES if has_modules and not is_named else "",
        settings.missing_format(TITLE),
        "" if drafted else settings.missing_drafts("--speculative-config"),
    )
    return Command(
        ("vllm", "serve"),
        ((settings.shown_model,), *arguments),
        environment={SIDE_HOST: settings.address, SIDE_PORTS[0]: str(settings.side_port)}
        if settings.role
        else {},
        unsaid=tuple(filter(None, unsaid)),
    )


def router(servers: Servers, port: int) -> Command:
    """Return the command of vLLM's router, which gives requests to copies, or to both roles in turn."""
    return url_router(
        ("vllm-router",), servers, port, roles_option="--vllm-pd-disaggregation", names_side_ports=False
    )


def rank_options(settings: LaunchSettings) -> list[tuple[str, int | bool]]:
    """Return the options of data and expert parallelism."""
    ranks = settings.dp > 1 and settings.dp
    return [("--data-parallel-size", ranks), ("--enable-expert-parallel", settings.ep > 1)]


def benchmark(load: BenchmarkLoad, release: str) -> Command:
    """Return the command that measures one copy of a release."""
    return Command(("vllm", "bench", "serve"), load.random_prompts)
