"""Columns and objectives of sweeps over deployments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastroof.columns import Column
from fastroof.config import load_gpu
from fastroof.sweep.units import EXECUTION, GPU, MODEL, SPLIT, WEIGHT_BYTES

RATES: Final = ("tokens_per_s_per_gpu", "tokens_per_s_per_user")
OBJECTIVES: Final = (*RATES, "cost", "goodput", "energy")
"""In the order of the compiled loops' codes; they maximize tokens/s for those that they do not know."""

MINIMIZED: Final = ("cost", "energy")
"""Objectives of which less is better."""

JOULES: Final = Column(
    "joules_per_token", "float", "J", "energy of all GPUs per output token, idle time too", 0
)
"""The column that results have with the objective ``energy``."""

OBJECTIVE_COLUMNS: Final = {
    "cost": "cost_per_million_tokens",
    "goodput": "tokens_per_s",
    "energy": JOULES.name,
}
"""Columns of the objectives that are not columns themselves."""


def energy_problems(
    modes: Sequence[str], gpus: Sequence[str], has_drafts: bool, has_histogram: bool
) -> list[str]:
    """Return why the objective ``energy`` does not go with a spec's other keys."""
    unknown = [gpu for gpu in gpus if not load_gpu(gpu).tdp_w]
    problems = {
        "objective: 'energy' needs mode 'aggregated', whose steps it is estimated from": (
            "disaggregated" in modes
        ),
        "objective: 'energy' does not go with speculation: the power of drafts is unknown": has_drafts,
        "histogram: values of the objective 'energy' are not counted": has_histogram,
        f"objective: 'energy' needs [power] in the gpu.toml of {', '.join(unknown)}": bool(unknown),
    }
    return [problem for problem, applies in problems.items() if applies]


COLUMNS: Final = (
    MODEL,
    GPU,
    Column("mode", "text", "", "aggregated: replicas prefill and decode; disaggregated: separate workers"),
    Column("tp", "int", "GPUs", "tensor-parallel size of a replica or worker"),
    *SPLIT,
    Column("replicas", "int", "", "replicas that share the load evenly; 0 if disaggregated", 0),
    Column("total_gpus", "int", "GPUs", "GPUs of the whole deployment"),
    *EXECUTION,
    Column("isl", "int", "tokens", "tokens per prompt"),
    Column("osl", "int", "tokens", "tokens per output"),
    Column(
        "clients",
        "float",
        "",
        "clients of the whole deployment; if a rate was given, those that produce it",
    ),
    Column("request_rate_per_s", "float", "1/s", "requested rate; empty if clients were given"),
    Column("max_num_batched_tokens", "int", "tokens", "max tokens per step"),
    Column("max_num_seqs", "int", "", "max concurrent requests per replica or worker"),
    Column("prefix_hit", "float", "", "share of a prompt found in the prefix cache", 0),
    Column(
        "num_draft_tokens", "int", "tokens", "draft tokens per request and step; 0 without speculation", 0
    ),
    Column("accepted", "float", "tokens", "mean tokens accepted per request and step"),
    Column("draft", "text", "", "drafter: a model, mtp, or none (no cost); empty without speculation"),
    Column("prefill_workers", "int", "", "workers that only prefill; 0 if aggregated", 0),
    Column("decode_workers", "int", "", "workers that only decode; 0 if aggregated", 0),
    Column("ttft_ms", "float", "ms", "mean time to first token"),
    Column("tpot_ms", "float", "ms", "mean time per output token after the first; empty if osl is 1"),
    Column("itl_ms", "float", "ms", "mean inter-token latency; equals tpot_ms"),
    Column("request_latency_ms", "float", "ms", "ttft_ms + tpot_ms * (osl - 1)"),
    Column("tokens_per_s", "float", "tokens/s", "output rate of the whole deployment"),
    Column("tokens_per_s_per_gpu", "float", "tokens/s", "tokens_per_s / total_gpus"),
    Column(
        "tokens_per_s_per_user", "float", "tokens/s", "output rate per client after the first token: 1 / tpot"
    ),
    Column("requests_per_s", "float", "1/s", "request rate of the whole deployment"),
    Column("cost_per_million_tokens", "float", "", "price per million output tokens; empty without a price"),
    Column("effective_concurrency", "float", "", "mean number of running requests", 0),
    Column("decode_step_ms", "float", "ms", "mean decode-only step; 0 without any", 0),
    Column("mixed_step_ms", "float", "ms", "mean mixed step (decodes and prompts); 0 without any", 0),
    Column("mixed_share", "float", "", "share of mixed steps among the steps of a decoding request", 0),
    Column("wait_ms", "float", "ms", "part of ttft_ms spent waiting for KV room or for a prefill worker", 0),
    Column("kv_share", "float", "", "share of the KV cache in use, on a replica or decode worker", 0),
    WEIGHT_BYTES,
    Column("max_kv_tokens", "int", "tokens", "KV tokens that fit next to the weights of a replica or worker"),
    Column(
        "bound",
        "text",
        "",
        "what bounds most of the mean step's time: compute, memory, launch, communication or host",
    ),
    Column(
        "relative_error",
        "float",
        "",
        "standard error / decode_step_ms (80 % are within 1.28 standard errors); empty if "
        "unknown, as with draft tokens",
        0,
    ),
    Column(
        "exceeds", "text", "", "first limit exceeded: ttft, tpot, request_latency, kv_share or total_gpus"
    ),
    Column("origin", "text", "", "origin of the mean decode step's time: measured to modelled"),
)
"""Columns of the results: one row per deployment and load."""


def columns_of(objective: str) -> tuple[Column, ...]:
    """Return the columns of a sweep's results: of the objective ``energy``, or its column, also joules."""
    return (*COLUMNS, JOULES) if objective in ("energy", JOULES.name) else COLUMNS
