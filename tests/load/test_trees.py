"""Published trees of tables: every row is read, keyed by what one GPU runs, and its peak is named."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastroof.errors import GpuError, TableError
from fastroof.load.measured import MeasuredTables, PeakFinding
from fastroof.load.trees import is_tree, load_tree, rounding_unit

H100_BF16, H100_FP8 = 989.5e12, 1979e12
PREFILL_US = {1024: 38.755, 4096: 217.109, 8192: 761.923, 16384: 2972.661, 32768: 12448.919}


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def gemm_tree(root: Path, *rows: str, header: str = "m,k,n,latency_us,mfu") -> Path:
    write(root / "gemm/h100/data.csv", header, *rows)
    return root


def gemm_row(m: int, k: int, n: int, mfu: float, peak_flops_per_s: float, decimals: int = 3) -> str:
    latency_us = 2 * m * n * k / (mfu * peak_flops_per_s) * 1e6
    return f"{m},{k},{n},{latency_us:.3f},{round(mfu, decimals)}"


def prefill_rows(work: Callable[[int], float], peak_flops_per_s: float) -> list[str]:
    """Rows whose mfu column counts ``work(seq_len)`` FLOPs against a peak."""
    return [
        f"bf16,{s},{us},{round(work(s) / (us * 1e-6 * peak_flops_per_s), 3)}" for s, us in PREFILL_US.items()
    ]


def prefill_tree(root: Path, rows: list[str], gpu: str = "h100") -> Path:
    write(root / f"mha/prefill/{gpu}/32-32-128.csv", "dtype,seq_len,latency_us,mfu", *rows)
    return root


def decode_tree(root: Path, *rows: str, name: str = "32-8-128.csv", gpu: str = "h100") -> Path:
    write(root / f"mha/decode/{gpu}/{name}", "dtype,kv_dtype,batch_size,kv_len,latency_us,mfu", *rows)
    return root


def only_finding(tables: MeasuredTables) -> PeakFinding:
    (finding,) = tables.findings
    return finding


# -- the reference trees -----------------------------------------------------------------------


@pytest.fixture
def infersim(shared: Path) -> Path:
    return shared / "reference" / "infersim_bench_data"


@pytest.fixture
def roofline_v2(shared: Path) -> Path:
    return shared / "reference" / "h100_roofline_v2"


def naive_rows(path: Path) -> list[list[str]]:
    """All rows of a file that hold a measurement: those whose second last cell is a number."""
    with path.open(newline="") as file:
        return [cells for cells in csv.reader(file) if cells and cells[-2].replace(".", "").isdigit()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "gpu"),
    [("infersim_bench_data", "h20"), ("infersim_bench_data", "h800"), ("h100_roofline_v2", None)],
)
def test_every_row_of_every_file_is_loaded(shared: Path, tree: str, gpu: str | None) -> None:
    tables = load_tree(shared / "reference" / tree, gpu)
    files = 0
    # grouped GEMMs, whose rows hold two times, have tests of their own below
    for operator, table in tables.tables.items():
        for name in table.files if operator != "moe" else ():
            rows = table.columns["file"] == name
            expected = [float(cells[-2]) for cells in naive_rows(tables.root / name)]
            assert table.columns["latency_us"][rows].tolist() == expected, name
            files += 1
    read = {name for table in tables.tables.values() for name in table.files}
    there = {p.relative_to(tables.root).as_posix() for p in tables.root.rglob("*.csv")}
    there = {name for name in there if f"/{tables.gpu}/" in name}
    assert read | set(tables.ignored) == there
    assert all(name.startswith("grouped_gemm") for name in read & set(tables.ignored))
    assert len(tables.findings) == files
    assert all(finding.agrees for finding in tables.findings)


def test_h100_gemm_is_an_fp8_table(roofline_v2: Path) -> None:
    tables = load_tree(roofline_v2)
    gemm = tables.tables["gemm"].columns
    assert set(gemm["dtype"]) == {"fp8"}
    work = 2.0 * gemm["m"] * gemm["n"] * gemm["k"] / (gemm["latency_us"] * 1e-6)
    assert work.max() / H100_BF16 > 1
    agree = np.abs(gemm["mfu"] - work / H100_FP8) <= 0.0005 * 1.001
    assert agree.sum() == len(agree) == 112
    finding = next(f for f in tables.findings if f.file == "gemm/h100/data.csv")
    assert finding.label == "fp8 peak of h100"
    assert finding.peak_flops_per_s == pytest.approx(H100_FP8, rel=1e-3)


def test_h100_prefill_counts_half_the_square(roofline_v2: Path) -> None:
    tables = load_tree(roofline_v2)
    prefill = tables.tables["attention_prefill"].columns
    row = (prefill["file"] == "mha/prefill/h100/32-32-128.csv") & (prefill["q_len"] == 4096)
    assert prefill["latency_us"][row].tolist() == [217.109]
    assert prefill["kv_len"][row].tolist() == [4096]
    assert prefill["batch_size"][row].tolist() == [1]
    half = 4 * 32 * 4096**2 * 128 / 2
    assert half / 217.109e-6 / H100_BF16 == pytest.approx(0.640, abs=5e-4)
    labels = {f.label for f in tables.findings if "prefill" in f.file}
    assert labels == {"bf16 peak of h100; FLOPs of S^2 / 2"}


def test_decode_files_are_keyed_by_the_heads_of_one_gpu(roofline_v2: Path) -> None:
    table = load_tree(roofline_v2).tables["attention_decode"]
    for name in table.files:
        nh, nkv, dh, tp = (int(x) for x in Path(name).stem.replace("tp", "").split("-"))
        row = int(np.argmax(table.columns["file"] == name))
        assert table.columns["num_q_heads"][row] == nh // tp
        assert table.columns["num_kv_heads"][row] == nkv // tp
        assert table.columns["head_dim"][row] == dh
    # 28-4 on one GPU is 56-8 on one of two: both files keep their rows.
    files = table.columns["file"]
    for name, rows in (("28-4-128-tp1", 55), ("56-8-128-tp2", 41)):
        assert (files == f"mha/decode/h100/{name}.csv").sum() == rows
    key = ("bf16", 28, 4, 128, 0)
    assert len(table.groups()[key]) == 55 + 41


def test_infersim_file_without_header_keeps_its_first_row(infersim: Path) -> None:
    decode = load_tree(infersim, "h20").tables["attention_decode"].columns
    rows = np.flatnonzero(decode["file"] == "mha/decode/h20/64-2-128.csv")
    assert len(rows) == 41
    first = rows[0]
    assert (decode["batch_size"][first], decode["kv_len"][first]) == (1, 1024)
    assert decode["latency_us"][first] == 25.4893


def test_infersim_fp8_kv_rows_are_another_kernel(infersim: Path) -> None:
    table = load_tree(infersim, "h20").tables["attention_decode"]
    groups = table.groups()
    assert len(groups["bf16", 32, 8, 128, 0]) == len(groups["fp8", 32, 8, 128, 0]) == 44
    assert [key for key in groups if key[0] == "fp8"] == [("fp8", 32, 8, 128, 0)]
    assert table.columns["latency_us"][groups["fp8", 32, 8, 128, 0]][0] == 9.97


def test_latency_wins_where_a_row_contradicts_itself(infersim: Path) -> None:
    decode = load_tree(infersim, "h20").tables["attention_decode"].columns
    row = (decode["file"] == "mha/decode/h20/32-4-128.csv") & (decode["batch_size"] == 64)
    row &= decode["kv_len"] == 8192
    assert decode["latency_us"][row].tolist() == [639.371]


def test_two_decimals_do_not_hide_the_peak(infersim: Path) -> None:
    tables = load_tree(infersim, "h20")
    finding = next(f for f in tables.findings if f.file == "mha/decode/h20/32-8-128.csv")
    assert finding.label == "bf16 peak of h20"
    assert finding.peak_flops_per_s == pytest.approx(148e12, rel=0.01)


@pytest.mark.slow
def test_sources_are_named_after_the_tree(infersim: Path, roofline_v2: Path) -> None:
    assert set(load_tree(infersim, "H20").sources.values()) == {"infersim"}
    tables = load_tree(roofline_v2)
    assert set(tables.sources.values()) == {"roofline_v2"}
    assert tables.tables["gemm"].provenance["licence"] == "unknown"
    assert tables.root.name == "bench_data"
    assert load_tree(roofline_v2 / "bench_data").content_hash == tables.content_hash


def test_tree_of_several_gpus_needs_a_choice(infersim: Path) -> None:
    with pytest.raises(TableError, match=r"h20, h800.*gpu="):
        load_tree(infersim)
    with pytest.raises(TableError, match=r"'b200'.*h20, h800"):
        load_tree(infersim, "b200")


def test_other_operators_are_ignored_with_a_reason(infersim: Path) -> None:
    ignored = load_tree(infersim, "h800").ignored
    assert not any(name.startswith("grouped_gemm") for name in ignored)
    assert "DSA" in ignored["dsa/decode/h800/logits-64-128.csv"]
    assert "GDN" in load_tree(infersim, "h20").ignored["gdn/prefill/h20/4-16-128-32-128.csv"]


# -- grouped GEMMs -----------------------------------------------------------------------------

GROUPED = (
    "num_experts,num_gpus,num_local_experts,topk,hidden_size,intermediate_size,{tokens},tokens_per_expert,"
    "up_proj_us,up_mfu,down_proj_us,down_mfu"
)


def grouped_tree(root: Path, *rows: str, phase: str = "decode") -> Path:
    header = GROUPED.format(tokens="batch_size_per_gpu" if phase == "decode" else "seq_len_per_gpu")
    write(root / f"grouped_gemm/{phase}/h20/data.csv", header, *rows)
    return root


@pytest.mark.parametrize("gpu", ["h20", "h800"])
def test_grouped_gemms_are_rows_of_experts(infersim: Path, gpu: str) -> None:
    columns = load_tree(infersim, gpu).tables["moe"].columns
    names = ("num_experts", "hidden", "intermediate", "topk", "moe_tp", "moe_ep", "num_tokens", "latency_us")
    loaded = set(zip(*(columns[name].tolist() for name in names), strict=True))
    written, above = set(), 0
    for phase in ("decode", "prefill"):
        lines = (infersim / f"grouped_gemm/{phase}/{gpu}/data.csv").read_text().splitlines()[1:]
        for cells in csv.reader(lines):
            experts, gpus, local, topk, hidden, inter, tokens = map(int, cells[:7])
            latency_us = float(cells[8]) + float(cells[10])
            groups = experts // local
            share = gpus // groups
            row = (experts, hidden, inter * share, topk, share, groups, tokens * groups, latency_us)
            peak = {"h20": 296e12, "h800": 1979e12}[gpu]
            if 6.0 * tokens * topk * hidden * inter / (latency_us * 1e-6) > peak:
                above += 1
            else:
                written.add(row)
    assert loaded == written
    assert above == {"h20": 2, "h800": 0}[gpu]
    assert set(columns["dtype"]) == {"fp8"}


def test_rows_of_fewer_tokens_than_they_name_are_left_out_and_counted(tmp_path: Path) -> None:
    row = "128,8,16,8,2048,768,{},8,{},0.9,{},0.9"
    # 512 tokens are 38.7 GFLOPs, 131 us at the peak of 296 TFLOP/s
    root = grouped_tree(tmp_path, row.format(256, 60.0, 40.0), row.format(512, 70.0, 40.0))
    tables = load_tree(root, "h20")
    assert tables.tables["moe"].columns["num_tokens"].tolist() == [256 * 8]
    assert tables.ignored == {
        "grouped_gemm/decode/h20/data.csv": "1 of 2 rows: faster than the peak for the tokens they name"
    }
    grouped_tree(root, row.format(512, 7.0, 4.0))
    with pytest.raises(TableError, match=r"an MFU of 11\.\d+.*a wrong unit"):
        load_tree(root, "h20")


def test_experts_that_do_not_spread_evenly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"data.csv, row 2: 128 experts cannot be spread evenly over 8 GPUs"):
        load_tree(
            grouped_tree(
                tmp_path,
                "128,8,16,8,2048,768,1024,512,100,0.1,100,0.1",
                "128,8,24,8,2048,768,1024,512,100,0.1,100,0.1",
                phase="prefill",
            ),
            "h20",
        )


# -- what is a tree ----------------------------------------------------------------------------


def test_both_orders_of_folders_give_the_same_rows(tmp_path: Path) -> None:
    row = gemm_row(64, 4096, 4096, 0.3, H100_FP8)
    decode = "bf16,bf16,1,1024,20.5,0.001"
    gemm_tree(tmp_path / "a", row)
    decode_tree(tmp_path / "a", decode)
    write(tmp_path / "b/h100/gemm/data.csv", "m,k,n,latency_us,mfu", row)
    header = "dtype,kv_dtype,batch_size,kv_len,latency_us,mfu"
    write(tmp_path / "b/h100/mha/decode/32-8-128.csv", header, decode)
    one, other = load_tree(tmp_path / "a"), load_tree(tmp_path / "b")
    assert one.content_hash == other.content_hash
    assert other.tables["attention_decode"].files == ("h100/mha/decode/32-8-128.csv",)
    assert one.tables["gemm"].provenance["layout"] == "<kind>/<gpu>"
    assert other.tables["gemm"].provenance["layout"] == "<gpu>/<kind>"


def test_is_tree(tmp_path: Path) -> None:
    assert not is_tree(tmp_path / "absent")
    write(tmp_path / "h100/own/gemm.csv", "dtype,m,n,k,latency_us", "bf16,1,1,1,1")
    assert not is_tree(tmp_path)
    gemm_tree(tmp_path, gemm_row(64, 4096, 4096, 0.3, H100_FP8))
    assert is_tree(tmp_path)


def test_bench_data_inside_a_checkout_is_found(tmp_path: Path) -> None:
    gemm_tree(tmp_path / "InferSim/bench_data", gemm_row(64, 4096, 4096, 0.3, H100_FP8))
    assert is_tree(tmp_path / "InferSim")
    assert load_tree(tmp_path / "InferSim").sources == {"gemm": "infersim"}


def test_not_a_tree(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"not a tree of kernel tables; need gemm/<gpu>/data\.csv"):
        load_tree(tmp_path)


def test_gpu_by_alias_and_folder_by_alias(tmp_path: Path) -> None:
    decode_tree(tmp_path, "bf16,bf16,1,1024,20.5,0.001", gpu="H100_SXM")
    assert load_tree(tmp_path).gpu == "h100"
    assert load_tree(tmp_path, "H100-SXM").gpu == "h100"


def test_unknown_gpu_of_a_tree(tmp_path: Path) -> None:
    decode_tree(tmp_path, "bf16,bf16,1,1024,20.5,0.001", gpu="quadrochip")
    with pytest.raises(GpuError, match="quadrochip"):
        load_tree(tmp_path)


def test_a_tree_of_unread_files_only(tmp_path: Path) -> None:
    write(tmp_path / "gdn/decode/h20/4-16-128-32-128.csv", "batchsize,conv", "1,8")
    with pytest.raises(TableError, match=r"nothing to load for h20: .*GDN"):
        load_tree(tmp_path)


# -- names and headers -------------------------------------------------------------------------


def test_odd_names_are_ignored_with_the_reason(tmp_path: Path) -> None:
    decode_tree(tmp_path, "bf16,bf16,1,1024,20.5,0.001")
    decode_tree(tmp_path, "bf16,bf16,1,1024,20.5,0.001", name="32-8-128-old.csv")
    tables = load_tree(tmp_path)
    assert tables.tables["attention_decode"].num_rows == 1
    assert "<nh>-<nkv>-<dh>" in tables.ignored["mha/decode/h100/32-8-128-old.csv"]


@pytest.mark.parametrize(("name", "heads"), [("28-4-128-tp4", (7, 1)), ("28-2-128-tp4", (7, 1))])
def test_heads_after_tensor_parallelism(tmp_path: Path, name: str, heads: tuple[int, int]) -> None:
    decode_tree(tmp_path, "bf16,bf16,1,1024,20.5,0.001", name=f"{name}.csv")
    assert list(load_tree(tmp_path).tables["attention_decode"].groups()) == [("bf16", *heads, 128, 0)]


@pytest.mark.parametrize("name", ["28-4-128-tp8", "32-6-128-tp4"])
def test_heads_that_do_not_split(tmp_path: Path, name: str) -> None:
    decode_tree(tmp_path, "bf16,bf16,1,1024,20.5,0.001", name=f"{name}.csv")
    with pytest.raises(TableError, match=f"{name}.csv: .* cannot be split"):
        load_tree(tmp_path)


def test_file_without_header(tmp_path: Path) -> None:
    write(tmp_path / "gemm/h100/data.csv", *[gemm_row(m, 4096, 2048, 0.3, H100_FP8) for m in (64, 128)])
    gemm = load_tree(tmp_path).tables["gemm"].columns
    assert gemm["m"].tolist() == [64, 128]
    assert gemm["k"].tolist() == [4096, 4096]
    assert gemm["n"].tolist() == [2048, 2048]


def test_header_with_other_order_and_more_columns(tmp_path: Path) -> None:
    write(
        tmp_path / "mha/decode/h100/32-8-128.csv",
        "run,kv_len,batch_size,kv_dtype,dtype,latency_us",
        "a,4096,2,fp8,bf16,30.5",
    )
    tables = load_tree(tmp_path)
    decode = tables.tables["attention_decode"].columns
    assert (decode["kv_len"][0], decode["batch_size"][0], decode["kv_dtype"][0]) == (4096, 2, "fp8")
    assert "mfu" not in decode
    assert tables.findings == ()


def test_files_with_and_without_mfu_side_by_side(tmp_path: Path) -> None:
    decode_tree(tmp_path, "bf16,bf16,1,1024,20.5,0.001")
    write(
        tmp_path / "mha/decode/h100/64-8-128.csv",
        "dtype,kv_dtype,batch_size,kv_len,latency_us",
        "bf16,bf16,1,1024,21.5",
    )
    decode = load_tree(tmp_path).tables["attention_decode"].columns
    assert decode["mfu"][0] == 0.001
    assert np.isnan(decode["mfu"][1])


def test_mla_files(tmp_path: Path) -> None:
    header = "dtype,kv_dtype,batch_size,kv_len,latency_us,mfu"
    write(tmp_path / "mla/decode/h20/128-512-64-tp2.csv", header, "bf16,bf16,1,1024,12.548,0.077")
    write(tmp_path / "mla/prefill/h20/128-128-64.csv", "dtype,seq_len,latency_us,mfu", "bf16,1024,781,0.372")
    tables = load_tree(tmp_path)
    assert list(tables.tables["mla_decode"].groups()) == [("bf16", 64, 512, 64)]
    assert list(tables.tables["mla_prefill"].groups()) == [("bf16", "bf16", 128, 128, 64)]
    assert {f.label for f in tables.findings} == {"bf16 peak of h20", "bf16 peak of h20; FLOPs of S^2 / 2"}


# -- peaks and conventions ---------------------------------------------------------------------


def test_old_h100_prefill_divided_by_the_peak_of_the_h20(tmp_path: Path) -> None:
    """4096 tokens in 219.951 us called MFU 4.222: 0.632 of the H100's own peak."""
    prefill_tree(tmp_path, ["bf16,4096,219.951,4.222"])
    tables = load_tree(tmp_path)
    finding = only_finding(tables)
    assert not finding.agrees
    assert finding.label == "148 TFLOP/s (h20 bf16); FLOPs of S^2 / 2"
    assert finding.peak_flops_per_s == pytest.approx(148e12, rel=1e-3)
    prefill = tables.tables["attention_prefill"].columns
    assert prefill["latency_us"].tolist() == [219.951]
    own_mfu = 4 * 32 * 4096**2 * 128 / 2 / (prefill["latency_us"][0] * 1e-6 * H100_BF16)
    assert own_mfu == pytest.approx(0.632, abs=1e-3)


