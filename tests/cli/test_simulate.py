"""``fastroof simulate``: the library's own numbers, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app
from fastroof.cli.fleet_options import FLEET
from fastroof.cli.option_groups import number_or_engine
from fastroof.cli.options import limited_percentile
from fastroof.columns import ORIGINS
from fastroof.errors import BatchError, SimulationError
from fastroof.simulation import Autoscaler, Link
from fastroof.simulation.fleet_options import fleet_of_options, read_options
from fastroof.simulation.requests import mean_step

NO_NUMBER = re.compile(r"\b(nan|inf)\b")
VLLM = ("simulate", "--model", "llama-3.1-8b", "--engine", "vllm")


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments), prog_name="fastroof")
    return done.exit_code, done.stdout, done.stderr


def parsed(*arguments: str) -> Any:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


def refused(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err.removeprefix("fastroof: error: ")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace as people write one down, not in order."""
    rng = np.random.default_rng(2)
    arrivals = rng.permutation(np.cumsum(rng.exponential(0.05, 400)))
    lines = [f"{at:.6f},{rng.integers(1, 2000)},{rng.integers(1, 100)}" for at in arrivals]
    path = tmp_path_factory.mktemp("trace") / "mine.csv"
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n")
    return str(path)


def test_autoscaled_runs_print_their_gpus_and_those_of_fixed_fleets(trace: str) -> None:
    args = (*VLLM, "--trace", trace, "--ttft", "300", "--router", "least_outstanding")
    scale = (
        "--autoscale",
        "concurrency:4",
        "--max-replicas",
        "3",
        "--startup",
        "1",
        "--scale-down-delay",
        "5",
    )
    found = parsed(*args, *scale)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="vllm")
    rule = Autoscaler("concurrency", 4, max_replicas=3, startup_s=1, scale_down_delay_s=5)
    sim = fastroof.simulate(plan, fastroof.load_trace(trace), autoscaler=rule, router="least_outstanding")
    answers = json.loads(json.dumps(sim.summary(ttft_ms=300)))
    assert answers.items() <= found.items()
    per_gpu = found["output_tokens_per_s"] / answers["autoscaling"]["replicas"]["mean"]
    assert found["output_tokens_per_s_per_gpu"] == pytest.approx(per_gpu, rel=1e-12)
    code, out, _ = run(*args, *scale)
    assert code == 0
    for words in ("on up to 3 x", "GPU hours", "fixed at the peak", "fewest fixed", "started"):
        assert words in out
    code, out, _ = run(*args, *scale, "--prefill-replicas", "1", "--decode-replicas", "1")
    assert code == 0
    for words in ("on up to 6 x", "prefill  ", "decode  ", "started"):
        assert words in out
    for given, words in (
        (("--startup", "5"), "--startup needs --autoscale"),
        (scale[:4], "needs --startup"),
        (("--autoscale", "queue:1", "--startup", "1"), "needs --max-replicas"),
        (("--autoscale", "cpu:1", *scale[2:]), "METRIC:TARGET"),
        ((*scale, "--replicas", "4"), "replicas 4, with which autoscaling begins, is above max_replicas 3"),
    ):
        assert words in refused(*VLLM, "--trace", trace, *given)


def test_json_is_what_the_library_answers(trace: str, h100: fastroof.Tables) -> None:
    found = parsed(*VLLM, "--trace", trace, "--ttft", "200", "--tpot", "20", "--e2e", "3000")
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")
    sim = fastroof.simulate(plan, fastroof.load_trace(trace))
    answers = json.loads(json.dumps(sim.summary(ttft_ms=200, tpot_ms=20, e2e_ms=3000)))
    assert answers.items() <= found.items()
    assert found["relative_error"] == sim.step_error.relative
    decodes, kv_len = map(round, mean_step(sim.outcomes, sim.settings))
    mean = fastroof.StepBatch.from_requests([[(1, kv_len - 1)] * max(decodes, 1)])
    assert found["origin"] == ORIGINS[plan.run(mean).origin[0]]
    assert found["settings"]["max_num_batched_tokens"] == 8192
    assert found["settings"]["max_num_seqs"] == 1024
    assert found["settings"]["async_scheduling"]
    assert found["settings"]["timeout_s"] is None
    assert found["trace"]["requests"] == found["requests"] == 400
    explained = run("simulate", "--help-all")[1]
    for key in found:
        assert key in explained


