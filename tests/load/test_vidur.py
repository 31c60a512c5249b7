"""Vidur's profiles: units, shares of a GPU, what a size counts, and what is left out.

The files are made here, in the columns of microsoft/vidur's data/profiling: of mlp.csv at
41ab8ab15cd6217284b025750fc6b81364d359e6, of all_reduce.csv at e26eb8f79fa9a6a7c38eac0f5291302402b20364, and
of attention.csv as vidur/profiling/attention/attention_wrapper.py writes it at
1478250bb8be249631e2b7353948faf662e28665.
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.errors import GpuError, TableError
from fastroof.load.simulator_profiles.vidur import convert_vidur
from fastroof.load.sources import list_sources, load_sources

STATISTICS = ("min", "max", "mean", "median", "std")
MLP_OPERATIONS = (
    "emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm",
    "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
ATTENTION_OPERATIONS = (
    "attn_input_reshape", "attn_kv_cache_save", "attn_prefill", "attn_decode", "attn_output_reshape",
)  # fmt: skip
LLAMA = {"n_head": 32, "n_kv_head": 8, "n_embd": 4096, "n_expanded_embd": 14336, "vocab_size": 128256}
MODEL = "compute/a100/meta-llama/Meta-Llama-3-8B"


def times(operations: tuple[str, ...], median_ms: float, **others: Any) -> dict[str, Any]:
    """Statistics whose median differs from all others."""
    cells: dict[str, Any] = {}
    for operation in operations:
        ms = others.get(operation, median_ms)
        factors = dict(zip(STATISTICS, (0.5, 4.0, 2.0, 1.0, 0.1), strict=True))
        cells |= {
            f"time_stats.{operation}.{name}": ms if ms == "" else float(ms) * factor
            for name, factor in factors.items()
        }
    return cells


def mlp(num_tokens: int = 512, tp: int = 1, gated: bool = True, **ms: Any) -> dict[str, Any]:
    sizes = {**LLAMA, "use_gated_mlp": gated, "num_tokens": num_tokens, "num_tensor_parallel_workers": tp}
    return {**times(MLP_OPERATIONS, 1.5, **ms), **sizes}


def attention(
    batch: int = 1, chunk: int = 0, cache: int = 64, tp: int = 1, ms: float = 0.25
) -> dict[str, Any]:
    is_prefill = chunk > 0
    zero = {"attn_input_reshape": 0.0, "attn_decode" if is_prefill else "attn_prefill": 0.0}
    return {
        **times(ATTENTION_OPERATIONS, ms, **zero),
        "n_embd": 4096, "n_q_head": 32, "n_kv_head": 8, "block_size": 16, "num_tensor_parallel_workers": tp,
        "max_model_len": 16384, "batch_size": batch, "prefill_chunk_size": chunk, "kv_cache_size": cache,
        "is_prefill": is_prefill, "attention_backend": "AttentionBackend.FLASHINFER",
    }  # fmt: skip


def allreduce(gpus: int = 2, size: int = 2048, a_node: int = 2, ms: float = 0.011) -> dict[str, Any]:
    return {
        **times(("all_reduce",), ms), "rank": 0, "num_workers": gpus, "size": size,
        "collective": "all_reduce", "devices_per_node": a_node, "max_devices_per_node": 8,
    }  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def profiling(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "profiling"
    write(root / MODEL / "mlp.csv", mlp(), mlp(tp=4))
    write(
        root / MODEL / "attention.csv",
        attention(chunk=128, cache=0),
        attention(8, cache=1023),
        attention(tp=8),
    )
    write(root / "network/a100_dgx/all_reduce.csv", allreduce(), allreduce(a_node=1))
    return root


def imported(root: Path, tmp_path: Path, **options: Any) -> Any:
    return load_sources(convert_vidur(root, tmp_path / "out", **options))


def rows_of(tables: Any, operator: str) -> list[dict[str, Any]]:
    table = tables.tables[operator]
    return [{name: values[i] for name, values in table.columns.items()} for i in range(table.num_rows)]


def test_gemms_are_a_gpus_share_of_the_whole_models_and_medians_of_milliseconds_become_us(
    profiling, tmp_path
):
    tables = imported(profiling, tmp_path)
    assert tables.gpu == "a100"
    sizes = {(r["m"], r["n"], r["k"]): r["latency_us"] for r in rows_of(tables, "gemm")}
    whole = {(512, 6144, 4096), (512, 4096, 4096), (512, 28672, 4096), (512, 4096, 14336)}
    of_four = {(512, 1536, 4096), (512, 4096, 1024), (512, 7168, 4096), (512, 4096, 3584)}
    assert set(sizes) == whole | of_four
    assert set(sizes.values()) == {1500.0}
    assert {r["dtype"] for r in rows_of(tables, "gemm")} == {"bf16"}


@pytest.mark.parametrize("ms", [1.7e308, 1e200, 1.1e6, -1.0, float("inf"), float("nan")])
def test_invalid_times_are_refused_with_row_and_column(profiling, tmp_path, ms):
    write(profiling / MODEL / "mlp.csv", mlp(), mlp(tp=4, mlp_up_proj=ms))
    with pytest.raises(TableError, match=r"mlp.csv, row 2, column time_stats.mlp_up_proj.median: found"):
        imported(profiling, tmp_path)


def test_a_decode_attends_to_one_more_token_than_its_cache_and_a_chunk_to_itself_too(profiling, tmp_path):
    write(
        profiling / MODEL / "attention.csv",
        attention(chunk=128, cache=0),
        attention(chunk=128, cache=64),
        attention(8, cache=1023),
        attention(tp=8),
    )
    tables = imported(profiling, tmp_path)
    decodes = rows_of(tables, "attention_decode")
    assert [(r["num_q_heads"], r["num_kv_heads"], r["batch_size"], r["kv_len"]) for r in decodes] == [
        (4, 1, 1, 65),
        (32, 8, 8, 1024),
    ]
    assert {(r["head_dim"], r["latency_us"], r["kernel"]) for r in decodes} == {(128, 250.0, "flashinfer")}
    prompts = rows_of(tables, "attention_prefill")
    assert [(r["batch_size"], r["q_len"], r["kv_len"]) for r in prompts] == [(1, 128, 128), (1, 128, 192)]


def test_sizes_of_all_reduces_are_bytes_and_those_across_nodes_are_left_out(profiling, tmp_path):
    (row,) = rows_of(imported(profiling, tmp_path), "allreduce")
    assert (row["num_gpus"], row["mode"], row["message_bytes"], row["latency_us"]) == (2, "nccl", 2048, 11.0)


def test_streaming_kernels_have_the_bytes_that_they_move(profiling, tmp_path):
    write(profiling / MODEL / "mlp.csv", mlp(tp=2))
    moved = {
        (r["kind"], r["width"]): r["io_bytes"] for r in rows_of(imported(profiling, tmp_path), "elementwise")
    }
    assert moved == {
        ("rmsnorm", 4096): 2 * 2 * 512 * 4096,
        ("add", 4096): 3 * 2 * 512 * 4096,
        ("silu_and_mul", 7168): 3 * 2 * 512 * 7168,
        ("rope", (16 + 4) * 128): 2 * 2 * 512 * (16 + 4) * 128,
    }


def test_a_model_without_a_gate_has_one_half_and_no_activation_row(profiling, tmp_path):
    """As phi-2 is: one norm a layer, whose second column is empty."""
    write(profiling / MODEL / "mlp.csv", mlp(gated=False, post_attention_layernorm=""))
    tables = imported(profiling, tmp_path)
    assert {r["n"] for r in rows_of(tables, "gemm")} == {6144, 4096, 14336}
    assert {r["kind"] for r in rows_of(tables, "elementwise")} == {"norm", "add", "rope"}


def test_what_took_no_time_and_what_cannot_be_divided_is_left_out_and_counted(profiling, tmp_path):
    write(profiling / MODEL / "mlp.csv", mlp(tp=3), mlp(attn_pre_proj=0.0, add=""))
    folder = convert_vidur(profiling, tmp_path / "out")
    about = list_sources(folder)[0].provenance["imported"][f"{MODEL}/mlp.csv"]
    assert about["gemm"] == 3
    # of 3 GPUs neither 32 heads, 8 KV heads nor 14336 columns
    assert about["left_out"]["fewer heads or columns than GPUs"] == 4 + 2
    assert about["left_out"]["took no time that the profiler resolves, or was not timed"] == 2


def test_provenance_has_program_model_files_and_rank(profiling, tmp_path):
    source = list_sources(convert_vidur(profiling, tmp_path / "out"))[0]
    assert source.name == source.provenance["program"] == "vidur"
    assert source.provenance["models"] == ["meta-llama/Meta-Llama-3-8B"]
    path = profiling / MODEL / "mlp.csv"
    recorded = source.provenance["imported"][path.relative_to(profiling).as_posix()]
    assert recorded["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source.rank("gemm") == 300


def test_rows_in_float16_can_keep_their_name(profiling, tmp_path):
    tables = imported(profiling, tmp_path, dtype="fp16")
    assert {r["dtype"] for r in rows_of(tables, "gemm")} == {"fp16"}
    with pytest.raises(TableError, match="bf16 or fp16"):
        convert_vidur(profiling, tmp_path / "other", dtype="fp8")


def test_any_folder_below_will_do(profiling, tmp_path):
    assert set(imported(profiling / MODEL, tmp_path).tables) == {
        "gemm",
        "attention_prefill",
        "attention_decode",
        "elementwise",
    }
    moved = tmp_path / "mine"
    (profiling / MODEL).rename(moved)
    with pytest.raises(TableError, match="--gpu"):
        convert_vidur(moved, tmp_path / "again")
    assert convert_vidur(moved, tmp_path / "again", gpu="A100").parent.name == "a100"


def test_one_gpu_and_one_topology_at_a_time(profiling, tmp_path):
    write(profiling / "network/a100_pair_nvlink/all_reduce.csv", allreduce(ms=0.02))
    with pytest.raises(TableError, match="a100_dgx, a100_pair_nvlink"):
        convert_vidur(profiling, tmp_path / "out")
    with pytest.raises(TableError, match="available: a100_dgx, a100_pair_nvlink"):
        convert_vidur(profiling, tmp_path / "out", topology="h100_dgx")
    (row,) = rows_of(imported(profiling, tmp_path, topology="a100_pair_nvlink"), "allreduce")
    assert row["latency_us"] == 20.0
    write(profiling / "compute/h100/meta-llama/Llama-2-7b-hf/mlp.csv", mlp())
    with pytest.raises(TableError, match="a100, h100"):
        convert_vidur(profiling, tmp_path / "both")
    assert load_sources(convert_vidur(profiling, tmp_path / "both", gpu="h100")).gpu == "h100"
    with pytest.raises(TableError, match="no profile of b200"):
        convert_vidur(profiling, tmp_path / "both", gpu="b200")


def test_a_gpu_without_a_datasheet_is_reported(profiling, tmp_path):
    (profiling / "compute/a100").rename(profiling / "compute/a41")
    (profiling / "network/a100_dgx").rename(profiling / "network/a41_dgx")
    with pytest.raises(GpuError, match="a41"):
        convert_vidur(profiling, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"time_stats.attn_pre_proj.median": "fast"}, "mlp.csv"),
        ({"time_stats.attn_pre_proj.median": "-1"}, "a number from 0 to"),
        ({"time_stats.attn_pre_proj.median": "inf"}, "a number from 0 to"),
        ({"n_head": 0}, "n_head"),
        ({"use_gated_mlp": "perhaps"}, "True or False"),
        # us taken for ms would be a thousandth of what it takes: faster than the card
        ({"time_stats.mlp_up_proj.median": 0.0001}, "faster than the peak"),
    ],
)
def test_wrong_cells_are_refused_by_file_and_nothing_is_written(profiling, tmp_path, change, words):
    write(profiling / MODEL / "mlp.csv", {**mlp(num_tokens=4096), **change})
    with pytest.raises(TableError, match=words):
        convert_vidur(profiling, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prompts_after_a_prefix_alone_start_no_table(profiling, tmp_path):
    write(profiling / MODEL / "attention.csv", attention(chunk=128, cache=64), attention(8))
    folder = convert_vidur(profiling, tmp_path / "out")
    assert "attention_prefill" not in load_sources(folder).tables
    left_out = list_sources(folder)[0].provenance["operators"]["attention_prefill"]["left_out"]
    assert list(left_out.values()) == [1]


def test_without_a_folder_the_users_gets_it_and_the_gpus_name_finds_it(profiling, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTROOF_TABLES", str(tmp_path / "mine"))
    monkeypatch.setenv("FASTROOF_TABLES_IMPORT", "never")
    assert convert_vidur(profiling) == tmp_path / "mine" / "a100" / "vidur"
    assert fastroof.load_tables("a100").sources["attention_prefill"] == "vidur"


def test_folders_without_a_profile_are_refused(tmp_path):
    with pytest.raises(TableError, match="is not a folder"):
        convert_vidur(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(TableError, match="no profile file"):
        convert_vidur(tmp_path, tmp_path / "out", gpu="a100")


def test_an_imported_source_answers_plans(profiling, tmp_path):
    rows = [mlp(m) for m in (1, 64, 512)]
    for row, m in zip(rows, (1, 64, 512), strict=True):
        row |= times(MLP_OPERATIONS, 0.05 + m / 500)
    write(profiling / MODEL / "mlp.csv", *rows)
    write(
        profiling / MODEL / "attention.csv",
        *(attention(b, cache=c - 1, ms=0.02 + b * c / 1e5) for b in (1, 8) for c in (128, 1024)),
        attention(chunk=128, cache=0),
    )
    tables = fastroof.load_tables(convert_vidur(profiling, tmp_path / "out").parent)
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "a100", tables, max_num_batched_tokens=512, max_num_seqs=8, engine="kernels"
    )
    assert np.isfinite(plan.decode_us(8, 1000))
    looked_up = tables.lookup("gemm", m=64, n=6144, k=4096)
    assert (float(looked_up.latency_us), int(looked_up.origin)) == (pytest.approx(178.0), 0)