@pytest.mark.parametrize(
    ("convention", "work"),
    [
        ("FLOPs of S^2 / 2", lambda s: s * s / 2),
        ("FLOPs of S^2 / 1.8", lambda s: s * s / 1.8),
        ("FLOPs of S^2, not halved", lambda s: s * s),
    ],
)
@pytest.mark.parametrize(
    ("gpu", "peak", "label"),
    [("h100", H100_BF16, "bf16 peak of h100"), ("h100", 148e12, "148 TFLOP/s (h20 bf16)")],
)
def test_convention_of_a_prefill_file(
    tmp_path: Path, convention: str, work: Callable[[int], float], gpu: str, peak: float, label: str
) -> None:
    prefill_tree(tmp_path, prefill_rows(lambda s: 4 * 32 * 128 * work(s), peak), gpu)
    finding = only_finding(load_tree(tmp_path))
    assert finding.label == f"{label}; {convention}"
    assert finding.peak_flops_per_s == pytest.approx(peak, rel=5e-3)
    assert finding.agrees == (peak == H100_BF16)
    assert finding.rows == 5


def test_exact_causal_flops_show_at_short_sequences(tmp_path: Path) -> None:
    rows = [
        f"bf16,{s},{us},{4 * 32 * 128 * s * (s + 1) / 2 / (us * 1e-6 * H100_BF16):.9f}"
        for s, us in ((8, 5.0), (16, 5.5), (32, 6.0))
    ]
    prefill_tree(tmp_path, rows)
    assert only_finding(load_tree(tmp_path)).label == "bf16 peak of h100; exact causal FLOPs"