def test_the_words_are_those_answers_too(trace: str) -> None:
    code, out, err = run(*VLLM, "--trace", trace, "--ttft", "200", "--tpot", "20", "--range")
    assert code == 0
    answers = parsed(*VLLM, "--trace", trace, "--ttft", "200", "--tpot", "20", "--range")
    lines = {line.split()[0]: line for line in out.splitlines() if line and line[0] != " "}
    assert (
        lines["TTFT"].split()[1]
        == f"{answers['ttft_ms']['mean']:,.{2 if answers['ttft_ms']['mean'] < 100 else 1}f}"
    )
    assert lines["finished"].split()[1] == "400"
    low, high = answers["range"]["e2e_ms"]["mean"]
    assert low < answers["e2e_ms"]["mean"] < high
    shown = {line.split()[0]: line.split()[1] for line in out[out.index("\nE2E") :].splitlines() if line}
    assert [shown[side] for side in ("faster", "slower")] == [f"{value:,.1f}" for value in (low, high)]
    assert "one standard error of TPOT" in lines["faster,"]
    assert f"{answers['goodput']['requests_per_s']:,.4g} requests/s" in lines["goodput"]
    found = [line.removeprefix("fastroof: warning: ") for line in err.splitlines()]
    assert found == answers["warnings"]


def test_engine_means_the_runtimes_own(trace: str) -> None:
    found = parsed(
        *VLLM, "--trace", trace, "--max-num-batched-tokens", "engine", "--max-num-seqs", "engine",
        "--no-async-scheduling", "--num-gpu-blocks", "5000", "--timeout", "30", "--no-range",
    )  # fmt: skip
    own = fastroof.engines.load_engine("vllm").scheduling
    assert found["settings"]["max_num_batched_tokens"] == own.max_num_batched_tokens
    assert found["settings"]["max_num_seqs"] == own.max_num_seqs
    assert not found["settings"]["async_scheduling"]
    assert (found["settings"]["num_gpu_blocks"], found["settings"]["timeout_s"]) == (5000, 30.0)


def test_tiers_are_printed_as_the_library_answers(tmp_path: Path, h100: fastroof.Tables) -> None:
    talks = [{"timestamp": 900 * i, "input_length": 1600, "output_length": 4} for i in range(8)]
    path, page = tmp_path / "talks.jsonl", tmp_path / "page.html"
    for i, talk in enumerate(talks):
        talk["hash_ids"] = [4 * (i % 4) + at for at in range(4)]  # type: ignore[assignment]
    path.write_text("\n".join(map(json.dumps, talks)) + "\n")
    tiers = "host:1GB:50GB/s,disk:1TB:5GB/s:20us:before_step"
    given = (*VLLM, "--trace", str(path), "--num-gpu-blocks", "200", "--kv-tiers", tiers)
    found = parsed(*given)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")
    sim = fastroof.simulate(plan, fastroof.load_trace(path), num_gpu_blocks=200, kv_tiers=tiers)
    assert found["kv_tiers"] == json.loads(json.dumps(sim.summary()["kv_tiers"]))
    host, disk = found["kv_tiers"]["tiers"]
    assert host["found_tokens"] + disk["found_tokens"] > 3000
    code, out, _ = run(*given, "--report", str(page))
    assert code == 0
    assert f"{host['fetched_bytes'] / 1e9:,.4g} GB fetched" in out
    for name in ("host", "disk"):
        assert f"KV tier {name} " in out
        assert f"in KV tier {name}" in page.read_text()
    pools = parsed(*given, "--prefill-replicas", "1", "--decode-replicas", "1")
    assert [tier["name"] for tier in pools["kv_tiers"]["tiers"]] == ["host", "disk"]
    assert "unknown KV tier" in refused(*VLLM, "--trace", str(path), "--kv-tiers", "hots")


