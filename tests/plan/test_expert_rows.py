"""What follows the tokens of all ranks of attention data parallelism, apart from a rank's own rows."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.compiled import steps
from fastroof.compiled.expert_rows import RankRules, expert_rows_us, seen_tokens, wait_for_others_us
from fastroof.compiled.jit import jit
from fastroof.compiled.plan_files import arena_fits
from fastroof.compiled.steps import open_plan
from fastroof.engines import DataParallel, load_engine
from fastroof.engines.data_parallel import PADDINGS
from fastroof.errors import PlanError
from fastroof.plan.calls import rank_rules

pytestmark = pytest.mark.loops

LAYOUTS = [
    {"model": "qwen3-30b-a3b", "dp": 4, "ep": 4, "engine": "vllm"},
    {"model": "qwen3-30b-a3b", "tp": 2, "dp": 2, "ep": 4, "engine": "sglang"},
    {"model": "qwen3-30b-a3b", "dp": 2, "moe_tp": 2, "engine": "trtllm-1.1"},
    {"model": "deepseek-v3", "dp": 8, "ep": 8, "dtype": "fp8_block", "engine": "trtllm-1.1"},
]


@jit
def _expert_rows_us(arena: Any, total: float, is_decode: bool) -> float:
    return expert_rows_us(arena, open_plan(arena), total, is_decode)


@jit
def _wait_us(arena: Any, own: float, is_own_decode: bool, seen: float, is_decode: bool) -> float:
    return wait_for_others_us(arena, open_plan(arena), own, is_own_decode, seen, is_decode)


@jit
def _seen(rules: RankRules, total: float, fullest: float, is_decode: bool) -> float:
    return seen_tokens(rules, total, fullest, is_decode)


@pytest.fixture(scope="module")
def tables() -> Any:
    return fastroof.load_tables("h100")


@pytest.fixture(scope="module")
def plans(tables: Any) -> list[Any]:
    return [
        fastroof.compile_plan(
            gpu="h100",
            tables=tables,
            max_num_batched_tokens=2048,
            max_num_seqs=256,
            allow_modelled=True,
            **{"engine": "kernels", **layout},
        )
        for layout in LAYOUTS
    ]


def naive_us(plan: Any, total: int, is_decode: bool) -> float:
    """Calls over the tokens of all ranks, each looked up by itself."""
    us = 0.0
    for curve in plan.row_curves:
        call = curve.operator
        if call.steps not in ("all", "decode_only" if is_decode else "with_prefill"):
            continue
        if call.rows == "expert_tokens":
            us += call.times * float(np.interp(total, curve.axis[1:-1], curve.value[1:-1]))
        elif call.role == "experts_gather":
            us += call.times * float(np.interp(total / plan.layout.dp, curve.axis[1:-1], curve.value[1:-1]))
    return us


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("is_decode", [True, False])
def test_experts_of_all_ranks_are_the_sum_of_their_calls(
    plans: list[Any], number: int, is_decode: bool
) -> None:
    plan = plans[number]
    for own in (1, 2, 7, 64, 200):
        total = own * plan.layout.dp
        found = _expert_rows_us(plan.arena, float(total), is_decode)
        assert found == pytest.approx(naive_us(plan, total, is_decode), rel=1e-9), own


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_between_whole_tokens_a_rank_they_are_a_straight_line(plans: list[Any], number: int) -> None:
    plan = plans[number]
    dp = plan.layout.dp
    low, high = (_expert_rows_us(plan.arena, float(dp * own), True) for own in (5, 6))
    assert _expert_rows_us(plan.arena, dp * 5.25, True) == pytest.approx(0.75 * low + 0.25 * high, rel=1e-12)
    # beyond the plan it holds, and less than a token a rank costs as one
    most = plan.max_num_batched_tokens
    assert _expert_rows_us(plan.arena, 2.0 * dp * most, True) == _expert_rows_us(
        plan.arena, dp * most * 1.0, True
    )
    assert _expert_rows_us(plan.arena, 0.0, True) == _expert_rows_us(plan.arena, dp * 1.0, True) > 0.0


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_a_rank_waits_for_nothing_where_all_have_as_many(plans: list[Any], number: int) -> None:
    plan = plans[number]
    for own in (1.0, 3.0, 100.0, 2048.0):
        for is_decode in (True, False):
            assert _wait_us(plan.arena, own, is_decode, own * plan.layout.dp, is_decode) == 0.0


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_a_part_of_the_step_is_at_most_the_step(plans: list[Any], number: int) -> None:
    arena, dp = plans[number].arena, plans[number].layout.dp
    for slot, is_decode in ((steps.TOKENS_AT, False), (steps.DECODE_TOKENS_AT, True)):
        for own in (1, 8, 256, 2048):
            part = _expert_rows_us(arena, float(dp * own), is_decode)
            assert 0.0 < part < arena[int(arena[slot]) + own]


def test_plans_without_experts_of_all_ranks_have_no_such_part(tables: Any) -> None:
    for layout in (
        {"model": "qwen3-30b-a3b", "engine": "vllm"},
        {"model": "llama-3.1-8b", "dp": 4, "engine": "vllm"},
        # the user's own imbalance decides what experts see
        {"model": "qwen3-30b-a3b", "dp": 4, "ep": 4, "dp_imbalance": 1.5, "engine": "vllm"},
    ):
        plan = fastroof.compile_plan(
            gpu="h100",
            tables=tables,
            max_num_batched_tokens=512,
            max_num_seqs=64,
            **{"engine": "kernels", **layout},
        )
        assert plan.arena[[steps.EXPERT_AT, steps.DECODE_EXPERT_AT, steps.RANKS]].tolist() == [0.0, 0.0, 0.0]
        assert _expert_rows_us(plan.arena, 100.0, True) == 0.0


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_it_survives_pickling_and_is_checked_in_files(plans: list[Any], number: int) -> None:
    plan = pickle.loads(pickle.dumps(plans[number]))
    assert _expert_rows_us(plan.arena, 99.0, True) == _expert_rows_us(plans[number].arena, 99.0, True)
    assert arena_fits(plan.arena)
    for slot in (steps.EXPERT_AT, steps.DECODE_EXPERT_AT, steps.RANKS):
        for wrong in (0.0, 1.0, plan.arena[slot] + 0.5, plan.arena[slot] + 1e6 + 1.0):
            arena = plan.arena.copy()
            arena[slot] = wrong
            if slot == steps.RANKS and wrong > 1e6 and wrong == int(wrong):
                continue  # as many ranks would read nothing else
            assert not arena_fits(arena), (slot, wrong)


def test_a_paced_plan_has_it_at_the_pace_of_its_slowest_stage(tables: Any) -> None:
    plan = fastroof.compile_plan(
        "qwen3-30b-a3b",
        "h100",
        tables,
        pp=2,
        dp=2,
        ep=2,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        engine="vllm",
    )
    stage = max(plan.stages, key=lambda one: one.decode_us(64, 2048))
    for total in (2.0, 100.0, 1024.0):
        assert _expert_rows_us(plan.bottleneck.arena, total, True) == 2.0 * _expert_rows_us(
            stage.arena, total, True
        )
    assert plan.bottleneck.decode_us(16, 100) == 2.0 * stage.decode_us(16, 100)


@pytest.mark.parametrize(
    ("padding", "total", "fullest", "seen"),
    [
        ("sum", 1010.0, 1000.0, 1010.0),
        ("fullest", 1010.0, 1000.0, 4000.0),
        ("graphs", 520.0, 512.0, 2048.0),
        ("graphs", 521.0, 513.0, 521.0),
        ("half_full", 20.0, 10.0, 40.0),
        ("half_full", 19.0, 10.0, 19.0),
    ],
)
def test_what_experts_compute(padding: str, total: float, fullest: float, seen: float) -> None:
    number = PADDINGS.index(padding)
    rules = RankRules(ranks=4, in_lockstep=1, decode_padding=number, graph_tokens=512)
    assert _seen(rules, total, fullest, True) == seen
    assert _seen(rules, total, fullest, False) == total
    assert _seen(rules._replace(prompt_padding=number, decode_padding=0), total, fullest, False) == seen


def test_engines_and_versions_differ(tables: Any) -> None:
    def rules(model: str, engine: str) -> RankRules:
        experts = {"ep": 2} if model != "llama-3.1-8b" else {}
        plan = fastroof.compile_plan(
            model, "h100", tables, dp=2, engine=engine, max_num_batched_tokens=64, max_num_seqs=64, **experts
        )
        return rank_rules(plan)

    # dense ranks wait for each other in vLLM 0.13 alone
    dense = {
        name: rules("llama-3.1-8b", name).in_lockstep for name in ("vllm-0.13.0", "vllm-0.19.0", "sglang")
    }
    assert dense == {"vllm-0.13.0": 1, "vllm-0.19.0": 0, "sglang": 0}
    paddings = {
        name: (rules("qwen3-30b-a3b", name).prompt_padding, rules("qwen3-30b-a3b", name).decode_padding)
        for name in ("vllm-0.13.0", "vllm-0.19.0", "sglang", "trtllm-1.1")
    }
    names = {name: (PADDINGS[one], PADDINGS[other]) for name, (one, other) in paddings.items()}
    assert names == {
        "vllm-0.13.0": ("fullest", "fullest"),
        "vllm-0.19.0": ("graphs", "graphs"),
        "sglang": ("sum", "half_full"),
        "trtllm-1.1": ("sum", "fullest"),
    }


def test_every_serving_engine_names_the_source_of_its_rules() -> None:
    for name in ("vllm", "vllm-0.12", "sglang", "trtllm-1.0", "trtllm-1.1"):
        assert load_engine(name).data_parallel.source, name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lockstep", "none"),
        ("prompt_tokens", "most"),
        ("decode_tokens", 3),
        ("graph_tokens", -1),
        ("idle_tokens", 2),
        ("assignment", "random"),
        ("balance_steps", 1.5),
        ("source", None),
    ],
)
def test_wrong_rules_are_refused(key: str, value: Any) -> None:
    with pytest.raises(PlanError, match=key):
        load_engine({"name": "mine", "data_parallel": {key: value}})
    assert load_engine({"name": "mine", "data_parallel": {"balance_steps": 5}}).data_parallel == DataParallel(
        balance_steps=5
    )