def test_unknown_peak(tmp_path: Path) -> None:
    prefill_tree(tmp_path, prefill_rows(lambda s: 4 * 32 * 128 * s * s / 2, 444e12))
    finding = only_finding(load_tree(tmp_path))
    assert not finding.agrees
    assert finding.label.startswith("444 TFLOP/s, no known peak")


def test_decode_rows_that_round_to_zero_still_give_the_peak(tmp_path: Path) -> None:
    """No row alone is sharp: 0.001 may be 50 % off; together they are."""
    rows = []
    for batch, kv, us in ((1, 1024, 22.0), (1, 8192, 24.0), (16, 4096, 110.0), (64, 8192, 690.0)):
        mfu = 4 * 32 * 128 * batch * kv / (us * 1e-6 * H100_BF16)
        rows.append(f"bf16,bf16,{batch},{kv},{us},{round(mfu, 3)}")
    decode_tree(tmp_path, *rows)
    finding = only_finding(load_tree(tmp_path))
    assert finding.label == "bf16 peak of h100"
    assert finding.agrees


@pytest.mark.parametrize(("peak", "dtype"), [(H100_BF16, "bf16"), (H100_FP8, "fp8")])
def test_gemm_dtype_follows_from_its_peak(tmp_path: Path, peak: float, dtype: str) -> None:
    gemm_tree(tmp_path, *[gemm_row(m, 4096, 4096, mfu, peak) for m, mfu in ((64, 0.1), (512, 0.6))])
    tables = load_tree(tmp_path)
    assert set(tables.tables["gemm"].columns["dtype"]) == {dtype}
    assert only_finding(tables).label == f"{dtype} peak of h100"


