"""Delta rules in plans: steps against a naive composition, physics, memory by hand, layouts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.errors import ModelError, PlanError
from fastroof.models import LayerKind, Layout, ModelSpec, load_model
from fastroof.models.execution import Execution
from fastroof.models.latent import LatentAttention
from fastroof.models.linear_attention import DeltaRule, GatedDeltaNet, KimiDeltaAttention
from fastroof.models.named import preset_config
from fastroof.models.residuals import AttentionResiduals
from fastroof.operators.calls import AllReduce, Elementwise, Gemm, MixerCall
from fastroof.operators.linear_attention import GDN
from fastroof.serving import SpeculativeDecoding, estimate
from tests.reference import linear_attention as naive

QWEN, EXPERTS, NEXT, KIMI = "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "kimi-k3"
STEPS = [(1, 1, 1023), (64, 1, 4095), (1, 2048, 0), (4, 512, 0)]


@pytest.fixture(scope="module")
def h200() -> Any:
    return fastroof.load_tables("h200")


@pytest.fixture(scope="module")
def dense(h200: Any) -> Any:
    return fastroof.compile_plan(QWEN, "h200", h200, engine="kernels")


def text(preset: str) -> dict[str, Any]:
    config = preset_config(preset)
    return config.get("text_config", config)


def step_us(plan: Any, batch: int, new: int, context: int) -> float:
    return float(plan.step_us(fastroof.StepBatch.from_requests([[(new, context)] * batch]))[0])


def delta_of(model: ModelSpec) -> DeltaRule:
    (found,) = {k.attention for k in model.kinds if isinstance(k.attention, DeltaRule)}
    return found


def kimi_of_one_kind() -> dict[str, Any]:
    """Kimi K3 of 14 layers, none of them latent, none with experts."""
    sizes = {**text(KIMI), "num_hidden_layers": 14, "first_k_dense_replace": 14, "quantization_config": None}
    layers = {"kda_layers": list(range(1, 15)), "full_attn_layers": []}
    return {**sizes, "linear_attn_config": {**sizes["linear_attn_config"], **layers}}


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [QWEN, EXPERTS, NEXT])
@pytest.mark.parametrize(("batch", "new", "context"), STEPS)
def test_a_step_is_three_delta_rules_and_an_attention(
    h200: Any, name: str, batch: int, new: int, context: int
) -> None:
    plan = fastroof.compile_plan(name, "h200", h200, engine="kernels")
    expected = naive.qwen_us(h200, text(name), batch, new, context)
    assert step_us(plan, batch, new, context) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("batch", "new", "context"), STEPS)
def test_a_step_of_kimi_delta_attention(h200: Any, batch: int, new: int, context: int) -> None:
    config = kimi_of_one_kind()
    plan = fastroof.compile_plan(load_model(config), "h200", h200, engine="kernels")
    expected = naive.kimi_delta_us(h200, config, batch, new, context)
    assert step_us(plan, batch, new, context) == pytest.approx(expected, rel=1e-9)


def test_parts_are_added_not_the_fastest_kept(h200: Any, dense: Any) -> None:
    sizes = {"num_k_heads": 16, "num_v_heads": 48, "batch_size": 16, "phase": "generation"}
    parts = [
        float(h200.lookup("gdn", part=part, **sizes).latency_us) for part in ("convolution", "recurrence")
    ]
    explained = {part.name: part for part in dense.explain([(1, 1023)] * 16).operators}
    found = explained["gated delta net (dense linear)"]
    assert found.total_us == pytest.approx(48 * sum(parts), rel=1e-9)
    assert found.calls == 48
    assert found.total_us > 1.05 * 48 * max(parts)


def test_an_engine_that_has_the_recurrence_alone_borrows_the_convolution() -> None:
    tables = fastroof.load_tables("h200")
    plan = fastroof.compile_plan(QWEN, "h200", tables, engine="trtllm")
    of = {part.name: part for part in plan.explain([(1, 1023)] * 16).operators}
    found = of["gated delta net (dense linear)"]
    assert found.origin == 3
    key = ("generation", "all", 4, 16, 128, 48, 128)
    alone = GDN.step_kernels(plan.error_source.tables, key)
    assert [(one.key[1], one.is_borrowed) for one in alone] == [("convolution", True), ("recurrence", False)]


def test_a_decode_costs_the_same_whatever_came_before(dense: Any) -> None:
    near, far = ({p.name: p.total_us for p in dense.explain([(1, n)] * 8).operators} for n in (128, 60_000))
    assert {name for name in near if far[name] != near[name]} == {"decode attention (dense full)"}
    # requests of different lengths too
    mixed = {p.name: p.total_us for p in dense.explain([(1, 128)] * 4 + [(1, 60_000)] * 4).operators}
    name = "gated delta net (dense linear)"
    assert mixed[name] == pytest.approx(near[name], rel=1e-12)


def test_a_decode_is_as_measured_as_its_batch(dense: Any) -> None:
    for batch, context, origin in ((16, 1023, 0), (16, 2**20 - 1, 0), (24, 1023, 1), (2000, 1023, 2)):
        if batch <= dense.max_num_seqs:
            parts = {part.name: part.origin for part in dense.explain([(1, context)] * batch).operators}
            assert parts["gated delta net (dense linear)"] == origin


def test_a_prefix_is_in_the_state(dense: Any) -> None:
    mixers = [part for part in dense.attention if isinstance(part.call, MixerCall)]
    assert [max(part.prefix_us) for part in mixers] == [0.0]
    assert dense.prefill_us(512, 30_000) > dense.prefill_us(512, 0)


def test_more_sequences_take_longer(dense: Any) -> None:
    def delta_us(batch: int) -> float:
        parts = dense.explain([(1, 1023)] * batch).operators
        return next(part.total_us for part in parts if part.name.startswith("gated delta net"))

    times = [delta_us(batch) for batch in (1, 4, 16, 64, 256)]
    assert times == sorted(times)
    # a state of 48 heads in bf16 at least, read and written, at no more than the memory's bandwidth
    moved = 48 * 256 * 2 * 2 * 48 * 128 * 128
    assert times[-1] > moved / dense.gpu.hbm_bytes_per_s * 1e6


def test_shares_of_a_layer_are_looked_up_by_their_own_heads(h200: Any) -> None:
    plan = fastroof.compile_plan(QWEN, "h200", h200, tp=4, engine="kernels")
    sizes = {"num_k_heads": 4, "num_v_heads": 12, "batch_size": 16, "phase": "generation"}
    expected = 48 * float(h200.lookup("gdn", **sizes).latency_us)
    parts = {part.name: part for part in plan.explain([(1, 1023)] * 16).operators}
    assert parts["gated delta net (dense linear)"].total_us == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_add_up(h200: Any, dense: Any, pp: int) -> None:
    plan = fastroof.compile_plan(QWEN, "h200", h200, pp=pp, engine="kernels")
    counts = [{g.kind.name: g.count for g in stage.model.layers} for stage in plan.stages]
    assert counts == [{"dense linear": 48 // pp, "dense full": 16 // pp}] * pp
    sent = sum(p.total_us for p in plan.explain([(1, 1023)] * 16).operators if p.role == "stage_send")
    assert step_us(plan, 16, 1, 1023) == pytest.approx(step_us(dense, 16, 1, 1023) + sent, rel=1e-9)


def test_stages_of_delta_rules_alone_have_plans(h200: Any) -> None:
    plan = fastroof.compile_plan(QWEN, "h200", h200, pp=64, engine="kernels")
    names = {tuple(g.kind.name for g in stage.model.layers) for stage in plan.stages}
    assert names == {("dense linear",), ("dense full",)}
    assert np.isfinite(plan.decode_us(4, 1000))
    # of a stage that keeps 4 KV heads of a token, and a state that none keeps more of
    assert plan.memory.kv_bytes_per_token == 2 * 4 * 256 * 2
    assert plan.memory.state_bytes_per_sequence >= 48 * 128 * 128 * 4


def test_verifying_drafts_reads_a_state_once_as_measured(h200: Any) -> None:
    config = kimi_of_one_kind()
    plan = fastroof.compile_plan(load_model(config), "h200", h200, engine="kernels")
    bound = plan.attention[0].phase(True).query_bound(plan.gpu)

    def roofline_us(queries: int) -> float:
        # as loops take it: a query's price, and what is read again
        return queries * bound.query + (queries - 1) * bound.kv

    sizes = {"num_k_heads": 96, "num_v_heads": 96, "batch_size": 256}
    for queries in (2, 4, 8):
        several, one = (
            sum(
                float(h200.lookup("kda", phase=phase, part=part, q_len=q_len, **sizes).latency_us)
                for part in ("convolution", "recurrence")
            )
            for phase, q_len in (("verify", queries), ("generation", 1))
        )
        assert roofline_us(queries) / roofline_us(1) == pytest.approx(several / one, rel=0.12)
    # far from a state read again for every query
    assert roofline_us(8) < 0.6 * 8 * roofline_us(1)


def test_speculation_takes_a_drafted_token_for_less_than_a_sequence(dense: Any) -> None:
    drafted = estimate(dense, 1024, 256, 64, speculation=SpeculativeDecoding(3, 2.0)).decode_step_us
    wide = dense.decode_us(256, 1152)
    assert dense.decode_us(64, 1152) < drafted < wide


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "values", "linear", "kv_heads", "full"), [
    (QWEN, 48, 48, 4, 16), (EXPERTS, 32, 30, 2, 10), ("qwen3.5-122b-a10b", 64, 36, 2, 12),
    ("qwen3.5-397b-a17b", 64, 45, 2, 15), (NEXT, 32, 36, 2, 12),
])  # fmt: skip
def test_states_and_caches_by_hand(name: str, values: int, linear: int, kv_heads: int, full: int) -> None:
    model = load_model(name)
    # 3 taps of 16 queries, 16 keys and so many values of 128 in bf16, so many states of 128 x 128 in float32
    state = 3 * (2 * 16 + values) * 128 * 2 + values * 128 * 128 * 4
    assert model.state_bytes(Layout()) == linear * state
    assert model.state_bytes(Layout(2)) * 2 == linear * state
    assert model.kv_bytes_per_token(Layout(), "bf16") == full * 2 * kv_heads * 256 * 2


def test_states_of_kimi_k3_by_hand() -> None:
    model = load_model(KIMI)
    state = 3 * 3 * 96 * 128 * 2 + 96 * 128 * 128 * 4
    assert model.state_bytes(Layout()) == 69 * state
    assert model.state_bytes(Layout(8)) * 8 == 69 * state
    # latent vectors are on every GPU
    assert model.kv_bytes_per_token(Layout(8), "bf16") == 24 * 576 * 2


def test_what_fits_counts_states(h200: Any) -> None:
    memory = fastroof.compile_plan(QWEN, "h200", h200, engine="kernels").memory
    kv_bytes, state = 16 * 2 * 4 * 256 * 2, load_model(QWEN).state_bytes(Layout())
    assert (memory.kv_bytes_per_token, memory.state_bytes_per_sequence) == (kv_bytes, state)
    room = memory.max_kv_tokens * kv_bytes
    assert memory.max_sequences(1000) == room // (1000 * kv_bytes + state)
    # a state is as much as 2,349 tokens
    assert math.ceil(memory.state_tokens) == 2349


# -- layers ----------------------------------------------------------------------------------------


def test_a_gated_delta_nets_calls() -> None:
    calls = delta_of(load_model(QWEN)).calls(5120, Layout(2), Execution(dtype="fp8"))
    gemms = [(c.role, c.n, c.k, c.dtype) for c in calls if isinstance(c, Gemm)]
    assert gemms == [
        # 8 queries, 8 keys, 24 values and 24 gates of 128; a decay and a step of 24 heads stay in bf16
        ("state_in", (8 + 8 + 24 + 24) * 128, 5120, "fp8"),
        ("state_gate", 48, 5120, "bf16"),
        ("state_out", 5120, 24 * 128, "fp8"),
    ]
    (mixer,) = (c for c in calls if isinstance(c, MixerCall))
    assert mixer.decode == ("gdn", ("generation", "all", 4, 8, 128, 24, 128))
    assert mixer.prefill == ("gdn", ("context", "all", 4, 8, 128, 24, 128))
    assert isinstance(calls[-1], AllReduce)


@pytest.mark.parametrize("gate_rank", [None, 128])
def test_kimi_delta_attentions_calls(gate_rank: int | None) -> None:
    layer = KimiDeltaAttention(32, 128, 32, 128, gate_rank=gate_rank)
    gemms = [(c.n, c.k) for c in layer.calls(2304, Layout(4), Execution()) if isinstance(c, Gemm)]
    inner, rank = 8 * 128, gate_rank or 0
    expected = [((3 if rank else 4) * inner, 2304), (128 + 8 + rank, 2304), (inner, 128)]
    expected += [(inner, rank)] if rank else []
    assert gemms == [*expected, (2304, inner)]
    projections = sum(n * k for n, k in [*expected, (2304, inner)])
    # norms, taps, a scale a head and a bias a channel
    others = 2304 + 128 + 3 * inner * 4 + 8 + inner
    weights = sum(layer.linear_weights(2304, Layout(4)).values()) + layer.other_weights(2304, Layout(4))
    assert weights == projections + others


def test_heads_must_divide_by_the_split() -> None:
    assert delta_of(load_model(QWEN)).obstacles(Layout(16)) == []
    assert KimiDeltaAttention(24, 128, 24, 128).obstacles(Layout(16)) == [
        "24 heads of keys of linear attention do not divide by 16",
        "24 heads of values of linear attention do not divide by 16",
    ]
    with pytest.raises(PlanError, match="query heads do not divide by 16"):
        load_model(QWEN).check_layout(Layout(16))


@pytest.mark.parametrize(("sizes", "why"), [
    ({"num_v_heads": 40}, "40 heads of values do not divide by 16 of keys"),
    ({"state_dtype": "int8"}, "unknown state dtype 'int8'; valid: float32, float16, bfloat16"),
    ({"head_k_dim": 0}, "head_k_dim"),
])  # fmt: skip
def test_sizes_that_no_layer_has(sizes: dict[str, Any], why: str) -> None:
    given = {"num_k_heads": 16, "head_k_dim": 128, "num_v_heads": 32, "head_v_dim": 128, **sizes}
    with pytest.raises(ModelError, match=why):
        GatedDeltaNet(**given)


def test_a_state_in_bf16_is_half_as_large() -> None:
    whole, half = (GatedDeltaNet(16, 128, 32, 128, state_dtype=name) for name in ("float32", "bfloat16"))
    taps = 3 * 64 * 128 * 2
    assert whole.state_bytes(Layout()) - taps == 2 * (half.state_bytes(Layout()) - taps)


# -- Kimi K3 ---------------------------------------------------------------------------------------


def kinds_of(model: ModelSpec) -> dict[str, LayerKind]:
    return {kind.name: kind for kind in model.kinds}


def test_kimi_k3_has_its_layers() -> None:
    model = load_model(KIMI)
    assert {g.kind.name: g.count for g in model.layers} == {
        "dense linear": 1,
        "moe linear": 68,
        "moe latent": 24,
    }
    kinds = kinds_of(model)
    assert kinds["moe latent"].attention == LatentAttention(
        96, 512, 128, 64, 128, 1536, rope=False, output_gate=True
    )
    # experts alone are in mxfp4
    assert {kind.formats for kind in model.kinds} == {(), (("experts", "mxfp4"),)}
    # embedding and seven whole blocks of 12 layers, and a block of 9
    assert model.residual_rows == 9
    sealed = (12 * (1 + 2 + 3 + 4 + 5 + 6 + 7) + 9 * 8) / 93
    assert all(kind.connections == AttentionResiduals(9, sealed) for kind in model.kinds)


def test_latent_experts_with_a_norm_are_summed_before_it() -> None:
    kind = kinds_of(load_model(KIMI))["moe linear"]
    calls = kind.mlp.calls(7168, Layout(8), Execution(dtype="mxfp4", formats=kind.formats))
    named = [(c.role, getattr(c, "n", 0) or getattr(c, "row_bytes", 0.0)) for c in calls]
    assert named[-4:] == [
        ("mlp_allreduce", 3584 * 2.0),
        ("mlp_norm", 2 * 3584 * 2.0),
        ("experts_up", 7168),
        # of the shared experts
        ("mlp_allreduce", 7168 * 2.0),
    ]
    assert [c.dtype for c in calls if isinstance(c, Gemm)] == ["bf16"] * 5


def test_attention_residuals_read_the_sums_of_blocks() -> None:
    kind = kinds_of(load_model(KIMI))["moe linear"]
    first = kind.calls(7168, Layout(8), Execution())[0]
    assert isinstance(first, Elementwise)
    assert (first.role, first.times) == ("hyper_connection", 2)
    assert first.row_bytes == pytest.approx((408 / 93 + 2) * 7168 * 2)
    with pytest.raises(ModelError, match="sealed must be from 1 to streams 3, got 4"):
        AttentionResiduals(3, 4.0)


@pytest.mark.parametrize(("layers", "why"), [
    ({"kda_layers": [1, 2], "full_attn_layers": [2, 3]}, "each of the layers 1 to 3 once, got 2 and 2"),
    ({"kda_layers": [1, 2], "full_attn_layers": []}, "each of the layers 1 to 3 once, got 2 and 0"),
])  # fmt: skip
def test_layers_of_kimi_k3_that_cannot_be(layers: dict[str, Any], why: str) -> None:
    sizes = {**text(KIMI), "num_hidden_layers": 3}
    with pytest.raises(ModelError, match=why):
        load_model({**sizes, "linear_attn_config": {**sizes["linear_attn_config"], **layers}})


def test_kimi_linear_has_a_narrow_gate_and_one_residual() -> None:
    sizes = {**kimi_of_one_kind(), "attn_res_block_size": None}
    model = load_model(
        {
            **sizes,
            "linear_attn_config": {**sizes["linear_attn_config"], "use_full_rank_gate": False},
        }
    )
    (kind,) = model.kinds
    assert kind.connections is None
    assert model.residual_rows == 1
    assert kind.attention == KimiDeltaAttention(96, 128, 96, 128, gate_rank=128)


def test_kimi_k3_without_its_delta_rules_sizes() -> None:
    with pytest.raises(ModelError, match="field linear_attn_config is missing"):
        load_model({**text(KIMI), "linear_attn_config": None})
