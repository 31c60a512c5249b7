"""``--lora``: in answers, engines' commands and errors of the commands that compile plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import run

LLAMA = ("--model", "llama-3.1-8b", "--gpu", "h100")
STEP = ("step", *LLAMA, "--decode", "64x1024")


def good(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert code == 0, err
    return out


def test_a_step_names_its_adapters_and_their_source() -> None:
    plain, adapted = (json.loads(good(*STEP, *more, "--json")) for more in ((), ("--lora", "16:4")))
    assert "lora" not in plain
    assert adapted["lora"].startswith("16:4")
    assert adapted["latency_us"] > plain["latency_us"]
    out = good(*STEP, "--lora", "16:4")
    assert "LoRA" in out
    assert "modelled" in out


def on_one_line(command: str) -> str:
    return " ".join(command.replace("\\\n", " ").split())


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("vllm", "--enable-lora --max-lora-rank 16 --max-loras 4"),
        ("sglang", "--enable-lora --max-lora-rank 16 --max-loras-per-batch 4"),
    ],
)
def test_commands_start_the_engine_with_them(engine: str, flags: str) -> None:
    out = good("fit", *LLAMA, "--engine", engine, "--lora", "16:4", "--max-model-len", "2048")
    assert "LoRA adapters" in out
    assert flags in on_one_line(out)


def test_the_best_deployment_starts_with_them() -> None:
    args = ("best", *LLAMA, "--engine", "vllm", "--gpus", "1", "--isl", "500", "--osl", "50")
    out = good(*args, "--tpot", "30", "--max-num-seqs", "64", "--mean", "--lora", "16:4")
    assert "--enable-lora --max-lora-rank 16 --max-loras 4" in on_one_line(out)
    assert "lora from gemm" in out


def test_a_simulation_prints_what_it_leaves_out(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"{index / 10},500,20" for index in range(40)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))
    args = ("simulate", *LLAMA, "--engine", "vllm", "--trace", str(trace))
    out = good(*args, "--lora", "16:4")
    assert "not simulated" in out
    assert "LoRA" in out
    slow, fast = (json.loads(good(*args, *more, "--json")) for more in (("--lora", "16:4"), ()))
    assert slow["lora"].startswith("16:4")
    assert "lora" not in fast
    assert slow["duration_s"] > fast["duration_s"]


@pytest.mark.parametrize(
    "wrong", ["0", "16:", "16:0", "16:4:nothing", "-1", "nan", "/no/such", "x" * 4000, ""]
)
def test_wrong_values_are_refused_in_one_line(wrong: str) -> None:
    code, out, err = run(*STEP, f"--lora={wrong}")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "lora" in err
