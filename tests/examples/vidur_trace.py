"""Serve a trace in Vidur and in fastroof, with one plan, and compare every request.

Run it with ``python -m tests.examples.vidur_trace`` with vidur 0.0.26 installed.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

import fastroof
from fastroof.backends.vidur.trace_run import vidur_times
from fastroof.simulation import Workload


def main() -> None:
    """Print the answers of both, how far they are apart, and how long each took."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    prompt, output = "lognormal:1024:0.8", "lognormal:200:0.8"
    trace = Workload(rate=15, requests=300, isl=prompt, osl=output, seed=1).trace()
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
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        mine = ours.requests[name].to_numpy(zero_copy_only=False)
        other = getattr(theirs, name)
        apart = np.nanmax(np.abs(mine / other - 1))
        print(
            f"{name}: p50 {np.nanmedian(mine):.2f}, p99 {np.nanpercentile(mine, 99):.2f}, {apart:.0e} apart"
        )
    print(f"{theirs.steps:,} steps: Vidur {theirs.took_s:.2f} s, fastroof {took_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
