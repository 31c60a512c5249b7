"""Plans of latent attention, by parts and whole: against a naive sum of lookups, and against physics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.config import load_gpu
from fastroof.engines import EngineProfile, load_engine
from fastroof.engines.kernel_choices import OperatorKernel
from fastroof.errors import MissingTableError
from fastroof.models import ModelSpec, load_model
from fastroof.models.named import preset_config
from fastroof.operators.calls import LatentProduct
from fastroof.operators.registry import OPERATORS
from fastroof.operators.row_operator import CurveOptions
from fastroof.plan.curves import kernel_order
from fastroof.plan.execution import whole_blocks
from fastroof.plan.options import PlanOptions
from tests.reference.kinds import step_us

LIMITS = {"max_num_batched_tokens": 4096, "max_num_seqs": 256}
LAYERS = 4


def short(name: str = "deepseek-v3") -> ModelSpec:
    """A model of four layers, the first of them dense, that is a published one otherwise."""
    return load_model({**preset_config(name), "num_hidden_layers": LAYERS, "first_k_dense_replace": 1})


def profile(engine: str) -> EngineProfile:
    """Its kernels alone, tokens not padded to graphs; the naive step knows vLLM's streaming kernels."""
    own = load_engine(engine).kernels_alone().started_with({"no_graphs"})
    streaming = (OperatorKernel("elementwise", engine="vllm"),)
    return replace(own, kernels=replace(own.kernels, operators=own.kernels.operators + streaming))


def options(engine: str = "kernels", **given: Any) -> PlanOptions:
    return PlanOptions(engine=profile(engine), **given).checked().for_model(short(), load_gpu("h100"))


def compiled(h100: Any, engine: str = "kernels", model: ModelSpec | None = None, **given: Any) -> Any:
    given = {"tp": 8, **LIMITS, **given}
    return fastroof.compile_plan(
        short() if model is None else model, "h100", h100, engine=profile(engine), **given
    )


def attention_us(plan: Any, requests: list[tuple[int, int]], *roles: str) -> float:
    return sum(part.total_us for part in plan.explain(requests).operators if part.role in roles)


@pytest.mark.parametrize("engine", ["kernels", "sglang", "trtllm-1.1"])
@pytest.mark.parametrize(
    "requests",
    [
        [(1, 1023)],
        [(1, 4095)] * 16,
        [(1, 999)] * 100,
        [(512, 0)],
        [(1024, 0)] * 2,
        [(700, 0)] * 3,
        [(1, 2047)] * 8 + [(512, 0)],
    ],
)
def test_a_step_is_the_sum_of_its_lookups(h100: Any, engine: str, requests: list[tuple[int, int]]) -> None:
    plan = compiled(h100, engine)
    assert plan.execution.whole_blocks == (("bf16", "fp8_block") if engine == "trtllm-1.1" else ())
    tables = h100.in_order(kernel_order(h100.gpu, options(engine, tp=8)))
    got = float(plan.step_us(fastroof.StepBatch.from_requests([requests]))[0])
    assert got == pytest.approx(step_us(plan, tables, requests), rel=1e-9)
    explained = plan.explain(requests)
    assert sum(part.total_us for part in explained.operators) == pytest.approx(explained.total_us, rel=1e-9)


def test_both_ways_time_the_same_block(h100: Any) -> None:
    engine = profile("trtllm-1.1")
    by_parts = replace(engine, kernels=replace(engine.kernels, latent_attention="parts"))
    batch, kv_len = np.array([1, 4, 16, 64, 128])[:, None], np.array([1024, 4096, 16384])
    whole, parts = (
        fastroof.compile_plan(short(), "h100", h100, tp=8, engine=how, **LIMITS).decode_us(batch, kv_len)
        for how in (engine, by_parts)
    )
    # the block has fused norms and rotary embedding, and one launch
    assert np.abs(whole / parts - 1.0).max() < 0.15


def test_decodes_alone_do_not_expand_and_prompts_do_not_absorb(h100: Any) -> None:
    plan = compiled(h100, "sglang")
    decodes, prompt = [(1, 1023)] * 4, [(64, 0)]
    assert attention_us(plan, decodes, "kv_up") == 0.0 < attention_us(plan, decodes, "latent_products")
    assert attention_us(plan, prompt, "latent_products") == 0.0 < attention_us(plan, prompt, "kv_up")


