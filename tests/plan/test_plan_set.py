"""Many plans at once: each is what compile_plan makes, to the last bit."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof import compile_plan, compile_plans, load_model, load_tables
from fastroof.compiled.grids import curve_rows, sum_rows
from fastroof.compiled.guides import curve_point
from fastroof.errors import FastroofError, PlanError
from fastroof.operators.calls import Gemm
from fastroof.plan import PlanSet
from fastroof.plan.calls import plain_sum_rows
from fastroof.plan.curves import RowCurve, TableCurves, plain_row_values
from fastroof.plan.options import PlanOptions
from tests.reference.shards import changed


def test_a_set_is_a_sequence_of_the_requested_plans(h100):
    llama = load_model("llama-3.1-8b")
    requests = [
        {
            "model": changed(llama, num_layers=layers, name=f"llama {layers}"),
            "tp": tp,
            "max_num_batched_tokens": 300,
        }
        for layers in (1, 2, 7, 32)
        for tp in (1, 4)
    ]
    requests.append(
        {"model": "qwen2.5-7b", "dtype": "fp8", "max_num_batched_tokens": 200, "max_num_seqs": 400}
    )
    plans = compile_plans(iter(requests), "h100", h100)
    assert isinstance(plans, PlanSet)
    assert isinstance(plans, Sequence)
    assert len(plans) == len(requests)
    assert repr(plans) == "PlanSet(9 plans of 3 architectures and options)"
    for plan, request in zip(plans, requests, strict=True):
        alone = compile_plan(gpu="h100", tables=h100, **request)
        np.testing.assert_array_equal(plan.arena, alone.arena)
        assert (plan.model, plan.memory, repr(plan)) == (alone.model, alone.memory, repr(alone))
        assert [c.operator for c in plan.row_curves] == [c.operator for c in alone.row_curves]
    assert [p.model.name for p in plans[2:6:2]] == ["llama 2", "llama 7"]
    assert plans[-1].model.name == "qwen2.5-7b"
    again = pickle.loads(pickle.dumps(plans))
    np.testing.assert_array_equal(again[3].arena, plans[3].arena)
    with pytest.raises(IndexError):
        plans[9]


def test_requests_that_no_plan_can_be_made_of_are_refused(h100):
    windowed = changed(load_model("llama-3.1-8b"), sliding_window=4096)
    fine = {"model": "llama-3.1-8b"}
    for wrong, words in (
        ({"model": windowed, "method": "floor"}, "interpolates MFU, which does not fit .*'s window"),
        ({"tp": 1}, "plan 1 needs a model"),
        ({**fine, "max_num_batched_tokens": 0}, "max_num_batched_tokens must be"),
        ({**fine, "method": "cubic"}, "method must be"),
    ):
        with pytest.raises(PlanError, match=words):
            compile_plans([fine, wrong], "h100", h100)
    with pytest.raises(PlanError, match="unknown engine 'none'"):
        PlanOptions(engine="none").checked()


def test_plans_of_the_same_tables_share_their_curves(h100):
    first, second = (
        compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=64, engine="kernels")
        for _ in range(2)
    )
    for a, b in zip(first.row_curves, second.row_curves, strict=True):
        assert a.value is b.value
    operator = first.row_curves[2].operator
    curves = TableCurves(h100)
    assert np.shares_memory(curves.row_values(operator, 64)[0], curves.row_values(operator, 60)[0])


@pytest.mark.loops
@given(axis=st.lists(st.integers(1, 2**20), min_size=1, max_size=9, unique=True), length=st.integers(0, 50))
def test_rows_of_a_curve_are_its_points(axis, length):
    axis = np.array([0.0, *sorted(a / 2**12 for a in axis), 2.0**40])
    value, flag = np.sqrt(axis) + 1.0, (np.arange(len(axis)) % 3).astype(np.uint8)
    out, origin = np.full(length, 5.0), np.ones(length, np.uint8)
    curve_rows(axis, value, flag, out, origin)
    points = [curve_point(axis, value, flag, 0, len(axis), float(x)) for x in range(length)]
    assert out[1:].tolist() == [us for us, _ in points[1:]]
    assert origin[1:].tolist() == [made for _, made in points[1:]]
    assert out[:1].tolist() == [0.0] * min(length, 1)
    if length:
        curve = RowCurve(Gemm("qkv", "qkv", 1, 1, 1, "bf16"), axis, value, flag, 0.0)
        for got, expected in zip(plain_row_values(curve, length - 1), (out, origin), strict=True):
            assert got.dtype == expected.dtype
            assert got[1:].tolist() == expected[1:].tolist()


@pytest.mark.loops
def test_sums_of_rows_add_the_operators_in_their_order():
    rng = np.random.default_rng(0)
    values, times = rng.random((3, 20)), rng.integers(1, 90, (4, 3)).astype(float)
    sums = np.zeros((4, 15))
    sum_rows(values, times, sums)
    for plan in range(4):
        expected = np.zeros(15)
        for operator in range(3):
            expected += times[plan, operator] * values[operator, :15]
        assert sums[plan].tolist() == expected.tolist()
    plain = np.zeros((4, 15))
    plain_sum_rows(values, times, plain)
    assert plain.tolist() == sums.tolist()


def test_a_plan_of_too_few_layers_is_refused_in_a_set_too(h100):
    model = load_model("llama-3.1-8b")
    short = changed(model, num_layers=2)
    for requests in ([short], [model, short]):
        with pytest.raises(PlanError, match=r"pp 4: llama-3.1-8b has 2 layers, and every stage needs one"):
            compile_plans([{"model": one, "pp": 4} for one in requests], "h100", h100)
    assert len(compile_plans([{"model": one, "pp": 2} for one in (model, short)], "h100", h100)) == 2


def drawn_options(dice: random.Random) -> dict[str, Any]:
    tp, dp = dice.choice((1, 2, 4)), dice.choice((1, 1, 2))
    return {
        "model": dice.choice(("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gemma-3-12b")),
        "tp": tp,
        "dp": dp,
        "ep": dice.choice((1, 1, tp * dp)),
        "dtype": dice.choice(("auto", "bf16", "fp8")),
        "kv_dtype": dice.choice(("auto", "bf16", "fp8")),
        "engine": dice.choice(("kernels", "vllm", "sglang", "trtllm")),
        "method": dice.choice(("roofline", "roofline", "nearest", "floor")),
        "max_num_batched_tokens": dice.choice((64, 1000, 8192)),
        "max_num_seqs": dice.choice((8, 64)),
        "allow_modelled": dice.choice((True, False)),
        "gemm_smoothing": dice.choice((None, "none", "median3")),
        "routing": dice.choice((None, "balanced")),
    }


@pytest.mark.slow
def test_a_plan_does_not_depend_on_those_compiled_before():
    """What tables keep of one plan for the next is found by all that decides it."""
    dice, shared, compiled = random.Random(33), load_tables("h100"), 0
    while compiled < 6:
        options = drawn_options(dice)
        model = options.pop("model")
        try:
            plan = compile_plan(model, "h100", shared, **{"engine": "kernels", **options})
        except FastroofError:
            continue
        compiled += 1
        fresh = compile_plan(model, "h100", load_tables("h100"), **{"engine": "kernels", **options})
        assert plan.arena.tobytes() == fresh.arena.tobytes(), (model, options)
        assert (plan.kernels, plan.memory) == (fresh.kernels, fresh.memory)
