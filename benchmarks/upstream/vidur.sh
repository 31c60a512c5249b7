#!/bin/sh
# A simulation by Vidur with the plan as its predictor: every batch compared with the plan, by the tokens that its
# requests had been given before.
#
#     sh benchmarks/upstream/vidur.sh [CHECKOUT]
#
# CHECKOUT: a checkout of microsoft/vidur or a fork; without it the package vidur runs, if it is installed. Python
# needs fastroof and what either needs; $PYTHON names it.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
checkout=${1:+$(cd "$1" && pwd)}
cd "${checkout:-/}" # the tree reads data/ of its working folder
PYTHONPATH=$root${checkout:+:$checkout} exec "${PYTHON:-python}" - "$checkout" <<'END'
import logging
import sys
import tempfile
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import fastroof
from benchmarks.upstream.steps import own_us, print_exact, version

checkout = sys.argv[1]
if checkout:
    from fastroof.backends.vidur.tree import FastroofExecutionTimePredictor as Predictor
else:
    from fastroof.backends.vidur.native import FastroofPredictor as Predictor

asked = Predictor.get_execution_time
given_tokens = defaultdict(int)
found, expected = [], []


def recorded(self, batch, pipeline_stage):
    answer = asked(self, batch, pipeline_stage)
    step = []
    for request, tokens in zip(batch.requests, batch.num_tokens if checkout else batch.num_q_tokens, strict=True):
        step.append((tokens, given_tokens[request.id]))
        given_tokens[request.id] += tokens
    found.append(answer.total_time)
    step_us = own_us(self.plan, step)
    expected.append(step_us / 1e6 if checkout else step_us / 1e3 * 1e-3)  # the package: by way of ms
    return answer


Predictor.get_execution_time = recorded
logging.getLogger("vidur").setLevel(logging.WARNING)
with tempfile.TemporaryDirectory() as folder:
    if checkout:
        from vidur.main import main

        options = {
            "execution_time_predictor_config_type": "dummy",
            "replica_config_device": "h100",
            "replica_config_network_device": "h100_dgx",
            "replica_config_model_name": "meta-llama/Meta-Llama-3-8B",
            "replica_scheduler_config_type": "sarathi",
            "request_generator_config_type": "synthetic",
            "synthetic_request_generator_config_num_requests": "300",
            "length_generator_config_type": "uniform",
            "uniform_request_length_generator_config_max_tokens": "2048",
            "interval_generator_config_type": "poisson",
            "poisson_request_interval_generator_config_qps": "15",
            "metrics_config_output_dir": folder,
        }
        without = ("metrics_config_store_plots", "metrics_config_enable_chrome_trace")
        sys.argv = ["vidur", *(f"--no-{flag}" for flag in without)]
        sys.argv += [part for name, value in options.items() for part in (f"--{name}", value)]
        main()
        print_exact("Vidur's source tree and forks", version(Path(checkout)), found, expected, "batches")
    else:
        from vidur.simulator import Simulator

        from tests.examples.vidur_native import simulation

        Simulator(simulation(fastroof.compile_plan("llama-3.1-8b", "h100"), folder)).run()
        print_exact("Vidur", metadata.version("vidur"), found, expected, "batches")
END
