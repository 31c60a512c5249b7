#!/bin/sh
# splitwise-sim's own performance model on an exported table, compared with the table's lines and with the plan.
#
#     sh benchmarks/upstream/splitwise_sim.sh CHECKOUT
#
# CHECKOUT: a checkout of Mutinifni/splitwise-sim. Python needs fastroof, pandas, scipy and hydra-core; $PYTHON names it.
set -eu
checkout=$(cd "${1:?usage: splitwise_sim.sh CHECKOUT}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHONPATH=$root:$checkout exec "${PYTHON:-python}" - "$checkout" <<'END'
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import fastroof
from benchmarks.upstream.steps import own_us, print_errors, print_exact, random_steps, version
from fastroof.backends.splitwise_sim import write_splitwise_table

import performance_model
from task import PromptTask, TokenTask

checkout = Path(sys.argv[1])
plan = fastroof.compile_plan("llama-2-70b", "h100", tp=8)
performance_model.get_original_cwd = lambda: "/"  # hydra runs no application here
instance = SimpleNamespace(
    model=SimpleNamespace(
        name="llama2-70b", parallelism=SimpleNamespace(pipeline_parallelism=1, tensor_parallelism=8)
    ),
    processors=[SimpleNamespace(name="h100-80gb")],
)


def task(kind, tokens):
    """A task of theirs with as much as the model reads: its request's prompt."""
    made = object.__new__(kind)
    made.request = SimpleNamespace(prompt_size=tokens)
    return made


def seconds(step):
    batch = [task(PromptTask, new) if new > 1 else task(TokenTask, context) for new, context in step]
    return reader.get_iteration_duration(batch, instance)


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "perf_model.csv")
    table = write_splitwise_table(plan, path, 2048, model="llama2-70b")
    reader = performance_model.DatabasePerformanceModel(str(path))
    rows = [int(tokens) for tokens in table["tokens"] if 1 < tokens <= plan.max_tokens]
    found = [round(seconds([(tokens, 0)]) * 1e6, 3) for tokens in rows]
    expected = [round(own_us(plan, [(tokens, 0)]), 3) for tokens in rows]
    print_exact("splitwise-sim", version(checkout), found, expected, "prompts of the table, in ns,")
    for kind in ("prompt", "prompts", "decodes", "mixed"):
        steps = [[(new, context if new == 1 else 0) for new, context in step] for step in random_steps(plan, kind)]
        steps = [step for step in steps if sum(new for new, _ in step) <= table["tokens"][-1]]
        errors = np.array([seconds(step) * 1e6 / own_us(plan, step) - 1 for step in steps])
        print_errors("splitwise-sim", version(checkout), kind, errors)
END
