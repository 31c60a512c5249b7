"""Simulate 300 requests in Vidur with step times from fastroof.

Run it with ``python -m tests.examples.vidur_native`` with vidur 0.0.26 installed.
"""

import csv
import logging
import tempfile
import time
from pathlib import Path
from statistics import median

import vidur.config as v
from vidur.entities import BatchStage
from vidur.simulator import Simulator

import fastroof
from fastroof.backends.vidur.native import FastroofPredictorConfig


def simulation(plan: fastroof.StepPlan, folder: str) -> v.SimulationConfig:
    """Describe 300 requests to one replica; fastroof comes in by one argument."""
    lengths = v.UniformRequestLengthGeneratorConfig(max_tokens=2048, prefill_to_decode_ratio=8.0)
    arrivals = v.PoissonRequestIntervalGeneratorConfig(qps=15.0)
    replica = v.ReplicaConfig("meta-llama/Llama-3-8B", num_pipeline_stages=1, tensor_parallel_size=plan.tp)
    return v.SimulationConfig(
        cluster_config=v.ClusterConfig(
            replica_config=replica,
            replica_scheduler_config=v.SarathiSchedulerConfig(chunk_size=512),
            # Vidur would count 2 bytes a weight, whatever runs
            cache_config=v.CacheConfig(num_blocks=plan.memory.max_kv_tokens // 16),
        ),
        request_generator_config=v.SyntheticRequestGeneratorConfig(
            length_generator_config=lengths, interval_generator_config=arrivals, num_requests=300
        ),
        execution_time_predictor_config=FastroofPredictorConfig.of(plan, cache_dir=f"{folder}/cache"),
        metrics_config=v.MetricsConfig(store_plots=False, enable_chrome_trace=False, output_dir=folder),
    )


def main() -> None:
    """Print what the requests saw, and what simulating a step cost this machine."""
    logging.getLogger("vidur").setLevel(logging.WARNING)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    with tempfile.TemporaryDirectory() as folder:
        simulator = Simulator(simulation(plan, folder))
        first, begin_s = BatchStage.generate_id(), time.perf_counter()
        simulator.run()
        took_s, steps = time.perf_counter() - begin_s, BatchStage.generate_id() - first - 1
        with next(Path(folder).glob("*/request_metrics.csv")).open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    ttft_s = median(float(row["prefill_e2e_time"]) for row in rows)
    tpot_s = median(float(row["decode_time_execution_plus_preemption_normalized"]) for row in rows)
    print(f"{len(rows)} requests: median TTFT {ttft_s * 1e3:.1f} ms, TPOT {tpot_s * 1e3:.2f} ms")
    print(f"{steps:,} steps simulated in {took_s:.2f} s, {took_s / steps * 1e6:.0f} us each")


if __name__ == "__main__":
    main()
