"""``fastroof capacity`` and ``best --percentile``: what they print is what the library answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import fastroof
from fastroof.simulation.fewest_replicas import fewest_by_hour, fewest_replicas
from fastroof.sweep import best_deployments
from tests.command_line import good, refused

DRAWN = ("--num-requests", "300", "--isl", "600", "--osl", "40", "--seed", "4")
MODEL = ("--model", "llama-3.1-8b", "--engine", "vllm")
SPEC = """
models = ["llama-3.1-8b"]
tp = [1, 2]
max_num_seqs = 64
[workload]
requests = 200
isl = 500
osl = 30
[slo]
ttft_p99_ms = 300
"""


def workload() -> fastroof.Workload:
    return fastroof.Workload(requests=300, isl=600, osl=40, seed=4)


def plan() -> fastroof.StepPlan:
    return fastroof.compile_plan(
        "llama-3.1-8b",
        "h100",
        fastroof.load_tables("h100"),
        engine="vllm",
        max_num_batched_tokens=8192,
        max_num_seqs=1024,
    )


ENGINES_OWN: dict[str, Any] = {"max_num_batched_tokens": None, "max_num_seqs": None, "block_size": None}


@pytest.mark.slow
def test_the_capacity_of_a_model_is_what_the_library_answers() -> None:
    limits = ("--ttft", "300", "--slo", "tpot_p90=25")
    found = json.loads(good("capacity", *MODEL, *DRAWN, *limits, "--json"))
    most = fastroof.capacity(plan(), workload(), ttft_p99_ms=300, tpot_p90_ms=25, **ENGINES_OWN)
    names = ("requests_per_s", "limit", "low", "high", "simulations", "at_capacity", "basis")
    for name in (*names, "requests", "counted", "sampling_error"):
        assert found[name] == getattr(most, name)
    assert found["simulated"][-1]["requests_per_s"] is None
    explained = good("capacity", "--help-all")
    assert all(key in explained for key in found)
    printed = good("capacity", *MODEL, *DRAWN, *limits)
    assert f"{most.requests_per_s:,.4g} requests/s" in printed
    assert "above it, p9" in printed
    assert "all at once" in printed
    assert "by one standard error" in printed
    assert f"{most.counted:,} count, without ramp and drain" in printed
    given = good("capacity", *MODEL, *DRAWN, *limits, "--no-steady")
    assert "of up to 300 requests" in given
    assert "by chance" not in given


@pytest.mark.parametrize("seed", [str(seed) for seed in range(6)])
@pytest.mark.parametrize("of_sessions", [False, True])
def test_the_printed_capacity_keeps_the_limits_when_it_is_simulated(seed: str, of_sessions: bool) -> None:
    """And the next rate of the printed table does not, whatever the mean rate of the draw itself."""
    drawn = (*DRAWN[:-1], seed, "--isl", "lognormal:1024:0.6", "--osl", "lognormal:100:0.5")
    drawn += ("--turns", "2", "--think", "exponential:1") if of_sessions else ()
    out = good("capacity", *MODEL, *drawn, "--no-steady", "--ttft", "300", "--tpot", "25")
    unit = "sessions/s" if of_sessions else "requests/s"
    (kept,) = re.findall(rf": ([0-9.]+) {unit}", out)
    (above,) = re.findall(rf"^ *{kept} .*yes.*\n *([0-9.]+) .*no", out, re.MULTILINE)
    for rate, holds in ((kept, True), (above, False)):
        simulated = good("simulate", *MODEL, *drawn, "--rate", rate, "--no-range", "--json")
        answers = json.loads(simulated)
        within = answers["ttft_ms"]["p99"] <= 300 and answers["tpot_ms"]["p99"] <= 25
        assert within == holds


def test_a_capacity_names_the_whole_layout() -> None:
    args = ("capacity", *MODEL, *DRAWN, "--gpu", "h200", "--dp", "4", "--ttft", "300")
    assert "llama-3.1-8b, 1 x tp 1, dp 4 on 4 x h200, " in good(*args)
    found = json.loads(good(*args, "--json"))
    sizes = {name: found[name] for name in ("tp", "pp", "dp", "ep", "moe_tp", "gpus")}
    assert sizes == {"tp": 1, "pp": 1, "dp": 4, "ep": 1, "moe_tp": 4, "gpus": 4}


@pytest.mark.slow
def test_it_prints_that_no_rate_or_all_rates_keep_the_limits() -> None:
    assert "no rate keeps p99 TTFT" in good("capacity", *MODEL, *DRAWN, "--ttft", "1")
    all_kept = good("capacity", *MODEL, *DRAWN, "--e2e", "1000000")
    assert "above it, requests arrive faster than they are served" in all_kept
    few = good("capacity", *MODEL, "--limit", "3", "--no-steady", "--e2e", "1000000")
    assert "even all requests at once keep the limits" in few
    drawn = good("capacity", *MODEL, *DRAWN, "--ttft", "300", "--draws", "2")
    assert re.search(r"by chance ±[0-9.]+ %, one standard error", drawn)


def test_the_fewest_replicas_of_a_rate() -> None:
    args = ("capacity", *MODEL, *DRAWN, "--ttft", "300", "--fewest", "--rate", "120")
    found = json.loads(good(*args, "--json"))
    few = fewest_replicas(plan(), workload().trace(rate=120.0), ttft_p99_ms=300)
    assert found["replicas"] == few.replicas > 1
    assert found["gpus"] == few.gpus
    assert f"{few.replicas} replicas, {few.gpus} GPUs; one fewer breaks p99 TTFT" in good(*args)


def test_a_trace_covers_the_period_that_is_given(tmp_path: Path) -> None:
    """Two requests within a millisecond are 1,000 a second, or 2 an hour."""
    trace = tmp_path / "hour.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,1500,100\n0.001,1500,100\n")
    args = ("capacity", *MODEL, "--trace", str(trace), "--ttft", "4000", "--tpot", "100", "--fewest")
    (replicas,) = re.findall(r"1,000 requests/s: (\d+) replicas", good(*args))
    assert 30 < int(replicas) < 45
    assert "0.0005556 requests/s: 1 replica is enough" in good(*args, "--period", "3600")
    assert "0.001111 requests/s: 1 replica" in good(*args, "--period", "3600", "--rate-scale", "2")
    assert "period_s must be seconds from 0 to" in refused(*args, "--period", "-1")
    assert "--period replays a trace, --rate draws requests" in refused(
        "capacity", *MODEL, "--rate", "1", "--period", "60", "--ttft", "300", "--fewest"
    )


@pytest.mark.slow
def test_the_fewest_replicas_of_a_burst(tmp_path: Path) -> None:
    trace = tmp_path / "burst.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,10\n0,200,5\n")
    args = ("capacity", *MODEL, "--trace", str(trace), "--ttft", "300", "--fewest")
    assert "half of the costs of 0.19), all at once: 1 replica is enough" in good(*args)
    assert json.loads(good(*args, "--json"))["requests_per_s"] is None
    assert "all arrive at once" in refused(*args[:-1])


@pytest.mark.slow
def test_a_specification_is_swept_and_goes_on(tmp_path: Path) -> None:
    spec, output = tmp_path / "my.toml", tmp_path / "rows.parquet"
    spec.write_text(SPEC)
    out = good("capacity", str(spec), "-o", str(output), "--resume")
    rows = pq.read_table(output).to_pylist()
    assert len(rows) == 2
    assert f"{rows[0]['requests_per_s_per_gpu']:,.4g}" in out
    tighter = json.loads(good("capacity", str(spec), "-o", str(output), "--ttft", "60", "--json"))
    assert tighter["best"][0]["requests_per_s_per_gpu"] < rows[0]["requests_per_s_per_gpu"]
    assert tighter["candidates"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MODEL,), "a capacity needs a limit"),
        ((*MODEL, "--slo", "ttft=5,x=1"), "--slo needs limits in ms like ttft_p90=300"),
        ((*MODEL, "--slo", "ttft_p999=500"), "unknown limit 'ttft_p999_ms'"),
        ((*MODEL, "--ttft", "-3"), "above 0"),
        ((*MODEL, "--ttft", "300", "--rate", "3"), "--rate needs --fewest"),
        ((*MODEL, "--ttft", "300", "--trace", "example", "--isl", "30"), "--trace replays a trace"),
        ((*MODEL, "--ttft", "300", "--trace", "absent.csv"), "absent.csv"),
        ((*MODEL, "--ttft", "300", "--draws", "2"), "draws needs a workload"),
        ((*MODEL, "--ttft", "300", "--fewest", "--num-requests", "9"), "a workload needs a rate"),
        (
            (*MODEL, "--ttft", "300", "--router", "mine", *DRAWN, "--replicas", "2"),
            "router must be one of",
        ),
        (("--model", "no-such-model", "--ttft", "300"), "no-such-model"),
        (("--ttft", "300"), "give --model MODEL, or a specification"),
        (("absent.toml", "--ttft", "300"), "absent.toml"),
        ((*MODEL, "--ttft", "300", "-o", "a.csv"), "--results goes with a specification"),
        ((*MODEL, "--ttft", "300", "--restart"), "--restart goes with a specification"),
        (("my.toml", "--draws", "2"), "--draws goes with --model"),
        (("my.toml", "--no-steady"), "--steady goes with --model"),
    ],
)
def test_impossible_questions_are_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("capacity", *arguments)


def test_a_specification_of_another_sweep_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "my.toml"
    spec.write_text('models = ["llama-3.1-8b"]\nisl = 500\nosl = 30\nclients = 4\n')
    assert "has neither [workload] nor [slo]" in refused("capacity", str(spec))


@pytest.mark.slow
def test_best_shows_the_percentile_next_to_the_closed_form(tmp_path: Path) -> None:
    spec = tmp_path / "my.toml"
    spec.write_text(
        'models = ["llama-3.1-8b"]\ntp = [1, 2]\nisl = 500\nosl = 30\nclients = [8, 64]\n'
        "[constraints]\nttft_ms = 300\n"
    )
    args = ("best", str(spec), "--percentile", "99", "--num-requests", "200", "--threads", "1")
    (answer,) = best_deployments(spec, percentile=99, requests=200).answers
    first = answer.choices[0].percentile
    assert first is not None
    printed = good(*args)
    assert "limits are on p99" in printed
    assert f"{first.requests_per_s:,.4g}" in printed
    found = json.loads(good(*args, "--json"))
    assert found["answers"][0]["choices"][0]["percentile"] == first._asdict()


@pytest.mark.slow
def test_a_custom_log_is_served_and_left_out_rows_are_reported_once(tmp_path: Path) -> None:
    log, copy = tmp_path / "log.csv", tmp_path / "copy.jsonl"
    rows = "".join(
        f"2026-01-01 00:00:{n:02};{100 + n};{'' if n % 5 > 3 else 9};{'ab'[n % 2]};{200 + n % 5 // 4 * 300}\n"
        for n in range(40)
    )
    log.write_text(f"begun;in;out;model;status\n{rows}")
    args = ("--trace", str(log), "--columns", "arrival=begun,input=in,output=out", "--where", "model=a")
    requests = fastroof.load_trace(
        log, columns={"arrival": "begun", "input": "in", "output": "out"}, where="model=a"
    )
    assert (len(requests), requests.left_out) == (16, {"not model=a": 20, "status 500": 4})
    printed = good("capacity", *MODEL, *args, "--ttft", "300")
    assert (
        printed.count("left out: 20 rows (not model=a)")
        == printed.count("left out: 4 rows (status 500)")
        == 1
    )
    found = json.loads(good("capacity", *MODEL, *args, "--ttft", "300", "--json"))
    # the 16 requests are repeated
    assert (found["left_out"], found["counted"] % 16) == (requests.left_out, 0)
    assert found["requests"] > found["counted"] >= 20_000
    assert found["requests_per_s"] == fastroof.capacity(plan(), requests, ttft_p99_ms=300).requests_per_s
    simulated = json.loads(good("simulate", *MODEL, *args, "--json"))
    assert simulated["trace"]["left_out"] == requests.left_out
    # the same requests as another simulator's file
    printed = good("export", "trace", *args, "--format", "llmservingsim", "-o", str(copy))
    assert printed.count("left out") == 2
    assert f"wrote {copy}: 16 requests of log" in printed.replace("\n", " ")
    again = json.loads(good("simulate", *MODEL, "--trace", str(copy), "--json"))
    assert again["ttft_ms"] == simulated["ttft_ms"]
    assert "has no column 'inn'; did you mean 'in'?" in refused(
        "capacity", *MODEL, *args[:3], "input=inn", "--ttft", "300"
    )
    assert "t.csv: llmservingsim traces are .jsonl files" in refused(
        "export", "trace", *args, "--format", "llmservingsim", "-o", "t.csv"
    )


def test_the_fewest_replicas_by_the_hour_are_the_library_s() -> None:
    day = ("--hourly", "10:0:60", *DRAWN[2:])
    args = ("capacity", *MODEL, *day, "--ttft", "300", "--fewest", "--by-hour")
    found = json.loads(good(*args, "--json"))
    load = fastroof.Workload(hourly=(10, 0, 60), isl=600, osl=40, seed=4)
    expected = fewest_by_hour(plan(), load, ttft_p99_ms=300)
    assert expected.document().items() <= found.items()
    out = good(*args)
    assert f"{expected.gpu_hours:g} GPU hours ({expected.gpu_hours_at_peak:g} with" in out
    assert re.search(r"1 +0 +0 +-", out)
    assert "--by-hour goes with --fewest" in refused(*args[:-2], "--by-hour")


AGENTS = (
    "--turns", "2", "--calls", "uniform:1:4", "--growth", "300", "--isl", "900", "--osl", "40",
    "--tool", "0.4", "--think", "3", "--num-requests", "200",
)  # fmt: skip


def test_a_capacity_of_sessions_is_in_sessions() -> None:
    args = ("capacity", *MODEL, *AGENTS, "--ttft", "200", "--no-steady")
    found = json.loads(good(*args, "--json"))
    assert found["sessions_per_s"] * found["requests_per_session"] == pytest.approx(found["requests_per_s"])
    assert all(key in good("capacity", "--help-all") for key in found)
    printed = good(*args)
    assert (
        f"{found['sessions_per_s']:,.4g} sessions/s, {found['open_sessions']:,.4g} open at once, " in printed
    )
    assert re.search(r"sessions/s +requests/s +kept", printed)
    few = ("capacity", *MODEL, *AGENTS, "--ttft", "200", "--no-steady", "--fewest", "--rate", "9")
    found = json.loads(good(*few, "--json"))
    assert f"{found['sessions_per_s']:,.4g} sessions/s, {found['requests_per_s']:,.4g} requests/s: " in good(
        *few
    )
