"""One default engine and the same limits: Python and every command answer a question alike."""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer

import fastroof
from fastroof.cli import app
from fastroof.defaults import DEFAULT_ENGINE
from fastroof.engines import load_engine
from fastroof.simulation import EngineSettings
from fastroof.sweep import CapacitySpec, DeploymentSpec, StepSpec
from fastroof.sweep.recommendations.recommend import deployment_question
from fastroof.ui.view import View
from tests.command_line import document as answer
from tests.command_line import good

PACKAGE = Path(fastroof.__file__).parent

OTHERS = {"sweep": None, "models": None, "best": None, "calibrate": None, "validate": "auto"}
"""Commands whose engine is the spec's, every engine's, the question's, the one to fit, or each run's."""


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for word, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{name} {word}".strip())
    if not hasattr(group, "commands"):
        yield name, group


def test_every_command_has_the_default() -> None:
    found = {
        name: option.default
        for name, command in commands(typer.main.get_command(app))
        for option in command.params
        if option.name == "engine"
    }
    assert {"step", "serving", "simulate", "fit", "capacity", "plot step"} <= found.keys()
    assert found == {name: OTHERS.get(name, DEFAULT_ENGINE) for name in found}


def test_specs_and_python_have_the_default() -> None:
    load = {"models": ["llama-3.1-8b"], "isl": 100, "osl": 10, "clients": 1}
    assert fastroof.sweep.load_spec(load).engine == (DEFAULT_ENGINE,)
    assert StepSpec.model_fields["engine"].default == DEFAULT_ENGINE
    for kind in (DeploymentSpec, CapacitySpec):
        assert kind.model_fields["engine"].default == (DEFAULT_ENGINE,)
    assert inspect.signature(fastroof.fit).parameters["engine"].default == DEFAULT_ENGINE
    assert inspect.signature(fastroof.compile_plan).parameters["engine"].default == DEFAULT_ENGINE
    for place, file in (("steps", "default.toml"), ("deployments", "example.toml")):
        text = (resources.files("fastroof.sweep") / place / file).read_text("utf-8")
        assert tomllib.loads(text)["engine"] in (DEFAULT_ENGINE, [DEFAULT_ENGINE])


