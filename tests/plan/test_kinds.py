"""Plans of models with layers of several kinds: one arena, equal to the sum of a lookup a layer."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import ModelSpec, StepBatch, StepPlan, Tables, compile_plan, compile_plans, load_model
from fastroof.compiled.plan_files import arena_fits
from fastroof.errors import ModelError, PlanError
from fastroof.models import LayerGroup, LayerKind, Layout
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.execution import Execution
from fastroof.models.mlp import GatedMlp
from fastroof.operators.calls import Call, Gemm, Parallel
from tests.reference.kinds import step_us

BASE = load_model("llama-3.1-8b")
LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 64}
HEADS = ((32, 8, 128), (16, 2, 128), (32, 4, 128), (8, 8, 128), (16, 4, 64))


@dataclass(frozen=True)
class Fp8Cache(GroupedQueryAttention):
    """Attention whose cache is fp8 whatever the others' is."""

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        return super().calls(hidden, layout, execution._replace(kv_dtype="fp8"))

    def kv_bytes_per_token(self, layout: Layout, kv_dtype: str) -> float:
        return super().kv_bytes_per_token(layout, "fp8")


@dataclass(frozen=True)
class Branches:
    """An MLP beside a wider one that works on the tokens of all ranks; another kernel in decodes."""

    has_experts = True

    def obstacles(self, layout: Layout) -> list[str]:
        return []

    def calls(self, hidden: int, layout: Layout, execution: Execution) -> tuple[Call, ...]:
        shared = (Gemm("gate_up", "shared up", 1, 4096, hidden, "bf16"),)
        routed = (
            Gemm("gate_up", "routed up", 2, 1024, hidden, "bf16", rows="expert_tokens"),
            Gemm("down", "routed down", 1, hidden, 1024, "bf16", rows="expert_tokens"),
        )
        return (
            Parallel((shared, routed)),
            Gemm("down", "one in decodes", 1, hidden, 2048, "bf16", steps="decode_only"),
            Gemm("down", "another in prefill", 1, hidden, 4096, "bf16", steps="with_prefill"),
        )

    def linear_weights(self, hidden: int, layout: Layout) -> dict[str, int]:
        return {"gate_up": hidden}

    def other_weights(self, hidden: int, layout: Layout) -> int:
        return 0

    def activation_width(self, hidden: int, layout: Layout) -> int:
        return hidden


def mixed(*groups: tuple[tuple[int, int, int], int, bool]) -> ModelSpec:
    """A model of these heads, counts and whether the cache is fp8."""
    mlp = GatedMlp(14336)
    layers = tuple(
        LayerGroup(LayerKind((Fp8Cache if fp8 else GroupedQueryAttention)(*heads), mlp, f"kind {i}"), n)
        for i, (heads, n, fp8) in enumerate(groups)
    )
    return replace(BASE, layers=layers, name="mixed")


TWO = mixed(((32, 8, 128), 20, False), ((16, 2, 128), 12, True))


@pytest.fixture(scope="module")
def two(h100: Tables) -> StepPlan:
    return compile_plan(TWO, "h100", h100, **{"engine": "kernels", **LIMITS})


@pytest.mark.slow
@pytest.mark.loops
@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(HEADS), st.integers(1, 24), st.booleans()), min_size=2, max_size=3),
    st.integers(1, 64),
    st.integers(2, 20000),
    st.sampled_from([3, 16, 100, 255]),
    st.sampled_from([1, 2]),
)
def test_a_step_is_the_sum_of_a_lookup_a_layer(h100, groups, batch, kv_len, new, tp):
    plan = compile_plan(mixed(*groups), "h100", h100, tp=tp, **{"engine": "kernels", **LIMITS})
    decodes, chunks = [(1, kv_len - 1)] * batch, [(new, 0)] * 2
    for requests, us in (
        (decodes, plan.decode_us(batch, kv_len)),
        (chunks, plan.prefill_us(new, 0, 2)),
        (decodes[: 512 - 2 * new][:62] + chunks, None),
    ):
        found = float(plan.step_us(StepBatch.from_requests([requests]))[0])
        assert found == pytest.approx(step_us(plan, h100, requests), rel=1e-12)
        assert us is None or us == found
        explained = plan.explain(requests)
        assert explained.total_us == found
        assert sum(o.total_us for o in explained.operators) == pytest.approx(found, rel=1e-12)


