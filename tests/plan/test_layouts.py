"""Plans of mixtures of experts in the layouts that engines run: the sum of what their kernels take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastroof import StepBatch, compile_plan, load_model, load_tables
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.engines import load_engine
from fastroof.engines.kernel_choices import SinkAttention
from fastroof.errors import PlanError
from fastroof.models import LayerGroup, LayerKind, Layout
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from tests.reference.kinds import step_us

SGLANG = load_engine("sglang").kernels_alone()
LIMITS = {"max_num_batched_tokens": 256, "max_num_seqs": 64}
MODEL = load_model("qwen3-235b-a22b")


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"tp": 4, "ep": 4}, {}),
        ({"tp": 1, "dp": 8, "ep": 8}, {}),
        ({"tp": 1, "dp": 8, "ep": 8}, {"dp_imbalance": 1.5}),
        ({"tp": 4, "dp": 2, "ep": 8}, {"engine": {"name": "a", "layout": {"token_shares": "always"}}}),
    ],
)
def test_a_step_is_the_sum_of_its_kernels(h100, layout, options):
    """Shapes are measured ones: borrowing has tests of its own."""
    plan = compile_plan(
        MODEL, "h100", h100, dtype="bf16", **{"engine": "kernels", **layout, **options}, **LIMITS
    )
    for requests in ([(1, 99)] * 8, [(1, 2000)] * 64, [(64, 0)] * 4):
        explained = plan.explain(requests)
        assert sum(o.total_us for o in explained.operators) == pytest.approx(explained.total_us, rel=1e-12)
        assert explained.origin < ORIGIN_BORROWED
        found = float(plan.step_us(StepBatch.from_requests([requests]))[0])
        assert found == pytest.approx(step_us(plan, h100, requests), rel=1e-9)
    assert 0.0 < plan.decode_error(8, 100) < 0.5


@pytest.mark.loops
def test_all_to_all_runs_one_kernel_in_decodes_and_another_in_prefill(h100):
    plan = compile_plan(MODEL, "h100", h100, dp=8, ep=8, engine=SGLANG, exchange="alltoall", **LIMITS)
    steps = {"decode": [(1, 99)] * 8, "prefill": [(64, 0)] * 4}
    us = {kind: {p.role: p for p in plan.explain(step).operators} for kind, step in steps.items()}
    for role in ("experts_dispatch", "experts_combine"):
        assert us["decode"][role].total_us < us["prefill"][role].total_us
    assert "experts_gather" not in us["decode"]
    gathered = compile_plan(MODEL, "h100", h100, dp=8, ep=8, engine=SGLANG, **LIMITS)
    assert {p.role for p in gathered.explain(steps["decode"]).operators} >= {
        "experts_gather",
        "experts_scatter",
    }
    for kind, step in steps.items():
        explained = plan.explain(step)
        assert sum(o.total_us for o in explained.operators) == pytest.approx(explained.total_us, rel=1e-12)
        assert explained.total_us == float(plan.step_us(StepBatch.from_requests([step]))[0]), kind


@pytest.mark.loops
def test_an_exchange_of_a_measured_shape_is_its_lookup(h100):
    """SGLang's DeepEP rows have 4096 wide layers with 128 experts, 8 a token."""
    plan = compile_plan(MODEL, "h100", h100, dp=8, ep=8, engine=SGLANG, exchange="alltoall", **LIMITS)
    sglang = h100.in_order(plan.error_source.tables.order)
    part = next(p for p in plan.explain([(1, 99)] * 8).operators if p.role == "experts_dispatch")
    shape = {"hidden": 4096, "topk": 8, "num_experts": 128, "num_gpus": 8}
    alone = sglang.lookup("expert_dispatch", library="deepep_ll", phase="dispatch", num_tokens=8, **shape)
    assert part.total_us == pytest.approx(94 * float(alone.latency_us), rel=1e-12)
    assert part.origin == int(alone.origin)


def test_gb200_sends_to_experts_where_groups_outnumber_them():
    tables = load_tables("gb200")
    options = {"engine": "trtllm-1.1", "dtype": "nvfp4", "allow_modelled": True, **LIMITS}
    few, many = (
        compile_plan(MODEL, "gb200", tables, dp=ranks, ep=ranks, **options).explain([(1, 99)] * 16)
        for ranks in (8, 16)
    )

    def gathered(explained):
        return next(p for p in explained.operators if p.role == "experts_gather")

    assert "experts_dispatch" not in {p.role for p in few.operators}
    # eight GPUs of two trays were measured
    assert gathered(few).origin < ORIGIN_BORROWED
    sent = [p for p in many.operators if p.role in ("experts_dispatch", "experts_combine")]
    assert len(sent) == 2
    # all sixteen are behind one switch
    assert max(p.origin for p in sent) < ORIGIN_MODELLED
    # and 32, which were not measured: borrowed from sixteen
    wide = compile_plan(MODEL, "gb200", tables, dp=32, ep=32, exchange="gather", **options)
    assert gathered(wide.explain([(1, 99)] * 16)).origin == ORIGIN_BORROWED


