#!/bin/sh
# Simulations by BLIS with the plan as its latency model: every step compared with the plan, its requests with those
# of `fastroof.simulate`, and deployments that the plan is not of, which the model must refuse. Runs with preemptions
# differ from `simulate`: BLIS starts a preempted request anew (sim/batch_formation.go), vLLM recomputes its tokens.
#
#     sh benchmarks/upstream/blis.sh CHECKOUT
#
# CHECKOUT: a checkout of inference-sim/inference-sim with its program `blis`, into which the adapter was built as the
# first lines of fastroof/backends/c/blis/blis.go say. Python needs fastroof; $PYTHON names it.
set -eu
checkout=$(cd "${1:?usage: blis.sh CHECKOUT}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$checkout" # it reads defaults.yaml of its working folder
PYTHONPATH=$root exec "${PYTHON:-python}" - "$checkout" <<'END'
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import fastroof
from benchmarks.upstream.steps import own_us, print_exact, version
from fastroof.backends.c import write_plan_file
from fastroof.models.named import preset_config

MODEL = "meta-llama/llama-3.1-8b-instruct"
BLOCKS = ("--total-kv-blocks", "28540")
LOADS = {
    "prompts in one piece": ("--rate", "12", *BLOCKS),
    "prompts in chunks": ("--rate", "2", "--prompt-tokens", "5000", "--prompt-tokens-max", "12000", *BLOCKS),
    "preemptions": ("--rate", "40", "--total-kv-blocks", "3000"),
}
OTHERS = (
    ("llama-3.1-70b", "meta-llama/llama-3.1-70b-instruct", "H100", "4"),
    ("mixtral-8x7b", "mistralai/mixtral-8x7b-v0.1", "A100-SXM", "2"),
    ("llama-3.1-8b", MODEL, "A100-80", "1"),
    ("llama-3.1-8b", MODEL, "H100", "2"),
)
at = version(Path(sys.argv[1]))
plan = fastroof.compile_plan("llama-3.1-8b", "h100", front_end="none")


def blis(folder, preset, model, gpu, tp, *options):
    """Run the simulation, and return what it printed on standard error."""
    (folder / "config.json").write_text(json.dumps(preset_config(preset)))
    command = ["./blis", "run", "--model", model, "--hardware", gpu, "--tp", tp, "--model-config-folder", folder]
    command += ["--hardware-config", "hardware_config.json", "--metrics-path", folder / "metrics.json", *options]
    environment = {**os.environ, "STEP": str(folder), "FASTROOF_STEPS": str(folder / "steps")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def compare(folder, load):
    (folder / "steps").unlink(missing_ok=True)
    done = blis(folder, "llama-3.1-8b", MODEL, "H100", "1", "--num-requests", "300", *LOADS[load])
    if done.returncode:
        sys.exit(f"BLIS, {load}: {done.stderr}")
    steps = [line.split() for line in (folder / "steps").read_text().splitlines()]
    found = [float(us) for us, *_ in steps]
    made = [[tuple(map(int, one.split("@"))) for one in requests] for _, *requests in steps]
    print_exact(f"BLIS, {load}", at, found, [own_us(plan, step) for step in made])
    metrics = json.loads((folder / "metrics.json").read_text())
    requests = sorted(metrics["requests"], key=lambda one: one["arrived_at"])

    def column(name):
        return np.array([one[name] for one in requests])

    trace = fastroof.Trace(column("arrived_at"), column("num_prefill_tokens"), column("num_decode_tokens"))
    simulated = fastroof.simulate(
        plan, trace, num_gpu_blocks=int(LOADS[load][-1]), max_num_batched_tokens=2048, max_num_seqs=256,
        async_scheduling=False,
    )
    ours = simulated.summary()
    counts = (len(steps), metrics["preemption_count"]), (ours["steps"], ours["preemptions"])
    worst_us = [
        1e3 * np.abs(simulated.requests.column(name).to_numpy() - column(theirs)).max()
        for name, theirs in (("ttft_ms", "ttft_ms"), ("tpot_ms", "itl_ms"), ("e2e_ms", "e2e_ms"))
    ]
    shown = "{:,} steps, {:,} preemptions".format(*counts[0])
    shown += "" if counts[0] == counts[1] else ", {:,} and {:,} by `simulate`".format(*counts[1])
    print(f"| BLIS, {load}, against `simulate` | {at} | {shown} | TTFT, TPOT, E2E within "
          f"{', '.join(f'{us:.2g}' for us in worst_us)} us |")


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_plan_file(plan, folder / "llama-3.1-8b.plan")
    for load in LOADS:
        compare(folder, load)
    refused = sum("llama-3.1-8b.plan is of another deployment" in blis(folder, *other).stderr for other in OTHERS)
    print(f"| BLIS, other deployments | {at} | {refused} of {len(OTHERS)} refused | |")
    if refused < len(OTHERS):
        sys.exit(f"BLIS: {len(OTHERS) - refused} deployments that the plan is not of were timed")
END