@pytest.mark.loops
def test_every_entry_point_times_several_kinds_alike(two, h100):
    batch, kv_len = np.array([1, 2, 7, 64]), np.array([2, 511, 3000, 100000])
    assert two.decode_lines is not None
    times = two.decode_us(batch, kv_len)
    steps = StepBatch.from_requests([[(1, kv - 1)] * b for b, kv in zip(batch, kv_len, strict=True)])
    run = two.run(steps, with_error=True)
    assert times.tolist() == [two.scalar(int(b), int(kv)) for b, kv in zip(batch, kv_len, strict=True)]
    assert times.tolist() == run.latency_us.tolist()
    assert run.relative_error.tolist() == pytest.approx(two.decode_error(batch, kv_len).tolist())
    assert (run.relative_error > 0).all()
    again = pickle.loads(pickle.dumps(two))
    assert again.decode_us(batch, kv_len).tolist() == times.tolist()
    assert arena_fits(two.arena)
    (of_set,) = compile_plans([{"model": TWO, "engine": "kernels", **LIMITS}], "h100", h100)
    assert np.array_equal(of_set.arena, two.arena)
    prefix = two.prefill_us(64, 1000, 2) - two.prefill_us(64, 0, 2)
    pair_us, token_us = (sum(part.prefix_us[i] for part in two.attention) for i in (0, 1))
    assert prefix == pytest.approx(pair_us * 64 * 2000 + token_us * 2000, rel=1e-9)


@pytest.mark.loops
def test_layers_of_one_kind_may_be_counted_apart(h100):
    """An operator's error is the same in every layer: counting it in two groups makes no step surer."""
    heads = (32, 8, 128)
    whole, parts = mixed((heads, 32, False)), mixed((heads, 20, False), (heads, 12, False))
    one, two = (
        compile_plan(model, "h100", h100, **{"engine": "kernels", **LIMITS}) for model in (whole, parts)
    )
    steps = StepBatch.from_requests([[(1, 999)] * 8, [(100, 0), (1, 50)], [(64, 300)] * 2])
    np.testing.assert_allclose(two.step_us(steps), one.step_us(steps), rtol=1e-13)
    np.testing.assert_allclose(two.step_error(steps), one.step_error(steps), rtol=1e-12)
    assert np.array_equal(two.run(steps).origin, one.run(steps).origin)
    assert two.memory == one.memory
    assert whole.num_parameters == parts.num_parameters == BASE.num_parameters


def test_memory_is_summed_over_kinds(two):
    assert two.memory.kv_bytes_per_token == 20 * 2 * 8 * 128 * 2 + 12 * 2 * 2 * 128
    assert TWO.kv_bytes_per_token(Layout(8), "bf16") == 20 * 2 * 128 * 2 + 12 * 2 * 128
    assert TWO.num_layers == 32


def test_explain_lists_kinds_separately(two):
    operators = two.explain([(1, 100), (30, 0)]).operators
    for role in ("qkv", "o", "decode_attention", "prefill_attention"):
        parts = [o for o in operators if o.role == role]
        assert [o.calls for o in parts] == [20, 12]
        assert [o.name.rpartition(" (")[2] for o in parts] == ["kind 0)", "kind 1)"]
    roles = [o.role for o in operators]
    assert roles.index("decode_attention") + 2 == roles.index("o")
    assert [o.calls for o in operators if o.role == "lm_head"] == [1]


def test_programs_for_one_kind_refuse_several(two):
    with pytest.raises(ModelError, match=r"several kinds \(20 kind 0, 12 kind 1\)"):
        TWO.only_kind  # noqa: B018
    with pytest.raises(ModelError, match="several kinds"):
        two.heads  # noqa: B018


