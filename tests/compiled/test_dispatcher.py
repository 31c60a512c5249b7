"""Functions that only loops call stay LLVM IR; Python may still call them, and the cache returns them."""

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from numba.core import config

from fastroof.compiled.code_cache import LoopCache
from fastroof.compiled.dispatcher import Callee
from fastroof.compiled.jit import jit, jit_inline

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled without the JIT")

VALUES = np.arange(6.0)
ARGS = (numba.typeof(VALUES), numba.float64)


def make_loops(folder=None):
    """Return a loop, a function that it calls and one that it inlines, cached in a folder if one is given."""

    def scaled(value, factor):
        return value * factor if value > 1.0 else factor

    def squared(value):
        return value * value

    inlined, called = jit_inline(squared), jit(scaled)

    def summed(values, factor):
        total = 0.0
        for value in values:
            total += called(inlined(value), factor)
        return total

    loop = jit(summed)
    for one in (inlined, called, loop) if folder else ():
        one._cache = LoopCache(one.py_func, lambda: (folder,))
    return loop, called, inlined


def naive(values, factor):
    return sum(value * value * factor if value * value > 1.0 else factor for value in values)


def test_a_function_that_only_a_loop_calls_has_no_machine_code():
    loop, called, inlined = make_loops()
    assert loop(VALUES, 3.0) == naive(VALUES, 3.0)
    assert not isinstance(loop.overloads[ARGS].entry_point, Callee)
    for callee in (called, inlined):
        (compiled,) = callee.overloads.values()
        assert isinstance(compiled.entry_point, Callee)


def test_a_callee_is_compiled_when_python_calls_it():
    loop, called, inlined = make_loops()
    loop(VALUES, 3.0)
    assert called(4.0, 3.0) == 12.0
    assert inlined(4.0) == 16.0
    assert not isinstance(called.overloads[numba.float64, numba.float64].entry_point, Callee)
    assert loop(VALUES, 3.0) == naive(VALUES, 3.0)


def test_a_function_that_python_called_first_serves_loops_too():
    loop, called, inlined = make_loops()
    assert (called(4.0, 3.0), inlined(4.0)) == (12.0, 16.0)
    assert loop(VALUES, 3.0) == naive(VALUES, 3.0)


def test_python_gets_machine_code_while_another_thread_compiles_the_caller():
    loop, called, _ = make_loops()
    began, add_overload = threading.Event(), called.add_overload

    def slowly(compiled):
        began.set()
        time.sleep(0.2)
        add_overload(compiled)

    called.add_overload = slowly
    with ThreadPoolExecutor(2) as threads:
        summed = threads.submit(loop, VALUES, 3.0)
        assert began.wait(60)
        assert threads.submit(called, 4.0, 3.0).result(60) == 12.0
        assert summed.result(60) == naive(VALUES, 3.0)


def test_callees_of_other_numba_code_are_linked():
    _, called, _ = make_loops()
    assert numba.njit(lambda value: called(value, 2.0) + 1.0)(4.0) == 9.0


def test_ir_is_read_from_the_cache_for_another_loop(tmp_path):
    folder = tmp_path / "loops"
    loop, _, _ = make_loops(folder)
    answer = loop(VALUES, 3.0)
    assert len(list(folder.iterdir())) == 3
    loop, called, inlined = make_loops(folder)
    assert loop(VALUES, 3.0) == answer
    assert [sum(one.stats.cache_hits.values()) for one in (loop, called, inlined)] == [0, 1, 1]
    assert called(4.0, 3.0) == 12.0


def test_a_loop_survives_pickling():
    loop = pickle.loads(pickle.dumps(make_loops()[0]))
    assert loop(VALUES, 3.0) == naive(VALUES, 3.0)
