"""Lookups on raw tables: every method, and the default one against general interpolators."""

from __future__ import annotations

import pytest

from benchmarks import cases
from benchmarks.conftest import Timed
from fastroof.bench import Setup, Workload, lookup_workloads
from fastroof.bench.lookups import LOOKUP_OPERATORS
from fastroof.operators.operator import METHODS


@pytest.fixture(scope="module")
def workloads(setup: Setup) -> dict[str, Workload]:
    return {workload.name: workload for workload in lookup_workloads(setup, {"h100": setup.tables})}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("operator", LOOKUP_OPERATORS)
def test_method(timed: Timed, workloads: dict[str, Workload], operator: str, method: str) -> None:
    name = f"{operator} {method}"
    if name not in workloads:
        pytest.skip(f"the H100 tables that ship have no {operator}")
    timed(workloads[name])


@pytest.mark.parametrize("operator", ["gemm", "attention_decode", "attention_prefill"])
def test_against_interpolators(timed: Timed, setup: Setup, operator: str) -> None:
    """scipy and interpn, those that are installed, on the same nodes with the same answers."""
    timed(cases.lookup(setup, operator))
