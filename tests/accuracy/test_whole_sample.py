"""Runs of all GPUs in one report: its arithmetic, its form, what is left out of it, and what is refused."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from benchmarks.accuracy.judge import markdown_groups
from benchmarks.accuracy.measured import Measured
from benchmarks.accuracy.predicted_runs import predict_runs, with_drafts
from benchmarks.accuracy.rows import shipped_rows
from benchmarks.accuracy.run_kinds import (
    ACCEPTED,
    ADMISSION_LIMITED,
    DEFECTIVE,
    DISAGGREGATED,
    JUDGED,
    KINDS,
    kind_of,
)
from benchmarks.accuracy.validation import run_validation
from benchmarks.accuracy.whole_sample import (
    LARGE_GROUP,
    POOR,
    RunGroup,
    SampleValidation,
    measured_gpus,
    report_document,
    run_groups,
    totals_of,
    validate_gpus,
)
from fastroof.cli import app
from fastroof.errors import FastroofError, MissingTableError, TableError
from fastroof.evidence.predictions import Plans
from fastroof.evidence.rows import ServingRow
from fastroof.evidence.validation import FASTEST, INDEPENDENT, SPECULATIVE, Skipped


def few_rows(gpu: str) -> Measured:
    """Some runs of a GPU, of every data set that it has."""
    rows = shipped_rows(gpu)
    datasets = dict.fromkeys(row.dataset for row in rows)
    kept = [row for name in datasets for row in [r for r in rows if r.dataset == name][:12]]
    return Measured(tuple(kept))


@pytest.fixture(scope="module")
def report(h100: fastroof.Tables) -> SampleValidation:
    """A report on a part of H100's runs; b300 has no tables."""
    patch = pytest.MonkeyPatch()
    patch.setattr("benchmarks.accuracy.whole_sample.measured_on", few_rows)

    def load(gpu: str) -> fastroof.Tables:
        if gpu != "h100":
            raise MissingTableError(f"{gpu} has no tables: fastroof tables import would bring them")
        return h100

    with patch.context():
        found = validate_gpus(["h100", "b300"], load=load)
    patch.undo()
    return found


# -- nothing is lost -----------------------------------------------------------------------------


@pytest.mark.slow
def test_every_run_is_represented_or_has_a_reason(report: SampleValidation) -> None:
    known = len(few_rows("h100").rows) + len(few_rows("b300").rows)
    assert report.runs == known == report.represented + sum(report.left_out.values())
    assert set(report.absent) == {"b300"}
    why = f"b300: {report.absent['b300']}"
    assert "tables import" in why
    assert report.left_out[why] == len(few_rows("b300").rows)
    per_token = [time for time in report.times if time.quantity in ("tpot", "decode")]
    assert len(per_token) == report.represented
    assert len({(time.dataset, time.row) for time in per_token}) == report.represented


@pytest.mark.slow
def test_one_gpu_alone_equals_its_part_of_all(report: SampleValidation, h100: fastroof.Tables) -> None:
    alone = run_validation(few_rows("h100"), h100)
    (together,) = report.gpus
    assert together.rows == alone.rows
    assert together.left_out == alone.left_out


# -- the arithmetic ------------------------------------------------------------------------------


def test_groups_are_those_of_the_runs(report: SampleValidation) -> None:
    groups = report.groups()
    assert sum(group.rows for group in groups) == len(report.times)
    for group in groups:
        times = [
            time
            for time in report.times
            if (time.kind, time.gpu, time.engine, time.quantity)
            == (group.kind, group.gpu, group.engine, group.quantity)
            and group.model in (time.architecture, time.dataset)
            and (
                group.kind == INDEPENDENT or (time.engine_version, time.dtype) == (group.version, group.dtype)
            )
        ]
        errors = [time.predicted_ms / time.measured_ms - 1.0 for time in times]
        compared = [time for time in times if not math.isnan(time.aic_ms)]
        assert group.rows == len(times)
        assert group.mape == pytest.approx(fmean(map(abs, errors)))
        assert group.median == pytest.approx(median(map(abs, errors)))
        assert group.bias == pytest.approx(fmean(errors))
        assert group.mape <= group.p90 or group.rows == 1 or group.p90 >= group.median
        assert group.aic_rows == len(compared)
        if compared:
            theirs = [abs(time.aic_ms / time.measured_ms - 1.0) for time in compared]
            own = [abs(time.predicted_ms / time.measured_ms - 1.0) for time in compared]
            assert group.aic_mape == pytest.approx(fmean(theirs))
            assert group.compared_mape == pytest.approx(fmean(own))
        else:
            assert math.isnan(group.aic_mape)
    # the worst of each quantity and kind come first
    for one, two in pairwise(groups):
        if (one.quantity, one.kind) == (two.quantity, two.kind):
            assert one.mape >= two.mape
    assert run_groups(report.times, 5) == tuple(group for group in groups if group.rows >= 5)