def test_one_sided_and_two_sided_kernels_of_a_rack():
    tables = load_tables("gb200")
    options = {"engine": "trtllm-1.1", "dtype": "nvfp4", "allow_modelled": True, **LIMITS}
    plans = {
        exchange: compile_plan(
            MODEL, "gb200", tables, dp=16, ep=16, exchange=exchange, **{"engine": "kernels", **options}
        )
        for exchange in (None, "alltoall", "nvlink_one_sided", "nvlink_two_sided")
    }
    sent = {
        exchange: [p.name for p in plan.explain([(1, 99)] * 16).operators if "experts_" in p.role]
        for exchange, plan in plans.items()
    }
    assert sent["nvlink_one_sided"] == ["experts dispatch", "experts combine"] == sent[None]
    assert sent["nvlink_two_sided"] == ["experts prepare", "experts dispatch", "experts combine"]
    us = {exchange: plan.decode_us(16, 99) for exchange, plan in plans.items()}
    assert us[None] == us["alltoall"] == us["nvlink_one_sided"] != us["nvlink_two_sided"]
    for exchange in ("nvlink_one_sided", "nvlink_two_sided"):
        assert plans[exchange].describe()["exchange"] == exchange


def test_loads_of_ranks(h100):
    even, uneven = (
        compile_plan(
            MODEL,
            "h100",
            h100,
            dp=8,
            ep=8,
            dtype="bf16",
            dp_imbalance=load,
            **{"engine": "kernels", **LIMITS},
        )
        for load in (1, 2)
    )
    # the most loaded of eight ranks has twice the mean: experts see half as many tokens as if all had so
    whole, half = ({p.role: p for p in plan.explain([(1, 999)] * 64).operators} for plan in (even, uneven))
    fewer = {p.role: p for p in even.explain([(1, 999)] * 32).operators}
    assert half["experts"].total_us == fewer["experts"].total_us
    assert half["decode_attention"].total_us == whole["decode_attention"].total_us
    assert half["experts_gather"].total_us == whole["experts_gather"].total_us
    for load in (0.5, 9, True, "2"):
        with pytest.raises(PlanError, match=r"dp_imbalance .*1 to dp \(8\), got"):
            compile_plan(
                MODEL, "h100", h100, dp=8, ep=8, dp_imbalance=load, **{"engine": "kernels", **LIMITS}
            )


def test_what_engines_do_not_run(h100):
    for options, message in (
        (
            {"engine": "vllm", "tp": 8, "ep": 4},
            "vllm splits experts over all GPUs of a stage or none.* 1 or 8",
        ),
        ({"engine": "trtllm", "tp": 2, "dp": 4, "ep": 8}, "tp 8 with dp 1, or tp 1 with dp 8"),
        ({"exchange": "alltoall", "tp": 8}, "all-to-all needs experts that are whole .* ep 8"),
        (
            {"exchange": "alltoall", "tp": 8, "ep": 8, "engine": "vllm"},
            "between dp ranks only: use tp 1, dp 8",
        ),
        (
            {"exchange": "nvlink_one_sided", "dp": 8, "ep": 8},
            "NVLink joins 8 h100: use exchange='alltoall'",
        ),
        ({"exchange": "sometimes", "tp": 8}, "exchange must be one of gather, alltoall, nvlink_one_sided"),
    ):
        with pytest.raises(PlanError, match=message):
            compile_plan(MODEL, "h100", h100, **{"engine": "kernels", **options, **LIMITS})
    # a dense model has no experts for the rules to hold of
    compile_plan("llama-3.1-8b", "h100", h100, engine="trtllm", tp=2, dp=4, **LIMITS)


def test_shared_experts_run_next_to_routed_ones_up_to_256_tokens_of_vllm(h100):
    """By the calls of a plan without overlap: the longer path of small steps, both of larger ones."""
    engine = load_engine("vllm-0.19.0")
    plans = {
        name: compile_plan(
            "qwen3-next-80b-a3b", "h100", h100, tp=2,
            engine=replace(engine, kernels=replace(engine.kernels, shared_experts=name)),
        )
        for name in ("beside", "apart")
    }  # fmt: skip

    def rows_us(plan, tokens, context, roles):
        step = plan.explain([(tokens, context)])
        return sum(one.total_us for one in step.operators if one.role in roles)

    routed, shared = (
        ("router", "experts"),
        ("shared_gate_up", "shared_activation", "shared_down", "shared_gate"),
    )
    for tokens, context in ((1, 1000), (100, 0), (256, 0), (257, 0), (4096, 0)):
        paths = [rows_us(plans["apart"], tokens, context, roles) for roles in (routed, shared)]
        expected = max(paths) if tokens <= 256 else sum(paths)
        assert rows_us(plans["beside"], tokens, context, routed + shared) == pytest.approx(expected)


