"""Engines in C: the bits of fastroof.simulate, codes for what cannot be served, nothing beyond the memory."""

from __future__ import annotations

import ctypes
import math
import re
import struct
import subprocess

import numpy as np
import pytest

import fastroof
from fastroof.compiled import c_simulation
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace
from tests.examples import toy_simulator
from tests.reference.compilers import find_compiler

I64, PTR = ctypes.c_int64, ctypes.c_void_p
BEYOND = 4096
"""Bytes before and after the memory, which must not be written."""


class Engine(ctypes.Structure):
    """struct fastroof_engine."""

    _fields_ = [
        *[
            (name, I64)
            for name in (
                "max_num_batched_tokens",
                "max_num_seqs",
                "num_gpu_blocks",
                "block_size",
                "chunked_prefill",
                "admit_whole_prompt",
                "reserve_output",
                "prefill_first",
                "async_scheduling",
                "clients",
            )
        ],
        *[(name, ctypes.c_double) for name in ("think_us", "timeout_us", "time_scale")],
        ("reserved", I64 * 3),
    ]


class Served(ctypes.Structure):
    """struct fastroof_served."""

    _fields_ = [
        *[
            (name, I64)
            for name in (
                "steps",
                "mixed_steps",
                "prefill_steps",
                "preemptions",
                "prefill_tokens",
                "decode_tokens",
                "cached_tokens",
                "peak_running",
                "peak_waiting",
                "least_free_blocks",
            )
        ],
        ("busy_us", ctypes.c_double),
        ("end_us", ctypes.c_double),
    ]


@pytest.fixture(scope="module")
def plans(h100):
    return {
        "dense": fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm"),
        "windowed": fastroof.compile_plan("gemma-3-12b", "h100", h100, engine="kernels"),
        "sglang": fastroof.compile_plan(
            "llama-3.1-8b", "h100", h100, engine="sglang", max_num_batched_tokens=96
        ),
    }


@pytest.fixture(scope="module")
def library(loaded):
    loaded.fastroof_open.argtypes = (ctypes.c_char_p, ctypes.POINTER(PTR))
    loaded.fastroof_simulate_bytes.argtypes = (PTR, I64, I64)
    loaded.fastroof_simulate_bytes.restype = I64
    loaded.fastroof_simulate.argtypes = (PTR, PTR, I64, *[PTR] * 5, I64, *[PTR] * 5)
    return loaded


@pytest.fixture(scope="module")
def opened(exported, library):
    """The plans' files by name, mapped."""
    found = {}
    for name, path in exported.plans.items():
        found[name] = PTR()
        assert library.fastroof_open(str(path).encode(), ctypes.byref(found[name])) == 0
    return found


def engine_of(settings, trace, time_scale=1.0):
    return Engine(
        settings.max_num_batched_tokens,
        settings.max_num_seqs,
        settings.num_gpu_blocks,
        settings.block_size,
        settings.chunked_prefill,
        settings.admit_whole_prompt,
        settings.reserve_output,
        settings.order == "prefill_first",
        settings.async_scheduling,
        trace.clients or 0,
        trace.think_s * 1e6,
        settings.timeout_s * 1e6,
        time_scale,
    )


def in_c(library, plan, engine, trace, *, memory_bytes=None):
    """Serve a trace; returns the code, what became of requests, and the counters."""
    count = len(trace)
    arrival_us = trace.arrival_s * 1e6
    sizes = [
        np.ascontiguousarray(each, np.int32)
        for each in (trace.input_tokens, trace.output_tokens, trace.cached_tokens)
    ]
    longest = int(sizes[1].max(initial=0))
    needed = library.fastroof_simulate_bytes(ctypes.byref(engine), count, longest)
    given = needed if memory_bytes is None else memory_bytes
    random = np.random.default_rng(5)
    held = random.integers(0, 256, max(given, 0) + 2 * BEYOND, np.uint8)
    before = held.copy()
    # of any alignment
    start = BEYOND - 3
    out = {
        "first_us": np.empty(count),
        "last_us": np.empty(count),
        "preemptions": np.empty(count, np.int32),
        "status": np.empty(count, np.uint8),
    }
    served = Served()
    code = library.fastroof_simulate(
        plan,
        ctypes.byref(engine),
        count,
        arrival_us.ctypes.data,
        *[size.ctypes.data for size in sizes],
        held.ctypes.data + start,
        given,
        *[each.ctypes.data for each in out.values()],
        ctypes.byref(served),
    )
    assert np.array_equal(held[:start], before[:start])
    assert np.array_equal(held[start + max(given, 0) :], before[start + max(given, 0) :])
    return code, {"arrival_us": arrival_us, **out}, served


