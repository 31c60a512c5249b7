"""Nemotron-H in plans: steps against a naive composition, what is modelled, memory, layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec, load_model
from fastroof.models.execution import ExchangeRules, Execution
from fastroof.models.experts import RoutedExperts
from fastroof.models.layers import NoAttention, NoMlp
from fastroof.models.linear_attention import Mamba2
from fastroof.models.mtp import mtp_model
from fastroof.models.named import preset_config
from fastroof.operators.calls import AllReduce, Collective, Experts, Gemm, MixerCall, Parallel
from fastroof.operators.linear_attention import MAMBA2
from tests.reference import nemotron

NANO, SUPER = "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"


@pytest.fixture(scope="module")
def h200() -> Any:
    return fastroof.load_tables("h200")


@pytest.fixture(scope="module")
def nano(h200: Any) -> Any:
    return fastroof.compile_plan(NANO, "h200", h200, engine="kernels")


def mamba_of(model: ModelSpec) -> Mamba2:
    (found,) = {k.attention for k in model.kinds if isinstance(k.attention, Mamba2)}
    return found


@pytest.mark.parametrize("name", [NANO, "nemotron-h-56b"])
@pytest.mark.parametrize(
    ("batch", "new", "context"), [(1, 1, 1023), (64, 1, 4095), (1, 2048, 0), (4, 512, 0)]
)
def test_a_step_is_its_pattern_letter_by_letter(
    h200: Any, name: str, batch: int, new: int, context: int
) -> None:
    plan = fastroof.compile_plan(name, "h200", h200, engine="kernels")
    found = float(plan.step_us(fastroof.StepBatch.from_requests([[(new, context)] * batch]))[0])
    config = preset_config(name)
    config.setdefault("head_dim", config.get("attention_head_dim"))
    assert found == pytest.approx(nemotron.step_us(h200, config, batch, new, context), rel=1e-9)


def test_the_recurrence_is_modelled_and_marked(nano: Any) -> None:
    for requests in ([(1, 1023)] * 16, [(2048, 0)]):
        explained = nano.explain(requests)
        parts = {part.name: part for part in explained.operators}
        scan, taps = parts["mamba recurrence (mamba)"], parts["mamba convolution (mamba)"]
        assert (scan.origin, scan.source) == (4, "datasheet")
        assert taps.origin < 3
        assert "trtllm" in taps.source
        # nothing else of a model whose kernels were measured
        assert [part.name for part in explained.operators if part.origin == 4] == [scan.name]
        assert explained.total_us == pytest.approx(sum(part.total_us for part in explained.operators))
        assert explained.origin == 4


def test_a_state_costs_what_it_is_however_long_the_context(nano: Any) -> None:
    near, far = (
        {p.name: p.total_us for p in nano.explain([(1, context)] * 8).operators} for context in (128, 60_000)
    )
    grown = {name for name in near if far[name] != near[name]}
    assert grown == {"decode attention (attention)"}
    # a prompt's prefix is in its state: pairs are those of the attention layers alone
    fresh, later = nano.prefill_us(512, 0), nano.prefill_us(512, 30_000)
    assert later > fresh
    mixers = [part for part in nano.attention if isinstance(part.call, MixerCall)]
    assert [max(part.prefix_us) for part in mixers] == [0.0, 0.0]


def test_more_sequences_move_more_state(nano: Any) -> None:
    def scan_us(batch: int) -> float:
        parts = nano.explain([(1, 1023)] * batch).operators
        return next(part.total_us for part in parts if "recurrence" in part.name)

    times = [scan_us(batch) for batch in (1, 8, 64, 256)]
    assert times == sorted(times)
    # a float32 state read and written in each of 23 layers, at no more than the memory's bandwidth
    state_bytes = 23 * 256 * 2 * 4 * 64 * 64 * 128
    assert times[-1] > state_bytes / nano.gpu.hbm_bytes_per_s * 1e6


def test_a_state_in_16_bits_moves_half_the_bytes(nano: Any, h200: Any) -> None:
    short = load_model({**preset_config(NANO), "mamba_ssm_cache_dtype": "bfloat16"})
    other = fastroof.compile_plan(short, "h200", h200, engine="kernels")
    times = []
    for plan in (nano, other):
        (part,) = (p for p in plan.explain([(1, 1023)] * 128).operators if "recurrence" in p.name)
        assert (part.origin, part.source) == (4, "datasheet")
        times.append(part.total_us)
    saved_bytes = 23 * 128 * 2 * 2 * 64 * 64 * 128
    assert times[0] - times[1] == pytest.approx(saved_bytes / nano.gpu.hbm_bytes_per_s * 1e6 / 0.9)


def test_convolutions_are_borrowed_by_their_channels(h200: Any) -> None:
    plan = fastroof.compile_plan(NANO, "h200", h200, tp=8, engine="kernels")
    parts = {part.name: part for part in plan.explain([(2048, 0)]).operators}
    taps = parts["mamba convolution (mamba)"]
    assert taps.origin == 3
    # 16 heads of 64 with 64 states in 4 groups have the nearest sizes to 8 with 128 in 1
    donor = {"num_heads": 16, "head_dim": 64, "state_dim": 64, "num_groups": 4}
    found = h200.lookup("mamba2", phase="context", part="convolution", batch_size=1, q_len=2048, **donor)
    channels = (8 * 64 + 2 * 128) / (16 * 64 + 2 * 4 * 64)
    assert taps.total_us == pytest.approx(23 * float(found.latency_us) * channels, rel=1e-6)


def test_borrowing_by_channels_beats_borrowing_by_b(h200: Any) -> None:
    """Each measured convolution of prompts stands for every other one."""
    off: dict[str, list[float]] = {"channels": [], "B": []}
    keys = [key for key in h200.every_key("mamba2") if key[0] == "context"]
    rows = {
        key: dict(zip(zip(r["batch_size"], r["q_len"], strict=True), r["latency_us"], strict=True))
        for key in keys
        for r in (h200.rows(MAMBA2, key),)
    }
    for wanted in keys:
        for donor in keys:
            common = sorted(rows[wanted].keys() & rows[donor].keys())
            if wanted == donor:
                continue
            sizes = dict(zip(MAMBA2.axis_names, np.array(common, float).T, strict=True))
            measured, borrowed = (np.array([rows[key][at] for at in common]) for key in (wanted, donor))
            by_b = super(type(MAMBA2), MAMBA2).donor_ratio(h200, wanted, donor, sizes)
            for rule, share in (("channels", MAMBA2.donor_ratio(h200, wanted, donor, sizes)), ("B", by_b)):
                off[rule] += np.abs(np.log(borrowed * share / measured)).tolist()
    assert np.mean(off["channels"]) < 0.25
    assert np.mean(off["channels"]) < np.mean(off["B"]) / 2


def test_a_floor_of_layers_counts_those_of_one_thing_as_halves(h200: Any) -> None:
    floor_us = 700.0
    floored = {"name": "floored", "costs": {"prefill_floor_layer_us": floor_us}}
    plan = fastroof.compile_plan(NANO, "h200", h200, engine=floored)
    # 23 of Mamba, 23 of experts, 6 of attention
    assert plan.prefill_us(16, 0) == pytest.approx(26 * floor_us)
    assert load_model(SUPER).num_blocks == 44.0


@pytest.mark.parametrize("pp", [2, 8])
def test_stages_have_layers_of_every_kind_and_add_up(h200: Any, pp: int) -> None:
    plan = fastroof.compile_plan(NANO, "h200", h200, pp=pp, engine="kernels")
    whole = fastroof.compile_plan(NANO, "h200", h200, engine="kernels")
    stages = plan.stages
    counts = [{g.kind.name: g.count for g in stage.model.layers} for stage in stages]
    assert sum(sum(count.values()) for count in counts) == 52
    assert all(count["mamba"] > 0 and count["experts"] > 0 for count in counts)
    requests = fastroof.StepBatch.from_requests([[(1, 1023)] * 16])
    sent = sum(p.total_us for p in plan.explain([(1, 1023)] * 16).operators if p.role == "stage_send")
    assert plan.step_us(requests)[0] == pytest.approx(whole.step_us(requests)[0] + sent, rel=1e-9)
    assert plan.stage_times_us(requests).sum() == pytest.approx(plan.step_us(requests)[0], rel=1e-9)


@pytest.mark.parametrize("tp", [1, 4])
def test_memory_worked_out_by_hand(h200: Any, tp: int) -> None:
    memory = fastroof.compile_plan(NANO, "h200", h200, tp=tp, engine="kernels").memory
    # 23 layers: 3 taps of 6,144 channels in bf16, 64 heads of 64 x 128 in float32
    state_bytes = 23 * (3 * 6144 * 2 + 64 * 64 * 128 * 4) // tp
    # 6 layers: two KV heads of 128 in bf16, one of them at least on every GPU
    kv_bytes = 6 * 2 * 128 * 2 * max(2 // tp, 1)
    assert memory.state_bytes_per_sequence == state_bytes
    assert memory.kv_bytes_per_token == kv_bytes
    assert memory.kv_bytes([1, 100_000]).tolist() == [
        kv_bytes + state_bytes,
        100_000 * kv_bytes + state_bytes,
    ]
    room = memory.max_kv_tokens * kv_bytes
    assert memory.max_sequences(1000) == pytest.approx(room / (1000 * kv_bytes + state_bytes), abs=1)


def test_a_model_of_mamba_alone_has_no_kv_cache(h200: Any) -> None:
    config = {**preset_config(NANO), "hybrid_override_pattern": "ME" * 4, "num_hidden_layers": 8}
    plan = fastroof.compile_plan(load_model(config), "h200", h200, engine="kernels")
    assert plan.memory.kv_bytes_per_token == 0
    assert plan.memory.max_sequences(10) == plan.memory.max_sequences(100_000) > 0
    assert plan.decode_us(8, 100) == plan.decode_us(8, 100_000)


# -- layers ----------------------------------------------------------------------------------------


def test_every_layer_is_one_thing_alone() -> None:
    model = load_model("nemotron-3-ultra-550b-a55b")
    assert {group.kind.name: group.count for group in model.layers} == {
        "mamba": 48,
        "experts": 48,
        "attention": 12,
    }
    assert model.num_layers == 108
    for kind in model.kinds:
        assert isinstance(kind.attention, NoAttention) != isinstance(kind.mlp, NoMlp)


def test_a_mamba_layer_splits_by_heads_and_groups() -> None:
    layer = mamba_of(load_model(SUPER))
    whole, shares = layer.shard(Layout()), layer.shard(Layout(8))
    assert whole.in_out == 2 * 8192 + 2 * 8 * 128 + 128
    assert [8 * getattr(shares, name) for name in shares._fields] == list(whole)
    assert layer.obstacles(Layout(16)) == ["8 groups of heads of Mamba do not divide by 16"]
    with pytest.raises(PlanError, match="valid: tp=1, 2, 4, 8"):
        load_model(SUPER).check_layout(Layout(16))
    # a single group is on every GPU
    single = Mamba2(32, 64, 128)
    assert single.obstacles(Layout(4)) == []
    assert single.shard(Layout(4)).channels == 8 * 64 + 2 * 128


def test_a_mamba_layers_calls() -> None:
    layer = mamba_of(load_model(SUPER))
    calls = layer.calls(4096, Layout(4), Execution())
    gemms = [(c.role, c.n, c.k) for c in calls if isinstance(c, Gemm)]
    assert gemms == [("state_in", 2 * 2048 + 2 * 2 * 128 + 32, 4096), ("state_out", 4096, 2048)]
    mixers = [c for c in calls if isinstance(c, MixerCall)]
    sizes = (4, 32, 64, 128, 2, 128)
    assert [(c.decode.key, c.prefill.key) for c in mixers if c.decode and c.prefill] == [
        (("generation", part, *sizes), ("context", part, *sizes)) for part in ("convolution", "recurrence")
    ]
    assert isinstance(calls[-1], AllReduce)


def test_state_bytes_worked_out_by_hand() -> None:
    # 3 taps of 4096 + 2 x 8 x 128 channels in bf16, 64 heads of 64 x 128 in float32
    layer = mamba_of(load_model(NANO))
    assert layer.state_bytes(Layout()) == 3 * 6144 * 2 + 64 * 64 * 128 * 4
    assert layer.state_bytes(Layout(8)) * 8 == layer.state_bytes(Layout())
    assert layer.kv_bytes_per_token(Layout(), "bf16") == 0.0
    half = Mamba2(64, 64, 128, 8, state_dtype="bfloat16")
    assert half.state_bytes(Layout()) == 3 * 6144 * 2 + 64 * 64 * 128 * 2


def test_experts_of_a_latent_width() -> None:
    experts = RoutedExperts(512, 22, 2688, 5376, is_gated=False, latent=1024)
    plain = RoutedExperts(512, 22, 2688, 5376, is_gated=False)
    calls = experts.calls(4096, Layout(1, dp=8, ep=8), Execution())
    named = [(c.role, getattr(c, "n", 0), getattr(c, "k", 0)) for c in calls if isinstance(c, Gemm)]
    assert named == [
        ("shared_gate_up", 5376, 4096),
        ("shared_down", 4096, 5376),
        ("router", 512, 4096),
        ("experts_down", 1024, 4096),
        ("experts_up", 4096, 1024),
    ]
    # what is sent and what experts take is as wide as the latent
    gather, scatter = (c for c in calls if isinstance(c, Collective))
    assert (gather.row_bytes, scatter.row_bytes) == (2 * 1024, 2 * 1024)
    (routed,) = (c for c in calls if isinstance(c, Experts))
    assert routed.hidden == 1024
    assert [c.role for c in calls][-3:] == ["experts", "experts_scatter", "experts_up"]
    # of one GPU of four: all projections, a quarter of what experts weigh, sums of the model's width last
    quarter = experts.calls(4096, Layout(4), Execution())
    assert isinstance(quarter[-1], AllReduce)
    assert quarter[-1].row_bytes == 2 * 4096
    assert experts.linear_weights(4096, Layout(4))["experts_up"] == 4096 * 1024
    assert (
        plain.linear_weights(4096, Layout())["experts"]
        == 4 * experts.linear_weights(4096, Layout())["experts"]
    )
    idle = experts.idle_weights(4096)
    assert idle == 490 * 2 * 1024 * 2688


def test_latent_experts_overlap_shared_ones_and_all_to_all() -> None:
    experts = RoutedExperts(512, 22, 2688, 5376, is_gated=False, latent=1024)
    (parallel,) = (
        c for c in experts.calls(4096, Layout(4), Execution(shared_beside=True)) if isinstance(c, Parallel)
    )
    routed, shared = parallel.paths
    assert [c.role for c in routed] == ["router", "experts_down", "experts", "experts_up"]
    assert [c.role for c in shared] == ["shared_gate_up", "shared_activation", "shared_down"]
    rules = ExchangeRules(alltoall="always", libraries=("deepep_ll", "deepep_ll"))
    sent = experts.calls(4096, Layout(1, dp=8, ep=8), Execution(exchange=rules))
    roles = [c.role for c in sent if not isinstance(c, Parallel)]
    assert roles.index("experts_down") < roles.index("experts_dispatch") < roles.index("experts_combine")
    assert roles.index("experts_combine") < roles.index("experts_up")
    assert {c.hidden for c in sent if getattr(c, "phase", None)} == {1024}


def test_a_draft_layer_is_attention_and_experts_together() -> None:
    (group,) = mtp_model(load_model(SUPER)).layers
    assert group.kind.mlp.has_experts
    assert group.kind.kv_bytes_per_token(Layout(), "bf16") == 2 * 2 * 128 * 2
