"""Predictions against measured serving: the report's arithmetic, what it counts, and how good it is."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from benchmarks.accuracy.aiconfigurator_estimates import AICONFIGURATOR
from benchmarks.accuracy.calibration import calibrate
from benchmarks.accuracy.judge import EPILOG
from benchmarks.accuracy.measured import Measured, measured_on
from benchmarks.accuracy.rows import shipped_rows, write_rows
from benchmarks.accuracy.validation import run_validation
from fastroof.cli import app
from fastroof.engines import EngineProfile, StepCosts
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.prediction_errors import GROUPINGS, ErrorGroup, PredictedTime, Validation
from fastroof.evidence.predictions import Plans, front_end_ms, predict_row
from fastroof.evidence.rows import LARGEST_STEP, ServingRow
from fastroof.evidence.steps.measured_steps import MeasuredStep
from fastroof.serving import estimate

VLLM_QWEN, VLLM_70B = "vllm-0.12.0-qwen3-32b-bf16", "vllm-llama-3.1-70b-fp8"
TRT_QWEN, TRT_8B = "trtllm-1.0.0rc3-qwen3-32b-fp8", "trtllm-1.0.0rc3-llama-3.1-8b-bf16"
SINGLE = "vllm-synchronous"
CHECKOUT = Path(__file__).resolve().parents[2]
FITTED = (VLLM_QWEN, VLLM_70B, TRT_QWEN, TRT_8B, SINGLE)


@pytest.fixture(scope="module")
def rows() -> tuple[ServingRow, ...]:
    return shipped_rows("h100")


@pytest.fixture(scope="module")
def auto(h100: fastroof.Tables) -> Validation:
    return run_validation(None, h100)


@pytest.fixture(scope="module")
def unseen(h100: fastroof.Tables) -> Validation:
    return run_validation(None, h100, leave_one_model_out=True)


def groups(report: Validation) -> dict[tuple[str, str], ErrorGroup]:
    """Groups of judged runs, and of runs from sources outside the sample."""
    kinds = ("judged", "independent")
    return {(group.dataset, group.quantity): group for group in report.errors() if group.kind in kinds}


def some(rows: tuple[ServingRow, ...], dataset: str, count: int = 1) -> list[ServingRow]:
    return [row for row in rows if row.dataset == dataset and not row.left_out][:count]


# -- how good it is ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dataset", FITTED)
def test_time_per_token_of_unseen_models_is_within_the_targets(unseen: Validation, dataset: str) -> None:
    quantity = "decode" if dataset == SINGLE else "tpot"
    found = groups(unseen)[dataset, quantity]
    # costs are fitted without the model, on H100. TensorRT-LLM has none, as three models do not show them,
    # and kernels of 1.3 stand for those of 1.0.0rc3: whole runs are 14.7 % too short (TRT_8B 11.2 -> 15.2 %)
    assert found.mape <= {SINGLE: 0.06, TRT_QWEN: 0.12, TRT_8B: 0.16, VLLM_QWEN: 0.09}.get(dataset, 0.07)
    assert found.aic_rows == found.rows
    # three groups are behind it where nothing is chosen by the rows that judge
    assert found.mape <= found.aic_mape or dataset in (TRT_QWEN, TRT_8B, VLLM_70B)
    assert not found.fitted


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [VLLM_QWEN, VLLM_70B, TRT_QWEN])
def test_time_to_first_token_is_within_the_target(unseen: Validation, dataset: str) -> None:
    found = groups(unseen)[dataset, "ttft"]
    # of Qwen3-32B 0.24 by arrivals at random moments: that wait stands in for what a bench adds
    assert found.mape <= {VLLM_70B: 0.20, VLLM_QWEN: 0.30}.get(dataset, 0.25)
    assert found.mape <= found.aic_mape


@pytest.mark.slow
@pytest.mark.release
def test_what_engines_add_matters(auto: Validation, h100: fastroof.Tables) -> None:
    kernels = groups(run_validation(None, h100, engine="kernels"))
    for key, found in groups(auto).items():
        if key[0] in FITTED and key[1] != "ttft":
            assert found.fitted
            # TensorRT-LLM has no costs, only its front end
            assert found.mape < kernels[key].mape or key[0] in (TRT_QWEN, TRT_8B)
            assert not kernels[key].fitted


# -- nothing is dropped --------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["auto", pytest.param("unseen", marks=pytest.mark.slow)])
def test_every_row_is_judged_or_counted(
    which: str, rows: tuple[ServingRow, ...], request: pytest.FixtureRequest
) -> None:
    report: Validation = request.getfixturevalue(which)
    measured = measured_on("h100")
    assert len(measured.rows) == len(rows)
    judged = Counter(row.dataset for row in report.rows if row.quantity != "ttft")
    left_out, without_ttft = Counter[str](), Counter[str]()
    for entry in report.left_out:
        assert entry.reason
        (without_ttft if entry.quantity else left_out)[entry.source] += entry.rows
    for dataset, count in Counter(row.dataset for row in rows).items():
        assert judged[dataset] + left_out[dataset] == count
        ttft = [row for row in report.rows if (row.dataset, row.quantity) == (dataset, "ttft")]
        assert len(ttft) + without_ttft[dataset] == judged[dataset]
    refused = tomllib.loads((CHECKOUT / "bench_data/h100/serving/silicon_sample.toml").read_text("utf-8"))
    assert left_out["silicon_sample"] == sum(refused["left_out"].values()) > 0


def test_what_cannot_be_predicted_is_counted_with_its_reason(
    rows: tuple[ServingRow, ...], h100: fastroof.Tables
) -> None:
    (row,) = some(rows, VLLM_QWEN)
    (single,) = some(rows, SINGLE)
    report = run_validation(
        Measured(
            (
                row,
                replace(row, gpu="h200"),
                replace(row, model="qwen4"),
                replace(row, isl=1e6),
                replace(single, concurrency=2.0),
                replace(row, left_out="a bad day"),
                replace(row, ttft_ms=math.nan),
            ),
            (MeasuredStep("llama-3.1-8b", "h200", 1, "bf16", "bf16", "decode", (1,), (99,), 5e3),),
        ),
        h100,
    )
    assert [judged.quantity for judged in report.rows] == ["tpot", "tpot", "ttft"]
    reasons = " | ".join(entry.reason for entry in report.left_out)
    for words in (
        "measured on h200, the tables are of h100", "unknown model 'qwen4'", "does not fit", "a bad day",
        "a prefix cache with more than one client is not modelled",
    ):  # fmt: skip
        assert words in reasons
    assert sum(entry.rows for entry in report.left_out) == 6


# -- predictions ---------------------------------------------------------------------------------


def test_rows_are_predicted_by_the_estimate(rows: tuple[ServingRow, ...], h100: fastroof.Tables) -> None:
    plans = Plans(h100)
    for dataset, options in (
        (VLLM_70B, {"requests_per_client": 10.0}),
        (TRT_QWEN, {"requests_per_client": 10.0, "chunked_prefill": False, "kv_reservation": "full"}),
    ):
        (row,) = some(rows, dataset)
        if row.max_num_batched_tokens:
            options |= {
                "max_num_batched_tokens": row.max_num_batched_tokens,
                "max_num_seqs": row.max_num_seqs or None,
            }
        options |= {"length_spread": row.length_spread}
        plan = plans.get(row, row.engine_profile)
        assert plan is plans.get(replace(row, isl=9.0), row.engine_profile)
        lengths = (row.isl * row.length_factor, row.osl * row.length_factor)
        wanted = estimate(plan, *lengths, row.concurrency, **options)
        found = predict_row(row, plan)
        assert (found.ttft_ms, found.tpot_ms) == (wanted.ttft_ms, wanted.tpot_ms)


def test_one_client_is_a_mean_decode_step(rows: tuple[ServingRow, ...], h100: fastroof.Tables) -> None:
    (row,) = some(rows, SINGLE)
    plan = fastroof.compile_plan(row.model, "h100", h100, engine="vllm", max_num_batched_tokens=LARGEST_STEP)
    found = predict_row(row, plan)
    middle_us = plan.decode_us(1, round(row.isl + (row.osl + 1) / 2))
    assert found.tpot_ms == pytest.approx(middle_us / 1e3, rel=2e-3)
    front_ms = front_end_ms(plan.profile.front_end, row)
    assert found.ttft_ms == pytest.approx(plan.prefill_us(70, 284) / 1e3 + front_ms)


def test_ttft_is_behind_the_front_end(auto: Validation, h100: fastroof.Tables) -> None:
    row = next(row for row in shipped_rows("h100") if row.dataset == VLLM_QWEN)
    judged = next(found for found in auto.rows if (found.row, found.quantity) == (row.row, "ttft"))
    assert judged.clock == row.clock == "client"
    plans = Plans(h100)
    predicted = predict_row(row, plans.get(row, row.engine_profile))
    assert judged.predicted_ms == predicted.ttft_ms
    # by the engine's own clock there is none
    inside = replace(row, clock="engine")
    own = predict_row(inside, plans.get(inside, row.engine_profile))
    # equal requests that are on their way let fewer prompts into the steps of others
    assert own.tpot_ms == pytest.approx(predicted.tpot_ms, rel=0.05)
    added_ms = front_end_ms(row.on_its_clock(row.engine_profile).front_end, row)
    assert own.ttft_ms < predicted.ttft_ms - 0.5 * added_ms


def test_steps_are_predicted_by_kernels_alone(h100: fastroof.Tables) -> None:
    mixed = MeasuredStep(
        "llama-3.1-8b", "h100", 1, "bf16", "bf16", "mixed", (1, 1, 512), (1023, 1023, 0), 1e4
    )
    decode = replace(mixed, phase="decode", new_tokens=(1, 1), context_len=(1023, 1023))
    many = replace(mixed, phase="unequal", new_tokens=(1,) * 6, context_len=(1, 2, 3, 4, 5, 6))
    report = run_validation(Measured((), (mixed, decode, many)), h100)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    first, second, third = report.rows
    assert first.predicted_ms == plan.step_us(fastroof.StepBatch.from_requests([mixed.requests]))[0] / 1e3
    assert second.predicted_ms == plan.decode_us(2, 1024) / 1e3
    assert (first.quantity, first.row, first.isl, first.concurrency) == (
        "mixed",
        "2x1@1023 512@0",
        514.0,
        3.0,
    )
    assert third.row == "1@1 1@2 1@3 1@4 ..."
    assert [(group.dataset, group.quantity) for group in report.errors(["isl", "concurrency"])] == [
        ("steps", "mixed"), ("steps", "decode"), ("steps", "unequal"),
    ]  # fmt: skip


# -- the report ----------------------------------------------------------------------------------


def test_errors_are_those_of_the_rows(auto: Validation) -> None:
    for by in ((), ("tp",), ("model", "tp", "engine_version")):
        found = auto.errors(by)
        assert sum(group.rows for group in found) == len(auto.rows)
        for group in found:
            errors = [
                (
                    row.measured_ms / row.predicted_ms
                    if row.quantity == "throughput"
                    else row.predicted_ms / row.measured_ms
                )
                - 1.0
                for row in auto.rows
                if (row.dataset, row.quantity, row.kind) == (group.dataset, group.quantity, group.kind)
                and all(getattr(row, name) == value for name, value in group.values.items())
            ]
            size = [abs(error) for error in errors]
            assert (list(group.values), group.rows) == (list(by), len(errors))
            assert group.mape == pytest.approx(fmean(size))
            assert group.median == pytest.approx(median(size))
            assert group.p90 == pytest.approx(np.quantile(size, 0.9))
            assert group.bias == pytest.approx(fmean(errors))
    judged = [g for g in auto.errors(["tp"]) if (g.dataset, g.quantity, g.kind) == (TRT_8B, "tpot", "judged")]
    assert [g.values["tp"] for g in judged] == [
        1, 2, 4, 8,
    ]  # fmt: skip


def test_peer_errors_are_of_the_rows_that_it_answered(
    rows: tuple[ServingRow, ...], h100: fastroof.Tables
) -> None:
    one, two = some(rows, VLLM_QWEN, 2)
    report = run_validation(Measured((one, replace(two, aic_tpot_ms=math.nan))), h100)
    found = groups(report)[VLLM_QWEN, "tpot"]
    assert (found.rows, found.aic_rows) == (2, 1)
    assert found.aic_bias == one.aic_tpot_ms / one.tpot_ms - 1.0
    neither = run_validation(Measured((replace(one, aic_tpot_ms=math.nan),)), h100)
    assert math.isnan(groups(neither)[VLLM_QWEN, "tpot"].aic_mape)


def test_one_data_set_by_its_name(h100: fastroof.Tables) -> None:
    assert {row.dataset for row in run_validation(SINGLE, h100).rows} == {SINGLE}


@pytest.mark.slow
@pytest.mark.release
def test_the_same_report_each_time(auto: Validation, h100: fastroof.Tables) -> None:
    assert repr(run_validation(None, h100)) == repr(auto)


@pytest.mark.slow
def test_rows_that_constants_were_fitted_to_are_marked(
    auto: Validation, unseen: Validation, rows: tuple[ServingRow, ...], h100: fastroof.Tables
) -> None:
    for row in auto.rows:
        if row.quantity == "ttft" or row.dataset in FITTED:
            assert row.fitted == (row.quantity != "ttft")
    assert not any(row.fitted for row in unseen.rows)
    own = Measured((replace(some(rows, VLLM_QWEN)[0], dataset="mine"),))
    assert not any(row.fitted for row in run_validation(own, h100).rows)


@pytest.mark.slow
def test_unseen_rows_are_predicted_by_the_fit_without_their_model(
    unseen: Validation, rows: tuple[ServingRow, ...], h100: fastroof.Tables
) -> None:
    without = calibrate(rows, h100, "vllm-0.12", resamples=0, splits=("model",))
    for dataset in (VLLM_70B, SINGLE):
        (row,) = some(rows, dataset)
        wanted = predict_row(row, Plans(h100).get(row, without.profile_without(row))).tpot_ms
        found = next(one for one in unseen.rows if one.row == row.row and one.quantity != "ttft")
        assert found.predicted_ms == wanted


def test_one_profile_for_all(rows: tuple[ServingRow, ...], h100: fastroof.Tables, tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text("[costs]\nstep_us = 5000.0\n")
    (row,) = some(rows, SINGLE)
    kernels = run_validation(Measured((row,)), h100, engine="kernels")
    words: list[str] = []
    for given in (path, EngineProfile("slow", costs=StepCosts(step_us=5000.0))):
        slow = run_validation(Measured((row,)), h100, engine=given, progress=words.append)
        assert slow.engine == slow.rows[0].profile == "slow"
        assert slow.rows[0].predicted_ms == pytest.approx(kernels.rows[0].predicted_ms + 5.0)
    assert words == ["predicting 1 rows"] * 2


def test_invalid_validations_are_refused(
    auto: Validation, h100: fastroof.Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call, words in (
        (lambda: run_validation(["vllm"], h100), r"no data set 'vllm'; there is sglang-.*, vllm-synchronous"),
        (lambda: run_validation(Measured(()), h100), "nothing was measured end to end on h100"),
        (lambda: run_validation(None, h100, engine="vlm"), "unknown engine 'vlm'; did you mean vllm"),
        (
            lambda: run_validation(None, h100, engine="vllm", leave_one_model_out=True),
            "must be 'auto', got 'vllm'",
        ),
        (lambda: auto.errors(["tq"]), "errors can be grouped by model, tp, .*, got tq"),
    ):
        with pytest.raises(FastroofError, match=words):
            call()
    monkeypatch.setattr("benchmarks.accuracy.validation.measured_on", lambda gpu: Measured(()))
    with pytest.raises(TableError, match="give rows of it, or install"):
        run_validation(None, h100)


def test_a_live_peer_replaces_what_ships(
    rows: tuple[ServingRow, ...], h100: fastroof.Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_peer_times(given: Any) -> tuple[tuple[ServingRow, ...], dict[str, int]]:
        return tuple(replace(row, aic_tpot_ms=1.0) for row in given), {}

    monkeypatch.setattr("benchmarks.accuracy.validation.with_aiconfigurator_estimates", with_peer_times)
    words: list[str] = []
    report = run_validation(
        Measured(tuple(some(rows, SINGLE))), h100, with_aiconfigurator=True, progress=words.append
    )
    assert report.rows[0].aic_ms == 1.0
    assert f"querying {AICONFIGURATOR}" in words


# -- the command line ----------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["validate", *arguments], prog_name="fastroof")


@pytest.mark.slow
def test_the_command_prints_a_table(auto: Validation) -> None:
    done = command("--dataset", VLLM_70B, "--dataset", SINGLE, "--by", "tp")
    assert done.exit_code == 0, done.stderr
    assert "predicting 58 rows" not in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    for group in auto.errors(["tp"]):
        if (group.dataset, group.quantity) == (VLLM_70B, "tpot"):
            cells = [f"{group.mape:.1%}", f"{group.median:.1%}", f"{group.p90:.1%}", f"{group.bias:+.1%}"]
            start = ["tpot", VLLM_70B, str(group.values["tp"]), group.kind, str(group.rows)]
            assert any(line[:5] == start and line[5:9] == cells for line in lines)
    assert f"6  {SINGLE}: approximate" in done.stdout
    # a run whose KV cache is full has a TTFT too, in the table of all
    assert "not judged: 6 rows\n" in done.stdout


@pytest.mark.slow
def test_the_command_prints_what_it_did_not_judge(auto: Validation) -> None:
    done = command()
    assert done.exit_code == 0, done.stderr
    not_judged = sum(entry.rows for entry in auto.left_out if not entry.quantity)
    assert f"not judged: {not_judged} rows\n" in done.stdout
    assert "silicon_sample: disaggregated without worker counts" in done.stdout


def test_json_and_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    done = command("--dataset", SINGLE, "--json", "--csv", str(path))
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    for key in (*found, *found["groups"][0], *found["left_out"][0]):
        assert key in EPILOG
    assert found["groups"][0]["mape"] < 0.05
    with path.open(encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    assert list(cells[0]) == [*PredictedTime._fields, "error", "aic_error"]
    errors = [abs(float(cell["error"])) for cell in cells if cell["quantity"] == "decode"]
    assert found["groups"][0]["mape"] == pytest.approx(fmean(errors))


@pytest.mark.slow
def test_own_rows_and_steps(rows: tuple[ServingRow, ...], tmp_path: Path) -> None:
    mine = write_rows(
        tmp_path / "mine.csv", [replace(some(rows, VLLM_QWEN)[0], dataset="mine", aic_tpot_ms=math.nan)]
    )
    steps = tmp_path / "steps.csv"
    steps.write_text(
        "model,gpu,tp,dtype,kv_dtype,phase,new_tokens,context_len,latency_us\n"
        "llama-3.1-8b,h100,1,bf16,bf16,decode,1x8,1023x8,8000\n"
    )
    done = command("--rows", str(mine), "--steps", str(steps), "--json", "--engine", "vllm")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["groups"]
    assert [(group["dataset"], group["quantity"]) for group in found] == [
        ("mine", "tpot"), ("mine", "ttft"), ("steps", "decode"),
    ]  # fmt: skip
    assert found[0]["aic_mape"] is None
    done = command("--rows", str(mine), "--steps", str(steps), "--dataset", "steps")
    assert done.exit_code == 0, done.stderr
    assert "mine" not in done.stdout


def test_all_rows_left_out(rows: tuple[ServingRow, ...], tmp_path: Path) -> None:
    mine = write_rows(tmp_path / "mine.csv", [replace(rows[0], left_out="a bad day")])
    done = command("--rows", str(mine), "--csv", str(tmp_path / "out.csv"))
    assert done.exit_code == 0, done.stderr
    assert "nothing could be judged" in done.stdout
    assert "1  sglang-0.5.1.post1-qwen3-32b-bf16: a bad day" in done.stdout
    refused = command("--rows", str(mine), "--plot", str(tmp_path / "out.png"))
    assert refused.exit_code == 2
    assert "has no rows" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dataset", "vllm"), "no data set 'vllm'; there is"),
        (("--peer", "vidur"), "--peer is aiconfigurator, got 'vidur'"),
        (("--gpu", "mi300x"), "mi300x has no measured tables, and no public package has any: pass a folder"),
        (("--gpu", "h20"), "nothing was measured end to end on h20: give rows of it"),
        (("--by", "tp,size"), f"grouped by {', '.join(GROUPINGS)}, got size"),
        (("--rows", "none.csv"), "none.csv: cannot be read as serving rows"),
        (("--plot", "picture.pdf"), "picture.pdf must end in .png or .svg"),
    ],
)
def test_wrong_commands_name_valid_values(arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]


# -- the picture ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.release
def test_the_picture_shows_every_row(auto: Validation, unseen: Validation, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install fastroof[report]")
    from fastroof.report import save_figure
    from fastroof.report.serving import draw_validation

    figure = draw_validation(auto)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:2] == ["Time per output token: fastroof", "Time to first token: fastroof"]
    assert "Time per output token: aiconfigurator-core" in titles
    for axes, quantity in zip(figure.axes, ("tpot", "ttft"), strict=False):
        points = np.concatenate([c.get_offsets() for c in axes.collections[1:]])
        kinds = {"tpot": ("tpot", "decode"), "ttft": ("ttft",)}[quantity]
        rows = [row for row in auto.rows if row.quantity in kinds and row.dataset != "steps"]
        assert len(points) == len(rows)
        assert {tuple(p) for p in points} == {(row.measured_ms, row.predicted_ms) for row in rows}
        legend = axes.get_legend()
        assert legend is not None
        labels = [text.get_text() for text in legend.get_texts()]
        mape = float(np.mean([abs(row.error) for row in rows if row.dataset == VLLM_70B]))
        fitted = ", fitted" if quantity == "tpot" else ""
        assert any(
            label.startswith(f"{VLLM_70B} [{mape:.1%}") and label.endswith(f"{fitted}]") for label in labels
        )
    figure.draw_without_rendering()
    for legend in filter(None, (axes.get_legend() for axes in figure.axes)):
        box = legend.get_window_extent()
        assert box.y0 >= 0.0
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert "without each row's model" in "".join(t.get_text() for t in draw_validation(unseen).texts)
    for name in ("one.png", "two.png"):
        save_figure(draw_validation(auto), tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


@pytest.mark.slow
def test_steps_have_a_panel_of_their_own(h100: fastroof.Tables, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install fastroof[report]")
    from fastroof.report.serving import draw_validation

    step = MeasuredStep("llama-3.1-8b", "h100", 1, "bf16", "bf16", "decode", (1,), (1023,), 6e3)
    one = draw_validation(run_validation(Measured((), (step,)), h100))
    assert [axes.get_title(loc="left") for axes in one.axes] == ["Whole steps: fastroof"]
    single = some(shipped_rows("h100"), SINGLE)
    both = draw_validation(run_validation(Measured(tuple(single), (step,)), h100))
    assert len(both.axes) == 6
    assert [text.get_text() for text in both.axes[5].texts] == ["no predictions by aiconfigurator-core"]
    path = tmp_path / "picture.svg"
    done = command("--dataset", SINGLE, "--plot", str(path))
    assert done.exit_code == 0, done.stderr
    assert path.read_text().startswith("<?xml")
