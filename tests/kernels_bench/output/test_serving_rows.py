"""Rows of experts, windows, block scales and collectives: written, loaded, validated, compared, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof.config.gpu import load_gpu
from fastroof.config.paths import bench_data_root
from fastroof.load.compare import diff_sources, diff_tables
from kernels_bench.grid.estimate import estimate_all
from kernels_bench.output.export_trees import export_tree
from kernels_bench.output.table_sets import load_table_set
from kernels_bench.output.tables import write_tables
from kernels_bench.output.validate import validate_tables
from kernels_bench.protocol import Point
from tests.kernels_bench.fakes import command
from tests.reference.made_journals import decode, gemm, prefill, row, write_journal

H100 = load_gpu("h100")
BENCH_DATA, VLLM = bench_data_root(), "aiconfigurator-vllm-0.25.0"
LAYER = {"hidden": 2048, "intermediate": 768, "topk": 8, "num_experts": 128}
TOKENS = (1, 16, 256, 4096)


def experts(num_tokens: int, **keys: Any) -> Point:
    given = {"dtype": "bf16", **LAYER, "moe_tp": 1, "moe_ep": 1, "distribution": "power_law_1.2"}
    return Point("moe", {**given, **keys, "num_tokens": num_tokens})


def collective(name: str, message_bytes: int) -> Point:
    return Point(
        "collective", {"dtype": "fp16", "collective": name, "num_gpus": 8, "message_bytes": message_bytes}
    )


POINTS = [
    *(experts(m) for m in TOKENS),
    *(experts(m, distribution="balanced") for m in TOKENS),
    *(experts(m, moe_ep=8) for m in TOKENS),
    *(experts(m, dtype="fp8_block", moe_tp=2) for m in TOKENS),
    *(experts(m, dtype="fp8") for m in TOKENS),
    *(gemm(m, dtype=dtype) for m in (1, 64, 1024) for dtype in ("bf16", "fp8_block")),
    *(decode(b, kv, window=128) for b in (1, 32) for kv in (64, 128, 4096)),
    *(prefill(q, window=w) for q in (128, 512, 2048) for w in (0, 128)),
    *(collective(name, 2**p) for name in ("all_gather", "alltoall") for p in (12, 20, 28)),
]


def rows(scale: float = 1.0) -> list[Any]:
    """Rows that take as long as estimated."""
    return [row(p, scale * one.latency_us) for p, one in zip(POINTS, estimate_all(POINTS, H100), strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("rows")
    for name, scale in (("a", 1.0), ("b", 1.1)):
        journal = write_journal(where / f"{name}.jsonl", rows(scale))
        write_tables([journal], where / name / "kernels_bench")
    return where


def test_every_row_answers_a_lookup(folder: Path) -> None:
    tables = fastroof.load_tables(str(folder / "a"), gpu="h100")
    measured = {p.key: r["latency_us"] for p, r in zip(POINTS, rows(), strict=True)}
    for point in POINTS:
        found = tables.lookup(point.operator, **point.values)
        assert float(found.latency_us) == measured[point.key], point.key
        assert int(found.origin) == 0
    between = tables.lookup("moe", num_tokens=64, **LAYER, distribution="power_law_1.2")
    assert measured[experts(16).key] < float(between.latency_us) < measured[experts(256).key]
    assert int(between.origin) == 1


def test_nothing_is_wrong_with_them(folder: Path) -> None:
    tables = load_table_set(str(folder / "a"))
    validation = validate_tables(tables, H100, POINTS)
    grave = [f for r in validation.reports for f in r.findings if f.severity == "error"]
    assert grave == []
    assert all(not group.missing for group in validation.coverage)


def test_experts_that_are_too_fast_are_found(tmp_path: Path) -> None:
    # 4096 tokens at 8 experts are 309 GFLOP, 16 times the peak
    journal = write_journal(tmp_path / "j.jsonl", [row(experts(m), 20.0) for m in TOKENS])
    tables = load_table_set(str(journal))
    assert 4096 not in tables.tables["moe"].columns["num_tokens"]
    (finding,) = (f for f in validate_tables(tables, H100).findings if f.kind == "left_out")
    assert '"num_tokens": 4096' in finding.message


def test_two_runs_are_compared_by_family(folder: Path) -> None:
    one, other = (load_table_set(str(folder / name)) for name in "ab")
    families = diff_tables(one, other)
    assert all(family.median == pytest.approx(1.1) for family in families)
    experts_of = [family for family in families if family.operator == "moe"]
    assert sum(family.points for family in experts_of) == 5 * len(TOKENS)
    assert {tuple(family.family.values()) for family in experts_of} == {
        ("bf16", "power_law_1.2"), ("bf16", "balanced"), ("fp8_block", "power_law_1.2"),
        ("fp8", "power_law_1.2"),
    }  # fmt: skip
    assert [(source, found.median) for source, found in diff_sources(one, other, ["gemm"])] == [
        ("kernels_bench", pytest.approx(1.1))
    ] * sum(family.operator == "gemm" for family in families)
    assert diff_sources(one, one) == []


def test_nccl_in_a_graph_is_not_read_as_an_engines_all_reduce(tmp_path: Path) -> None:
    """Rows of old journals: NCCL takes 18.7 us where vLLM's own kernel takes 6.4."""
    for source in (VLLM, "aiconfigurator-vllm-0.24.0"):
        shutil.copytree(BENCH_DATA / "h100" / source, tmp_path / "h100" / source)
    shutil.copyfile(BENCH_DATA / "h100/gpu.toml", tmp_path / "h100/gpu.toml")
    values = {"dtype": "bf16", "num_gpus": 8, "mode": "graph"}
    points = [Point("allreduce", {**values, "message_bytes": size}) for size in (2**8, 2**16, 2**24)]
    lines = [row(point, 18.7 * (i + 1), kernel="nccl all_reduce 2.27.5") for i, point in enumerate(points)]
    journal = write_journal(tmp_path / "j.jsonl", lines)
    write_tables([journal], tmp_path / "h100/kernels_bench", engine="vllm-0.26.0")
    tables, shipped = fastroof.load_tables(tmp_path / "h100"), fastroof.load_tables("h100")
    own = tables.lookup("allreduce", num_gpus=8, mode="nccl", message_bytes=2**16)
    assert float(own.latency_us) == pytest.approx(2 * 18.7)
    step_us = [
        float(fastroof.compile_plan("llama-3.1-70b", gpu="h100", tp=8, tables=one).decode_us([64], [4096])[0])
        for one in (tables, shipped)
    ]
    assert step_us[0] == step_us[1]


