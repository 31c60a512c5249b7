"""The SGLang simulator's predictors: a batch's requests, and the 18 features of a sklearn-like model.

Against a stand-in of the simulator, tests/backends/sglang_simulator.py; what it leaves out is listed there.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.backends.sglang import FEATURES, StepTimePredictor, StepTimeRegressor, write_model
from fastroof.compiled.callers import sums_step_us
from tests.backends.interfaces import python_differences, recorded
from tests.compiled.test_windows import PLANS

CHECKOUT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location(
    "sglang_simulator_stand_in", Path(__file__).with_name("sglang_simulator.py")
)
simulator = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = simulator
_SPEC.loader.exec_module(simulator)

PAST = st.integers(0, 8000)
DECODES = st.lists(st.tuples(st.just(1), st.integers(1, 8000)), min_size=1, max_size=40)
CHUNKS = st.lists(st.tuples(st.integers(2, 900), PAST), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=16384, engine="kernels")


@pytest.fixture(scope="module")
def regressor(plan):
    return StepTimeRegressor(plan)


def batch_of(pairs):
    return simulator.extend_batch(*zip(*pairs, strict=True))


def by_features(regressor, pairs):
    (seconds,) = regressor.predict([simulator.features_of(batch_of(pairs))])
    return seconds


# From the requests


@given(decodes=DECODES, chunks=CHUNKS)
def test_a_batch_takes_the_plans_step(plan, decodes, chunks):
    batch = batch_of(decodes + chunks)
    (step_us,) = plan.step_us(fastroof.StepBatch.from_requests([decodes + chunks]))
    assert StepTimePredictor(plan).predict_infer_time(batch) == step_us / 1e6
    prepared = simulator.prepared_batch(*zip(*decodes + chunks, strict=True))
    assert StepTimePredictor(plan, past_is_kv_len=False).predict_infer_time(prepared) == step_us / 1e6


@pytest.mark.parametrize("output_ids", [1, 2])
def test_a_decode_attends_to_its_prompt_and_its_outputs(plan, regressor, output_ids):
    batch = simulator.decode_batch([4095] * 64, [output_ids] * 64)
    seconds = plan.decode_us(64, 4095 + output_ids) / 1e6
    assert StepTimePredictor(plan).predict_infer_time(batch) == seconds
    assert regressor.predict([simulator.features_of(batch)]) == seconds


def test_the_stand_in_and_the_adapter_have_the_simulators_signatures():
    predictors, *others = recorded("sglang_simulator")
    for interface in (predictors, *others):
        assert python_differences(interface, vars(simulator)) == []
    ours = {**vars(simulator), "InferTimePredictor": StepTimePredictor}
    assert python_differences(predictors, ours) == []


def test_it_answers_the_calls_of_the_simulator(plan):
    predictor = StepTimePredictor(plan)
    wanted = {name for name in vars(simulator.InferTimePredictor) if not name.startswith("_")}
    assert all(callable(getattr(predictor, name)) for name in wanted)
    assert predictor.predict_infer_time(simulator.ScheduleBatch()) == 0.0
    assert predictor.get_metrics() == {}
    predictor.reset_metrics()


def test_a_batch_beyond_the_plan_is_an_error_not_a_negative_time(plan):
    with pytest.raises(fastroof.PlanRangeError, match="max_num_batched_tokens"):
        StepTimePredictor(plan).predict_infer_time(batch_of([(20000, 0)]))
    with pytest.raises(fastroof.BatchError):
        StepTimePredictor(plan).predict_infer_time(batch_of([(0, 10)]))


# Where the scheduler looks for it


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """A function that makes a scheduler, configured with the predictor that it is given."""

    def make_scheduler(**predictor):
        file = tmp_path / "simulator.json"
        file.write_text(json.dumps({"predictor": predictor}))
        monkeypatch.setenv("SGLANG_SIMULATOR_CONFIG_PATH", str(file))
        simulator.ConfigManager.reset_config_cache()
        return simulator.Scheduler(server_args=None)

    monkeypatch.setattr(simulator.C_SchedulerHook, "INFERENCE_PREDICTOR", None)
    yield make_scheduler
    simulator.ConfigManager.reset_config_cache()


def test_the_hook_is_assigned_after_the_scheduler_is_made(plan, configured, tmp_path):
    hook, predictor = simulator.C_SchedulerHook, StepTimePredictor(plan)
    file = write_model(plan, tmp_path / "model.pkl")
    batch = batch_of([(1, 4095)] * 8 + [(512, 1024)])

    hook.INFERENCE_PREDICTOR = predictor
    scheduler = configured(name="ml", database_path=str(file), latency_scale=3.0)
    assert isinstance(hook.INFERENCE_PREDICTOR, simulator.MLTimePredictor)  # what was there before is lost
    scheduler.run_batch(batch)
    assert scheduler.step_s == 3.0 * predictor.predict_infer_time(batch)

    hook.INFERENCE_PREDICTOR = predictor
    scheduler.run_batch(batch)
    assert scheduler.step_s == predictor.predict_infer_time(batch)


def test_a_scheduler_with_no_valid_predictor_configured_is_not_made(plan, configured, tmp_path):
    hook = simulator.C_SchedulerHook
    hook.INFERENCE_PREDICTOR = StepTimePredictor(plan)
    with pytest.raises(ValueError, match="Unknown predictor name: fastroof"):
        configured(name="fastroof")
    with pytest.raises(ValueError, match="Unknown predictor name: None"):
        configured()
    with pytest.raises(FileNotFoundError):
        configured(name="ml", database_path=str(tmp_path / "none.pkl"))
    configured(name="ml", database_path=str(write_model(plan, tmp_path / "model.pkl")))


# From the features


def _exact_by_features(data):
    decodes = data.draw(DECODES)
    match data.draw(st.sampled_from(["decodes", "chunks", "prompts of one token", "one", "equal", "two"])):
        case "decodes":
            return decodes
        case "chunks":
            return data.draw(CHUNKS)
        case "prompts of one token":
            return [(1, 0)] * len(decodes)
        case "one":
            return [*decodes, data.draw(CHUNKS)[0]]
        case "equal":
            new = data.draw(st.integers(2, 400))
            return decodes + [(new, past) for past in data.draw(st.lists(PAST, min_size=1, max_size=6))]
        case _:
            return decodes + [(new, 0) for new, _ in data.draw(CHUNKS)[:2]]


@given(data=st.data())
def test_the_features_describe_most_steps_exactly(plan, regressor, data):
    pairs = data.draw(st.permutations(_exact_by_features(data)))
    guessed = regressor.guessed_steps
    exact = StepTimePredictor(plan).predict_infer_time(batch_of(pairs))
    assert by_features(regressor, pairs) == exact
    assert regressor.guessed_steps == guessed
    prepared = simulator.features_of(simulator.prepared_batch(*zip(*pairs, strict=True)))
    assert StepTimeRegressor(plan, past_is_kv_len=False).predict([prepared]) == exact


@given(decodes=DECODES, chunks=CHUNKS)
def test_any_other_mix_is_near_and_counted_unless_it_is_exact(plan, regressor, decodes, chunks):
    guessed = regressor.guessed_steps
    exact = StepTimePredictor(plan).predict_infer_time(batch_of(decodes + chunks))
    found = by_features(regressor, decodes + chunks)
    # against collapse: the docstring has what was measured
    assert found == pytest.approx(exact, rel=0.1)
    assert found == exact or regressor.guessed_steps == guessed + 1


@given(pairs=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=12))
def test_small_mixes_with_prompts_of_one_token_are_timed(plan, pairs):
    exact = StepTimePredictor(plan).predict_infer_time(batch_of(pairs))
    assert by_features(StepTimeRegressor(plan), pairs) == pytest.approx(exact, rel=0.2)


def test_the_features_are_those_of_the_simulator():
    assert FEATURES == simulator.MLTimePredictor.FEATURE_NAMES
    assert len(simulator.features_of(batch_of([(1, 2)]))) == len(FEATURES)


def test_the_simulator_loads_the_file_and_calls_it(plan, tmp_path):
    file = write_model(plan, tmp_path / "model.pkl")
    loaded = simulator.MLTimePredictor(file, latency_scale=2.0)
    batch = batch_of([(1, 4095)] * 64 + [(512, 1024)])
    assert loaded.predict_infer_time(batch) == 2.0 * StepTimePredictor(plan).predict_infer_time(batch)
    assert loaded.predict_infer_time(simulator.ScheduleBatch()) == 0.0


def test_joblib_reads_the_file(plan, tmp_path):
    joblib = pytest.importorskip("joblib")
    bundle = joblib.load(write_model(plan, tmp_path / "model.pkl"))
    assert bundle["features"] == list(FEATURES)
    assert bundle["model"].plan.decode_us(8, 512) == plan.decode_us(8, 512)


def test_rows_of_another_kind_are_refused(plan, regressor, tmp_path):
    with pytest.raises(fastroof.BackendError, match="row 1 has 3 features"):
        regressor.predict([simulator.features_of(batch_of([(1, 2)])), [1, 2, 3]])
    with pytest.raises(fastroof.PlanRangeError, match="20000 tokens in 1 requests does not fit"):
        by_features(regressor, [(20000, 0)])
    with pytest.raises(fastroof.BackendError, match="does not exist; create it"):
        write_model(plan, tmp_path / "none" / "model.pkl")


@pytest.mark.loops
def test_sums_that_no_step_has_are_not_timed(plan):
    good = (2, 1, 100, 10, 55, 0, 0)
    assert sums_step_us(plan.arena, *good) == plan.step_scalar([1, 10], [99, 0])
    for at, value in (
        (0, 0),
        (0, 5000),
        (1, -1),
        (1, 3),
        (2, -1),
        (3, 0),
        (3, 99999),
        (4, 9),
        (5, -1),
        (6, -1),
    ):
        bad = (*good[:at], value, *good[at + 1 :])
        assert sums_step_us(plan.arena, *bad) != sums_step_us(plan.arena, *bad)


@pytest.mark.slow
def test_the_example_runs():
    command = [sys.executable, "-m", "tests.examples.sglang"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.startswith("llama-3.1-8b on one h100, 32 prompts")
    assert "simulated in" in done.stdout


def test_a_window_leaves_all_but_equal_requests_open(plan):
    windowed = PLANS["alternating"]
    regressor = StepTimeRegressor(windowed)
    for pairs, certain in (
        ([(1, 50)] * 4, True),
        ([(40, 0)] * 2, True),
        ([(1, 50), (1, 3000)], False),
        ([(1, 50), (40, 0)], False),
    ):
        guessed = regressor.guessed_steps
        found = by_features(regressor, pairs)
        assert regressor.guessed_steps == guessed + (not certain)
        exact = StepTimePredictor(windowed).predict_infer_time(batch_of(pairs))
        if certain:
            assert found == exact
        else:
            assert found == pytest.approx(exact, rel=0.1)
