"""What every suite shares: the plan and its tables, and timing a workload beside its baselines."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import pytest

import fastroof
from fastroof.bench import Setup, Workload, new_setup
from fastroof.bench.timing import check_agreement, seconds_of
from fastroof.bench.words import rate_of, share_of, time_of_ns

# what ships is timed, whatever the machine has besides
os.environ["FASTROOF_TABLES_IMPORT"] = "never"

ROUNDS = 5
NS_PER_S = 1e9

Timed = Callable[[Workload], None]


@pytest.fixture(scope="session")
def setup(request: pytest.FixtureRequest) -> Setup:
    """Llama-3.1-8B on the H100 tables; small sizes where nothing is timed."""
    tables = fastroof.load_tables("h100")
    quick = bool(request.config.getoption("benchmark_disable"))
    return new_setup("llama-3.1-8b", "h100", tables, quick=quick)


@pytest.fixture
def timed(benchmark: Any) -> Timed:
    """Check a workload against its baselines, time all of them by turns, print and store the ratios."""

    def timed(workload: Workload) -> None:
        check_agreement(workload, seconds_of(workload)[1])
        others: dict[str, list[float]] = {baseline.name: [] for baseline in workload.baselines}
        mine: list[float] = []

        def time_baselines() -> None:
            for baseline in workload.baselines:
                others[baseline.name].append(seconds_of(baseline)[0] / baseline.count)

        def run() -> None:
            mine.append(seconds_of(workload)[0] / workload.count)

        benchmark.pedantic(run, setup=time_baselines, rounds=ROUNDS, warmup_rounds=1)
        medians = {name: statistics.median(each[-ROUNDS:]) for name, each in others.items()}
        if benchmark.stats is not None:
            _say(benchmark, workload, statistics.median(mine[-ROUNDS:]), medians)

    return timed


def _say(benchmark: Any, workload: Workload, mine: float, baselines: dict[str, float]) -> None:
    ratios = {name: seconds / mine for name, seconds in baselines.items()}
    benchmark.extra_info.update(
        unit=workload.unit,
        count=workload.count,
        ns_per_unit=mine * NS_PER_S,
        bytes_per_unit=workload.bytes_per_unit,
        baseline_ns_per_unit={name: seconds * NS_PER_S for name, seconds in baselines.items()},
        times_as_fast_as=ratios,
    )
    words = [f"{time_of_ns(mine * NS_PER_S)} a {workload.unit}", rate_of(1.0 / mine)]
    for name, ratio in ratios.items():
        words.append(f"{share_of(ratio)} of stream" if name == "stream" else f"{ratio:.3g} x {name}")
    print(f"\n{benchmark.name}: {', '.join(words)}")
