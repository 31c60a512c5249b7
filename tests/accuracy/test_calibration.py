"""Calibration: costs fitted to rows, their intervals, unseen models, and the profiles that ship."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from benchmarks.accuracy.calibration import Calibration, calibrate
from benchmarks.accuracy.fit import are_distinguishable, equal_weights, fit_costs
from benchmarks.accuracy.fit_errors import (
    SPLITS,
    cost_intervals,
    dataset_errors,
    fits_without,
    split_errors,
    unseen_errors,
)
from benchmarks.accuracy.fitted_rows import FittedRows, RowLabels
from benchmarks.accuracy.measured import measured_on
from benchmarks.accuracy.refit import PROFILES, with_fit
from benchmarks.accuracy.rows import shipped_rows, write_rows
from benchmarks.accuracy.whole_sample import measured_gpus
from fastroof.cli import app
from fastroof.engines import EngineProfile, StepCosts, engine_names, load_engine
from fastroof.engines.values import holds_for
from fastroof.errors import TableError
from fastroof.evidence.kernel_times import COSTS, KernelTimes, kernel_times, predicted_us
from fastroof.evidence.predictions import Plans
from fastroof.evidence.profile_file import profile_text, write_profile
from fastroof.evidence.validation import is_waiting
from tests.command_line import refused

HOST = ("step_us", "sequence_us")
FLOOR = ("step_us", "prefill_floor_layer_us")
EVERY_COST = ("step_us", "sequence_us", "prefill_floor_layer_us")
PACKAGED = tuple(name for name in engine_names() if load_engine(name).fit is not None)


@pytest.fixture(scope="module")
def rows():
    return shipped_rows("h100")


@pytest.fixture(scope="module")
def vllm(rows, h100) -> Calibration:
    return calibrate(rows, h100, "vllm-0.12", resamples=0)


def made_times(count: int, seed: int = 0, own_layers: int = 0, **costs: float) -> KernelTimes:
    random = np.random.default_rng(seed)
    mixed_steps = random.choice([0.0, 0.1, 0.5, 0.9], count)
    times = KernelTimes(
        measured_us=np.ones(count),
        decode_us=random.uniform(2e3, 2e4, count),
        mixed_us=random.uniform(2e4, 1e5, count),
        decode_sequences=random.uniform(1.0, 128.0, count),
        mixed_sequences=random.uniform(1.0, 128.0, count),
        decode_steps=1.0 - mixed_steps,
        mixed_steps=mixed_steps,
        num_layers=random.choice([32.0, 64.0], count),
        num_allreduces=random.choice([0.0, 64.0, 128.0], count),
        vocab=random.choice([32e3, 128e3, 200e3], count),
        num_kernels=np.random.default_rng([seed, 1]).uniform(400.0, 2000.0, count),
        own_layers=random.choice([0.0, 78.0], (count, own_layers)) if own_layers else None,
    )
    return times._replace(measured_us=predicted_us(times, costs))


def made_labels(count: int, models: int = 4, tps: int = 3, gpus: int = 1) -> RowLabels:
    i = np.arange(count)
    model = np.array([f"model-{m}" for m in i % models])
    dataset = np.array([f"set-{m}" for m in i % models % 2])
    gpu = np.array([f"gpu-{g}" for g in i // models % gpus])
    version = np.array([f"0.{v}" for v in i // 2 % 3])
    bench = np.array([f"bench-{b}" for b in i // 5 % 2])
    return RowLabels(dataset, model, gpu, version, bench, (i // models) % tps)


def loss(times: KernelTimes, weights: np.ndarray, costs: dict[str, float]) -> float:
    """The fit's objective, written out row by row."""
    total = 0.0
    for i, weight in enumerate(weights):
        t = KernelTimes(*(float(column[i]) for column in times[:11]))
        added = costs.get("step_us", 0.0) + costs.get("allreduce_us", 0.0) * t.num_allreduces
        added += costs.get("layer_us", 0.0) * t.num_layers + costs.get("kernel_us", 0.0) * t.num_kernels
        sequence, floor = costs.get("sequence_us", 0.0), costs.get("prefill_floor_layer_us", 0.0)
        decode_us = t.decode_us + added + sequence * t.decode_sequences
        mixed_us = t.mixed_us + added + sequence * t.mixed_sequences
        mixed_us += costs.get("prefill_us", 0.0) + costs.get("prefill_layer_us", 0.0) * t.num_layers
        mixed_us = max(mixed_us, floor * t.num_layers)
        error = (t.decode_steps * decode_us + t.mixed_steps * mixed_us) / t.measured_us - 1
        total += weight * error * error
    return total


