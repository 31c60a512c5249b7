"""The configuration for llm-d-inference-sim: its keys, its fit, and the errors that it states."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.backends.llm_d import Latencies, export_llm_d, fit_llm_d, llm_d_yaml, simulated_ms
from fastroof.cli import app
from fastroof.errors import BackendError
from fastroof.serving import estimate
from tests.backends.interfaces import recorded
from tests.backends.llm_d_simulator import LATENCIES, SETTINGS, Simulator, duration_ns
from tests.examples import llm_d as llm_d_example


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")


@pytest.mark.parametrize("is_flat", [False, True])
def test_the_simulator_answers_like_the_fit(plan: fastroof.StepPlan, is_flat: bool) -> None:
    fit = fit_llm_d(plan)
    simulator = Simulator(llm_d_yaml(plan, fit, is_flat=is_flat))
    assert simulator.settings["latency-calculator"] == "per-token"
    assert simulator.settings["model"] == "meta-llama/Llama-3.1-8B"
    assert simulator.settings["max-num-seqs"] == 64
    assert ("latencies" in simulator.settings) != is_flat
    for i, (running, isl) in enumerate(zip(fit.clients, fit.isl, strict=True)):
        assert simulator.first_token_ns(int(running), int(isl)) == fit.simulated_ttft_ms[i] * 1e6
        assert simulator.next_token_ns(int(running)) == fit.simulated_tpot_ms[i] * 1e6


def test_the_fit_is_of_what_clients_see(plan: fastroof.StepPlan) -> None:
    fit = fit_llm_d(plan)
    seen = estimate(plan, fit.isl, fit.osl, fit.clients, arrivals="random")
    assert np.array_equal(fit.ttft_ms, seen.ttft_ms)
    assert np.array_equal(fit.tpot_ms, seen.tpot_ms)
    assert len(fit.isl) == 7 * 5 * 2


def test_the_errors_stated_are_those_of_the_simulator(plan: fastroof.StepPlan) -> None:
    fit = fit_llm_d(plan, isl=[512, 2048], osl=256)
    text = llm_d_yaml(plan, fit)
    simulator = Simulator(text)
    points = [(int(c), int(i)) for c, i in zip(fit.clients, fit.isl, strict=True)]
    first = np.array([simulator.first_token_ns(*point) for point in points]) / 1e6 / fit.ttft_ms - 1.0
    following = np.array([simulator.next_token_ns(c) for c, _ in points]) / 1e6 / fit.tpot_ms - 1.0
    stated = [float(value) for value in re.findall(r"(?:MAPE|at most) ([0-9.]+) %", text)]
    for requests, ttft, itl in re.findall(
        r"#   (\d+): first token ([0-9.]+) %, inter-token ([0-9.]+) %", text
    ):
        here = fit.clients == int(requests)
        of_these = [100.0 * np.abs(errors[here]).mean() for errors in (first, following)]
        assert [float(ttft), float(itl)] == pytest.approx(of_these, abs=0.05 + 1e-9)
    assert text.count(": first token") == len(np.unique(fit.clients))
    found = [f(100.0 * np.abs(errors)) for errors in (first, following) for f in (np.mean, np.max)]
    assert stated == pytest.approx(found, abs=0.05 + 1e-9)


def test_one_point_is_met_to_the_millisecond(plan: fastroof.StepPlan) -> None:
    """If the formula holds, the only error is rounding to milliseconds."""
    fit = fit_llm_d(plan, clients=32, isl=1024, osl=256)
    assert abs(fit.simulated_ttft_ms - fit.ttft_ms).max() <= 0.5 + 1e-9
    assert abs(fit.simulated_tpot_ms - fit.tpot_ms).max() <= 0.5 + 1e-9


def test_the_fit_is_good_and_no_step_betters_it(plan: fastroof.StepPlan) -> None:
    fit = fit_llm_d(plan, isl=1024, osl=256)
    first, following = (np.abs(errors).mean() for errors in fit.errors)
    assert first < 0.15
    assert following < 0.15
    for name, step in itertools.product(("prefill_overhead_ns", "inter_token_latency_ns"), (10**6, 250_000)):
        for change in (-step, step):
            values = {**vars(fit.latencies), name: max(getattr(fit.latencies, name) + change, 0)}
            one, other = simulated_ms(Latencies(**values), fit.clients, fit.isl)
            worse = np.abs(one / fit.ttft_ms - 1.0).mean() + np.abs(other / fit.tpot_ms - 1.0).mean()
            assert worse >= first + following - 1e-12


def test_one_client_has_no_load(plan: fastroof.StepPlan) -> None:
    fit = fit_llm_d(plan, clients=1)
    simulator = Simulator(llm_d_yaml(plan, fit))
    assert simulator.settings["max-num-seqs"] == 1
    assert simulator.factor == 1.0


def test_what_does_not_fit_is_left_out(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-2-7b", "h100", h100, engine="kernels")
    fit = fit_llm_d(plan, clients=[1, 64, 512], isl=[128, 4090], osl=[64])
    assert fit.left_out == 3
    assert (fit.isl + fit.osl <= plan.model.max_position).all()
    assert "3 points" in llm_d_yaml(plan, fit)
    with pytest.raises(BackendError, match="no such requests fit"):
        fit_llm_d(plan, isl=5000)


def test_the_kv_cache_takes_its_bytes_over_the_link(plan: fastroof.StepPlan) -> None:
    fit = fit_llm_d(plan, isl=[1024, 3072])
    simulator = Simulator(llm_d_yaml(plan, fit, link_bytes_per_s=25e9))
    token_ns = plan.memory.kv_bytes_per_token / 25e9 * 1e9
    assert simulator.times["kv-cache-transfer-time-per-token"] == round(token_ns)
    assert simulator.first_token_ns(1, 4096, is_remote=True) == int(round(token_ns) * 4096 / 1e6) * 10**6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"osl": 1}, "osl needs whole numbers of at least 2"),
        ({"isl": [0, 4]}, "isl needs whole numbers of at least 1"),
        ({"clients": 1.5}, "clients needs whole numbers"),
        ({"clients": []}, "clients needs whole numbers"),
    ],
)
def test_wrong_ranges_are_refused(plan: fastroof.StepPlan, given: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        fit_llm_d(plan, **given)


def test_a_link_moves_something(plan: fastroof.StepPlan) -> None:
    with pytest.raises(BackendError, match="moves no KV cache"):
        llm_d_yaml(plan, fit_llm_d(plan, isl=128), link_bytes_per_s=0.0)


def test_a_file_is_written_atomically(plan: fastroof.StepPlan, tmp_path: Path) -> None:
    fit = fit_llm_d(plan, isl=256)
    path = tmp_path / "fitted.yaml"
    path.write_text("before")
    assert export_llm_d(plan, path, fit) is fit
    assert path.read_text() == llm_d_yaml(plan, fit)
    for wrong in (tmp_path / "fitted.txt", tmp_path / "nowhere" / "fitted.yaml"):
        with pytest.raises(BackendError):
            export_llm_d(plan, wrong, fit)
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    with pytest.raises(BackendError):
        export_llm_d(plan, folder, fit)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fitted.yaml", "folder.yaml"]


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "70b.yaml"
    done = CliRunner().invoke(
        app,
        [
            "export", "llm-d", "llama-3.1-70b,tp=4,dtype=fp8", "-o", str(path), "--isl", "512,2048",
            "--osl", "256", "--clients", "1,8,32", "--model-name", "my-70b",
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    text = path.read_text()
    comments = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    assert done.stdout.splitlines()[:-1] == comments[:-1]
    simulator = Simulator(text)
    assert simulator.settings["model"] == "my-70b"
    assert simulator.settings["max-num-seqs"] == 32
    assert "latencies" not in simulator.settings, "releases read keys of the top level"
    refused = CliRunner().invoke(app, ["export", "llm-d", "llama-3.1-8b", "-o", str(tmp_path / "x.json")])
    assert refused.exit_code == 2
    assert "a .yaml file" in refused.stderr


def test_the_example_prints_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    llm_d_example.main()
    head, _, table = capsys.readouterr().out.partition("\n\n")
    assert Simulator(head).settings["max-num-seqs"] == 64
    assert len(table.splitlines()) == 9


def test_durations_are_read_exactly() -> None:
    assert [duration_ns(text) for text in ("12.5ms", "0us", "0.291us", "1m1.5s")] == [
        12_500_000, 0, 291, 61_500_000_000,
    ]  # fmt: skip


def test_the_stand_in_reads_the_recorded_keys() -> None:
    [interface] = recorded("llm_d")
    keys = set(interface.signatures)
    assert keys == SETTINGS | {f"latencies.{key}" for key in LATENCIES}
