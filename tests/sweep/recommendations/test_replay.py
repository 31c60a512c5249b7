"""``best --trace``: what it prints is what ``simulate`` and ``capacity`` print of its first choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app
from fastroof.errors import SweepError
from fastroof.sweep import Replay, percentile_search

BEST = ("best", "--model", "llama-3.1-8b", "--gpus", "2", "--ttft", "900", "--tpot", "30")
TIERS = ("--kv-tiers", "vllm-offloading:20GB", "--router", "prefix_aware")
DRAFTS = ("--num-draft-tokens", "2", "--accepted", "0.7,0.4")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions that share a system prompt."""
    drawn = fastroof.Workload(
        rate=0.5, requests=240, turns=3, calls="uniform:1:4", tool_s=0.5, think_s="exponential:4",
        isl="lognormal:3000:0.5", growth_tokens=400, osl=80, system_tokens=1500,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("traces") / "agents.parquet"
    pq.write_table(drawn.trace().table(), path)
    return path


def answer(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    "options", [(), TIERS, ("--rate", "0.9", *DRAFTS), ("--clients", "12", *TIERS), ("--sessions", *TIERS)]
)
def test_simulate_of_the_first_choice_gives_its_figures(agents: Path, options: tuple[str, ...]) -> None:
    found = answer(*BEST, "--trace", str(agents), *options)
    choice, command = found["answers"][0]["choices"][0], found["simulate"][0]
    row, most = choice["row"], choice["percentile"]
    sim = answer(*command[1:])
    assert sim["output_tokens_per_s_per_gpu"] == row["tokens_per_s_per_gpu"]
    for name, limit in (("ttft_ms", 900), ("tpot_ms", 30)):
        at_p99 = most["values_ms"][f"{name.removesuffix('_ms')}_p99_ms"]
        assert at_p99 == pytest.approx(sim[name]["p99"], rel=1e-12)
        assert row[name] == sim[name]["mean"]
        assert at_p99 <= limit
    # the load is the one that a capacity of the same deployment finds
    load = command.index("--clients" if "clients" in row and "--rate" not in command else "--rate")
    words = ["capacity", *command[2:load], *command[load + 2 :], "--ttft", "900", "--tpot", "30"]
    if "--sessions" in options:
        assert answer(*words, "--sessions")["sessions"] == row["clients"]
    elif "--clients" not in options:
        most_s = answer(*words, "--no-steady")["requests_per_s"]
        assert most_s == most["requests_per_s"] >= row["requests_per_s"] * (1 - 1e-12)


def test_the_search_finds_what_simulating_all_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    question: dict[str, Any] = {"total_gpus": 8, "ttft_ms": 3000, "tpot_ms": 100}
    replay = Replay(fastroof.Workload(rate=9, requests=5000, isl="lognormal:1200:0.6", osl=200).trace())
    few = fastroof.recommend("llama-3.1-8b", replay=replay, **question).answers.answers[0]
    monkeypatch.setattr(percentile_search, "BOUND_MARGIN", float("inf"))
    every = fastroof.recommend("llama-3.1-8b", replay=replay, **question).answers.answers[0]
    assert few.simulated < every.simulated
    assert few.choices[0].row == every.choices[0].row


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--clients", "4"), "--clients needs --trace"),
        (("--trace", "example", "--clients", "4", "--rate", "2"), "a replay has one load, got rate and cl"),
        (("--trace", "example", "--num-requests", "9"), "--limit takes the first ones of a trace"),
        (("--trace", "example", "--isl", "9"), "lengths and prefixes of its own: leave isl out"),
        (("--trace", "example", "--mean"), "a replay applies limits to a percentile"),
        (("--trace", "example", "--ttft", "inf", "--tpot", "inf"), "a replay needs limits on times"),
        (("--trace", "example", "--kv-tiers", "mine:1GB"), "'mine:1GB' needs a bandwidth"),
        (("--trace", "example", "--accepted", "2"), "draft tokens need --num-draft-tokens"),
        (("--trace", "example", "--percentile", "200"), "percentile must be"),
        (
            (
                "--trace",
                "example",
                "--num-draft-tokens",
                "2",
                "--accepted",
                "2",
                "--draft",
                "llama-3.2-1b,pp=2",
            ),
            "--draft is MODEL[,tp=1,dtype=bf16]",
        ),
    ],
)
def test_wrong_replays_are_one_line(options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, [*BEST[:5], *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("error:") == 1


def test_a_replay_is_a_replay() -> None:
    with pytest.raises(SweepError, match="replay must be a Replay, got 'mine'"):
        fastroof.recommend("llama-3.1-8b", total_gpus=1, replay="mine")  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_has_the_gpus_that_hold_it() -> None:
    words = ["best", "--model", "llama-3.1-405b", "--gpus", "1", "--trace", "example"]
    result = CliRunner().invoke(app, words)
    assert "would hold" in result.stdout + result.stderr
