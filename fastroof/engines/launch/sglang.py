"""SGLang: ``sglang serve`` and ``python -m sglang.benchmark.serving``, or what earlier releases call them.

Arguments as ``sglang/srt/server_args.py``, ``sglang/srt/arg_groups/fields`` and
``sglang/benchmark/serving.py`` of the releases define them (tests/engines/arguments/sglang-*.toml).
"""

from __future__ import annotations

from typing import Final

from fastroof.engines.launch.settings import (
    MISSING_MODULES,
    RESULT,
    SIDE_PORTS,
    BenchmarkLoad,
    Command,
    LaunchSettings,
    Servers,
    options,
    url_router,
)
from fastroof.engines.values import holds_for

TITLE: Final = "SGLang"
RELEASES: Final = ("0.5.23", "0.5.22", "0.5.21", "0.5.20", "0.5.14", "0.5.9")
IMAGE: Final = "lmsysorg/sglang:v{release}"
HEALTH: Final = "/health"
SIDE_PORT: Final = 8998
"""Where workers that decode ask one that prefills for the transfer of a prompt."""

ROUTER: Final = "sglang-router 0.3.2"
ROUTER_IMAGE: Final = IMAGE

_SERVE: Final = ">=0.5.10"
"""Versions that recommend ``sglang serve`` instead of the server's module."""

_BENCHMARK: Final = ">=0.5.15"
"""Versions whose benchmark is ``sglang.benchmark.serving``."""

_ATTENTION_DP: Final = ">=0.5.22"
"""Versions with ``--attn-dp-size`` for ranks that share experts, not ``--dp-size --enable-dp-attention``."""

_KV_DTYPES: Final = {"fp8": "fp8_e4m3"}

_HEADS: Final = {"eagle3": ">=0.5.9", "dflash": ">=0.5.23", "dspark": ">=0.5.23"}
"""Methods of draft heads and the versions that were read with them."""


def server(settings: LaunchSettings, release: str) -> Command:
    """Return the command that serves one copy in a release."""
    shares_experts = settings.dp > 1 and settings.has_experts
    is_newer = shares_experts and holds_for(_ATTENTION_DP, release)
    # with data-parallel attention the chunk and requests are divided by ranks, requests also by stages
    ranks = settings.dp if shares_experts else 1
    # its heads run on all GPUs of the model
    heads = _HEADS if settings.draft_tp in (0, settings.tp) else {}
    kv_dtype = _KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype)
    drafts, method = settings.own_drafts(heads, release), settings.draft_method
    # one token after another; the others draft a block at once
    in_steps = drafts if method in ("", "eagle3") else 0
    arguments = options(
        ("--model-path", settings.shown_model),
        # of all GPUs of a stage if ranks share experts; for a dense model dp makes copies
        ("--tp-size", settings.tp * ranks),
        ("--pp-size", settings.pp > 1 and settings.pp),
        ("--attn-dp-size", is_newer and settings.dp),
        ("--dp-size", settings.dp > 1 and not is_newer and settings.dp),
        ("--enable-dp-attention", shares_experts and not is_newer),
        ("--ep-size", settings.ep > 1 and settings.ep),
        ("--max-running-requests", settings.max_num_seqs * ranks * settings.pp),
        ("--chunked-prefill-size", settings.max_num_batched_tokens * ranks),
        ("--max-prefill-tokens", settings.max_num_batched_tokens),
        ("--context-length", settings.max_context),
        ("--kv-cache-dtype", "auto" if settings.is_own_kv_dtype else kv_dtype),
        *settings.pause_options,
        ("--mem-fraction-static", settings.memory_fraction),
        ("--enable-lora", settings.lora_rank > 0),
        ("--max-lora-rank", settings.lora_rank),
        ("--max-loras-per-batch", settings.lora_rank and settings.max_loras),
        ("--lora-target-modules", settings.lora_rank and settings.lora_modules),
        ("--quantization", settings.online_dtype),
        ("--speculative-algorithm", drafts and (method.upper() or "NEXTN")),
        ("--speculative-draft-model-path", drafts and method and settings.draft),
        ("--speculative-num-steps", in_steps),
        ("--speculative-eagle-topk", in_steps and 1),
        ("--speculative-num-draft-tokens", drafts and drafts + 1),
        ("--disaggregation-mode", settings.role),
        ("--disaggregation-transfer-backend", settings.role and "nixl"),
        (SIDE_PORTS[1], settings.role == "prefill" and settings.side_port),
        *settings.listen_options,
    )
    unsaid = (
        MISSING_MODULES if settings.lora_rank and not settings.lora_modules else "",
        settings.missing_format(TITLE),
        "" if drafts else settings.missing_drafts("--speculative-algorithm"),
        settings.missing_kv_bytes("--max-total-tokens"),
    )
    is_command = holds_for(_SERVE, release)
    program = ("sglang", "serve") if is_command else ("python3", "-m", "sglang.launch_server")
    return Command(program, tuple(arguments), unsaid=tuple(filter(None, unsaid)))


def router(servers: Servers, port: int) -> Command:
    """Return the command of SGLang's router, which gives requests to copies, or to one of each role."""
    program = ("python3", "-m", "sglang_router.launch_router")
    return url_router(program, servers, port, roles_option="--pd-disaggregation", names_side_ports=True)


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
            ("--output-file", RESULT),
        ),
        unsaid=unsaid,
    )
