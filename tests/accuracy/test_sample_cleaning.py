"""The sample of another package: what a row of it means, rule by rule, and that none is lost."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.bench_settings import dynamo_settings
from benchmarks.accuracy.sample_cleaning import KV_DTYPE_FROM, RULES, CleanedSample, clean_sample
from benchmarks.accuracy.silicon_sample import SAMPLE_FILE, SAMPLE_GPUS, read_silicon_sample
from fastroof.engines import serving_engines
from fastroof.errors import FastroofError
from fastroof.evidence.rows import ServingRow
from fastroof.load.aiconfigurator import SYSTEMS, installed_root
from fastroof.models import load_model
from tests.reference.sample_cells import CELL, DATED, sample_file

FP8 = {"precision": "fp8", "gemm_quant_mode": "fp8"}
LLAMA_70B = {"model_path": "meta-llama/Llama-3.1-70B"}
EXPERTS = {"model_path": "openai/gpt-oss-120b", "precision": "fp4", "gemm_quant_mode": "nvfp4"}
SPLIT = {
    "mode": "disagg", "tp_size": "", "batch_size": "", "prefill_num_workers": "2", "prefill_tp_size": "4",
    "prefill_attention_dp_size": "", "prefill_moe_ep_size": "4", "decode_num_workers": "3",
    "decode_tp_size": "1", "decode_pp_size": "1", "decode_attention_dp_size": "8", "decode_moe_ep_size": "8",
    "decode_batch_size": "5",
}  # fmt: skip


def cleaned(*changes: dict[str, str]) -> CleanedSample:
    return clean_sample([CELL | change for change in changes], SYSTEMS)


def only(change: dict[str, str]) -> ServingRow:
    (row,) = cleaned(change).rows
    return row


def test_a_sample_row() -> None:
    found = cleaned({})
    assert (found.refused, found.duplicates, found.changed["settings"]) == ({}, 0, 1)
    assert sum(found.changed.values()) == 1
    (row,) = found.rows
    fields = {name: value for name, value in asdict(row).items() if value == value}
    assert fields == {
        "dataset": "vllm-0.12.0-qwen3-32b-bf16", "row": CELL["id"], "gpu": "h100", "engine": "vllm",
        "engine_version": "0.12.0", "checkpoint": "Qwen/Qwen3-32B", "model": "qwen3-32b", "dtype": "bf16",
        "kv_dtype": "bf16", "kv_dtype_from": row.kv_dtype_from, "tp": 2, "isl": 1024.0, "osl": 128.0,
        "concurrency": 16.0, "length_factor": 1.0, "prefix_tokens": 0.0, "requests_per_client": 10.0,
        "frontend": "dynamo", "ttft_ms": 90.5, "tpot_ms": 12.25, "left_out": "", "pp": 1, "dp": 1, "ep": 1,
        "architecture": "qwen3-32b", "bench": "dynamo", "length_spread": 0.0, "measured_on": "",
        "also_as": "", "decode_workers": 0, "prefill_workers": 0, "prefill_tp": 0, "prefill_dp": 0,
        "prefill_ep": 0, "exchange": "", "max_num_batched_tokens": 16 + 1024 + 1500, "max_num_seqs": 16,
        "order": "", "settings_from": "generator 95ddf24",
        "speculation": None, "draft_model": "", "draft_tp": 1, "clock": "client",
    }  # fmt: skip
    assert row.kv_dtype_from in KV_DTYPE_FROM


@pytest.mark.parametrize(
    ("engine", "version", "ranks", "expected"),
    [
        ("vllm", "0.12.0", 1, (64 + 1000 + 1500, 64, None)),
        ("vllm", "0.12.0", 4, (16 + 1000 + 1500, 16, None)),
        ("vllm", "0.11.0", 1, None),
        ("trtllm", "1.0.0rc3", 1, (64 + 1000 + 1500, 64, None)),
        # whole blocks of 32
        ("trtllm", "1.3.0rc1", 1, (2592, 64, None)),
        ("sglang", "0.5.8.post1", 1, (1000 + 1500, 64, "mixed")),
        # older than the generator's rules
        ("sglang", "0.5.1.post1", 1, None),
    ],
)
def test_settings_are_those_of_the_generator(
    engine: str, version: str, ranks: int, expected: tuple[int, int, str | None] | None
) -> None:
    found = dynamo_settings(engine, version, 1000.0, 64.0, ranks)
    assert bool(found) == (expected is not None)
    if expected is not None:
        assert (found["max_num_batched_tokens"], found["max_num_seqs"], found.get("order")) == expected
        assert "generator" in found["settings_from"]


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        # tp x ep, where both are set
        (("64", "1", "8", "8"), (8, 1, 8)),
        (("16", "1", "4", "4"), (4, 1, 4)),
        (("4", "1", "2", "2"), (2, 1, 2)),
        # data-parallel attention in place of tp
        (("64", "64", "8", "8"), (1, 8, 8)),
        (("16", "16", "4", "4"), (1, 4, 4)),
        (("4", "4", "1", "16"), (1, 4, 4)),
        (("2", "2", "1", "4"), (1, 2, 2)),
        # as it is
        (("8", "1", "8", "1"), (8, 1, 1)),
        (("8", "1", "1", "8"), (8, 1, 8)),
        (("1", "8", "1", "8"), (1, 8, 8)),
    ],
)
def test_layouts_of_dated_files(written: tuple[str, ...], meant: tuple[int, ...]) -> None:
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    found = cleaned(DATED | dict(zip(names, written, strict=True)))
    (row,) = found.rows
    assert (row.tp, row.dp, row.ep) == meant
    assert row.layout.world_size % row.ep == 0
    as_written = tuple(int(text) for text in (written[0], written[1], written[3]))
    assert found.changed["layout"] == (as_written != meant)


def test_ranks_and_replicas_of_runs_behind_dynamo() -> None:
    # 16 of 32 clients each: two ranks of attention, written as tp
    ranks = EXPERTS | {"id": "x_c32_1", "tp_size": "2", "moe_ep_size": "2"}
    row = only(ranks)
    assert (row.tp, row.dp, row.ep, row.concurrency) == (1, 2, 2, 32.0)
    assert cleaned(ranks, EXPERTS).changed["concurrency"] == 1
    # the experts lie on more GPUs than tp
    found = cleaned(EXPERTS | {"moe_ep_size": "4"})
    assert [(row.tp, row.dp, row.ep) for row in found.rows] == [(2, 2, 4)]
    assert found.changed["ranks"] == 1
    # two replicas of a dense model
    row = only({"id": "x_c32_1"})
    assert (row.tp, row.dp, row.ep, row.concurrency) == (2, 2, 1, 32.0)
    assert cleaned({"id": "x_c32_1"}, {"id": "y_c32_1", "isl": "2048"}, {}).changed["concurrency"] == 2
    # the source's word goes before the id's
    assert only({"silicon_data_source": "a; silicon_concurrency=16; b", "id": "x_c99_"}).concurrency == 16.0


def test_experts_where_the_label_cannot_be() -> None:
    sglang = EXPERTS | {"backend": "sglang", "backend_version": "", "tp_size": "4", "moe_tp_size": "4"}
    assert (only(sglang).tp, only(sglang).ep) == (4, 4)
    assert only(sglang | {"backend_version": "0.5.6"}).ep == 1
    minimax = DATED | FP8 | {"model_path": "MiniMaxAI/MiniMax-M2.5", "tp_size": "8", "moe_tp_size": "8"}
    found = cleaned(minimax)
    assert [(row.dtype, row.ep) for row in found.rows] == [("fp8_block", 8)]
    assert found.changed["experts"] == found.changed["format"] == 1
    assert only(minimax | {"tp_size": "4", "moe_tp_size": "4"}).ep == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "disagg"}, "disaggregated without worker counts"),
        ({"model_path": "acme/dense"}, "no preset: acme/dense"),
        ({"precision": "fp2"}, "no preset: Qwen/Qwen3-32B fp2"),
        ({"backend": "other"}, "engine other: Qwen/Qwen3-32B"),
        ({"system": "abacus"}, "no GPU of fastroof: abacus"),
        ({"id": "x_agg_4000x1000_c_tp2_1"}, "its concurrency is in no column"),
        (
            DATED | {"tp_size": "32", "moe_tp_size": "1", "moe_ep_size": "32"},
            "the GPUs of a disaggregated deployment, written as one engine's",
        ),
        (
            DATED | {"tp_size": "4", "moe_ep_size": "3"},
            "its layout contradicts itself: tp 4, dp 1, moe_tp 1, ep 3",
        ),
        (SPLIT | {"id": "x", "decode_batch_size": "0"}, "its concurrency is in no column"),
    ],
)
def test_what_cannot_be_represented_has_a_reason(change: dict[str, str], reason: str) -> None:
    found = cleaned({}, change, change)
    assert found.refused == {reason: 2}
    assert len(found.rows) == 1


# -- formats, versions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (FP8 | {"backend": "trtllm"}, {"kv_dtype": "fp8"}),
        (
            FP8 | LLAMA_70B | {"silicon_data_source": "source_file=2026-04-06.csv"},
            {"kv_dtype": "bf16", "length_factor": 0.9, "frontend": "", "bench": "inferencemax",
             "length_spread": 0.2},
        ),
        (DATED, {"dtype": "mxfp4", "model": "gpt-oss-120b", "measured_on": "2026-02-20"}),
        (
            FP8 | {"model_path": "deepseek-ai/DeepSeek-V3"},
            {"model": "deepseek-r1", "dtype": "fp8_block", "architecture": "deepseek-v3",
             "dataset": "vllm-0.12.0-deepseek-v3-fp8_block"},
        ),
        (
            {"backend_version": "", "silicon_data_source": "source_file=2026-01.csv measured=2025-10-29"},
            {"dataset": "vllm-qwen3-32b-bf16", "engine_version": "0.10.2"},
        ),
        ({"backend_version": ""}, {"dataset": "vllm-qwen3-32b-bf16", "engine_version": ""}),
        (
            FP8 | {"model_path": "nvidia/Llama-3.1-8B-Instruct-FP8"},
            {"model": "llama-3.1-8b", "checkpoint": "nvidia/Llama-3.1-8B-Instruct-FP8", "left_out": ""},
        ),
    ],
)  # fmt: skip
def test_what_the_sample_leaves_to_be_inferred(change: dict[str, str], found: dict[str, Any]) -> None:
    row = only(change)
    assert {name: getattr(row, name) for name in found} == found
    assert row.whole_model == row.architecture


def test_formats_are_counted_where_they_are_renamed() -> None:
    assert cleaned(FP8).changed["format"] == 0
    deepseek = FP8 | {"model_path": "deepseek-ai/DeepSeek-R1"}
    assert cleaned(deepseek).changed["format"] == 1
    assert cleaned(deepseek | {"gemm_quant_mode": "fp8_block"}).changed["format"] == 0


# -- one run in several rows ---------------------------------------------------------------------


def test_labels_of_one_run_are_one_row() -> None:
    run = FP8 | {"model_path": "deepseek-ai/DeepSeek-V3", "id": "third_c16_"}
    dated = {"silicon_data_source": "source_file=2026-03-01; silicon_concurrency=16"}
    dump = {"silicon_data_source": "db-dump/2026-04-27; silicon_concurrency=16"}
    found = cleaned(
        run | dated,
        run | {"model_path": "deepseek-ai/DeepSeek-R1", "id": "second_c16_", "silicon_tpot_ms": "12.2501"},
        run | dump | {"id": "first"},
        run | {"silicon_tpot_ms": "12.3"},
    )
    assert found.duplicates == found.changed["duplicate"] == 2
    # the database's row has the most columns; later files are cut at fewer digits
    assert [row.row for row in found.rows] == ["first", "third_c16_"]
    assert [row.also_as for row in found.rows] == ["deepseek-ai/DeepSeek-R1", ""]


def test_a_later_file_replaces_a_run() -> None:
    """A run of a file of March, which has fewer versions, is taken from another file that has it too."""
    march = DATED | {"id": "march", "silicon_data_source": DATED["silicon_data_source"]}
    april = DATED | {
        "id": "april",
        "silicon_data_source": march["silicon_data_source"].replace("03", "04", 1),
    }
    assert "2026-04-01" in april["silicon_data_source"]
    assert [row.row for row in cleaned(march, april).rows] == ["april"]
    assert [row.row for row in cleaned(april, march).rows] == ["april"]


@pytest.mark.parametrize("change", [{"isl": "2048"}, {"system": "h200_sxm"}, {"backend": "sglang"}])
def test_equal_times_of_other_configurations_are_other_runs(change: dict[str, str]) -> None:
    assert cleaned({}, change).duplicates == 0
    assert len(cleaned({}, change).rows) == 2


# -- disaggregated -------------------------------------------------------------------------------


def test_disaggregated_runs_have_their_workers() -> None:
    row = only(EXPERTS | SPLIT | {"silicon_data_source": "silicon_concurrency=77"})
    assert row.is_disaggregated
    assert (row.tp, row.dp, row.ep, row.decode_workers) == (1, 8, 8, 3)
    assert (row.prefill_workers, row.prefill_tp, row.prefill_dp, row.prefill_ep) == (2, 4, 1, 4)
    assert row.concurrency == 77.0
    assert row.dataset == "vllm-0.12.0-gpt-oss-120b-mxfp4-disaggregated"
    # what all decode ranks hold, where no number of clients is written
    assert only(EXPERTS | SPLIT | {"id": "x"}).concurrency == 5 * 8 * 3
    assert len(cleaned(EXPERTS, EXPERTS | SPLIT | {"isl": "1024"}).rows) == 2


# -- the file itself -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells() -> list[dict[str, str]]:
    try:
        path = installed_root() / SAMPLE_FILE
    except FastroofError as error:
        pytest.skip(str(error))
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_no_row_of_the_sample_is_lost(cells: list[dict[str, str]]) -> None:
    whole = clean_sample(cells, SYSTEMS)
    assert len(cells) == 5221 == len(whole.rows) + whole.duplicates + sum(whole.refused.values())
    assert len(whole.rows) >= 3000
    assert set(whole.changed) == {rule.name for rule in RULES}
    assert all(whole.changed.values())
    assert {row.gpu for row in whole.rows} == set(SAMPLE_GPUS)
    # one run, one row: no two runs measure the same microsecond
    times = [(row.gpu, row.engine, row.isl, row.osl, row.ttft_ms, row.tpot_ms) for row in whole.rows]
    assert len(set(times)) == len(times)
    by_gpu = Counter(row.gpu for row in whole.rows)
    for gpu in SAMPLE_GPUS:
        rows, left_out, _ = read_silicon_sample(gpu)
        assert len(rows) == by_gpu[gpu]
        in_file = sum(SYSTEMS[cell["system"]] == gpu for cell in cells)
        assert len(rows) + sum(entry.rows for entry in left_out) == in_file


@pytest.mark.slow
def test_every_run_can_be_laid_out(cells: list[dict[str, str]]) -> None:
    for row in clean_sample(cells, SYSTEMS).rows:
        assert row.engine in serving_engines()
        assert load_model(row.model).has_experts or row.ep == 1
        assert row.layout.world_size == row.tp * row.dp * row.pp
        assert row.kv_dtype_from in KV_DTYPE_FROM
        assert row.concurrency >= 1
        # no run has fewer clients than ranks
        assert row.is_disaggregated or row.concurrency >= row.dp


def test_a_file_is_cleaned_as_its_rows_are(tmp_path: Path) -> None:
    path = sample_file(tmp_path, {}, {"mode": "disagg"}, {}, {"system": "h200_sxm"})
    rows, left_out, changed = read_silicon_sample("h100", path)
    assert [row.row for row in rows] == [CELL["id"]]
    assert {entry.reason: entry.rows for entry in left_out} == {
        "disaggregated without worker counts": 1,
        "a run that another row has": 1,
    }
    assert changed["duplicate"] == 1
