"""Simulated against measured: two logs of vLLM 0.19, request by request, on the engine's own clock.

Kernels are those of that GPU, costs those of a profile that was fitted elsewhere; neither run chose anything.
What is reached stands in benchmarks/accuracy/README.md; the limits here are against collapse. Tables
are imported: ``FASTROOF_TEST_TABLES=FOLDER`` names where they lie.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.csv
import pytest

import fastroof
from fastroof.arrays import Floats
from fastroof.errors import TableError

FOLDER = "ground_truth/vllm_0.19_rtx_pro_6000"
GPU = "rtx_pro_6000"
PERCENTILES = (50, 90, 99)
QUANTITIES = ("ttft", "tpot", "e2e")

LAYOUTS = {"llama-3.1-8b": {}, "qwen3-30b-a3b": {"dp": 2, "ep": 2}}
"""Logs by model, and how each was served."""

# relative errors beyond which something has broken; no table has the uneven gathers of Qwen's ranks
LIMITS = {
    "llama-3.1-8b": {"ttft": 0.16, "tpot": 0.05, "e2e": 0.08, "running": 0.06},
    "qwen3-30b-a3b": {"ttft": 0.65, "tpot": 0.12, "e2e": 0.14, "running": 0.07},
}


class Log(NamedTuple):
    """What one run measured: by request, and how many ran at each second."""

    path: Path
    arrival_s: Floats
    times_ms: dict[str, Floats]
    second_s: Floats
    running: Floats


def columns_of(path: Path) -> dict[str, Floats]:
    table = pyarrow.csv.read_csv(path)
    return {name: table[name].to_numpy().astype(np.float64) for name in table.column_names}


@pytest.fixture(scope="module", params=LAYOUTS)
def log(request: pytest.FixtureRequest, shared: Path) -> Log:
    path = shared / FOLDER / f"{request.param}_requests.csv"
    if not path.is_file():
        pytest.skip(f"no {FOLDER} in the folder `shared`")
    seen = columns_of(path)
    series = columns_of(path.with_name(f"{request.param}_timeseries.csv"))
    first_s, last_s, arrival_s = seen["first_token_s"], seen["last_token_s"], seen["arrival_s"]
    times_ms = {
        "ttft": (first_s - arrival_s) * 1e3,
        "tpot": (last_s - first_s) * 1e3 / (seen["output_tokens"] - 1.0),
        "e2e": (last_s - arrival_s) * 1e3,
    }
    return Log(path, arrival_s, times_ms, series["t"], series["running"])


@cache
def tables() -> fastroof.Tables:
    try:
        found = fastroof.load_tables(GPU)
    except TableError as error:
        pytest.skip(f"needs imported tables of {GPU}, FASTROOF_TEST_TABLES=FOLDER: {error}")
    if not found.sources:
        pytest.skip(f"needs imported tables of {GPU}: FASTROOF_TEST_TABLES=FOLDER")
    return found


@cache
def simulated(path: Path, **changes: bool) -> fastroof.Simulation:
    """The log's requests through its engine, whose arguments meta.json has."""
    model = path.name.removesuffix("_requests.csv")
    plan = fastroof.compile_plan(model, GPU, tables(), engine="vllm-0.19.0", **LAYOUTS[model])
    return fastroof.simulate(plan, path, max_num_batched_tokens=2048, max_num_seqs=128, **changes)


def simulated_ms(simulation: fastroof.Simulation) -> dict[str, Floats]:
    return {name: simulation.requests[f"{name}_ms"].to_numpy() for name in QUANTITIES}


def errors_of(log: Log, simulation: fastroof.Simulation) -> dict[tuple[str, int], float]:
    found_ms = simulated_ms(simulation)
    return {
        (name, p): float(np.percentile(found_ms[name], p) / np.percentile(log.times_ms[name], p)) - 1.0
        for name in QUANTITIES
        for p in PERCENTILES
    }


def running_at(log: Log, simulation: fastroof.Simulation) -> Floats:
    """Requests between their arrival and last token at each second of the log, no more than may run."""
    last_s = log.arrival_s + simulated_ms(simulation)["e2e"] / 1e3
    seconds = log.second_s[:, None]
    there = ((log.arrival_s <= seconds) & (last_s > seconds)).sum(axis=1)
    return np.minimum(there, 128.0 * simulation.plan.layout.dp)


def test_percentiles_are_near(log: Log) -> None:
    model = log.path.name.removesuffix("_requests.csv")
    errors = errors_of(log, simulated(log.path))
    found = ", ".join(f"{name} p{p} {error:+.1%}" for (name, p), error in errors.items())
    print(f"\n{model}: {found}")
    for (name, _), error in errors.items():
        assert abs(error) <= LIMITS[model][name], found


def test_as_many_requests_run_at_each_second(log: Log) -> None:
    running = running_at(log, simulated(log.path))
    off = np.abs(running - log.running)
    most = log.running.max()
    print(f"\nrunning: off by mean {off.mean():.1f}, max {off.max():.0f}, of {most:.0f}")
    assert off.mean() <= LIMITS[log.path.stem.removesuffix("_requests")]["running"] * most
    assert running.max() == most


def test_nothing_but_the_log_is_needed(log: Log) -> None:
    simulation = simulated(log.path)
    requests = simulation.requests
    assert len(requests) == 300
    assert set(requests["status"].to_pylist()) == {"finished"}
    # a log's times count from its first arrival, as its file has them
    np.testing.assert_array_equal(requests["arrival_s"].to_numpy(), log.arrival_s)
    cached = columns_of(log.path)["cached_tokens"].sum()
    assert simulation.outcomes.counters["cached_tokens"] == cached
    assert simulation.settings.async_scheduling


def test_an_engine_that_waits_for_each_step_answers_sooner_when_unsaturated(log: Log) -> None:
    """Why steps are scheduled ahead: arrivals are seen a step late, which the first requests' TTFT shows."""
    early = log.arrival_s < 8.0
    ahead, waits = (simulated(log.path, async_scheduling=flag) for flag in (True, False))
    measured_ms = np.median(log.times_ms["ttft"][early])
    ahead_ms, waits_ms = (np.median(simulated_ms(one)["ttft"][early]) for one in (ahead, waits))
    print(f"\nTTFT p50 before saturation: {measured_ms:.0f} ms, ahead {ahead_ms:.0f}, waits {waits_ms:.0f}")
    assert waits_ms < ahead_ms
    assert abs(ahead_ms / measured_ms - 1.0) < abs(waits_ms / measured_ms - 1.0)
