"""Packing, plans, single steps and starts."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.baselines import python_decode_us
from benchmarks.conftest import Timed
from fastroof.bench import WORKLOADS, Baseline, Setup


@pytest.mark.parametrize("name", ["pack", "plan", "import", "command"])
def test_once(timed: Timed, setup: Setup, name: str) -> None:
    timed(WORKLOADS[name](setup))


def test_plans(timed: Timed, benchmark: Any, setup: Setup) -> None:
    """The plans of a sweep, with the memory that they take."""
    workload = WORKLOADS["plans"](setup)
    tracemalloc.start()
    kept = workload.run()
    benchmark.extra_info["plan_bytes"] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    timed(replace(workload, run=lambda: len(workload.run())))


@pytest.mark.parametrize("name", ["scalar", "scalar-callable", "one-row", "one-step"])
def test_one_step_a_call(timed: Timed, setup: Setup, name: str) -> None:
    workload = WORKLOADS[name](setup)
    count = setup.size(50, 2)

    def plain() -> None:
        for _ in range(count):
            python_decode_us(setup.plan, setup.tables, 64, 4096)

    timed(replace(workload, baselines=(Baseline("lookups in Python", plain, count, None),)))


def test_scalars_are_the_plans_times(setup: Setup) -> None:
    plain = python_decode_us(setup.plan, setup.tables, 64, 4096)
    assert setup.plan.decode_us(64, 4096) == pytest.approx(plain, rel=1e-9)
    assert setup.plan.scalar(64, 4096) == setup.plan.decode_us(64, 4096)
