"""One default runtime: whoever asks about a served model without naming an engine gets one and the same."""

from __future__ import annotations

import ast
import inspect
import json
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app
from fastroof.default_runtime import DEFAULT_RUNTIME
from fastroof.serving.least_gpus import least_gpus
from fastroof.sweep import CapacitySpec, DeploymentSpec, StepSpec

PACKAGE = Path(fastroof.__file__).parent

OTHERS = {"validate": "auto", "sweep": None, "models": None}
"""Commands whose runtime is that of each measured row, the specification's, or every engine's."""

UNNAMED = {("plan/compile.py", "compile_plan")}
"""A plan that somebody compiles by hand sums its kernels, as DESIGN says."""


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
        if option.name == "runtime"
    }
    assert {"step", "serving", "simulate", "size", "capacity", "plot step"} <= found.keys()
    assert found == {name: OTHERS.get(name, DEFAULT_RUNTIME) for name in found}


def test_specs_and_python_have_the_default() -> None:
    load = {"models": ["llama-3.1-8b"], "isl": 100, "osl": 10, "concurrency": 1}
    assert fastroof.sweep.load_spec(load).runtime == (DEFAULT_RUNTIME,)
    assert StepSpec.model_fields["runtime"].default == DEFAULT_RUNTIME
    for kind in (DeploymentSpec, CapacitySpec):
        assert kind.model_fields["runtime"].default == (DEFAULT_RUNTIME,)
    assert inspect.signature(least_gpus).parameters["runtime"].default == DEFAULT_RUNTIME
    for place, file in (("steps", "default.toml"), ("deployments", "example.toml")):
        text = (resources.files("fastroof.sweep") / place / file).read_text("utf-8")
        assert tomllib.loads(text)["runtime"] in (DEFAULT_RUNTIME, [DEFAULT_RUNTIME])


def _defaults(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Where something called runtime gets a text by default: functions' arguments, and classes' fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [*node.args.posonlyargs, *node.args.args]
            pairs: list[tuple[ast.arg, ast.expr | None]] = []
            pairs += zip(reversed(names), reversed(node.args.defaults), strict=False)
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from ((node.name, value) for name, value in pairs if name.arg == "runtime" and value)
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if (
                    isinstance(field, ast.AnnAssign)
                    and ast.unparse(field.target) == "runtime"
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
    assert named == UNNAMED


def answer(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_size_serving_and_least_gpus_speak_of_one_engine(h100: fastroof.Tables) -> None:
    options = ["--model", "llama-3.1-8b", "--isl", "4000", "--osl", "500"]
    limits = ["--rate", "20", "--ttft-ms", "500", "--tpot-ms", "30", "--tp", "1"]
    sized = answer("size", *options, *limits)
    assert sized["runtime"] == DEFAULT_RUNTIME
    given: dict[str, Any] = {"ttft_ms": 500, "tpot_ms": 30, "tp": 1}
    fewest = least_gpus("llama-3.1-8b", "h100", h100, 20, 4000, 500, **given)
    (row,) = sized["rows"]
    assert (row["total_gpus"], row["ttft_ms"]) == (fewest.total_gpus, fewest.ttft_ms)
    alone = least_gpus("llama-3.1-8b", "h100", h100, 20, 4000, 500, **given, runtime="kernels")
    assert alone.ttft_ms < fewest.ttft_ms
    clients = str(round(row["concurrency"] / row["replicas"]))
    served = answer("serving", *options, "--concurrency", clients)
    assert served["runtime"] == DEFAULT_RUNTIME
    assert served["rows"][0]["tpot_ms"] == pytest.approx(row["tpot_ms"], rel=0.05)


def test_a_plan_that_was_compiled_keeps_its_runtime(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100)
    assert plan.runtime == "kernels"
    assert fastroof.serving.estimate(plan, 1000, 100, 4).made_from["fastroof.runtime"] == "kernels"
    step = answer("step", "--model", "llama-3.1-8b", "--decode", "64x4096", "--explain")
    assert step["runtime"] == DEFAULT_RUNTIME
    assert sum(part["total_us"] for part in step["operators"]) == pytest.approx(step["latency_us"], rel=1e-12)
    assert step["operators"][-1]["name"] == "runtime"
    assert step["operators"][-1]["total_us"] == step["components_us"]["runtime"]
    bare = answer("step", "--model", "llama-3.1-8b", "--decode", "64x4096", "--runtime", "kernels")
    assert bare["latency_us"] == plan.decode_us(64, 4096) < step["latency_us"]


@pytest.mark.parametrize(
    "words",
    [
        ["step", "--model", "llama-3.1-8b", "--decode", "4x100"],
        ["serving", "--model", "llama-3.1-8b", "--isl", "100", "--osl", "10", "--concurrency", "2"],
        ["size", "--model", "llama-3.1-8b", "--kv-len", "1000", "--tp", "1"],
        ["simulate", "--model", "llama-3.1-8b", "--num-requests", "20", "--rate", "5"],
        ["capacity", "llama-3.1-8b", "--num-requests", "20", "--ttft-p99", "500"],
    ],
    ids=lambda words: words[0],
)
def test_every_answer_says_the_runtime(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert f"runtime {DEFAULT_RUNTIME}" in done.stdout
