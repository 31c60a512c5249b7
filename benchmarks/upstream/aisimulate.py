"""`aisimulate predict` with a plan's table against fastroof's engine, same arrivals.

    python -m benchmarks.upstream.aisimulate

Needs fastroof and aisimulate in one environment; rows are those of the scripts of this folder.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

import fastroof
from fastroof.backends.aisimulate import write_fpm
from fastroof.backends.mixed_steps import decodes_beside, settings_of
from fastroof.simulation.fleet_run import run_engine
from tests.examples.aisimulate import predict

INPUT, OUTPUT, REQUESTS, CONTEXT = 1024, 128, 1000, 16384
CASES: Final = (
    ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B", {}, (5.0, 10.0, 20.0, 30.0)),
    ("qwen3-32b", "Qwen/Qwen3-32B", {"tp": 2, "dtype": "fp8"}, (2.0, 8.0, 14.0)),
    ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", {"tp": 2}, (5.0, 15.0, 25.0)),
)
"""Preset, the model's name in AISimulate, options of the plan, and rates, requests/s."""

FIGURES: Final = ("mean_ttft_ms", "mean_tpot_ms", "output_throughput_tok_s")


def predicted(
    plan: fastroof.StepPlan, name: str, trace: fastroof.Trace, running: tuple[int, int] | None, folder: Path
) -> list[float]:
    """Return AISimulate's mean TTFT and TPOT, ms, and its output tokens/s of a trace."""
    write_fpm(plan, folder / "plan.parquet", model=name, max_context=CONTEXT, beside=running)
    blocks = -(-trace.input_tokens // 512)
    ends = np.cumsum(blocks)
    rows = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, ends - blocks, ends, strict=True)
    lines = [
        {"timestamp": 1e3 * at, "input_length": int(prompt), "output_length": int(output),
         "hash_ids": list(range(first, end))}
        for at, prompt, output, first, end in rows
    ]  # fmt: skip
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    source = {"type": "trace", "paths": [str(path)], "format": "mooncake"}
    seen = predict(folder / "plan.yaml", {"source": source, "load": {"type": "trace_timestamps"}})
    return [seen[figure] for figure in FIGURES]


def simulated(plan: fastroof.StepPlan, trace: fastroof.Trace) -> list[float]:
    """Return the same of fastroof's engine with AISimulate's settings."""
    seen = run_engine(plan, trace, settings_of(plan))
    ttft_us, decode_us = seen.first_us - seen.arrival_us, seen.last_us - seen.first_us
    end_s = (seen.last_us.max() - seen.arrival_us.min()) / 1e6
    return [
        float(ttft_us.mean()) / 1e3,
        float((decode_us / (trace.output_tokens - 1)).mean()) / 1e3,
        float(trace.output_tokens.sum() / end_s),
    ]


def poisson(rate_per_s: float) -> fastroof.Trace:
    """Return requests that come at random."""
    arrival_s = np.random.default_rng(0).exponential(1 / rate_per_s, REQUESTS).cumsum()
    return fastroof.Trace(arrival_s, np.full(REQUESTS, INPUT), np.full(REQUESTS, OUTPUT))


def main() -> None:
    """Print the range of errors of each kind of table, and on stderr those of each model and rate."""
    errors: dict[str, list[list[float]]] = {"alone": [], "rate": []}
    for model, name, options, rates in CASES:
        plan = fastroof.compile_plan(model, "h100", **options)
        for rate_per_s in rates:
            trace = poisson(rate_per_s)
            ours = simulated(plan, trace)
            running = decodes_beside(plan, rate_per_s=rate_per_s, prompt_len=INPUT, output_len=OUTPUT)
            for prefill, decodes in (("alone", None), ("rate", running)):
                with TemporaryDirectory() as folder:
                    theirs = predicted(plan, name, trace, decodes, Path(folder))
                found = [100 * (their / our - 1) for their, our in zip(theirs, ours, strict=True)]
                errors[prefill].append(found)
                print(
                    model,
                    prefill,
                    f"{rate_per_s:g} requests/s",
                    *map("{:+.1f} %".format, found),
                    file=sys.stderr,
                )
    for prefill, found_of in errors.items():
        ranges = zip(("mean TTFT", "mean TPOT", "tokens/s"), zip(*found_of, strict=True), strict=True)
        words = ", ".join(f"{figure} {min(of):+.1f} to {max(of):+.1f} %" for figure, of in ranges)
        worst = np.abs(found_of).max()
        print(f"| AISimulate, prefill {prefill} | {version('aisimulate')} | {words} | {worst:.2f} % |")


if __name__ == "__main__":
    main()
