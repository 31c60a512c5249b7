"""Dynamo's mocker against fastroof's engine, same arrivals: ``python -m benchmarks.upstream.dynamo``.

Needs fastroof and ai-dynamo-runtime, without a checkout; rows are those of the scripts of this folder.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

import fastroof
from fastroof.backends.dynamo import write_dynamo_profile
from fastroof.backends.mixed_steps import decodes_beside, settings_of
from fastroof.simulation.fleet_run import run_engine
from tests.examples.dynamo import engine

INPUT, OUTPUT, REQUESTS = 1024, 128, 1000
RATES_PER_S: Final = (5.0, 10.0, 20.0, 30.0)


def replay_errors(
    core: Any, plan: fastroof.StepPlan, rate_per_s: float, folder: Path
) -> dict[str, tuple[float, float]]:
    """Relative errors of the mocker's mean TTFT and TPOT, by how its profile has prefill.

    It is replayed with ``dynamo._core``: prefill ``alone``, and as added to the decodes of the ``rate``.
    """
    lengths = {"prompt_len": INPUT, "output_len": OUTPUT}
    running = decodes_beside(plan, rate_per_s=rate_per_s, **lengths)
    errors = {}
    for name, decodes in (("alone", None), ("rate", running)):
        path = folder / f"{name}.npz"
        write_dynamo_profile(plan, path, prompt_len=INPUT, beside=decodes)
        report = core.run_mocker_synthetic_trace_replay(
            INPUT, OUTPUT, REQUESTS, extra_engine_args=engine(plan, path), request_rate=rate_per_s,
            capture_per_request=True,
        )  # fmt: skip
        arrival_s = np.array([one["arrival_time_ms"] for one in report.per_request]) / 1e3
        trace = fastroof.Trace(arrival_s, np.full(REQUESTS, INPUT), np.full(REQUESTS, OUTPUT))
        seen = run_engine(plan, trace, settings_of(plan))
        ttft_ms = float((seen.first_us - seen.arrival_us).mean()) / 1e3
        tpot_ms = float((seen.last_us - seen.first_us).mean()) / (OUTPUT - 1) / 1e3
        summary = report.summary
        errors[name] = summary["mean_ttft_ms"] / ttft_ms - 1, summary["mean_tpot_ms"] / tpot_ms - 1
    return errors


def main() -> None:
    """Print a row for each rate and profile."""
    core = import_module("dynamo._core")
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    release = version("ai-dynamo-runtime")
    with TemporaryDirectory() as folder:
        for rate_per_s in RATES_PER_S:
            for name, (ttft, tpot) in replay_errors(core, plan, rate_per_s, Path(folder)).items():
                print(
                    f"| Dynamo's mocker, prefill {name}, {rate_per_s:g} requests/s | {release} | mean TTFT "
                    f"{ttft:+.1%}, mean TPOT {tpot:+.1%} | {max(abs(ttft), abs(tpot)):.2%} |"
                )


if __name__ == "__main__":
    main()