def test_norms_inside_an_all_reduce_take_no_time_up_to_its_limit(h100):
    engine = load_engine("vllm-0.23.0")
    unfused = replace(engine, kernels=replace(engine.kernels, fused_norms=()))
    fused, plain = (
        compile_plan(
            "minimax-m2.5", "h100", h100, tp=4, engine=one, max_num_batched_tokens=4096, allow_modelled=True
        )
        for one in (engine, unfused)
    )

    def norms_us(plan, tokens):
        step = plan.explain([(tokens, 0)])
        return sum(one.total_us for one in step.operators if one.role == "qk_norm")

    assert norms_us(fused, 1) == norms_us(fused, 2048) == 0.0
    assert 0.0 < norms_us(fused, 2049) < norms_us(plain, 2049)
    assert plain.decode_us(8, 4096) - fused.decode_us(8, 4096) == pytest.approx(norms_us(plain, 8), rel=1e-6)
    older = compile_plan("minimax-m2.5", "h100", h100, tp=4, engine="vllm-0.21", allow_modelled=True)
    assert norms_us(older, 8) > 0.0


def test_prompts_of_attention_with_sinks_can_be_another_kernel(h100):
    """Full layers with sinks take 1 / share of the measured kernel, modelled, with the error of the rule."""
    plain = load_engine("vllm-0.19.0")
    rule = SinkAttention(share=0.25, error=0.8, gpus=("h100",))
    sinks = replace(plain, kernels=replace(plain.kernels, sink_attention=(rule,)))
    elsewhere = replace(
        plain, kernels=replace(plain.kernels, sink_attention=(replace(rule, gpus=("a100",)),))
    )
    step = [(8000, 0)]

    def parts(model, engine, role):
        plan = compile_plan(model, "h100", h100, engine=engine, allow_modelled=True)
        return [one for one in plan.explain(step).operators if one.role == role]

    windowed, full = parts("gpt-oss-120b", sinks, "prefill_attention")
    measured = parts("gpt-oss-120b", plain, "prefill_attention")
    assert (windowed.total_us, windowed.origin) == (measured[0].total_us, measured[0].origin)
    assert full.total_us == pytest.approx(4.0 * measured[1].total_us)
    assert (full.origin, measured[1].origin < ORIGIN_MODELLED) == (ORIGIN_MODELLED, True)
    assert parts("gpt-oss-120b", elsewhere, "prefill_attention") == measured
    for model, role in (("gpt-oss-120b", "decode_attention"), ("llama-3.1-8b", "prefill_attention")):
        assert [one.total_us for one in parts(model, sinks, role)] == [
            one.total_us for one in parts(model, plain, role)
        ]
    plans = [
        compile_plan("gpt-oss-120b", "h100", h100, engine=engine, allow_modelled=True)
        for engine in (plain, sinks)
    ]
    batch = StepBatch.from_requests([[(4000, 16000)], [(1, 4000)]])
    small, large = (plan.run(batch, with_error=True) for plan in plans)
    assert large.relative_error[0] > small.relative_error[0] + 0.1
    assert large.relative_error[1] == small.relative_error[1]
    assert large.components.prefill_attention_us[0] > 2.0 * small.components.prefill_attention_us[0]
    assert list(large.origin) == [ORIGIN_MODELLED, small.origin[1]]


def test_shared_experts_overlap_all_to_all(h100):
    """Each kind of steps takes the longer of its own two paths."""
    mlp = RoutedExperts(128, 8, 1536, shared_intermediate=65536)
    kind = LayerKind(GroupedQueryAttention(64, 4, 128), mlp, "shared")
    model = MODEL.__class__("mine", "MineForCausalLM", 4096, 1024, True, 4096, None, (LayerGroup(kind, 2),))
    options = {"engine": SGLANG, "exchange": "alltoall", "dtype": "bf16", **LIMITS}
    plan = compile_plan(model, "h100", h100, dp=8, ep=8, **{"engine": "kernels", **options})
    assert not plan.execution.shared_beside
    for step in ([(1, 99)] * 8, [(64, 0)] * 4):
        explained = plan.explain(step)
        assert sum(o.total_us for o in explained.operators) == pytest.approx(explained.total_us, rel=1e-12)


