"""What every suite shares: the plan and its tables, and timing a workload and its baselines."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

import fastroof
from fastroof.bench.timing import (
    NS_PER_S,
    Measured,
    check_agreement,
    rate_of,
    result_document,
    seconds_of,
    share_of,
    time_of_ns,
)
from fastroof.bench.workload import Setup, Workload, new_setup
from tests.selection import pytest_xdist_auto_num_workers  # noqa: F401

# what ships is timed, whatever the machine has besides
_NO_TABLES = tempfile.TemporaryDirectory(prefix="fastroof-tables-")
os.environ["FASTROOF_TABLES"] = _NO_TABLES.name
os.environ["FASTROOF_TABLES_IMPORT"] = "never"

ROUNDS = 5

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
        first_s, answers = seconds_of(workload)
        check_agreement(workload, answers)
        others: dict[str, list[float]] = {baseline.name: [] for baseline in workload.baselines}
        mine: list[float] = []

        def time_baselines() -> None:
            for baseline in workload.baselines:
                others[baseline.name].append(seconds_of(baseline)[0] / baseline.count)

        benchmark.pedantic(
            lambda: mine.append(seconds_of(workload)[0]), setup=time_baselines, rounds=ROUNDS, warmup_rounds=1
        )
        if benchmark.stats is not None:
            medians = {name: statistics.median(each[-ROUNDS:]) * NS_PER_S for name, each in others.items()}
            done = Measured(workload, first_s, tuple(mine[-ROUNDS:]), medians)
            benchmark.extra_info.update(result_document(done))
            print(f"\n{benchmark.name}: {', '.join(_words(done))}")

    return timed


def _words(done: Measured) -> list[str]:
    words = [f"{time_of_ns(done.ns_per_unit)} a {done.workload.unit}", rate_of(done.units_per_s)]
    for name, ratio in done.ratios.items():
        words.append(f"{share_of(ratio)} of stream" if name == "stream" else f"{ratio:.3g} x {name}")
    return words