def made_trace(seed, count=300, per_s=30.0, **more):
    random = np.random.default_rng(seed)
    prompts = random.integers(1, 3000, count).astype(np.int32)
    cached = (prompts * random.choice([0.0, 0.0, 0.5], count)).astype(np.int32)
    arrival_s = random.exponential(1 / per_s, count).cumsum()
    if "clients" in more:
        arrival_s[:] = 0.0
    return Trace(arrival_s, prompts, random.integers(1, 300, count), cached, **more)


ENGINES = {
    "plain": ({}, {}),
    "asynchronous": ({"async_scheduling": True}, {}),
    "short of blocks": ({"num_gpu_blocks": 700, "max_num_seqs": 64}, {}),
    "short of blocks, asynchronous": ({"num_gpu_blocks": 700, "async_scheduling": True}, {}),
    "odd blocks": ({"block_size": 24, "num_gpu_blocks": 500}, {}),
    "small steps": ({"max_num_batched_tokens": 100, "max_num_seqs": 40}, {}),
    "prompts first": ({"order": "prefill_first"}, {}),
    "prompts first, short of blocks": ({"order": "prefill_first", "num_gpu_blocks": 700}, {}),
    "no chunks": ({"chunked_prefill": False, "reserve_output": True, "max_num_batched_tokens": 4096}, {}),
    "time-outs": ({"timeout_s": 1.5, "num_gpu_blocks": 900}, {}),
    "closed": ({"async_scheduling": True}, {"clients": 20, "think_s": 0.3}),
}


@pytest.mark.parametrize("name", ["dense", "windowed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_c_has_the_bits_of_python(library, opened, plans, name, engine):
    given, of_trace = ENGINES[engine]
    sizes = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "num_gpu_blocks": 20_000, "block_size": 16}
    given = sizes | {"async_scheduling": False} | given
    settings = EngineSettings.of_plan(plans[name], **given)
    seen = set()
    for seed in range(3):
        trace = made_trace(seed, **of_trace)
        expected = run_engine(plans[name], trace, settings)
        code, out, served = in_c(library, opened[name], engine_of(settings, trace), trace)
        assert code == 0
        for field in ("arrival_us", "first_us", "last_us", "preemptions", "status"):
            np.testing.assert_array_equal(out[field], getattr(expected, field), err_msg=field)
        for counter in ("steps", "mixed_steps", "prefill_steps", "preemptions", "busy_us", "end_us"):
            assert getattr(served, counter) == expected.counters[counter], counter
        seen.add("preempted" if served.preemptions else "whole")
        seen.add("timed out" if out["status"].any() else "finished")
    assert ("preempted" in seen) == ("blocks" in engine or engine == "time-outs")
    assert ("timed out" in seen) == (engine == "time-outs")


def test_steps_may_take_longer(library, opened, plans):
    trace = made_trace(1)
    settings = EngineSettings.of_plan(plans["dense"], num_gpu_blocks=20_000, async_scheduling=False)
    expected = run_engine(plans["dense"], trace, settings, time_scale=1.25)
    code, out, _ = in_c(library, opened["dense"], engine_of(settings, trace, 1.25), trace)
    assert code == 0
    np.testing.assert_array_equal(out["last_us"], expected.last_us)


def test_decodes_of_sglang_may_exceed_a_step_of_prompts(library, opened, plans):
    """C and Python accept the same limits; a mixed step and a plan hold no more requests than tokens."""
    plan, trace = plans["sglang"], made_trace(1)
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 96, "num_gpu_blocks": 400_000}
    settings = EngineSettings.of_plan(plan, **limits)
    expected = run_engine(plan, trace, settings)
    code, out, served = in_c(library, opened["sglang"], engine_of(settings, trace), trace)
    assert (code, served.peak_running) == (0, 96)
    for field in ("arrival_us", "first_us", "last_us", "preemptions", "status"):
        np.testing.assert_array_equal(out[field], getattr(expected, field), err_msg=field)
    for invalid in ({"max_num_seqs": 97}, {"order": "mixed"}):
        with pytest.raises(fastroof.FastroofError, match="max_num_seqs"):
            EngineSettings.of_plan(plan, **limits | invalid)
        engine = engine_of(settings, trace)
        engine.max_num_seqs = invalid.get("max_num_seqs", 96)
        engine.prefill_first = "order" not in invalid
        code, *_ = in_c(library, opened["sglang"], engine, trace, memory_bytes=2**24)
        assert code == c_simulation.CODE_ENGINE