def group(rows: int, mape: float, aic_mape: float = math.nan, kind: str = JUDGED) -> RunGroup:
    aic_rows = 0 if math.isnan(aic_mape) else rows
    return RunGroup(
        kind, "m", "h100", "vllm", "1", "fp8", "tpot", rows, mape, mape, mape, -mape, aic_rows, aic_mape,
        mape if aic_rows else math.nan, False,
    )  # fmt: skip


def test_totals_weigh_runs_and_groups() -> None:
    groups = [
        group(30, 0.1, 0.2),
        group(LARGE_GROUP, 0.3, 0.2),
        group(5, 0.9),
        group(99, 2.0, kind=DEFECTIVE),
    ]
    total = totals_of(groups)
    assert (total.rows, total.groups, total.compared_groups) == (45, 2, 2)
    assert total.mape == pytest.approx((3.0 + 3.0 + 4.5) / 45)
    assert total.bias == pytest.approx(-total.mape)
    assert total.median_of_groups == pytest.approx(0.2)
    assert total.ahead == 0.5
    assert total.aic_mape == pytest.approx(0.2)
    assert total.compared_mape == pytest.approx(6.0 / 40)
    assert total.poor == ("m h100 vllm 1 fp8",) * sum(one.mape > POOR for one in groups[:3])
    assert totals_of(groups, kinds=KINDS).rows == 144
    nothing = totals_of(groups, "ttft")
    assert nothing.rows == 0
    assert math.isnan(nothing.mape)
    assert math.isnan(nothing.ahead)


# -- kinds ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> ServingRow:
    rows = shipped_rows("h100")
    return next(row for row in rows if row.dataset == "vllm-0.12.0-qwen3-32b-bf16" and row.concurrency == 8)


def test_kinds_look_at_what_was_measured_and_at_lists(run: ServingRow) -> None:
    assert kind_of(run, "") == (JUDGED, "")
    assert kind_of(run, "it drafts") == (SPECULATIVE, "it drafts")
    assert kind_of(replace(run, ttft_ms=1e6), "")[0] == ADMISSION_LIMITED
    assert kind_of(replace(run, ttft_ms=1e6, engine="sglang", engine_version="0.5.9"), "")[0] == JUDGED
    assert kind_of(replace(run, decode_workers=1), "")[0] == DISAGGREGATED
    assert kind_of(replace(run, architecture=""), "")[0] == INDEPENDENT
    defective = replace(run, gpu="h200", architecture="minimax-m2.5", engine_version="0.16.0")
    assert defective.whole_model == "minimax-m2.5"
    assert kind_of(defective, "it drafts")[0] == DEFECTIVE


def test_a_kind_does_not_follow_the_prediction_on_trial(run: ServingRow, h100: fastroof.Tables) -> None:
    plans = Plans(h100)
    (plain,) = predict_runs([run], plans, lambda row: row.engine_profile, Skipped())
    slow = replace(run.engine_profile, costs=replace(run.engine_profile.costs, step_us=1e6))
    (slowed,) = predict_runs([run], plans, lambda row: slow, Skipped())
    assert slowed.prediction.tpot_ms > 10 * plain.prediction.tpot_ms
    assert (plain.kind, slowed.kind) == (JUDGED, JUDGED)
    kernels = run.engine_profile.kernels_alone()
    (bare,) = predict_runs([run], plans, lambda row: kernels, Skipped())
    fast = replace(run, tpot_ms=bare.prediction.tpot_ms * FASTEST * 0.99)
    assert [one.kind for one in predict_runs([fast], plans, lambda row: slow, Skipped())] == [SPECULATIVE]


def test_runs_that_draft_learn_from_other_groups(run: ServingRow, h100: fastroof.Tables) -> None:
    (plain,) = predict_runs([run], Plans(h100), lambda row: row.engine_profile, Skipped())
    accepted = ACCEPTED[4]
    drafting = tuple(plain.prediction._replace(tpot_ms=100.0 / tokens) for tokens in ACCEPTED)
    one = plain._replace(kind=SPECULATIVE, drafting=drafting, row=replace(run, tpot_ms=100.0 / accepted))
    other = one._replace(row=replace(one.row, gpu="h200", tpot_ms=100.0 / ACCEPTED[7]))
    found = with_drafts([one, plain, other])
    assert [round(settled.prediction.tpot_ms, 6) for settled in found[::2]] == [
        round(100.0 / ACCEPTED[7], 6),
        round(100.0 / accepted, 6),
    ]
    assert found[1] is plain
    # alone, the accepted tokens are unknown
    assert with_drafts([one]) == [one]