def _defaults(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Places with a text as default of an engine or runtime: arguments and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [*node.args.posonlyargs, *node.args.args]
            pairs: list[tuple[ast.arg, ast.expr | None]] = []
            pairs += zip(reversed(names), reversed(node.args.defaults), strict=False)
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from (
                (node.name, value) for name, value in pairs if name.arg in ("runtime", "engine") and value
            )
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if (
                    isinstance(field, ast.AnnAssign)
                    and ast.unparse(field.target) in ("runtime", "engine")
                    and field.value
                ):
                    yield node.name, field.value


def test_no_module_has_a_default_of_its_own() -> None:
    """The adapters that need their simulator to be imported are among them."""
    engines = ("kernels", "vllm", "trtllm", "sglang")
    named = {
        (path.relative_to(PACKAGE).as_posix(), where)
        for path in PACKAGE.rglob("*.py")
        for where, value in _defaults(ast.parse(path.read_text("utf-8")))
        if any(isinstance(part, ast.Constant) and part.value in engines for part in ast.walk(value))
    }
    assert not named


def test_command_line_and_python_answer_a_step_alike(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    assert plan.engine == DEFAULT_ENGINE
    assert fastroof.compile_plan("llama-3.1-8b", "h100", h100).decode_us(64, 4096) == plan.decode_us(64, 4096)
    step = answer("step", "--model", "llama-3.1-8b", "--decode", "64x4096", "--explain")
    assert step["engine"] == DEFAULT_ENGINE
    assert step["latency_us"] == plan.decode_us(64, 4096)
    assert (step["max_kv_tokens"], step["tables_hash"]) == (plan.memory.max_kv_tokens, plan.tables_hash)
    assert sum(part["total_us"] for part in step["operators"]) == pytest.approx(step["latency_us"], rel=1e-12)
    assert step["operators"][-1]["total_us"] == step["components_us"]["runtime"]
    alone = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    bare = answer("step", "--model", "llama-3.1-8b", "--decode", "64x4096", "--engine", "kernels")
    assert bare["latency_us"] == alone.decode_us(64, 4096) < step["latency_us"]


def test_a_step_below_the_engines_largest_leaves_its_memory() -> None:
    """The engine reserves memory for 16,384 tokens on a B200, whatever step is timed."""
    plan = fastroof.compile_plan("llama-3.1-8b", "b200")
    wanted = View(model="llama-3.1-8b", gpu="b200", kind="prefill", chunk=10_000)
    assert wanted.step_sizes == {"max_num_batched_tokens": None, "max_num_seqs": None}
    step = answer("step", "--model", "llama-3.1-8b", "--gpu", "b200", "--prefill", "10000@0", "--explain")
    assert step["max_kv_tokens"] == plan.memory.max_kv_tokens


def test_command_line_python_and_best_answer_a_load_alike() -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", max_num_batched_tokens=8192, max_num_seqs=1024)
    estimated = fastroof.serving.estimate(plan, 1000, 100, 8)
    load = ("--isl", "1000", "--osl", "100")
    (served,) = answer("serving", "--model", "llama-3.1-8b", *load, "--clients", "8")["rows"]
    assert (served["ttft_ms"], served["tpot_ms"]) == (estimated.ttft_ms, estimated.tpot_ms)
    limits = ("--ttft", "500", "--tpot", "30", "--max-num-batched-tokens", "8192")
    best = answer("best", "--model", "llama-3.1-8b", "--gpus", "1", *load, *limits, "--mean")
    row = best["answers"][0]["choices"][0]["row"]
    assert row["max_num_seqs"] == plan.profile.scheduling.max_num_seqs
    # layouts are compared without the start of a run
    again = fastroof.serving.estimate(plan, 1000, 100, row["clients"], requests_per_client="steady")
    assert row["engine"] == DEFAULT_ENGINE
    assert row["tpot_ms"] == pytest.approx(again.tpot_ms, rel=1e-9)


QUICK_PAIRS = {("h100", "trtllm-1.1"), ("h100", "kernels"), ("l4", "vllm"), ("b200", "sglang")}

LIMITS = ("max_num_batched_tokens", "max_num_seqs", "block_size")


def test_the_default_limits_are_the_engines_own_everywhere() -> None:
    parameters = inspect.signature(fastroof.Pool).parameters
    assert [parameters[name].default for name in LIMITS] == [None] * len(LIMITS)
    parameters = inspect.signature(fastroof.serving.estimate).parameters
    assert (parameters["max_num_batched_tokens"].default, parameters["max_num_seqs"].default) == (None, None)
    found = {
        (name, option.name): option.default
        for name, command in commands(typer.main.get_command(app))
        for option in command.params
        # None is what a specification has, or all budgets to try
        if option.name in LIMITS and name not in ("sweep", "best")
    }
    assert {(name, "max_num_seqs") for name in ("simulate", "capacity", "serving", "fit")} <= found.keys()
    assert set(found.values()) == {"engine"}, found


ENGINES = sorted(path.name.removesuffix(".toml") for path in (PACKAGE / "engines/profiles").iterdir())


@pytest.mark.parametrize(
    ("gpu", "engine"),
    [
        pytest.param(gpu, engine, marks=[] if (gpu, engine) in QUICK_PAIRS else pytest.mark.slow)
        for gpu in fastroof.gpu_names()
        for engine in ENGINES
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_default_plan_holds_the_engines_largest_step(gpu: str, engine: str) -> None:
    """Compile a plan and ask: no default of the question is above a default of the plan."""
    plan = fastroof.compile_plan("qwen3-0.6b", gpu, engine=engine, allow_modelled=True)
    tokens, seqs, _ = load_engine(engine).on(plan.gpu).scheduling.step_limits()
    load = fastroof.Workload(requests=20, isl=300, osl=5, seed=1)
    settings = fastroof.simulate(plan, load.trace(rate=5.0)).settings
    assert (settings.max_num_batched_tokens, settings.max_num_seqs) == (tokens, seqs)
    most = fastroof.capacity(plan, load, ttft_p99_ms=60_000, tolerance=0.2)
    assert most.requests_per_s > 0
    assert fastroof.serving.estimate(plan, isl=tokens, osl=5, clients=2).ttft_ms > 0


def test_the_default_plan_holds_the_largest_step_of_a_custom_engine() -> None:
    own = load_engine("kernels")
    for order, tokens, seqs, largest in (
        ("mixed", 20_000, 1024, (20_000, 1024)),
        ("mixed", 20_000, 3000, (20_000, 3000)),
        # decodes do not count against the tokens of prompts
        ("prefill_first", 500, 9000, (9000, 9000)),
        ("mixed", 500, 9000, (8192, 1024)),
    ):
        scheduling = replace(
            own.scheduling, order=order, max_num_batched_tokens=tokens, max_num_seqs=seqs, by_card=False
        )
        plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine=replace(own, scheduling=scheduling))
        assert (plan.max_num_batched_tokens, plan.max_num_seqs) == largest
        limits = scheduling.step_limits()
        settings = EngineSettings.of_plan(plan)
        assert (settings.max_num_batched_tokens, settings.max_num_seqs) == limits[:2]


@pytest.mark.parametrize(
    "engine", ["trtllm-1.1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sglang", "vllm"))]
)
def test_simulate_capacity_serving_and_best_have_the_same_limits(engine: str) -> None:
    """The command line and a plan compiled by default have the same limits and answers."""
    own = load_engine(engine)
    tokens, seqs = own.scheduling.max_num_batched_tokens, own.scheduling.max_num_seqs
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine=engine)
    load = fastroof.Workload(rate=8, requests=40, isl=3000, osl=30, seed=1)
    found = ("--num-requests", "40", "--isl", "3000", "--osl", "30", "--engine", engine)
    sim = fastroof.simulate(plan, load.trace())
    settings = sim.settings
    assert (settings.max_num_batched_tokens, settings.max_num_seqs) == (tokens, seqs)
    assert settings.block_size == own.memory.block_tokens
    simulated = answer(
        "simulate", "--model", "llama-3.1-8b", *found, "--rate", "8", "--seed", "1", "--no-range"
    )
    assert {name: simulated["settings"][name] for name in LIMITS} == {n: getattr(settings, n) for n in LIMITS}
    assert simulated["ttft_ms"] == sim.summary(with_range=False)["ttft_ms"]
    most = fastroof.capacity(plan, replace(load, rate=None), ttft_p99_ms=500)
    rate = answer("capacity", "--model", "llama-3.1-8b", *found, "--seed", "1", "--ttft", "500")
    assert rate["requests_per_s"] == most.requests_per_s
    served = answer(
        "serving", "--model", "llama-3.1-8b", "--engine", engine, "--isl", "3000", "--osl", "30",
        "--clients", "8",
    )  # fmt: skip
    assert served["max_num_batched_tokens"] == tokens
    assert served["rows"][0]["tpot_ms"] == fastroof.serving.estimate(plan, 3000, 30, 8).tpot_ms
    layouts = {"total_gpus": 1, "isl": 3000, "osl": 30, "tpot_ms": 30}
    question = deployment_question("llama-3.1-8b", **layouts, engine=engine)
    # memory beyond the engine's own limits is unknown
    assert tokens == max(question.max_num_batched_tokens)
    assert seqs == max(question.max_num_seqs)


