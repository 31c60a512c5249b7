"""One answer of memory: all commands reserve the same for a request."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fastroof import serving
from fastroof.memory.plan_memory import PlanMemory
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.speculation import speculated
from fastroof.serving import estimate_disaggregated
from fastroof.simulation import simulate
from fastroof.simulation.settings import EngineSettings, running_tokens
from fastroof.sweep import run_sweep
from fastroof.sweep.deployments.evaluate import candidate_axes, candidate_options
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.traces.trace import Trace
from tests.command_line import document

# without the start of a run
estimate = partial(serving.estimate, requests_per_client="steady")

LENGTH = 6000
PROMPT, OUTPUT = 2000, 8000

CASES = [
    ("llama-3.1-8b", "h100", "vllm", {}),
    ("llama-3.1-70b", "h100", "vllm", {"tp": 2}),
    ("gemma-3-27b", "h200", "vllm", {}),
    ("gpt-oss-20b", "h200", "vllm-0.16.0", {}),
    ("qwen3.5-27b", "h200", "vllm", {}),
    ("qwen3.5-27b", "h200", "sglang", {}),
    ("qwen3-next-80b-a3b", "h200", "vllm-0.13.0", {"tp": 2}),
    ("nemotron-3-nano-30b-a3b", "h200", "vllm", {}),
    ("llama-3.1-8b", "h100", "trtllm-1.0", {}),
    ("gemma-3-27b", "h200", "sglang", {"tp": 2}),
]


def plan_of(model: str, gpu: str, engine: str, options: dict[str, Any]) -> StepPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_plan(
            model,
            gpu,
            None,
            engine=engine,
            allow_modelled=True,
            max_num_batched_tokens=8192,
            max_num_seqs=8192,
            **options,
        )


@pytest.mark.parametrize(("model", "gpu", "engine", "options"), CASES)
def test_serving_and_simulations_run_as_many_requests(
    model: str, gpu: str, engine: str, options: dict[str, Any]
) -> None:
    plan = plan_of(model, gpu, engine, options)
    memory, own = plan.memory, plan.profile.scheduling.max_num_seqs
    fit = memory.max_sequences(LENGTH)
    assert fit > 3
    assert memory.largest_length(fit) >= LENGTH > memory.largest_length(fit + 1)
    # serving: as many as fit of 100 times as many clients; half a last block is open, here as much as it is
    got = estimate(plan, PROMPT, OUTPUT, 100 * fit, kv_reservation="mean")
    half = 0.5 * memory.full_parts / memory.parts_per_request(LENGTH)
    assert got.effective_concurrency == pytest.approx(min(fit, own), rel=0.01 + half, abs=1.0)
    # simulations: blocks for as many
    settings = EngineSettings.of_plan(plan, kv_len=LENGTH, reserve_output=False)
    running = settings.num_gpu_blocks // math.ceil(LENGTH / settings.block_size)
    assert min(running, settings.max_num_seqs) == pytest.approx(min(fit, own), rel=0.02, abs=1.0)
    whole = min(memory.max_sequences(PROMPT + OUTPUT), own)
    if whole < 200:
        count = 2 * whole + 1
        trace = Trace([0.0] * count, [PROMPT] * count, [OUTPUT] * count)
        assert running_tokens(trace, plan, reserve_output=False) == LENGTH
        seen = simulate(plan, trace, reserve_output=True).summary(with_range=False)
        assert seen["running"]["peak"] == pytest.approx(whole, rel=0.02, abs=1.0)


@pytest.mark.parametrize(("model", "gpu", "engine", "options"), CASES)
def test_a_search_reserves_what_an_estimate_does(
    model: str, gpu: str, engine: str, options: dict[str, Any]
) -> None:
    plan = plan_of(model, gpu, engine, options)
    target, seqs = speculated(plan, None), 256
    spec = DeploymentSpec(
        models=(model,), gpus=(gpu,), engine=(engine,), isl=(PROMPT,), osl=(OUTPUT,), clients=(1,),
        max_num_batched_tokens=(8192,), max_num_seqs=seqs,
    )  # fmt: skip
    memory = target.memory(max_num_seqs=seqs)
    axes = candidate_axes(spec, target, "aggregated")
    assert axes.max_kv_tokens.tolist() == [[memory.max_kv_tokens]]
    assert axes.max_num_seqs.tolist() == [memory.most_running(seqs)]
    chosen = candidate_options(spec, target, "aggregated")
    held = memory.held_tokens(LENGTH)
    beyond = max(LENGTH - chosen.window, 0.0)
    assert LENGTH - chosen.window_share * beyond + chosen.state_tokens == pytest.approx(held)


def memory_of(engine: str, seqs: int) -> PlanMemory:
    return plan_of("llama-3.1-70b", "h100", engine, {"tp": 2}).memory_of(max_num_seqs=seqs)


def test_commands_print_the_memory_of_the_question() -> None:
    split = ("--model", "llama-3.1-70b", "--gpu", "h100", "--tp", "2")
    rooms = []
    for seqs in ("8", "1024"):
        served = document(
            "serving", *split, "--isl", "1000", "--osl", "200", "--clients", "4", "--engine", "vllm",
            "--max-num-seqs", seqs,
        )  # fmt: skip
        expected = memory_of("vllm", int(seqs))
        rooms.append(served["max_kv_tokens"])
        assert rooms[-1] == expected.max_kv_tokens
        assert served["max_num_seqs"] == int(seqs)
        limits = ("--engine", "vllm", "--max-num-seqs", seqs, "--max-model-len", "1000")
        (row,) = document("fit", *split, *limits, "--tpot", "inf", "--kv-len", "1000")["largest"]
        assert row["batch_size"] == min(expected.max_sequences(1000), int(seqs))
        share = row["batch_size"] * expected.parts_per_request(1000) / expected.parts
        assert row["kv_share"] == pytest.approx(share)
    assert rooms[0] > rooms[1] > 0


@pytest.mark.parametrize(
    ("engine", "seqs"), [("vllm", 256), ("vllm-0.12.0", 256), ("trtllm-1.1", 256), ("sglang", 1024)]
)
def test_fewer_tokens_in_a_step_than_requests_by_default(engine: str, seqs: int) -> None:
    """The default of requests is lowered, and so is the memory that vLLM's warm-up takes.

    SGLang's decode steps hold no prompts, so the tokens of a step limit prompts alone.
    """
    args = ("--model", "llama-3.1-8b", "--engine", engine, "--max-num-batched-tokens", "256")
    fits = document("fit", *args)
    served = document("serving", *args, "--isl", "100", "--osl", "20", "--clients", "300")
    (largest,) = document("fit", *args, "--tpot", "inf", "--kv-len", "100")["largest"]
    settings = document("simulate", *args, "--rate", "1", "--isl", "200")["settings"]
    assert fits["max_num_seqs"] == served["max_num_seqs"] == settings["max_num_seqs"] == seqs
    assert largest["batch_size"] == seqs
    assert settings["num_gpu_blocks"] == fits["memory"]["blocks"]
    assert served["max_kv_tokens"] == fits["memory"]["blocks"] * settings["block_size"]


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_requests_beyond_the_tokens_of_a_step_have_the_room_of_those_tokens(
    tmp_path: Path, tokens: int
) -> None:
    """SGLang reserves by chunked_prefill_size, which limits prompts, also where more requests decode.

    Also if it is above the engine's own.
    """
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": 6000}
    args = ["--model", "llama-3.1-8b", "--engine", "sglang"]
    args += [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    room = document("fit", *args)["memory"]["blocks"]
    for question in ("--kv-len=1000", "--batch-size=6000"):
        (row,) = document("fit", *args, question, "--tpot", "inf")["largest"]
        assert row["batch_size"] * row["kv_len"] / row["kv_share"] == pytest.approx(room)
    served = document("serving", *args, "--isl", "100", "--osl", "20", "--clients", "300")
    assert served["max_kv_tokens"] == room
    assert document("simulate", *args, "--rate=1", "--isl=200")["settings"]["num_gpu_blocks"] == room
    load = ("--isl", "1000", "--osl", "100", "--tpot", "100", "--gpus", "1", "--mode", "aggregated")
    best = document("best", *args, *load, "--dtype", "bf16", "--mean")["answers"][0]["choices"]
    assert {choice["row"]["max_kv_tokens"] for choice in best} == {room}
    sweep = {
        "models": ["llama-3.1-8b"], "tp": [1], "engine": ["sglang"], "slo": {"ttft_p99_ms": 3000},
        "workload": {"requests": 100, "isl": 600, "osl": 40}, "tolerance": 0.1,
    }  # fmt: skip
    run_sweep(sweep | {name: [value] for name, value in limits.items()}, tmp_path / "capacities.parquet")
    assert pq.read_table(tmp_path / "capacities.parquet")["max_kv_tokens"].to_pylist() == [room]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_plan_of_larger_steps_has_the_room_of_its_engines_steps(engine: str) -> None:
    sizes: dict[str, Any] = {"gpu": "h100", "engine": engine, "max_num_seqs": 2048}
    exact = compile_plan("llama-3.1-8b", **sizes, max_num_batched_tokens=2048)
    larger = compile_plan("llama-3.1-8b", **sizes, max_num_batched_tokens=8192)
    options: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 1024}
    assert EngineSettings.of_plan(exact, **options) == EngineSettings.of_plan(larger, **options)
    # more clients than the KV cache holds
    seen = [estimate(plan, 8000, 100, 200, 2048).tpot_ms for plan in (exact, larger)]
    assert seen[0] == seen[1]
    apart = [estimate_disaggregated(plan, exact, 8000, 100, 900, 1, 4, 2048) for plan in (exact, larger)]
    assert apart[0].ttft_ms == apart[1].ttft_ms


def test_limits_are_those_of_the_given_order() -> None:
    """vLLM's limits in steps of prompts alone, as a what-if: decodes take no room from prompts."""
    args = ("--model", "llama-3.1-8b", "--order", "prefill_first", "--max-num-batched-tokens", "256")
    served = document("serving", *args, "--isl", "100", "--osl", "20", "--clients", "600")
    settings = EngineSettings.of_plan(
        compile_plan("llama-3.1-8b", "h100"), order="prefill_first", max_num_batched_tokens=256
    )
    assert served["max_num_seqs"] == settings.max_num_seqs == 1024
