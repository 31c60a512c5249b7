"""Runs of your own engine: few of them fit few costs, and errors are those of unseen runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from benchmarks.accuracy.measured import Measured
from benchmarks.accuracy.validation import run_validation
from fastroof.cli import app
from fastroof.cli.validate import EPILOG
from fastroof.engines import StepCosts, load_engine
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.few_runs import CANDIDATES, candidates_of, fit_few_runs, learning_curve
from fastroof.evidence.kernel_times import KernelTimes, predicted_us
from fastroof.evidence.own_fit import fit_own_runs
from fastroof.evidence.own_runs import read_own_runs
from fastroof.evidence.prediction_errors import verdicts
from fastroof.evidence.profile_file import profile_text
from fastroof.evidence.validation import validate_own
from fastroof.serving import estimate
from tests.command_line import good

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
PACKAGED = {"step_us": 633.0, "sequence_us": 47.8}


def kernels(runs: int, seed: int) -> KernelTimes:
    """Kernels of made-up runs, and no measured times yet."""
    generator = np.random.default_rng(seed)
    sequences = np.exp(generator.uniform(0.0, 5.5, runs)).round()
    decode, ones = 4000.0 + 60.0 * sequences, np.ones(runs)
    share = generator.uniform(0.0, 0.5, runs)
    known = {
        "measured_us": ones,
        "decode_us": decode,
        "mixed_us": 3.0 * decode,
        "decode_sequences": sequences,
        "mixed_sequences": sequences,
        "mixed_share": share,
        "decode_steps": 1.0 - share,
        "mixed_steps": share,
        "num_layers": 32.0 * ones,
        "num_allreduces": 64.0 * ones,
        "vocab": 128_256.0 * ones,
        "num_kernels": 400.0 * ones,
    }
    return KernelTimes(**{name: known[name] for name in KernelTimes._fields if name in known})


def measured(times: KernelTimes, costs: dict[str, float], noise: float, seed: int) -> KernelTimes:
    off = np.exp(np.random.default_rng(seed).normal(0.0, noise, len(times.decode_us)))
    return times._replace(measured_us=predicted_us(times, costs) * off)


def test_costs_come_back_from_runs_without_noise() -> None:
    costs = {"step_us": 300.0, "sequence_us": 5.0}
    fit = fit_few_runs(measured(kernels(12, 0), costs, 0.0, 0), PACKAGED)
    assert fit.candidate.name == "a step and a sequence"
    assert fit.costs == pytest.approx(costs, rel=1e-6)
    assert fit.left_out_mape < 1e-6


def test_packaged_costs_stay_where_they_hold() -> None:
    fit = fit_few_runs(measured(kernels(12, 1), PACKAGED, 0.0, 0), PACKAGED)
    assert fit.candidate.name == "the packaged costs"
    assert fit.costs == PACKAGED


def test_few_runs_fit_few_costs() -> None:
    for runs in range(1, 8):
        assert max(len(candidate.fitted) for candidate in candidates_of(runs)) == min(runs // 3, 2)
    fit = fit_few_runs(measured(kernels(2, 2), {"step_us": 5000.0}, 0.05, 0), PACKAGED)
    assert not fit.candidate.fitted
    assert set(fit.errors) == {CANDIDATES[0].name, CANDIDATES[1].name}


def test_three_noisy_runs_are_no_worse_than_the_better_of_no_fit() -> None:
    """If the packaged costs hold, a fit of three runs must not discard them for noise."""
    fitted_errors: list[float] = []
    packaged_errors: list[float] = []
    for seed in range(20):
        times = measured(kernels(40, seed), PACKAGED, 0.05, seed)
        chosen = np.arange(40) < 3
        costs = fit_few_runs(times.pick(chosen), PACKAGED, is_nested=False).costs
        left = times.pick(~chosen)
        for errors, by in ((fitted_errors, costs), (packaged_errors, PACKAGED)):
            errors.append(float(np.abs(predicted_us(left, by) / left.measured_us - 1.0).mean()))
    assert np.mean(fitted_errors) < 1.6 * np.mean(packaged_errors)


@pytest.mark.slow
def test_the_curve_falls_and_ends_at_each_run_left_out() -> None:
    times = measured(kernels(30, 5), {"step_us": 300.0, "sequence_us": 5.0}, 0.03, 1)
    points = learning_curve(times, PACKAGED, draws=8)
    assert [point.runs for point in points] == [3, 5, 10, 20, 29]
    assert points[0].mape > points[-2].mape
    assert points[-1].mape == fit_few_runs(times, PACKAGED).left_out_mape
    assert all(point.low <= point.mape <= point.high for point in points)
    assert learning_curve(times, PACKAGED, draws=8) == points


def recorded_cluster(folder: Path, costs: StepCosts) -> None:
    """What vllm bench serve would have written of an engine that is exactly its kernels and some costs."""
    profile = replace(load_engine("vllm-0.12"), costs=costs)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), engine=profile)
    for clients in (1, 4, 16, 64):
        for isl, osl in ((1024, 128), (512, 512)):
            seen = estimate(plan, isl, osl, clients, length_spread=0.0)
            requests, latency_ms = 10 * clients, seen.ttft_ms + seen.tpot_ms * (osl - 1)
            result = {
                "tokenizer_id": LLAMA,
                "model_id": LLAMA,
                "num_prompts": requests,
                "completed": requests,
                "request_rate": "inf",
                "max_concurrency": clients,
                "burstiness": 1.0,
                "duration": 10 * latency_ms / 1e3,
                "total_input_tokens": requests * isl,
                "total_output_tokens": requests * osl,
                "request_throughput": 1.0,
                "mean_ttft_ms": seen.ttft_ms,
                "mean_tpot_ms": seen.tpot_ms,
            }
            (folder / f"c{clients}-{isl}-{osl}.json").write_text(json.dumps(result))


def test_a_run_is_put_next_to_its_prediction(tmp_path: Path) -> None:
    """A slow engine is slower than 9 of 10, at its clients and at a rate, which a slow engine fills up."""
    tables = fastroof.load_tables("h100")
    recorded_cluster(tmp_path, StepCosts(step_us=6000.0))
    result = json.loads((tmp_path / "c16-1024-128.json").read_text())
    latency_s = (result["mean_ttft_ms"] + 127 * result["mean_tpot_ms"]) / 1e3
    rate = 15.0 / latency_s
    open_loop = {"request_rate": rate, "max_concurrency": None, "duration": 160 / rate + latency_s}
    (tmp_path / "rate.json").write_text(json.dumps(result | open_loop))
    command = tmp_path / "engine_args.txt"
    command.write_text(f"vllm serve {LLAMA} --enforce-eager --max-num-seqs 512")
    own = read_own_runs([tmp_path], given={"gpu": "h100", "version": "0.12.0"})
    assert not own.taken
    assert any("no fit takes runs with --enforce-eager" in words for words in own.warnings)
    report = validate_own(own.rows, (), tables)
    runs = {run.run: run for run in report.runs}
    assert len(runs) == len(own.rows) == 9
    for run in runs.values():
        ttft, tpot, per_s, running = run.figures
        # by Little's law: the rate of the tokens, and the time of a request
        osl = 128 if "128" in run.run or run.run == "rate.json" else 512
        latency_ms = ttft.predicted + tpot.predicted * (osl - 1)
        if run.run != "rate.json":
            assert per_s.predicted == pytest.approx(running.predicted * osl / latency_ms * 1e3)
            assert running.measured == pytest.approx(running.predicted, rel=1e-6)
        assert tpot.low < tpot.predicted < tpot.high
    slow = runs["c16-1024-128.json"]
    assert slow.finding == "slower than 9 of 10 such engines"
    assert "--enforce-eager, which is not modelled" in slow.look_at
    assert runs["rate.json"].figures[1].ratio > 1.05 * slow.figures[1].ratio
    assert runs["rate.json"].figures[3].ratio > 1.3
    (words, names), *_ = verdicts([slow, runs["c1-512-512.json"]]).items()
    assert names == ["c16-1024-128.json", "c1-512-512.json"]
    assert re.search(r"TPOT 1\.\d\d to 1\.\d\d times the prediction: look at --enforce-eager", words)
    fitted = load_engine("vllm-0.12").costs
    recorded_cluster(tmp_path, fitted)
    same = validate_own(
        read_own_runs([tmp_path], given={"gpu": "h100", "version": "0.12.0"}).rows, (), tables
    )
    assert {run.finding for run in same.runs if run.run != "rate.json"} == {"like 8 in 10 such engines"}
    slower = [run.figures[1].slower_than for run in (*report.runs, *same.runs)]
    assert all(0.05 <= share <= 0.95 for share in slower)
    done = CliRunner().invoke(app, ["validate", "--runs", str(tmp_path), "--gpu", "h100"])
    assert "8 in 10 such runs" in done.stdout
    assert "c16-1024-128.json" in done.stdout


@pytest.mark.slow
def test_a_cluster_of_known_costs_comes_back(tmp_path: Path) -> None:
    recorded_cluster(tmp_path, StepCosts(step_us=300.0, sequence_us=5.0))
    (tmp_path / "engine_args.txt").write_text(f"vllm serve {LLAMA} --max-num-seqs 512")
    own = read_own_runs([tmp_path], given={"gpu": "h100", "version": "0.12.0"})
    fitted = fit_own_runs(own, fastroof.load_tables("h100"), resamples=20, name="mine")
    assert (fitted.profile.costs.step_us, fitted.profile.costs.sequence_us) == (300.0, 5.0)
    assert fitted.profile.scheduling.max_num_seqs == 512
    assert fitted.fit.left_out_mape < 1e-3 < fitted.kernels_mape
    for cost in fitted.costs:
        assert cost.low_us <= cost.us * (1.0 + 1e-6)
        assert cost.us <= cost.high_us * (1.0 + 1e-6)
    path = tmp_path / "mine.toml"
    path.write_text(profile_text(fitted.profile))
    assert load_engine(path).costs == fitted.profile.costs


def test_runs_that_cannot_be_fitted_are_refused(tmp_path: Path) -> None:
    recorded_cluster(tmp_path, StepCosts())
    tables = fastroof.load_tables("h100")
    with pytest.raises(TableError, match="no engine arguments"):
        read_own_runs([tmp_path])
    given = {"gpu": "h100", "engine": "vllm", "model": "llama-3.1-8b"}
    own = read_own_runs([tmp_path], given=given)
    assert any("lengths are assumed to be equal" in words for words in own.warnings)
    nothing = replace(own, rows=tuple(replace(row, left_out="no") for row in own.rows))
    with pytest.raises(TableError, match="none of 8 runs can be fitted"):
        fit_own_runs(nothing, tables)
    with pytest.raises(TableError, match="the runs are of h200"):
        fit_own_runs(read_own_runs([tmp_path], given=given | {"gpu": "h200"}), tables)
    (tmp_path / "engine_args.txt").write_text(f"vllm serve {LLAMA}")
    (tmp_path / "engine_args.json").write_text("{}")
    with pytest.raises(TableError, match="keep one"):
        read_own_runs([tmp_path], given=given)


@pytest.mark.slow
def test_the_commands_take_them(tmp_path: Path) -> None:
    recorded_cluster(tmp_path, StepCosts(step_us=300.0, sequence_us=5.0))
    (tmp_path / "engine_args.txt").write_text(f"vllm serve {LLAMA} --frobnicate 3")
    runner, place = CliRunner(), str(tmp_path / "mine.toml")
    given = ["--runs", str(tmp_path), "--gpu", "h100"]
    made = runner.invoke(app, ["calibrate", *given, "--engine-version", "0.12.0", "-o", place])
    assert made.exit_code == 0
    assert "--frobnicate" in made.stderr
    assert "a step and a sequence" in made.stdout
    assert load_engine(place).costs.step_us == 300.0
    out = json.loads(runner.invoke(app, ["calibrate", *given, "--json"]).stdout)
    assert set(out) >= {"profile", "chosen", "chosen_by", "errors", "curve", "runs", "suspects", "warnings"}
    judged = runner.invoke(app, ["validate", *given, "--engine", place, "--json"])
    groups = {group["quantity"]: group["mape"] for group in json.loads(judged.stdout)["groups"]}
    assert groups["tpot"] < 1e-3
    (tmp_path / "engine_args.txt").unlink()
    for version, engine in {"0.11.2": "vllm", "0.19.0": "vllm", "0.12.0": "vllm-0.14.0"}.items():
        started = {"engine": "vllm", "version": version, "model": LLAMA}
        (tmp_path / "engine_args.json").write_text(json.dumps(started))
        warned = runner.invoke(app, ["validate", *given, "--engine", engine]).stderr
        newest = (
            ">=0.33 (not validated beyond 0.28, half of the costs of 0.19), the newest"
            if engine == "vllm"
            else ">=0.14,<0.17"
        )
        assert f"8 of 8 runs are of vllm {version}, judged by vllm {newest}: auto takes" in warned
    assert "runs are of" not in runner.invoke(app, ["validate", *given]).stderr
    for command in (
        ["calibrate", *given, "--rows", "a.csv"],
        ["calibrate", "--engine-args", "a.txt"],
        ["validate", *given, "--rows", "a.csv"],
        ["validate", "--model", "llama-3.1-8b"],
    ):
        refused = runner.invoke(app, command)
        assert refused.exit_code != 0
        assert "--runs" in f"{refused.exception} {refused.stderr}"


@pytest.mark.slow
def test_a_run_that_no_plan_holds_is_left_out(tmp_path: Path) -> None:
    recorded_cluster(tmp_path, StepCosts(step_us=300.0, sequence_us=5.0))
    given = {"gpu": "h100", "engine": "vllm", "model": "llama-3.1-8b", "version": "0.12.0"}
    own = read_own_runs([tmp_path], given=given)
    longer = replace(own.rows[0], row="too long", isl=1e7)
    fitted = fit_own_runs(replace(own, rows=(*own.rows, longer)), fastroof.load_tables("h100"), resamples=0)
    assert len(fitted.rows) == 8
    assert "too long" in fitted.left_out
    with pytest.raises(FastroofError):
        fit_own_runs(replace(own, rows=(longer,)), fastroof.load_tables("h100"))


STEPS_CSV = (
    "model,gpu,tp,dtype,kv_dtype,phase,new_tokens,context_len,latency_us\n"
    "llama-3.1-8b,h100,1,bf16,bf16,decode,1x8,1023x8,8000\n"
)


def test_own_runs_and_steps_are_compared_with_predictions(tmp_path: Path) -> None:
    runs, steps_file = tmp_path / "runs", tmp_path / "steps.csv"
    runs.mkdir()
    recorded_cluster(runs, StepCosts(step_us=400.0))
    (runs / "engine_args.txt").write_text(f"vllm serve {LLAMA}")
    steps_file.write_text(STEPS_CSV)
    words = ["validate", "--runs", str(runs), "--steps", str(steps_file), "--gpu", "h100", "--json"]
    done = good(*words)
    found = json.loads(done)
    for key in (*found, *found["groups"][0]):
        assert key in EPILOG
    own = found["groups"][0]
    (steps,) = (group for group in found["groups"] if group["dataset"] == "steps")
    assert (own["dataset"], own["quantity"], own["kind"]) == ("own", "decode", "independent")
    assert (steps["quantity"], steps["rows"]) == ("decode", 1)
    # the same runs by the whole judgement of the shipped rows
    rows = read_own_runs([runs], given={"gpu": "h100"}).rows
    whole = run_validation(Measured(rows), fastroof.load_tables("h100"))
    mine = validate_own(rows, (), fastroof.load_tables("h100"))
    assert str(mine.rows) == str(whole.rows)
    assert mine.left_out == whole.left_out


def test_what_ships_is_judged_in_a_checkout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fastroof.cli.checkout.fastroof.__file__", str(tmp_path / "fastroof" / "__init__.py"))
    for command, words in (
        (["validate", "--gpu", "all"], "judge"), (["calibrate"], "fit"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, command, prog_name="fastroof")
        assert (done.exit_code, done.stdout) == (2, "")
        assert (
            f"needs a checkout of fastroof; there, run python -m benchmarks.accuracy {words}" in done.stderr
        )
