"""A simulated run's answers: of its requests, over time, under limits, and within the error of a step."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import fastroof
from fastroof.compiled.simulation.series import GAP_BINS, SERIES_BINS
from fastroof.errors import BatchError, FastroofError, SimulationError
from fastroof.simulation.engine import SERIES, Outcomes
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.pools import EnginePool
from fastroof.simulation.requests import GAP_ERROR
from fastroof.simulation.run_warnings import queue_growth
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.simulation import Simulation
from fastroof.simulation.step_range import step_error
from fastroof.traces.trace import Trace


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm", front_end=0)


def made_trace(count: int, rate_per_s: float, seed: int = 1, *, shuffled: bool = False) -> Trace:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1.0 / rate_per_s, count))
    if shuffled:
        rng.shuffle(arrival_s)
    prompts = rng.integers(10, 2000, count)
    return Trace(arrival_s, prompts, rng.integers(1, 200, count), rng.integers(0, prompts), name="made")


def simulated(plan: fastroof.StepPlan, trace: Trace, **given: Any) -> Simulation:
    settings = EngineSettings.of_plan(plan, max_num_batched_tokens=2048, max_num_seqs=64, **given)
    return Simulation([EnginePool(plan, settings)], trace, run_engine(plan, trace, settings))


@pytest.fixture(scope="module")
def calm(plan: fastroof.StepPlan) -> Simulation:
    """A load that an engine serves at leisure, in no order."""
    return simulated(plan, made_trace(400, 4.0, shuffled=True))


@pytest.fixture(scope="module")
def crowded(plan: fastroof.StepPlan) -> Simulation:
    """More than an engine serves."""
    return simulated(plan, made_trace(3000, 80.0))


def by_hand(sent_s: list[float], first_s: list[float], last_s: list[float], **more: Any) -> Outcomes:
    """Outcomes as they are written down, of an engine that made a step a token."""
    count = len(sent_s)
    counters = dict.fromkeys(
        ("steps", "mixed_steps", "prefill_steps", "decode_steps", "preemptions", "peak_running",
         "peak_waiting", "peak_blocks"), 1,
    )  # fmt: skip
    counters |= {"num_gpu_blocks": 100, "end_us": np.nanmax(last_s) * 1e6}
    made = Outcomes(
        np.array(sent_s) * 1e6, np.array(first_s) * 1e6, np.array(last_s) * 1e6, np.zeros(count, np.int32),
        np.zeros(count, np.uint8), np.zeros(count, np.int32), np.zeros(GAP_BINS, np.int64),
        np.zeros((SERIES_BINS, len(SERIES))), 1e6, counters,
    )  # fmt: skip
    return made._replace(**more)


# -- requests ------------------------------------------------------------------------------------


def test_requests_are_in_the_order_of_the_file(calm: Simulation) -> None:
    rows, trace = calm.requests, calm.trace
    assert rows.column_names == [
        "arrival_s", "input_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2e_ms", "preemptions",
        "replica", "status", "cached_tokens",
    ]  # fmt: skip
    given = trace.table()
    for name in ("input_tokens", "output_tokens", "cached_tokens"):
        assert rows[name].to_pylist() == given[name].to_pylist()
    assert np.allclose(rows["arrival_s"], given["arrival_s"], rtol=1e-12)
    assert not np.all(np.diff(rows["arrival_s"]) > 0)
    ttft_ms, tpot_ms, e2e_ms = (rows[name].to_numpy() for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    gaps = rows["output_tokens"].to_numpy() - 1
    assert np.array_equal(np.isnan(tpot_ms), gaps == 0)
    assert np.allclose(e2e_ms, ttft_ms + np.where(gaps > 0, tpot_ms, 0.0) * gaps, rtol=1e-9)
    assert (ttft_ms > 0).all()
    assert rows.schema.metadata[b"fastroof.trace"] == b"made"
    assert rows.schema.metadata[b"fastroof.max_num_seqs"] == b"64"
    assert rows.schema.field("ttft_ms").metadata[b"unit"] == b"ms"


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_requests_that_are_written_are_the_trace_again(
    plan: fastroof.StepPlan, tmp_path: Path, name: str
) -> None:
    given = fastroof.Workload(rate=20, requests=50, cached_tokens="share:0.5").trace()
    first = fastroof.simulate(plan, given)
    again = fastroof.simulate(plan, fastroof.load_trace(first.write_requests(tmp_path / name)))
    assert again.requests.equals(first.requests)


@pytest.mark.parametrize("name", ["a.parquet", "a.CSV"])
def test_requests_are_written_as_they_are(calm: Simulation, tmp_path: Path, name: str) -> None:
    path = calm.write_requests(tmp_path / name)
    found = pq.read_table(path) if name == "a.parquet" else pyarrow.csv.read_csv(path)
    assert (
        found.select(["ttft_ms", "status"]).to_pydict()
        == calm.requests.select(["ttft_ms", "status"]).to_pydict()
    )
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_requests_are_written_only_to_valid_paths(calm: Simulation, tmp_path: Path) -> None:
    with pytest.raises(FastroofError, match=r"must end in \.parquet or \.csv"):
        calm.write_requests(tmp_path / "a.txt")
    with pytest.raises(FastroofError, match="does not exist"):
        calm.write_requests(tmp_path / "b" / "a.csv")


def test_a_part_of_a_run_is_refused(calm: Simulation) -> None:
    last_us = calm.outcomes.last_us.copy()
    last_us[[3, 5]] = np.nan
    with pytest.raises(SimulationError, match="2 of 400 requests were unfinished"):
        Simulation(calm.pools, calm.trace, calm.outcomes._replace(last_us=last_us))


# -- the summary ---------------------------------------------------------------------------------


def test_summary_equals_the_requests(calm: Simulation) -> None:
    answers, rows = calm.summary(), calm.requests
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        values = rows[name].drop_null().to_numpy()
        assert answers[name]["mean"] == pytest.approx(values.mean(), rel=1e-12)
        for percent in (50, 90, 95, 99):
            assert answers[name][f"p{percent}"] == np.percentile(values, percent)
    gaps = rows["output_tokens"].to_numpy() - 1
    tpot_ms = np.nan_to_num(rows["tpot_ms"].to_numpy())
    assert answers["itl_ms"]["mean"] == pytest.approx((tpot_ms * gaps).sum() / gaps.sum(), rel=GAP_ERROR)
    assert int(calm.outcomes.gaps.sum()) == gaps.sum()
    sent, ended = rows["arrival_s"].to_numpy(), rows["arrival_s"].to_numpy() + rows["e2e_ms"].to_numpy() / 1e3
    duration_s = ended.max() - sent.min()
    assert answers["duration_s"] == pytest.approx(duration_s, rel=1e-9)
    assert answers["requests_per_s"] == pytest.approx(400 / duration_s)
    assert answers["output_tokens_per_s"] == pytest.approx((gaps + 1).sum() / duration_s)
    assert answers["input_tokens_per_s"] == pytest.approx(rows["input_tokens"].to_numpy().sum() / duration_s)
    assert answers["arrivals_per_s"] == pytest.approx(399 / (sent.max() - sent.min()))
    assert (answers["requests"], answers["finished"], answers["timed_out"], answers["rejected"]) == (
        400,
        400,
        0,
        0,
    )
    assert answers["steps"] == sum(answers[f"{kind}_steps"] for kind in ("mixed", "prefill", "decode"))
    for name, most in (("running", 64), ("waiting", 400), ("kv_use", 1)):
        assert 0 <= answers[name]["mean"] <= answers[name]["peak"] <= most
    assert 0 < answers["busy"] <= 1
    # on average as many run as a request's time in the engine makes, by Little's law, from its first step on
    running = (rows["e2e_ms"].to_numpy() / 1e3).sum() / duration_s
    assert answers["running"]["mean"] <= running
    assert answers["running"]["mean"] == pytest.approx(running, rel=0.1)


def test_a_calm_load_has_no_warnings(calm: Simulation) -> None:
    assert calm.outcomes.counters["peak_waiting"] >= 2
    answers = calm.summary()
    assert answers["warnings"] == []
    assert "range" not in answers
    assert "goodput" not in answers


def test_those_that_did_not_finish_are_in_no_percentile_and_break_all_limits(plan: fastroof.StepPlan) -> None:
    trace = Trace([0.0, 0.0, 0.0, 1.0], [10, 10, 10, 10], [1, 11, 11, 11])
    nan = math.nan
    outcomes = by_hand(
        [0, 0, 0, 1], [0.1, 0.2, 0.3, nan], [0.1, 1.2, nan, nan],
        status=np.array([0, 0, 1, 2], np.uint8), replica=np.array([0, 0, 0, -1], np.int32),
    )  # fmt: skip
    sim = Simulation([EnginePool(plan, EngineSettings(64, 8, 100))], trace, outcomes)
    answers = sim.summary(ttft_ms=150, with_range=False)
    assert answers["ttft_ms"]["mean"] == pytest.approx(150.0)
    assert answers["tpot_ms"]["p99"] == pytest.approx(100.0)
    assert answers["e2e_ms"]["p50"] == pytest.approx(650.0)
    assert (answers["finished"], answers["timed_out"], answers["rejected"]) == (2, 1, 1)
    assert answers["requests_per_s"] == pytest.approx(2 / 1.2)
    assert answers["goodput"]["share"] == 0.25
    assert answers["goodput"]["kept"] == {"ttft_ms": False}
    rejected, timed_out, few = answers["warnings"]
    assert rejected.startswith("1 of 4 requests were rejected, as prompt and output together exceed")
    assert timed_out.startswith("1 of 4 requests timed out")
    assert few.startswith("with 2 requests, the 99th percentile")
    assert sim.requests["status"].to_pylist() == ["finished", "finished", "timed_out", "rejected"]
    assert sim.requests["replica"].to_pylist() == [0, 0, 0, None]
    assert sim.requests["e2e_ms"].null_count == 2
    # its first token came, though its last did not
    assert sim.requests["ttft_ms"].to_pylist()[2] == pytest.approx(300.0)


def test_a_real_engine_that_times_out_and_rejects(plan: fastroof.StepPlan) -> None:
    trace = made_trace(300, 100.0)
    sim = simulated(plan, trace, num_gpu_blocks=130, timeout_s=3.0)
    answers = sim.summary()
    assert answers["rejected"] > 0
    assert answers["timed_out"] > 0
    assert answers["finished"] + answers["timed_out"] + answers["rejected"] == 300
    assert answers["e2e_ms"]["p99"] <= 3000.0
    assert answers["kv_use"]["peak"] <= 1.0


# -- limits --------------------------------------------------------------------------------------


def test_a_client_that_gives_up_sends_its_next_request_at_once(h100: fastroof.Tables) -> None:
    """After its own time, in which the front end had the request, too."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, front_end=300)
    trace = fastroof.Workload(clients=1, requests=4, isl=100, osl=9000).trace()
    sim = fastroof.simulate(plan, trace, timeout_s=1.0)
    assert sim.requests["status"].to_pylist() == ["timed_out"] * 4
    waits_s = np.diff(sim.requests["arrival_s"].to_numpy())
    # a step that has begun is not interrupted
    step_s = float(plan.decode_us(1, 1000)) / 1e6
    assert (waits_s >= 1.0 - 1e-9).all()
    assert (waits_s <= 1.0 + 2 * step_s).all()