# What the tables count


def test_module_tables_are_at_powers_of_two(h100: Any) -> None:
    for table in h100.candidates("mla_module_decode"):
        if table.engine == "sglang":
            continue
        kv_len = np.unique(table.columns["kv_len"])
        assert not (kv_len & (kv_len - 1)).any()
    plan = compiled(h100, "trtllm-1.1")
    (block, *_) = (p for p in plan.explain([(1, 4095)] * 16).operators if p.role == "decode_attention")
    assert block.origin == 0
    shape = {"num_heads": 16, "dtype": "fp8_block", "batch_size": 16, "kv_len": 4096}
    tables = h100.in_order(kernel_order(h100.gpu, options("trtllm-1.1")))
    one = float(tables.lookup("mla_module_decode", **shape).latency_us)
    assert block.total_us == pytest.approx(block.calls * one, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "tp", "heads"), [("deepseek-v3", 8, 16), ("kimi-k2", 8, 8), ("kimi-k2", 4, 16)]
)
def test_heads_are_those_of_one_gpu(h100: Any, name: str, tp: int, heads: int) -> None:
    plan = compiled(h100, "sglang", short(name), tp=tp)
    parts = [p for p in plan.explain([(1, 4095)] * 16).operators if p.role == "decode_attention"]
    tables = h100.in_order(kernel_order(h100.gpu, options("sglang")))
    own = tables.lookup("mla_decode", num_q_heads=heads, batch_size=16, kv_len=4096).latency_us
    assert sum(p.total_us for p in parts) == pytest.approx(LAYERS * float(own), rel=1e-9)


def test_a_point_measured_twice_takes_the_median(h100: Any) -> None:
    (table,) = (t for t in h100.candidates("mla_decode") if t.engine == "sglang")
    c = table.columns
    rows = (
        (c["kv_dtype"] == "bf16") & (c["num_q_heads"] == 16) & (c["batch_size"] == 16) & (c["kv_len"] == 4096)
    )
    assert rows.sum() == 2
    plan = compiled(h100, "sglang")
    got = attention_us(plan, [(1, 4095)] * 16, "decode_attention") / LAYERS
    assert got == pytest.approx(float(np.median(c["latency_us"][rows])), rel=1e-9)


def test_prompts_have_a_batch_axis(h100: Any) -> None:
    plan = compiled(h100, "sglang")
    four, one = ([(512, 0)] * count for count in (4, 1))
    tables = h100.in_order(kernel_order(h100.gpu, options("sglang")))
    shape = {"num_q_heads": 16, "q_len": 512, "kv_len": 512}
    measured = float(tables.lookup("mla_prefill", batch_size=4, **shape).latency_us)
    assert attention_us(plan, four, "prefill_attention") == pytest.approx(LAYERS * measured, rel=1e-9)
    # one call: less than four, whose floor is paid once
    assert attention_us(plan, four, "prefill_attention") < 4 * attention_us(plan, one, "prefill_attention")


def test_the_cache_is_not_divided(h100: Any) -> None:
    plans = [compiled(h100, "sglang", load_model("deepseek-v3"), tp=tp) for tp in (4, 8)]
    assert {plan.memory.kv_bytes_per_token for plan in plans} == {61 * 576 * 2}


# Physics


@pytest.mark.parametrize("engine", ["sglang", "trtllm-1.1"])
def test_more_work_takes_longer(h100: Any, engine: str) -> None:
    plan = compiled(h100, engine)
    batch, kv_len = 2 ** np.arange(8), 2 ** np.arange(7, 15)
    decode_us = plan.decode_us(batch[:, None], kv_len)
    # kernels are jagged: no call of more work is faster by more than a few per cent
    assert (np.diff(decode_us, axis=1) > -0.05 * decode_us[:, :-1]).all()
    assert (np.diff(decode_us, axis=0) > -0.05 * decode_us[:-1]).all()
    prefill_us = plan.prefill_us(2 ** np.arange(4, 13))
    assert (np.diff(prefill_us[3:]) > 0.0).all()


