"""Runs that are faster than their own kernels: which they are, and what is accepted in them."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.accuracy.rows import shipped_rows
from benchmarks.accuracy.run_kinds import (
    ACCEPTED,
    ADMISSION_LIMITED,
    accepted_without,
    drafts_of,
    kind_of,
    speculative_runs,
)
from fastroof.evidence.predictions import Plans
from fastroof.evidence.rows import ServingRow
from fastroof.evidence.validation import FASTEST, is_waiting, kernels_ms, series_of
from fastroof.tables import Tables


@pytest.fixture(scope="module")
def row() -> ServingRow:
    first = next(row for row in shipped_rows("h100") if row.tp == 2)
    return dataclasses.replace(
        first, dataset="trtllm-deepseek-v3", engine="trtllm", engine_version="1.1.0",
        architecture="deepseek-v3", tpot_ms=10.0, dp=1,
    )  # fmt: skip


def test_a_run_that_is_faster_than_its_kernels_is_named(row: ServingRow) -> None:
    slow, slower, fast = dataclasses.replace(row, isl=4096.0), dataclasses.replace(row, isl=8192.0), row
    kernels_ms = [10.0 / (FASTEST - 0.01), 10.0 / (FASTEST + 0.01), 10.0]
    reasons = speculative_runs([fast, slow, slower], kernels_ms)
    assert "less than 0.7" in reasons[0]
    assert reasons[1:] == ["", ""]


def test_a_data_set_that_mostly_speculates_counts_as_speculative(row: ServingRow) -> None:
    """Runs of another data set, or of another GPU, do not count with them."""
    runs = [dataclasses.replace(row, isl=isl) for isl in (512.0, 1024.0, 2048.0, 4096.0)]
    assert len({series_of(one) for one in runs}) == 4
    most, few = [20.0, 20.0, 10.0, 10.0], [20.0, 10.0, 10.0, 10.0]
    reasons = speculative_runs(runs, most)
    assert all("its own kernels" in reason for reason in reasons[:2])
    assert all("most of its data set" in reason for reason in reasons[2:])
    assert [bool(reason) for reason in speculative_runs(runs, few)] == [True, False, False, False]
    for other in ({"dataset": "another"}, {"gpu": "h200"}):
        runs[3] = dataclasses.replace(row, isl=4096.0, **other)
        assert [bool(reason) for reason in speculative_runs(runs, most)] == [True, True, True, False]


def test_a_series_that_mostly_speculates_counts_as_speculative(row: ServingRow) -> None:
    series = [dataclasses.replace(row, concurrency=float(clients)) for clients in (4, 8, 16)]
    assert [bool(reason) for reason in speculative_runs(series, [20.0, 20.0, 10.0])] == [True, True, True]
    assert [bool(reason) for reason in speculative_runs(series, [20.0, 10.0, 10.0])] == [True, False, False]
    # another date is another launch
    later = [dataclasses.replace(one, measured_on="2026-02-01") for one in series]
    reasons = speculative_runs([*series[:2], *later], [20.0, 20.0, 10.0, 10.0, 10.0])
    assert [bool(reason) for reason in reasons] == [True, True, False, False, False]
    assert len({series_of(one) for one in (*series, *later)}) == 2


def test_a_run_that_waits_is_compared_with_the_requests_that_decode_at_once(h100: Tables) -> None:
    """Runs of Qwen3-32B whose requests mostly wait: a decode step has a few of them."""
    plans = Plans(h100)
    waited = [
        row for row in shipped_rows("h100")
        if (row.engine_version, row.model, row.dtype, row.tp) == ("0.5.8.post1", "qwen3-32b", "bf16", 1)
        and is_waiting(row)
    ]  # fmt: skip
    every = [kernels_ms(dataclasses.replace(row, ttft_ms=math.nan), plans) for row in waited]
    # two are faster than the kernels of all clients at once
    assert [bool(reason) for reason in speculative_runs(waited, every)].count(True) == 2
    reasons = speculative_runs(waited, [kernels_ms(row, plans) for row in waited])
    assert [kind_of(*one)[0] for one in zip(waited, reasons, strict=True)] == [ADMISSION_LIMITED] * 6


def test_recipes_mark_speculative_runs_that_times_do_not(row: ServingRow) -> None:
    known = dataclasses.replace(
        row, engine_version="1.2.0rc6.post3", gpu="b200", dtype="fp8_block", bench="inferencemax"
    )
    assert "recipe" in speculative_runs([known], [10.0])[0]
    assert speculative_runs([row], [math.nan]) == [""]
    assert speculative_runs([dataclasses.replace(known, bench="dynamo")], [10.0]) == [""]


def test_labels_mark_runs_with_drafts_if_an_image_ran_both(row: ServingRow) -> None:
    both = dataclasses.replace(
        row, engine_version="1.1.0rc2.post2", gpu="h200", dtype="fp8_block", bench="inferencemax",
        checkpoint="deepseek-ai/DeepSeek-R1",
    )  # fmt: skip
    plain = dataclasses.replace(both, also_as="deepseek-ai/DeepSeek-V3", isl=4096.0)
    reasons = speculative_runs([both, plain], [10.0, 10.0])
    assert "label" in reasons[0]
    assert reasons[1] == ""
    # without a run that has the label nothing is known
    assert speculative_runs([both], [10.0]) == [""]
    drafts = drafts_of(
        dataclasses.replace(both, engine="sglang", engine_version="0.5.9", gpu="b200", tp=8), 2.2
    )
    assert drafts is not None
    assert drafts.num_draft_tokens == 2


def test_what_is_drafted_follows_attention(row: ServingRow) -> None:
    of_tp, of_dp = drafts_of(row, 2.2), drafts_of(dataclasses.replace(row, dp=8), 2.2)
    assert of_tp is not None
    assert of_dp is not None
    assert (of_tp.num_draft_tokens, of_tp.acceptance_length) == (3, 2.2)
    assert (of_dp.num_draft_tokens, of_dp.acceptance_length) == (1, 2.0)
    assert drafts_of(dataclasses.replace(row, architecture="qwen3-32b"), 2.2) is None


def test_what_is_accepted_comes_from_other_groups(row: ServingRow) -> None:
    # two groups, whose runs would be met at 1.5 and 2.5 accepted tokens
    best = {"h200": 1.5, "b200": 2.5}
    runs = [dataclasses.replace(row, gpu=gpu, concurrency=c) for gpu in best for c in (4.0, 8.0)]

    def predict(run: ServingRow, accepted: float) -> float:
        return run.tpot_ms * best[run.gpu] / accepted

    assert accepted_without(runs, predict) == [2.5, 2.5, 1.5, 1.5]
    assert np.isnan(accepted_without(runs[:2], predict)).all()
    assert accepted_without([], predict) == []
    assert {1.5, 2.5} <= set(ACCEPTED)
