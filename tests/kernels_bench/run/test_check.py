"""The reference check: what it measures, what passes, and which points it runs on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import MeasureError
from fastroof.operators.registry import OPERATORS
from kernels_bench.grid.grid import load_grid
from kernels_bench.protocol import Point
from kernels_bench.providers.cpu_kernels import round_bf16
from kernels_bench.run.check import (
    BOUNDS,
    REFERENCE_WORK,
    check_points,
    check_result,
    error_bound,
    relative_error,
)
from tests.kernels_bench.fakes import FakePrepared, FakeProvider, gemm, gemms


def test_error_is_relative_to_the_norm_of_the_reference() -> None:
    assert relative_error([[1.0, 2.0], [2.0, 4.0]], [[1.0, 2.0], [2.0, 0.0]]) == 4.0 / 3.0
    assert relative_error(np.zeros((2, 3)), np.zeros((2, 3))) == 0.0
    assert relative_error([1e-30], [0.0]) == math.inf


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.floats(1e-6, 1e6))
def test_error_does_not_depend_on_scale(values: list[float], scale: float) -> None:
    want = np.array(values) + 2e3
    got = want + np.arange(len(values))
    assert relative_error(got * scale, want * scale) == pytest.approx(relative_error(got, want), rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_never_passes(bad: float) -> None:
    result = np.ones(1000)
    result[7] = bad
    assert not relative_error(result, np.ones(1000)) <= max(BOUNDS.values())


def test_shapes_and_references_that_cannot_be_compared() -> None:
    with pytest.raises(MeasureError, match=r"shape \(2,\), its reference \(3,\)"):
        relative_error(np.ones(2), np.ones(3))
    with pytest.raises(MeasureError, match="nothing to check by"):
        relative_error(np.ones(2), [1.0, math.nan])
    with pytest.raises(MeasureError, match="nothing to check by"):
        relative_error(np.ones(0), np.ones(0))


def test_bf16_bound_lies_between_rounding_and_mistakes() -> None:
    """A GEMM rounded as a GPU rounds it passes with room; one forgotten input in a hundred does not."""
    random = np.random.default_rng(0)
    x, w = (round_bf16(random.standard_normal((64, 100))).astype(np.float64) for _ in range(2))
    want = x @ w.T
    rounded = relative_error(round_bf16(want), want)
    assert 1e-3 < rounded < 2.5e-3
    forgotten = relative_error(x[:, :-1] @ w[:, :-1].T, want)
    assert 3 * rounded < BOUNDS["bf16"] < forgotten / 5


def test_fp8_bound_lies_between_rounding_and_mistakes() -> None:
    def e4m3(values: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(values)
        return np.ldexp(np.round(mantissa * 16) / 16, exponent)

    random = np.random.default_rng(0)
    x, w = (random.standard_normal((64, 256)) for _ in range(2))
    want = x @ w.T
    assert 0.03 < relative_error(e4m3(x) @ e4m3(w).T, want) < 0.045 < BOUNDS["fp8"]
    assert relative_error(1.1 * want, want) > BOUNDS["fp8"]


def test_every_point_of_the_grids_has_a_bound() -> None:
    for name in ("h100", "smoke", "cpu"):
        points = {p.family: p for p in load_grid(name).points()}
        assert all(error_bound(p) in BOUNDS.values() for p in points.values())


def test_a_copy_is_exact_and_a_launch_has_no_result() -> None:
    def elementwise(kind: str) -> Point:
        return Point("elementwise", {"kind": kind, "m": 1, "width": 1, "io_bytes": 1})

    assert error_bound(elementwise("copy")) == 0.0
    assert error_bound(elementwise("fp8_quantise")) == BOUNDS["fp8"]
    assert error_bound(elementwise("rope")) == BOUNDS["bf16"]
    assert check_points([elementwise("launch")]) == ()


def test_a_dtype_without_a_bound_is_an_error() -> None:
    with pytest.raises(MeasureError, match="no error bound for dtype 'int3'"):
        error_bound(gemm(1, dtype="int3"))


def test_first_and_last_set_are_checked_and_the_larger_error_counts() -> None:
    prepared = FakePrepared(gemm(1), FakeProvider(error_of=lambda _: 0.005))
    check = check_result(gemm(1), prepared)
    assert prepared.ran == [0, 2]
    assert check.passed
    assert check.error == pytest.approx(0.005)


@pytest.mark.parametrize("wrong_set", [0, 2])
def test_an_error_in_either_set_fails(wrong_set: int) -> None:
    class OneWrong(FakePrepared):
        def result(self, index: int):  # type: ignore[no-untyped-def]
            return super().result(index) * (math.nan if index == wrong_set else 1.0)

    check = check_result(gemm(1), OneWrong(gemm(1), FakeProvider()))
    assert math.isnan(check.error)
    assert not check.passed


def test_check_points_are_the_largest_quick_one_and_the_smallest() -> None:
    huge = gemm(8192, 8192, 8192)
    assert REFERENCE_WORK < 8192**3
    assert check_points([*gemms(5), huge]) == (gemm(5), gemm(1))
    assert check_points([gemm(3)]) == (gemm(3),)
    assert check_points([huge]) == (huge,)


def test_every_family_of_the_default_grid_is_checked_quickly() -> None:
    families: dict[str, list[Point]] = {}
    for point in load_grid("h100").points():
        families.setdefault(point.family, []).append(point)
    for family in families.values():
        chosen = check_points(family)
        assert 1 <= len(chosen) <= 2 or family[0].values.get("kind") == "launch"
        assert {p.operator for p in chosen} <= set(OPERATORS)
