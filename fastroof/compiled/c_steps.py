"""A plan file's functions in C, as fastroof_step.h declares them: the loops behind C's calling convention.

Compiled by fastroof.backends.c into an object file that needs no Python, so nothing here allocates or
raises. A plan is the address of its file's bytes. What opens a file calls the C library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from fastroof.compiled.callers import equal_chunks_us, equal_decodes_us, requests_step_us
from fastroof.compiled.intrinsics import pointer_at
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.plan_files import (
    ARENA_FLOATS,
    CODE_FOREIGN,
    CODE_IO,
    FILE_BYTES,
    FILE_HEADER,
    plan_bytes_code,
)
from fastroof.compiled.ragged_steps import ragged_steps_us
from fastroof.compiled.steps import CODE_SIZES, MAX_SEQS, MAX_TOKENS, general_decode_steps_us

__all__ = ["ABI_VERSION", "C_FUNCTIONS", "C_LIBRARY", "plan_arena", "plan_word", "sizes_at"]

_t: Any = types  # numba's types have few types

ABI_VERSION: Final = 1
"""FASTROOF_ABI of fastroof_step.h: another where a program built with an older header would go wrong."""

C_LIBRARY: Final = ("open", "close", "lseek", "mmap", "munmap")
"""What opening a file needs, of POSIX."""

_SEEK_END, _PROT_READ, _MAP_SHARED, _MAP_FAILED = 2, 1, 1, -1
# a pipe's other end is not waited for: it has no size, and is refused
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def _external(name: str, returns: Any, *takes: Any) -> Any:
    return _t.ExternalFunction(name, returns(*takes))


# of its variable arguments only O_CREAT takes one
_libc_open = _external("open", _t.int32, _t.intp, _t.int32)
_libc_close = _external("close", _t.int32, _t.int32)
_lseek = _external("lseek", _t.intp, _t.int32, _t.intp, _t.int32)
_mmap = _external("mmap", _t.intp, _t.intp, _t.intp, _t.int32, _t.int32, _t.int32, _t.intp)
_munmap = _external("munmap", _t.int32, _t.intp, _t.intp)


@jit_inline
def plan_word(plan: int, word: int) -> Any:
    """A word of the header of a plan file at an address."""
    return carray(pointer_at(plan), (FILE_HEADER // 8,), np.int64)[word]


@jit_inline
def plan_arena(plan: int) -> Any:
    """The arena of a plan file at an address."""
    return carray(pointer_at(plan + FILE_HEADER), (plan_word(plan, ARENA_FLOATS),), np.float64)


@jit_inline
def sizes_at(address: int, count: int) -> Any:
    """So many int64 at an address."""
    return carray(pointer_at(address), (count,), np.int64)


@jit_inline
def _bytes_code(data: int, size: int) -> int:
    at: Any = pointer_at(data)
    eights = size // 8
    code: int = plan_bytes_code(
        carray(at, (size,), np.uint8), carray(at, (eights,), np.int64), carray(at, (eights,), np.float64)
    )
    return code


@jit_inline
def _one(time_us: float, step_us: Any) -> int:
    if np.isnan(time_us):
        return CODE_SIZES
    step_us[0] = time_us
    return 0


def _abi_version() -> int:
    return ABI_VERSION


def _open_bytes(data: int, size: int, plan: Any) -> int:
    if data == 0 or data % 8 != 0:
        return CODE_IO
    code = _bytes_code(data, max(size, 0))
    if code == 0:
        plan[0] = data
    return code


def _open(path: int, plan: Any) -> int:
    if path == 0:
        return CODE_IO
    file = _libc_open(path, _READ)
    if file < 0:
        return CODE_IO
    size = _lseek(file, 0, _SEEK_END)
    data = _MAP_FAILED
    if size > 0:
        data = _mmap(0, size, _PROT_READ, _MAP_SHARED, file, 0)
    _libc_close(file)
    if data == _MAP_FAILED:
        return CODE_FOREIGN if size == 0 else CODE_IO
    code = _bytes_code(data, size)
    if code == 0:
        plan[0] = data
    else:
        _munmap(data, size)
    return code


def _close(plan: int) -> None:
    if plan != 0:
        _munmap(plan, plan_word(plan, FILE_BYTES))


def _max_tokens(plan: int) -> int:
    return int(plan_arena(plan)[MAX_TOKENS])


def _max_seqs(plan: int) -> int:
    return int(plan_arena(plan)[MAX_SEQS])


def _describe(plan: int) -> int:
    return plan + FILE_HEADER + 8 * int(plan_word(plan, ARENA_FLOATS))


def _decode_us(plan: int, batch_size: int, kv_len: int, step_us: Any) -> int:
    return _one(equal_decodes_us(plan_arena(plan), batch_size, kv_len), step_us)


def _prefill_us(plan: int, new_tokens: int, context_len: int, batch_size: int, step_us: Any) -> int:
    return _one(equal_chunks_us(plan_arena(plan), new_tokens, context_len, batch_size), step_us)


def _step_us(plan: int, new_tokens: int, context_len: int, num_requests: int, step_us: Any) -> int:
    if num_requests < 0:
        return CODE_SIZES
    new, context = sizes_at(new_tokens, num_requests), sizes_at(context_len, num_requests)
    return _one(requests_step_us(plan_arena(plan), new, context), step_us)


def _decode_steps_us(plan: int, batch_size: int, kv_len: int, num_steps: int, step_us: Any) -> int:
    count = max(num_steps, 0)
    return general_decode_steps_us(
        plan_arena(plan), sizes_at(batch_size, count), sizes_at(kv_len, count), carray(step_us, (count,))
    )


def _steps_us(
    plan: int,
    new_tokens: int,
    context_len: int,
    num_requests: int,
    offsets: int,
    num_steps: int,
    step_us: Any,
) -> int:
    steps, requests = max(num_steps, 0), max(num_requests, 0)
    return ragged_steps_us(
        plan_arena(plan),
        sizes_at(new_tokens, requests),
        sizes_at(context_len, requests),
        sizes_at(offsets, steps + 1),
        carray(step_us, (steps,)),
    )


_PLAN, _SIZE, _ARRAY, _CODE = _t.intp, _t.int64, _t.intp, _t.int32
_TIMES: Final = _t.CPointer(_t.float64)
_NEW_PLAN: Final = _t.CPointer(_t.intp)

C_FUNCTIONS: Final[dict[str, tuple[Callable[..., Any], Any]]] = {
    "fastroof_abi_version": (_abi_version, _t.int32()),
    "fastroof_open": (_open, _CODE(_t.intp, _NEW_PLAN)),
    "fastroof_close": (_close, _t.void(_PLAN)),
    "fastroof_open_bytes": (_open_bytes, _CODE(_t.intp, _SIZE, _NEW_PLAN)),
    "fastroof_max_tokens": (_max_tokens, _SIZE(_PLAN)),
    "fastroof_max_seqs": (_max_seqs, _SIZE(_PLAN)),
    "fastroof_describe": (_describe, _t.intp(_PLAN)),
    "fastroof_decode_us": (_decode_us, _CODE(_PLAN, _SIZE, _SIZE, _TIMES)),
    "fastroof_prefill_us": (_prefill_us, _CODE(_PLAN, _SIZE, _SIZE, _SIZE, _TIMES)),
    "fastroof_step_us": (_step_us, _CODE(_PLAN, _ARRAY, _ARRAY, _SIZE, _TIMES)),
    "fastroof_decode_steps_us": (_decode_steps_us, _CODE(_PLAN, _ARRAY, _ARRAY, _SIZE, _TIMES)),
    "fastroof_steps_us": (_steps_us, _CODE(_PLAN, _ARRAY, _ARRAY, _SIZE, _ARRAY, _SIZE, _TIMES)),
}
"""What the object file exports: the loop and its signature in C, pointers as integers of their size."""
