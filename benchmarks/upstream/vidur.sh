#!/bin/sh
# A simulation by the package vidur with the plan as its predictor: every batch compared with the plan, by the
# tokens that its requests had been given before.
#
#     PYTHON=venv/bin/python sh benchmarks/upstream/vidur.sh
#
# Python needs fastroof and vidur; $PYTHON names it.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHONPATH=$root exec "${PYTHON:-python}" - <<'END'
import logging
import tempfile
from collections import defaultdict
from importlib import metadata

from vidur.simulator import Simulator

import fastroof
from benchmarks.upstream.steps import own_us, print_exact
from fastroof.backends.vidur.native import FastroofPredictor
from fastroof.backends.vidur.native_example import simulation

logging.getLogger("vidur").setLevel(logging.WARNING)
asked = FastroofPredictor.get_execution_time
given_tokens = defaultdict(int)
found, expected = [], []


def recorded(self, batch, pipeline_stage):
    answer = asked(self, batch, pipeline_stage)
    step = []
    for request, tokens in zip(batch.requests, batch.num_q_tokens, strict=True):
        step.append((tokens, given_tokens[request.id]))
        given_tokens[request.id] += tokens
    found.append(answer.total_time)
    expected.append(own_us(plan, step) / 1e3 * 1e-3)  # by way of ms, as Vidur
    return answer


FastroofPredictor.get_execution_time = recorded
plan = fastroof.compile_plan("llama-3.1-8b", "h100")
with tempfile.TemporaryDirectory() as folder:
    Simulator(simulation(plan, folder)).run()
print_exact("Vidur", metadata.version("vidur"), found, expected, "batches")
END
