"""The datasheet model: what a plan is compiled from where nothing was measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fastroof import StepBatch, compile_plan, compile_plans, gpu_names, load_model
from fastroof.models import LayerGroup
from fastroof.plan.curves import CLASSES


@pytest.fixture(scope="module")
def plan():
    with pytest.warns(UserWarning, match="no measured tables of h100.*datasheet"):
        return compile_plan("llama-3.1-8b", "h100", None, engine="kernels")


def test_a_plan_without_tables_warns_and_is_marked_modelled(plan):
    assert plan.tables_hash == ""
    times = plan.run(StepBatch.from_requests([[(1, 9)], [(9, 0)], [(9, 9), (1, 9)]]))
    assert times.origin.tolist() == [4, 4, 4]
    assert {o.origin for o in plan.explain([(9, 9), (1, 9)]).operators} == {4}


def test_each_gpu_can_be_planned_without_tables():
    for name in gpu_names():
        with pytest.warns(UserWarning, match=name):
            (plan,) = compile_plans([{"model": "llama-3.1-8b", "max_num_batched_tokens": 64}], name, None)
        us = plan.decode_us([1, 64], [1, 100_000])
        assert np.isfinite(us).all()
        assert us[1] > us[0] > 0


def test_operators_take_their_roofline_over_one_efficiency(plan):
    steps = {"decode": [(1, 4095)] * 64, "prefill": [(4096, 0)]}
    for step in steps.values():
        for o in plan.explain(step).operators:
            compute_us = 1e6 * o.flops / 989.5e12
            moved_us = 1e6 * o.moved_bytes / 3.35e12
            if o.name in ("qkv", "o", "gate_up", "down", "lm_head"):
                assumed = CLASSES["gemm"]
            elif o.name.endswith("attention"):
                assumed = CLASSES[f"attention_{o.name.split()[0]}"]
            else:
                assumed = CLASSES["elementwise"]
            expected = o.calls * assumed.launch_us + max(compute_us, moved_us) / assumed.efficiency
            assert o.total_us == pytest.approx(expected, rel=1e-9), o.name


def test_attention_is_the_larger_of_its_flops_and_bytes_at_every_length(plan):
    for q in (1, 2, 10, 100, 300, 500, 1000, 3000, 8192):
        (o,) = [o for o in plan.explain([(q, 0)]).operators if o.name == "prefill attention"]
        bound = max(1e6 * o.flops / 989.5e12, 1e6 * o.moved_bytes / 3.35e12)
        assumed = CLASSES["attention_prefill"]
        assert o.total_us == pytest.approx(32 * assumed.launch_us + bound / assumed.efficiency, rel=1e-9), q


@pytest.mark.parametrize("window", [128, 992, 4096])
def test_attention_within_a_window_is_its_own_roofline(window):
    model = load_model("llama-3.1-8b")
    group = model.layers[0]
    kind = replace(group.kind, attention=replace(group.kind.attention, window=window))
    with pytest.warns(UserWarning, match="no measured tables"):
        plan = compile_plan(replace(model, layers=(LayerGroup(kind, 32),)), "h100", None, engine="kernels")
    # a prompt alone, which reads no more than it has; decodes of one length
    for step in ([(q, 0)] for q in (1, 100, 127, 128, 129, 500, 1000, 3000, 8192)):
        (o,) = [o for o in plan.explain(step).operators if o.name == "prefill attention"]
        bound = max(1e6 * o.flops / 989.5e12, 1e6 * o.moved_bytes / 3.35e12)
        assumed = CLASSES["attention_prefill"]
        assert o.total_us == pytest.approx(32 * assumed.launch_us + bound / assumed.efficiency, rel=1e-9)
    for step in ([(1, kv - 1)] * 7 for kv in (2, 127, 128, 129, 991, 992, 993, 50000)):
        (o,) = [o for o in plan.explain(step).operators if o.name == "decode attention"]
        bound = max(1e6 * o.flops / 989.5e12, 1e6 * o.moved_bytes / 3.35e12)
        assumed = CLASSES["attention_decode"]
        assert o.total_us == pytest.approx(32 * assumed.launch_us + bound / assumed.efficiency, rel=1e-9)
    assert plan.decode_us(7, 50000) == plan.decode_us(7, window)
    assert plan.decode_lines is not None


def test_time_grows_with_every_size(plan):
    sizes = np.unique(np.geomspace(1, 1024, 60).astype(int))
    assert (np.diff(plan.decode_us(sizes, 4096)) > 0).all()
    assert (np.diff(plan.decode_us(64, sizes * 100)) > 0).all()
    assert (np.diff(plan.prefill_us(sizes * 8)) > 0).all()
    assert (np.diff(plan.prefill_us(64, sizes * 100)) > 0).all()


def test_the_same_step_is_the_same_bits_here_too(plan):
    assert plan.decode_us(7, 100) == plan.step_us(StepBatch.from_requests([[(1, 99)] * 7]))[0]
    assert plan.prefill_us(70, 100, 3) == plan.step_us(StepBatch.from_requests([[(70, 100)] * 3]))[0]


@pytest.mark.filterwarnings("ignore:no measured tables")
def test_four_of_five_decode_steps_are_within_the_stated_error(h100):
    """Plans from the tables are within 1.28 standard errors, as in a normal distribution."""
    batch, kv_len = np.array([1, 4, 16, 64])[:, None], 2 ** np.arange(7, 15)
    inside = []
    for name, dtype, tp in itertools.product(("llama-3.1-8b", "llama-3.1-70b"), ("bf16", "fp8"), (1, 4)):
        options = {"dtype": dtype, "tp": tp, "max_num_batched_tokens": 64, "max_num_seqs": 64}
        measured, modelled = (
            compile_plan(name, "h100", tables, **{"engine": "kernels", **options}) for tables in (h100, None)
        )
        off = measured.decode_us(batch, kv_len) / modelled.decode_us(batch, kv_len) - 1.0
        inside.append(np.abs(off) <= 1.2816 * modelled.decode_error(batch, kv_len))
    assert 0.7 < np.mean(inside) < 0.9


def test_measured_and_modelled_agree_to_a_factor(plan, h100):
    """Not an accuracy claim: a slipped unit would be a factor of a thousand."""
    measured = compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    for call in (
        lambda p: p.decode_us(64, 4096),
        lambda p: p.prefill_us(4096),
        lambda p: p.decode_us(1, 128),
    ):
        assert 0.5 < call(measured) / call(plan) < 2
