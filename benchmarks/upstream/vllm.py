"""vLLM's own engine core, scheduler and KV cache, with step times of a plan, against `fastroof.simulate`.

    python -m benchmarks.upstream.vllm

Python needs vLLM 0.33.0, whose wheel runs without a GPU, and fastroof.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# a front end would delay arrivals, which here are those of the engine core
os.environ |= {
    "FASTROOF_GPU": "h100",
    "FASTROOF_PLAN": '{"front_end": "none"}',
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

import fastroof
from fastroof.backends.vllm_engine.executor import ANY_TOKEN, Clock, PlanExecutor

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "vocab_size": 128256,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "dtype": "bfloat16",
    "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


class Run(NamedTuple):
    """A load, and settings of the engine by vLLM's names."""

    name: str
    trace: fastroof.Trace
    engine: dict[str, Any]


class VirtualClock(Clock):
    """A clock that the end of a step advances."""

    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, end_s: float) -> None:
        self.time_s = max(self.time_s, end_s)


def engine_core(folder: str, engine: dict[str, Any]) -> EngineCore:
    """vLLM's engine core with the defaults of its server."""
    Path(folder, "config.json").write_text(json.dumps(LLAMA))
    options = {"max_model_len": 16_384, "enable_prefix_caching": False, **engine}
    arguments = EngineArgs(model=folder, skip_tokenizer_init=True, **options)
    core = EngineCore(
        arguments.create_engine_config(UsageContext.OPENAI_API_SERVER), PlanExecutor, log_stats=False
    )
    core.model_executor.clock = VirtualClock()
    return core


def parents_of(trace: fastroof.Trace) -> list[int]:
    """The request that each one follows, or -1; here none follows several."""
    if trace.parents is None:
        return [-1] * len(trace)
    if trace.parent_offsets is None:
        return [int(parent) for parent in trace.parents]
    starts = trace.parent_offsets
    return [int(trace.parents[a]) if b > a else -1 for a, b in itertools.pairwise(starts)]


def prompts(trace: fastroof.Trace) -> dict[int, list[int]]:
    """Token ids of each prompt: equal where hash_ids or a session's history are, else distinct."""
    found: dict[int, list[int]] = {}
    parents = parents_of(trace)

    def add(place: int) -> None:
        start: list[int] = []
        if trace.hash_ids is not None:
            blocks = trace.hash_ids[trace.hash_offsets[place] : trace.hash_offsets[place + 1]].tolist()
            start = [1_000 + (b * 7_919 + t) % 100_000 for b in blocks for t in range(trace.hash_block_size)]
        elif (parent := parents[place]) >= 0:
            if parent not in found:
                add(parent)
            history = found[parent] + [ANY_TOKEN] * int(trace.output_tokens[parent])
            start = history[: int(trace.history_tokens[place])]
        count = int(trace.input_tokens[place])
        own = [1_000 + (place * 7_919 + token) % 100_000 for token in range(count - len(start))]
        found[place] = (start + own)[:count]

    for place in range(len(trace)):
        add(place)
    return found


def served(core: EngineCore, trace: fastroof.Trace) -> dict[str, Any]:
    """Milliseconds of each request, and the numbers of steps and preemptions, in virtual time."""
    clock = core.model_executor.clock
    tokens = prompts(trace)
    children: dict[int, list[int]] = {}
    for place, parent in enumerate(parents_of(trace)):
        children.setdefault(parent, []).append(place)
    waiting = [(float(trace.arrival_s[place]), place) for place in children[-1]]
    heapq.heapify(waiting)
    requests: dict[str, Request] = {}
    start_s, first_s, last_s = np.zeros(len(trace)), np.full(len(trace), np.nan), np.zeros(len(trace))
    steps = 0
    while True:
        while waiting and waiting[0][0] <= clock.time_s:
            start, place = heapq.heappop(waiting)
            params = SamplingParams(max_tokens=int(trace.output_tokens[place]), ignore_eos=True)
            request = Request(str(place), tokens[place], params, None, block_hasher=core.request_block_hasher)
            requests[request.request_id], start_s[place] = request, start
            core.add_request(request)
        if not core.scheduler.has_requests() and not core.batch_queue:
            if not waiting:
                break
            clock.time_s = waiting[0][0]
            continue
        answers, ran = core.step_fn()
        steps += ran
        for output in (output for answer in (answers or {}).values() for output in answer.outputs):
            place = int(output.request_id)
            if output.new_token_ids:
                first_s[place] = np.fmin(first_s[place], clock.time_s)
                last_s[place] = clock.time_s
            if output.finished:
                for child in children.get(place, ()):
                    ready = max(float(trace.arrival_s[child]), clock.time_s + float(trace.delay_s[child]))
                    heapq.heappush(waiting, (ready, child))
    return {
        "ttft_ms": 1e3 * (first_s - start_s),
        "tpot_ms": 1e3 * (last_s - first_s) / np.maximum(trace.output_tokens - 1, 1),
        "e2e_ms": 1e3 * (last_s - start_s),
        "steps": steps,
        "preemptions": sum(request.num_preemptions for request in requests.values()),
    }


