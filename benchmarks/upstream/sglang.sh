#!/bin/sh
# The SGLang simulator's batches, its predictor interface and its `ml` predictor, from their own source: the plan as
# a time predictor, and the file of write_model as the simulator loads it.
#
#     sh benchmarks/upstream/sglang.sh CHECKOUT
#
# CHECKOUT: a checkout of sgl-project/sglang. Python needs fastroof and joblib; $PYTHON names it.
set -eu
checkout=$(cd "${1:?usage: sglang.sh CHECKOUT}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHONPATH=$root:$checkout/tools/sglang-simulator/src exec "${PYTHON:-python}" - "$checkout" <<'END'
import importlib
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

import fastroof
from benchmarks.upstream.steps import KINDS, mixed_steps, own_us, print_errors, print_exact, random_steps, version
from fastroof.backends.sglang import StepTimePredictor, write_model

# The package's own __init__ would import every other predictor, with what each needs.
name = "sglang_simulator.time_predictor"
package = types.ModuleType(name)
package.__path__ = [str(Path(path, "time_predictor")) for path in importlib.import_module("sglang_simulator").__path__]
sys.modules[name] = package
from sglang_simulator.time_predictor.base import InferTimePredictor, ScheduleBatch, ScheduleRequest
from sglang_simulator.time_predictor.ml import MLTimePredictor


class Predictor(StepTimePredictor, InferTimePredictor):
    """The adapter, by the simulator's own abstract class."""


def batch(step):
    # a decode's past_kv_length counts its new token, as simulation/sglang/scheduler.py gives it
    return ScheduleBatch([ScheduleRequest(new, context + (new == 1 and context > 0)) for new, context in step])


at = version(Path(sys.argv[1]))
plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="sglang")
predictor = Predictor(plan)
steps = mixed_steps(plan, 2000)
found = [predictor.predict_infer_time(batch(step)) for step in steps]
print_exact("SGLang simulator", at, found, [own_us(plan, step) / 1e6 for step in steps])
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "model.pkl")
    write_model(plan, path)
    model = MLTimePredictor(None, None, None, str(path))
    for kind in KINDS:
        steps = random_steps(plan, kind)
        found = np.array([model.predict_infer_time(batch(step)) * 1e6 for step in steps])
        errors = found / np.array([own_us(plan, step) for step in steps]) - 1
        print_errors("SGLang simulator, `ml`", at, kind, errors)
END
