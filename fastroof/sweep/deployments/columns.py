"""Columns of the results of a sweep over deployments."""

from __future__ import annotations

from typing import Final

from fastroof.columns import DTYPE, KV_DTYPE, Column
from fastroof.sweep.columns import GPU, KERNELS, MODEL, RUNTIME, SPLIT, WEIGHT_BYTES

__all__ = ["COLUMNS"]

COLUMNS: Final = (
    MODEL,
    GPU,
    Column(
        "mode", "text", "", "aggregated: replicas do everything; disaggregated: workers prefill or decode"
    ),
    Column("tp", "int", "GPUs", "tensor-parallel size of a replica or worker"),
    *SPLIT,
    Column("replicas", "int", "", "replicas that share the load evenly; 0 where disaggregated", 0),
    Column("total_gpus", "int", "GPUs", "GPUs of the whole deployment"),
    DTYPE,
    KV_DTYPE,
    RUNTIME,
    KERNELS,
    Column("isl", "int", "tokens", "tokens of a prompt"),
    Column("osl", "int", "tokens", "tokens of an output"),
    Column(
        "concurrency",
        "float",
        "",
        "clients of the whole deployment; those that make the rate, if one was given",
    ),
    Column("request_rate_per_s", "float", "1/s", "rate that was asked for; empty where concurrency was"),
    Column("max_batched_tokens", "int", "tokens", "tokens that a step holds at most"),
    Column("prefix_hit", "float", "", "share of a prompt that is found in the prefix cache", 0),
    Column(
        "num_draft_tokens", "int", "tokens", "tokens that a request verifies beside its own; 0 without", 0
    ),
    Column("accepted", "float", "tokens", "tokens that a step says of a request, in the mean"),
    Column("draft", "text", "", "what drafts: a model, mtp, or none at no cost; empty without speculation"),
    Column("prefill_workers", "int", "", "workers that only prefill; 0 where aggregated", 0),
    Column("decode_workers", "int", "", "workers that only decode; 0 where aggregated", 0),
    Column("ttft_ms", "float", "ms", "mean time to first token"),
    Column("tpot_ms", "float", "ms", "mean time per output token after the first; empty where osl is 1"),
    Column("itl_ms", "float", "ms", "mean time between two tokens: the same mean"),
    Column("request_latency_ms", "float", "ms", "ttft_ms + tpot_ms * (osl - 1)"),
    Column("tokens_per_s", "float", "tokens/s", "output tokens of the whole deployment"),
    Column("tokens_per_s_per_gpu", "float", "tokens/s", "tokens_per_s / total_gpus"),
    Column(
        "tokens_per_s_per_user", "float", "tokens/s", "what one client sees after its first token: 1 / tpot"
    ),
    Column("requests_per_s", "float", "1/s", "requests that the whole deployment answers"),
    Column("cost_per_million_tokens", "float", "", "price of a million output tokens; empty without a price"),
    Column("effective_concurrency", "float", "", "requests that run at once, of those of concurrency", 0),
    Column("decode_step_ms", "float", "ms", "mean step of decodes alone; 0 where there is none", 0),
    Column("mixed_step_ms", "float", "ms", "mean step of decodes and prompts; 0 where there is none", 0),
    Column(
        "mixed_share", "float", "", "share of the steps that hold prompts, as a decoding request sees them", 0
    ),
    Column(
        "wait_ms", "float", "ms", "share of ttft_ms that is waiting: for room, or for a prefill worker", 0
    ),
    Column("kv_share", "float", "", "share of the KV cache's room in use, on a replica or decode worker", 0),
    WEIGHT_BYTES,
    Column("max_kv_tokens", "int", "tokens", "KV tokens that fit beside the weights of a replica or worker"),
    Column(
        "bound",
        "text",
        "",
        "what most of the mean step's time is bound by: compute, memory, launch, communication or host",
    ),
    Column(
        "relative_error",
        "float",
        "",
        "standard error of decode_step_ms over it (80 % are within 1.28 of them); empty where "
        "unknown, as with draft tokens",
        0,
    ),
    Column(
        "exceeds", "text", "", "first limit exceeded: ttft, tpot, request_latency, kv_share or total_gpus"
    ),
    Column("origin", "text", "", "how the mean steps' times were made: measured to modelled"),
)
"""A row a deployment under one load."""
