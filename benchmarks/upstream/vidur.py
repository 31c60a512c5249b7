"""Vidur's simulator against fastroof's engine, with one plan: ``python -m benchmarks.upstream.vidur``.

Needs the package vidur 0.0.26. Its Sarathi scheduler is the one that schedules as vLLM does: decodes first,
then the prompt that is cut, then new ones, up to ``chunk_size`` tokens a step. With
``watermark_blocks_fraction`` 0 it admits whatever has room.

It differs only if KV blocks run short: a prompt takes the blocks of all its chunks with
the first, requests are admitted in the step in which others were preempted, and a preempted request keeps
the count of stage tokens of its first run, at which Vidur stops with an AssertionError. So
:func:`vidur_times` is for caches that are large enough.
"""

# No `from __future__ import annotations`: Vidur reads the types of configs' fields, see native.py.
import csv
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import vidur.config as v
from vidur.entities import BatchStage, Replica
from vidur.simulator import Simulator

import fastroof
from fastroof.arrays import Floats
from fastroof.backends.vidur.native import FastroofPredictorConfig
from fastroof.errors import BackendError
from fastroof.simulation.settings import EngineSettings, running_tokens
from fastroof.units import MS_PER_S

_DATE = "2026-01-01"
RTOL = 1e-9
_LONGEST = 2**24
"""Tokens of a request above which Vidur would shorten it."""


class VidurTimes(NamedTuple):
    """Each request's times in Vidur, in the trace's sorted order, and processor seconds of ``Simulator.run``.

    ``tpot_ms`` is nan for outputs of one token.
    """

    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    steps: int
    took_s: float


def vidur_times(
    plan: fastroof.StepPlan,
    trace: fastroof.Trace,
    folder: Path,
    *,
    model: str = "meta-llama/Llama-3-8B",
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    num_gpu_blocks: int,
    block_size: int | None = None,
    metrics: bool = False,
) -> VidurTimes:
    """Run a trace through one replica of Vidur, scheduled by Sarathi without a watermark.

    ``folder`` is an empty one for Vidur's files, ``model`` its name of the plan's. With ``metrics`` it keeps
    and writes its own as by default, but for pictures; slower. The rest is as in :func:`fastroof.simulate`.
    """
    if trace.cached_tokens.any() or trace.clients is not None:
        raise BackendError("Vidur's traces have neither cached tokens nor clients that wait for answers")
    settings = EngineSettings.of_plan(
        plan, kv_len=running_tokens(trace, plan), max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs, num_gpu_blocks=num_gpu_blocks, block_size=block_size,
    )  # fmt: skip
    path = folder / "trace.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("Date", "Time", "PromptTokenCount", "CompletionTokenCount"))
        columns = trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist()
        rows.writerows((_DATE, *row) for row in zip(*columns, strict=True))
    config = v.SimulationConfig(
        cluster_config=v.ClusterConfig(
            replica_config=v.ReplicaConfig(model, num_pipeline_stages=1, tensor_parallel_size=plan.tp),
            replica_scheduler_config=v.SarathiSchedulerConfig(
                chunk_size=settings.max_num_batched_tokens, batch_size_cap=settings.max_num_seqs
            ),
            cache_config=v.CacheConfig(
                block_size=settings.block_size,
                num_blocks=settings.num_gpu_blocks,
                watermark_blocks_fraction=0.0,
            ),
        ),
        request_generator_config=v.TraceRequestGeneratorConfig(
            trace_file=str(path),
            date=_DATE,
            prefill_scale_factor=1,
            decode_scale_factor=1,
            time_scale_factor=1,
            max_tokens=_LONGEST,
        ),
        execution_time_predictor_config=FastroofPredictorConfig.of(plan, cache_dir=str(folder / "cache")),
        metrics_config=v.MetricsConfig(
            write_metrics=metrics, store_plots=False, enable_chrome_trace=False, output_dir=str(folder)
        ),
    )
    logging.getLogger("vidur").setLevel(logging.WARNING)
    # of the whole process: its scheduler counts replicas from 0
    Replica._id = -1
    simulator = Simulator(config)
    # the requests themselves: its files leave TPOT out, and divide by one token more
    requests = [event._request for _, event in sorted(simulator._event_queue, key=lambda each: each[1]._id)]
    first_step, began_s = BatchStage.generate_id(), time.process_time()
    simulator.run()
    took_s, steps = time.process_time() - began_s, BatchStage.generate_id() - first_step - 1
    if restarted := sum(request.num_restarts > 0 for request in requests):
        raise BackendError(f"{restarted} requests were preempted in Vidur: give it more num_gpu_blocks")
    arrived, first, last = (
        np.array([getattr(request, name) for request in requests])
        for name in ("arrived_at", "prefill_completed_at", "completed_at")
    )
    gaps = trace.output_tokens - 1.0
    gaps[gaps == 0.0] = np.nan
    return VidurTimes(
        (first - arrived) * MS_PER_S,
        (last - first) * MS_PER_S / gaps,
        (last - arrived) * MS_PER_S,
        steps,
        took_s,
    )


def main() -> None:
    """Print the answers of both, how far they are apart, and how long each took."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", front_end="none")
    prompt, output = "lognormal:1024:0.8", "lognormal:200:0.8"
    trace = fastroof.Workload(rate=15, requests=300, isl=prompt, osl=output, seed=1).trace()
    blocks = plan.memory.max_kv_tokens // 16
    with tempfile.TemporaryDirectory() as folder:
        theirs = vidur_times(plan, trace, Path(folder), num_gpu_blocks=blocks)

    def simulated() -> fastroof.Simulation:
        # Vidur schedules a step when the one before has ended
        return fastroof.simulate(plan, trace, num_gpu_blocks=blocks, async_scheduling=False)

    simulated()  # compiles, or reads what was compiled
    began_s = time.perf_counter()
    ours = simulated()
    took_s = time.perf_counter() - began_s
    worst = 0.0
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        mine = ours.requests[name].to_numpy(zero_copy_only=False)
        other = getattr(theirs, name)
        apart = np.nanmax(np.abs(mine / other - 1))
        worst = max(worst, apart)
        print(
            f"{name}: p50 {np.nanmedian(mine):.2f}, p99 {np.nanpercentile(mine, 99):.2f}, {apart:.0e} apart"
        )
    print(f"{theirs.steps:,} steps: Vidur {theirs.took_s:.2f} s, fastroof {took_s * 1e3:.2f} ms")
    if worst > RTOL:
        sys.exit("Vidur and simulate differ")


if __name__ == "__main__":
    main()