def test_gemm_dtype_column_is_kept(tmp_path: Path) -> None:
    latency = gemm_row(512, 4096, 4096, 0.3, H100_BF16).split(",")[3]
    gemm_tree(
        tmp_path,
        f"bf16,512,4096,4096,{latency}",
        f"fp8_block,512,4096,4096,{latency}",
        header="dtype,m,k,n,latency_us",
    )
    assert load_tree(tmp_path).tables["gemm"].columns["dtype"].tolist() == ["bf16", "fp8_block"]


@pytest.mark.parametrize(
    ("values", "step"),
    [([0.011, 0.2, 0.0], 0.001), ([0.01, 0.12], 0.01), ([0.127969, 0.5], 1e-6), ([1, 0], 1)],
)
def test_rounding_unit(values: list[float], step: float) -> None:
    assert rounding_unit(np.array(values)) == pytest.approx(step)


# -- refusals ----------------------------------------------------------------------------------


def test_gemm_faster_than_its_own_peak(tmp_path: Path) -> None:
    """FP8 latencies with an mfu column that claims the BF16 peak."""
    good, bad = gemm_row(64, 4096, 4096, 0.2, H100_BF16), gemm_row(4096, 4096, 4096, 1.3, H100_BF16)
    gemm_tree(tmp_path, good, bad)
    with pytest.raises(TableError, match=r"gemm/h100/data\.csv, row 2: .*m 4096.*MFU of 1\.3.*bf16"):
        load_tree(tmp_path)


