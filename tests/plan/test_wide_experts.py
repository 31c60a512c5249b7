"""Plans whose experts run the kernels of wide expert parallelism, with a load balancer and without."""

from __future__ import annotations

import pytest

from fastroof import StepBatch, Tables, compile_plan, compile_plans, load_model
from fastroof.columns import ORIGIN_BORROWED
from fastroof.errors import MissingTableError, PlanError
from tests.reference.kinds import step_us

LIMITS = {"max_num_batched_tokens": 256, "max_num_seqs": 64}
MODEL = load_model("minimax-m2.5")
"""Its layer is one of the four that TensorRT-LLM's wide kernels were measured of."""

NODE = {"dp": 8, "ep": 8, "engine": "trtllm-1.1", "exchange": "gather", **LIMITS}
WIDE = {"dp": 16, "ep": 16, "engine": "trtllm-1.1", "exchange": "alltoall", **LIMITS}


def experts(plan, requests):
    return next(part for part in plan.explain(requests).operators if part.role == "experts")


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.parametrize(
    "options",
    [{"wide_experts": True}, {"eplb": True}, {"eplb": True, "num_slots": 288, "routing": "power_law_1.01"}],
)
def test_a_step_is_the_sum_of_its_kernels(h100, options):
    plan = compile_plan(MODEL, "h100", h100, **{**NODE, "engine": "kernels"}, **options)
    for requests in ([(1, 99)] * 8, [(64, 0)] * 4):
        part = experts(plan, requests)
        tokens = 8 * sum(new for new, _ in requests)
        alone = h100.lookup(
            "moe_wide", num_tokens=tokens, hidden=3072, intermediate=1536, topk=8, num_experts=256, moe_ep=8,
            num_slots=options.get("num_slots", 256), phase="any", dtype="fp8_block",
            distribution=plan.execution.routing,
        )  # fmt: skip
        assert part.total_us == pytest.approx(62 * float(alone.latency_us), rel=1e-12)
        explained = plan.explain(requests)
        assert sum(o.total_us for o in explained.operators) == pytest.approx(explained.total_us, rel=1e-12)
        found = float(plan.step_us(StepBatch.from_requests([requests]))[0])
        assert found == explained.total_us == pytest.approx(step_us(plan, h100, requests), rel=1e-9)
    assert 0.0 < plan.decode_error(8, 100) < 0.5


@pytest.mark.loops
def test_the_rest_of_a_step_stays_as_it_is(h100):
    options = {"dtype": "fp8_block", **NODE}
    plan, wide = (
        compile_plan(
            "qwen3-235b-a22b", "h100", h100, **{"engine": "kernels", **options}, wide_experts=is_wide
        )
        for is_wide in (False, True)
    )
    requests = [(1, 99)] * 8
    apart = experts(wide, requests).total_us - experts(plan, requests).total_us
    assert wide.decode_us(8, 100) - plan.decode_us(8, 100) == pytest.approx(apart, rel=1e-9)
    assert experts(wide, requests).origin == ORIGIN_BORROWED


def test_more_than_a_node_of_groups_runs_the_engines_own_wide_kernels(h100):
    question = {
        "node": {**NODE, "exchange": "alltoall"},
        "wide": WIDE,
        "gathered": {**WIDE, "exchange": "gather"},
        "off": {**WIDE, "wide_experts": False},
        "sglang": {**WIDE, "engine": "sglang"},
    }
    plans = {
        name: compile_plan(MODEL, "h100", h100, **{"engine": "kernels", **options})
        for name, options in question.items()
    }
    assert {name for name, plan in plans.items() if plan.execution.wide_experts} == {"wide"}
    assert plans["wide"].describe()["experts"] == "wide"
    assert "experts" not in plans["off"].describe()
    # a shape that was not measured stays with the kernels of a node
    assert not compile_plan(
        "qwen3-235b-a22b", "h100", h100, dtype="fp8_block", **{"engine": "kernels", **WIDE}
    ).execution.wide_experts