def test_a_plan_has_its_split(h100):
    plan = compile_plan(
        MODEL, "h100", h100, dp=4, pp=2, ep=4, dp_imbalance=1.5, **{"engine": "kernels", **LIMITS}
    )
    words = (
        "8 x h100 (tp 1, pp 2, dp 4, ep 4), bf16 weights, bf16 KV, routing power_law_1.2, engine 'kernels'"
    )
    assert words in repr(plan)
    assert "stage 1 of qwen3-235b-a22b on 8 x h100" in repr(plan.stages[1])
    split = {"pp": 2, "dp": 4, "ep": 4, "moe_tp": 1, "routing": "power_law_1.2", "dp_imbalance": "1.5"}
    assert plan.describe().items() >= split.items()
    assert plan.made_from["fastroof.ep"] == "4"
    dense = compile_plan("llama-3.1-8b", "h100", h100, tp=2, **{"engine": "kernels", **LIMITS})
    assert "llama-3.1-8b on 2 x h100, bf16" in repr(dense)
    assert not split.keys() & dense.describe().keys()


def test_weights_of_experts_by_layout(h100):
    """A layer of Qwen3-235B by hand: 128 experts of 4096 x 1536, 64 and 4 heads of 128."""
    expert = 3 * 4096 * 1536
    attention = {
        tp: (64 // tp + 2 * max(1, 4 // tp)) * 128 * 4096 + 4096 * 64 // tp * 128 for tp in (1, 2, 8)
    }
    small = 2 * 4096 + 2 * 128 + 128 * 4096

    def held(experts: float, tp: int) -> int:
        vocab = 2 * MODEL.padded_vocab(tp) // tp * 4096
        return int(2 * (94 * (experts * expert + attention[tp] + small) + vocab + 4096))

    for layout, experts, tp in (
        ({"tp": 8, "ep": 8}, 16, 8),
        ({"tp": 8}, 16, 8),
        ({"dp": 8, "ep": 8}, 16, 1),
        ({"tp": 2, "dp": 4, "ep": 4, "moe_tp": 2}, 16, 2),
        ({"dp": 8, "ep": 2}, 16, 1),
    ):
        memory = compile_plan(
            MODEL,
            "h100",
            h100,
            dtype="bf16",
            allow_modelled=True,
            **{"engine": "kernels", **layout, **LIMITS},
        ).memory
        assert memory.weight_bytes == pytest.approx(held(experts, tp), rel=1e-9), layout
        # each rank keeps its own sequences, over its tp alone
        assert memory.kv_bytes_per_token == 94 * 2 * max(1, 4 // tp) * 128 * 2
    copied = compile_plan(MODEL, "h100", h100, tp=2, dp=4, ep=8, engine="sglang", **LIMITS).memory
    vocab = MODEL.padded_vocab(1) - MODEL.padded_vocab(2) // 2
    assert copied.weight_bytes == held(16, 2) + 2 * vocab * 4096


def test_layers_of_deepseek_by_hand(h100):
    """256 experts of 2,048 at 7,168, one shared: of 671 B parameters 653 are routed experts'."""
    mlp = RoutedExperts(256, 8, 2048, shared_intermediate=2048)
    kind = LayerKind(GroupedQueryAttention(128, 128, 128), mlp, "experts")
    expert = 3 * 7168 * 2048
    assert 58 * mlp.linear_weights(7168, Layout())["experts"] == 58 * 256 * expert == 653_908_770_816
    for layout, experts, tp in (
        (Layout(8, ep=8), 32, 8),
        (Layout(1, dp=8, ep=8), 32, 1),
        (Layout(8, dp=4, ep=32), 8, 8),
        (Layout(2, dp=8, ep=4), 16, 2),
    ):
        held = kind.linear_weights(7168, layout)
        assert held["experts"] == experts * expert
        # shared experts and attention are split by tp, and whole on every rank of its own
        assert held["shared_gate_up"] + held["shared_down"] == expert // tp
        assert held["qkv"] == 3 * 128 // tp * 128 * 7168


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "model"), [("fp8_block", MODEL), ("auto", load_model("Qwen/Qwen3-235B-A22B-FP8"))]
)
def test_experts_are_split_into_whole_blocks_of_scales(dtype, model):
    tables = load_tables("h200")
    with pytest.raises(
        PlanError, match=r"192 wide.*ep 8 with moe_tp 1 or ep 4 with moe_tp 2 or ep 2 with moe_tp 4"
    ):
        compile_plan(model, "h200", tables, tp=8, dtype=dtype, **{"engine": "kernels", **LIMITS})
    for ep in (2, 4, 8):
        assert (
            compile_plan(
                model, "h200", tables, tp=8, ep=ep, dtype=dtype, **{"engine": "kernels", **LIMITS}
            ).layout.ep
            == ep
        )
    assert compile_plan(MODEL, "h200", tables, tp=8, **{"engine": "kernels", **LIMITS}).layout.moe_tp == 8
