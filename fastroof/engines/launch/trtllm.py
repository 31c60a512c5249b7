"""TensorRT-LLM: ``trtllm-serve`` with its YAML, and its benchmark client.

Arguments as ``tensorrt_llm/commands/serve.py``, its published examples and
``tensorrt_llm/serve/scripts/benchmark_serving.py`` have them (tests/engines/arguments/trtllm.toml).
"""

from __future__ import annotations

from typing import Any, Final

from fastroof.engines.launch.settings import START_S, BenchmarkLoad, Command, LaunchSettings, Servers, options

TITLE: Final = "TensorRT-LLM"
RELEASES: Final = ("1.3.0rc11",)
IMAGE: Final = "nvcr.io/nvidia/tensorrt-llm/release:{release}"
HEALTH: Final = "/health"
SIDE_PORT: Final = 0

ROUTER: Final = "trtllm-serve disaggregated"
ROUTER_IMAGE: Final = IMAGE

_KV_DTYPES: Final = ("fp8", "nvfp4")
_LEAST_GRAPH: Final = 8


def server(settings: LaunchSettings, release: str) -> Command:
    """Return the command that serves one copy in a release, with its YAML."""
    copies = settings.dp > 1 and not settings.has_experts
    arguments = options(
        # of all GPUs of a stage
        ("--tp_size", settings.tp if copies else settings.tp * settings.dp),
        ("--pp_size", settings.pp > 1 and settings.pp),
        ("--ep_size", settings.has_experts and settings.ep),
        ("--max_batch_size", settings.max_num_seqs),
        ("--max_num_tokens", settings.max_num_batched_tokens),
        ("--max_seq_len", settings.max_context),
        *settings.listen_options,
    )
    has_dtype = settings.is_own_kv_dtype or settings.kv_dtype in _KV_DTYPES
    is_given = has_dtype and not settings.is_own_kv_dtype
    cache: dict[str, Any] = {"dtype": settings.kv_dtype if is_given else "auto"}
    if settings.memory_fraction:
        cache["free_gpu_memory_fraction"] = settings.memory_fraction
    config: dict[str, Any] = {
        "kv_cache_config": cache,
        # decodes run in CUDA graphs only up to this batch size
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": _graph_batch(settings)},
    }
    if settings.dp > 1 and not copies:
        config["enable_attention_dp"] = True
        if settings.balance_steps:
            # off by default; set in the public benchmark's scripts
            config["attention_dp_config"] = {
                "enable_balance": True,
                "batching_wait_iters": 0,
                "timeout_iters": settings.balance_steps,
            }
    if settings.role:
        config["cache_transceiver_config"] = {"backend": "DEFAULT"}
    if settings.role == "prefill":
        # which it does not overlap with a transfer
        config["disable_overlap_scheduler"] = True
    sets = f"a {settings.kv_dtype} KV cache: {settings.model} sets {settings.auto_kv_dtype}"
    adapters = f"{settings.max_loras} LoRA adapters of rank {settings.lora_rank} a GPU: see lora_config"
    unsaid = (
        "" if has_dtype else sets,
        f"{settings.dp} copies behind one port: start it {settings.dp} times" if copies else "",
        settings.missing_format(TITLE, converts=False),
        settings.missing_drafts("speculative_config"),
        adapters if settings.lora_rank else "",
        settings.missing_kv_bytes("max_gpu_total_bytes of kv_cache_config"),
    )
    return Command(
        ("trtllm-serve", "serve"), ((settings.shown_model,), *arguments), "--extra_llm_api_options", config,
        f"{settings.role or 'engine'}.yaml",
        unsaid=tuple(filter(None, unsaid)),
    )  # fmt: skip


def _graph_batch(settings: LaunchSettings) -> int:
    """Return the decodes of the largest CUDA graph: the running requests, rounded up to a power of two."""
    running = min(max(settings.running, _LEAST_GRAPH), settings.max_num_seqs)
    return min(1 << (running - 1).bit_length(), settings.max_num_seqs)


def router(servers: Servers, port: int) -> Command | None:
    """Return the command that gives requests to both roles in turn, with its YAML; None for whole copies."""
    if "server" in servers:
        return None
    urls = {role: [f"{one.host}:{one.port}" for one in places] for role, places in servers.items()}
    config = {
        "hostname": "0.0.0.0",
        "port": port,
        **{
            name: {"num_instances": len(urls[role]), "urls": urls[role]}
            for role, name in (("prefill", "context_servers"), ("decode", "generation_servers"))
        },
    }
    return Command(
        ("trtllm-serve", "disaggregated"),
        (("--server_start_timeout", str(START_S)),),
        "-c",
        config,
        "router.yaml",
    )


def benchmark(load: BenchmarkLoad, release: str) -> Command:
    """Return the command that measures one copy of a release."""
    own = (("--backend", "openai"), ("--random-ids",), ("--tokenize-on-client",))
    program = ("python3", "-m", "tensorrt_llm.serve.scripts.benchmark_serving")
    return Command(program, (*own, *load.random_prompts))
