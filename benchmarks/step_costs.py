"""What a step costs by each way to ask a plan: ``python -m benchmarks.step_costs``, ``--write`` to the guide.

Every way times the same steps, one a call as an event loop pays for it, and 100,000 decode steps in one call
where its interface takes arrays. The loop around the call is part of the time; all answers are compared with
those of ``plan.step_us``. Rounds are short and many, and the least counts: others on the machine only add.
"""

from __future__ import annotations

import argparse
import array
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numba
import numpy as np

import fastroof
from benchmarks.table import print_table
from fastroof.backends.c import export_c
from fastroof.backends.dynamo import write_dynamo_profile
from fastroof.backends.serve.client import PlanClient
from fastroof.backends.sglang import StepTimePredictor
from fastroof.bench.timing import NS_PER_S, measure, time_of_ns
from fastroof.bench.workload import Baseline, Setup, Workload

REQUESTS: Final = 32
BULK_STEPS: Final = 100_000
EXAMPLE_STEPS: Final = 1_000_000
CONSTANT_US: Final = 15_000.0
PLAN: Final = "llama-3.1-8b,engine=kernels"
"""The setup's plan on the command line of a server."""

KINDS: Final = {
    "decode": "a decode step",
    "step": f"a step of {REQUESTS} requests",
    "bulk": f"{BULK_STEPS:,} decode steps in a call",
}
GUIDE: Final = Path(__file__).parents[1] / "fastroof" / "backends" / "guide.md"

Call = tuple[Any, ...]
Step = tuple[list[int], list[int]]
Workloads = dict[str, Workload]


class MissingProgramError(Exception):
    """A compiler that a way needs is not installed."""


class Way(NamedTuple):
    """A way to ask a plan: from which language, by which call, and what it is timed on."""

    name: str
    host: str
    call: str
    kinds: tuple[str, ...]
    build: Callable[[Setup, ExitStack], Workloads]


def steps_of(setup: Setup) -> list[Step]:
    """Return steps of one chunk and decodes that grow from step to step."""
    decodes = range(1000, 1000 + REQUESTS - 1)
    return [
        ([512] + [1] * (REQUESTS - 1), [0, *(context + past % 1024 for context in decodes)])
        for past in range(setup.size(2_000, 200))
    ]


def bulk_sizes(dtype: Any = np.int32) -> tuple[Any, Any]:
    """Return the sizes of the decode steps of a call, random."""
    rng = np.random.default_rng(7)
    return rng.integers(1, 513, BULK_STEPS, dtype=dtype), rng.integers(2, 20_000, BULK_STEPS, dtype=dtype)


def decode_calls(setup: Setup) -> list[tuple[int, int]]:
    return [(1 + i % 512, 1000 + i % 50_000) for i in range(setup.size(20_000, 200))]


def batched_us(setup: Setup, steps: Sequence[Step]) -> Any:
    requests = [list(zip(*step, strict=True)) for step in steps]
    return setup.plan.step_us(fastroof.StepBatch.from_requests(requests))


def event_loop(predict: Callable[..., float], calls: Sequence[Call]) -> list[float]:
    """What a simulator does with its predictions: the clock moves on by each."""
    clock_us, seen = 0.0, []
    for call in calls:
        step_us = predict(*call)
        clock_us += step_us
        seen.append(step_us)
    return seen


def looped(name: str, predict: Callable[..., float], calls: Sequence[Call], expected: Any) -> Workload:
    """An event loop with one way's predictor, against the same with a constant."""

    def constant(*call: Any) -> float:
        return CONSTANT_US

    def run() -> list[float]:
        return event_loop(predict, calls)

    np.testing.assert_array_equal(run(), expected)
    always = Baseline("a constant", lambda: event_loop(constant, calls), len(calls), None)
    return Workload(name, f"{len(calls):,} steps, one a call", "call", len(calls), run, baselines=(always,))


def once(name: str, call: Callable[[], Any], expected: Any, in_process: Callable[[], Any]) -> Workload:
    """One call of many steps, against the same call of the plan in this process."""
    np.testing.assert_array_equal(call(), expected)
    here = Baseline("in this process", in_process, 1)
    return Workload(name, f"{BULK_STEPS:,} steps in a call", "call", 1, call, baselines=(here,))


def in_python(setup: Setup, stack: ExitStack) -> Workloads:
    plan, calls, steps = setup.plan, decode_calls(setup), steps_of(setup)
    expected = plan.decode_us(*np.array(calls).T)
    return {
        "decode": looped("scalar", plan.scalar, calls, expected),
        "step": looped("step_scalar", plan.step_scalar, steps, batched_us(setup, steps)),
    }