@pytest.mark.parametrize(("column", "names"), [(None, True), (0, True), (1, False)])
@pytest.mark.parametrize(("dtype", "model"), [("fp8", "qwen3-14b"), ("fp8_block", "qwen3-14b-fp8")])
def test_a_plan_adds_quantising_where_the_rows_leave_it_out(
    column: int | None, names: bool, dtype: str, model: str, tmp_path: Path
) -> None:
    more = {} if column is None else {"quantises_input": column}
    points = [gemm(m, n, k, dtype) for m in (1, 64, 4096) for n in (4096, 32768) for k in (4096, 32768)]
    lines = [
        row(p, one.latency_us, **more) for p, one in zip(points, estimate_all(points, H100), strict=True)
    ]
    write_tables([write_journal(tmp_path / "j.jsonl", lines)], tmp_path / "h100/kernels_bench")
    for name in (VLLM, "gpu.toml"):
        (tmp_path / "h100" / name).symlink_to(BENCH_DATA / "h100" / name)
    own = fastroof.load_tables(tmp_path / "h100")
    assert own.sources["gemm"] == "kernels_bench"
    plan = fastroof.compile_plan(model, gpu="h100", dtype=dtype, tables=own)
    assert any(curve.operator.role == "qkv_quantise" for curve in plan.row_curves) is names
    shipped = fastroof.compile_plan(model, gpu="h100", dtype=dtype)
    assert not any(curve.operator.role == "qkv_quantise" for curve in shipped.row_curves)


def test_what_infersims_files_have_no_room_for_is_counted(folder: Path, tmp_path: Path) -> None:
    done = export_tree(load_table_set(str(folder / "a")), tmp_path / "tree")
    assert done.left_out["InferSim has no file for moe"] == 5 * len(TOKENS)
    assert done.left_out["InferSim has no file for collective"] == 6
    assert done.left_out["attention_decode with a sliding window"] == 6
    assert done.left_out["attention_prefill with a sliding window"] == 3
    assert done.left_out["gemm of fp8_block, the one GEMM file holds bf16"] == 3
    blocks = export_tree(load_table_set(str(folder / "a")), tmp_path / "blocks", gemm_dtype="fp8_block")
    assert blocks.rows["gemm/h100/data.csv"] == 3


def test_the_commands_take_them(folder: Path) -> None:
    result = command("validate", str(folder / "a"), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["severity"] != "error"