def test_gemm_faster_than_the_dtype_it_claims(tmp_path: Path) -> None:
    latency = gemm_row(4096, 4096, 4096, 0.6, H100_FP8).split(",")[3]
    gemm_tree(tmp_path, f"fp8,4096,4096,4096,{latency}", header="dtype,m,k,n,latency_us")
    assert load_tree(tmp_path).tables["gemm"].num_rows == 1
    gemm_tree(tmp_path, f"bf16,4096,4096,4096,{latency}", header="dtype,m,k,n,latency_us")
    with pytest.raises(TableError, match=r"data\.csv, row 1: .*MFU of 1\.2"):
        load_tree(tmp_path)


def test_prefill_latency_in_milliseconds(tmp_path: Path) -> None:
    prefill_tree(tmp_path, ["bf16,1024,40,0.217", "bf16,4096,0.217109,0.64"])
    with pytest.raises(TableError, match=r"32-32-128\.csv, row 2: .*wrong unit"):
        load_tree(tmp_path)


def test_gemm_of_unknown_dtype(tmp_path: Path) -> None:
    gemm_tree(tmp_path, "64,4096,4096,10.5", header="m,k,n,latency_us")
    with pytest.raises(
        TableError, match=r"data\.csv: no dtype column, and no mfu column.*add a dtype column"
    ):
        load_tree(tmp_path)
    gemm_tree(tmp_path, *[gemm_row(m, 4096, 4096, 0.5, 148e12) for m in (64, 512)])
    with pytest.raises(TableError, match=r"divided by 148 TFLOP/s \(h20 bf16\).*fp8 1979"):
        load_tree(tmp_path)