def in_buffers(make: Callable[[list[int]], Any]) -> Callable[[Setup, ExitStack], Workloads]:
    def build(setup: Setup, stack: ExitStack) -> Workloads:
        steps = steps_of(setup)
        calls = [tuple(map(make, step)) for step in steps]
        return {"step": looped("step_scalar", setup.plan.step_scalar, calls, batched_us(setup, steps))}

    return build


def constant_of_python(setup: Setup, stack: ExitStack) -> Workloads:
    calls = decode_calls(setup)

    def constant(batch_size: int, kv_len: int) -> float:
        return CONSTANT_US

    return {"decode": looped("constant", constant, calls, CONSTANT_US)}


def in_numpy(setup: Setup, stack: ExitStack) -> Workloads:
    sizes = bulk_sizes()

    def call() -> Any:
        return setup.plan.decode_us(*sizes)

    return {"bulk": Workload("decode_us", f"{BULK_STEPS:,} steps in a call", "call", 1, call)}


def in_an_adapter(setup: Setup, stack: ExitStack) -> Workloads:
    steps = steps_of(setup)
    batches = [
        SimpleNamespace(
            reqs=[
                SimpleNamespace(extend_length=new, past_kv_length=past + (new == 1))
                for new, past in zip(*step, strict=True)
            ]
        )
        for step in steps
    ]
    predictor = StepTimePredictor(setup.plan)
    expected = batched_us(setup, steps) / 1e6
    return {"step": looped("sglang", predictor.predict_infer_time, [(batch,) for batch in batches], expected)}


def in_numba(setup: Setup, stack: ExitStack) -> Workloads:
    """Compiled event loops, against themselves with a constant."""
    step_us, data = fastroof.numba_step(setup.plan)
    decode_us, _ = fastroof.numba_decode(setup.plan)
    steps, decodes = steps_of(setup), np.array(decode_calls(setup))
    new, context = (np.array([step[i] for step in steps]) for i in (0, 1))

    @numba.njit
    def decode_loop(data: Any, sizes: Any, seen: Any) -> Any:
        for i in range(len(seen)):
            seen[i] = decode_us(data, sizes[i, 0], sizes[i, 1])
        return seen

    @numba.njit
    def step_loop(data: Any, new: Any, context: Any, seen: Any) -> Any:
        for i in range(len(seen)):
            seen[i] = step_us(data, new[i], context[i])
        return seen

    @numba.njit
    def constant(new: Any, context: Any, seen: Any) -> Any:
        for i in range(len(seen)):
            seen[i] = CONSTANT_US + new[i, 0] + context[i, 0]
        return seen

    def workload(name: str, run: Callable[[Any], Any], rows: Any, expected: Any) -> Workload:
        count = len(rows)
        seen = np.empty(count)
        np.testing.assert_array_equal(run(seen), expected)
        always = Baseline("a constant", lambda: constant(rows, rows, seen), count, None)
        return Workload(
            name, f"{count:,} steps, a call each", "call", count, lambda: run(seen), baselines=(always,)
        )

    return {
        "decode": workload(
            "numba_decode",
            lambda seen: decode_loop(data, decodes, seen),
            decodes,
            setup.plan.decode_us(*decodes.T),
        ),
        "step": workload(
            "numba_step", lambda seen: step_loop(data, new, context, seen), new, batched_us(setup, steps)
        ),
    }


C_LOOP: Final = r"""
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "fastroof_step.h"

enum { REQUESTS = 32, ROUNDS = 20 };

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

int main(int argc, char **argv)
{
    const fastroof_plan *plan;
    if (argc != 4 || fastroof_open(argv[1], &plan) != FASTROOF_OK)
        return 1;
    long steps = atol(argv[3]);
    int64_t *batch_size = malloc(8 * steps), *kv_len = malloc(8 * steps);
    double *times_us = malloc(8 * steps), clock_us = 0.0, least_s = INFINITY;
    int64_t new_tokens[REQUESTS] = {512}, context_len[REQUESTS] = {0};
    for (int r = 1; r < REQUESTS; r++)
        new_tokens[r] = 1;
    for (long i = 0; i < steps; i++)
        batch_size[i] = 1 + i % 512, kv_len[i] = 1000 + i % 50000;
    for (int round = 0; round < ROUNDS; round++) {
        double began_s = seconds();
        switch (argv[2][0]) {
        case 'd':
            for (long i = 0; i < steps; i++)
                fastroof_decode_us(plan, batch_size[i], kv_len[i], times_us + i);
            break;
        case 's':
            for (long i = 0; i < steps; i++) {
                for (int r = 1; r < REQUESTS; r++)
                    context_len[r] = 999 + r + i % 1024;
                fastroof_step_us(plan, new_tokens, context_len, REQUESTS, times_us + i);
            }
            break;
        default: fastroof_decode_steps_us(plan, batch_size, kv_len, steps, times_us);
        }
        least_s = fmin(least_s, seconds() - began_s);
    }
    for (long i = 0; i < steps; i++)
        clock_us += times_us[i];
    printf("%.17g %.17g\n", least_s, clock_us);
    return 0;
}
"""