def compare(run: Run) -> bool:
    """Print a row, and return whether counts are equal and times to nine digits."""
    with tempfile.TemporaryDirectory() as folder:
        core = engine_core(folder, run.engine)
        began = time.perf_counter()
        theirs = served(core, run.trace)
        seconds = time.perf_counter() - began
        plan, cache = core.model_executor.plan, core.vllm_config.cache_config
    scheduler = core.vllm_config.scheduler_config
    names = "max_num_batched_tokens", "max_num_seqs", "async_scheduling", "prefill_schedule_interval"
    # vLLM keeps one of its blocks as a null block
    simulated = fastroof.simulate(
        plan,
        run.trace,
        num_gpu_blocks=cache.num_gpu_blocks - 1,
        prefix_cache="lru" if cache.enable_prefix_caching else "given",
        **{name: getattr(scheduler, name) for name in names},
    )
    ours = simulated.summary()
    worst = 0.0
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        found = np.nan_to_num(simulated.requests.column(name).to_numpy())[run.trace.order]
        worst = max(worst, float(np.max(np.abs(found - theirs[name]) / np.maximum(theirs[name], 1e-3))))
    counts = [(theirs[name], ours[name]) for name in ("steps", "preemptions")]
    shown = " | ".join(f"{a:,}" if a == b else f"{a:,} against {b:,}" for a, b in counts)
    print(f"| {run.name} | {len(run.trace):,} | {shown} | {worst:.1g} | {seconds:.1f} s |", flush=True)
    return all(a == b for a, b in counts) and worst < 1e-9


def runs() -> list[Run]:
    """Open loops, scarce blocks, chunks, spaced prompts, equal prefixes and sessions."""
    lengths = {"isl": "lognormal:1500:0.8:6000", "osl": "lognormal:150:0.7:800"}
    load = fastroof.Workload(rate=10, requests=500, seed=1, **lengths).trace()
    rng = np.random.default_rng(5)
    # prompts of whole blocks of 512 tokens along a tree of 3 x 4 x 5 branches
    ids = [
        [1 + a, 10 + 4 * a + b, 100 + 20 * a + 5 * b + c, 1000 + place]
        for place, (a, b, c) in enumerate(rng.integers(0, (3, 4, 5), (400, 3)).tolist())
    ]
    tree = fastroof.Trace(
        np.cumsum(rng.exponential(0.08, 400)),
        np.full(400, 4 * 512),
        rng.integers(20, 200, 400),
        hash_ids=np.concatenate(ids),
        hash_offsets=np.arange(401) * 4,
        hash_block_size=512,
    )
    sessions = fastroof.Workload(
        rate=1.5, requests=400, turns=3, calls=3, isl=1500, growth_tokens=300, osl=120,
        think_s=4, tool_s=0.5, seed=3,
    ).trace()  # fmt: skip
    both = ({"async_scheduling": False}, {"async_scheduling": True})
    cached = {"enable_prefix_caching": True}
    scarce = {"num_gpu_blocks_override": 2501}
    kinds: list[tuple[str, fastroof.Trace, dict[str, Any]]] = [
        ("open loop", load, {}),
        ("2,000 blocks: preemption", load, {"num_gpu_blocks_override": 2001}),
        ("chunks of 512 tokens", load, {"max_num_batched_tokens": 512, "max_num_seqs": 256}),
        ("16 sequences", load, {"max_num_seqs": 16}),
        ("prompts every 4 steps", load, {"prefill_schedule_interval": 4}),
        ("equal prefixes", tree, cached),
        (
            "equal prefixes, 2,500 blocks",
            tree,
            cached | scarce,
        ),
        ("sessions", sessions, cached),
        (
            "sessions, 2,500 blocks",
            sessions,
            cached | scarce,
        ),
    ]
    return [
        Run(f"{name}{', asynchronous' if mode['async_scheduling'] else ''}", trace, {**engine, **mode})
        for name, trace, engine in kinds
        for mode in both
    ]


if __name__ == "__main__":
    print(f"vLLM {vllm.__version__}: requests, steps, preemptions, worst difference of TTFT, TPOT and E2E")
    equal = [compare(run) for run in runs()]
    if not all(equal):
        sys.exit("vLLM's engine core and simulate differ")
