"""One step a call, as event loops pay for it: each route against a predictor that returns a constant.

Every route times the same steps, of 32 requests (a prefill chunk beside 31 decodes) where its interface
takes requests, and has the bits of ``plan.step_us``.
"""

from __future__ import annotations

import array
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest

import fastroof
from benchmarks.conftest import Timed
from fastroof.backends.c import export_c
from fastroof.backends.sglang import StepTimePredictor
from fastroof.bench import Baseline, Setup, Workload

REQUESTS = 32
CONSTANT_US = 15_000.0

Call = tuple[Any, ...]


def steps_of(setup: Setup) -> list[tuple[list[int], list[int]]]:
    """Steps of one chunk and decodes that grow from step to step."""
    decodes = range(1000, 1000 + REQUESTS - 1)
    return [
        ([512] + [1] * (REQUESTS - 1), [0, *(context + past % 1024 for context in decodes)])
        for past in range(setup.size(20_000, 200))
    ]


def event_loop(predict: Callable[..., float], calls: Sequence[Call]) -> list[float]:
    """What a simulator does with its predictions: the clock moves on by each."""
    clock_us, seen = 0.0, []
    for call in calls:
        step_us = predict(*call)
        clock_us += step_us
        seen.append(step_us)
    return seen


def route(name: str, predict: Callable[..., float], calls: Sequence[Call], expected: Any) -> Workload:
    """An event loop with one route's predictor, against the same with a constant."""

    def constant(*call: Any) -> float:
        return CONSTANT_US

    def run() -> list[float]:
        return event_loop(predict, calls)

    np.testing.assert_array_equal(run(), expected)
    always = Baseline("a constant", lambda: event_loop(constant, calls), len(calls), None)
    return Workload(name, f"{len(calls):,} steps, one a call", "call", len(calls), run, baselines=(always,))


def batched_us(setup: Setup, steps: Sequence[tuple[list[int], list[int]]]) -> Any:
    return setup.plan.step_us(
        fastroof.StepBatch.from_requests([list(zip(*step, strict=True)) for step in steps])
    )


def test_scalar(timed: Timed, setup: Setup) -> None:
    calls = [(1 + i % 512, 1000 + i) for i in range(setup.size(200_000, 200))]
    timed(route("scalar", setup.plan.scalar, calls, setup.plan.decode_us(*np.array(calls).T)))


@pytest.mark.parametrize("kind", ["list", "array", "ndarray"])
def test_step_scalar(timed: Timed, setup: Setup, kind: str) -> None:
    makes = {"list": list, "array": lambda values: array.array("q", values), "ndarray": np.array}
    steps = steps_of(setup)
    calls = [tuple(map(makes[kind], step)) for step in steps]
    timed(route(f"step_scalar-{kind}", setup.plan.step_scalar, calls, batched_us(setup, steps)))


def test_sglang(timed: Timed, setup: Setup) -> None:
    steps = steps_of(setup)
    batches = [
        SimpleNamespace(
            reqs=[
                SimpleNamespace(extend_length=new, past_kv_length=past)
                for new, past in zip(*step, strict=True)
            ]
        )
        for step in steps
    ]
    predictor = StepTimePredictor(setup.plan)
    expected = batched_us(setup, steps) / 1e6
    timed(route("sglang", predictor.predict_infer_time, [(batch,) for batch in batches], expected))


def test_numba(timed: Timed, setup: Setup) -> None:
    """A compiled event loop with ``fastroof.numba_step``, against itself with a constant."""
    step_us, data = fastroof.numba_step(setup.plan)
    steps = steps_of(setup)
    new = np.array([step[0] for step in steps])
    context = np.array([step[1] for step in steps])

    @numba.njit
    def loop(data: Any, new: Any, context: Any, seen: Any) -> Any:
        for i in range(len(seen)):
            seen[i] = step_us(data, new[i], context[i])
        return seen

    @numba.njit
    def constant(new: Any, context: Any, seen: Any) -> Any:
        for i in range(len(seen)):
            seen[i] = CONSTANT_US + new[i, 0] + context[i, 0]
        return seen

    count, seen = len(steps), np.empty(len(steps))
    np.testing.assert_array_equal(loop(data, new, context, seen), batched_us(setup, steps))
    always = Baseline("a constant", lambda: constant(new, context, seen), count, None)

    def run() -> Any:
        return loop(data, new, context, seen)

    timed(Workload("numba", f"{count:,} steps, compiled callers", "call", count, run, baselines=(always,)))


C_LOOP = r"""
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "fastroof_step.h"

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

int main(int argc, char **argv)
{
    const fastroof_plan *plan;
    if (argc != 3 || fastroof_open(argv[1], &plan) != FASTROOF_OK)
        return 1;
    long steps = atol(argv[2]);
    int64_t new_tokens[32] = {512}, context_len[32] = {0};
    double step_us, clock_us = 0.0, began = seconds();
    for (long i = 0; i < steps; i++) {
        fastroof_decode_us(plan, 1 + i % 512, 1000 + i % 50000, &step_us);
        clock_us += step_us;
    }
    double decoded = seconds();
    for (int r = 1; r < 32; r++)
        new_tokens[r] = 1;
    for (long i = 0; i < steps; i++) {
        for (int r = 1; r < 32; r++)
            context_len[r] = 999 + r + i % 1024;
        fastroof_step_us(plan, new_tokens, context_len, 32, &step_us);
        clock_us += step_us;
    }
    printf("%.17g %.17g %.17g\n", decoded - began, seconds() - decoded, clock_us);
    return 0;
}
"""


@pytest.fixture(scope="module")
def c_loop(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """A program that times decode steps and steps of 32 requests; prints both times and the sum of steps."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("c_loop")
    done = export_c({"plan": setup.plan}, folder)
    (folder / "loop.c").write_text(C_LOOP)
    program = folder / "loop"
    command = [compiler, "-O2", "loop.c", "fastroof_step.o", "-o", program]
    subprocess.run(command, cwd=folder, check=True)
    return [program, done.plans["plan"]]


@pytest.mark.parametrize("what", ["decode", "step"])
def test_c(timed: Timed, setup: Setup, c_loop: list[str | Path], what: str) -> None:
    count = setup.size(2_000_000, 2_000)

    def run() -> float:
        done = subprocess.run([*c_loop, str(count)], capture_output=True, text=True, check=True)
        return float(done.stdout.split()[0 if what == "decode" else 1])

    calls = [(1 + i % 512, 1000 + i) for i in range(setup.size(100_000, 200))]

    def scalar() -> list[float]:
        return event_loop(setup.plan.scalar, calls)

    other = Baseline("plan.scalar", scalar, len(calls), None)
    timed(
        Workload(
            f"c-{what}", f"{count:,} calls", "call", count, run, baselines=(other,), reports_seconds=True
        )
    )