def test_requests_and_page_are_written(trace: str, tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.parquet", tmp_path / "page.html"
    code, out, _ = run(*VLLM, "--trace", trace, "--requests", str(rows), "--report", str(page))
    assert code == 0
    assert f"wrote {rows}: 400 requests" in out
    assert f"wrote {page}" in out
    table = pq.read_table(rows)
    assert table["input_tokens"].to_pylist() == fastroof.load_trace(trace).table()["input_tokens"].to_pylist()
    assert "<h1>llama-3.1-8b on 1 x NVIDIA H100 SXM" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--isl", "5"), "give one of them"),
        (("--router", "by_name"), "router must be one of"),
        (("--ttft", "0"), "ttft_ms must be milliseconds above 0"),
        (("--ttft", "9", "--percentile", "101"), "percentile must be a number above 0 and up to 100"),
        (("--max-num-seqs", "many"), "--max-num-seqs needs a whole number"),
        (("--block-size", "0"), "--block-size needs a whole number"),
        (("--max-num-seqs", "10000"), "max_num_seqs 10,000 must not be above max_num_batched_tokens"),
        (("--requests", "rows.txt"), "must end in .parquet or .csv"),
        (("--report", "page.pdf"), "must end in .html"),
        (("--num-gpu-blocks", "3"), "can never run"),
        (("--timeout", "-1"), "timeout_s must be seconds above 0"),
        (("--order", "alphabetical"), "order must be one of"),
    ],
)
def test_command_errors(trace: str, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*VLLM, "--trace", trace, *arguments)


def test_requests_that_are_too_long_may_be_rejected(trace: str) -> None:
    found = parsed(*VLLM, "--trace", trace, "--num-gpu-blocks", "100", "--too-long", "reject")
    assert 0 < found["rejected"] < 400
    assert "were rejected" in found["warnings"][0]


def written(path: Path, *rows: str) -> str:
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows, ""]))
    return str(path)


