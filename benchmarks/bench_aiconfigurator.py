"""aiconfigurator-core's compiled engine at the same points, where that package is installed."""

from __future__ import annotations

import pytest

from benchmarks import cases
from benchmarks.conftest import Timed
from fastroof.bench import Setup

pytest.importorskip("aiconfigurator_core")


def test_decode_steps(timed: Timed, setup: Setup) -> None:
    timed(cases.aiconfigurator_steps(setup))


def test_measured_gemms(timed: Timed, setup: Setup) -> None:
    timed(cases.aiconfigurator_gemms(setup))