def test_rates_are_of_the_requests_that_finished(plan: fastroof.StepPlan) -> None:
    trace = Trace([0.0, 0.1, 0.2], [100, 10**7, 300], [5, 6, 7])
    sim = fastroof.simulate(plan, trace, on_too_long="reject")
    answers = sim.summary()
    assert (answers["finished"], answers["rejected"]) == (2, 1)
    for name, count in (("requests", 2), ("input_tokens", 400), ("output_tokens", 12)):
        assert answers[f"{name}_per_s"] == pytest.approx(count / answers["duration_s"])


def test_goodput_counts_requests_one_by_one(crowded: Simulation) -> None:
    rows = crowded.requests.to_pylist()
    limits = {"ttft_ms": 5000.0, "tpot_ms": 40.0, "e2e_ms": 12_000.0}
    kept = sum(all(row[name] is None or row[name] <= limit for name, limit in limits.items()) for row in rows)
    found = crowded.goodput(**limits)
    assert 0 < kept < len(rows)
    assert found["requests"] == kept
    assert found["share"] == kept / len(rows)
    assert found["requests_per_s"] == pytest.approx(kept / crowded.summary(with_range=False)["duration_s"])
    for name, limit in limits.items():
        p99 = crowded.summary(with_range=False)[name]["p99"]
        assert found["kept"][name] == (p99 <= limit)


