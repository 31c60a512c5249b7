"""Functions that only loops call stay LLVM IR; Python may still call them, and the cache returns them."""

import math
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import numba
import numpy as np
import pytest
from numba.core import config

from fastroof.compiled import code_cache, dispatcher
from fastroof.compiled.dispatcher import Callee, LoopDispatcher
from fastroof.compiled.jit import CHECKED, OPTIONS, jit, jit_inline, loop_compiler
from fastroof.compiled.loop_cache import LoopCache, check_compiler

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


def test_a_callee_has_one_version_for_integers_and_constants():
    def doubled(value):
        return 2 * value

    def total(sizes, size):
        return called(sizes[0]) + called(size) + called(3)

    called, loop = jit(doubled), jit(total)
    # in 32 bits this would overflow
    assert loop(np.array([2**30], np.int32), 4) == 2**31 + 14
    assert list(called.overloads) == [(numba.int64,)]


def test_two_loops_may_call_one_that_python_calls_too():
    loop, called, _ = make_loops()
    other = jit(lambda values: loop(values, 3.0) + called(values[-1], 2.0))
    for _ in range(2):
        assert other(VALUES) == naive(VALUES, 3.0) + 10.0
        assert loop(VALUES, 3.0) == naive(VALUES, 3.0)
        assert numba.njit(lambda values: loop(values, 3.0))(VALUES) == naive(VALUES, 3.0)


def test_a_large_callee_is_inlined_where_it_is_called_once():
    def long(value):
        for _ in range(9):
            value = math.sin(value) + math.cos(value) + math.tan(value) + math.exp(value)
            value = math.log(value) + math.sinh(value) + math.cosh(value) + math.tanh(value)
        return value

    called = jit(long)
    loop = jit(lambda value: called(value) + 1.0)
    with np.errstate(all="ignore"):
        loop(0.5)
    (entry,), (callee,) = loop.overloads.values(), called.overloads.values()
    functions = entry.library._final_module.functions
    defined = {one.name for one in functions if not one.is_declaration}
    assert {entry.fndesc.llvm_func_name, entry.fndesc.llvm_cpython_wrapper_name} <= defined
    assert callee.fndesc.llvm_func_name not in defined


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


class Options(NamedTuple):
    size: int
    has_more: int


class Plain(Options):
    FIXED: ClassVar = {"has_more": 0}


def test_what_a_fixed_field_turns_off_is_not_compiled(tmp_path):
    def more(options):
        return options.has_more

    def total(options):
        return options.size + called(options) if options.has_more > 0 else options.size

    called, loop = jit(more), jit(total)
    loop._cache = LoopCache(loop.py_func, lambda: (tmp_path,))
    assert (loop(Plain(3, 0)), called.overloads) == (3, {})
    assert (loop(Options(3, 0)), loop(Options(3, 2))) == (3, 5)
    assert len(list(tmp_path.iterdir())) == 2


# -- other releases of Numba -----------------------------------------------------------------------

SETTINGS = {"nopython": True, "boundscheck": None, **OPTIONS}
NEXT = f"{CHECKED[1][0]}.{CHECKED[1][1] + 1}.0"


@pytest.fixture
def fresh_folder(tmp_path, monkeypatch, caplog):
    """A cache folder without loops of this version, with nothing reported yet."""
    monkeypatch.setenv("FASTROOF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    code_cache.say_once.cache_clear()
    caplog.set_level("WARNING", "fastroof")
    return tmp_path / "cache"


def answers_of_the_fallback():
    """Answers of a loop that Numba's own dispatcher compiles, as an unknown release is given it."""
    make, loop_cache = loop_compiler(NEXT)
    assert loop_cache is None

    def scaled(value, factor):
        return value * factor if value > 1.0 else factor

    called = make(scaled, {}, SETTINGS)

    def summed(values, factor):
        total = 0.0
        for value in values:
            total += called(value * value, factor)
        return total

    loop = make(summed, {}, SETTINGS | {"_nrt": False})
    assert not isinstance(loop, LoopDispatcher)
    return loop(VALUES, 3.0), called(4.0, 3.0)


def test_the_installed_release_is_one_of_those_that_are_checked():
    assert CHECKED[0] <= numba.version_info[:2] <= CHECKED[1]


def test_a_newer_release_with_the_same_interface_compiles_as_before(fresh_folder, caplog):
    assert loop_compiler(NEXT) == (LoopDispatcher, LoopCache)
    assert not caplog.records


BREAKS = {
    "a hook that Numba calls no more": (dispatcher._LoopCompiler, "_customize_flags", lambda _, flags: flags),
    "a constructor with other arguments": (dispatcher._LoopPipeline, "__init__", lambda self, context: None),
    "a method that is gone": (dispatcher._EntryLibrary, "enable_object_caching", None),
    "a result with other fields": (dispatcher._Result, "_reduce", lambda self: 1 / 0),
    "a pass over fields that fails": (dispatcher, "ir_utils", None),
    "results that are wrong": (LoopDispatcher, "__call__", lambda self, value: 0.0),
}


@pytest.mark.parametrize(("owner", "name", "value"), BREAKS.values(), ids=BREAKS)
def test_a_release_with_another_interface_gets_numbas_own_dispatcher(
    fresh_folder, monkeypatch, caplog, owner, name, value
):
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, value, raising=False)
        with pytest.raises(Exception):  # noqa: B017, PT011 (whatever Numba raises)
            check_compiler(SETTINGS)
        assert answers_of_the_fallback() == (naive(VALUES, 3.0), 12.0)
    (record,) = caplog.records
    assert f"does not know the interface of numba {NEXT} (" in record.getMessage()
    assert f"pip install 'numba<{NEXT.removesuffix('.0')}'" in record.getMessage()


def test_a_loop_that_has_compiled_before_is_not_checked_again(fresh_folder, monkeypatch):
    monkeypatch.setattr(dispatcher._EntryLibrary, "enable_object_caching", None)
    (fresh_folder / f"loops-{code_cache.VERSION}").mkdir(parents=True)
    assert loop_compiler(NEXT) == (LoopDispatcher, LoopCache)


@pytest.mark.slow
def test_answers_are_the_same_to_the_last_bit_without_a_private_class(fresh_folder):
    question = """
import fastroof
plan = fastroof.compile_plan("llama-3.1-8b", "h100")
print(plan.decode_us([1, 64], 4096).tolist(), type(fastroof.compiled.steps.open_plan).__module__)
"""
    broken = "import numba.core.codegen; del numba.core.codegen.JITCodeLibrary\n"
    done = [
        subprocess.run([sys.executable, "-c", before + question], capture_output=True, text=True, check=True)
        for before in ("", broken)
    ]
    (usual, one), (fallback, other) = (run.stdout.rsplit(maxsplit=1) for run in done)
    assert usual == fallback
    assert (one, other) == ("fastroof.compiled.dispatcher", "numba.core.registry")
    assert done[0].stderr == ""
    assert "Numba's own dispatcher compiles loops" in done[1].stderr