def test_a_load_balancer_of_another_engine_is_borrowed(h100):
    own, borrowed = (
        compile_plan(MODEL, "h100", h100, **{**WIDE, "engine": engine}, eplb=True)
        for engine in ("trtllm-1.1", "sglang")
    )
    parts = [experts(plan, [(1, 99)] * 8) for plan in (own, borrowed)]
    assert parts[0].total_us == parts[1].total_us
    assert parts[0].origin < ORIGIN_BORROWED == parts[1].origin


def test_copies_of_experts_take_memory(h100):
    plain, more = (
        compile_plan(MODEL, "h100", h100, **{"engine": "kernels", **WIDE}, eplb=True, num_slots=slots)
        for slots in (None, 288)
    )
    one = 62 * 3 * 3072 * 1536 * (1 + 4 / 128**2)
    assert more.memory.weight_bytes - plain.memory.weight_bytes == pytest.approx(32 / 16 * one, rel=1e-3)
    assert more.memory.max_kv_tokens < plain.memory.max_kv_tokens
    assert more.describe()["num_slots"] == 288


def test_plans_of_one_set_have_distinct_names(h100):
    requests = [{"model": MODEL, **WIDE, "eplb": is_on} for is_on in (False, True)]
    plans = compile_plans(requests, "h100", h100)
    alone = [compile_plan(gpu="h100", tables=h100, **request) for request in requests]
    assert [plan.decode_us(8, 99) for plan in plans] == [plan.decode_us(8, 99) for plan in alone]
    assert plans[0].decode_us(8, 99) != plans[1].decode_us(8, 99)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eplb": True, "ep": 1}, "whole on one of several GPUs: use ep 16"),
        ({"eplb": True, "routing": "balanced"}, "nothing to balance: use eplb=False"),
        ({"eplb": True, "wide_experts": False}, "wide_experts=None or True"),
        ({"num_slots": 288}, "copies of experts need a load balancer: use eplb=True"),
        ({"eplb": True, "num_slots": 250}, "a multiple of ep 16 and at least the 256 experts, got 250"),
        ({"eplb": True, "num_slots": 290}, "a multiple of ep 16 and at least the 256 experts, got 290"),
        ({"eplb": 1}, "eplb must be True or False, got 1"),
        ({"wide_experts": "yes"}, "wide_experts must be True, False or None"),
        ({"eplb": True, "num_slots": 2.5}, "num_slots"),
    ],
)
def test_what_no_engine_runs(h100, options, message):
    with pytest.raises(PlanError, match=message):
        compile_plan(MODEL, "h100", h100, **{"engine": "kernels", **WIDE, "exchange": None, **options})


def test_what_has_no_experts_or_no_rows(h100):
    with pytest.raises(PlanError, match="it has no routed experts"):
        compile_plan("llama-3.1-8b", "h100", h100, eplb=True, engine="kernels")
    with pytest.raises(MissingTableError, match=r"a load balancer; measured: .*allow_modelled=True"):
        compile_plan(
            "qwen3-235b-a22b", "h100", h100, **{"engine": "kernels", **WIDE}, dtype="bf16", eplb=True
        )
    modelled = compile_plan(
        "qwen3-235b-a22b",
        "h100",
        h100,
        **{"engine": "kernels", **WIDE},
        dtype="bf16",
        eplb=True,
        allow_modelled=True,
    )
    assert experts(modelled, [(1, 9)]).source == "datasheet"


# -- routing by family --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "routing"),
    [("mixtral-8x7b", "balanced"), ("qwen3-30b-a3b", "power_law_1.2"), ("llama-3.1-8b", "power_law_1.2")],
)
def test_tokens_spread_as_measured_of_the_family(h100: Tables, model: str, routing: str) -> None:
    made = {"tp": 2, "engine": "kernels"}
    own, auto, named = (
        compile_plan(model, h100.gpu, h100, **made, **given)
        for given in ({}, {"routing": "auto"}, {"routing": routing})
    )
    assert load_model(model).routing == routing
    assert own.execution.routing == auto.execution.routing == named.execution.routing == routing
    assert own.decode_us(64, 1024) == named.decode_us(64, 1024)


def test_a_balancer_has_nothing_to_do_if_the_family_is_balanced(h100: Tables) -> None:
    with pytest.raises(PlanError, match="balanced routing leaves eplb nothing to balance"):
        compile_plan("mixtral-8x7b", h100.gpu, h100, dp=8, ep=8, eplb=True)