@pytest.mark.parametrize(
    ("names", "truth"),
    [
        (HOST, {"step_us": 632.0, "sequence_us": 47.0}),
        (HOST, {"step_us": 0.0, "sequence_us": 12.0}),
        (("logit_ps", "allreduce_us"), {"logit_ps": 60.0, "allreduce_us": 3.0}),
        (FLOOR, {"step_us": 300.0, "prefill_floor_layer_us": 900.0}),
        (FLOOR, {"step_us": 0.0, "prefill_floor_layer_us": 700.0}),
        (EVERY_COST, {"step_us": 500.0, "sequence_us": 20.0, "prefill_floor_layer_us": 950.0}),
        (HOST, {"step_us": 0.0, "sequence_us": 0.0}),
        (
            ("allreduce_us", "layer_us", "prefill_us"),
            dict.fromkeys(("allreduce_us", "layer_us", "prefill_us"), 9.0),
        ),
        (("sequence_us", "prefill_layer_us"), {"sequence_us": 12.0, "prefill_layer_us": 200.0}),
        (("sequence_us", "kernel_us"), {"sequence_us": 12.0, "kernel_us": 1.5}),
    ],
)
def test_known_costs_come_back(names, truth):
    times = made_times(60, **truth)
    fitted = fit_costs(times, np.ones(60), names)
    assert list(fitted) == list(names)
    assert fitted == pytest.approx(truth, abs=1e-2)
    assert are_distinguishable(times, fitted)


@pytest.mark.parametrize("names", [HOST, FLOOR, EVERY_COST])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_costs_fit_better(names, seed):
    """Against a search around the fit and over the whole range, with the objective written out."""
    truth = {name: 400.0 if name != "sequence_us" else 30.0 for name in names}
    truth |= {"prefill_floor_layer_us": 800.0} if "prefill_floor_layer_us" in truth else {}
    times = made_times(24, seed, **truth)
    random = np.random.default_rng(seed)
    times = times._replace(measured_us=times.measured_us * np.exp(random.normal(0.0, 0.15, 24)))
    weights = random.uniform(0.5, 2.0, 24)
    fitted = fit_costs(times, weights, names)
    assert min(fitted.values()) >= 0.0
    least = loss(times, weights, fitted)
    everywhere = random.uniform(0.0, 1.0, (400, len(names))) * [
        100.0 if name == "sequence_us" else 3000.0 for name in names
    ]
    here = np.array(list(fitted.values()))
    nearby = np.maximum(here + random.normal(0.0, 1.0, (400, len(here))) * here * 0.02, 0.0)
    for tried in (*everywhere, *nearby):
        assert loss(times, weights, dict(zip(names, tried, strict=True))) >= least * (1 - 1e-6)


@pytest.mark.parametrize("seed", [9, 11, 16])
def test_a_floor_fits_no_worse_than_none(seed):
    """It may be 0, for no cost: no start from another value may exceed it."""
    times = made_times(8, seed)
    noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.3, 8))
    times, weights = times._replace(measured_us=times.measured_us * noise), np.ones(8)
    fitted = fit_costs(times, weights, ("prefill_floor_layer_us",))
    assert loss(times, weights, fitted) <= loss(times, weights, {}) * (1 + 1e-9)


def test_the_fit_agrees_with_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    truth = {"step_us": 600.0, "sequence_us": 40.0}
    times = made_times(50, 3, **truth)
    noise = np.exp(np.random.default_rng(1).normal(0.0, 0.1, 50))
    times = times._replace(measured_us=times.measured_us * noise)
    base = predicted_us(times, {})
    columns = [(predicted_us(times, {name: 1.0}) - base) / times.measured_us for name in truth]
    expected, _ = optimize.nnls(np.stack(columns, 1), 1.0 - base / times.measured_us)
    fitted = fit_costs(times, np.ones(50), HOST)
    np.testing.assert_allclose(list(fitted.values()), expected, rtol=1e-9)
    fitted = fit_costs(times, np.ones(50), FLOOR)

    def errors(costs):
        return predicted_us(times, dict(zip(FLOOR, costs, strict=True))) / times.measured_us - 1.0

    found = optimize.least_squares(errors, list(fitted.values()), bounds=(0.0, np.inf))
    np.testing.assert_allclose(list(fitted.values()), found.x, rtol=1e-3, atol=0.1)


