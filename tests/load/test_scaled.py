"""Kernels of another card, scaled by rooflines: rows, origins, errors and refusals."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.config import GpuSpec, load_gpu
from fastroof.engines import load_engine
from fastroof.errors import GpuError, TableError
from fastroof.load import MeasuredTables, load_measured_of
from fastroof.load.scaled import ALIKE_ERROR, UNLIKE_ERROR, scaled_error, scaled_from, with_scaled
from fastroof.load.write import write_source
from fastroof.operators.registry import OPERATORS
from fastroof.plan.options import PlanOptions
from fastroof.tables.table_set import load_gpu_tables

H100 = load_gpu("h100")
HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
OWN_ROWS = {
    "dtype": np.full(2, "bf16", object),
    "m": np.array([1, 2]),
    "n": np.full(2, 4096),
    "k": np.full(2, 4096),
    "latency_us": np.array([15.0, 15.5]),
}


def like(**changes: Any) -> GpuSpec:
    """A card that runs the kernels of the H100."""
    return dataclasses.replace(H100, **{"name": "other", "aliases": (), "kernels_of": "h100", **changes})


def halved(gpu: GpuSpec) -> GpuSpec:
    peaks = {dtype: peak / 2 for dtype, peak in gpu.peak_flops_per_s.items()}
    return dataclasses.replace(gpu, peak_flops_per_s=peaks, hbm_bytes_per_s=gpu.hbm_bytes_per_s / 2)


@functools.cache
def some_gemms() -> MeasuredTables:
    tables = fastroof.load_tables("h100")
    return tables.some_rows("gemm", np.arange(0, tables.table("gemm").num_rows, 211)).measured


def naive_gemm_us(row: dict[str, Any], least_us: float, there: GpuSpec, here: GpuSpec) -> float:
    m, n, k = row["m"], row["n"], row["k"]
    width = {"bf16": 2, "fp8": 1, "fp8_block": 1}[row["dtype"]]
    flops, moved = 2.0 * m * n * k, width * (m * k + k * n) + 2 * m * n
    there_us, here_us = (
        least_us + 1e6 * (flops / gpu.peak(row["dtype"]) + moved / gpu.hbm_bytes_per_s)
        for gpu in (there, here)
    )
    return float(row["latency_us"] * here_us / there_us)


@given(peak=st.floats(0.05, 3), bandwidth=st.floats(0.1, 3), number=st.integers(0, 10**6))
def test_a_row_is_its_latency_over_b_times_b_of_the_card(peak: float, bandwidth: float, number: int) -> None:
    peaks = {dtype: one * peak for dtype, one in H100.peak_flops_per_s.items()}
    card = like(peak_flops_per_s=peaks, hbm_bytes_per_s=H100.hbm_bytes_per_s * bandwidth)
    measured = some_gemms()
    own, scaled = (made.tables["gemm"].columns for made in (measured, with_scaled(None, measured, card)))
    at = number % len(own["m"])
    row = {name: own[name][at] for name in ("dtype", "m", "n", "k", "latency_us")}
    least_us = float(own["latency_us"][own["dtype"] == row["dtype"]].min())
    assert scaled["latency_us"][at] == pytest.approx(naive_gemm_us(row, least_us, H100, card), rel=1e-12)


def test_a_card_with_the_donors_figures_has_its_rows() -> None:
    measured = fastroof.load_tables("h100").measured
    scaled = with_scaled(None, measured, like())
    assert set(scaled.tables) == set(measured.tables)
    for name, table in measured.tables.items():
        there_us, here_us = (one.columns["latency_us"] for one in (table, scaled.tables[name]))
        np.testing.assert_allclose(here_us, there_us, 1e-14)


def test_half_of_every_rate_is_between_one_and_two_times_the_latency() -> None:
    card = dataclasses.replace(halved(like()), nvlink_bytes_per_s=H100.nvlink_bytes_per_s / 2)
    measured = fastroof.load_tables("h100").measured
    for name, table in with_scaled(None, measured, card).tables.items():
        ratio = table.columns["latency_us"] / measured.tables[name].columns["latency_us"]
        assert 1.0 < ratio.min() < ratio.max() < 2.0, name


def test_formats_without_units_are_left_out() -> None:
    peaks = {dtype: H100.peak_flops_per_s[dtype] for dtype in ("bf16", "int8")}
    scaled = load_measured_of(like(peak_flops_per_s=peaks))
    assert scaled is not None
    dtypes = set(scaled.tables["gemm"].columns["dtype"])
    assert "bf16" in dtypes
    assert not any(dtype.startswith("fp8") for dtype in dtypes)


def test_hashes_are_of_the_card_and_its_donor() -> None:
    names = [(card.name, card) for card in (H100, like(), like(hbm_bytes_per_s=3e12))]
    tables = [load_gpu_tables(card) for _, card in names]
    assert len({made.content_hash for made in tables if made is not None}) == len(names)
    again = load_gpu_tables(like())
    assert again is not None
    assert tables[1] is not None
    assert again.content_hash == tables[1].content_hash


def test_own_rows_come_before_scaled_ones(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write_source(folder / "bench", {"gemm": OWN_ROWS}, {"gpu": "mine"})
    (folder / "gpu.toml").write_text(
        'title = "Mine"\nname = "mine"\nsource = "made up"\nnum_sms = 132\nkernels_of = "h100"\n'
        "[peak_tflops]\nbf16 = 900\nfp8 = 1800\n[memory]\nhbm_tb_per_s = 3\nhbm_gib = 80\n"
        "[links]\nnvlink_gb_per_s = 450\n"
    )
    tables = load_gpu_tables(folder / "gpu.toml")
    assert tables is not None
    own, *others = tables.candidates("gemm")
    assert (own.source, scaled_from(own.provenance)) == ("bench", "")
    assert {scaled_from(table.provenance) for table in (*others, *tables.candidates("moe"))} == {"h100"}
    point = {name: int(OWN_ROWS[name][0]) for name in ("m", "n", "k")}
    assert tables.lookup("gemm", **point).origin == 0
    assert tables.lookup("gemm", **point, dtype="fp8").origin == 4
    chosen = load_gpu_tables(folder / "gpu.toml", source="bench")
    assert chosen is not None
    assert set(chosen.measured.tables) == {"gemm"}


def test_plans_are_marked_as_modelled_with_their_error() -> None:
    own = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    with pytest.warns(UserWarning, match="on h100_nvl comes from kernels of h100, .*error 15%") as warned:
        plan = fastroof.compile_plan("llama-3.1-8b", "h100_nvl", engine="kernels")
    assert len(warned) == 1
    operators = plan.explain([(1, 99)] * 8 + [(100, 0)]).operators
    assert {part.origin for part in operators} == {4}
    assert all(part.source.endswith(" of h100, scaled") for part in operators if part.name != "runtime")
    for made, least in ((own, 0.0), (plan, ALIKE_ERROR)):
        assert least < made.decode_error(8, 4096) < least + 0.12
    assert 0.8 < plan.decode_us(8, 4096) / own.decode_us(8, 4096) < 1.0  # 3.9 TB/s for 3.35


def test_a_lookup_has_the_plans_origin_and_error() -> None:
    tables = fastroof.load_tables("h100_nvl")
    for name, sizes in (
        ("gemm", {"m": 64, "n": 6144, "k": 4096}),
        ("attention_decode", HEADS | {"batch_size": 3, "kv_len": 99}),
        ("moe", {"num_tokens": 7, "hidden": 2048, "intermediate": 1024, "topk": 8, "num_experts": 128}),
    ):
        found = tables.lookup(name, with_error=True, **sizes)
        assert found.origin == 4
        assert found.relative_error is not None
        assert found.relative_error > ALIKE_ERROR


def test_what_the_donor_lacks_is_modelled_unasked() -> None:
    measured = fastroof.load_tables("h100").measured
    some = dataclasses.replace(
        measured, tables={name: measured.tables[name] for name in ("gemm", "elementwise")}, others={}
    )
    card = like()
    tables = fastroof.Tables(with_scaled(None, some, card), card)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = fastroof.compile_plan("llama-3.1-8b", card, tables, engine="kernels")
    sources = {part.name: part.source for part in plan.explain([(1, 99)]).operators}
    assert sources["decode attention"] == "datasheet"
    assert sources["qkv"] == tables.table("gemm").source


@pytest.mark.parametrize(
    ("card", "error"),
    [
        ("h100_nvl", ALIKE_ERROR),
        ("a100_40gb", ALIKE_ERROR),
        ("h800", ALIKE_ERROR),
        ("h20", UNLIKE_ERROR),
        ("rtx_6000_ada", 0.45),
    ],
)
def test_cards_that_differ_more_are_less_sure(card: str, error: float) -> None:
    gpu = load_gpu(card)
    assert scaled_error(load_gpu(gpu.kernels_of), gpu) == error


def test_a_donor_must_be_known_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GpuError, match="unknown GPU 'h101'; did you mean"):
        load_gpu_tables(like(kernels_of="h101"))
    with pytest.raises(GpuError, match="kernels_of must be text of one line"):
        like(kernels_of="h100\n")
    # without the extra tables nothing of it is there
    monkeypatch.setenv("FASTROOF_TABLES", str(tmp_path))
    monkeypatch.setenv("FASTROOF_TABLES_IMPORT", "never")
    assert load_gpu_tables("l40") is None
    with pytest.raises(TableError, match="l40 has no measured tables, and uses those of l40s, scaled: run "):
        fastroof.load_tables("l40")
    with pytest.warns(UserWarning, match=r"no measured tables of l40: .*\(standard error 22%\); run "):
        fastroof.compile_plan("llama-3.1-8b", "l40", engine="kernels")


def test_scaled_rows_keep_every_column() -> None:
    scaled = load_measured_of("h100_nvl")
    assert scaled is not None
    for name, table in scaled.tables.items():
        assert {column.name for column in OPERATORS[name].required} <= set(table.columns)
        assert np.isfinite(table.columns["latency_us"]).all()


def test_an_engine_runs_the_kernels_that_it_runs_on_the_donor() -> None:
    options = PlanOptions(engine=load_engine("vllm-0.17.1")).checked()
    for gpu, name in (("h200", "{}"), ("h200_nvl", "{} of h200, scaled")):
        kernel = options.kernel("moe", load_gpu(gpu), "fp8_block")
        assert kernel is not None
        assert kernel.source == name.format("aiconfigurator-vllm-0.19.0")
    assert options.kernel("moe", load_gpu("h100_nvl"), "fp8_block") is None
