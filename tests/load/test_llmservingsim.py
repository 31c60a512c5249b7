"""LLMServingSim's profiles: units, lengths, shares of a GPU, and what is left out.

The files are made here, in the columns that casys-kaist/LLMServingSim documents in
docs/docs/profiler/output-bundle.md at 11b96ae1ee5c339d40f8d9ba7b2052d8ef2ace0d.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastroof.errors import GpuError, ModelError, TableError
from fastroof.load.simulator_profiles.llmservingsim import convert_llmservingsim
from fastroof.load.sources import list_sources, load_sources

MODEL = "meta-llama/Llama-3.1-8B"
DENSE = "layer,tokens,time_us"
PER_SEQUENCE = "layer,sequences,time_us"
ATTENTION = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def perf(tmp_path: Path) -> Path:
    root = tmp_path / "profiler" / "perf"
    tp2 = root / "RTXPRO6000" / MODEL / "bf16" / "tp2"
    write(
        tp2 / "dense.csv",
        DENSE,
        "qkv_proj,64,30.5",
        "o_proj,64,20.5",
        "gate_up_proj,64,90.5",
        "down_proj,64,50.5",
        "act_fn,64,2.5",
        "rotary_emb,64,3.5",
        "layernorm,64,2.25",
        "embedding,64,2.75",
    )
    write(tp2 / "per_sequence.csv", PER_SEQUENCE, "lm_head,8,352.5", "sampler,8,30.5")
    write(
        tp2 / "attention.csv",
        ATTENTION,
        "attention,0,0.0,8,1023,1,30.25",
        "attention,64,32.0,0,0,1,9.25",
        "attention,64,96.0,0,0,1,9.75",
        "attention,64,32.0,8,1023,1,40.25",
        "attention,0,0.0,8,1023,4,31.25",
        "indexer,0,0.0,8,1023,1,5.25",
        "attention,64,96.5,0,0,1,9.75",
    )
    write(tp2 / "skew.csv", "layer", "attention")
    return root


def rows_of(folder: Path, operator: str) -> list[dict[str, Any]]:
    table = load_sources(folder).tables[operator]
    return [{name: values[i] for name, values in table.columns.items()} for i in range(table.num_rows)]


def test_layers_are_a_gpus_share_and_times_stay_us(perf, tmp_path):
    folder = convert_llmservingsim(perf, tmp_path / "out")
    assert folder == tmp_path / "out" / "rtx_pro_6000" / "llmservingsim"
    found = {(r["dtype"], r["m"], r["n"], r["k"]): r["latency_us"] for r in rows_of(folder, "gemm")}
    assert found == {
        ("bf16", 64, 3072, 4096): 30.5,
        ("bf16", 64, 4096, 2048): 20.5,
        ("bf16", 64, 14336, 4096): 90.5,
        ("bf16", 64, 4096, 7168): 50.5,
        ("bf16", 8, 64128, 4096): 352.5,
    }
    moved = {r["kind"]: (r["width"], r["io_bytes"], r["latency_us"]) for r in rows_of(folder, "elementwise")}
    assert moved == {
        "silu_and_mul": (7168, 3 * 2 * 64 * 7168, 2.5),
        "rope": ((16 + 4) * 128, 2 * 2 * 64 * (16 + 4) * 128, 3.5),
    }


def test_a_decode_counts_its_new_token_and_a_key_is_context_and_half_the_chunk(perf, tmp_path):
    folder = convert_llmservingsim(perf, tmp_path / "out")
    (decode,) = rows_of(folder, "attention_decode")
    assert (decode["num_q_heads"], decode["num_kv_heads"], decode["head_dim"]) == (16, 4, 128)
    assert (decode["batch_size"], decode["kv_len"], decode["latency_us"]) == (8, 1024, 30.25)
    prompts = [(r["q_len"], r["kv_len"], r["latency_us"]) for r in rows_of(folder, "attention_prefill")]
    assert prompts == [(64, 64, 9.25), (64, 128, 9.75)]


@pytest.mark.parametrize("layer", ["layer,", ""])
def test_older_files_have_the_context_itself_and_no_number_of_queries(perf, tmp_path, layer):
    path = perf / "RTXPRO6000" / MODEL / "bf16/tp2/attention.csv"
    named = "attention," if layer else ""
    write(
        path,
        f"{layer}prefill_chunk,kv_prefill,n_decode,kv_decode,time_us",
        f"{named}64,0,0,0,9.25",
        f"{named}64,64,0,0,9.75",
        f"{named}0,0,8,1023,30.25",
    )
    folder = convert_llmservingsim(perf, tmp_path / "out")
    assert [r["kv_len"] for r in rows_of(folder, "attention_prefill")] == [64, 128]
    assert [r["kv_len"] for r in rows_of(folder, "attention_decode")] == [1024]


def test_what_is_left_out_is_counted_by_reason(perf, tmp_path):
    source = list_sources(convert_llmservingsim(perf, tmp_path / "out"))[0]
    files = {Path(name).name: about for name, about in source.provenance["imported"].items()}
    assert files["skew.csv"]["ignored"] == "decodes of unequal length"
    assert files["attention.csv"]["left_out"] == {
        "prompts and decodes in one call": 1,
        "several new tokens per decode": 1,
        "not attention": 1,
        "fractional context length": 1,
    }
    assert sum(files["dense.csv"]["left_out"].values()) == 2
    assert source.provenance["models"] == [MODEL]
    assert source.provenance["hardware"] == "RTXPRO6000"
    assert source.rank("gemm") == 300


@pytest.mark.parametrize(
    ("variant", "dtype", "head", "kv_dtype"),
    [("bf16", "bf16", "bf16", "bf16"), ("fp8", "fp8", "bf16", "bf16"), ("bf16-kvfp8", "bf16", "bf16", "fp8")],
)
def test_the_variants_folder_names_the_dtypes(perf, tmp_path, variant, dtype, head, kv_dtype):
    (perf / "RTXPRO6000" / MODEL / "bf16").rename(perf / "RTXPRO6000" / MODEL / variant)
    folder = convert_llmservingsim(perf, tmp_path / "out")
    assert {r["dtype"] for r in rows_of(folder, "gemm") if r["n"] != 64128} == {dtype}
    assert {r["dtype"] for r in rows_of(folder, "gemm") if r["n"] == 64128} == {head}
    assert {r["kv_dtype"] for r in rows_of(folder, "attention_decode")} == {kv_dtype}


def test_models_and_hardware_that_have_no_name_here_can_be_given(perf, tmp_path):
    (perf / "RTXPRO6000" / "meta-llama").rename(perf / "RTXPRO6000" / "someone")
    with pytest.raises(TableError, match="--model"):
        convert_llmservingsim(perf, tmp_path / "out")
    assert convert_llmservingsim(perf, tmp_path / "out", model="llama-3.1-8b").is_dir()
    with pytest.raises(ModelError):
        convert_llmservingsim(perf, tmp_path / "more", model="no-such-model")
    (perf / "RTXPRO6000").rename(perf / "MyCard")
    with pytest.raises(GpuError, match="MyCard"):
        convert_llmservingsim(perf, tmp_path / "more", model="llama-3.1-8b")
    folder = convert_llmservingsim(perf, tmp_path / "more", gpu="rtx_pro_6000", model="llama-3.1-8b")
    assert folder.parent.name == "rtx_pro_6000"


def test_one_gpu_at_a_time(perf, tmp_path):
    other = perf / "H100" / MODEL / "bf16" / "tp1" / "dense.csv"
    write(other, DENSE, "qkv_proj,64,30.5")
    with pytest.raises(TableError, match="H100, RTXPRO6000"):
        convert_llmservingsim(perf, tmp_path / "out")
    folder = convert_llmservingsim(perf, tmp_path / "out", gpu="h100")
    assert [(r["n"], r["k"]) for r in rows_of(folder, "gemm")] == [(6144, 4096)]
    with pytest.raises(TableError, match="exists"):
        convert_llmservingsim(perf, tmp_path / "out", gpu="h100")
    assert convert_llmservingsim(perf / "RTXPRO6000" / MODEL, tmp_path / "out").parent.name == "rtx_pro_6000"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("qkv_proj,64,-3", "a number from 0 to"),
        ("qkv_proj,64,slow", "dense.csv"),
        ("qkv_proj,0,3", "tokens"),
        # ns taken for us would be slow, us taken for ns impossible
        ("qkv_proj,2048,0.03", "faster than the peak"),
    ],
)
def test_wrong_cells_are_refused_and_nothing_is_written(perf, tmp_path, line, words):
    write(perf / "RTXPRO6000" / MODEL / "bf16/tp2/dense.csv", DENSE, line)
    with pytest.raises(TableError, match=words):
        convert_llmservingsim(perf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_without_a_profile_are_refused(tmp_path):
    for folder, words in ((tmp_path / "nowhere", "is not a folder"), (tmp_path, "no profile file")):
        with pytest.raises(TableError, match=words):
            convert_llmservingsim(folder, tmp_path / "out")