def test_indistinguishable_costs_are_noticed():
    one_sequence = made_times(9, step_us=500.0)._replace(
        decode_sequences=np.ones(9), mixed_sequences=np.ones(9)
    )
    fitted = fit_costs(one_sequence, np.ones(9), HOST)
    assert not are_distinguishable(one_sequence, fitted)
    assert min(fitted.values()) == 0.0
    # a floor that no step touches is no cost, and hides none
    decodes = made_times(9, step_us=500.0)._replace(mixed_steps=np.zeros(9), decode_steps=np.ones(9))
    decodes = decodes._replace(measured_us=decodes.decode_us + 500.0)
    fitted = fit_costs(decodes, np.ones(9), FLOOR)
    assert fitted == pytest.approx({"step_us": 500.0, "prefill_floor_layer_us": 0.0})
    assert are_distinguishable(decodes, fitted)


def test_an_architecture_has_a_cost_of_its_own():
    times = made_times(40, own_layers=2, **{"step_us": 600.0, "own_layers.0": 45.0, "own_layers.1": 9.0})
    fitted = fit_costs(times, np.ones(40), ("step_us",))
    assert fitted == pytest.approx({"step_us": 600.0, "own_layers.0": 45.0, "own_layers.1": 9.0}, abs=1e-2)
    none = times._replace(own_layers=np.zeros((40, 2)))
    assert list(fit_costs(none, np.ones(40), ("step_us",)).values())[1:] == [0.0, 0.0]


@pytest.mark.parametrize("split", SPLITS)
def test_left_out_rows_do_not_affect_the_costs(split):
    labels = made_labels(72, gpus=3)
    times = made_times(72, step_us=600.0, sequence_us=30.0)
    noisy = times._replace(measured_us=times.measured_us * np.linspace(0.9, 1.1, 72))
    names = getattr(labels, split)
    one = str(np.unique(names)[1])
    random = np.random.default_rng(5)
    odd = noisy.measured_us * np.where(names == one, random.uniform(0.2, 9.0, 72), 1.0)
    before, after = (
        fits_without(FittedRows(t, labels, HOST), split) for t in (noisy, noisy._replace(measured_us=odd))
    )
    assert set(before) == set(np.unique(names))
    assert before[one] == after[one]
    assert any(before[name] != after[name] for name in before if name != one)
    assert all(tuple(costs) == HOST for costs in before.values())


@pytest.mark.parametrize("engine", PACKAGED)
def test_costs_are_fitted_only_if_four_models_show_them(engine):
    """Fewer models do not separate a cost from errors of their kernels."""
    profile = load_engine(engine)
    fitted = {model for one in profile.evidence["datasets"].values() for model in one["models"]}
    judging = {
        row.model
        for gpu in measured_gpus()
        for row in measured_on(gpu).independent
        if row.engine_profile.name == engine and holds_for(profile.versions, row.engine_version)
    }
    assert not profile.fit.costs or len(fitted | judging) >= 4
    if not profile.fit.costs:
        assert profile.costs == StepCosts(residual=profile.costs.residual)


