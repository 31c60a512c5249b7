"""vLLM's own engine core, scheduler and KV cache, with step times of a plan, against `fastroof.simulate`.

    python -m benchmarks.upstream.vllm

Python needs vLLM 0.33.0, whose wheel runs without a GPU, and fastroof.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

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
from benchmarks.upstream.schedulers import (
    Clients,
    Counts,
    Run,
    compare,
    equal_prefixes,
    open_loop,
    sessions,
    write_model,
)
from fastroof.backends.vllm_engine.executor import Clock, PlanExecutor


class VirtualClock(Clock):
    """A clock that the end of a step advances."""

    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, end_s: float) -> None:
        self.time_s = max(self.time_s, end_s)


def engine_core(engine: dict[str, Any]) -> EngineCore:
    """vLLM's engine core with the defaults of its server."""
    options = {"max_model_len": 16_384, "enable_prefix_caching": False, **engine}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        arguments = EngineArgs(model=folder, skip_tokenizer_init=True, **options)
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        core = EngineCore(config, PlanExecutor, log_stats=False)
    core.model_executor.clock = VirtualClock()
    return core


def serve(core: EngineCore, clients: Clients) -> Counts:
    """Serve the clients in virtual time."""
    clock, trace = core.model_executor.clock, clients.trace
    requests: dict[str, Request] = {}
    steps = 0
    while True:
        for place in clients.due(clock.time_s):
            params = SamplingParams(max_tokens=int(trace.output_tokens[place]), ignore_eos=True)
            hasher = core.request_block_hasher
            request = Request(str(place), clients.tokens[place], params, None, block_hasher=hasher)
            requests[request.request_id] = request
            core.add_request(request)
        if not core.scheduler.has_requests() and not core.batch_queue:
            if clients.next_s is None:
                break
            clock.time_s = clients.next_s
            continue
        answers, ran = core.step_fn()
        steps += ran
        for output in (output for answer in (answers or {}).values() for output in answer.outputs):
            if output.new_token_ids:
                clients.receive(int(output.request_id), clock.time_s, is_last=output.finished)
    return Counts(steps, sum(request.num_preemptions for request in requests.values()))


def is_equal(run: Run) -> bool:
    """Compare a run with its simulation."""
    core = engine_core(run.engine)
    plan, cache = core.model_executor.plan, core.vllm_config.cache_config
    scheduler = core.vllm_config.scheduler_config
    names = "max_num_batched_tokens", "max_num_seqs", "async_scheduling", "prefill_schedule_interval"

    def simulated(trace: fastroof.Trace) -> fastroof.Simulation:
        # vLLM keeps one of its blocks as a null block
        return fastroof.simulate(
            plan,
            trace,
            num_gpu_blocks=cache.num_gpu_blocks - 1,
            prefix_cache="lru" if cache.enable_prefix_caching else "given",
            **{name: getattr(scheduler, name) for name in names},
        )

    return compare(run, lambda clients: serve(core, clients), simulated)


def runs() -> list[Run]:
    """Open loops, scarce blocks, chunks, spaced prompts, equal prefixes, sessions and pipeline stages."""
    load, tree, agents = open_loop(), equal_prefixes(), sessions()
    cached = {"enable_prefix_caching": True}
    scarce = {"num_gpu_blocks_override": 2501}
    kinds: list[tuple[str, fastroof.Trace, dict[str, Any]]] = [
        ("open loop", load, {}),
        ("2,000 blocks: preemption", load, {"num_gpu_blocks_override": 2001}),
        ("chunks of 512 tokens", load, {"max_num_batched_tokens": 512, "max_num_seqs": 256}),
        ("16 sequences", load, {"max_num_seqs": 16}),
        ("prompts every 4 steps", load, {"prefill_schedule_interval": 4}),
        ("equal prefixes", tree, cached),
        ("equal prefixes, 2,500 blocks", tree, cached | scarce),
        ("sessions", agents, cached),
        ("sessions, 2,500 blocks", agents, cached | scarce),
    ]
    staged = {"async_scheduling": False, "pipeline_parallel_size": 2}
    # an empty batch holds a place in vLLM's queue of more than two, before the next chunk of a cut prompt
    whole = fastroof.Workload(rate=10, requests=300, isl="lognormal:1500:0.8:6000", osl=100, seed=1).trace()
    stages = [
        Run("2 pipeline stages", load, staged),
        Run("2 pipeline stages, chunks of 1,024 tokens", load, {**staged, "max_num_batched_tokens": 1024}),
        Run("2 pipeline stages, equal prefixes", tree, staged | cached),
        Run("4 pipeline stages, whole prompts", whole, {**staged, "pipeline_parallel_size": 4}),
    ]
    return [
        Run(f"{name}{', asynchronous' if is_async else ''}", trace, {**engine, "async_scheduling": is_async})
        for name, trace, engine in kinds
        for is_async in (False, True)
    ] + stages


if __name__ == "__main__":
    print(f"vLLM {vllm.__version__}: requests, steps, preemptions, worst difference of TTFT, TPOT and E2E")
    equal = [is_equal(run) for run in runs()]
    if not all(equal):
        sys.exit("vLLM's engine core and simulate differ")
