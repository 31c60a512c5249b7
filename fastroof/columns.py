"""Names, units and dtypes of every table and result column, in one place.

A measured table is tidy: one row a measured point. ``keys`` name the kernel (a table of one key is
packed together), ``axes`` are the sizes that are interpolated along, ``latency_us`` is the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "DEPLOYMENT_COLUMNS",
    "MEASURED_STEP_COLUMNS",
    "ORIGINS",
    "ORIGIN_BORROWED",
    "ORIGIN_EXTRAPOLATED",
    "ORIGIN_INTERPOLATED",
    "ORIGIN_MEASURED",
    "ORIGIN_MODELLED",
    "SPREAD_COLUMNS",
    "STEP_COLUMNS",
    "SWEEP_COLUMNS",
    "Column",
]

Kind = Literal["int", "float", "text"]


@dataclass(frozen=True)
class Column:
    """One column: its name, how it is stored, its unit and what it means."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    minimum: int = 1
    """Least value of an int column; a float column must be above zero, or at least this if it is 0."""


LATENCY: Final = Column("latency_us", "float", "us", "measured latency of one call")
GPU: Final = Column("gpu", "text", "", "GPU that the row was measured on")
KERNEL: Final = Column("kernel", "text", "", "kernel or library that was measured")
PROVIDER: Final = Column("provider", "text", "", "what launched the kernel")

SPREAD_COLUMNS: Final = (
    Column("p25_us", "float", "us", "first quartile of the replays"),
    Column("p75_us", "float", "us", "third quartile of the replays"),
    Column("min_us", "float", "us", "fastest replay"),
    Column("num_replays", "int", "", "timed replays behind the latency"),
)
RUN_COLUMNS: Final = (
    Column("num_runs", "int", "", "runs whose median the latency is"),
    Column("run_spread", "float", "", "slowest less fastest run, over the median", 0),
)
OPTIONAL_COLUMNS: Final = (GPU, KERNEL, PROVIDER, *SPREAD_COLUMNS, *RUN_COLUMNS)

DTYPE: Final = Column("dtype", "text", "", "dtype of weights and activations: bf16, fp8, fp8_block")
KV_DTYPE: Final = Column("kv_dtype", "text", "", "dtype of the KV cache; attention computes in bf16")

ORIGIN_MEASURED: Final = 0
ORIGIN_INTERPOLATED: Final = 1
ORIGIN_EXTRAPOLATED: Final = 2
ORIGIN_BORROWED: Final = 3
ORIGIN_MODELLED: Final = 4
ORIGINS: Final = ("measured", "interpolated", "extrapolated", "borrowed", "modelled")
"""Meaning of the origin codes 0 to 4; of several parts a result carries the largest."""

STEP_COLUMNS: Final = (
    Column("step", "int", "", "position in the batch", 0),
    Column("num_requests", "int", "", "requests in the step", 0),
    Column("num_tokens", "int", "tokens", "new tokens of all its requests", 0),
    Column("latency_us", "float", "us", "time of the step", 0),
    Column("tokens_us", "float", "us", "per-token operators of all layers", 0),
    Column("logits_us", "float", "us", "LM head over the step's requests", 0),
    Column("decode_attention_us", "float", "us", "decode attention of all layers", 0),
    Column("prefill_attention_us", "float", "us", "prefill attention of all layers", 0),
    Column("runtime_us", "float", "us", "what the engine adds", 0),
    Column("origin", "text", "", "how the latency was made: measured to modelled"),
)
"""Columns of a batch's step times, see :mod:`fastroof.results`."""