def test_errors_are_by_data_set():
    labels = made_labels(48)
    times = made_times(48, step_us=600.0, sequence_us=30.0)
    fitted = FittedRows(times, labels, HOST)
    unseen = {split: unseen_errors(fitted, split, fits_without(fitted, split)) for split in SPLITS}
    in_sample = fitted.errors(fitted.fit(fitted.every))
    report = dataset_errors(fitted, fitted.errors({}), in_sample, unseen)
    assert [(one.dataset, one.rows, one.models, one.gpus) for one in report] == [
        ("set-0", 24, ("model-0", "model-2"), ("gpu-0",)),
        ("set-1", 24, ("model-1", "model-3"), ("gpu-0",)),
    ]
    for one in report:
        assert one.tps == (0, 1, 2)
        assert one.kernels_bias == pytest.approx(-one.kernels_mape)
        assert max(one.fitted_mape, one.unseen_mape, one.unseen_version_mape, one.unseen_bench_mape) < 1e-6
        # one GPU: none is unseen
        assert math.isnan(one.unseen_gpu_mape)
    assert split_errors(fitted, unseen["gpu"]) == {}
    found = split_errors(fitted, np.where(np.arange(48) < 24, -0.1, 0.3))
    assert found == pytest.approx({"rows": 48, "mape": 0.2, "bias": 0.1, "median_of_groups": 0.2, "p80": 0.3})


def test_a_data_set_of_few_rows_counts_less():
    assert equal_weights(np.array(["a"] * 20 + ["b"] * 2), 10)[[0, -1]].tolist() == [0.05, 0.1]


@pytest.mark.slow
def test_intervals_cover_the_truth():
    """12 clusters with errors of their own: nominally 95 %, a little less with so few clusters."""
    labels = made_labels(48)
    truth = {"step_us": 600.0, "sequence_us": 30.0}
    covered = 0
    for seed in range(25):
        random = np.random.default_rng(100 + seed)
        times = made_times(48, seed, **truth)
        cluster = 3 * (np.arange(48) % 4) + labels.tp
        noise = random.normal(0.0, 0.03, 12)[cluster] + random.normal(0.0, 0.01, 48)
        times = times._replace(measured_us=times.measured_us * np.exp(noise))
        fitted = FittedRows(times, labels, HOST)
        for cost in cost_intervals(fitted, fitted.fit(fitted.every), 100):
            assert cost.low_us <= cost.high_us
            covered += cost.low_us <= truth[cost.name] <= cost.high_us
    assert 40 <= covered <= 50


@pytest.mark.slow
def test_intervals_are_repeatable_and_honest_about_too_little():
    labels = made_labels(48)
    times = made_times(48, step_us=600.0, prefill_floor_layer_us=900.0)
    times = times._replace(measured_us=times.measured_us * np.linspace(0.9, 1.1, 48))
    fitted = FittedRows(times, labels, FLOOR)
    costs = fitted.fit(fitted.every)
    first, again = (cost_intervals(fitted, costs, 20) for _ in range(2))
    assert first == again
    alone = FittedRows(times, made_labels(48, models=1, tps=1), FLOOR)
    for found in (cost_intervals(fitted, costs, 0), cost_intervals(alone, costs, 20)):
        assert all(math.isnan(cost.low_us) and math.isnan(cost.high_us) for cost in found)
    assert fits_without(alone, "model") == {}


@pytest.mark.slow
@pytest.mark.parametrize("engine", PACKAGED)
def test_the_packaged_profile_is_what_the_command_makes(engine):
    packaged = load_engine(engine)
    rows = [row for gpu in measured_gpus() for row in shipped_rows(gpu)]
    gpus = sorted({row.gpu for row in rows if row.engine_profile.name == engine})
    try:
        tables = {gpu: fastroof.load_tables(gpu) for gpu in gpus}
    except TableError as error:
        pytest.skip(f"needs the tables of every GPU that its rows were measured on: {error}")
    fitted = packaged.evidence["tables_hash"]
    if fitted != {gpu: tables[gpu].content_hash for gpu in fitted}:
        pytest.skip("was fitted with all that can be imported of these GPUs, and only what ships is here")
    command = f"fastroof calibrate --engine {engine} --gpu all"
    made = calibrate(rows, tables, engine, command=command).profile
    hint = f"python -m benchmarks.accuracy refit {engine}"
    evidence = {**made.evidence, "fastroof": packaged.evidence["fastroof"]}
    assert replace(made, evidence={}) == replace(packaged, evidence={}), hint
    assert evidence == packaged.evidence, hint
    # comments, the order within a table and defaults that are written out are a person's
    again = load_engine(tomllib.loads(profile_text(packaged)))
    assert (again, again.evidence) == (packaged, packaged.evidence), hint
    assert load_engine({"name": engine, **tomllib.loads(with_fit(profile_text(packaged), made))}) == packaged