def plain_engine(**changes):
    given = {
        "max_num_batched_tokens": 2048, "max_num_seqs": 128, "num_gpu_blocks": 20_000, "block_size": 16,
        "chunked_prefill": 1, "admit_whole_prompt": 1, "timeout_us": math.inf, "time_scale": 1.0,
    }  # fmt: skip
    return Engine(**(given | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": 2049},
        {"max_num_batched_tokens": 0},
        {"max_num_batched_tokens": 2**40},
        {"num_gpu_blocks": 0},
        {"num_gpu_blocks": 2**62},
        {"block_size": 0},
        {"block_size": -16},
        {"chunked_prefill": 2},
        {"async_scheduling": -1},
        {"clients": -1},
        {"think_us": math.nan},
        {"think_us": -1.0},
        {"timeout_us": 0.0},
        {"timeout_us": math.nan},
        {"time_scale": 0.0},
        {"time_scale": math.inf},
    ],
)
def test_an_invalid_engine_returns_a_code(library, opened, changes):
    engine, trace = plain_engine(**changes), made_trace(1, 5)
    assert library.fastroof_simulate_bytes(ctypes.byref(engine), 5, 300) == -1
    assert in_c(library, opened["dense"], engine, trace, memory_bytes=2**20)[0] == c_simulation.CODE_ENGINE


def test_an_engine_larger_than_the_plan_has_a_code(library, opened, plans):
    trace = made_trace(1, 5)
    for changes in (
        {"max_num_batched_tokens": plans["dense"].max_num_batched_tokens + 1},
        {"max_num_seqs": plans["dense"].max_num_seqs + 1},
    ):
        assert in_c(library, opened["dense"], plain_engine(**changes), trace)[0] == c_simulation.CODE_ENGINE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_tokens", 0),
        ("input_tokens", 2**24 + 1),
        ("output_tokens", 0),
        ("output_tokens", -5),
        ("cached_tokens", -1),
        ("cached_tokens", 10**6),
        ("arrival_s", -1.0),
        ("arrival_s", math.nan),
        ("arrival_s", math.inf),
        ("arrival_s", 1e-9),
    ],
)
def test_an_invalid_request_returns_a_code(library, opened, name, value):
    trace = made_trace(1, 5)
    # the arrays behind the trace, as a C program might give them
    getattr(trace, name).flags.writeable = True
    getattr(trace, name)[3] = value
    code, *_ = in_c(library, opened["dense"], plain_engine(), trace, memory_bytes=2**24)
    assert code == c_simulation.CODE_REQUEST