MEASURED_STEP_COLUMNS: Final = (
    Column("model", "text", "", "preset or config.json that was run, with random weights"),
    Column("gpu", "text", "", "GPU that it ran on"),
    Column("tp", "int", "GPUs", "tensor-parallel size"),
    Column("dtype", "text", "", "dtype of weights and activations"),
    Column("kv_dtype", "text", "", "dtype of the KV cache"),
    Column("phase", "text", "", "decode, prefill, mixed or unequal"),
    Column("new_tokens", "text", "tokens", "new tokens of each request, as runs: 1x32;2048"),
    Column("context_len", "text", "tokens", "tokens of each request in the cache before the step, as runs"),
    Column("num_requests", "int", "", "requests of the step"),
    Column("num_tokens", "int", "tokens", "new tokens of all requests"),
    Column("latency_us", "float", "us", "median time of the step, replayed as one CUDA graph"),
    *SPREAD_COLUMNS,
    Column("provider", "text", "", "attention and small kernels; GEMMs are torch's"),
)
"""Columns of a steps.csv, a row a measured step; its batches are text, see
:mod:`fastroof.load.steps_file`."""

SWEEP_COLUMNS: Final = (
    Column("model", "text", "", "model"),
    Column("gpu", "text", "", "GPU it runs on"),
    Column("tp", "int", "GPUs", "tensor-parallel size"),
    DTYPE,
    KV_DTYPE,
    Column("runtime", "text", "", "what an engine adds to the sum of its kernels"),
    Column("kv_len", "int", "tokens", "tokens that each request attends to, the new one included"),
    Column("batch_size", "int", "sequences", "decodes in the step; 0 where no batch is within the limits", 0),
    Column("step_us", "float", "us", "time of one decode step, which is the time per output token"),
    Column("tokens_per_s", "float", "tokens/s", "output tokens of all requests, on all tp GPUs"),
    Column("tokens_per_s_per_gpu", "float", "tokens/s", "tokens_per_s / tp"),
    Column(
        "limited_by",
        "text",
        "",
        "what stops the next larger batch (the smallest, where batch_size is 0): memory, tpot, throughput "
        "(it fits and gives fewer tokens/s) or batch grid (there is none)",
    ),
    Column("exceeds", "text", "", "limit that the step breaks: memory or tpot; empty where it keeps both"),
    Column("origin", "text", "", "how the step's latency was made: measured to modelled"),
    Column(
        "relative_error",
        "float",
        "",
        "standard error of the step's time over it (80 % are within 1.28 of them); empty where not asked for",
        0,
    ),
    Column("weight_bytes", "int", "B", "weights on one GPU"),
    Column("max_kv_tokens", "int", "tokens", "KV tokens that fit on one GPU beside the weights"),
)
"""Columns of a sweep's results: ``limited_by`` where the best steps are kept, ``exceeds`` where all are."""

DEPLOYMENT_COLUMNS: Final = (
    Column("model", "text", "", "model"),
    Column("gpu", "text", "", "GPU it runs on"),
    Column(
        "mode", "text", "", "aggregated: replicas do everything; disaggregated: workers prefill or decode"
    ),
    Column("tp", "int", "GPUs", "tensor-parallel size of a replica or worker"),
    Column("replicas", "int", "", "replicas that share the load evenly; 0 where disaggregated", 0),
    Column("total_gpus", "int", "GPUs", "GPUs of the whole deployment"),
    DTYPE,
    KV_DTYPE,
    Column("runtime", "text", "", "what an engine adds to the sum of its kernels"),
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
    Column("weight_bytes", "int", "B", "weights on one GPU"),
    Column("max_kv_tokens", "int", "tokens", "KV tokens that fit beside the weights of a replica or worker"),
    Column(
        "bound",
        "text",
        "",
        "what most of the mean step's time is bound by: compute, memory, launch, communication or host",
    ),
    Column(
        "relative_error", "float", "", "relative standard error of decode_step_ms; empty where unknown", 0
    ),
    Column(
        "exceeds", "text", "", "first limit exceeded: ttft, tpot, request_latency, kv_share or total_gpus"
    ),
    Column("origin", "text", "", "how the mean steps' times were made: measured to modelled"),
)
"""Columns of a deployment sweep's results: a row a deployment under one load, see :mod:`fastroof.sweep`."""
