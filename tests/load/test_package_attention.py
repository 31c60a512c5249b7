"""Attention of the installed package: what its files mean, seen in them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fastroof.errors import TableError
from fastroof.load.aiconfigurator import SYSTEMS, import_aiconfigurator, installed_root
from fastroof.load.measured import MeasuredTables
from fastroof.load.package_import import package_sources
from fastroof.load.package_rows import BUILD, NOT_READ, PACKAGE_FILES

VERSIONS = {"sglang": "0.5.14", "trtllm": "1.3.0rc20", "vllm": "0.24.0"}


@cache
def imported(engine: str, *files: str) -> MeasuredTables:
    try:
        installed_root()
    except TableError as error:
        pytest.skip(str(error))
    return import_aiconfigurator("h100_sxm", engine, VERSIONS[engine], files=files)


def columns(engine: str, operator: str, *files: str):
    return imported(engine, *files).tables[operator].columns


@pytest.mark.parametrize("engine", VERSIONS)
def test_no_attention_with_a_window_is_left_out(engine: str):
    found = columns(engine, "attention_decode", "generation_attention_perf")
    assert {0, 128} <= set(found["window"].tolist())
    lengths = found["kv_len"]
    # a power of two, and so is the longest context with the new token
    assert not (lengths & (lengths - 1)).any()
    assert lengths.max() == 131_072


@pytest.mark.parametrize(
    ("engine", "operator", "file"),
    [
        ("vllm", "mla_module_decode", "mla_generation_module_perf"),
        ("trtllm", "mla_module_decode", "mla_generation_module_perf"),
        ("trtllm", "dsa_decode", "dsa_generation_module_perf"),
        ("sglang", "mla_decode", "generation_mla_perf"),
        ("vllm", "msa_decode", "msa_generation_module_perf"),
    ],
)
def test_lengths_of_decodes_are_powers_of_two(engine: str, operator: str, file: str):
    lengths = np.unique(columns(engine, operator, file)["kv_len"])
    assert not (lengths & (lengths - 1)).any()
    assert (lengths[0], lengths[-1]) == (2, 131_072)


def test_lengths_of_vllms_sparse_decodes_are_powers_of_two_or_those_of_one_formats_extra_grid():
    found = columns("vllm", "dsa_decode", "dsa_generation_module_perf")
    lengths, models = found["kv_len"], found["model"]
    extra = (lengths & (lengths - 1)) != 0
    assert set(models[extra]) <= {"glm-5", "glm-5-shared-index"}
    assert (lengths.min(), lengths.max()) == (2, 131_072)
    assert not (lengths[extra] % 32).any()
    # layers that reuse another layer's index are faster, and do not slow down beyond the picked tokens
    at = (found["batch_size"] == 16) & (found["num_heads"] == 64) & (found["dtype"] == "fp8_block")
    at &= (lengths == 131_072) & (found["kv_dtype"] == "bf16")
    own, shared = (found["latency_us"][at & (models == name)] for name in ("glm-5", "glm-5-shared-index"))
    assert shared[0] < 0.6 * own[0]


def test_every_file_is_read_or_listed_as_not_read():
    try:
        data = installed_root() / "systems" / "data"
    except TableError as error:
        pytest.skip(str(error))
    read = {(file.folder, file.file) for _, file in PACKAGE_FILES}
    there = {(path.parents[2].name, path.stem) for path in data.glob("*/*/*/*/*.parquet")}
    assert {file for folder, file in there - read} <= set(NOT_READ)
    builds = {path.parent.name for path in data.glob(f"*/*/*/{BUILD}*/*.parquet")}
    versions = {one.version for system in SYSTEMS for one in package_sources(data, system)}
    assert not builds & versions


def test_longest_decodes_of_sglang_fill_the_models_positions():
    found = columns("sglang", "dsa_decode", "dsa_generation_module_perf")
    longest = {m: found["kv_len"][found["model"] == m].max() for m in ("deepseek-v3.2", "glm-5")}
    assert longest == {"deepseek-v3.2": 163_840, "glm-5": 202_752}


def test_points_are_duplicated_because_tp_is_not_a_key():
    tables = imported("sglang", "generation_mla_perf")
    found = tables.tables["mla_decode"].provenance["operators"]["mla_decode"]
    assert (found["rows"], found["points"]) == (5792, 2896)


def test_parts_of_the_absorbed_gemms_are_both_kept():
    found = columns("vllm", "mla_bmm", "mla_bmm_perf")
    assert {part: int((found["part"] == part).sum()) for part in set(found["part"])} == {
        "pre": 300,
        "post": 336,
    }


@pytest.mark.parametrize("engine", ["trtllm", "vllm"])
def test_a_block_takes_longer_than_the_attention_in_it(engine: str):
    # of the same batch and length, in us both of them
    kernel = columns("trtllm", "mla_decode", "generation_mla_perf")
    block = columns(engine, "mla_module_decode", "mla_generation_module_perf")

    def median_us(found, heads: str) -> float:
        rows = (found[heads] == 128) & (found["batch_size"] == 64) & (found["kv_len"] == 4096)
        return float(np.median(found["latency_us"][rows]))

    assert 1.0 < median_us(block, "num_heads") / median_us(kernel, "num_q_heads") < 4.0


@pytest.mark.slow
def test_other_kernels_run_where_sglang_attends_to_all_tokens():
    found = columns("sglang", "dsa_prefill", "dsa_context_module_perf")
    is_dense = np.char.find(found["kernel"].astype(str), "_dense_") >= 0
    by_size = (found["kv_len"] <= 2048) & (found["batch_size"] * found["kv_len"] <= 131_072)
    assert is_dense.sum() == 50_621
    assert (is_dense == by_size).all()
