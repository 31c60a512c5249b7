"""Weight-only kernels without rows: whose times they take, what is subtracted, and how sure they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof import MissingTableError, Tables
from fastroof.columns import ORIGIN_MODELLED
from fastroof.engines import load_engine
from fastroof.engines.costs import UNSEEN_LAYERS_ERROR
from fastroof.load import MeasuredTables
from fastroof.operators.calls import Experts, Gemm
from fastroof.operators.gemm import GEMM
from fastroof.operators.moe import MOE
from fastroof.plan.curves import TableCurves
from fastroof.plan.step_error import step_errors
from fastroof.plan.weight_only import ERROR_PER_OCTAVE, WEIGHT_ONLY, weight_only_sibling
from fastroof.serving import estimate
from fastroof.tables.kernel_order import KernelOrder
from tests.reference.handmade import handmade_tables

N, K = 4096, 2048
ROWS = (1, 2, 8, 64, 512, 4096)
US = {"bf16": 8.0, "int8_wo": 6.0, "int4_wo": 5.0, "sq": 1.0}


def latency_us(dtype: str, m: int) -> float:
    return US[dtype] + 1e-4 * m * US[dtype]


def a_table(*dtypes: str, engine: str = "") -> Tables:
    rows = [
        (dtype, m, n, k, latency_us(dtype, m))
        for dtype in dtypes
        for m in ROWS
        for n in (N, 2 * N)
        for k in (K, 2 * K)
    ]
    tables = handmade_tables(gemm=rows)
    made = tables.measured.tables["gemm"]
    made = replace(made, source=f"of {engine}", provenance={**made.provenance, "framework": engine})
    return Tables(replace(tables.measured, tables={"gemm": made}), tables.gpu)


def together(*tables: Tables, engines: tuple[str, ...] = ()) -> Tables:
    first, *others = (one.measured.tables["gemm"] for one in tables)
    measured = MeasuredTables("h100", {"gemm": first}, Path("by hand"), others={"gemm": tuple(others)})
    return Tables(measured, tables[0].gpu).in_order(KernelOrder(engines))


def gemm(dtype: str) -> Gemm:
    return Gemm("qkv", "qkv", 1, N, K, dtype)


def naive_us(tables: Tables, dtype: str, sibling: str, m: int) -> float:
    """The sibling's time less that of the bytes saved, and at least the FLOPs and bytes of the kernel."""
    width = {"bf16": 2.0, "fp8_wo": 1.0, "int8_wo": 1.0, "int4_wo": 0.5, "nvfp4_wo": 0.5 + 1 / 16}
    us_per_byte = 1e6 / tables.gpu.hbm_bytes_per_s
    saved_us = (width[sibling] - width[dtype]) * N * K * us_per_byte
    own_us = 2 * m * N * K / tables.gpu.peak("bf16") * 1e6
    own_us += (width[dtype] * N * K + 2 * m * (N + K)) * us_per_byte
    return max(latency_us(sibling, m) - saved_us, own_us)


@pytest.mark.parametrize(
    ("dtype", "measured", "sibling", "octaves"),
    [
        ("fp8_wo", ("bf16",), "bf16", 1.0),
        ("fp8_wo", ("bf16", "int4_wo", "int8_wo"), "int8_wo", 1.0),
        ("fp8_wo", ("bf16", "int4_wo"), "int4_wo", 1.0),
        ("int4_wo", ("bf16",), "bf16", 2.0),
        ("nvfp4_wo", ("bf16", "int4_wo", "int8_wo"), "int4_wo", 1.0),
        ("int8_wo", ("bf16", "sq"), "bf16", 1.0),
    ],
)
def test_a_weight_only_gemm_takes_its_siblings_time_less_that_of_the_bytes_it_saves(
    dtype: str, measured: tuple[str, ...], sibling: str, octaves: float
) -> None:
    tables = a_table(*measured)
    found = weight_only_sibling(gemm(dtype), GEMM, tables)
    assert found is not None
    assert (found.call.dtype, found.error) == (sibling, pytest.approx(ERROR_PER_OCTAVE * octaves))
    values, origin = TableCurves(tables).row_values(gemm(dtype), max(ROWS))
    np.testing.assert_allclose(
        values[list(ROWS)], [naive_us(tables, dtype, sibling, m) for m in ROWS], rtol=1e-12
    )
    assert (origin[list(ROWS)] == ORIGIN_MODELLED).all()


