"""One plan under many threads and processes: no abort, no deadlock, the same bits."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

import fastroof
from fastroof.compiled import steps

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 16
STEPS = 100_000

# Python 3.12 and later warn of what is under test here: a fork of a process that has threads.
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels")


@cache
def inputs():
    """Sizes of homogeneous steps, and a ragged batch: more than any thread's share of work is at least."""
    random = np.random.default_rng(5)
    steps_of_equals = random.integers([[1], [2], [1], [0]], [[1024], [2**17], [512], [4096]], (4, STEPS))
    offsets = np.cumsum([0, *random.integers(0, 12, STEPS // 5)])
    requests = offsets[-1]
    new_tokens = np.where(random.random(requests) < 0.7, 1, random.integers(1, 512, requests))
    return steps_of_equals, fastroof.StepBatch(new_tokens, random.integers(0, 4096, requests), offsets)


def every_call(plan, threads):
    """What each entry point answers, as bytes."""
    (batch_size, kv_len, new_tokens, context_len), batch = inputs()
    times = plan.run(batch, threads=threads)
    answers = (
        plan.decode_us(batch_size, kv_len, threads=threads),
        plan.decode_us(batch_size.astype(np.int32), kv_len.astype(np.int32), threads=threads),
        plan.prefill_us(new_tokens, context_len, 2, threads=threads),
        plan.step_us(batch, threads=threads),
        times.latency_us,
        times.origin,
        *times.components,
        np.float64(plan.decode_us(64, 4096, threads=threads)),
        np.float64(plan.prefill_us(2048, 1024, batch_size=2, threads=threads)),
    )
    return b"".join(answer.tobytes() for answer in answers)


def every_call_at_once(plan):
    """Answers of ``every_call`` in many threads that start together, half of them with four more each."""
    barrier = threading.Barrier(AT_ONCE)

    def one(i):
        barrier.wait(60)
        return every_call(plan, 4 if i % 2 else 1)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return set(pool.map(one, range(AT_ONCE)))


@pytest.fixture(scope="module")
def alone(plan):
    return every_call(plan, 1)


def test_sixteen_threads_call_one_plan_at_once(plan, alone):
    assert every_call(plan, 4) == alone
    assert every_call_at_once(plan) == {alone}


def copy_of(plan):
    """A plan that has answered nothing yet."""
    return pickle.loads(pickle.dumps(plan))


def in_child(plan, alone):
    """What a child process does; an exception is its exit code."""
    assert every_call(copy_of(plan), 1) == alone
    assert every_call(plan, 4) == alone
    assert every_call(plan, 1) == alone
    assert every_call_at_once(plan) == {alone}


def exit_codes(method, plan, alone):
    """Start two children, and return how they ended; None is a deadlock."""
    context = multiprocessing.get_context(method)
    children = [context.Process(target=in_child, args=(plan, alone)) for _ in range(2)]
    for child in children:
        child.start()
    codes = []
    for child in children:
        child.join(30)
        codes.append(child.exitcode)
        child.kill()
    return codes


@pytest.mark.slow
def test_a_plan_is_pickled_while_other_threads_call_it_first(plan, alone):
    for _ in range(5):
        shared = copy_of(plan)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            calls = [pool.submit(every_call, shared, 1) for _ in range(4)]
            copies = [pool.submit(copy_of, shared) for _ in range(200)]
            assert {call.result() for call in calls} == {alone}
            assert every_call(copies[-1].result(), 1) == alone
            assert all(copy.exception() is None for copy in copies)


@pytest.mark.slow
@forks
def test_forked_children_call_the_plan_of_a_parent_that_used_threads(plan, alone):
    assert every_call(plan, 4) == alone
    assert exit_codes("fork", plan, alone) == [0, 0]


@pytest.mark.slow
@forks
def test_children_are_forked_while_other_threads_call(plan, alone):
    done = threading.Event()

    def go_on(threads):
        answers = set()
        while not done.is_set():
            answers.add(every_call(copy_of(plan), threads))
        return answers

    with ThreadPoolExecutor(4) as pool:
        calling = [pool.submit(go_on, threads) for threads in (1, 4, 1, 4)]
        try:
            assert exit_codes("fork", plan, alone) == [0, 0]
        finally:
            done.set()
    assert set.union(*(call.result() for call in calling)) == {alone}


@pytest.mark.slow
def test_spawned_children_call_a_plan_that_was_pickled_to_them(plan, alone):
    assert exit_codes("spawn", plan, alone) == [0, 0]


FIRST_CALLS = """
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
import fastroof
tables = fastroof.load_tables("h100")
barrier = threading.Barrier(16)
def first(i):
    barrier.wait(60)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", tables, engine="kernels")
    batch = fastroof.StepBatch.from_requests([[(2048, 0), (1, 4095)]])
    one = plan.decode_us(64, 4096)
    arrays = plan.step_us(batch).tobytes(), plan.prefill_us([512, 1], 1024).tobytes()
    # what a first call made must outlive it, whichever thread's is kept: memory is used anew
    gc.collect()
    barrier.wait(60)
    used = [bytes(size) for size in range(200)] * 20
    assert {plan.decode_us(64, 4096) for _ in range(1000)} == {one}
    return one, arrays
with ThreadPoolExecutor(16) as pool:
    answers = list(pool.map(first, range(16)))
assert len(set(answers)) == 1, answers
print(answers[0][0].hex())
"""


@pytest.mark.slow
@pytest.mark.release
def test_sixteen_threads_compile_at_once_with_nothing_cached(plan, tmp_path):
    environment = {
        **os.environ, "FASTROOF_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FIRST_CALLS],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == [plan.decode_us(64, 4096).hex()]


@forks
def test_a_fork_waits_for_a_thread_that_compiles():
    holding = threading.Event()

    def compile_for_a_while():
        with global_compiler_lock:
            holding.set()
            time.sleep(0.2)

    compiling = threading.Thread(target=compile_for_a_while)
    compiling.start()
    assert holding.wait(10)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=take_the_compiler_lock)
    child.start()
    child.join(30)
    code = child.exitcode
    child.kill()
    compiling.join()
    assert code == 0
    take_the_compiler_lock()


def take_the_compiler_lock():
    with global_compiler_lock:
        pass


def test_python_runs_while_a_loop_does(plan):
    batch_size = np.full(2_000_000, 64, np.int32)
    kv_len = np.full(len(batch_size), 4096, np.int32)
    out = np.empty(len(batch_size))
    seen, stop = threading.Event(), threading.Event()

    def watch():
        while not stop.is_set():
            # in this order: the first step is timed, and after that the last one is not yet
            if not np.isnan(out[0]) and np.isnan(out[-1]):
                seen.set()
            time.sleep(0)

    watching = threading.Thread(target=watch)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)  # a thread runs only where another gives the interpreter up by itself
    try:
        watching.start()
        for _ in range(200):
            out.fill(np.nan)
            plan.decode_us(batch_size, kv_len, out=out)
            if seen.is_set():
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        watching.join()
    assert seen.is_set()


def test_every_loop_gives_the_interpreter_up():
    loops = [loop for loop in vars(steps).values() if isinstance(loop, Dispatcher)]
    assert loops
    assert all(loop.targetoptions["nogil"] for loop in loops)
