"""Answers about deployments: the best ones, the largest rates within limits, and whether engines start."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, Final

import numpy as np

from tests.frozen import product
from tests.frozen.answers import Answers

LLAMA: Final = {"model": "llama-3.1-8b", "total_gpus": 1, "isl": 1000, "osl": 100}
TWO: Final = {**LLAMA, "total_gpus": 2, "ttft_ms": 300, "tpot_ms": 15}
LARGE: Final = {"model": "llama-3.1-70b", "total_gpus": 8, "isl": 2000, "osl": 300, "max_num_seqs": 256}
EXPERTS: Final = {"model": "qwen3-30b-a3b", "total_gpus": 2, "isl": 1500, "osl": 200, "max_num_seqs": 128}
# whose percentiles take fewer simulated steps
SHORT: Final = {**LLAMA, "osl": 25, "max_num_seqs": 64}
SHORT_TWO: Final = {**TWO, "osl": 25}
MEANS: Final = {"percentile": None}
FREE: Final = {"ttft_ms": np.inf, "tpot_ms": np.inf}
ONE_MODE: Final = {"mode": "aggregated", "max_num_batched_tokens": 8192}
APART: Final = {"mode": "disaggregated", "max_num_seqs": 64, "max_num_batched_tokens": 8192}

BEST: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "means": {
        "one GPU": {**LLAMA, **MEANS},
        "limits by default": {**LLAMA, **MEANS, "ttft_ms": None, "tpot_ms": None},
        "one GPU within both limits": {**LLAMA, **MEANS, "ttft_ms": 200, "tpot_ms": 10},
        "whole requests": {**LLAMA, **MEANS, "request_latency_ms": 1200},
        "between tokens": {**LLAMA, **MEANS, "itl_ms": 12},
        "two GPUs": {**TWO, **MEANS, **ONE_MODE},
        "no limit": {**LLAMA, **MEANS, **ONE_MODE, "total_gpus": 4},
        "limits that nothing keeps": {**LLAMA, **MEANS, **ONE_MODE, "ttft_ms": 1, "tpot_ms": 1},
        "a model that does not fit": {**LLAMA, **MEANS, **ONE_MODE, "model": "llama-3.1-70b"},
    },
    "means-of-options": {
        "formats": {**LLAMA, **MEANS, **ONE_MODE, "dtype": ["bf16", "fp8"], "kv_dtype": ["bf16", "fp8"]},
        "engines": {**LLAMA, **MEANS, "max_num_seqs": 128, "tpot_ms": 20,
                    "engine": ["vllm", "sglang", "trtllm-1.1"]},
        "prices": {**LLAMA, **MEANS, **ONE_MODE, "gpu": ["h100", "h200"], "tpot_ms": 20,
                   "gpu_hour_price": {"h100": 2.0, "h200": 2.9}},
        "the fastest": {**TWO, **MEANS, **ONE_MODE, "objective": "tokens_per_s_per_user"},
        "energy": {**LLAMA, **MEANS, **ONE_MODE, "objective": "energy", "max_num_seqs": 64},
        "prefixes": {**LLAMA, **MEANS, **ONE_MODE, "prefix_hit": 0.5, "ttft_ms": 150},
        "adapters": {**LLAMA, **MEANS, **ONE_MODE, "lora": "16:4", "tpot_ms": 15},
        "no front end": {**LLAMA, **MEANS, **ONE_MODE, "front_end": 0.0, "ttft_ms": 60},
        "from the datasheet": {**LLAMA, **MEANS, **ONE_MODE, "gpu": "l40s", "tables": "datasheet"},
    },
    "means-of-layouts": {
        "eight GPUs": {**LARGE, **MEANS, **ONE_MODE, "tpot_ms": 40},
        "eight GPUs in pairs": {**LARGE, **MEANS, **ONE_MODE, "dtype": "fp8", "most_gpus_each": 2},
        "two nodes": {**LARGE, **MEANS, **ONE_MODE, "total_gpus": 16, "tpot_ms": 60},
        "three GPUs": {**LLAMA, **MEANS, **ONE_MODE, "total_gpus": 3, "tpot_ms": 12},
        "workers apart": {**TWO, **MEANS, **APART},
        "either": {**TWO, **MEANS, "max_num_seqs": 64, "max_num_batched_tokens": 4096},
    },
    "means-of-experts": {
        "experts": {**EXPERTS, **MEANS, **ONE_MODE, "tpot_ms": 15},
        "experts of SGLang": {**EXPERTS, **MEANS, **ONE_MODE, "engine": "sglang", "total_gpus": 4},
        "shared experts": {**EXPERTS, **MEANS, **ONE_MODE, "model": "deepseek-v3", "gpu": "h200",
                           "total_gpus": 8, "max_num_seqs": 64, "most_gpus_each": 8},
        "experts of several": {**EXPERTS, **MEANS, **ONE_MODE, "model": ["qwen3-30b-a3b", "gpt-oss-20b"],
                               "total_gpus": 1},
    },
    "percentiles": {
        "p99": {**SHORT, **ONE_MODE, "requests": 400, "ttft_ms": 300, "tpot_ms": 15},
        "p90 of whole requests": {**SHORT, **ONE_MODE, "requests": 400, "percentile": 90.0,
                                  "request_latency_ms": 600},
        "p50 between tokens": {**SHORT, **ONE_MODE, "requests": 300, "percentile": 50.0, "itl_ms": 12},
        "SGLang": {**SHORT, **ONE_MODE, "requests": 300, "tpot_ms": 20, "ttft_ms": 500, "engine": "sglang"},
        "limits that nothing keeps": {**SHORT, **ONE_MODE, "requests": 300, "ttft_ms": 1},
        "no limit": {**SHORT, **ONE_MODE, "requests": 300},
        "another seed": {**SHORT, **ONE_MODE, "requests": 300, "ttft_ms": 300, "seed": 9, "runners_up": 0},
    },
    "percentiles-of-layouts": {
        "workers apart": {**SHORT_TWO, **APART, "requests": 200},
        "experts": {**EXPERTS, **ONE_MODE, "osl": 40, "requests": 100, "tpot_ms": 15, "ttft_ms": 800,
                    "runners_up": 1, "most_gpus_each": 1},
        "prefixes": {**SHORT, **ONE_MODE, "requests": 300, "prefix_hit": 0.5, "ttft_ms": 150},
        "prices": {**SHORT, **ONE_MODE, "requests": 200, "gpu": "h200", "tpot_ms": 12, "gpu_hour_price": 2.0},
    },
}  # fmt: skip
RATE: Final = {
    "models": ["llama-3.1-8b"], "tp": [1, 2], "isl": 1000, "osl": 100, "total_gpus": 2,
    "constraints": {"ttft_ms": 400, "tpot_ms": 20}, "per": ["model", "request_rate_per_s"],
}  # fmt: skip
RATES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "by means": ({**RATE, "rate": [2.0, 30.0]}, {"percentile": None}),
    "within p99": ({**RATE, "osl": 25, "rate": [5.0]}, {"percentile": 99.0, "requests": 200}),
}
"""Specs of rates instead of clients, each of which has its own answer, and how they are ranked."""

SHARED: Final = {
    "total_gpus": 2,
    "ttft_ms": np.inf,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "mode": "aggregated",
    "traffic": [
        {"model": "llama-3.1-8b", "isl": 1000, "osl": 100, "requests_per_s": 20, "tpot_ms": 15},
        {"model": "qwen3-32b", "isl": 500, "osl": 200, "requests_per_s": 2, "tpot_ms": 40, "dtype": "fp8"},
    ],
}


def _recommended(answers: Answers, named: str, found: Any) -> None:
    """Keep ranked deployments with their reasons, and the commands of the best."""
    for place, (answer, deployment) in enumerate(zip(found.answers.answers, found.deployments, strict=True)):
        case = f"{named}: answer {place}"
        kept = answer._asdict()
        choices, nearest, families = (kept.pop(name) for name in ("choices", "nearest", "families"))
        answers.document(case, kept, without=("why_mean",))
        answers.text(case, "why mean", str(bool(answer.why_mean)))
        for rank, choice in enumerate(choices):
            reasons = choice._asdict() | {"margins": {m.name: m._asdict() for m in choice.margins}}
            reasons["percentile"] = choice.percentile and choice.percentile._asdict()
            answers.document(f"{case}, rank {rank}", reasons, without=("why_not", "name"))
        if nearest is not None:
            answers.document(f"{case}, nearest", nearest._asdict())
        gains = {family.family: family.gain for family in families}
        answers.document(case, {"gains": gains, "configurations": found.answers.configurations})
        if deployment is not None:
            commands = {role: command.shell() for role, command in deployment.servers.items()}
            answers.document(
                case, {"commands": commands, "price": deployment.price and deployment.price._asdict()}
            )
    answers.document(f"{named}: all", {"would fit": found.would_fit, "skipped": len(found.answers.skipped)})


def best(group: str, named: str) -> Answers:
    """The best deployments: means of dense models exact; rates within percentiles, and experts, close."""
    question = BEST[group][named]
    answers = Answers(is_exact=question.get("percentile", 0) is None and group != "means-of-experts")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the datasheet model warns of itself
            found = product.recommend(**FREE | question)
        _recommended(answers, named, found)
    except product.FastroofError as error:
        answers.text(f"{named}: no answer", "error", type(error).__name__)
    return answers


def best_at_rates(named: str) -> Answers:
    """The best deployments for given rates of requests, by means and by percentiles."""
    answers = Answers(is_exact=False)
    spec, ranking = RATES[named]
    _recommended(answers, named, product.recommend_for_spec(spec, **ranking))
    return answers


def shared_gpus() -> Answers:
    """GPUs that models share, each with its own traffic."""
    answers = Answers(is_exact=False)
    found = product.recommend_shared(SHARED, percentile=None)
    answers.document(
        "shared: all", {name: getattr(found, name) for name in ("scale", "questions", "needed_gpus")}
    )
    for share in found.shares:
        case = f"shared: {share.traffic.model}"
        answers.document(
            case, {name: getattr(share, name) for name in ("gpus", "requests_per_s", "needed_gpus")}
        )
        if share.recommendation is not None:
            _recommended(answers, case, share.recommendation)
    return answers


CHAT: Final = {"rate": 10, "requests": 150, "isl": 1000, "osl": 100}
MIXED: Final = {**CHAT, "isl": "lognormal:1200:0.8", "osl": "lognormal:150:0.7"}
TURNS: Final = {**CHAT, "turns": 4, "think_s": 2.0, "growth_tokens": 150}
PLAN: Final = {"model": "llama-3.1-8b", "engine": "vllm"}
SGLANG: Final = {**PLAN, "engine": "sglang"}
MOE: Final = {"model": "qwen3-30b-a3b", "engine": "vllm"}
ALL: Final = {"steady": False}

# a plan, its workload, and limits with other options
CAPACITIES: Final[dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "first tokens": (PLAN, CHAT, {**ALL, "ttft_p99_ms": 400}),
    "tokens": (PLAN, CHAT, {**ALL, "tpot_p99_ms": 15}),
    "gaps": (PLAN, CHAT, {**ALL, "itl_p99_ms": 40}),
    "whole requests": (PLAN, MIXED, {**ALL, "e2e_p90_ms": 2500}),
    "several limits": (PLAN, MIXED, {**ALL, "ttft_p90_ms": 500, "tpot_p50_ms": 12, "e2e_p99_ms": 9000}),
    "uneven percentiles": (PLAN, MIXED, {**ALL, "ttft_p99_9_ms": 800, "tpot_p95_ms": 20}),
    "goodput": (PLAN, MIXED, {**ALL, "goodput": 0.95, "ttft_ms": 500, "tpot_ms": 20}),
    "no limit that binds": (PLAN, CHAT, {**ALL, "ttft_p99_ms": 1e9}),
    "no rate": (PLAN, CHAT, {**ALL, "tpot_p99_ms": 1}),
    "loose tolerance": (PLAN, MIXED, {**ALL, "ttft_p99_ms": 400, "tolerance": 0.2}),
    "tight tolerance": (PLAN, MIXED, {**ALL, "ttft_p99_ms": 400, "tolerance": 0.001}),
    "no range": (PLAN, MIXED, {**ALL, "ttft_p99_ms": 400, "with_range": False}),
    "draws": (PLAN, MIXED, {**ALL, "ttft_p99_ms": 400, "draws": 4}),
    "even arrivals": (PLAN, {**MIXED, "burstiness": 4.0}, {**ALL, "ttft_p99_ms": 400}),
    "ramp": (PLAN, {"ramp": (5, 20), "requests": 150, "isl": 800}, {**ALL, "ttft_p99_ms": 600}),
    "cached prompts": (PLAN, {**MIXED, "cached_tokens": "share:0.5"}, {**ALL, "ttft_p99_ms": 300}),
    "replicas": (PLAN, MIXED, {**ALL, "replicas": 3, "ttft_p99_ms": 400}),
    "routed replicas": (
        PLAN,
        MIXED,
        {**ALL, "replicas": 3, "router": "least_outstanding", "ttft_p99_ms": 400},
    ),
    "few blocks": (PLAN, MIXED, {**ALL, "num_gpu_blocks": 1000, "ttft_p99_ms": 2000, "max_num_seqs": 64}),
    "small steps": (
        {**PLAN, "engine": "vllm-0.12.0"},
        MIXED,
        {**ALL, "max_num_batched_tokens": 512, "async_scheduling": True, "tpot_p99_ms": 20},
    ),
    "time-outs": (PLAN, MIXED, {**ALL, "timeout_s": 3.0, "goodput": 0.9, "ttft_ms": 700}),
    "SGLang": (SGLANG, MIXED, {**ALL, "ttft_p99_ms": 500, "tpot_p90_ms": 25}),
    "SGLang, paused prompts": (SGLANG, MIXED, {**ALL, "prefill_decode_interval": 4, "tpot_p99_ms": 25}),
    "TensorRT-LLM": ({**PLAN, "engine": "trtllm-1.0", "dtype": "fp8"}, CHAT, {**ALL, "ttft_p99_ms": 500}),
    "stages": ({**PLAN, "pp": 2}, MIXED, {**ALL, "ttft_p99_ms": 600}),
    "ranks": ({**MOE, "dp": 2, "ep": 2}, CHAT, {**ALL, "tpot_p99_ms": 25}),
    "sessions": (PLAN, TURNS, {**ALL, "ttft_p99_ms": 300}),
    "tiers": (
        PLAN,
        TURNS,
        {
            **ALL,
            "ttft_p99_ms": 500,
            "num_gpu_blocks": 1200,
            "prefix_cache": "lru",
            "kv_tiers": "host:4GB:20GB/s",
        },
    ),
    "steady": (
        PLAN,
        {**CHAT, "osl": 20},
        {"ttft_p99_ms": 300, "with_range": False, "tolerance": 0.1},
    ),
    "steady sessions": (
        PLAN,
        {**TURNS, "osl": 20, "think_s": 0.2},
        {"ttft_p99_ms": 300, "with_range": False, "tolerance": 0.2},
    ),
}


@cache
def _plan(**given: Any) -> product.StepPlan:
    return product.compile_plan(given.pop("model"), "h100", product.h100_tables(), **given)


def capacities(named: str) -> Answers:
    """The largest rate within limits; runs of one standard error, and experts, go through exponentials."""
    answers = Answers(is_exact=False)
    plan, load, options = CAPACITIES[named]
    case = f"{named}: capacity"
    try:
        found = product.capacity(_plan(**plan), product.Workload(**load), **options).document()
    except product.FastroofError as error:
        answers.text(case, "error", type(error).__name__)
        return answers
    tried = found.pop("simulated")
    answers.document(case, found, without=("basis",))
    for name in ("requests_per_s", "holds", "served_per_s", "growth"):
        values = np.array([row[name] for row in tried], np.float64)
        answers.many(case, f"tried, {name}", np.nan_to_num(values, nan=-1.0, posinf=-2.0))
    return answers


WORDS: Final = ("version", "reason", "remedy", "source", "engine_title", "unsaid")
"""How sure an answer is."""

ENGINES: Final = ("vllm", "vllm-0.12.0", "vllm-0.24.0", "sglang", "trtllm-1.0", "trtllm-1.1")
FITS: Final[dict[str, list[tuple[str, str, dict[str, Any]]]]] = {
    "engines": [
        (model, "h100", {"engine": engine, "tp": tp})
        for model, tp in (("llama-3.1-8b", 1), ("llama-3.1-70b", 2), ("llama-3.1-70b", 4))
        for engine in ENGINES
    ],
    "experts": [
        *(
            (model, gpu, {"engine": engine, "tp": 8})
            for model, gpu in (("deepseek-v3", "h200"), ("qwen3-235b-a22b", "h100"), ("kimi-k2.5", "h200"))
            for engine in ("vllm", "sglang")
        ),
        ("qwen3-30b-a3b", "h100", {"dp": 4, "ep": 4}),
        ("qwen3-30b-a3b", "h100", {"tp": 2, "ep": 2, "dtype": "fp8", "engine": "sglang"}),
        ("qwen3-next-80b-a3b", "h100", {"tp": 4, "prefix_caching": True}),
        ("qwen3.5-35b-a3b", "h100", {"max_num_seqs": 1024, "prefix_caching": True}),
        ("deepseek-v3", "h200", {"tp": 8, "num_draft_tokens": 1, "draft": "mtp", "engine": "sglang"}),
        ("deepseek-v3", "h200", {"tp": 1, "dp": 8, "ep": 8}),
        ("nemotron-3-nano-30b-a3b", "h100", {"engine": "trtllm-1.1"}),
    ],
    "GPUs": [
        *(
            (model, gpu, {"engine": "vllm"})
            for model in ("qwen3-32b", "gpt-oss-20b", "qwen3.5-35b-a3b")
            for gpu in ("a100", "l40s", "b200", "rtx_4090")
        ),
        ("qwen2.5-vl-7b", "a10", {}),
        ("llama-3.1-8b", "mi300x", {}),
    ],
    "limits": [
        ("llama-3.1-8b", "h100", given)
        for given in (
            {"max_model_len": 4096},
            {"max_num_seqs": 4096},
            {"max_num_seqs": 512, "max_num_batched_tokens": 2048},
            {"max_num_batched_tokens": 65_536, "memory_fraction": 0.5},
            {"kv_dtype": "fp8", "dtype": "fp8"},
            {"memory_fraction": 0.98},
            {"memory_fraction": 0.2},
            {"kv_cache_gib": 10.0},
            {"free_gib": 40.0},
            {"lora": "64:8"},
            {"pp": 4},
            {"dp": 2, "engine": "sglang"},
            {"num_draft_tokens": 3},
            {"engine": "sglang", "memory_fraction": 0.7},
            {"engine": "kernels"},
        )
    ],
}


def fits(kind: str) -> Answers:
    """Whether engines start, with how much memory, and by which commands: in whole bytes."""
    answers = Answers()
    for model, gpu, given in FITS[kind]:
        case = f"{kind}: {model} on {gpu}, {', '.join(f'{name}={value}' for name, value in given.items())}"
        try:
            found = product.fit(model, gpu, **given).document()
        except product.FastroofError as error:
            answers.text(case, "error", type(error).__name__)
            continue
        answers.document(case, found, without=WORDS)
    return answers