@pytest.mark.parametrize("dtype", ["int8", "fp8", "nvfp4", "w4afp8"])
def test_kernels_that_compute_in_other_units_have_no_sibling(dtype: str) -> None:
    tables = a_table("bf16", "int8_wo")
    assert weight_only_sibling(gemm(dtype), GEMM, tables) is None
    with pytest.raises(MissingTableError, match=f"no gemm table of dtype {dtype}.*allow_modelled=True"):
        TableCurves(tables).row_curve(gemm(dtype), 64)


@pytest.mark.parametrize("dtype", WEIGHT_ONLY)
def test_what_was_measured_is_not_modelled_and_nothing_has_a_sibling_without_rows(dtype: str) -> None:
    alone = handmade_tables(gemm=[(dtype, m, N, K, 5.0) for m in ROWS])
    assert weight_only_sibling(gemm(dtype), GEMM, alone) is None
    assert weight_only_sibling(gemm(dtype), GEMM, a_table("sq")) is None


@pytest.mark.parametrize(
    ("engine", "other", "sibling"),
    [
        ("vllm", "sglang", "int8_wo"),
        ("sglang", "vllm", "int8_wo"),
        ("vllm", "trtllm", "bf16"),
        ("trtllm", "vllm", "bf16"),
    ],
)
def test_the_engines_bf16_precedes_weight_only_kernels_of_another_program(
    engine: str, other: str, sibling: str
) -> None:
    tables = together(
        a_table("bf16", engine=engine), a_table("int8_wo", engine=other), engines=(engine, other)
    )
    found = weight_only_sibling(gemm("fp8_wo"), GEMM, tables)
    assert found is not None
    assert found.call.dtype == sibling


def test_rows_that_a_check_found_wrong_are_not_donors() -> None:
    tables = a_table("bf16", "int8_wo")
    whole = tables.measured.tables["gemm"]
    family = {"keys": {"dtype": ["int8_wo"]}, "test": "launched", "reason": "flat", "ratio": 3.0}
    about = {"gemm": {**whole.about, "unsound": [family]}}
    flagged = replace(whole, provenance={**whole.provenance, "operators": about})
    found = weight_only_sibling(
        gemm("fp8_wo"), GEMM, Tables(replace(tables.measured, tables={"gemm": flagged}), tables.gpu)
    )
    assert found is not None
    assert found.call.dtype == "bf16"


def test_steps_of_modelled_kernels_are_off_together(h100: Tables) -> None:
    plans = {
        dtype: fastroof.compile_plan("llama-3.1-8b", "h100", h100, dtype=dtype, engine="kernels")
        for dtype in ("bf16", "int4_wo")
    }
    step = [(1, 1023)] * 8
    parts = plans["int4_wo"].explain(step).operators
    modelled = [part for part in parts if part.dtype == "int4_wo"]
    assert {part.role for part in modelled} == {"qkv", "o", "gate_up", "down"}
    assert {(part.origin, part.source) for part in modelled} == {
        (ORIGIN_MODELLED, "bf16 of aiconfigurator-vllm-0.25.0 (modelled, ±40%)")
    }
    error = float(plans["int4_wo"].decode_error(8, 1024))
    share = sum(part.total_us for part in modelled) / sum(part.total_us for part in parts)
    assert share * 2 * ERROR_PER_OCTAVE < error < 0.5
    assert error > 2.0 * float(plans["bf16"].decode_error(8, 1024))
    assert "bf16 of aiconfigurator-vllm-0.25.0 (modelled, ±40%)" in plans["int4_wo"].kernels
    assert step_errors(plans["int4_wo"]) is not None


def experts_of(keys: Iterable[tuple[object, ...]]) -> list[Experts]:
    return [Experts("experts", "experts", 1, *key[1:7], key[0], key[7]) for key in keys]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int4_wo", "w4a16_mxfp4"])
