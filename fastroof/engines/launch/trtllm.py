"""TensorRT-LLM: ``trtllm-serve`` with its YAML, and its benchmark client.

Arguments as ``tensorrt_llm/commands/serve.py``, its published examples and
``tensorrt_llm/serve/scripts/benchmark_serving.py`` have them (tests/engines/arguments/trtllm.toml).
"""

from __future__ import annotations

from typing import Any, Final

from fastroof.engines.launch.settings import BenchmarkLoad, Command, LaunchSettings
from fastroof.units import GIB

TITLE: Final = "TensorRT-LLM"
RELEASES: Final = ("1.3.0rc11",)
IMAGE: Final = "nvcr.io/nvidia/tensorrt-llm/release:{release}"
HEALTH: Final = "/health"

_KV_DTYPES: Final = {"fp8": "fp8"}
_LEAST_GRAPH: Final = 8


def server(settings: LaunchSettings, release: str) -> Command:
    """Return the command that serves one copy in a release, with its YAML."""
    unsaid = []
    copies = settings.dp > 1 and not settings.has_experts
    # tp counts all GPUs of a stage
    arguments = (
        (settings.shown_model,),
        ("--tp_size", str(settings.tp if copies else settings.tp * settings.dp)),
        *([("--pp_size", str(settings.pp))] if settings.pp > 1 else []),
        *([("--ep_size", str(settings.ep))] if settings.has_experts else []),
        ("--max_batch_size", str(settings.max_num_seqs)),
        ("--max_num_tokens", str(settings.max_num_batched_tokens)),
        ("--max_seq_len", str(settings.max_context)),
        ("--port", str(settings.port)),
    )
    cache: dict[str, Any] = {"dtype": "auto"}
    if not settings.is_own_kv_dtype:
        if settings.kv_dtype in _KV_DTYPES:
            cache["dtype"] = _KV_DTYPES[settings.kv_dtype]
        else:
            unsaid.append(f"a {settings.kv_dtype} KV cache: {settings.model} sets {settings.auto_kv_dtype}")
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
    if copies:
        unsaid.append(f"{settings.dp} copies behind one port: start it {settings.dp} times")
    if not settings.is_own_dtype:
        unsaid.append(settings.missing_format(TITLE))
    if settings.num_draft_tokens:
        unsaid.append(f"{settings.num_draft_tokens} draft tokens by {settings.draft}: see speculative_config")
    if settings.lora_rank:
        unsaid.append(
            f"{settings.max_loras} LoRA adapters of rank {settings.lora_rank} a GPU: see lora_config"
        )
    if settings.kv_cache_bytes:
        unsaid.append(
            f"{settings.kv_cache_bytes / GIB:g} GiB of KV cache: see max_gpu_total_bytes of kv_cache_config"
        )
    if settings.role:
        unsaid.append(f"the {settings.role}-only role: see trtllm-serve disaggregated")
    return Command(
        ("trtllm-serve", "serve"), arguments, "--extra_llm_api_options", config, unsaid=tuple(unsaid)
    )


def _graph_batch(settings: LaunchSettings) -> int:
    """Return the decodes of the largest CUDA graph: the running requests, rounded up to a power of two."""
    running = min(max(settings.running, _LEAST_GRAPH), settings.max_num_seqs)
    return min(1 << (running - 1).bit_length(), settings.max_num_seqs)


def benchmark(load: BenchmarkLoad, release: str) -> Command:
    """Return the command that measures one copy of a release."""
    own = load.isl - load.prefix_tokens
    prefix = [("--random-prefix-len", str(load.prefix_tokens))] if load.prefix_tokens else []
    return Command(
        ("python3", "-m", "tensorrt_llm.serve.scripts.benchmark_serving"),
        (
            ("--backend", "openai"),
            ("--base-url", f"http://127.0.0.1:{load.port}"),
            ("--model", load.model),
            ("--dataset-name", "random"),
            ("--random-ids",),
            ("--tokenize-on-client",),
            ("--random-input-len", str(own)),
            *prefix,
            ("--random-output-len", str(load.osl)),
            ("--ignore-eos",),
            load.load,
            ("--num-prompts", str(load.prompts)),
            ("--percentile-metrics", "ttft,tpot,itl,e2el"),
        ),
    )