def test_latent_vectors_are_read_by_every_gpu(h100: Any) -> None:
    least_us = LAYERS * 64 * (32768 - 1024) * 576 * 2 / h100.gpu.hbm_bytes_per_s * 1e6
    for tp in (4, 8):
        longer, shorter = (
            attention_us(compiled(h100, "trtllm-1.1", tp=tp), [(1, kv_len - 1)] * 64, "decode_attention")
            for kv_len in (32768, 1024)
        )
        assert least_us < longer - shorter < 2.5 * least_us


def test_more_gpus_are_faster_but_not_in_proportion(h100: Any) -> None:
    requests = [(1, 8191)] * 32
    roles = ("q_down", "q_up", "latent_products", "decode_attention", "o")
    two, eight = (attention_us(compiled(h100, "sglang", tp=tp), requests, *roles) for tp in (2, 8))
    # an eighth of the heads each, but every GPU has the projections to latent vectors and the cache
    assert 1.0 < two / eight < 4.0


# Which way, and what stands for what was not measured


def test_sound_blocks_are_used_if_the_profile_enables_them(h100: Any) -> None:
    def blocks(engine: str, tables: Any = h100, **given: Any) -> tuple[str, ...]:
        own = options(engine, **given)
        return whole_blocks(own, tables.in_order(kernel_order(tables.gpu, own)))

    assert blocks("trtllm-1.1", kv_dtype="fp8") == blocks("vllm") == ("bf16", "fp8_block")
    assert blocks("sglang") == blocks("kernels") == ()
    assert whole_blocks(options("vllm"), None) == ()
    (own,) = (t for t in h100.candidates("mla_module_decode") if t.engine == "vllm")
    alone = fastroof.load_tables("h100", source=own.source)
    assert blocks("vllm", alone) == ("bf16", "fp8_block")
    both = {"mla_module_decode": own.source}
    assert blocks("vllm", fastroof.load_tables("h100", source=both)) == ("bf16", "fp8_block")
    assert blocks("vllm", with_time_of_the_host(h100)) == ("bf16", "fp8_block")
    assert blocks("vllm", with_time_of_the_host(h100, both)) == ()


def with_time_of_the_host(h100: Any, source: Any = None) -> Any:
    """Tables whose blocks of vLLM are flagged as launched from the host, as 0.24.0's were."""
    flag = {"keys": {"dtype": ["bf16", "fp8_block"]}, "test": "module", "reason": "host", "excess_us": 40.0}
    measured = h100.measured if source is None else fastroof.load_tables("h100", source=source).measured

    def flagged(table: Any) -> Any:
        if (table.operator, table.engine) != ("mla_module_decode", "vllm"):
            return table
        operators = table.provenance["operators"]
        about = operators | {table.operator: operators[table.operator] | {"unsound": [flag]}}
        return replace(table, provenance={**table.provenance, "operators": about})

    tables = {name: flagged(table) for name, table in measured.tables.items()}
    others = {name: tuple(map(flagged, some)) for name, some in measured.others.items()}
    return fastroof.Tables(replace(measured, tables=tables, others=others), h100.gpu)


def test_vllms_block_is_its_own_and_one_with_host_time_is_marked_borrowed(h100: Any) -> None:
    def block(tables: Any, engine: str, **given: Any) -> Any:
        plan = compile_on(tables, engine, **given)
        parts = plan.explain([(1, 1023)] * 16).operators
        (found,) = (p for p in parts if p.role == "decode_attention" and "moe" in p.name)
        return found.source, found.origin

    def compile_on(tables: Any, engine: str, **given: Any) -> Any:
        options = {"tp": 8, **LIMITS, **given}
        return fastroof.compile_plan(short(), tables.gpu.name, tables, engine=profile(engine), **options)

    assert block(h100, "vllm") == ("aiconfigurator-vllm-0.25.0", 0)
    b200 = fastroof.load_tables("b200")
    formats = {"kv_dtype": "fp8"}
    assert block(b200, "trtllm-1.1", dtype="fp8_block", **formats) == ("aiconfigurator-trtllm-1.3.0rc20", 0)
    assert block(b200, "trtllm-1.1", dtype="nvfp4", **formats) == ("aiconfigurator-trtllm-1.3.0rc20", 3)


