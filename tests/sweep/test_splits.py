"""Sweeps over how a model is split: pipeline stages, ranks of attention data parallelism, experts."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from fastroof import run_sweep
from fastroof.errors import SweepError
from fastroof.models.execution import AUTO
from fastroof.sweep import best_deployments, load_spec

LOAD = {"isl": 1000, "osl": 100, "clients": [8, 64], "keep": "all", "engine": "kernels"}
TIMES = ("ttft_ms", "tpot_ms", "tokens_per_s", "tokens_per_s_per_gpu", "decode_step_ms", "kv_share")


def rows(spec, tmp_path):
    run_sweep(spec, tmp_path / "rows.parquet")
    return pq.read_table(tmp_path / "rows.parquet").to_pylist()


def test_ranks_of_a_dense_model_are_replicas(tmp_path):
    spec = {"models": ["llama-3.1-8b"], "tp": [2], **LOAD}
    ranks = rows({**spec, "dp": [4], "replicas": 1}, tmp_path)
    replicas = rows({**spec, "replicas": 4}, tmp_path)
    assert len(ranks) == len(replicas) == 2
    for one, other in zip(ranks, replicas, strict=True):
        assert (one["dp"], one["replicas"], one["total_gpus"]) == (4, 1, 8)
        assert (other["dp"], other["replicas"], other["total_gpus"]) == (1, 4, 8)
        assert [one[name] for name in TIMES] == [other[name] for name in TIMES]


def test_steps_of_ranks_are_those_of_one_and_their_tokens_of_all(tmp_path):
    spec = {"models": ["llama-3.1-8b"], "batch_size": [1, 16], "kv_len": 2048, "keep": "all"}
    one, two = (rows({**spec, "dp": dp}, tmp_path) for dp in (1, 2))
    for alone, of_two in zip(one, two, strict=True):
        assert of_two["step_us"] == alone["step_us"]
        assert of_two["tokens_per_s"] == pytest.approx(2 * alone["tokens_per_s"], rel=1e-12)
        assert of_two["tokens_per_s_per_gpu"] == pytest.approx(alone["tokens_per_s_per_gpu"], rel=1e-12)


def test_splits_that_a_model_cannot_have_are_counted(tmp_path):
    spec = {"models": ["llama-3.1-8b"], "tp": [1, 2], "ep": [1, 2], "batch_size": 4, "kv_len": 1024}
    summary = run_sweep(spec, tmp_path / "steps.parquet")
    assert summary.plans == 2
    assert any("no experts to split" in why for why in summary.skipped["cannot be split"])


def test_every_split_is_a_choice():
    spec = {"models": ["llama-3.1-8b"], "tp": [1], "dp": [1, 2], "total_gpus": 2, **LOAD, "clients": 32}
    (answer,) = best_deployments({**spec, "keep": "best"}).answers
    assert {(choice.row["dp"], choice.row["replicas"]) for choice in answer.choices} == {(1, 2), (2, 1)}
    assert {choice.row["routing"] for choice in answer.choices} == {"none"}


def test_sizes_and_routings_are_checked():
    spec = {"models": ["llama-3.1-8b"], "batch_size": 1, "kv_len": 1024}
    assert [split.dp for _, split in load_spec({**spec, "dp": [1, 8]}).splits] == [1, 8]
    assert load_spec(spec).splits == ((1, (1, 1, 1, AUTO)),)
    with pytest.raises(SweepError, match="pp"):
        load_spec({**spec, "pp": 0})
    # groups that do not divide the GPUs of a stage are no layouts
    splits = load_spec({**spec, "tp": [1, 2], "ep": [1, 2]}).splits
    assert [(tp, split.ep) for tp, split in splits] == [(1, 1), (2, 1), (2, 2)]
    with pytest.raises(SweepError, match="3 divides none of the tp x dp GPUs"):
        load_spec({**spec, "ep": 3})
    with pytest.raises(SweepError, match="routing"):
        load_spec({**spec, "routing": "zipf"})
