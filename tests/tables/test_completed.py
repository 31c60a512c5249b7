"""Your own rows, completed by a shipped campaign's: values, origins, errors, and when they stay alone."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.judging.coverage import run_survey
from fastroof.load.write import write_source
from fastroof.operators.gemm import GEMM
from fastroof.tables.kernel_order import KernelOrder
from tests.reference.completed import naive_ratio

HEADS = ("num_q_heads", "num_kv_heads", "head_dim", "window")
OWN = {"tool": "kernels_bench 1.0", "framework": "vllm"}
NAME = "own, completed by shipped"


def product(**values: Any) -> dict[str, Any]:
    """Columns of every combination of values; text stays text."""
    rows = list(itertools.product(*values.values()))
    columns = zip(values, zip(*rows, strict=True), strict=True)
    return {n: np.array(c, object if isinstance(c[0], str) else np.int64) for n, c in columns}


def gemm_us(c: dict[str, Any]) -> Any:
    return 5.0 + 2e-9 * c["m"] * c["n"] * c["k"] + 6e-7 * c["n"] * c["k"]


def gemms(ms: list[int], pairs: list[tuple[int, int]], dtype: str = "bf16") -> dict[str, Any]:
    c = product(m=ms, pair=range(len(pairs)))
    n, k = np.array(pairs).T
    dtypes = np.full(len(c["m"]), dtype, object)
    columns = {"dtype": dtypes, "m": c["m"], "n": n[c["pair"]], "k": k[c["pair"]]}
    return columns | {"latency_us": gemm_us(columns)}


def tilted(columns: dict[str, Any], factor: float = 1.25) -> dict[str, Any]:
    """Rows that another machine would measure: slower, and the more so for more tokens and outputs."""
    return columns | {"latency_us": columns["latency_us"] * factor * (columns["m"] * columns["n"]) ** 0.01}


PAIRS = [(n, k) for n in (1024, 4096, 16384) for k in (1024, 4096)]
SHIPPED = gemms([2**i for i in range(15)], PAIRS)
SPARSE = tilted(gemms([1, 16, 256], [(4096, 1024), (4096, 4096), (5120, 4096)]))


def decodes(shapes: list[tuple[int, int]], batches: list[int], lengths: list[int], factor: float) -> Any:
    c = product(kv_dtype=["bf16"], shape=range(len(shapes)), batch_size=batches, kv_len=lengths)
    heads = np.array(shapes)[c.pop("shape")]
    sizes = {"num_q_heads": heads[:, 0], "num_kv_heads": heads[:, 1], "head_dim": np.full(len(heads), 128)}
    moved = c["batch_size"] * c["kv_len"] * heads[:, 1]
    return c | sizes | {"window": np.zeros(len(heads), int), "latency_us": factor * (4.0 + 2e-4 * moved)}


def write(folder: Path, name: str, tables: dict[str, Any], **provenance: Any) -> None:
    write_source(folder / "h100" / name, tables, {"gpu": "h100", **provenance})


def load(folder: Path, own: dict[str, Any], shipped: dict[str, Any], **provenance: Any) -> fastroof.Tables:
    write(folder, "own", own, **(OWN | provenance))
    write(folder, "shipped", shipped, framework="vllm")
    return fastroof.load_tables(folder / "h100")


@pytest.fixture
def tables(tmp_path: Path) -> fastroof.Tables:
    return load(tmp_path, {"gemm": SPARSE}, {"gemm": SHIPPED})


def at(tables: fastroof.Tables, m: Any, n: Any = 4096, k: Any = 4096, **more: Any) -> fastroof.Lookup:
    return tables.lookup("gemm", m=m, n=n, k=k, **more)


def test_own_points_come_back_to_the_last_bit(tables):
    found = at(tables, *(SPARSE[name] for name in "mnk"))
    assert found.latency_us.tolist() == SPARSE["latency_us"].tolist()
    assert set(found.origin) == {ORIGIN_MEASURED}


def test_other_sizes_are_the_shipped_ones_times_the_ratio_of_naive_loops(tables):
    alone = fastroof.load_tables(tables.measured.root, source="shipped")
    shipped = at(alone, *(SPARSE[name] for name in "mnk")).latency_us
    sizes = list(zip(*(SPARSE[name].tolist() for name in "nkm"), strict=True))
    known = list(zip(sizes, SPARSE["latency_us"] / shipped, strict=True))
    own = set(sizes)
    rows = (SHIPPED[name].tolist() for name in ("n", "k", "m", "latency_us"))
    for n, k, m, shipped_us in zip(*rows, strict=True):
        if (n, k, m) not in own:
            found = at(tables, m, n, k)
            ratio = naive_ratio([((size[2], size[0], size[1]), r) for size, r in known], (m, n, k))
            assert float(found.latency_us) == pytest.approx(shipped_us * ratio, rel=1e-12)
            assert int(found.origin) == ORIGIN_BORROWED


def test_widths_that_only_own_rows_have_are_completed_along_m(tables):
    found = at(tables, [1, 16, 1024], 5120)
    assert found.origin.tolist() == [ORIGIN_MEASURED, ORIGIN_MEASURED, ORIGIN_BORROWED]
    truth = tilted(gemms([1024], [(5120, 4096)]))["latency_us"]
    assert found.latency_us[2] == pytest.approx(truth[0], rel=0.02)


def test_what_lies_between_and_beyond_own_points_is_nearer_than_from_own_rows_alone(tables):
    alone = fastroof.load_tables(tables.measured.root, source="own")
    m = np.array([2, 64, 4096, 16384])
    truth = tilted(gemms(m.tolist(), [(16384, 1024)]))["latency_us"]
    errors = [np.abs(at(one, m, 16384, 1024).latency_us / truth - 1.0) for one in (tables, alone)]
    assert errors[0].max() < 0.07
    assert errors[1].min() > 2.0 * errors[0].max()


def test_head_shapes_that_own_rows_lack_are_scaled_too(tmp_path):
    own = decodes([(32, 8), (64, 8)], [1, 64], [1024, 8192], 1.1)
    shipped = decodes([(32, 8), (64, 8), (8, 1)], [2**i for i in range(9)], [128, 1024, 8192], 1.0)
    tables = load(tmp_path, {"attention_decode": own}, {"attention_decode": shipped})

    def decode(**sizes: Any) -> fastroof.Lookup:
        return tables.lookup("attention_decode", head_dim=128, **sizes)

    for c in (shipped, own):
        sizes = {name: c[name] for name in ("num_q_heads", "num_kv_heads", "batch_size", "kv_len")}
        expected = 1.1 * (4.0 + 2e-4 * c["batch_size"] * c["kv_len"] * c["num_kv_heads"])
        np.testing.assert_allclose(decode(**sizes).latency_us, expected, rtol=1e-12)
    found = decode(num_q_heads=[32, 8], num_kv_heads=[8, 1], batch_size=1, kv_len=1024, with_error=True)
    assert found.origin.tolist() == [ORIGIN_MEASURED, ORIGIN_BORROWED]
    assert np.isfinite(found.relative_error).all()
    assert tables.source_of("attention_decode", ("bf16", 8, 1, 128, 0)) == NAME


def test_the_end_of_a_window_between_scaled_rows_is_borrowed(tmp_path):
    own, shipped = (
        rows | {"window": np.full(len(rows["window"]), 128)}
        for rows in (
            decodes([(32, 8)], [1, 64], [64, 1024], 1.1),
            decodes([(32, 8), (16, 4)], [1, 64], [64, 1024], 1.0),
        )
    )
    tables = load(tmp_path, {"attention_decode": own}, {"attention_decode": shipped})
    sizes = {"num_q_heads": 16, "num_kv_heads": 4, "head_dim": 128, "window": 128}
    assert tables.source_of("attention_decode", ("bf16", 16, 4, 128, 128)) == NAME
    found = tables.lookup("attention_decode", batch_size=1, kv_len=128, **sizes)
    assert int(found.origin) == ORIGIN_BORROWED


def test_kernels_that_no_own_row_scales_are_those_of_the_same_engine(tmp_path):
    shipped = decodes([(16, 4)], [1, 64], [64, 1024], 1.0)
    own = decodes([(32, 8)], [1, 64], [64, 1024], 1.1)
    tables = load(tmp_path, {"attention_decode": own}, {"attention_decode": shipped})
    found = tables.lookup(
        "attention_decode", num_q_heads=16, num_kv_heads=4, head_dim=128, batch_size=1, kv_len=1024
    )
    assert int(found.origin) == ORIGIN_MEASURED
    assert float(found.latency_us) == pytest.approx(4.0 + 2e-4 * 1024 * 4, rel=1e-12)


def test_the_ends_of_bands_between_scaled_rows_are_borrowed():
    h100 = fastroof.load_tables("h100", source="aiconfigurator-vllm-0.25.0")
    rows = h100.rows(GEMM, ("fp8",))
    some = rows["n"] == 4096
    scaled = {name: values[some] for name, values in rows.items()}
    scaled["origin"] = np.full(int(some.sum()), ORIGIN_BORROWED, np.uint8)
    packed = GEMM.pack(("fp8",), scaled, h100.gpu)
    assert len(packed.flag) > len(scaled["m"]) + 2 * len(np.unique(scaled["k"])), "there are bands"
    assert set(packed.flag) == {ORIGIN_EXTRAPOLATED, ORIGIN_BORROWED}


def test_a_scaled_row_adds_its_error(tmp_path):
    noisy = SPARSE | {"latency_us": SPARSE["latency_us"] * np.tile([0.95, 1.05, 1.0], 3)}
    about = {"gemm": {"campaign": {"scale": 0.0, "common": 0.0}}}
    tables = load(tmp_path, {"gemm": noisy}, {"gemm": SHIPPED}, operators=about)
    error = tables.candidates("gemm")[0].error(("bf16",))
    assert 0.02 < error < 0.1
    found = at(tables, [64, 16384], 16384, 1024, with_error=True)
    assert (found.relative_error >= error).all()


def test_campaigns_that_measured_other_kernels_do_not_complete(tmp_path):
    noisy = SPARSE | {"latency_us": SPARSE["latency_us"] * np.tile([0.6, 1.5, 1.0], 3)}
    tables = load(tmp_path, {"gemm": noisy}, {"gemm": SHIPPED})
    assert at(tables, [64, 16384]).origin.max() <= ORIGIN_EXTRAPOLATED
    alone = fastroof.load_tables(tables.measured.root, source="own")
    assert at(tables, [64, 16384]).latency_us.tolist() == at(alone, [64, 16384]).latency_us.tolist()


@pytest.mark.parametrize(
    "provenance", [{"rank": 130}, {"framework": "sglang"}, {"framework": ""}, {"tool": "another", "rank": 50}]
)
def test_only_own_rows_of_the_same_engine_that_serve_first_are_completed(tmp_path, provenance):
    tables = load(tmp_path, {"gemm": SPARSE}, {"gemm": SHIPPED}, **provenance)
    assert tables.sources["gemm"] == ("shipped" if provenance == {"rank": 130} else "own")
    assert at(tables, 64, 16384, 1024).origin != ORIGIN_BORROWED


def test_another_engines_plans_are_not_completed(tables, tmp_path):
    write(tmp_path, "trtllm", {"gemm": SHIPPED}, framework="trtllm")
    tables = fastroof.load_tables(tables.measured.root)
    assert tables.in_order(KernelOrder(("vllm",))).sources == {"gemm": NAME}
    assert tables.in_order(KernelOrder(("trtllm",))).sources == {"gemm": "trtllm"}
    assert tables.in_order(KernelOrder(("vllm",), (("gemm", "own"),))).sources == {"gemm": "own"}


def test_dtypes_that_only_one_of_them_has_are_served_as_measured(tmp_path):
    def both(rows: dict[str, Any], dtype: str) -> dict[str, Any]:
        return {name: np.r_[values, gemms([1, 16], PAIRS, dtype)[name]] for name, values in rows.items()}

    tables = load(tmp_path, {"gemm": both(SPARSE, "fp8_rowwise")}, {"gemm": both(SHIPPED, "fp8")})
    for dtype, source in (("fp8_rowwise", NAME), ("fp8", "shipped")):
        assert tables.source_of("gemm", (dtype,)) == source
        assert at(tables, [1, 16], dtype=dtype).origin.tolist() == [ORIGIN_MEASURED] * 2


def test_rows_as_measured_are_those_of_hold_outs_and_survive_pickling(tables):
    assert tables.table("gemm").source == "own"
    assert tables.table("gemm").num_rows == len(SPARSE["m"])
    assert at(tables.some_rows("gemm", np.arange(9)), 64).origin != ORIGIN_BORROWED
    assert {row.source: row.rows for row in run_survey(tables)} == {"own": 9, "shipped": len(SHIPPED["m"])}
    again = pickle.loads(pickle.dumps(tables))
    assert at(again, 64, 16384, 1024).latency_us == at(tables, 64, 16384, 1024).latency_us


def test_own_rows_of_every_size_leave_nothing_to_complete(tmp_path):
    tables = load(tmp_path, {"gemm": tilted(SHIPPED)}, {"gemm": SHIPPED})
    assert at(tables, *(SHIPPED[name] for name in "mnk")).origin.max() == ORIGIN_MEASURED


def test_orders_of_one_engine_complete_once(tables):
    first, second = (tables.in_order(KernelOrder(("vllm",), release=release)) for release in ("", "0.25"))
    assert first.candidates("gemm")[0] is second.candidates("gemm")[0] is tables.candidates("gemm")[0]


def test_plans_price_what_lookups_answer(tmp_path):
    """Own rows of a few sizes, 1.2 times as slow: a plan is 1.2 times as slow too, and names its rows."""
    h100 = fastroof.load_tables("h100", source="aiconfigurator-vllm-0.25.0")
    own, shipped = {}, {}
    for name in ("gemm", "attention_decode", "attention_prefill"):
        rows = {c.name: h100.table(name).columns[c.name] for c in h100.table(name).schema.required}
        if name == "gemm":
            kind = rows["dtype"] == "bf16"
            some = np.isin(rows["n"], (4096, 6144)) & np.isin(rows["m"], (1, 64, 1024))
        else:
            kind = (rows["kv_dtype"] == "bf16") & (rows["head_dim"] == 128) & (rows["window"] == 0)
            some = (rows["num_kv_heads"] == 8) & (rows["num_q_heads"] == 64)
            some &= np.isin(rows["kv_len"], (1024, 8192))
        shipped[name] = {column: values[kind] for column, values in rows.items()}
        own[name] = {column: values[kind & some] for column, values in rows.items()}
        own[name]["latency_us"] = 1.2 * own[name]["latency_us"]
    tables = load(tmp_path, own, shipped)
    alone = fastroof.load_tables(tmp_path / "h100", source="shipped")
    made, plain = (
        fastroof.compile_plan("llama-3.1-8b", "h100", one, engine="kernels", allow_modelled=True)
        for one in (tables, alone)
    )
    explained = {one.name: one for one in made.explain([(1, 4095)] * 64).operators}
    theirs = {one.name: one for one in plain.explain([(1, 4095)] * 64).operators}
    for name in ("gate_up", "decode attention"):
        assert explained[name].source == NAME
        assert explained[name].origin == ORIGIN_BORROWED
        assert explained[name].total_us == pytest.approx(1.2 * theirs[name].total_us, rel=1e-3)
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "batch_size": 64, "kv_len": 4096}
    found = tables.lookup("attention_decode", **sizes)
    attention = explained["decode attention"]
    assert float(found.latency_us) == pytest.approx(attention.total_us / attention.calls, rel=1e-12)
    assert int(found.origin) == ORIGIN_BORROWED