def product(
    num_heads: int = 16, dtype: str = "bf16", part: str = "pre", head_dim: int = 128
) -> LatentProduct:
    return LatentProduct("latent_products", "product", 1, part, num_heads, head_dim, 512, dtype)


def test_absorbed_products_come_back_as_measured(h100: Any) -> None:
    operator: Any = OPERATORS["mla_bmm"]
    nodes = operator.row_nodes(product(), h100, CurveOptions(), 512)
    shape = {"part": "pre", "num_heads": 16, "dtype": "bf16"}
    tokens = nodes.axis[1:-1].astype(int)
    assert nodes.value[1:-1] == pytest.approx(h100.lookup("mla_bmm", num_tokens=tokens, **shape).latency_us)
    assert set(nodes.flag[1:-1]) == {0}
    # beyond the ends latency / B is held
    assert set(nodes.flag[[0, -1]]) == {2}
    far = int(nodes.axis[-2]) * 3
    held = float(h100.lookup("mla_bmm", num_tokens=far, **shape).latency_us)
    assert np.interp(far, nodes.axis, nodes.value) == pytest.approx(held, rel=1e-9)


@pytest.mark.parametrize("method", ["linear_mfu", "nearest", "floor"])
def test_absorbed_products_are_looked_up_by_other_methods(h100: Any, method: str) -> None:
    operator: Any = OPERATORS["mla_bmm"]
    nodes = operator.row_nodes(product(), h100, CurveOptions(method), 64)
    tokens = np.arange(1, 65)
    found = h100.lookup("mla_bmm", method=method, num_tokens=tokens, part="pre", num_heads=16)
    assert nodes.value[1:65] == pytest.approx(found.latency_us)


def test_weights_in_fp8_are_multiplied_in_fp8_by_engines_that_do(h100: Any) -> None:
    operator: Any = OPERATORS["mla_bmm"]
    for engine, dtype in (("vllm", "bf16"), ("sglang", "fp8"), ("trtllm-1.1", "fp8")):
        tables = h100.in_order(kernel_order(h100.gpu, options(engine)))
        assert operator.measured_key(product(dtype="fp8_block"), tables) == (dtype, "pre", 16)
        assert operator.measured_key(product(dtype="nvfp4"), tables)[0] == "bf16"


def test_another_number_of_heads_borrows_the_nearest(h100: Any) -> None:
    operator: Any = OPERATORS["mla_bmm"]
    wanted = product(num_heads=20)
    key = operator.measured_key(wanted, h100)
    assert key == ("bf16", "pre", 16 if 20 / 16 < 24 / 20 else 24)
    nodes = operator.row_nodes(wanted, h100, CurveOptions(), 512)
    assert set(nodes.flag) == {3}
    near = operator.row_nodes(product(num_heads=key[2]), h100, CurveOptions(), 512)
    # at many tokens as the work
    assert nodes.value[-1] / near.value[-1] == pytest.approx(20 / key[2], rel=1e-3)
    assert operator.table_points(wanted, h100, np.array([8.0])) is None
    rows = np.array([8.0, 100.0])
    more = operator.row_variance(wanted, h100, rows) - operator.row_variance(product(key[2]), h100, rows)
    assert more == pytest.approx(0.16**2)


def test_other_widths_were_not_measured(h100: Any) -> None:
    operator: Any = OPERATORS["mla_bmm"]
    with pytest.raises(
        MissingTableError, match=r"has head_dim 192 and kv_lora_rank 512; measured: 128 and 512"
    ):
        operator.serving(product(head_dim=192), h100)
    narrow = load_model({**preset_config("deepseek-v3"), "num_hidden_layers": 2, "qk_nope_head_dim": 192})
    with pytest.raises(MissingTableError):
        compiled(h100, "sglang", narrow)
    plan = compiled(h100, "sglang", narrow, allow_modelled=True)
    made = {p.name: p.origin for p in plan.explain([(1, 99)] * 4).operators}
    assert made["absorbed product pre"] == 4
    assert max(made["absorbed product post"], made["q_up"]) < 4
    assert plan.explain([(64, 0)]).origin == 4