def program(name: str) -> str:
    if found := shutil.which(name):
        return found
    raise MissingProgramError(name)


def exported(setup: Setup, stack: ExitStack) -> tuple[Path, Path]:
    """Export the plan for C into a folder that is removed in the end; the folder and the plan file."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    return folder, export_c({"plan": setup.plan}, folder, shared=False).plans["plan"]


def in_c(setup: Setup, stack: ExitStack) -> Workloads:
    compiler = program("cc")
    folder, plan_file = exported(setup, stack)
    (folder / "loop.c").write_text(C_LOOP)
    subprocess.run(
        [compiler, "-O2", "loop.c", "fastroof_step.o", "-lm", "-o", "loop"],
        cwd=folder,
        check=True,
        timeout=60,
    )

    def workload(kind: str, count: int, expected: Any) -> Workload:
        def run() -> float:
            command = [str(folder / "loop"), str(plan_file), kind, str(count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            took_s, clock_us = map(float, done.stdout.split())
            # a running sum adds in the order of the loop
            np.testing.assert_equal(clock_us, np.cumsum(expected)[-1])
            return took_s

        calls = 1 if kind == "bulk" else count
        return Workload(f"c-{kind}", f"{count:,} steps", "call", calls, run, reports_seconds=True)

    def decodes(count: int) -> Any:
        i = np.arange(count)
        return setup.plan.decode_us(1 + i % 512, 1000 + i % 50_000)

    few, many = setup.size(20_000, 2000), setup.size(100_000, 2000)
    step_us = batched_us(
        setup, [([512] + [1] * 31, [0, *range(1000 + i, 1031 + i)]) for i in range(min(1024, few))]
    )
    return {
        "decode": workload("decode", many, decodes(many)),
        "step": workload("step", few, np.resize(step_us, few)),
        "bulk": workload("bulk", BULK_STEPS, decodes(BULK_STEPS)),
    }


def by_example(build: Sequence[str], folder_of: str = ".") -> Callable[[Setup, ExitStack], Workloads]:
    """The decode steps that an exported example times itself; ``build`` compiles it as ``example``."""

    def built(setup: Setup, stack: ExitStack) -> Workloads:
        compiler = program(build[0])
        folder, plan_file = exported(setup, stack)
        subprocess.run([compiler, *build[1:]], cwd=folder / folder_of, check=True, capture_output=True)

        def seconds() -> float:
            command = [folder / "example", plan_file]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            [ns] = re.findall(r"^a call: ([\d.]+) ns", output, re.M)
            assert f"{EXAMPLE_STEPS} decode steps: " in output
            return float(ns) * 1e-9 * EXAMPLE_STEPS

        decode = Workload(build[0], "its own loop", "call", EXAMPLE_STEPS, seconds, reports_seconds=True)
        return {"decode": decode}

    return built


def _server(stack: ExitStack, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fastroof", "serve", PLAN, *options]
    server = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    stack.callback(server.terminate)
    return server


def over_http(setup: Setup, stack: ExitStack) -> Workloads:
    server = _server(stack, "--http", "127.0.0.1:0")
    assert server.stdout is not None
    [port] = re.findall(rb":([0-9]+):", server.stdout.readline())
    client = stack.enter_context(PlanClient(f"http://127.0.0.1:{int(port)}"))
    count = setup.size(10, 5)
    calls, steps, sizes = decode_calls(setup)[:count], steps_of(setup)[:count], bulk_sizes()
    batches = [fastroof.StepBatch.from_requests([list(zip(*step, strict=True))]) for step in steps]
    return {
        "decode": looped("http", client.decode_us, calls, setup.plan.decode_us(*np.array(calls).T)),
        "step": looped(
            "http", lambda batch: client.step_us(batch)[0], [(b,) for b in batches], batched_us(setup, steps)
        ),
        "bulk": once(
            "http",
            lambda: client.decode_us(*sizes),
            setup.plan.decode_us(*sizes),
            lambda: setup.plan.decode_us(*sizes),
        ),
    }


def on_a_pipe(setup: Setup, stack: ExitStack) -> Workloads:
    server = _server(stack, "--stdio")
    assert server.stdin is not None
    assert server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def query(message: dict[str, Any]) -> list[float]:
        stdin.write(json.dumps(message).encode() + b"\n")
        stdin.flush()
        times: list[float] = json.loads(stdout.readline())["latency_us"]
        return times

    count = setup.size(50, 5)
    calls, steps, sizes = decode_calls(setup)[:count], steps_of(setup)[:count], bulk_sizes()
    requests = [(list(zip(*step, strict=True)),) for step in steps]
    lists = {"batch_size": sizes[0].tolist(), "kv_len": sizes[1].tolist()}
    return {
        "decode": looped(
            "pipe",
            lambda batch, kv: query({"batch_size": batch, "kv_len": kv})[0],
            calls,
            setup.plan.decode_us(*np.array(calls).T),
        ),
        "step": looped(
            "pipe", lambda step: query({"requests": [step]})[0], requests, batched_us(setup, steps)
        ),
        "bulk": once(
            "pipe", lambda: query(lists), setup.plan.decode_us(*sizes), lambda: setup.plan.decode_us(*sizes)
        ),
    }


LISTS, ARRAYS, NDARRAYS = (
    in_buffers(make) for make in (list, lambda values: array.array("q", values), np.array)
)
RUST: Final = ("rustc", "-O", "example.rs", "-C", "link-arg=fastroof_step.o")
GO: Final = ("go", "build", "-o", "../example", ".")

WAYS: Final = (
    Way(
        "constant",
        "Python",
        "for comparison: a function that returns a constant",
        ("decode",),
        constant_of_python,
    ),
    Way("python", "Python", "`plan.scalar`; `plan.step_scalar` of lists", ("decode", "step"), in_python),
    Way("array", "Python", "`plan.step_scalar` of `array.array`", ("step",), ARRAYS),
    Way("ndarray", "Python", "`plan.step_scalar` of NumPy arrays", ("step",), NDARRAYS),
    Way("adapter", "Python", "an adapter: SGLang's `predict_infer_time`", ("step",), in_an_adapter),
    Way("numpy", "NumPy", "`plan.decode_us` of arrays", ("bulk",), in_numpy),
    Way("numba", "Numba", "`numba_decode`, `numba_step`", ("decode", "step"), in_numba),
    Way("c", "C, C++", "`fastroof_step.o`", ("decode", "step", "bulk"), in_c),
    Way("rust", "Rust", "the same", ("decode",), by_example(RUST)),
    Way("go", "Go", "the same, by cgo", ("decode",), by_example(GO, "go")),
    Way("pipe", "any", "`fastroof serve --stdio`, a line of JSON", ("decode", "step", "bulk"), on_a_pipe),
    Way("http", "any", "`fastroof serve --http`, by `PlanClient`", ("decode", "step", "bulk"), over_http),
)


def least_ns(workload: Workload, rounds: int) -> float:
    """Return the least time per unit, ns."""
    return min(measure(workload, rounds).rounds_s) / workload.count * NS_PER_S


def lines(setup: Setup, rounds: int, names: Sequence[str] = ()) -> Iterator[str]:
    """Yield the table in Markdown, each line when it is measured; without names every way."""
    yield f"| host | call | {' | '.join(KINDS.values())} |"
    yield f"|---|---|{'---|' * len(KINDS)}"
    for way in WAYS:
        if names and way.name not in names:
            continue
        cells = dict.fromkeys(KINDS, "")
        try:
            with ExitStack() as stack:
                for kind, workload in way.build(setup, stack).items():
                    cells[kind] = time_of_ns(least_ns(workload, rounds))
        except MissingProgramError as missing:
            cells["decode"] = f"not measured: no {missing}"
        yield f"| {way.host} | {way.call} | {' | '.join(cells.values())} |"
    if names:
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.npz"
        written = Workload(
            "npz", "a profile", "file", 1, lambda: write_dynamo_profile(setup.plan, path) and None
        )
        took = time_of_ns(least_ns(written, rounds))
        size = f"{path.stat().st_size / 1e6:.0f} MB"
    yield f"| any that reads tables | `fastroof export npz` | none: {size}, written in {took} | | |"


def main() -> None:
    """Print the table and the machine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_costs", description=__doc__)
    known = [way.name for way in WAYS]
    print_table(parser, known, lines, GUIDE, "costs", 60, "the least of {rounds} rounds.")


if __name__ == "__main__":
    main()
