"""The examples in C, C++, Go and Rust, and BLIS's latency model: built, run, compared to the last bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof.backends.c import export_c
from fastroof.backends.c.plan_file import description
from fastroof.simulation.pools import Link, takes_us
from tests.backends.interfaces import recorded, text_differences
from tests.reference.compilers import find_compiler

BLIS = Path(__file__).parent / "blis"
FORMS = Path(__file__).parent / "blis_forms"
NAMES = ("llama-3.1-8b", "llama-3.1-70b-tp4-fp8")
CALLS = 1_000_000


@pytest.fixture(scope="module")
def plans(h100):
    return {
        "llama-3.1-8b": fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels"),
        "llama-3.1-70b-tp4-fp8": fastroof.compile_plan(
            "llama-3.1-70b", "h100", h100, tp=4, dtype="fp8", kv_dtype="fp8", engine="vllm"
        ),
        "ranks": fastroof.compile_plan("qwen3-30b-a3b", "h100", h100, dp=2, ep=2, engine="vllm"),
    }


@pytest.fixture(scope="module")
def exported(plans, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export_c(plans, folder, shared=False)
    return folder


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    """How to run Go: without a network, and with a cache of its own."""
    program = find_compiler("go")
    find_compiler("cc", "gcc")  # cgo compiles with it
    place = tmp_path_factory.mktemp("go")
    env = {
        **os.environ,
        "GOCACHE": str(place / "cache"),
        "GOPATH": str(place / "path"),
        "GOFLAGS": "-mod=mod",
        "GOPROXY": "off",
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "1",
    }
    return lambda folder, *words, **more: output_of([program, *words], cwd=folder, env={**env, **more})


def output_of(words, **options):
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{words} printed {done.stdout}{done.stderr}"
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module", params=["c", "c++", "go", "rust"])
def program(request, exported, tmp_path_factory):
    """The example in each language, built without a warning by its first line."""
    folder = exported
    made = tmp_path_factory.mktemp("built") / "example"
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
    if request.param == "c":
        compiler = [find_compiler("cc", "gcc"), "-O2", "-std=c11", *warnings]
        output_of([*compiler, "example.c", "fastroof_step.o", "-o", made], cwd=folder)
    elif request.param == "c++":
        compiler = [find_compiler("c++", "g++"), "-O2", "-std=c++11", *warnings]
        output_of(
            [*compiler, "-x", "c++", "example.c", "-x", "none", "fastroof_step.o", "-o", made], cwd=folder
        )
    elif request.param == "go":
        go = request.getfixturevalue("go")
        go(folder / "go", "vet", "./...")
        go(folder / "go", "build", "-o", made, ".")
    else:
        linked = "link-arg=fastroof_step.o"
        rustc = [find_compiler("rustc"), "-O", "-D", "warnings", "example.rs", "-C", linked]
        output_of([*rustc, "-o", made], cwd=folder)
    return made


def shown(what, us):
    return f"{what}: {us:.3f} us, bits {struct.unpack('<Q', struct.pack('<d', us))[0]:016x}"


def lines_of(name, plan):
    """What an example prints, from Python; a sum of a million steps differs where one of them does."""
    call = np.arange(CALLS)
    return [
        f"plan: {json.dumps(description(plan, name))}",
        f"{plan.memory.max_kv_tokens} tokens of KV cache fit, {plan.memory.kv_bytes_per_token} bytes each",
        shown("64 decodes at 4096 tokens", plan.decode_us(64, 4096)),
        shown("the same, 4 tokens verified by each", plan.verify_us(64, 4096, 4)),
        shown(
            "a prompt of 2048 tokens and 31 decodes",
            plan.step_scalar([2048] + [1] * 31, [0, *range(100, 3200, 100)]),
        ),
        shown(f"{CALLS} decode steps", np.cumsum(plan.decode_us(1 + call % 256, 1 + call % 8191))[-1]),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_the_bits_of_python(program, exported, plans, name):
    *lines, cost = output_of([program, exported / f"{name}.plan"]).splitlines()
    assert lines == lines_of(name, plans[name])
    assert re.fullmatch(r"a call: \d+\.\d ns", cost)


def test_an_example_without_a_plan_prints_its_usage(program):
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "usage: example NAME.plan\n")


@pytest.mark.parametrize(("file", "code"), [("nowhere.plan", 10), ("example.c", 11)])
def test_an_example_reports_a_wrong_file(program, exported, file, code):
    words = {10: "the plan file cannot be opened or mapped", 11: "not a plan file"}[code]
    done = subprocess.run([program, exported / file], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr in (f"example: {words}\n", f"example: error {code} of fastroof_step.h\n")


@pytest.fixture(scope="module")
def blis(exported, go, tmp_path_factory):
    """A stand-in of BLIS with the exported latency model at the place in its first lines, built."""
    tree = tmp_path_factory.mktemp("blis") / "tree"
    shutil.copytree(BLIS, tree)
    for name in ("blis/blis.go", "fastroof_step.h", "fastroof_step.o"):
        shutil.copy(exported / name, tree / "sim" / "fastroof")
    go(tree, "vet", "./...")
    go(tree, "build", "-o", "blis", ".")
    return tree


@pytest.mark.parametrize("name", NAMES)
def test_blis_steps_take_as_long_as_in_python(blis, exported, plans, name):
    plan = plans[name]
    steps, chunks, mixed = 0, 0, 0
    for line in output_of([blis / "blis", exported / f"{name}.plan"]).splitlines():
        us, *requests = line.split()
        new, context = zip(*(map(int, request.split("@")) for request in requests), strict=True)
        assert int(us) == max(1, round(plan.step_scalar(list(new), list(context)))), line
        steps += 1
        chunks += any(tokens > 1 and before > 0 for tokens, before in zip(new, context, strict=True))
        mixed += any(tokens > 1 for tokens in new) and any(tokens == 1 for tokens in new)
    assert steps > 500
    assert chunks > 50
    assert mixed > 100


def test_the_latency_model_of_blis_in_go(blis, exported, go):
    plan = exported / "llama-3.1-8b.plan"
    assert "ok" in go(blis, "test", "./sim/fastroof", FASTROOF_PLAN=str(plan))


def test_blis_without_a_plan(blis):
    done = subprocess.run([blis / "blis", "nowhere.plan"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "nowhere.plan: the plan file cannot be opened or mapped\n"


def test_what_a_call_of_blis_costs(blis, exported):
    lines = output_of([blis / "blis", "-time", exported / "llama-3.1-8b.plan"]).splitlines()
    cost = re.compile(r"(constant|fastroof), (\d+ requests|event loop): (\d+\.\d) ns a (call|step of \d+)")
    costs = [re.fullmatch(cost, line).groups() for line in lines]
    assert [(model, work) for model, work, _, _ in costs] == [
        (model, work)
        for work in ("1 requests", "8 requests", "32 requests", "256 requests", "event loop")
        for model in ("constant", "fastroof")
    ]
    ns = {work: float(ns) for model, work, ns, _ in costs if model == "fastroof"}
    assert 0 < ns["1 requests"] < ns["256 requests"]


def test_decodes_that_verify_draft_tokens_in_blis(blis, exported, plans, go):
    plan = plans["llama-3.1-8b"]
    path = str(exported / "llama-3.1-8b.plan")
    words = go(blis, "test", "-v", "-run", "Verify", "./sim/fastroof", FASTROOF_PLAN=path)
    us = {name: int(us) for name, us in re.findall(r"verified (\w+) (\d+)", words)}
    mixed = plan.step_scalar([256, 1], [100, 500]) + plan.verify_us(1, 504, 4) - plan.decode_us(1, 501)
    assert us == {
        "one": round(plan.verify_us(1, 504, 4)),
        "three": round(plan.verify_us(3, 804, 4)),
        "mixed": round(mixed),
        "chunk": round(plan.step_scalar([256], [100])),
    }


@pytest.mark.parametrize("form", ["own", "field"])
def test_blis_takes_the_model_by_its_first_lines(form, exported, plans, go, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(FORMS / form, tree)
    place = tree / "sim" / "fastroof"
    place.mkdir()
    sources = ("blis/blis.go",) if form == "own" else ("blis/blis.go", "blis/kernel.go")
    for name in (*sources, "fastroof_step.h", "fastroof_step.o"):
        shutil.copy(exported / name, place)
    files = [exported / f"{name}.plan" for name in (*NAMES, "ranks")]
    recipe = (place / Path(sources[-1]).name).read_text("utf-8")
    [line] = re.findall(r"^//\t(\w+, err := .*)$", recipe, re.MULTILINE)
    if form == "own":
        _replace_call(tree / "sim" / "cluster" / "instance.go", line, files[0], "latency")
    else:
        _replace_call(tree / "sim" / "kernelmodel" / "kernelmodel.go", line, files[1], "latencykernel")
        tested = (tree / "sim" / "cluster" / "plan_test.go").read_text("utf-8")
        lines = (place / "blis.go").read_text("utf-8")
        fields = re.findall(r"^//\t(?:config|deployment)\.(\S+) = ", lines, re.MULTILINE)
        assert fields == ["LatencyModel", "PrefillOverrides.LatencyModel", "DecodeOverrides.LatencyModel"]
        assert all(f".{field} = " in tested for field in fields)
    go(tree, "vet", "./...")
    variables = ("FASTROOF_PLAN", "FASTROOF_OTHER_PLAN", "FASTROOF_RANKS")
    named = dict(zip(variables, map(str, files), strict=True))
    words = go(tree, "test", "-v", "./sim/...", **named)
    assert "ok" in words
    if form == "field":
        _check_kernel(words, plans[NAMES[1]])


def _replace_call(path, line, plan, package):
    """Put the line of a recipe where the call of a package of BLIS is, and its import."""
    text = path.read_text("utf-8")
    line = re.sub(r'"\$STEP/.*?"', f'"{plan}"', line)
    text, found = re.subn(rf"\w+, err := {package}\.New\w*\(.*\)", lambda _: line, text)
    assert found == 1
    place = '"github.com/inference-sim/inference-sim/sim/fastroof"'
    if package == "latency":
        text = text.replace('"github.com/inference-sim/inference-sim/sim/latency"', place)
    else:
        text = text.replace("import (", f"import (\n\t{place}", 1)
    path.write_text(text, "utf-8")


def _check_kernel(words, plan):
    logged = {name: [int(n) for n in rest.split()] for name, rest in re.findall(r": (\w+) ([\d ]+)\n", words)}
    memory = plan.memory
    held = memory.activation_bytes + memory.workspace_bytes
    assert logged["memory"][:4] == [memory.weight_bytes, held, memory.graphs_bytes, memory.context_bytes]
    assert logged["memory"][4] == memory.requested_bytes - memory.kv_cache_bytes
    assert logged["sequence"] == [0, 63 * 16 * memory.kv_bytes_per_token, 0]
    step_us = plan.step_scalar([256, 1], [100, 500])
    assert logged["step"] == [round(step_us * 1e3)] * 2 + [round(plan.verify_us(2, 704, 4) * 1e3)]
    links = (Link(), Link(bytes_per_s=50e9))
    assert logged["transfer"] == [round(takes_us(plan, plan, 1000, link).item() * 1e3) for link in links]
    assert logged["host"] == [round(plan.profile.front_end.alone_us(1000) * 1e3), 0, 0]


@pytest.mark.parametrize("form", ["own", "field"])
def test_stand_ins_of_blis_have_its_recorded_signatures(form):
    source = "\n".join(path.read_text("utf-8") for path in sorted((FORMS / form).rglob("*.go")))
    interfaces = [one for one in recorded("blis") if (one.of == "f90a1e3") == (form == "own")]
    assert len(interfaces) >= 3
    for interface in interfaces:
        assert text_differences(interface, source) == []