def test_dtype_without_units_on_the_card(tmp_path: Path) -> None:
    write(tmp_path / "gemm/a100/data.csv", "dtype,m,k,n,latency_us", "fp8,64,4096,4096,50")
    with pytest.raises(
        TableError, match=r"data\.csv, row 1: found dtype 'fp8', but a100 computes only in bf16"
    ):
        load_tree(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("bf16,nf4,1,1024,20.5,0.001", r"row 1, column kv_dtype: found 'nf4', need .*fp8"),
        ("fp8,fp8,1,1024,20.5,0.001", r"row 1, column dtype: found 'fp8', need bf16 or fp16"),
        ("bf16,bf16,1,1024,fast,0.001", "row 1.*latency_us.*'fast'"),
        ("bf16,bf16,0,1024,20.5,0.001", "row 1.*batch_size.*'0'"),
        ("bf16,bf16,1,1024,20.5,nan", "row 1.*mfu.*'nan'"),
        ("bf16,bf16,1,1024,0,0.001", "row 1.*latency_us.*'0'"),
    ],
)
def test_cells_that_no_measurement_gives(tmp_path: Path, row: str, message: str) -> None:
    decode_tree(tmp_path, row)
    with pytest.raises(TableError, match=r"mha/decode/h100/32-8-128\.csv, " + message):
        load_tree(tmp_path)


@pytest.mark.parametrize("text", ["", "dtype,kv_dtype,batch_size,kv_len,latency_us,mfu\n", "\x00\xff"])
def test_files_that_hold_no_rows(tmp_path: Path, text: str) -> None:
    decode_tree(tmp_path, "bf16,bf16,1,1024,20.5,0.001")
    (tmp_path / "mha/decode/h100/32-8-128.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(TableError, match=r"32-8-128\.csv"):
        load_tree(tmp_path)


def test_missing_column(tmp_path: Path) -> None:
    write(tmp_path / "mha/decode/h100/32-8-128.csv", "dtype,kv_dtype,batch_size,latency_us", "bf16,bf16,1,20")
    with pytest.raises(TableError, match=r"32-8-128\.csv: missing column kv_len"):
        load_tree(tmp_path)
