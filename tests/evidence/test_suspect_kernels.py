"""A kernel that was made wrong is named, and none where none is."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fastroof
from benchmarks.accuracy.planted_faults import OUTCOMES, count_named, simulated_rows
from fastroof.evidence.kernel_times import KernelTimes, kernel_times, predicted_us
from fastroof.evidence.suspect_kernels import (
    LEAST_RUNS,
    OperatorTimes,
    _student,
    operator_times,
    suspect_kernels,
)

LOADS = ((2048, 256), (8192, 512), (256, 1024))
Simulated = tuple[KernelTimes, OperatorTimes]


@pytest.fixture(scope="module")
def simulated() -> Simulated:
    rows = simulated_rows("h100", "llama-3.1-70b", (4, 8), LOADS, (2, 16, 64, 128))
    tables = fastroof.load_tables("h100")
    return kernel_times(rows, tables, rows[0].engine_profile), operator_times(rows, tables)


def test_parts_add_up_to_the_steps(simulated: Simulated) -> None:
    times, operators = simulated
    np.testing.assert_allclose(operators.us.sum(axis=1), predicted_us(times, {}), rtol=1e-9)
    assert (operators.us >= 0.0).all()
    assert {"GEMMs, bf16", "communication", "decode attention, bf16 cache"} <= set(operators.kinds)


@pytest.mark.slow
def test_nothing_is_named_where_nothing_is_wrong(simulated: Simulated) -> None:
    counted = count_named(*simulated, "", 1.0, 0.03, range(200))
    assert counted["another named"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.7, 1.5])
@pytest.mark.parametrize("kind", ["GEMMs, bf16", "communication", "decode attention, bf16 cache"])
def test_the_kind_that_was_scaled_is_named(simulated: Simulated, kind: str, factor: float) -> None:
    counted = count_named(*simulated, kind, factor, 0.01, range(20))
    assert counted["named"] + counted["among those named"] >= 17
    assert counted["another named"] <= 1
    assert sum(counted[outcome] for outcome in OUTCOMES) == 20


def test_a_multiplier_comes_back(simulated: Simulated) -> None:
    times, operators = simulated
    factors = np.array([1.5 if kind == "decode attention, bf16 cache" else 1.0 for kind in operators.kinds])
    generator = np.random.default_rng(1)
    measured = (operators.us @ factors + 300.0) * np.exp(generator.normal(0.0, 0.003, len(operators.us)))
    (found,) = suspect_kernels(times._replace(measured_us=measured), operators)
    assert found.kind == "decode attention, bf16 cache"
    assert found.low < 1.5 < found.high
    assert found.multiplier == pytest.approx(1.5, abs=0.05)
    assert found.error_with < found.error_without
    # of the runs that spend 5 % or more on it, nearly all come out nearer
    taken = operators.us[:, operators.kinds.index(found.kind)]
    whole = operators.us.sum(axis=1)
    assert found.runs == sum(us >= 0.05 * of_all for us, of_all in zip(taken, whole, strict=True))
    assert 0.8 * found.runs <= found.better <= found.runs
    assert "times its table" in str(found)


def test_constants_are_not_blamed_on_a_kernel(simulated: Simulated) -> None:
    times, operators = simulated
    exact = predicted_us(times, {"step_us": 2000.0, "sequence_us": 60.0})
    assert suspect_kernels(times._replace(measured_us=exact), operators) == ()


def test_few_runs_name_nothing(simulated: Simulated) -> None:
    times, operators = simulated
    few = np.arange(len(operators.us)) < LEAST_RUNS - 1
    doubled = times._replace(measured_us=operators.us @ np.where(operators.us.mean(axis=0) > 0, 2.0, 1.0))
    assert suspect_kernels(doubled.pick(few), operators._replace(us=operators.us[few])) == ()


def test_students_quantiles() -> None:
    # Abramowitz, Stegun: table 26.10
    for share, freedom, quantile in ((0.975, 8, 2.306), (0.995, 20, 2.845), (0.9995, 30, 3.646)):
        assert _student(share, freedom) == pytest.approx(quantile, abs=0.01)


def students_share(quantile: float, freedom: int) -> float:
    """Share below a quantile, of an even number of degrees of freedom (Abramowitz, Stegun 26.7.4)."""
    angle = math.atan(quantile / math.sqrt(freedom))
    term, total = 1.0, 1.0
    for i in range(2, freedom, 2):
        term *= (i - 1) / i * math.cos(angle) ** 2
        total += term
    return 0.5 + 0.5 * math.sin(angle) * total


@pytest.mark.parametrize("share", [0.95, 0.975, 0.999])
def test_students_quantiles_are_off_by_the_fourth_power_alone(share: float) -> None:
    """Twice the degrees of freedom leave a sixteenth of the error: all terms before are as they must be."""

    def error(freedom: int) -> float:
        quantile = _student(share, freedom)
        step = 1e-3
        slope = (
            (students_share(quantile + step, freedom) - students_share(quantile - step, freedom)) / 2 / step
        )
        return (students_share(quantile, freedom) - share) / slope

    assert error(60) / error(120) == pytest.approx(16.0, abs=1.5)
