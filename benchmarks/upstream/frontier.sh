#!/bin/sh
# Simulations by Frontier with the plan as its predictor, in one cluster and with prefill and decode apart: every
# batch compared with the plan, by the tokens that its requests had been given before. Frontier's own check that
# the terms of a step add up to it runs along.
#
#     sh benchmarks/upstream/frontier.sh CHECKOUT
#
# CHECKOUT: a checkout of NetX-lab/Frontier. Python needs fastroof and what its environment.yml lists for the
# simulator (pandas, scikit-learn, PyYAML, ddsketch, plotly, fasteners, tqdm); $PYTHON names it.
set -eu
checkout=$(cd "${1:?usage: frontier.sh CHECKOUT}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$checkout" # it reads data/config of its working folder
export PYTHONPATH="$root:$checkout" FRONTIER_LOG_LEVEL=error
for architecture in co-location pd-disaggregation; do
    "${PYTHON:-python}" - "$checkout" "$architecture" <<'END'
import contextlib
import io
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.upstream.steps import own_us, print_exact, version
from fastroof.backends.frontier import FastroofExecutionTimePredictor
from frontier.main import main

checkout, architecture = Path(sys.argv[1]), sys.argv[2]
asked = FastroofExecutionTimePredictor.predict_stage_execution_time
given_tokens = defaultdict(int)
by_batch = {}


def recorded(self, batch, *arguments, **options):
    answer = asked(self, batch, *arguments, **options)
    if batch.id not in by_batch:
        step = []
        for request, tokens in zip(batch.requests, batch.num_tokens, strict=True):
            step.append((tokens, given_tokens[request.id]))
            given_tokens[request.id] += tokens
        by_batch[batch.id] = answer.total_time, own_us(self.plan, step) / 1e6
    return answer


FastroofExecutionTimePredictor.predict_stage_execution_time = recorded
replica = {"attn_tensor_parallel_size": "2", "device": "h100", "network_device": "h100_dgx"}
clusters = {"co-location": ("replica_config",)}.get(
    architecture, ("cluster_config_prefill_replica_config", "cluster_config_decode_replica_config")
)
with tempfile.TemporaryDirectory() as folder:
    options = {
        **{f"{cluster}_{name}": value for cluster in clusters for name, value in replica.items()},
        "simulation_mode": "online",
        "sys_arch": architecture,
        "replica_config_model_name": "Qwen/Qwen3-32B",
        "execution_time_predictor_config_type": "dummy",
        "cc_backend_config_type": "analytical",
        "replica_scheduler_config_type": "vllm_v1",
        "vllm_v1_scheduler_config_max_tokens_in_batch": "2048",
        "request_generator_config_type": "synthetic",
        "synthetic_request_generator_config_num_requests": "64",
        "length_generator_config_type": "uniform",
        "interval_generator_config_type": "poisson",
        "poisson_request_interval_generator_config_qps": "4.0",
        "metrics_config_output_dir": folder,
    }
    if architecture == "co-location":
        options["cluster_config_num_replicas"] = "1"
    else:
        options |= {f"cluster_config_{one}_cluster_num_replicas": "1" for one in ("prefill", "decode")}
    flags = ("vllm_v1_scheduler_config_enable_chunked_prefill", "metrics_config_write_metrics")
    without = ("metrics_config_store_plots", "metrics_config_enable_chrome_trace", "enable_parallel_clusters")
    sys.argv = ["frontier", *(f"--{flag}" for flag in flags), *(f"--no-{flag}" for flag in without)]
    sys.argv += [part for name, value in options.items() for part in (f"--{name}", value)]
    with contextlib.redirect_stdout(io.StringIO()):
        main()
found, expected = zip(*by_batch.values(), strict=True)
print_exact(f"Frontier, {architecture}", version(checkout), found, expected, "batches")
END
done
