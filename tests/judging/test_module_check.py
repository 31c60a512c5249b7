"""Whole blocks of latent attention against the sum of their parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.judging.module_check import (
    KERNELS,
    MODULE,
    MODULE_OVER_PARTS,
    kernel_families,
    module_families,
    parts_us,
)
from fastroof.load.unsound import known_unsound
from tests.reference.handmade import handmade_tables

HEADS = (8, 16)
KV = (256, 1024, 4096)


def tables_of(module_over_parts: float) -> fastroof.Tables:
    """Parts of 10 us each, attention that grows with kv_len, and blocks that take so many times their sum."""
    gemm = [("bf16", m, n, k, 10.0) for m in (1, 64) for n in (64, 65536) for k in (64, 65536)]
    bmm = [("bf16", p, h, t, 10.0) for p in ("pre", "post") for h in HEADS for t in (1, 64)]
    attention = [("bf16", h, 512, 64, b, kv, 5.0 + kv / 256) for h in HEADS for b in (1, 64) for kv in KV]
    module = [
        ("bf16", "bf16", "bf16", "deepseek-v3", h, b, kv, b * module_over_parts * (55.0 + kv / 256))
        for h in HEADS for b in (1, 64) for kv in KV
    ]  # fmt: skip
    return handmade_tables(gemm=gemm, mla_bmm=bmm, mla_decode=attention, mla_module_decode=module)


def test_parts_are_three_projections_two_products_and_attention() -> None:
    found = parts_us(tables_of(1.0), 16, np.array(KV))
    assert found is not None
    # GEMMs that share one time at every corner are interpolated to about that
    np.testing.assert_allclose(found, [55.0 + kv / 256 for kv in KV], rtol=0.05)


def test_projections_have_the_widths_of_deepseek_v3() -> None:
    gemm = [
        ("bf16", m, n, k, 5.0 + n / 700 + k / 300)
        for m in (1, 64) for n in (64, 2048, 65536) for k in (64, 2048, 65536)
    ]  # fmt: skip
    bmm = [("bf16", p, h, t, 10.0) for p in ("pre", "post") for h in HEADS for t in (1, 64)]
    attention = [("bf16", h, 512, 64, b, kv, 5.0 + kv / 256) for h in HEADS for b in (1, 64) for kv in KV]
    tables = handmade_tables(gemm=gemm, mla_bmm=bmm, mla_decode=attention)
    # down: the query's 1536, the cache's 512 and 64; up: 128 + 64 a head; out: 128 a head
    sizes = ((1536 + 512 + 64, 7168), (16 * 192, 1536), (7168, 16 * 128))
    gemms_us = sum(tables.lookup("gemm", m=1, n=n, k=k).latency_us for n, k in sizes)
    found = parts_us(tables, 16, np.array(KV))
    np.testing.assert_allclose(found, [gemms_us + 25.0 + kv / 256 for kv in KV], rtol=1e-12)


def test_modules_meet_the_parts_of_their_own_heads() -> None:
    gemm = [("bf16", m, n, k, 1.0) for m in (1, 64) for n in (64, 65536) for k in (64, 65536)]
    bmm = [("bf16", p, h, t, 1.0) for p in ("pre", "post") for h in HEADS for t in (1, 64)]
    us = {8: 10.0, 16: 100.0}
    attention = [("bf16", h, 512, 64, b, kv, us[h]) for h in HEADS for b in (1, 64) for kv in KV]
    # each takes twice its parts: three rows of 8 heads, and one of 16
    rows = [(8, kv) for kv in KV] + [(16, KV[0])]
    module = [
        ("bf16", "bf16", "bf16", "deepseek-v3", h, b, kv, 2 * b * (us[h] + 5.0))
        for h, kv in rows for b in (1, 64)
    ]  # fmt: skip
    tables = handmade_tables(gemm=gemm, mla_bmm=bmm, mla_decode=attention, mla_module_decode=module)
    ((family,),) = module_families(tables).values()
    assert "takes 2 times" in family.reason
    assert family.excess_us == pytest.approx(15.0, rel=0.05)


@pytest.mark.parametrize(("factor", "is_found"), [(0.8, False), (1.2, False), (1.6, True)])
def test_a_module_far_above_its_parts_is_the_host(factor: float, is_found: bool) -> None:
    found = module_families(tables_of(factor))
    assert bool(found) is is_found
    if is_found:
        ((family,),) = found.values()
        assert family.keys["dtype"] == ("bf16",)
        assert not family.serves
        assert family.rows == len(HEADS) * 2 * len(KV)
        assert family.excess_us == pytest.approx(0.6 * 59.0, rel=0.15)


def test_without_parts_nothing_is_flagged() -> None:
    whole = tables_of(3.0)
    few = {name: table for name, table in whole.measured.tables.items() if name != "mla_bmm"}
    alone = fastroof.Tables(replace(whole.measured, tables=few), whole.gpu)
    assert module_families(alone) == {}
    assert (
        module_families(
            fastroof.load_tables("h100", source="aiconfigurator-vllm-0.25.0").some_rows("gemm", np.arange(9))
        )
        == {}
    )


def test_what_ships_as_known_is_vllms_host() -> None:
    families: tuple[Any, ...] = known_unsound("rtx_pro_6000", "aiconfigurator-vllm-0.24.0", MODULE)
    assert {family.keys["dtype"][0] for family in families} == {"bf16", "nvfp4"}
    for family in families:
        assert family.test == "module"
        assert family.excess_us > 19.0
        assert float(family.reason.split()[3]) > MODULE_OVER_PARTS
    # vLLM's are replayed since 0.25.0, TensorRT-LLM's before
    for gpu, source in (("b300", "vllm-0.25.0"), ("h100", "vllm-0.25.0"), ("b300", "trtllm-1.3.0rc20")):
        assert not known_unsound(gpu, f"aiconfigurator-{source}", MODULE)


@pytest.mark.parametrize(("factor", "is_found"), [(0.6, False), (0.99, False), (1.5, True)])
def test_attention_alone_above_the_block_around_it_is_another_kernel(factor: float, is_found: bool) -> None:
    block_us = {(heads, q): 100.0 + heads * q**2 * 1e-6 for heads in (16, 32) for q in (512, 4096, 16384)}
    tables = handmade_tables(
        mla_module_prefill=[
            ("fp8_block", "fp8", "bf16", "deepseek-v3", heads, 1, q, q, us)
            for (heads, q), us in block_us.items()
        ],
        mla_prefill=[
            ("bf16", "bf16", heads, 128, 64, 1, q, q, factor * us) for (heads, q), us in block_us.items()
        ],
    )
    found = kernel_families(tables, "mla_prefill")
    assert bool(found) is is_found
    if is_found:
        ((family,),) = found.values()
        assert (family.keys, family.serves, family.rows) == ({"kv_dtype": ("bf16",)}, False, len(block_us))
        assert family.ratio == pytest.approx(factor)
        assert "at 100% of 4 points" in family.reason
    assert kernel_families(tables_of(1.0), "mla_prefill") == {}


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_prompts_of_sglang_on_hopper_take_kernels_that_unfold_keys_and_values(gpu: str) -> None:
    source = "aiconfigurator-sglang-0.5.14"
    tables = fastroof.load_tables(gpu)
    # what ships is what the check finds
    for kernel, formats in (("mla_prefill", {"bf16", "fp8"}), ("mla_decode", {"fp8"})):
        known = known_unsound(gpu, source, kernel)
        assert {family.keys["kv_dtype"] for family in known} == {(dtype,) for dtype in formats}
        assert kernel_families(tables, kernel) == {source: list(known)}
    plan = fastroof.compile_plan("deepseek-r1", gpu, tables, tp=8, engine="sglang-0.5.9")
    step = plan.explain([(8192, 24576)])
    attention = [part for part in step.operators if part.role == "prefill_attention"]
    assert {part.source for part in attention} == {"aiconfigurator-trtllm-1.3.0rc20"}
    # 16 heads of 192 and 128 values a pair; kernels that absorb reach a quarter of the peak in these FLOPs
    flops = 2 * 16 * (192 + 128) * (8192 * 24576 + 8192**2 / 2) * 61
    assert flops / sum(part.total_us for part in attention) * 1e6 > 0.4 * tables.gpu.peak("bf16")


@pytest.mark.parametrize(("gpu", "tp"), [("h100", 16), ("h200", 8)])
def test_decodes_of_sglang_over_an_fp8_cache_take_no_longer_than_over_bf16(gpu: str, tp: int) -> None:
    tables = fastroof.load_tables(gpu)
    us = {
        kv_dtype: fastroof.compile_plan(
            "deepseek-r1", gpu, tables, tp=tp, engine="sglang-0.5.9", kv_dtype=kv_dtype
        ).decode_us(64, 4096)
        for kv_dtype in ("bf16", "fp8")
    }
    assert 0.7 < us["fp8"] / us["bf16"] < 1.05


def test_decodes_alone_are_held_against_blocks_over_the_same_cache() -> None:
    sizes = [(16, batch, kv) for batch in (8, 64) for kv in (8192, 65536)]
    tables = handmade_tables(
        mla_module_decode=[
            ("fp8_block", kv_dtype, "bf16", "deepseek-v3", *size, us)
            for kv_dtype, us in (("fp8", 100.0), ("bf16", 300.0))
            for size in sizes
        ],
        mla_decode=[
            (kv_dtype, 16, 512, 64, *size[1:], 200.0) for kv_dtype in ("fp8", "bf16") for size in sizes
        ],
    )
    ((family,),) = kernel_families(tables, "mla_decode").values()
    assert family.keys == {"kv_dtype": ("fp8",)}
    assert family.ratio == 2.0
    assert set(KERNELS) == {"mla_prefill", "mla_decode"}