# -- its forms -----------------------------------------------------------------------------------


def test_json_has_the_fixed_form(report: SampleValidation) -> None:
    document: dict[str, Any] = report_document(report)
    assert set(document) == {
        "version", "engine", "leave_out", "gpus", "gpus_left_out", "rows", "runs",
        "represented", "left_out", "totals", "groups",
    }  # fmt: skip
    assert document["rows"] == document["represented"] + sum(document["left_out"].values())
    for one in document["groups"]:
        assert {
            "model", "gpu", "engine", "version", "dtype", "quantity", "rows", "mape", "median", "p90", "bias",
            "aic_rows", "aic_mape", "kind",
        } <= set(one)  # fmt: skip
    assert [(total["quantity"], total["kinds"]) for total in document["totals"]] == [
        (quantity, kinds) for quantity in ("tpot", "ttft") for kinds in ((JUDGED,), KINDS)
    ]


def test_markdown_has_a_row_a_group(report: SampleValidation) -> None:
    lines = markdown_groups(report, 5).splitlines()
    assert lines[0].startswith(f"{report.represented} of {report.runs} distinct runs, engine auto")
    first = next(i for i, line in enumerate(lines) if line.startswith("| model"))
    table = [line for line in lines[first:] if line.startswith("| ") and not line.startswith("| model")]
    assert len(table) == len(report.groups(5))
    assert len({line.count("|") for line in table}) == 1
    # above it all judged runs by GPU and engine
    rows = [line.split(" | ") for line in lines[:first] if line.startswith("| h100")]
    judged = [time for time in report.times if (time.quantity, time.kind) == ("tpot", JUDGED)]
    assert sum(int(cells[2]) for cells in rows) == len(judged)


def test_the_picture_shows_every_run(report: SampleValidation) -> None:
    pytest.importorskip("matplotlib")
    from fastroof.report.serving import PANELS, draw_validation

    drawn = draw_validation(report.together()).axes
    ours = [axes for axes in drawn if axes.get_title("left").endswith("fastroof")]
    # after the band
    shown = sum(len(np.asarray(points.get_offsets())) for axes in ours for points in axes.collections[1:])
    quantities = {quantity for panel in PANELS for quantity in panel.quantities}
    assert 0 < shown == sum(time.quantity in quantities for time in report.times)
    with pytest.raises(FastroofError, match="nothing to draw"):
        draw_validation(replace(report, gpus=()).together())


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["validate", *arguments], prog_name="fastroof")


def test_the_command(report: SampleValidation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def given(**options: Any) -> SampleValidation:
        calls.append(options)
        return report

    monkeypatch.setattr("benchmarks.accuracy.judge.validate_gpus", given)
    path = tmp_path / "runs.csv"
    done = command("--gpu", "all", "--json", "--csv", str(path), "--leave-one-version-out")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["runs"] == report.runs
    assert calls[0]["leave_out"] == "version"
    with path.open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["kind"] for row in written] == [time.kind for time in report.times]
    done = command("--gpu", "all", "--min-rows", "5")
    assert done.exit_code == 0, done.stderr
    assert f"{report.represented} of {report.runs} distinct runs" in done.stdout
    assert "b300 is left out" in done.stdout
    assert calls[1]["leave_out"] is None
    assert command("--gpu", "all", "--markdown").stdout == markdown_groups(report, 1) + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "all", "--leave-one-model-out", "--leave-one-gpu-out"), "one split at a time"),
        (("--gpu", "all", "--rows", "x.csv", "--by", "tp"), "--rows, --by need a single GPU"),
        (("--gpu", "all", "--json", "--markdown"), "exclude each other"),
        (("--gpu", "h100", "--leave-one-gpu-out"), "need --gpu all"),
        (("--min-rows", "3"), "need --gpu all"),
        (("--gpu", "all", "--leave-one-gpu-out", "--engine", "vllm"), "engine must be 'auto'"),
        (("--gpu", "abacus",), "abacus"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())


def test_unknown_gpus_and_splits_are_refused() -> None:
    assert {"h100", "h200", "b200", "b300", "gb200", "gb300"} <= set(measured_gpus())
    with pytest.raises(
        TableError, match=r"nothing was measured end to end on abacus; something was on .*h100"
    ):
        validate_gpus(["abacus"])
    with pytest.raises(TableError, match="one of model, gpu, version, bench, got 'day'"):
        validate_gpus(["h100"], leave_out="day")

    def absent(gpu: str) -> fastroof.Tables:
        raise MissingTableError(f"bring {gpu}")

    with pytest.raises(TableError, match="no GPU has tables: h100: bring h100"):
        validate_gpus(["h100"], load=absent)
