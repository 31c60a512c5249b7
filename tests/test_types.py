"""What answers are of: mypy checks the types that are asserted, pytest that they are so."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import pytest

import fastroof
from fastroof import StepPlan, Tables
from fastroof.arrays import Floats


@pytest.fixture(scope="module")
def plan(h100: Tables) -> StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")


def test_integers_give_a_float(plan: StepPlan) -> None:
    one = np.int32(1)
    for answer in (
        assert_type(plan.decode_us(64, 4096), float),
        assert_type(plan.decode_us(one, 4096, threads=2), float),
        assert_type(plan.prefill_us(64), float),
        assert_type(plan.prefill_us(64, one, 2), float),
        assert_type(plan.decode_error(64, 4096), float),
    ):
        assert type(answer) is float


def test_arrays_give_an_array(plan: StepPlan) -> None:
    sizes, out = np.array([1, 2]), np.empty(2)
    for answer in (
        assert_type(plan.decode_us([1, 2], 4096), Floats),
        assert_type(plan.decode_us(64, sizes), Floats),
        assert_type(plan.decode_us(sizes, 64, out=out), Floats),
        assert_type(plan.prefill_us(64, sizes), Floats),
        assert_type(plan.prefill_us(64, 0, [1, 2]), Floats),
        assert_type(plan.decode_error(64, sizes), Floats),
    ):
        assert isinstance(answer, np.ndarray)
        assert answer.dtype == np.float64
        assert answer.shape == (2,)
