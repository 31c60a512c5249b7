"""Validation: each finding on rows made to have it, its absence on rows made not to, and the trees."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastroof.config.gpu import GpuSpec, load_gpu
from fastroof.judging.grid_checks import Finding
from fastroof.judging.validate import FileReport, validate, worst
from fastroof.load.measured import MeasuredTable, MeasuredTables
from fastroof.load.trees import load_tree
from fastroof.operators.attention_work import attention_flops, decode_attention_bytes
from fastroof.operators.gemm import gemm_bytes, gemm_flops
from fastroof.operators.moe_work import moe_bytes
from fastroof.operators.registry import OPERATORS
from tests.reference.call_counts import calls_in

MIB = 2**20
GPU = GpuSpec(
    name="test",
    title="Test card",
    aliases=(),
    peak_flops_per_s={"bf16": 1000e12, "fp8": 2000e12},
    hbm_bytes_per_s=4e12,
    hbm_bytes=80 * 2**30,
    nvlink_bytes_per_s=450e9,
    num_sms=100,
    l2_bytes=50 * MIB,
    source="made up",
)

Columns = dict[str, npt.NDArray[Any]]


def columns(operator: str, **values: Any) -> Columns:
    """Broadcast the values to rows; words become objects, as loaders make them."""
    rows = np.broadcast_shapes(*(np.shape(v) for v in values.values()), (1,))
    kinds = {c.name: c.kind for c in OPERATORS[operator].required} | {"file": "text", "mfu": "float"}
    dtypes: Mapping[str, Any] = {"int": np.int64, "float": np.float64, "text": object}
    return {name: np.broadcast_to(v, rows).astype(dtypes[kinds[name]]) for name, v in values.items()}


def decode(batch: Any, kv: Any, latency_us: Any, **others: Any) -> Columns:
    base = {"kv_dtype": "bf16", "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window": 0}
    return columns("attention_decode", **base | others, batch_size=batch, kv_len=kv, latency_us=latency_us)


def gemm(m: Any, n: Any, k: Any, latency_us: Any, dtype: Any = "bf16", **others: Any) -> Columns:
    return columns("gemm", dtype=dtype, m=m, n=n, k=k, latency_us=latency_us, **others)


def reports(operator: str, rows: Columns, files: tuple[str, ...] = ("x.csv",)) -> list[FileReport]:
    table = MeasuredTable(operator, rows, "made", files)
    return validate(MeasuredTables("test", {operator: table}, Path()), GPU)


def report(operator: str, rows: Columns) -> FileReport:
    (only,) = reports(operator, rows)
    return only


def finding(found: FileReport, kind: str) -> Finding:
    (only,) = [f for f in found.findings if f.kind == kind]
    return only


def kinds(found: FileReport) -> set[str]:
    return {f.kind for f in found.findings}


# -- the shape of a report ---------------------------------------------------------------------


def test_clean_rows_have_no_findings() -> None:
    batch, kv = np.meshgrid([1, 8, 64], [1024, 4096, 16384], indexing="ij")
    latency = 10 + decode_attention_bytes(32, 8, 128, kv, batch) / 3e12 * 1e6
    found = report("attention_decode", decode(batch.ravel(), kv.ravel(), latency.ravel()))
    assert found.findings == ()
    assert found.severity == "note"
    assert (found.file, found.operator, found.source, found.rows) == ("x.csv", "attention_decode", "made", 9)
    assert [(a.name, a.count, a.minimum, a.maximum) for a in found.axes] == [
        ("batch_size", 3, 1, 64),
        ("kv_len", 3, 1024, 16384),
    ]
    work = 4.0 * 32 * 128 * batch * kv / (latency * 1e-6 * 1000e12)
    assert found.mfu_min == pytest.approx(work.min(), rel=1e-12)
    assert found.mfu_max == pytest.approx(work.max(), rel=1e-12)
    assert found.bandwidth_max_bytes_per_s is not None
    assert 2.5e12 < found.bandwidth_max_bytes_per_s < 3e12
    assert found.bandwidth_limit_bytes_per_s == 4e12


def test_report_is_json_and_worst_comes_first() -> None:
    rows = gemm([16, 4096, 64], 4096, 4096, [8.0, 20.0, 8.0], mfu=[0.1, 0.2, 0.3])
    found = report("gemm", rows)
    assert kinds(found) >= {"mfu_above_1", "mfu_column_peak"}
    assert found.findings[0].severity == "error"
    again = json.loads(json.dumps(found.as_dict()))
    assert again["severity"] == "error"
    assert again["findings"][0]["worst"]["m"] == 4096
    assert again["axes"][0] == {"name": "m", "count": 3, "minimum": 16, "maximum": 4096}
    clean = report("gemm", gemm([16, 32], 4096, 4096, [12.0, 12.5]))
    assert worst([clean]) == "note"
    assert worst([clean, found, clean]) == "error"


def test_one_report_a_file_in_the_order_of_the_rows() -> None:
    rows = decode([1, 1, 1], [2048, 4096, 2048], [10.0, 11, 12], file=["b.csv", "b.csv", "a.csv"])
    first, second = reports("attention_decode", rows)
    assert (first.file, first.rows, second.file, second.rows) == ("b.csv", 2, "a.csv", 1)


def test_an_empty_table_has_no_report() -> None:
    rows = {name: v[:0] for name, v in gemm(1, 1, 1, 1.0).items()}
    assert reports("gemm", rows) == []


# -- isolated spikes ---------------------------------------------------------------------------


def smooth_decodes() -> Columns:
    """Three kernels of 4 x 4 points, in rows of two files by turns."""
    heads, batch, kv = (
        a.ravel() for a in np.meshgrid([16, 32, 64], [1, 2, 4, 8], [1024, 2048, 4096, 8192], indexing="ij")
    )
    latency = 10.0 + batch * kv / 4096
    return decode(batch, kv, latency, num_q_heads=heads, file=["a.csv", "b.csv"] * 24)


def slow_row(rows: Columns, heads: int, batch: int, kv: int) -> Columns:
    """Make one row take 30 times as long."""
    at = (rows["num_q_heads"] == heads) & (rows["batch_size"] == batch) & (rows["kv_len"] == kv)
    rows["latency_us"][at] *= 30.0
    return rows


def test_a_spike_is_named_with_its_row_and_its_neighbours() -> None:
    first, second = reports("attention_decode", slow_row(smooth_decodes(), 32, 2, 4096))
    assert "spike" not in kinds(second)
    found = finding(first, "spike")
    assert (found.severity, found.count) == ("warning", 1)
    # 8 rows of a.csv are of 16 heads, then 2 of batch 1
    assert found.message == (
        "row 12, kv_dtype bf16 num_q_heads 32 num_kv_heads 8 head_dim 128 window 0 batch_size 2 kv_len 4096: "
        "360 us, 25.7 times its neighbours (11 at batch_size 1 and 14 at batch_size 4), and no sibling row "
        "shares it"
    )
    assert (found.worst["row"], found.worst["axis"]) == (12, "batch_size")
    assert found.worst["ratio"] == pytest.approx(360 / 14)
    assert found.worst["neighbours"] == [
        {"batch_size": 1, "latency_us": 11.0},
        {"batch_size": 4, "latency_us": 14.0},
    ]
    json.dumps(first.as_dict())


def test_the_start_of_a_line_has_one_neighbour() -> None:
    first, _ = reports("attention_decode", slow_row(smooth_decodes(), 32, 1, 4096))
    found = finding(first, "spike")
    assert found.worst["neighbours"] == [{"batch_size": 2, "latency_us": 12.0}]
    assert "27.5 times its neighbour (12 at batch_size 2), and no sibling row shares it" in found.message


# -- against the GPU's peak --------------------------------------------------------------------


def gemm_us(m: int, mfu: float, peak: float) -> float:
    return 2 * m * 4096 * 4096 / (mfu * peak) * 1e6


@pytest.mark.parametrize(("dtype", "peak"), [("bf16", 1000e12), ("fp8", 2000e12), ("fp8_block", 2000e12)])
def test_mfu_above_1(dtype: str, peak: float) -> None:
    good = [gemm_us(2048, 0.7, peak), gemm_us(4096, 0.999, peak)]
    assert "mfu_above_1" not in kinds(report("gemm", gemm([2048, 4096], 4096, 4096, good, dtype)))
    bad = [gemm_us(2048, 0.7, peak), gemm_us(4096, 1.25, peak)]
    found = report("gemm", gemm([2048, 4096], 4096, 4096, bad, dtype))
    error = finding(found, "mfu_above_1")
    assert (error.severity, error.count, error.worst["m"]) == ("error", 1, 4096)
    assert error.worst["mfu"] == pytest.approx(1.25)
    assert found.mfu_max == pytest.approx(1.25)


def test_fp8_kv_attention_above_the_bf16_peak_computed_in_fp8() -> None:
    base = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window": 0, "batch_size": 1}
    work = float(attention_flops(32, 128, 8192, 8192))
    for kv_dtype, mfu, kind, severity in (
        ("fp8", 1.4, "above_own_peak", "warning"),
        ("fp8", 2.1, "mfu_above_1", "error"),
        ("bf16", 1.4, "mfu_above_1", "error"),
    ):
        latency = work / (mfu * 1000e12) * 1e6
        rows = columns(
            "attention_prefill", kv_dtype=kv_dtype, **base, q_len=8192, kv_len=8192, latency_us=latency
        )
        found = report("attention_prefill", rows)
        assert kinds(found) == {kind}
        assert finding(found, kind).severity == severity
        assert found.mfu_max == pytest.approx(mfu)


def test_unknown_dtype() -> None:
    found = report("gemm", gemm([16, 32], 512, 512, [5.0, 5], ["bf16", "nf4"]))
    error = finding(found, "unknown_dtype")
    assert (error.severity, error.count, error.worst["dtype"]) == ("error", 1, "nf4")
    assert found.mfu_max is not None
    all_unknown = report("gemm", gemm([16, 32], 512, 512, [5.0, 5], "nf4"))
    assert all_unknown.mfu_max is None
    assert all_unknown.bandwidth_max_bytes_per_s is None


# -- against the GPU's bandwidth ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "share", "kind", "severity"),
    [
        (1024, 2.0, "cached", "note"),
        (2900, 2.0, "cached", "note"),
        (65536, 0.99, None, None),
        (65536, 1.02, "bandwidth", "warning"),
        (65536, 1.29, "bandwidth", "warning"),
        (65536, 1.31, "bandwidth", "error"),
    ],
)
def test_memory_bandwidth(kv: int, share: float, kind: str | None, severity: str | None) -> None:
    moved = float(decode_attention_bytes(32, 8, 128, kv, 8))
    assert (moved < 2 * GPU.l2_bytes) == (kind == "cached")
    found = report("attention_decode", decode(8, kv, moved / (share * 4e12) * 1e6))
    assert found.bandwidth_max_bytes_per_s == pytest.approx(share * 4e12)
    if kind is None:
        assert found.findings == ()
    else:
        only = finding(found, kind)
        assert (only.severity, only.count) == (severity, 1)
        assert only.worst["bytes"] == moved


def test_fp8_kv_moves_half_the_bytes() -> None:
    latency = float(decode_attention_bytes(32, 8, 128, 65536, 8)) / 6e12 * 1e6
    assert kinds(report("attention_decode", decode(8, 65536, latency))) == {"bandwidth"}
    assert kinds(report("attention_decode", decode(8, 65536, latency, kv_dtype="fp8"))) == set()


@pytest.mark.parametrize(
    ("share", "expected"), [(0.9, set()), (1.5, {("in_switch", "note")}), (2.1, {("bandwidth", "error")})]
)
def test_allreduce_against_the_link(share: float, expected: set[tuple[str, str]]) -> None:
    latency = 2 * 7 / 8 * 2**28 / (share * 450e9) * 1e6
    rows = columns(
        "allreduce", dtype="bf16", num_gpus=8, mode="graph", message_bytes=2**28, latency_us=latency
    )
    found = report("allreduce", rows)
    assert {(f.kind, f.severity) for f in found.findings} == expected
    assert found.bandwidth_max_bytes_per_s == pytest.approx(share * 450e9)
    assert found.mfu_max is None


@pytest.mark.parametrize(
    ("name", "sent"), [("all_gather", 7.0), ("reduce_scatter", 7 / 8), ("alltoall", 7 / 8)]
)
def test_collectives_against_the_link(name: str, sent: float) -> None:
    for share, expected in ((0.9, None), (1.2, "warning"), (1.4, "error")):
        latency = sent * 2**26 / (share * 450e9) * 1e6
        rows = columns(
            "collective", dtype="bf16", collective=name, num_gpus=8, message_bytes=2**26, latency_us=latency
        )
        found = report("collective", rows)
        assert found.bandwidth_max_bytes_per_s == pytest.approx(share * 450e9)
        assert [f.severity for f in found.findings] == ([expected] if expected else [])


def test_elementwise_moves_its_io_bytes() -> None:
    rows = columns("elementwise", kind="copy", m=4096, width=65536, io_bytes=2**30, latency_us=2**30 / 5e6)
    assert finding(report("elementwise", rows), "bandwidth").severity == "warning"


# -- work of each row --------------------------------------------------------------------------


def naive_attention(q_len: int, kv_len: int, window: int) -> tuple[int, int]:
    """Pairs of one query and one key that meet, and keys that any query meets."""
    pairs, seen = 0, set()
    for i in range(q_len):
        last = kv_len - q_len + i
        first = max(0, last - window + 1) if window else 0
        pairs += last - first + 1
        seen |= set(range(first, last + 1))
    return pairs, len(seen)


@pytest.mark.parametrize("window", [0, 1, 5, 8, 16, 100])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 16), (6, 16), (16, 16), (12, 13)])
def test_windowed_work(q_len: int, kv_len: int, window: int) -> None:
    base = {"kv_dtype": "bf16", "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "window": window}
    rows = columns("attention_prefill", **base, batch_size=3, q_len=q_len, kv_len=kv_len, latency_us=1.0)
    work = OPERATORS["attention_prefill"].work(rows, GPU)
    pairs, keys = naive_attention(q_len, kv_len, window)
    assert work.flops.tolist() == [4 * 4 * 8 * pairs * 3]
    assert work.moved_bytes.tolist() == [3 * (2 * 2 * q_len * 4 * 8 + 2 * 2 * keys * 2 * 8)]
    if q_len == 1:
        one = OPERATORS["attention_decode"].work({n: v for n, v in rows.items() if n != "q_len"}, GPU)
        assert (one.flops, one.moved_bytes) == (work.flops, work.moved_bytes)


def test_mla_work_follows_from_its_widths() -> None:
    """2 H ctx (2 kl + ro) FLOPs and one latent vector a token; 2 H (2 no + ro) FLOPs a causal pair."""
    rows = columns(
        "mla_decode", kv_dtype="bf16", num_q_heads=128, kv_lora_rank=512, rope_dim=64, batch_size=4,
        kv_len=1000, latency_us=1.0,
    )  # fmt: skip
    work = OPERATORS["mla_decode"].work(rows, GPU)
    assert work.flops.tolist() == [2 * 128 * 1000 * (2 * 512 + 64) * 4]
    assert work.moved_bytes[0] == pytest.approx(4 * 2 * (1000 * 576 + 128 * (576 + 512)), rel=1e-12)
    rows = columns(
        "mla_prefill", dtype="bf16", kv_dtype="bf16", num_q_heads=128, nope_dim=128, rope_dim=64,
        batch_size=1, q_len=100, kv_len=100, latency_us=1.0,
    )  # fmt: skip
    assert OPERATORS["mla_prefill"].flops(rows).tolist() == [2 * 128 * (192 + 128) * 100 * 101 // 2]


def test_moe_bytes_are_least_for_uneven_routing() -> None:
    shape = {"dtype": "fp8", "hidden": 4096, "intermediate": 1024, "topk": 8, "num_experts": 128}
    shape |= {"moe_tp": 1, "moe_ep": 1, "num_tokens": 64, "latency_us": 10.0}
    even = OPERATORS["moe"].work(columns("moe", **shape, distribution="balanced"), GPU).moved_bytes[0]
    assert even == moe_bytes(64, 4096, 1024, 8, 128, element_bytes=1)
    uneven = OPERATORS["moe"].work(columns("moe", **shape, distribution="power_law_1.2"), GPU).moved_bytes[0]
    assert uneven == pytest.approx(8 * 3 * 4096 * 1024 + 2 * 2 * 64 * 4096)


def test_moe_faster_than_streaming_the_experts_of_even_routing() -> None:
    shape = {"dtype": "fp8", "hidden": 7168, "intermediate": 2048, "topk": 8, "num_experts": 256}
    shape |= {"moe_tp": 1, "moe_ep": 1, "num_tokens": 128, "distribution": "balanced"}
    even = float(moe_bytes(128, 7168, 2048, 8, 256, element_bytes=1))
    least = 8 * 3 * 7168 * 2048 + 2 * 2 * 128 * 7168
    for latency, expected in (
        (even / 3.9e6, set()),
        (even / 5e6, {("few_experts", "warning")}),
        (least / 5e6, {("bandwidth", "warning")}),
        (least / 6e6, {("bandwidth", "error")}),
    ):
        found = report("moe", columns("moe", **shape, latency_us=latency))
        assert {(f.kind, f.severity) for f in found.findings} == expected


# -- points beside each other ------------------------------------------------------------------


def test_duplicates_in_one_file_and_over_files() -> None:
    files = ["a.csv", "a.csv", "b.csv", "b.csv", "c.csv"]
    rows = decode([1, 2, 1, 1, 4], [1024] * 5, [10.0, 11, 10.5, 12, 13], file=files)
    a, b, c = reports("attention_decode", rows)
    for found in (a, b):
        duplicate = finding(found, "duplicate")
        assert (duplicate.count, duplicate.severity) == (1, "warning")
        assert duplicate.worst["latencies_us"] == [10.0, 10.5, 12.0]
        assert duplicate.worst["files"] == ["a.csv", "b.csv"]
        assert duplicate.worst["spread"] == pytest.approx(0.2)
    assert kinds(c) == set()
    near = report("attention_decode", decode([1, 1], 1024, [10.0, 10.9]))
    assert finding(near, "duplicate").severity == "note"


def test_other_kernels_are_not_duplicates() -> None:
    rows = decode(1, 1024, [10.0, 20.0], kv_dtype=["bf16", "fp8"])
    assert kinds(report("attention_decode", rows)) == set()


def test_holes_of_a_staircase() -> None:
    cells = [(b, kv) for b in (1, 16, 64) for kv in (1024, 4096, 8192) if b * kv < 64 * 4096]
    batch, kv = np.array(cells).T
    found = report("attention_decode", decode(batch, kv, 20.0 + batch * kv / 500.0))
    holes = finding(found, "holes")
    assert (holes.severity, holes.count) == ("note", 2)
    assert (holes.worst["batch_size"], holes.worst["kv_len"]) == (64, 4096)
    assert holes.worst["num_q_heads"] == 32


def test_holes_are_counted_for_each_kernel_apart() -> None:
    rows = decode([1, 2, 1, 2], [1024, 2048, 1024, 1024], [10.0, 12, 10, 11], num_q_heads=[32, 32, 16, 16])
    assert finding(report("attention_decode", rows), "holes").count == 2


@pytest.mark.parametrize("seed", range(5))
def test_holes_and_jumps_against_a_naive_count(seed: int) -> None:
    random = np.random.default_rng(seed)
    grid = list(itertools.product((1, 2, 4, 8), (16, 32, 64), (0, 16, 128)))
    kept = [cell for cell in grid if random.random() < 0.7]
    random.shuffle(kept)
    latency = random.uniform(100.0, 150.0, len(kept))
    batch, q_len, context = np.array(kept).T
    rows = columns(
        "attention_prefill", kv_dtype="bf16", num_q_heads=8, num_kv_heads=8, head_dim=64, window=0,
        batch_size=batch, q_len=q_len, kv_len=q_len + context, latency_us=latency,
    )  # fmt: skip
    found = report("attention_prefill", rows)

    sides = [sorted(set(side)) for side in zip(*kept, strict=True)]
    absent = set(itertools.product(*sides)) - set(kept)
    assert sum(f.count for f in found.findings if f.kind == "holes") == len(absent)

    measured = dict(zip(kept, latency, strict=True))
    cold = {kept[0]} if "warm_up" in kinds(found) else set()
    falls = []
    for cell, us in measured.items():
        for axis, side in enumerate(sides):
            beyond = [(*cell[:axis], v, *cell[axis + 1 :]) for v in side if v > cell[axis]]
            following = [c for c in beyond if c in measured][:1]
            falls += [1 - measured[c] / us for c in following if cell not in cold]
    falls = [f for f in falls if f > 0.10]
    assert sum(f.count for f in found.findings if f.kind == "jump") == len(falls) > 0
    assert finding(found, "jump").worst["fall"] == pytest.approx(max(falls), rel=1e-12)


def test_gemm_holes_are_of_m_and_of_pairs() -> None:
    rows = gemm([8, 16, 8, 16, 8], [512, 512, 1024, 1024, 512], [256, 256, 512, 512, 512], 20.0)
    found = report("gemm", rows)
    holes, pairs = finding(found, "holes"), finding(found, "missing_pairs")
    assert holes.count == 1
    assert holes.worst == {"dtype": "bf16", "m": 16, "n": 512, "k": 512}
    assert pairs.count == 1
    assert pairs.worst == {"dtype": "bf16", "n": 1024, "k": 256}


def test_jump_names_the_axis_and_the_neighbours() -> None:
    rows = decode(4, [1024, 2048, 4096, 8192], [30.0, 36.0, 31.0, 60.0])
    jump = finding(report("attention_decode", rows), "jump")
    assert (jump.severity, jump.count) == ("note", 1)
    assert (jump.worst["axis"], jump.worst["kv_len"], jump.worst["next"]) == ("kv_len", 2048, 4096)
    assert jump.worst["fall"] == pytest.approx(1 - 31 / 36)
    steep = decode(4, [1024, 2048, 4096, 8192], [30.0, 90.0, 31.0, 95.0])
    assert finding(report("attention_decode", steep), "jump").severity == "warning"
    flat = decode(4, [1024, 2048, 4096, 8192], [30.0, 36.0, 33.0, 60.0])
    assert kinds(report("attention_decode", flat)) == set()


def test_jumps_are_looked_for_at_the_median_of_duplicates() -> None:
    rows = decode(4, [1024, 2048, 2048, 2048, 4096], [30.0, 31.0, 90.0, 31.5, 32.0])
    assert kinds(report("attention_decode", rows)) == {"duplicate"}


def test_first_row_timed_cold() -> None:
    """The H100 decode tables: (1, 1024) in 40.1 us, (1, 4096) in 23.7."""
    rows = decode([1, 1, 1, 16], [1024, 4096, 8192, 1024], [40.142, 23.732, 24.09, 24.1])
    found = report("attention_decode", rows)
    warm_up = finding(found, "warm_up")
    assert (warm_up.severity, warm_up.count) == ("warning", 1)
    assert (warm_up.worst["kv_len"], warm_up.worst["latency_us"]) == (1024, 40.142)
    assert warm_up.worst["more_work"] == {"batch_size": 1, "kv_len": 4096, "latency_us": 23.732}
    assert "jump" not in kinds(found)
    warm = decode([1, 1, 1, 16], [1024, 4096, 8192, 1024], [27.0, 23.732, 24.09, 24.1])
    assert "warm_up" not in kinds(report("attention_decode", warm))


def test_a_slow_first_row_with_the_most_work_is_not_cold() -> None:
    assert kinds(report("attention_decode", decode(1, [8192, 4096, 1024], [60.0, 40, 30]))) == set()


def test_a_slow_first_row_measured_again_is_a_duplicate_not_cold() -> None:
    assert kinds(report("attention_decode", decode(1, [1024, 1024], [30.0, 20.0]))) == {"duplicate"}


def test_io_bytes_follow_from_the_sizes_and_span_no_grid() -> None:
    m, width = np.array([16, 16, 64, 64]), np.array([1024, 4096, 1024, 4096])
    rows = columns(
        "elementwise",
        kind="rmsnorm",
        m=m,
        width=width,
        io_bytes=4 * m * width,
        latency_us=3 + m * width / 1e6,
    )
    assert kinds(report("elementwise", rows)) == set()
    shorter = {name: values[:3] for name, values in rows.items()}
    assert finding(report("elementwise", shorter), "holes").worst == {
        "kind": "rmsnorm",
        "m": 64,
        "width": 4096,
    }


# -- the file's own mfu column -----------------------------------------------------------------


def test_mfu_column_that_agrees_within_its_rounding() -> None:
    m = np.array([16, 64, 256, 1024])
    latency = np.array([20.0, 21, 25, 60])
    mfu = 2 * m * 4096 * 4096 / (latency * 1e-6 * 1000e12)
    for decimals in (2, 3, 6):
        rows = gemm(m, 4096, 4096, latency, mfu=np.round(mfu, decimals))
        assert kinds(report("gemm", rows)) == set(), decimals


def test_mfu_column_of_one_row_contradicts_its_latency() -> None:
    kv = np.array([1024, 4096, 8192, 16384, 32768])
    latency = np.array([60.0, 190, 351.5, 704, 1390])
    mfu = np.round(4 * 32 * 128 * 64 * kv / (latency * 1e-6 * 1000e12), 3)
    latency[2] = 639.371
    wrong = finding(report("attention_decode", decode(64, kv, latency, mfu=mfu)), "mfu_column_rows")
    assert (wrong.severity, wrong.count, wrong.worst["kv_len"]) == ("warning", 1, 8192)
    assert wrong.worst["mfu_by_latency"] == pytest.approx(4 * 32 * 128 * 64 * 8192 / 639.371e-6 / 1000e12)


def test_mfu_column_of_another_peak() -> None:
    m = np.array([64, 256, 1024])
    latency = np.array([21.0, 25, 60])
    rows = gemm(m, 4096, 4096, latency, mfu=np.round(2 * m * 4096 * 4096 / (latency * 1e-6 * 444e12), 4))
    wrong = finding(report("gemm", rows), "mfu_column_peak")
    assert wrong.severity == "warning"
    assert wrong.worst["peak_flops_per_s"] == pytest.approx(444e12, rel=1e-3)


def test_mfu_column_that_counts_the_whole_square() -> None:
    s = np.array([1024, 4096, 8192])
    latency = np.array([40.0, 220, 770])
    rows = columns(
        "attention_prefill", kv_dtype="bf16", num_q_heads=32, num_kv_heads=8, head_dim=128, window=0,
        batch_size=1, q_len=s, kv_len=s, latency_us=latency,
        mfu=np.round(4 * 32 * 128 * s * s / (latency * 1e-6 * 1000e12), 3),
    )  # fmt: skip
    other = finding(report("attention_prefill", rows), "mfu_column_flops")
    assert other.severity == "note"
    assert "not halved" in other.message


def test_zero_mfu_columns_are_ignored() -> None:
    assert kinds(report("attention_decode", decode(1, [256, 512], [22.0, 22.5], mfu=0.0))) == set()


# -- size, and the reference trees -------------------------------------------------------------


@pytest.mark.slow
def test_a_large_table_is_checked_without_a_loop_over_rows() -> None:
    random = np.random.default_rng(0)
    rows = 107_000
    pairs = random.integers(1, 200, (4000, 2)) * 64
    n, k = pairs[random.integers(0, 4000, rows)].T
    m = 2 ** random.integers(0, 15, rows)
    dtype = np.array(["bf16", "fp8", "fp8_block"], object)[random.integers(0, 3, rows)]
    latency = 5 + gemm_bytes(m, n, k, 2) / 3e6 + gemm_flops(m, n, k) / 800e6
    table = gemm(m, n, k, latency, dtype)
    found: list[FileReport] = []
    # some calls for each curve of the grids
    assert calls_in(lambda: found.append(report("gemm", table))) < rows
    assert found[0].rows == rows
    assert "mfu_above_1" not in kinds(found[0])


@pytest.fixture
def reference(shared: Path) -> Path:
    return shared / "reference"


def by_file(root: Path, gpu: str) -> dict[str, FileReport]:
    return {found.file: found for found in validate(load_tree(root, gpu), load_gpu(gpu))}


def test_infersim_h20(reference: Path) -> None:
    found = by_file(reference / "infersim_bench_data", "h20")
    assert worst(found.values()) == "warning"
    assert [f for f, r in found.items() if "mfu_column_rows" in kinds(r)] == ["mha/decode/h20/32-4-128.csv"]
    wrong = finding(found["mha/decode/h20/32-4-128.csv"], "mfu_column_rows")
    assert (wrong.count, wrong.worst["batch_size"], wrong.worst["kv_len"]) == (1, 64, 8192)
    assert found["gemm/h20/data.csv"].mfu_max == pytest.approx(0.952, abs=1e-3)
    copies = finding(found["gemm/h20/data.csv"], "duplicate")
    assert (copies.count, copies.severity) == (22, "note")
    assert finding(found["mha/decode/h20/64-2-128.csv"], "holes").count == 8
    assert found["mha/decode/h20/32-8-128.csv"].rows == 88


def test_infersim_h800(reference: Path) -> None:
    found = by_file(reference / "infersim_bench_data", "h800")
    cold = finding(found["mha/decode/h800/32-2-128.csv"], "warm_up")
    assert (cold.worst["latency_us"], cold.worst["more_work"]["latency_us"]) == (241.419, 25.68)
    assert all(r.mfu_max is not None and r.mfu_max < 1 for r in found.values())


@pytest.mark.slow
def test_roofline_v2_h100(reference: Path) -> None:
    found = by_file(reference / "h100_roofline_v2", "h100")
    assert worst(found.values()) == "warning"
    decodes = {name: r for name, r in found.items() if "/decode/" in name}
    assert len(decodes) == 18
    assert sum("warm_up" in kinds(r) for r in decodes.values()) == 17
    cold = finding(decodes["mha/decode/h100/28-4-128-tp2.csv"], "warm_up")
    assert cold.worst["latency_us"] == 40.142
    repeated = {Path(name).stem for name, r in decodes.items() if "duplicate" in kinds(r)}
    assert repeated == {"28-4-128-tp1", "28-4-128-tp2", "56-8-128-tp2", "56-8-128-tp4"}
    spread = finding(decodes["mha/decode/h100/28-4-128-tp1.csv"], "duplicate")
    assert spread.count == 41
    assert spread.worst["latencies_us"] == [23.483, 38.554]
    prefill = found["mha/prefill/h100/32-32-128.csv"]
    assert prefill.mfu_max == pytest.approx(0.748, abs=1e-3)
    assert found["gemm/h100/data.csv"].findings == ()
    assert all(r.bandwidth_max_bytes_per_s < r.bandwidth_limit_bytes_per_s for r in found.values())  # type: ignore[operator]