@pytest.mark.parametrize(
    "limits", [{}, {"ttft_ms": 0}, {"tpot_ms": -1.0}, {"e2e_ms": math.nan}, {"ttft_ms": "1"}]
)
def test_invalid_limits_are_refused(calm: Simulation, limits: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match=r"must be milliseconds above 0|needs a limit"):
        calm.goodput(**limits)


# -- over time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["calm", "crowded"])
def test_series_add_up_to_the_whole(which: str, request: pytest.FixtureRequest) -> None:
    sim: Simulation = request.getfixturevalue(which)
    series, answers = sim.series(), sim.summary(with_range=False)
    stretch_s = float(series.schema.metadata[b"fastroof.stretch_s"])
    starts = series["time_s"].to_numpy()
    assert np.allclose(np.diff(starts), stretch_s)
    end_s = sim.outcomes.counters["end_us"] / 1e6
    assert starts[-1] < end_s <= starts[-1] + stretch_s * (1 + 1e-12)
    lengths = np.append(np.diff(starts), end_s - starts[-1])
    total = {name: float(series[name].to_numpy() @ lengths) for name in series.column_names}
    assert total["output_tokens_per_s"] == pytest.approx(sim.trace.output_tokens.sum(), rel=1e-9)
    uncached = int((sim.trace.input_tokens - sim.trace.cached_tokens).sum())
    decodes = int((sim.trace.output_tokens - 1).sum())
    assert sim.outcomes.counters["preemptions"] == 0
    assert total["computed_tokens_per_s"] == pytest.approx(uncached + decodes, rel=1e-9)
    for name in ("running", "waiting", "kv_use"):
        assert total[name] / answers["duration_s"] == pytest.approx(
            answers[name]["mean"], rel=1e-9, abs=1e-12
        )
        assert series[name].to_numpy().max() <= answers[name]["peak"] * (1 + 1e-9)
    assert total["busy"] / answers["duration_s"] == pytest.approx(answers["busy"], rel=1e-9)
    assert series["busy"].to_numpy().max() <= 1 + 1e-9