def page_data(page: Path) -> str:
    found = re.search(r'id="results">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_arrivals_that_span_no_time_have_no_rate(tmp_path: Path) -> None:
    for name, rows in {"burst": ("3,100,10", "3,200,5"), "one": ("0,100,10",)}.items():
        trace = written(tmp_path / f"{name}.csv", *rows)
        page = tmp_path / f"{name}.html"
        code, out, _ = run(*VLLM, "--trace", trace, "--ttft", "500", "--report", str(page))
        assert code == 0
        assert f"{len(rows)} requests of {name}, all at once, " in out
        assert not NO_NUMBER.search(out)
        assert not NO_NUMBER.search(page_data(page))
        assert parsed(*VLLM, "--trace", trace)["arrivals_per_s"] is None
    assert "20 requests/s" in run(*VLLM, "--trace", written(tmp_path / "two.csv", "0,9,9", "0.05,9,9"))[1]


def test_a_run_of_which_nothing_runs_has_no_rates(tmp_path: Path) -> None:
    trace, page = written(tmp_path / "long.csv", "0,9999999,10", "1,9999999,10"), tmp_path / "long.html"
    options = ("--trace", trace, "--too-long", "reject", "--ttft", "500", "--tpot", "50")
    code, out, _ = run(*VLLM, *options, "--report", str(page))
    assert code == 0
    assert "0 in 0 s, 2 rejected" in out
    assert "none: no request ran" in out
    assert not NO_NUMBER.search(out)
    assert not NO_NUMBER.search(page_data(page))
    assert json.loads(run(*VLLM, *options, "--json")[1])["requests_per_s"] is None


def test_requests_may_be_drawn(h100: fastroof.Tables) -> None:
    drawn = ("--rate", "5", "--num-requests", "300", "--isl", "uniform:100:900", "--seed", "3")
    found = parsed(*VLLM, *drawn, "--replicas", "2", "--router", "power_of_two")
    workload = fastroof.Workload(rate=5, requests=300, isl="uniform:100:900", seed=3)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")
    sim = fastroof.simulate(plan, workload.trace(), replicas=2, router="power_of_two", seed=3)
    assert found["ttft_ms"] == sim.summary()["ttft_ms"]
    assert found["output_tokens_per_s_per_gpu"] == pytest.approx(found["output_tokens_per_s"] / 2)
    closed = parsed(*VLLM, "--clients", "8", "--num-requests", "100")
    assert closed["trace"]["clients"] == 8
    assert closed["running"]["peak"] <= 8
    assert "8 clients" in run(*VLLM, "--clients", "8", "--num-requests", "100")[1]


def test_the_example_needs_no_option_but_a_model() -> None:
    found = parsed("simulate", "--model", "llama-3.1-8b")
    assert found["finished"] == found["requests"] > 0
    assert found["engine"] == "vllm"


def test_numbers_and_limits_as_they_are_written() -> None:
    assert number_or_engine("--x", " 12 ") == 12
    assert number_or_engine("--x", "engine") is None
    for wrong in ("", "0", "-1", "1.5", "1e3", "99999999999"):
        with pytest.raises(SimulationError, match="--x needs a whole number"):
            number_or_engine("--x", wrong)
    assert [limited_percentile(*given) for given in ((None, False), (90.0, False), (None, True))] == [
        99,
        90,
        None,
    ]
    with pytest.raises(BatchError, match="--mean or --percentile"):
        limited_percentile(90.0, True)


def test_pools_are_those_of_the_library(trace: str, h100: fastroof.Tables) -> None:
    pools = ("--prefill-replicas", "2", "--decode-replicas", "1", "--kv-bandwidth", "50")
    options = ("--prefill-tp", "2", "--back-pressure")
    found = parsed(*VLLM, "--trace", trace, *pools, *options)
    plans = [fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=tp, engine="vllm") for tp in (2, 1)]
    link = Link(50e9, back_pressure=True)
    prefill, decode = plans
    fleet = fastroof.Fleet([fastroof.Pool(prefill, 2), fastroof.Pool(decode)], link=link)
    sim = fastroof.simulate(fleet, fastroof.load_trace(trace))
    assert json.loads(json.dumps(sim.summary())).items() <= found.items()
    assert found["output_tokens_per_s_per_gpu"] == found["output_tokens_per_s"] / 5
    code, out, _ = run(*VLLM, "--trace", trace, *pools)
    assert code == 0
    assert "2 x tp 1 prefill" in out
    assert "on 3 x NVIDIA H100 SXM" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prefill-replicas", "2"), "go together"),
        (("--back-pressure",), "--back-pressure needs --prefill-replicas"),
        (("--prefill-replicas", "1", "--decode-replicas", "1", "--replicas", "2"), "--replicas 2"),
    ],
)
def test_pools_that_cannot_be_are_refused(trace: str, options: tuple[str, ...], words: str) -> None:
    assert words in refused(*VLLM, "--trace", trace, *options)


def test_the_page_reads_the_engines_of_the_command(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100)

    def read(text: str) -> fastroof.Fleet:
        return fleet_of_options(read_options(text), lambda _: plan, {})

    assert read_options("") == {name: default for name, (_, default) in FLEET.items()}
    pools = "--prefill-replicas 2 --decode-replicas 1 --no-back-pressure --kv-bandwidth 50"
    assert read(pools).link == Link(50e9)
    scaled = "--autoscale queue:2 --max-replicas 4 --startup 30 --min-replicas 2"
    assert read(scaled).autoscaler == Autoscaler.parsed(
        "queue:2", max_replicas=4, startup_s=30.0, min_replicas=2
    )


def test_draft_tokens_are_those_of_the_library(trace: str, h100: fastroof.Tables) -> None:
    options = ("--num-draft-tokens", "3", "--accepted", "0.8,0.5,0.3", "--draft", "mtp")
    found = parsed(*VLLM, "--trace", trace, *options)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")
    drafts = fastroof.SpeculativeDecoding(3, (0.8, 0.5, 0.3), "mtp")
    sim = fastroof.simulate(plan, fastroof.load_trace(trace), speculation=drafts)
    assert json.loads(json.dumps(sim.summary())).items() <= found.items()
    assert (found["num_draft_tokens"], found["accepted"], found["draft"]) == (3, 2.6, "mtp")
    code, out, _ = run(*VLLM, "--trace", trace, *options)
    assert code == 0
    assert f"{drafts}; simulated {found['acceptance_length']:.3f}" in out
    assert refused(*VLLM, "--trace", trace, "--accepted", "2").startswith(
        "--accepted needs --num-draft-tokens"
    )
