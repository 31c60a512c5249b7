"""A plan as built-in functions of CPython: from one step's sizes to microseconds.

A compiled loop called from Python first unpacks its arrays, which takes 300 ns and more. Here a callback
compiled against CPython's C API becomes a built-in function. Arguments that it does not handle - other types,
invalid sizes - it passes to a Python function, which answers or raises.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core.ccallback import CFunc

from fastroof.arrays import Floats
from fastroof.compiled.callers import equal_decodes_us, requests_step_us
from fastroof.compiled.intrinsics import pointer_at, stack_words
from fastroof.compiled.jit import OPTIONS, compiler, jit_inline
from fastroof.compiled.llvm import PLAIN
from fastroof.compiled.request_sums import MAX_KV_LEN, StepSums, WindowSums, no_window_sums, with_request
from fastroof.compiled.steps import open_plan, open_window, summed_step_us, windowed_step_us

_METH_FASTCALL = 0x80

_t: Any = types  # numba's types have few types


def _external(name: str, returns: Any, *takes: Any) -> Any:
    """Return a C API function of the running interpreter by name."""
    return _t.ExternalFunction(name, returns(*takes))


_list_size = _external("PyList_Size", _t.intp, _t.intp)
_bytes_of = _external("PyBytes_AsString", _t.CPointer(_t.int64), _t.intp)
_integer = _external("PyLong_AsLongLong", _t.int64, _t.intp)
_clear_error = _external("PyErr_Clear", _t.void)
_float_object = _external("PyFloat_FromDouble", _t.intp, _t.float64)
_get_buffer = _external("PyObject_GetBuffer", _t.int32, _t.intp, _t.voidptr, _t.int32)
_release_buffer = _external("PyBuffer_Release", _t.void, _t.voidptr)
_call = _external("PyObject_Vectorcall", _t.intp, _t.intp, _t.CPointer(_t.intp), _t.intp, _t.intp)

# words of a Py_buffer that are read here; ndim is the upper half of the fifth
_BUFFER_WORDS: Final = 10
_BUF, _LEN, _ITEMSIZE, _READONLY_NDIM, _FORMAT = 0, 2, 3, 4, 5
# words of a PyListObject
_LIST_WORDS: Final = 4
_LIST_SIZE, _LIST_ITEMS = 2, 3
_CONTIGUOUS: Final = 12
"""PyBUF flags of a contiguous buffer with its format."""
_INT64_FORMATS: Final = (ord("l"), ord("q"))
_INT32_FORMATS: Final = (ord("i"), ord("l"))

# slots of the state, int64 each
_ARENA, _SIZE, _OTHERWISE = range(3)
_INTEGERS: Final = 3
"""First of the addresses of plain integer types: no bools, no masked elements, no ``__index__`` in Python.
Other integers are read by the Python function."""
_INTEGER_TYPES: Final = (int, np.int64, np.int32)
_BUFFER_TYPES: Final = _INTEGERS + len(_INTEGER_TYPES)
"""First of the addresses of types whose buffer is all of their data: no masked arrays."""
_LENDING_TYPES: Final = (np.ndarray, array, memoryview)


class _State(bytes):
    """Addresses that the built-in reads, and the objects that keep them valid, visible to Python's GC."""

    kept: tuple[Any, ...]
    plan: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plan instead: a pickled built-in is an attribute of what stands for this object."""
        return _itself, (self.plan,)


def _itself(plan: Any) -> Any:
    return plan


@jit_inline
def _integer_of(state: Any, of: int) -> int:
    """Return the integer of an object of a plain integer type, else -1, which is never a size."""
    if of == 0:
        return -1
    kind = carray(pointer_at(of), (2,), np.int64)[1]
    if kind != state[_INTEGERS] and kind != state[_INTEGERS + 1] and kind != state[_INTEGERS + 2]:
        return -1
    value = int(_integer(of))
    if value == -1:
        _clear_error()  # beyond 64 bits; -1 itself is invalid, too
    return value


def _decode_call(this: int, arguments: Any, count: int) -> Any:
    """Time ``builtin(batch_size, kv_len)``, called by CPython's fast calling convention."""
    state = _bytes_of(this)
    if count == 2:
        batch = _integer_of(state, arguments[0])
        kv_len = _integer_of(state, arguments[1])
        arena = carray(pointer_at(state[_ARENA]), (state[_SIZE],), np.float64)
        time_us = equal_decodes_us(arena, batch, kv_len)
        if not np.isnan(time_us):
            return _float_object(time_us)
    return _call(state[_OTHERWISE], arguments, count, 0)


