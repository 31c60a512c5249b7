"""What is exported for InferSim and roofline V2 reads back the same, in the form their files have."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastroof.compat import roofline_v2
from fastroof.errors import MeasureError
from fastroof.load import MeasuredTables, load_measured
from kernels_bench.output.export_trees import ROOFLINE_V2, export_tree
from kernels_bench.output.table_sets import load_table_set
from kernels_bench.protocol import Point
from tests.kernels_bench.fakes import command
from tests.reference.made_journals import copy, decode, gemm, prefill, row, write_journal

THIRD = 1000 / 3
MLA_DECODE = Point(
    "mla_decode",
    {
        "kv_dtype": "bf16",
        "num_q_heads": 128,
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "batch_size": 4,
        "kv_len": 4096,
    },
)
MLA_PREFILL = Point(
    "mla_prefill",
    {
        "dtype": "bf16",
        "kv_dtype": "bf16",
        "num_q_heads": 128,
        "nope_dim": 128,
        "rope_dim": 64,
        "batch_size": 1,
        "q_len": 4096,
        "kv_len": 4096,
    },
)


def exported(folder: Path, rows: list[Any], **options: Any) -> tuple[Any, Path]:
    journal = write_journal(folder / "j.jsonl", rows)
    root = folder / "tree"
    return export_tree(load_table_set(str(journal)), root, **options), root


def by_point(tables: MeasuredTables, dtype_matters: bool = True) -> dict[tuple[Any, ...], float]:
    found = {}
    for operator, table in tables.tables.items():
        names = [c.name for c in (*table.schema.keys, *table.schema.axes)]
        if operator == "gemm" and not dtype_matters:
            names.remove("dtype")
        for cells in zip(*(table.columns[n].tolist() for n in [*names, "latency_us"]), strict=True):
            found[operator, *cells[:-1]] = cells[-1]
    return found


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_everything_it_can_hold_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    rows = [
        (gemm(64), THIRD),
        (gemm(4096), 250.0),
        (decode(16, 4096), THIRD / 7),
        (decode(16, 4096, kv_dtype="fp8"), 30.1),
        (decode(1, 128, num_q_heads=28, num_kv_heads=4), 9.0),
        (prefill(4096), 219.951),
        (MLA_DECODE, 60.1),
        (MLA_PREFILL, 1104.692),
    ]
    export, root = exported(tmp_path, rows)
    assert by_point(load_measured(root)) == {(p.operator, *p.values.values()): us for p, us in rows}
    assert export.left_out == {}
    assert sorted(export.rows) == [
        "gemm/h100/data.csv",
        "mha/decode/h100/28-4-128.csv",
        "mha/decode/h100/32-8-128.csv",
        "mha/prefill/h100/32-8-128.csv",
        "mla/decode/h100/128-512-64.csv",
        "mla/prefill/h100/128-128-64.csv",
    ]


def test_mfu_has_all_digits_and_the_published_convention(tmp_path: Path) -> None:
    _, root = exported(tmp_path, [(prefill(4096), 219.951), (decode(16, 4096), 90.0), (gemm(4096), 250.0)])
    [one] = cells(root / "mha/prefill/h100/32-8-128.csv")
    assert (one["dtype"], one["seq_len"], one["latency_us"]) == ("bf16", "4096", "219.951")
    # Half of S^2, as published: the exact causal S (S + 1) / 2 would be 1 part in 4096 more.
    half_square = 4 * 32 * 128 * 4096**2 / 2
    assert float(one["mfu"]) == pytest.approx(half_square / (219.951e-6 * 989.5e12), rel=1e-14)
    [one] = cells(root / "mha/decode/h100/32-8-128.csv")
    assert float(one["mfu"]) == pytest.approx(4 * 32 * 128 * 4096 * 16 / (90e-6 * 989.5e12), rel=1e-14)
    [one] = cells(root / "gemm/h100/data.csv")
    assert float(one["mfu"]) == pytest.approx(2 * 4096**3 / (250e-6 * 989.5e12), rel=1e-14)
    for finding in load_measured(root).findings:
        assert finding.agrees
        assert finding.label.startswith("bf16 peak of h100")


def test_headers_and_order_are_infersims(tmp_path: Path, shared: Path) -> None:
    published = shared / "reference" / "infersim_bench_data"
    rows = [
        *((gemm(m, n, 4096), 100.0 + m) for n in (8192, 4096) for m in (256, 16)),
        *((decode(b, kv), 50.0 + b) for b in (16, 1) for kv in (4096, 1024)),
        *((prefill(s), 100.0 + s) for s in (8192, 1024, 4096)),
    ]
    _, root = exported(tmp_path, rows)
    for ours, theirs in (
        ("gemm/h100/data.csv", "gemm/h800/data.csv"),
        ("mha/decode/h100/32-8-128.csv", "mha/decode/h800/32-8-128.csv"),
        ("mha/prefill/h100/32-8-128.csv", "mha/prefill/h20/32-8-128.csv"),
    ):
        assert (root / ours).read_text().splitlines()[0] == (published / theirs).read_text().splitlines()[0]
    # It stops a scan at the first larger sequence, and takes the last m at or below.
    assert [r["seq_len"] for r in cells(root / "mha/prefill/h100/32-8-128.csv")] == ["1024", "4096", "8192"]
    assert [(r["n"], r["m"]) for r in cells(root / "gemm/h100/data.csv")] == [
        ("4096", "16"), ("4096", "256"), ("8192", "16"), ("8192", "256"),
    ]  # fmt: skip


@pytest.mark.parametrize("gpu", ["h800", "h20"])
def test_a_published_tree_survives_the_round_trip(gpu: str, tmp_path: Path, shared: Path) -> None:
    published = load_measured(shared / "reference" / "infersim_bench_data", gpu=gpu)
    export = export_tree(published, tmp_path / "tree")
    # experts are one fused kernel here and two GEMMs there: they are counted, not written
    experts = export.left_out.pop("InferSim has no file for moe")
    before = {point: us for point, us in by_point(published).items() if point[0] != "moe"}
    after = by_point(load_measured(tmp_path / "tree"))
    assert experts == published.tables["moe"].num_rows
    if gpu == "h800":
        assert after == before
    else:
        # H20 GEMMs were measured up to three times at some points: the median is written.
        assert after.keys() == before.keys()
        repeats = "repeats of a point, of which the median is written"
        assert export.left_out == {repeats: 22}
        assert sum(after[p] != before[p] for p in after) <= 22
    # What it would look up is what was published, within the 2 or 3 decimals there.
    for name in export.rows:
        theirs = shared / "reference" / "infersim_bench_data" / name
        with theirs.open() as file:
            if not file.readline()[0].isalpha() or "64-2-128" in name:
                continue
        keys = [k for k in cells(tmp_path / "tree" / name)[0] if k not in ("latency_us", "mfu")]
        mine = {tuple(r[k] for k in keys): float(r["mfu"]) for r in cells(tmp_path / "tree" / name)}
        apart = [abs(mine[tuple(r[k] for k in keys)] - float(r["mfu"])) for r in cells(theirs)]
        assert np.median(apart) <= 0.0051


def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    rows = [
        (prefill(4096), 219.951),
        (prefill(512, 1024), 30.0),
        (prefill(512, batch_size=4), 60.0),
        (prefill(2048, kv_dtype="fp8"), 90.0),
        (prefill(1024, window=512), 20.0),
        (decode(1, 64, window=32), 9.0),
        (copy(64), 3.0),
        (gemm(64), 20.0),
        (gemm(64, dtype="fp8"), 12.0),
    ]
    export, root = exported(tmp_path, rows)
    assert export.left_out == {
        "gemm of fp8, the one GEMM file holds bf16": 1,
        "attention_prefill with a sliding window": 1,
        "attention_prefill of several sequences": 1,
        "attention_prefill after a prefix": 1,
        "attention_prefill over a KV cache other than bf16": 1,
        "attention_decode with a sliding window": 1,
        "InferSim has no file for elementwise": 1,
    }
    assert sum(export.rows.values()) + sum(export.left_out.values()) == len(rows)
    assert not (root / "mha/decode").exists()


def test_fp8_gemms_are_written_against_the_fp8_peak(tmp_path: Path) -> None:
    _, root = exported(tmp_path, [(gemm(4096), 250.0), (gemm(4096, dtype="fp8"), 100.0)], gemm_dtype="fp8")
    loaded = load_measured(root)
    assert loaded.tables["gemm"].columns["dtype"].tolist() == ["fp8"]
    assert loaded.findings[0].label == "fp8 peak of h100"
    assert loaded.tables["gemm"].columns["mfu"][0] == pytest.approx(2 * 4096**3 / (100e-6 * 1979e12))


def test_an_ambiguous_gemm_dtype_must_be_given(tmp_path: Path) -> None:
    rows = [(gemm(4, dtype="fp8"), 20.0), (gemm(4, dtype="fp8_block"), 21.0)]
    with pytest.raises(MeasureError, match="--gemm-dtype fp8"):
        exported(tmp_path, rows)
    with pytest.raises(MeasureError, match="no GEMM of dtype 'bf16'"):
        exported(tmp_path, rows, gemm_dtype="bf16")


def test_rows_that_infersim_would_divide_by_zero_for_are_counted(tmp_path: Path) -> None:
    export, _ = exported(tmp_path, [(decode(1, 2), 9.0), (gemm(4096), 250.0)])
    assert export.read_as_zero == 1


def test_the_tree_of_one_gpu_is_replaced_only_on_request(tmp_path: Path) -> None:
    _, root = exported(tmp_path, [(gemm(64), 20.0), (decode(1, 64), 9.0)])
    other = root / "gemm" / "h20"
    other.mkdir()
    (other / "data.csv").write_text("m,k,n,latency_us,mfu\n")
    with pytest.raises(MeasureError, match="--overwrite replaces the folders of h100"):
        exported(tmp_path, [(gemm(128), 21.0)])
    exported(tmp_path, [(gemm(128), 21.0)], overwrite=True)
    assert [r["m"] for r in cells(root / "gemm/h100/data.csv")] == ["128"]
    assert not (root / "mha/decode/h100").exists()
    assert (other / "data.csv").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["j.jsonl", "tree"]


def test_nothing_to_export_raises_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="1 rows: InferSim has no file for elementwise"):
        exported(tmp_path, [row(copy(64), 3.0)])
    assert not (tmp_path / "tree").exists()


def test_whose_rows_they_are_goes_with_them(tmp_path: Path) -> None:
    export_tree(load_table_set("h100"), tmp_path / "tree")
    facts = tomllib.loads((tmp_path / "tree" / "provenance-h100.toml").read_text())
    source = facts["sources"]["aiconfigurator-vllm-0.25.0"]
    assert source["licence"] == "Apache-2.0"
    assert source["url"] == "https://github.com/ai-dynamo/aisimulate"


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    result = command("export", "infersim", str(tmp_path / "tree"), "--tables", "h100")
    assert result.exit_code == 0, result.output
    assert "left out 37,518 rows: gemm of fp8," in result.output
    tables = load_measured(tmp_path / "tree")
    shipped = load_measured("h100").tables["gemm"].columns
    assert tables.tables["gemm"].num_rows == int((shipped["dtype"] == "bf16").sum())


def roofline(folder: Path, rows: list[Any], **options: Any) -> tuple[Any, Path]:
    return exported(folder, rows, program=ROOFLINE_V2, **options)


def test_roofline_v2_reads_back_what_is_exported_for_it(tmp_path: Path) -> None:
    rows = [
        (gemm(64), 20.0),
        *((prefill(s), 0.05 * s) for s in (1024, 4096)),
        (decode(16, 4096), THIRD / 7),
        *(
            (decode(b, kv, num_q_heads=8, num_kv_heads=2), 9.0 + b)
            for b, kv in ((1, 512), (2, 512), (2, 1024))
        ),
    ]
    export, root = roofline(tmp_path, rows)
    read = roofline_v2.load(root)
    assert set(read.decode_at) == {("32-8-128", 1), ("32-8-128", 4)}
    peak = load_measured(root).tables["gemm"]
    assert peak.columns["mfu"][0] == roofline_v2.gemm_mfu(read, 64, 4096, 4096)
    flops = {(1, 512): 2, (2, 512): 4, (2, 1024): 8}
    for (batch, kv), work in flops.items():
        mfu = roofline_v2.decode_mfu(read, "32-8-128", batch, kv, tp=4)
        assert mfu == pytest.approx(work * 8 * 128 * 1024 / ((9e-6 + batch * 1e-6) * 989.5e12), rel=1e-14)
    half_square = 4 * 32 * 128 * 4096**2 / 2
    assert roofline_v2.prefill_mfu(read, "32-8-128", 4096) == pytest.approx(
        half_square / (204.8e-6 * 989.5e12), rel=1e-14
    )
    # one of two batches at two lengths is not measured
    assert export.read_as_zero == 1
    assert by_point(load_measured(root)) == {(p.operator, *p.values.values()): us for p, us in rows}


def test_heads_that_roofline_v2_cannot_find_are_counted(tmp_path: Path) -> None:
    rows = [
        (gemm(64), 20.0),
        (prefill(1024), 40.0),
        (prefill(1024, num_q_heads=28, num_kv_heads=4), 39.0),
        *((decode(1, 64, kv_dtype=dtype), 9.0) for dtype in ("bf16", "fp8")),
        (decode(1, 64, num_q_heads=40), 9.0),
        (MLA_DECODE, 60.1),
    ]
    export, _ = roofline(tmp_path, rows)
    assert export.left_out == {
        "roofline V2 has no file for mla_decode": 1,
        "attention_decode over a KV cache other than bf16": 1,
        "attention_prefill of heads without a decode": 1,
        "attention_decode of heads without a prefill": 1,
    }
    with pytest.raises(MeasureError, match="it needs GEMMs, prefills and decodes of the same heads: no rows"):
        roofline(tmp_path / "no_gemm", rows[1:4:2])


def test_the_published_roofline_tree_survives_the_round_trip(tmp_path: Path, shared: Path) -> None:
    published = shared / "reference" / "h100_roofline_v2" / "bench_data"
    tables = load_measured(published)
    export_tree(tables, tmp_path / "tree", ROOFLINE_V2, gemm_dtype="fp8")
    theirs, ours = roofline_v2.load(published), roofline_v2.load(tmp_path / "tree")
    assert ours.attn_configs == theirs.attn_configs
    assert set(theirs.decode_at) <= set(ours.decode_at)
    assert by_point(load_measured(tmp_path / "tree")).keys() == by_point(tables).keys()
    m, k, n = (tables.tables["gemm"].columns[name] for name in "mkn")
    assert np.abs(roofline_v2.gemm_mfu(ours, m, k, n) - roofline_v2.gemm_mfu(theirs, m, k, n)).max() < 5.1e-4
    for shape, tp in theirs.decode_at:
        rows = cells(published / f"mha/decode/h100/{shape}-tp{tp}.csv")
        batch, kv = ([int(row[axis]) for row in rows] for axis in ("batch_size", "kv_len"))
        apart = [roofline_v2.decode_mfu(one, shape, batch, kv, tp) for one in (ours, theirs)]
        # theirs have 3 decimals
        assert np.median(np.abs(apart[0] - apart[1])) <= 5.1e-4, (shape, tp)