@pytest.mark.parametrize("engine", PACKAGED)
def test_a_refit_without_changes_changes_no_byte(engine):
    path = PROFILES / f"{engine}.toml"
    text = path.read_text("utf-8")
    # by its path, without the share of the newest version
    assert with_fit(text, load_engine(path)) == text


@pytest.mark.parametrize("engine", PACKAGED)
def test_a_packaged_profile_shows_its_errors_on_what_was_left_out(engine):
    evidence = load_engine(engine).evidence
    errors = evidence["errors"]
    assert {"kernels", "in_sample", "unseen_model"} <= set(errors)
    assert sum(one["rows"] for one in evidence["datasets"].values()) == evidence["rows"]
    has_costs = bool(load_engine(engine).fit.costs)
    for name in SPLITS:
        # a fit for each that was left out, if there are costs, and an error only where there is one
        assert (f"unseen_{name}" in errors and has_costs) == (f"without_{name}" in evidence)
    for cost, (low_us, high_us) in evidence.get("interval_95", {}).items():
        if not cost.startswith("layers"):
            assert low_us <= getattr(load_engine(PROFILES / f"{engine}.toml").costs, cost) <= high_us


@pytest.mark.slow
def test_errors_of_the_old_groups_stay_small(vllm):
    """H100 alone, costs fitted without each model."""
    unseen = {one.dataset: one.unseen_mape for one in vllm.datasets}
    assert unseen["vllm-0.12.0-qwen3-32b-bf16"] <= 0.08
    assert unseen["vllm-llama-3.1-70b-fp8"] <= 0.08
    assert unseen["vllm-synchronous"] <= 0.06


@pytest.mark.slow
def test_a_row_finds_the_profile_that_has_not_seen_it(vllm, rows):
    row = next(row for row in rows if row.dataset == "vllm-0.12.0-qwen3-32b-bf16")
    without = vllm.without["model"]["qwen3-32b"].at("0.12.0")
    assert without.costs != vllm.profile.costs
    assert vllm.profile_without(row) == without
    other = replace(row, model="qwen3-8b", architecture="")
    assert vllm.profile_without(other) == vllm.profile.at("0.12.0")
    assert vllm.profile_without(row, "version") == vllm.without["version"]["0.12.0"].at("0.12.0")
    # one GPU: no other
    assert vllm.profile_without(row, "gpu") is None
    at = [i for i, fitted in enumerate(vllm.fitted_rows) if fitted.dataset == row.dataset]
    one = vllm.fitted_rows[at[0]]
    costs = {name: us for name, us in asdict(without.costs).items() if name in COSTS and us}
    times = kernel_times([one], vllm_tables(), without, vllm.profile.costs)
    (us,) = predicted_us(times, costs)
    assert us / 1e3 / one.tpot_ms - 1.0 == pytest.approx(vllm.unseen["model"][at[0]], abs=1e-6)


def vllm_tables():
    return fastroof.load_tables("h100")


def test_runs_that_waited_to_be_admitted_are_not_fitted(rows):
    waited = next(row for row in rows if row.engine == "vllm" and not row.left_out)
    waited = replace(waited, ttft_ms=10.0, tpot_ms=1.0, osl=11.0, length_factor=1.0)
    assert is_waiting(waited)
    assert not is_waiting(replace(waited, ttft_ms=5.0))
    assert not is_waiting(replace(waited, ttft_ms=math.nan))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm-0.12", "trtllm-1.0", "sglang"])
