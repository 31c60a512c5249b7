"""One step a call, as event loops pay for it, by each way of ``step_costs``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from benchmarks.conftest import Timed
from benchmarks.step_costs import WAYS, MissingProgramError, Way, Workloads, lines
from fastroof.bench.workload import Setup


@pytest.fixture(scope="module")
def built(setup: Setup) -> Iterator[object]:
    """The workloads of a way; its servers and folders last as long as the module."""
    with ExitStack() as stack:

        @cache
        def of(way: Way) -> Workloads:
            try:
                return way.build(setup, stack)
            except MissingProgramError as missing:
                pytest.skip(f"no {missing}")

        yield of


@pytest.mark.parametrize(
    ("way", "kind"), [pytest.param(way, kind, id=f"{way.name}-{kind}") for way in WAYS for kind in way.kinds]
)
def test_way(timed: Timed, built: object, way: Way, kind: str) -> None:
    assert callable(built)
    workloads = built(way)
    assert tuple(workloads) == way.kinds
    timed(workloads[kind])


def test_lines_are_markdown(setup: Setup) -> None:
    head, rule, python = lines(setup, 1, ["python"])
    assert head.count("|") == rule.count("|") == python.count("|") == 6
    assert " ns | " in python