@jit_inline
def _list_item(of: int, place: int) -> int:
    """Return what PyList_GetItem returns, without a call; 0 beyond the end."""
    words = carray(pointer_at(of), (_LIST_WORDS,), np.int64)
    if place >= words[_LIST_SIZE]:
        return 0
    return int(carray(pointer_at(words[_LIST_ITEMS]), (place + 1,), np.int64)[place])


@jit_inline
def _has_number_buffer(state: Any, of: int) -> bool:
    """Whether an object's buffer is all of its data; a masked array also has a buffer."""
    kind = carray(pointer_at(of), (2,), np.int64)[1]
    first = _BUFFER_TYPES
    return bool(kind == state[first] or kind == state[first + 1] or kind == state[first + 2])


@jit_inline
def _integers_of(view: Any) -> tuple[int, int]:
    """Return width in bytes and number of a one-dimensional buffer's integers; width 0 for other buffers."""
    words = carray(view, (_BUFFER_WORDS,), np.int64)
    width, count = words[_ITEMSIZE], words[_LEN]
    if words[_READONLY_NDIM] >> 32 != 1 or words[_FORMAT] == 0:
        return 0, 0
    text = carray(pointer_at(words[_FORMAT]), (2,), np.uint8)
    if text[0] == 0 or text[1] != 0:
        return 0, 0
    if width == 8 and text[0] in _INT64_FORMATS:
        return 8, count // 8
    if width == 4 and text[0] in _INT32_FORMATS:
        return 4, count // 4
    return 0, 0


@jit_inline
def _buffers_step_us(arena: Any, new_view: Any, context_view: Any) -> float:
    """Time one step of two buffers' requests, us; NaN if they hold anything else."""
    width, count = _integers_of(new_view)
    context_width, contexts = _integers_of(context_view)
    if width == 0 or width != context_width or count != contexts:
        return np.nan
    new_at: Any = pointer_at(carray(new_view, (_BUFFER_WORDS,), np.int64)[_BUF])
    context_at: Any = pointer_at(carray(context_view, (_BUFFER_WORDS,), np.int64)[_BUF])
    if width == 8:
        return requests_step_us(
            arena, carray(new_at, (count,), np.int64), carray(context_at, (count,), np.int64)
        )
    return requests_step_us(arena, carray(new_at, (count,), np.int32), carray(context_at, (count,), np.int32))


@jit_inline
def _buffered_step_us(arena: Any, new_tokens: int, context_len: int) -> float:
    """Time one step of two objects' requests, us; NaN if they are not such buffers."""
    time_us = np.nan
    new_view, context_view = stack_words(_BUFFER_WORDS), stack_words(_BUFFER_WORDS)
    if _get_buffer(new_tokens, new_view, _CONTIGUOUS) == 0:
        if _get_buffer(context_len, context_view, _CONTIGUOUS) == 0:
            time_us = _buffers_step_us(arena, new_view, context_view)
            _release_buffer(context_view)
        _release_buffer(new_view)
    return time_us


@jit_inline
def _lists_in_window(state: Any, window: int, new_tokens: int, context_len: int, seqs: int) -> WindowSums:
    """Sum requests within a window; a second pass, so that plans without a window do not pay for it."""
    in_window = no_window_sums()
    for request in range(seqs):
        new = _integer_of(state, _list_item(new_tokens, request))
        context = _integer_of(state, _list_item(context_len, request))
        in_window = with_request(in_window, new, context, window)
    return in_window