def test_a_request_that_never_fits_has_a_code(library, opened):
    trace = made_trace(1, 5)
    longest = int((trace.input_tokens + trace.output_tokens).max())
    enough = -(-longest // 16)
    assert in_c(library, opened["dense"], plain_engine(num_gpu_blocks=enough), trace)[0] == 0
    short = plain_engine(num_gpu_blocks=enough - 1)
    assert in_c(library, opened["dense"], short, trace)[0] == c_simulation.CODE_TOO_LONG
    unchunked = plain_engine(chunked_prefill=0, max_num_batched_tokens=128)
    assert in_c(library, opened["dense"], unchunked, trace)[0] == c_simulation.CODE_TOO_LONG


def test_too_little_memory_has_a_code(library, opened):
    trace, engine = made_trace(1, 5), plain_engine()
    needed = library.fastroof_simulate_bytes(ctypes.byref(engine), 5, int(trace.output_tokens.max()))
    for given in (needed - 1, 0, -1):
        code, *_ = in_c(library, opened["dense"], engine, trace, memory_bytes=given)
        assert code == c_simulation.CODE_MEMORY
    assert library.fastroof_simulate_bytes(ctypes.byref(engine), -1, 5) == -1
    assert library.fastroof_simulate_bytes(ctypes.byref(engine), 5, 2**40) == -1
    assert library.fastroof_simulate_bytes(None, 5, 5) == -1
    # some bytes a request, whatever its length
    many = library.fastroof_simulate_bytes(ctypes.byref(engine), 10**6, 300)
    assert (many - needed) / 10**6 < 70


def test_no_requests_are_served_at_once(library, opened):
    engine, served, memory = plain_engine(), Served(steps=7), ctypes.create_string_buffer(2**18)
    code = library.fastroof_simulate(
        opened["dense"],
        ctypes.byref(engine),
        0,
        *[None] * 4,
        ctypes.addressof(memory),
        len(memory),
        *[None] * 4,
        ctypes.byref(served),
    )
    assert (code, served.steps, served.end_us) == (0, 0, 0.0)


@pytest.fixture(scope="module")
def program(exported, tmp_path_factory):
    """The example, built without a warning."""
    compiler = find_compiler("gcc", "cc")
    built = tmp_path_factory.mktemp("built") / "simulate"
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
    command = [compiler, "-O2", "-std=c11", *warnings, "simulate.c", "fastroof_step.o", "-o", built]
    subprocess.run(command, cwd=exported.plans["dense"].parent, check=True)
    return built


@pytest.mark.parametrize("count", [100_000, 2_000])
def test_the_example_prints_the_bits_of_python(program, exported, plans, count):
    words = [program, exported.plans["dense"], "20000", *([str(count)] if count < 100_000 else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    *lines, steps, cost, own = done.stdout.splitlines()
    trace = Trace(np.arange(count) * 0.125, np.full(count, 1024), np.full(count, 128))
    settings = EngineSettings.of_plan(
        plans["dense"], max_num_batched_tokens=2048, max_num_seqs=256, num_gpu_blocks=20_000,
        block_size=16, async_scheduling=False,
    )  # fmt: skip
    expected = run_engine(plans["dense"], trace, settings)
    ttft_ms = (expected.first_us - expected.arrival_us) / 1e3
    found = {
        "TTFT of the last": ttft_ms[-1],
        "TTFT, 99 of 100": np.sort(ttft_ms)[-1 - count // 100],
        "the end": expected.counters["end_us"] / 1e3,
    }
    assert lines == [f"{name}: {ms:.3f} ms, bits {struct.pack('>d', ms).hex()}" for name, ms in found.items()]
    assert steps == f"{expected.counters['steps']} steps, 0 preemptions"
    assert re.fullmatch(r"a step: \d+\.\d ns", cost)
    assert own == "serve() of this file: the same times"


@pytest.mark.parametrize("budget", [2048, 100])
@pytest.mark.parametrize("equal", [True, False])
def test_the_toy_simulator_has_the_bits_of_simulate(plans, budget, equal):
    """Of simulate.c's arrivals, which that holds its own loop to, and of random ones."""
    trace = (
        Trace(np.arange(2_000) * 0.125, np.full(2_000, 1024), np.full(2_000, 128)) if equal else made_trace(3)
    )
    trace = Trace(trace.arrival_s, trace.input_tokens, trace.output_tokens)
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": 40}
    settings = EngineSettings.of_plan(plans["dense"], async_scheduling=False, num_gpu_blocks=20_000, **limits)
    expected = run_engine(plans["dense"], trace, settings)
    columns = (trace.arrival_s * 1e6, trace.input_tokens, trace.output_tokens)
    first_us, last_us = toy_simulator.serve(
        plans["dense"], *(column.tolist() for column in columns), **limits
    )
    np.testing.assert_array_equal(first_us, expected.first_us)
    np.testing.assert_array_equal(last_us, expected.last_us)


def test_the_toy_simulator_compares_itself(capsys):
    toy_simulator.main()
    assert capsys.readouterr().out.endswith("fastroof.simulate: every TTFT within 0 ms\n")


def test_the_example_reports_what_it_cannot_serve(program, exported):
    failed = subprocess.run([program, exported.plans["dense"], "10"], capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (
        1,
        "simulate: a request that the engine never has room for\n",
    )
    failed = subprocess.run([program, exported.plans["dense"], "10", "0"], capture_output=True, text=True)
    assert (failed.returncode, failed.stderr[:6]) == (2, "usage:")