def test_default_limits_above_a_plan_are_an_error_that_names_them() -> None:
    small = fastroof.compile_plan("llama-3.1-8b", "h100", max_num_batched_tokens=2048, max_num_seqs=256)
    load = fastroof.Workload(rate=8, requests=4)
    words = (
        "max_num_batched_tokens 8,192 is above the plan's 2,048: compile it with max_num_batched_tokens=8192"
    )
    for run in (fastroof.simulate, fastroof.capacity):
        given = (small, load.trace()) if run is fastroof.simulate else (small, load)
        more: dict[str, Any] = {} if run is fastroof.simulate else {"ttft_p99_ms": 500}
        with pytest.raises(fastroof.SimulationError, match=words):
            run(*given, **more)
    # as in vLLM, the default number of requests is at most the tokens of a step
    assert fastroof.simulate(small, load.trace(), max_num_batched_tokens=200).settings.max_num_seqs == 200
    with pytest.raises(fastroof.SimulationError, match="max_num_seqs 300 must not be above"):
        fastroof.simulate(small, load.trace(), max_num_batched_tokens=200, max_num_seqs=300)


def test_tables_are_the_gpus_own_unless_others_are_given() -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    assert plan.tables_hash
    with pytest.warns(UserWarning, match="datasheet"):
        datasheet = fastroof.compile_plan("llama-3.1-8b", "h100", "datasheet")
    assert datasheet.tables_hash == ""
    with pytest.warns(UserWarning, match="datasheet"):
        assert fastroof.compile_plan("llama-3.1-8b", "mi300x").tables_hash == ""


@pytest.mark.parametrize(
    "words",
    [
        ["step", "--model", "llama-3.1-8b", "--decode", "4x100"],
        ["serving", "--model", "llama-3.1-8b", "--isl", "100", "--osl", "10", "--clients", "2"],
        ["simulate", "--model", "llama-3.1-8b", "--num-requests", "20", "--rate", "5"],
        ["capacity", "--model", "llama-3.1-8b", "--num-requests", "20", "--ttft", "500"],
    ],
    ids=lambda words: words[0],
)
def test_every_answer_names_the_engine(words: list[str]) -> None:
    done = good(*words)
    assert f"engine {DEFAULT_ENGINE}" in done