def _step_call(this: int, arguments: Any, count: int) -> Any:
    """Time ``builtin(new_tokens, context_len)``, two lists or buffers with an integer per request."""
    state = _bytes_of(this)
    seqs = -1
    if count == 2:
        seqs = _list_size(arguments[0])
        if seqs < 0 or _list_size(arguments[1]) != seqs:
            _clear_error()  # not lists, or not of one length
            seqs = -1
            arena = carray(pointer_at(state[_ARENA]), (state[_SIZE],), np.float64)
            time_us = np.nan
            if _has_number_buffer(state, arguments[0]) and _has_number_buffer(state, arguments[1]):
                time_us = _buffered_step_us(arena, arguments[0], arguments[1])
            if not np.isnan(time_us):
                return _float_object(time_us)
            _clear_error()  # not buffers
    if seqs == 0:
        return _float_object(0.0)
    if seqs > 0:
        arena = carray(pointer_at(state[_ARENA]), (state[_SIZE],), np.float64)
        plan = open_plan(arena)
        decodes = kv_sum = new_sum = causal_pairs = prefix_pairs = prefix_sum = 0
        possible = seqs <= plan.max_num_seqs
        for request in range(seqs):
            new = _integer_of(state, _list_item(arguments[0], request))
            context = _integer_of(state, _list_item(arguments[1], request))
            if new < 1 or new > plan.max_num_batched_tokens or context < 0 or context > MAX_KV_LEN - new:
                possible = False
                break
            if new == 1 and context > 0:
                decodes += 1
                kv_sum += context + 1
            else:
                new_sum += new
                causal_pairs += new * (new + 1) // 2
                prefix_pairs += new * context
                prefix_sum += context
        if possible and decodes + new_sum <= plan.max_num_batched_tokens:
            sums = StepSums(decodes, kv_sum, new_sum, causal_pairs, prefix_pairs, prefix_sum)
            if plan.window > 0:
                in_window = _lists_in_window(state, plan.window, arguments[0], arguments[1], seqs)
                within = open_window(arena, 0)
                return _float_object(windowed_step_us(arena, plan, within, seqs, sums, in_window))
            return _float_object(summed_step_us(arena, plan, seqs, sums))
    return _call(state[_OTHERWISE], arguments, count, 0)


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def _method(name: str) -> tuple[_Method, Any]:
    """Compile a callback, once per process, and describe it to CPython."""
    function, words = _CALLS[name]
    signature = (_t.intp, _t.CPointer(_t.intp), _t.intp), _t.intp
    callback: Any = CFunc(function, signature, {}, OPTIONS)
    _, loop_cache = compiler()
    if loop_cache is not None:
        callback._cache = loop_cache(function)
    callback.compile()
    return _Method(name.encode(), callback.address, _METH_FASTCALL, f"{name}{words}".encode()), callback


_CALLS: Final[dict[str, tuple[Callable[..., Any], str]]] = {
    "scalar": (_decode_call, "(batch_size, kv_len, /)\n--\n\nTime one decode step, us."),
    "step_scalar": (_step_call, "(new_tokens, context_len, /)\n--\n\nTime one step, us."),
}


def plan_function(name: str, plan: Any, arena: Floats, otherwise: Callable[..., Any]) -> Callable[..., float]:
    """Make a plan's built-in function, which pickles as the attribute ``name`` of the plan."""
    if PLAIN:
        return otherwise
    words = [arena.ctypes.data, len(arena), *map(id, (otherwise, *_INTEGER_TYPES, *_LENDING_TYPES))]
    state = _State(np.array(words, np.int64).tobytes())
    # the method, too: of two threads' first calls, the cache keeps one
    method = _method(name)
    state.kept = (arena, otherwise, method)
    state.plan = plan
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    builtin: Callable[..., float] = new(ctypes.addressof(method[0]), state, None)
    return builtin
