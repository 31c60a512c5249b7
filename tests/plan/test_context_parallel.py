"""Prompts whose new tokens several GPUs share, against a sum written for reading."""

from __future__ import annotations

import pytest

from fastroof import StepBatch, compile_plan, compile_plans, load_model
from fastroof.engines import load_engine
from fastroof.errors import PlanError
from fastroof.models import Layout
from tests.reference.context_parallel import prompts_us

SGLANG = load_engine("sglang").kernels_alone()
LIMITS = {"max_num_batched_tokens": 4096, "max_num_seqs": 64}
DENSE = load_model("llama-3.1-8b")
EXPERTS = load_model("qwen3-235b-a22b")


def floor_us(tables, heads):
    names = dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    return float(tables.lookup("attention_prefill", q_len=1, kv_len=1, batch_size=1, **names).latency_us)


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.parametrize(
    ("model", "tp", "cp", "heads", "options"),
    [
        (DENSE, 1, 4, (32, 8, 128), {}),
        (DENSE, 2, 2, (16, 4, 128), {}),
        (EXPERTS, 1, 8, (64, 4, 128), {"ep": 8}),
        (EXPERTS, 1, 8, (64, 4, 128), {"ep": 8, "exchange": "alltoall", "engine": SGLANG}),
    ],
)
def test_a_prompt_is_a_share_of_its_rows_and_pairs(h100, model, tp, cp, heads, options):
    options = {**LIMITS, "dtype": "bf16", **options}
    shared = compile_plan(model, "h100", h100, tp=tp, cp=cp, **{"engine": "kernels", **options})
    tables = shared.error_source.tables
    dp = {"dp": cp} if model.has_experts else {}
    ranks = compile_plan(model, "h100", h100, tp=tp, **{"engine": "kernels", **dp, **options})
    whole = compile_plan(model, "h100", h100, tp=tp, **{"engine": "kernels", **options, **dp})
    kv_bytes = 2 * heads[1] * heads[2] * 2
    for new, batch in ((256, 1), (2048, 1), (512, 4)):
        naive = prompts_us(whole, ranks, tables, cp, new, batch, kv_bytes, floor_us(tables, heads))
        assert shared.prefill_us(new, 0, batch) == pytest.approx(naive, rel=1e-9)
    for requests in ([(2048, 0)], [(100, 900)] * 3, [(64, 0), (1, 99)], [(1, 99)] * 8):
        explained = shared.explain(requests)
        assert sum(o.total_us for o in explained.operators) == pytest.approx(explained.total_us, rel=1e-12)
        names = [o.role for o in explained.operators]
        assert names.index("qkv") < names.index("o") < names.index("lm_head")
        assert all(not o.mfu > 1.0 for o in explained.operators)
    times = shared.run(StepBatch.from_requests([[(2048, 0)], [(1, 99)] * 8]), with_error=True)
    assert all(0.0 < error < 0.5 for error in times.relative_error)


@pytest.mark.loops
def test_decodes_stay_as_they_are(h100):
    one, shared = (
        compile_plan(DENSE, "h100", h100, cp=cp, **{"engine": "kernels", **LIMITS}) for cp in (1, 4)
    )
    for batch in (1, 7, 64):
        assert shared.decode_us(batch, 999) == one.decode_us(batch, 999)
    assert shared.memory == one.memory
    # of experts: each GPU has its own, and the sums of all are added up
    experts = compile_plan(EXPERTS, "h100", h100, cp=8, ep=8, dtype="bf16", **{"engine": "kernels", **LIMITS})
    names = {o.role for o in experts.explain([(1, 99)] * 8).operators}
    assert "mlp_allreduce" in names
    assert not names & {"experts_gather", "kv_gather", "attention_allreduce"}


def test_a_prefix_has_its_pairs_shared_and_its_tokens_read(h100):
    one, shared = (
        compile_plan(DENSE, "h100", h100, cp=cp, **{"engine": "kernels", **LIMITS}) for cp in (1, 4)
    )
    (price,), (less,) = ([part.prefix_us for part in plan.attention] for plan in (one, shared))
    assert less.pair == pytest.approx(price.pair / 4, rel=1e-12)
    assert less.token == price.token
    longer = [plan.prefill_us(1024, 32768) - plan.prefill_us(1024) for plan in (one, shared)]
    assert longer[0] / 4 < longer[1] < longer[0]


def test_long_prompts_gain_and_short_ones_do_not(h100):
    one, shared = (
        compile_plan(DENSE, "h100", h100, cp=cp, **{"engine": "kernels", **LIMITS}) for cp in (1, 4)
    )
    assert shared.prefill_us(4096) < one.prefill_us(4096) / 2
    assert shared.prefill_us(1) > one.prefill_us(1)
    times = [shared.prefill_us(new) for new in (1024, 2048, 4096)]
    assert times == sorted(times)


def test_layouts_count_the_gpus():
    layout = Layout(2, 2, 2, ep=8, cp=4)
    assert (layout.world_size, layout.stage_gpus, layout.sharers, layout.moe_tp) == (32, 16, 8, 2)
    assert str(layout) == "tp 2, pp 2, cp 4, dp 2, ep 8, moe_tp 2"
    assert layout.of_prompts == Layout(2, 2, 8, 8, 2)
    assert Layout(4).of_prompts == Layout(4)
    with pytest.raises(PlanError, match=r"tp 1 x dp 1 x cp 4 is 4 GPUs .* ep 8 .* tp x dp x cp must"):
        Layout(ep=8, cp=4)
    with pytest.raises(PlanError, match="cp must be a whole number from 1 to 65,536, got 0"):
        Layout(cp=0)


def test_stages_and_sets_of_plans(h100):
    shared = compile_plan(DENSE, "h100", h100, cp=2, pp=2, **{"engine": "kernels", **LIMITS})
    stages = sum(float(stage.prefill_us(2048)) for stage in shared.stages)
    assert stages == pytest.approx(shared.prefill_us(2048), rel=1e-9)
    plans = compile_plans(
        [{"model": DENSE, "cp": cp, "engine": "kernels", **LIMITS} for cp in (1, 2)], "h100", h100
    )
    assert plans[1].prefill_us(2048) < plans[0].prefill_us(2048)
    assert plans[1].describe()["cp"] == 2
    assert "cp 2" in repr(plans[1])


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            DENSE,
            {"engine": "trtllm-1.1"},
            "trtllm-1.1 has no prefill context parallelism: use engine='sglang'",
        ),
        (
            EXPERTS,
            {"ep": 4, "dp": 1, "engine": "sglang", "exchange": "alltoall", "two_batch_overlap": True},
            "two_batch_overlap=False",
        ),
        ("nemotron-h-56b", {}, "state passes from one part of a prompt to the next"),
    ],
)
def test_unsupported_context_parallelism_is_refused(h100, model, options, message):
    with pytest.raises(PlanError, match=message):
        compile_plan(model, "h100", h100, cp=4, **{"engine": "kernels", **options, **LIMITS})
