"""A step broken down: its parts add up to it, and each names what it is bound by."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof import StepBatch, compile_plan
from fastroof.engines import StepCosts, engine_names

# hypothesis prints the tables that a failing test was given, and warns of their length instead of failing
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")


@pytest.fixture(scope="module")
def plan(h100):
    return compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=2048, max_num_seqs=64, engine="kernels"
    )


REQUEST = st.one_of(
    st.tuples(st.just(1), st.integers(1, 100_000)), st.tuples(st.integers(1, 200), st.integers(0, 50_000))
)


@pytest.mark.loops
@given(step=st.lists(REQUEST, max_size=8))
def test_the_operators_add_up_to_the_step(plan, step):
    explained = plan.explain(step)
    (us,) = plan.step_us(StepBatch.from_requests([step]))
    assert explained.total_us == us
    assert math.fsum(o.total_us for o in explained.operators) == pytest.approx(us, rel=1e-12)


@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b"])
def test_what_the_engine_adds_is_the_last_row(h100, name, engine):
    plan = compile_plan(name, "h100", h100, engine=engine, max_num_batched_tokens=2048, max_num_seqs=64)
    for step in ([(1, 4095)] * 64, [(700, 0)], [(300, 5000), (1, 90), (1, 20_000)], [(1, 1)], []):
        explained = plan.explain(step)
        times = plan.run(StepBatch.from_requests([step]))
        added_us = times.components.runtime_us[0]
        rows = [part for part in explained.operators if part.role == "runtime"]
        assert math.fsum(part.total_us for part in explained.operators) == pytest.approx(
            times.latency_us[0], rel=1e-12
        )
        assert explained.origin == times.origin[0]
        if not added_us:
            assert not rows
            continue
        assert rows == [explained.operators[-1]]
        (row,) = rows
        assert (row.total_us, row.calls, row.flops, row.moved_bytes) == (added_us, 1, 0.0, 0.0)
        assert (row.bound, row.origin, row.source) == ("host", 4, f"profile {engine}")
    costs = plan.profile.costs
    adds = costs != StepCosts(residual=costs.residual)
    assert bool([part for part in plan.explain([(1, 9)]).operators if part.role == "runtime"]) == adds


@given(step=st.lists(REQUEST, min_size=1, max_size=8))
def test_every_operator_is_within_its_gpu(plan, step):
    for o in plan.explain(step).operators:
        assert o.calls >= 1
        assert o.total_us > 0
        assert o.bound in ("compute", "memory", "launch", "communication")
        if o.flops:
            assert 0 < o.mfu <= 1
            assert o.mfu == pytest.approx(o.flops / (o.total_us * 1e-6 * plan.gpu.peak("bf16")), rel=1e-12)
        else:
            assert math.isnan(o.mfu)


def test_flops_and_bytes_are_those_of_the_model(plan):
    """64 requests at 4096 tokens of Llama-3.1-8B, worked out by hand."""
    operators = {o.name: o for o in plan.explain([(1, 4095)] * 64).operators}
    layers, hidden, wide, vocab = 32, 4096, 14336, 128256
    shapes = {
        "qkv": (6144, hidden),
        "o": (hidden, 4096),
        "gate_up": (2 * wide, hidden),
        "down": (hidden, wide),
    }
    for name, (n, k) in shapes.items():
        assert operators[name].calls == layers
        assert operators[name].flops == layers * 2 * 64 * n * k
        assert operators[name].moved_bytes == layers * 2 * (64 * k + n * k + 64 * n)
    assert operators["lm_head"].flops == 2 * 64 * vocab * hidden
    attention = operators["decode attention"]
    assert attention.flops == layers * 64 * 4 * 32 * 128 * 4096
    assert attention.moved_bytes == layers * 64 * (2 * 2 * 8 * 128 * 4096 + 2 * 2 * 32 * 128)
    assert attention.bound == "memory"
    assert attention.total_us > 1e6 * attention.moved_bytes / 3.35e12


def test_prefill_attention_counts_its_prefix(plan):
    pairs = 100 * 1000 + 100 * 101 / 2 + 7 * 8 / 2
    (attention,) = [o for o in plan.explain([(100, 1000), (7, 0)]).operators if o.name == "prefill attention"]
    assert attention.flops == 32 * 4 * 32 * 128 * pairs
    assert attention.origin == 4


def test_bounds_follow_the_step(plan, h100):
    def bounds(step):
        return {o.name: o.bound for o in plan.explain(step).operators}

    large = bounds([(2048, 0)])
    assert large["gate_up"] == large["down"] == large["prefill attention"] == "compute"
    assert bounds([(1, 10)])["gate_up"] == "memory"
    assert bounds([(1, 10)])["rope"] == bounds([(1, 10)])["decode attention"] == "launch"
    two = compile_plan("llama-3.1-8b", "h100", h100, tp=2, max_num_batched_tokens=64, engine="kernels")
    assert [o.bound for o in two.explain([(1, 10)]).operators if "all-reduce" in o.name] == [
        "communication"
    ] * 2


def test_lm_head_runs_once_a_sequence(plan):
    def logits(step):
        return {o.name: o for o in plan.explain(step).operators}["lm_head"].flops

    assert logits([(500, 0), (1, 9)]) == logits([(1, 9), (1, 9)]) == 2 * logits([(7, 7)])