def test_stated_errors_hold_for_experts_that_were_measured(h100: Tables, dtype: str) -> None:
    table = h100.table("moe")
    others = h100.some_rows("moe", table.columns["dtype"] != dtype)
    curves, errors, offs = TableCurves(others), [], []
    for call in experts_of([key for key in table.groups() if key[0] == dtype][::3]):
        sibling = weight_only_sibling(call, MOE, others)
        assert sibling is not None
        rows = table.groups()[MOE.row_key(call)]
        tokens, measured = (table.columns[name][rows] for name in ("num_tokens", "latency_us"))
        values, origin = curves.row_values(call, int(tokens.max()))
        assert (origin[tokens] == ORIGIN_MODELLED).all()
        offs.append(np.abs(np.log(values[tokens] / measured)))
        variance = MOE.row_variance(sibling.call, others, tokens.astype(np.float64))
        errors.append(np.sqrt(variance + sibling.error**2))
    off, error = np.concatenate(offs), np.concatenate(errors)
    assert np.median(off) < 0.45
    # four of five within 1.28 standard errors, if the errors are right
    assert (off < 1.2816 * error).mean() > 0.7


@pytest.mark.filterwarnings("ignore:no measured tables", "ignore:v100 has no bf16 units")
def test_fp8_without_fp8_units_runs_on_its_weights_alone() -> None:
    formats = {
        gpu: {part.role: part.dtype for part in plan.explain([(1, 1023)] * 8).operators}
        for gpu in ("a10", "l4")
        for plan in [fastroof.compile_plan("qwen3-8b", gpu, None, dtype="fp8_block", engine="vllm")]
    }
    assert formats["a10"]["qkv"] == "fp8_wo"
    assert formats["l4"]["qkv"] == "fp8_block"
    for gpu, engine in (("a10", "trtllm"), ("v100", "vllm")):
        with pytest.raises(fastroof.GpuError, match="no peak for dtype 'fp8_block'"):
            fastroof.compile_plan("qwen3-8b", gpu, None, dtype="fp8_block", engine=engine)


def test_what_no_run_judged_widens_what_is_stated_of_runs(h100: Tables) -> None:
    sizes = {"isl": 1024, "osl": 256, "clients": 16, "with_error": True}
    seen = {
        dtype: estimate(
            fastroof.compile_plan("llama-3.1-8b", "h100", h100, dtype=dtype, engine="vllm"), **sizes
        )
        for dtype in ("bf16", "int4_wo")
    }
    stated = load_engine("vllm").errors.tpot
    assert seen["bf16"].tpot_relative_error == stated
    assert seen["int4_wo"].tpot_relative_error > stated
    assert seen["int4_wo"].tpot_relative_error == seen["int4_wo"].relative_error


def test_layers_of_sparse_attention_cost_alike_and_widen_what_no_run_judged() -> None:
    tables, sglang = fastroof.load_tables("h200"), load_engine("sglang-0.5.9")
    plans = {
        name: fastroof.compile_plan(name, "h200", tables, tp=8, engine=sglang)
        for name in ("deepseek-v3.2", "deepseek-r1", "glm-5-fp8")
    }
    (of_glm,) = [one for one in sglang.costs.layers if one.architecture == "GlmMoeDsaForCausalLM"]
    own_us = {
        name: plan.profile.costs.of_step_us(plan.model.architecture, plan.model.num_blocks, 0)
        for name, plan in plans.items()
    }
    blocks = plans["deepseek-v3.2"].model.num_blocks
    assert own_us["deepseek-v3.2"] - own_us["deepseek-r1"] == pytest.approx(of_glm.layer_us * blocks)
    assert {name: plan.is_beyond_evidence for name, plan in plans.items()} == {
        "deepseek-v3.2": True, "deepseek-r1": False, "glm-5-fp8": False
    }  # fmt: skip
    errors = {name: float(plan.decode_error(16, 2048)) for name, plan in plans.items()}
    assert errors["deepseek-v3.2"] > UNSEEN_LAYERS_ERROR > max(errors["deepseek-r1"], errors["glm-5-fp8"])
    seen = estimate(plans["deepseek-v3.2"], isl=1024, osl=256, clients=16, with_error=True)
    assert seen.tpot_relative_error > UNSEEN_LAYERS_ERROR