@pytest.mark.loops
@pytest.mark.parametrize("method", ["nearest", "floor"])
def test_mfu_of_steps_adds_up_too(h100, method):
    plan = compile_plan(TWO, "h100", h100, method=method, **{"engine": "kernels", **LIMITS})
    kinds = [replace(TWO, layers=(group,)) for group in TWO.layers]
    alone = [
        compile_plan(model, "h100", h100, method=method, **{"engine": "kernels", **LIMITS}) for model in kinds
    ]
    for batch, kv_len in ((3, 700), (64, 5000)):
        steps = StepBatch.from_requests([[(1, kv_len - 1)] * batch, [(77, 0)] * 3])
        found = plan.run(steps).components
        parts = [p.run(steps).components for p in alone]
        for name in ("decode_attention_us", "prefill_attention_us"):
            summed = sum(getattr(part, name) for part in parts)
            np.testing.assert_allclose(getattr(found, name), summed, rtol=1e-13)


def test_interpolated_mfu_does_not_add_up(h100):
    with pytest.raises(PlanError, match=r"linear_mfu.*this model has several"):
        compile_plan(TWO, "h100", h100, method="linear_mfu", **{"engine": "kernels", **LIMITS})


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.parametrize("dp", [1, 4])
def test_paths_ranks_and_kernels_of_decodes_are_settled_in_rows(h100, dp):
    attention = GroupedQueryAttention(32, 8, 128)
    layers = (LayerGroup(LayerKind(attention, Branches(), "branches"), 3), *BASE.layers)
    plan = compile_plan(replace(BASE, layers=layers), "h100", h100, dp=dp, **{"engine": "kernels", **LIMITS})
    hidden_paths = set()
    for requests in ([(1, 99)], [(1, 99)] * 50, [(5, 0)], [(200, 0)] * 2, [(1, 40)] * 3 + [(100, 0)]):
        found = float(plan.step_us(StepBatch.from_requests([requests]))[0])
        assert found == pytest.approx(step_us(plan, h100, requests), rel=1e-12)
        explained = plan.explain(requests)
        assert sum(o.total_us for o in explained.operators) == pytest.approx(explained.total_us, rel=1e-12)
        hidden_paths |= {o.name for o in explained.operators if o.total_us == 0.0}
        named = {o.name.partition(" (")[0] for o in explained.operators}
        alone = all(new == 1 for new, _ in requests)
        assert ("one in decodes" in named, "another in prefill" in named) == (alone, not alone)
        if alone:
            assert plan.decode_us(len(requests), requests[0][1] + 1) == found
            assert plan.scalar(len(requests), requests[0][1] + 1) == found
    assert hidden_paths
    assert arena_fits(plan.arena)
    assert 0 < plan.decode_error(50, 100) < 0.2
    both = plan.step_error(StepBatch.from_requests([[(1, 99)] * 50, [(200, 0)]]))
    assert both[0] == pytest.approx(plan.decode_error(50, 100))


def test_layouts_of_dense_models(h100):
    one = compile_plan(BASE, "h100", h100, tp=2, **{"engine": "kernels", **LIMITS})
    ranks = compile_plan(BASE, "h100", h100, tp=2, dp=4, **{"engine": "kernels", **LIMITS})
    assert ranks.layout == Layout(2, dp=4)
    assert (ranks.layout.world_size, ranks.layout.moe_tp) == (8, 8)
    assert np.array_equal(one.arena, ranks.arena)
    for layout, message in (
        ({"pp": 40}, "pp 40: llama-3.1-8b has 32 layers"),
        ({"ep": 2, "tp": 2}, "ep 2: llama-3.1-8b has no experts"),
        ({"ep": 2}, "tp 1 x dp 1 is 1 GPUs per stage, which ep 2 does not fill"),
        ({"tp": 4, "ep": 2, "moe_tp": 4}, "tp 4 x dp 1 .* ep 2 x moe_tp 4 does not fill"),
        ({"dp": 0}, "dp must be a whole number from 1 to 65,536, got 0"),
        ({"moe_tp": True}, "moe_tp must be"),
    ):
        with pytest.raises(PlanError, match=message):
            compile_plan(BASE, "h100", h100, **{"engine": "kernels", **layout, **LIMITS})