def test_the_fit_predicts_the_estimates(rows, h100, engine):
    """With the numbers of steps that an engine of these costs makes."""
    costs = {
        "step_us": 300.0,
        "sequence_us": 11.0,
        "allreduce_us": 3.0,
        "layer_us": 2.0,
        "prefill_layer_us": 30.0,
    }
    profile = replace(load_engine(engine), evidence={}, costs=StepCosts(**costs))
    of_engine = [row for row in rows if row.engine_profile.name == engine and not row.left_out]
    chosen = [row for row in of_engine if not row.is_disaggregated][::19]
    plans = Plans(h100)
    times = kernel_times(chosen, h100, profile, profile.costs)
    for row, us in zip(chosen, predicted_us(times, costs), strict=True):
        found = plans.predict(row, profile.at(row.engine_version or "unknown"))
        # where prompts run first, a longer step has a little more of them behind it
        assert found.tpot_ms * 1e3 == pytest.approx(us, rel=3e-3 if engine == "sglang" else 1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "infersim"}, "engine must be one of .*vllm-0.12, got 'infersim'"),
        (
            {"datasets": ["nowhere"]},
            "vllm-0.12 on h100 has no data set 'nowhere'; it has vllm-0.11.2-gpt-oss",
        ),
        ({"resamples": -1}, "resamples must be a whole number of at least 0, got -1"),
        ({"resamples": True}, "resamples must be a whole number"),
        ({"rows": []}, "no serving rows of vllm-0.12 to fit on h100"),
        ({"rows": "short"}, "has no output token after the first"),
        ({"rows": "waited"}, "no row of vllm-0.12 can be fitted: TTFT above 35%"),
    ],
)
def test_what_cannot_be_fitted_is_refused(rows, h100, options, words):
    vllm = [row for row in rows if row.engine_profile.name == "vllm-0.12" and not row.left_out]
    made = {"short": [replace(vllm[0], osl=1.0)], "waited": [replace(vllm[0], ttft_ms=1e9)]}
    options = {"rows": rows, "engine": "vllm-0.12", **options}
    given, engine = options.pop("rows"), options.pop("engine")
    with pytest.raises(TableError, match=words):
        calibrate(made.get(given, given) if isinstance(given, str) else given, h100, engine, **options)


def test_a_profile_is_written_atomically(tmp_path, monkeypatch):
    profile = EngineProfile("mine", costs=StepCosts(step_us=5.0), evidence={"why": {"x.y": [1.0, 2.0]}})
    path = write_profile(profile, tmp_path / "mine.toml")
    assert load_engine(path) == profile
    assert path.read_text("utf-8") == profile_text(profile)
    with pytest.raises(TableError, match=r"must be a \.toml file"):
        write_profile(profile, tmp_path / "mine.json")
    with pytest.raises(TableError, match="does not exist"):
        write_profile(profile, tmp_path / "nowhere" / "mine.toml")

    def full(self: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastroof.atomic_files.os.replace", full)
    with pytest.raises(TableError, match=r"cannot be written \(No space left on device\); nothing is left"):
        write_profile(replace(profile, costs=StepCosts(step_us=6.0)), path)
    assert load_engine(path) == profile
    assert list(tmp_path.iterdir()) == [path]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["calibrate", *arguments], prog_name="fastroof")
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
def test_the_command_prints_costs_and_errors():
    text = run("--engine", "vllm-0.12", "--bootstrap", "20")
    assert "% standard error on unseen models" in text
    assert "95 % interval" in text
    for words in ("step_us", "logit_ps", "vllm-synchronous", "MAPE and (bias)"):
        assert words in text


@pytest.mark.slow
def test_own_rows_make_an_own_profile(tmp_path, rows, h100):
    mine = [row for row in rows if row.dataset == "vllm-0.12.0-qwen3-32b-bf16"][::3]
    path, output = write_rows(tmp_path / "my rows.csv", mine), tmp_path / "mine.toml"
    document = json.loads(
        run("--engine", "vllm-0.12", "--rows", str(path), "-o", str(output), "--bootstrap", "10", "--json")
    )
    assert document["output"] == str(output)
    profile = load_engine(output)
    assert load_engine({**document["profile"], "evidence": document["evidence"]}) == profile
    command = f"fastroof calibrate --engine vllm-0.12 --rows '{path}' --bootstrap 10"
    assert profile.evidence["command"] == command
    assert (profile.name, profile.costs.residual, document["without"]) == ("mine", 0.0, {})
    assert [one["unseen_mape"] for one in document["datasets"]] == [None]
    assert "unknown: needs runs of another model" in run(
        "--engine", "vllm-0.12", "--rows", str(path), "--bootstrap", "0"
    )
    plan = fastroof.compile_plan("qwen3-32b", "h100", h100, tp=2, engine=output)
    assert plan.engine == "mine"


def test_a_wrong_output_is_refused_before_the_fit(tmp_path):
    done = refused("calibrate", "-o", str(tmp_path / "x.txt"), "--engine", "nowhere")
    assert "must be a .toml file" in done