# -- queues, and the error of a step -------------------------------------------------------------


def test_an_unserved_load_is_reported(crowded: Simulation, calm: Simulation) -> None:
    growth = queue_growth(crowded.trace, crowded.outcomes)
    assert growth is not None
    assert growth.is_growing
    rows = crowded.requests
    sent_s = rows["arrival_s"].to_numpy()
    first_s = sent_s + rows["ttft_ms"].to_numpy() / 1e3
    assert growth.at_end == (first_s > sent_s.max() + 1e-9).sum()
    assert growth.arrived_per_s > growth.served_per_s
    assert any("the load exceeds the throughput" in words for words in crowded.summary()["warnings"])
    quiet = queue_growth(calm.trace, calm.outcomes)
    assert quiet is not None
    assert not quiet.is_growing


def test_random_queues_do_not_count_as_growth(plan: fastroof.StepPlan) -> None:
    found = [
        queue_growth(sim.trace, sim.outcomes)
        for sim in (simulated(plan, made_trace(300, 12.0, seed)) for seed in range(12))
    ]
    assert not any(growth is None or growth.is_growing for growth in found)


def test_growth_needs_time(plan: fastroof.StepPlan) -> None:
    at_once = simulated(plan, Trace([0.0, 0.0], [10, 20], [3, 3]))
    assert queue_growth(at_once.trace, at_once.outcomes) is None
    assert math.isnan(at_once.summary()["arrivals_per_s"])
    closed = simulated(plan, Trace([0.0] * 20, [10] * 20, [3] * 20, clients=4))
    assert queue_growth(closed.trace, closed.outcomes) is None
    assert any("with 20 requests, the 99th percentile" in words for words in closed.summary()["warnings"])


def test_a_range_is_the_same_on_other_steps(crowded: Simulation) -> None:
    found = crowded.range()
    error = crowded.plan.profile.errors.tpot
    assert found["relative_error"] == error
    assert "held out of the fit" in found["basis"]
    for place, scale in ((0, math.exp(-error)), (1, math.exp(error))):
        outcomes = run_engine(crowded.plan, crowded.trace, crowded.settings, time_scale=scale)
        again = Simulation(crowded.pools, crowded.trace, outcomes).summary(with_range=False)
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert {key: pair[place] for key, pair in found[name].items()} == again[name]
        for name in ("requests_per_s", "output_tokens_per_s", "preemptions", "timed_out"):
            assert found[name][place] == again[name]
    assert found["ttft_ms"]["p99"][0] < crowded.summary()["ttft_ms"]["p99"] < found["ttft_ms"]["p99"][1]


