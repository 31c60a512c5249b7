"""``--energy`` of step, serving and simulate: the library's own numbers, their words, and refusals."""

from __future__ import annotations

import json

import pytest

from fastroof import StepBatch, Workload, compile_plan, simulate
from fastroof.serving import estimate
from tests.command_line import run

MODEL = ("--model", "llama-3.1-8b", "--gpu", "h100")
LOAD = ("--isl", "500", "--osl", "40")


def test_json_is_what_the_library_answers() -> None:
    plan = compile_plan("llama-3.1-8b", "h100")
    code, out, _ = run("step", *MODEL, "--decode", "8x1000", "--energy", "--json")
    seen = plan.energy(StepBatch.from_requests([[(1, 999)] * 8]))
    found = json.loads(out)["energy"]
    assert (code, found["joules"], found["watts"], found["basis"]) == (0, seen.joules, seen.watts, "modelled")
    code, out, _ = run("serving", *MODEL, *LOAD, "--clients", "1,16", "--energy", "--json")
    joules = [row["joules_per_token"] for row in json.loads(out)["rows"]]
    assert joules == pytest.approx(estimate(plan, 500, 40, [1, 16], with_energy=True).joules_per_token)
    drawn = ("--rate", "4", "--num-requests", "50")
    code, out, _ = run("simulate", *MODEL, *drawn, "--energy", "--json")
    sim = simulate(plan, Workload(rate=4.0, requests=50).trace())
    assert json.loads(out)["energy"] == json.loads(json.dumps(sim.energy()))
    assert "energy" not in json.loads(run("simulate", *MODEL, *drawn, "--json")[1])
    for command in ("step", "serving", "simulate"):
        assert "--energy" in run(command, "--help-all")[1]


def test_words() -> None:
    assert "J a token" in run("serving", *MODEL, *LOAD, "--clients", "4", "--energy")[1]
    words = run("step", *MODEL, "--decode", "8x1000", "--prefill", "100@0", "--energy", "--explain")[1]
    assert "power modelled" in words
    load = ("--rate", "4", "--num-requests", "50", "--energy")
    for layout in ((), ("--pp", "2")):
        assert "W a GPU" in run("simulate", *MODEL, *load, *layout)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("step", *MODEL, "--decode", "8x1000", "--energy", "--measure"), "--measure prints a script"),
        (("step", *MODEL, "--prefill", "9@0", "--image", "64x64", "--energy"), "does not go with --image"),
        (
            ("serving", *MODEL, *LOAD, "--clients", "4", "--energy", "--disaggregated", "1:1"),
            "--energy does not apply to --disaggregated",
        ),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
