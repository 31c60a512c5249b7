"""Whether a wrong kernel is found: runs simulated from fastroof's estimates, with one table scaled.

``python -m benchmarks.accuracy planted-faults`` prints the table of README.md. Loads, models
and seeds differ from those that the rule's limits were set on (Llama-3.1-70B at tp 4 and 8, 8B at tp 1,
Qwen3-30B-A3B at tp 2, all on H100).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.evidence.engine_arguments import read_engine_arguments
from fastroof.evidence.kernel_times import KernelTimes, kernel_times
from fastroof.evidence.own_runs import OwnRow
from fastroof.evidence.suspect_kernels import OperatorTimes, added_by, operator_times, suspect_kernels
from fastroof.tables import Tables, load_tables

OUTCOMES: Final = ("named", "among those named", "nothing named", "another named")
CLUSTERS: Final = (
    ("h100", "qwen3-32b", (2, 4)),
    ("h200", "llama-3.1-70b", (2,)),
    ("b200", "mixtral-8x7b", (2,)),
)
LOADS: Final = ((2048, 256), (8192, 512), (256, 1024), (1024, 1024))
CLIENTS: Final = (2, 8, 24, 64, 128)
STEP_US: Final = 400.0
SEQUENCE_US: Final = 12.0
FACTORS: Final = (0.7, 1.5)
NOISES: Final = (0.02, 0.04)
SEEDS: Final = range(3000, 3020)
SEEDS_WITHOUT: Final = range(4000, 4200)


class _Cluster(NamedTuple):
    times: KernelTimes
    operators: OperatorTimes


def simulated_rows(
    gpu: str, model: str, tps: tuple[int, ...], loads: tuple[tuple[int, int], ...], clients: tuple[int, ...]
) -> list[OwnRow]:
    """Return rows of an engine, without times."""
    rows = []
    for tp in tps:
        given = {"gpu": gpu, "engine": "vllm", "version": "0.15.0", "model": model, "tp": tp}
        engine = read_engine_arguments(given=given)
        rows += [
            OwnRow(
                dataset="simulated",
                row=f"{tp} {isl} {osl} {c}",
                gpu=gpu,
                engine="vllm",
                engine_version="0.15.0",
                checkpoint=model,
                model=model,
                dtype=engine.dtype,
                kv_dtype=engine.kv_dtype,
                kv_dtype_from="",
                tp=tp,
                isl=isl,
                osl=osl,
                concurrency=c,
                requests_per_client=10.0,
                ttft_ms=math.nan,
                tpot_ms=1.0,
                left_out="",
                own_profile=engine.profile,
            )
            for isl, osl in loads
            for c in clients
        ]
    return rows


def count_named(
    times: KernelTimes, operators: OperatorTimes, planted: str, factor: float, noise: float, seeds: range
) -> Counter[str]:
    """Count the kinds that are named if ``planted`` takes ``factor`` times its table; empty: none."""
    factors = np.array([factor if kind == planted else 1.0 for kind in operators.kinds])
    constants = added_by(times, ("step_us", "sequence_us"))
    exact: Floats = operators.us @ factors + constants @ np.array([STEP_US, SEQUENCE_US])
    counted: Counter[str] = Counter()
    for seed in seeds:
        off = np.exp(np.random.default_rng(seed).normal(0.0, noise, len(exact)))
        found = suspect_kernels(times._replace(measured_us=exact * off), operators)
        if not found:
            counted["nothing named"] += 1
        elif found[0].kind == planted and not found[0].or_else:
            counted["named"] += 1
        elif planted in (found[0].kind, *found[0].or_else):
            counted["among those named"] += 1
        else:
            counted["another named"] += 1
    return counted


def _cluster(gpu: str, model: str, tps: tuple[int, ...], tables: Tables) -> _Cluster:
    rows = simulated_rows(gpu, model, tps, LOADS, CLIENTS)
    return _Cluster(kernel_times(rows, tables, rows[0].engine_profile), operator_times(rows, tables))


def main() -> None:
    """Count how often a planted fault is found in simulated runs, by the share of its kernels."""
    print("| cluster | share of the steps | planted | noise |", " | ".join(OUTCOMES), "|")
    print("| --- | --- | --- | --- |" + " --- |" * len(OUTCOMES))
    for gpu, model, tps in CLUSTERS:
        one = _cluster(gpu, model, tps, load_tables(gpu))
        shares = (one.operators.us / one.operators.us.sum(axis=1, keepdims=True)).mean(axis=0)
        where = f"{gpu}, {model}, tp {' '.join(map(str, tps))}, {len(one.operators.us)} runs"
        for noise in NOISES:
            nothing = count_named(one.times, one.operators, "", 1.0, noise, SEEDS_WITHOUT)
            _print_row(where, "", "nothing", noise, nothing)
            for kind, share in zip(one.operators.kinds, shares, strict=True):
                counted: Counter[str] = Counter()
                for factor in FACTORS:
                    counted += count_named(one.times, one.operators, kind, factor, noise, SEEDS)
                _print_row(where, f"{share:.0%}", f"{kind}, x {FACTORS[0]} and {FACTORS[1]}", noise, counted)


def _print_row(where: str, share: str, planted: str, noise: float, counted: Counter[str]) -> None:
    cells = " | ".join(str(counted[outcome]) for outcome in OUTCOMES)
    print(f"| {where} | {share} | {planted} | {noise:.0%} | {cells} |", flush=True)
