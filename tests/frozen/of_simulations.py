"""What simulations answer: twenty workloads through every way in which requests are served."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from tests.frozen import product
from tests.frozen.answers import Answers

CHAT: Final = {"isl": "lognormal:1200:0.8", "osl": "lognormal:150:0.7"}
DRAWN: Final[dict[str, dict[str, Any]]] = {
    "constant": {"rate": 8, "arrivals": "constant", "requests": 60, "isl": 1000},
    "poisson": {"rate": 15, "requests": 120, **CHAT},
    "bursty": {"rate": 10, "requests": 100, "burstiness": 0.3, "seed": 1, **CHAT},
    "even": {"rate": 20, "requests": 100, "burstiness": 4.0, "seed": 2, "osl": "uniform:2:200"},
    "overload": {"rate": 150, "requests": 150, "isl": "uniform:500:6000", "osl": 120},
    "at once": {"rate": 1e6, "requests": 80, "seed": 3, **CHAT},
    "ramp": {"ramp": (1, 40, 1), "requests": 120, "burstiness": 2.0, **CHAT},
    "hourly": {"hourly": (0.004, 0.02, 0.0, 0.01), "requests": 122, "osl": "uniform:1:300"},
    "long prompts": {"rate": 0.7, "requests": 40, "isl": "uniform:6000:60000", "osl": 50},
    "long outputs": {"rate": 6, "requests": 60, "isl": "uniform:1:50",
                     "osl": "uniform:400:1500"},
    "one token": {"rate": 40, "requests": 120, "isl": "uniform:1:4000", "osl": 1},
    "cached share": {"rate": 20, "requests": 100, "cached_tokens": "share:0.6", **CHAT},
    "cached lengths": {"rate": 12, "requests": 80, "cached_tokens": "uniform:0:900", "isl": 1500},
    "closed loop": {"clients": 8, "requests": 80, **CHAT},
    "closed loop, thinking": {"clients": 30, "think_s": 0.5, "requests": 90, "seed": 4, **CHAT},
    "turns": {"rate": 3, "requests": 100, "turns": 4, "think_s": "exponential:2", "isl": 900,
              "growth_tokens": "uniform:50:300", "osl": "uniform:20:200"},
    "agents": {"rate": 1.5, "requests": 90, "turns": "uniform:1:3", "calls": "uniform:1:5", "tool_s": 0.4,
               "think_s": "uniform:1:5", "system_tokens": 700, "isl": 1500, "growth_tokens": 250,
               "osl": "uniform:10:120", "seed": 5},
}  # fmt: skip
CLOSE: Final = ("bursty",)
"""Workloads whose arrivals go through powers: shapes of gamma distributions below 1."""


def _of_hashes() -> product.Trace:
    """Prompts that share their first blocks with others, in a tree of three levels."""
    draw = random.Random(20)
    arrival_s, prompts, outputs, ids, offsets, at_s = [], [], [], [], [0], 0.0
    for request in range(120):
        at_s += draw.uniform(0.0, 0.2)
        branch, leaf = draw.randrange(3), draw.randrange(4)
        blocks = [*range(6), *(100 + 10 * branch + i for i in range(5))]
        blocks += [1000 + 100 * branch + 10 * leaf + i for i in range(draw.randrange(7))]
        blocks += [10_000 + 20 * request + i for i in range(draw.randrange(1, 12))]
        blocks = blocks[draw.choice([0, 0, 0, 4]) :] if draw.random() < 0.2 else blocks
        arrival_s.append(at_s)
        prompts.append(64 * len(blocks) - draw.randrange(64))
        outputs.append(draw.randrange(1, 150))
        ids += blocks
        offsets.append(len(ids))
    return product.Trace(
        np.array(arrival_s), np.array(prompts), np.array(outputs), hash_ids=np.array(ids),
        hash_offsets=np.array(offsets), hash_block_size=64, name="hashes",
    )  # fmt: skip


def _of_graphs() -> product.Trace:
    """Agents that call two tools at once and wait for both, thrice."""
    draw = random.Random(21)
    columns: dict[str, list[Any]] = {name: [] for name in ("arrival_s", "input", "output", "delay_s")}
    parents: list[int] = []
    offsets = [0]
    for session in range(12):
        begin = 7 * session
        for place, before in enumerate(((), (0,), (0,), (1, 2), (3,), (3,), (4, 5))):
            parents += [begin + one for one in before]
            offsets.append(len(parents))
            columns["arrival_s"].append(0.3 * session)
            columns["input"].append(400 + 300 * place + draw.randrange(200))
            columns["output"].append(draw.randrange(1, 90))
            columns["delay_s"].append(draw.choice([0.0, 0.25, 1.0]) if before else 0.0)
    return product.Trace(
        np.array(columns["arrival_s"]), np.array(columns["input"]), np.array(columns["output"]),
        parents=np.array(parents), parent_offsets=np.array(offsets), delay_s=np.array(columns["delay_s"]),
        name="graphs",
    )  # fmt: skip


@cache
def workloads() -> dict[str, product.Trace]:
    """Twenty workloads: open, closed, of sessions, with given and with found prefixes."""
    drawn = {name: product.Workload(name=name, **given).trace() for name, given in DRAWN.items()}
    recorded = product.load_trace("example", limit=100, rate_scale=2.0)
    return {**drawn, "recorded": recorded, "hashes": _of_hashes(), "graphs": _of_graphs()}


class Served(NamedTuple):
    """A plan and the arguments of its simulation; of prefill engines too where there are such."""

    plan: dict[str, Any]
    options: dict[str, Any]
    prefill: dict[str, Any] | None = None


MODEL: Final = {"model": "llama-3.1-8b", "engine": "vllm"}
SGLANG: Final = {"model": "llama-3.1-8b", "engine": "sglang"}
TRTLLM: Final = {"model": "qwen3-8b", "engine": "trtllm-1.1", "dtype": "fp8", "kv_dtype": "fp8",
                 "max_num_batched_tokens": 16_384}  # fmt: skip
EXPERTS: Final = {"model": "qwen3-30b-a3b"}
SHARED_EXPERTS: Final = {"model": "deepseek-v3", "gpu": "h200"}
FEW_BLOCKS: Final = {"num_gpu_blocks": 1500, "on_too_long": "reject"}
PARTS: Final = ("p90", "p95")
"""Percentiles between two that are kept: one call makes all of them."""

LIMITS: Final = {"ttft_ms": 1500.0, "tpot_ms": 25.0, "e2e_ms": 15_000.0}

DEPLOYMENTS: Final[dict[str, Served]] = {
    # one engine
    "plain": Served(MODEL, {}),
    "plain-few-blocks": Served(MODEL, {**FEW_BLOCKS, "max_num_seqs": 64}),
    "plain-small-steps": Served(
        {**MODEL, "engine": "vllm-0.12.0", "dtype": "fp8"},
        {"max_num_batched_tokens": 512, "max_num_seqs": 16, "async_scheduling": False, "timeout_s": 6.0},
    ),
    "plain-async": Served(
        {**MODEL, "engine": "vllm-0.12.0", "method": "nearest"},
        {"async_scheduling": True, "admit_whole_prompt": False, "num_gpu_blocks": 4500, "block_size": 32},
    ),
    "plain-paused-prompts": Served(MODEL, {"prefill_schedule_interval": 4, "num_gpu_blocks": 5000}),
    "plain-whole-prompts": Served(
        {**MODEL, "engine": "kernels", "kv_dtype": "fp8"},
        {"chunked_prefill": False, "reserve_output": True, "on_too_long": "reject", "time_scale": 1.25},
    ),
    "plain-lora": Served({**MODEL, "lora": "16:4", "front_end": 0.0}, {}),
    "plain-found-prefixes": Served(MODEL, {**FEW_BLOCKS, "prefix_cache": "lru", "async_scheduling": False}),
    "plain-given-prefixes": Served({**MODEL, "dtype": "fp8"}, {"prefix_cache": "given", "timeout_s": 3.0}),
    "plain-sglang": Served(SGLANG, {}),
    "plain-sglang-paused": Served(
        {**SGLANG, "tp": 2},
        {
            "prefill_decode_interval": 5,
            "min_free_slots_delay": 4,
            "max_num_seqs": 24,
            "num_gpu_blocks": 80_000,
        },
    ),
    "plain-trtllm": Served(TRTLLM, {}),
    "plain-trtllm-old": Served(
        {**MODEL, "engine": "trtllm-1.0"}, {"max_num_seqs": 48, "on_too_long": "reject"}
    ),
    "plain-experts": Served({**EXPERTS, "engine": "vllm", "tp": 2, "ep": 2}, {}),
    "plain-states": Served({"model": "qwen3.5-35b-a3b", "engine": "vllm"}, {"max_num_seqs": 32}),
    # engines behind a router
    "replicas-round-robin": Served(MODEL, {"replicas": 3}),
    "replicas-least-outstanding": Served(MODEL, {"replicas": 3, "router": "least_outstanding"}),
    "replicas-least-load": Served(SGLANG, {"replicas": 4, "router": "least_load", "timeout_s": 5.0}),
    "replicas-least-kv": Served(MODEL, {"replicas": 2, "router": "least_kv", **FEW_BLOCKS}),
    "replicas-power-of-two": Served(TRTLLM, {"replicas": 4, "router": "power_of_two", "seed": 7}),
    "replicas-prefix-aware": Served(
        MODEL, {"replicas": 3, "router": "prefix_aware", "prefix_cache": "lru", **FEW_BLOCKS}
    ),
    # ranks of attention data parallelism
    "ranks-in-lockstep": Served({**EXPERTS, "engine": "sglang", "dp": 2, "ep": 2}, {}),
    "ranks-of-vllm": Served(
        {**EXPERTS, "engine": "vllm", "dp": 4, "ep": 4}, {"replicas": 2, "router": "least_load"}
    ),
    "ranks-shared-experts": Served(
        {**SHARED_EXPERTS, "engine": "sglang", "dp": 8, "ep": 8},
        {"max_num_seqs": 128, "prefix_cache": "auto"},
    ),
    "ranks-balanced": Served(
        {**SHARED_EXPERTS, "engine": "trtllm-1.1", "dp": 8, "ep": 8, "max_num_batched_tokens": 16_384},
        {"max_num_seqs": 64, "timeout_s": 20.0},
    ),
    "ranks-apart": Served({**SGLANG, "dp": 2}, {"num_gpu_blocks": 70_000, "replicas": 2}),
    # pipeline stages
    "stages-2": Served({**MODEL, "pp": 2}, {"prefix_cache": "given"}),
    "stages-4": Served(
        {**MODEL, "engine": "vllm-0.12.0", "pp": 4, "tp": 2}, {"max_num_batched_tokens": 1024}
    ),
    "stages-few-blocks": Served(
        {**MODEL, "pp": 2}, {**FEW_BLOCKS, "timeout_s": 8.0, "async_scheduling": False}
    ),
    "stages-sglang": Served({**SGLANG, "pp": 4}, {"max_num_seqs": 32, "prefix_cache": "given"}),
    # engines that prefill, and engines that decode
    "pools": Served(MODEL, {"decode_replicas": 2}, MODEL),
    "pools-routed": Served(
        {**MODEL, "tp": 2},
        {
            "prefill_replicas": 3,
            "decode_replicas": 2,
            "prefill_router": "least_outstanding",
            "decode_router": "least_kv",
            "link": {"bytes_per_s": 25e9, "latency_us": 100.0},
            "timeout_s": 6.0,
        },
        MODEL,
    ),
    "pools-back-pressure": Served(
        MODEL,
        {
            "prefill_replicas": 2,
            "decode_router": "power_of_two",
            "on_too_long": "reject",
            "decode": {"num_gpu_blocks": 2500, "max_num_seqs": 20},
            "prefill": {"max_num_batched_tokens": 2048},
            "link": {"bytes_per_s": 50e9, "first_token": "decode", "back_pressure": True},
        },
        MODEL,
    ),
    "pools-by-layer": Served(
        SGLANG,
        {
            "prefill_replicas": 2,
            "decode_replicas": 2,
            "prefill_router": "least_load",
            "decode_router": "least_outstanding",
            "link": {"bytes_per_s": 12.5e9, "is_shared": False, "first_token": "prefill", "by_layer": True},
        },
        SGLANG,
    ),
    "pools-prefix-aware": Served(
        {**MODEL, "kv_dtype": "fp8"},
        {
            "prefill_replicas": 2,
            "prefill_router": "prefix_aware",
            "prefix_cache": "lru",
            "prefill": {"num_gpu_blocks": 4500},
            "time_scale": 0.9,
        },
        {**MODEL, "kv_dtype": "fp8", "tp": 2},
    ),
    "pools-of-ranks": Served(
        {**EXPERTS, "engine": "sglang", "dp": 2, "ep": 2},
        {"prefill_replicas": 2},
        {**EXPERTS, "engine": "sglang"},
    ),
    # replicas that come and go
    "autoscaled-queue": Served(
        MODEL,
        {
            "autoscaler": {
                "text": "queue:2",
                "max_replicas": 4,
                "startup_s": 1.5,
                "interval_s": 0.5,
                "scale_down_delay_s": 2.0,
            }
        },
    ),
    "autoscaled-concurrency": Served(
        MODEL,
        {
            "replicas": 2,
            "router": "least_outstanding",
            "max_num_seqs": 16,
            "autoscaler": {
                "text": "concurrency:6",
                "max_replicas": 5,
                "min_replicas": 2,
                "startup_s": 0.7,
                "interval_s": 1.0,
                "scale_down_delay_s": 0.0,
                "tolerance": 0.0,
            },
        },
    ),
    "autoscaled-kv": Served(
        SGLANG,
        {
            "num_gpu_blocks": 60_000,
            "router": "least_kv",
            "prefix_cache": "given",
            "autoscaler": {
                "text": "kv:0.2:0.05",
                "max_replicas": 3,
                "startup_s": 2.0,
                "interval_s": 1.0,
                "scale_down_delay_s": 3.0,
            },
        },
    ),
    "autoscaled-rate": Served(
        TRTLLM,
        {
            "router": "power_of_two",
            "timeout_s": 10.0,
            "seed": 3,
            "autoscaler": {"text": "rate:4", "max_replicas": 6, "startup_s": 0.0, "interval_s": 2.0},
        },
    ),
    # caches below the GPU's
    "tiers-host": Served(MODEL, {**FEW_BLOCKS, "prefix_cache": "lru", "kv_tiers": "vllm-offloading:2GB"}),
    "tiers-hicache": Served(
        SGLANG,
        {
            "num_gpu_blocks": 24_000,
            "on_too_long": "reject",
            "prefix_cache": "lru",
            "kv_tiers": "sglang-hicache",
        },
    ),
    "tiers-lmcache": Served(
        MODEL,
        {
            **FEW_BLOCKS,
            "prefix_cache": "lru",
            "kv_tiers": "lmcache-cpu:1GB,lmcache-disk:20GB:5GB/s:80us",
            "replicas": 2,
            "router": "prefix_aware",
        },
    ),
    "tiers-back-and-through": Served(
        {**MODEL, "engine": "vllm-0.12.0"},
        {
            **FEW_BLOCKS,
            "prefix_cache": "lru",
            "replicas": 2,
            "timeout_s": 8.0,
            "kv_tiers": "host:1GB:20GB/s:30us:write_back,remote:inf:2GB/s:1ms:write_through:wait:prompts",
        },
    ),
    "tiers-of-ranks": Served(
        {**EXPERTS, "engine": "sglang", "dp": 2, "ep": 2},
        {
            "num_gpu_blocks": 12_000,
            "on_too_long": "reject",
            "prefix_cache": "lru",
            "kv_tiers": "mooncake-store:4GB",
        },
    ),
}
"""Parts of groups by driver, the first word of their names."""


@cache
def _plan(**given: Any) -> product.StepPlan:
    gpu = given.pop("gpu", "h100")
    return product.compile_plan(given.pop("model"), gpu, product.tables_of(gpu), **given)


def _simulated(served: Served, trace: product.Trace) -> Any:
    options, plan = dict(served.options), _plan(**served.plan)
    if served.prefill is not None:
        link = product.Link(**options.pop("link", {}))
        return product.simulate_pools((_plan(**served.prefill), plan), trace, link, options)
    if "autoscaler" in options:
        options["autoscaler"] = product.Autoscaler.parsed(**options["autoscaler"])
    return product.simulate(plan, trace, **options)


def _columns(table: Any) -> np.ndarray:
    """Columns of a table as rows of an array: words by their order, nothing as -1."""
    columns = []
    for name in table.column_names:
        values = table[name].to_pylist()
        words = sorted({value for value in values if isinstance(value, str)})
        columns.append([-1 if v is None else words.index(v) if isinstance(v, str) else v for v in values])
    return np.nan_to_num(np.array(columns, np.float64), nan=-1.0)


def simulations(name: str) -> Answers:
    """Every workload through one deployment.

    Times of requests and the series are exact. What NumPy and BLAS sum up of them, runs one standard error
    faster and slower, and models with experts need only be close.
    """
    answers = Answers()
    served = DEPLOYMENTS[name]
    exact = not product.load_model(served.plan["model"]).has_experts
    for workload, trace in workloads().items():
        case = f"{name}: {workload}"
        answers.is_exact = exact and workload not in CLOSE
        try:
            run = _simulated(served, trace)
            answers.many(case, "requests", _columns(run.requests))
            answers.many(case, "series", _columns(run.series()))
            for table in ("sessions",) if trace.has_parents else ():
                answers.many(case, table, _columns(getattr(run, table)))
            if "autoscaler" in served.options:
                answers.many(case, "fleet", _columns(run.fleet))
            answers.is_exact = False
            summary = run.summary(**LIMITS)
        except product.FastroofError as error:
            answers.text(case, "error", type(error).__name__)
            continue
        answers.number(case, "warnings", len(summary["warnings"]))
        answers.document(case, summary, without=("warnings", "basis", "limits", *PARTS))
        try:
            answers.document(case, {"energy": run.energy()}, without=("basis",))
        except product.FastroofError as error:
            answers.text(case, "energy error", type(error).__name__)
    return answers