def test_an_answer_near_saturation_has_its_range(crowded: Simulation, calm: Simulation) -> None:
    answers = crowded.summary()
    assert answers["range"]["near_saturation"]
    # twice what is served: the queue grows, and its length more than steps change
    assert answers["range"]["amplification"] > 1.5
    assert any(words.startswith("near saturation") for words in answers["warnings"])
    wanted = calm.summary(with_range=True)["range"]
    assert not wanted["near_saturation"]
    # without queues, times change as steps do
    assert wanted["amplification"] == pytest.approx(1.0, abs=0.7)
    bursts = simulated(crowded.plan, made_trace(2000, 30.0))
    found = bursts.summary()["range"]
    assert found["near_saturation"]
    assert found["amplification"] > 2.0


def test_a_verdict_that_the_error_of_a_step_decides_is_open(calm: Simulation) -> None:
    low, high = calm.range()["tpot_ms"]["p99"]
    p99 = calm.summary()["tpot_ms"]["p99"]
    for limit, flips in (
        (low * 0.9, False),
        ((low + p99) / 2, True),
        ((high + p99) / 2, True),
        (high * 1.1, False),
    ):
        answers = calm.summary(tpot_ms=limit)
        assert ("range" in answers) == flips
        assert answers["goodput"]["kept"]["tpot_ms"] == (p99 <= limit)
        assert (
            any("TPOT keeps its limit depends on the error" in words for words in answers["warnings"])
            == flips
        )
        if flips:
            assert answers["range"]["flips"] == ["tpot_ms"]
    assert "range" not in calm.summary(tpot_ms=(low + p99) / 2, with_range=False)
    # the median's range starts below that of the 99th percentile
    of_median = calm.range()["tpot_ms"]["p50"][0] * 1.001
    assert of_median < low
    assert calm.range(tpot_ms=of_median, percentile=50.0)["flips"] == ["tpot_ms"]
    assert calm.range(tpot_ms=of_median)["flips"] == []


def test_a_run_of_another_kind_is_repeated_unchanged(calm: Simulation) -> None:
    scales = []

    def rerun(time_scale: float) -> Outcomes:
        scales.append(time_scale)
        return run_engine(calm.plan, calm.trace, calm.settings, time_scale=time_scale)

    two = [EnginePool(calm.plan, calm.settings, replicas=2)]
    sim = Simulation(two, calm.trace, calm.outcomes, rerun=rerun)
    assert sim.range()["tpot_ms"] == calm.range()["tpot_ms"]
    assert sorted(scales) == list(calm.step_error.time_scales)
    assert sim.summary()["busy"] == pytest.approx(calm.summary()["busy"] / 2)


def test_where_the_error_of_a_step_is_from(h100: fastroof.Tables, plan: fastroof.StepPlan) -> None:
    assert step_error(plan, 8.0, 1000.0).relative == plan.profile.errors.tpot
    alone = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")
    found = step_error(alone, 31.7, 1000.2)
    assert found.relative == alone.decode_error(32, 1000)
    assert "a step of 32 decodes" in found.basis
    with pytest.warns(UserWarning, match="datasheet model"):
        guessed = fastroof.compile_plan("llama-3.1-8b", "h100", None, engine="vllm")
    assert (
        step_error(guessed, 8.0, 1000.0).relative == guessed.decode_error(8, 1000) > plan.profile.errors.tpot
    )
    # larger than any plan's step
    assert step_error(alone, 1e9, 1e4).is_known


def test_an_unknown_error_is_reported(h100: fastroof.Tables) -> None:
    plan = pickle.loads(pickle.dumps(fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")))
    sim = simulated(plan, made_trace(400, 200.0))
    found = sim.range(ttft_ms=1.0)
    assert (found["relative_error"], found["near_saturation"], found["flips"]) == (None, False, [])
    assert found["basis"].startswith("unknown: an unpickled plan has no tables")
    assert "ttft_ms" not in found
    answers = sim.summary()
    assert answers["range"] == {**found}
    assert any("the error of step times is unknown" in words for words in answers["warnings"])
