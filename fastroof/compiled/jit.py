"""The one decorator of every compiled loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar, cast

from fastroof.compiled.layout import is_plain

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "error_model": "numpy",
    # a second entry, for callers in C: nobody calls it, and it takes 9 % of compiling
    "no_cfunc_wrapper": True,
}


def jit(function: F) -> F:
    """Compile a loop: no GIL, NumPy's division, strict IEEE order; a loop of this package is kept on disk."""
    return _compiled(function, OPTIONS)


def jit_inline(function: F) -> F:
    """Compile a part of loops, as :func:`jit` does, and copy it into each of them."""
    return _compiled(function, {**OPTIONS, "forceinline": True})


def jit_stateful(function: F) -> F:
    """Compile a loop that hands many arrays on to its parts, as :func:`jit` does; it counts no references."""
    return _compiled(function, {**OPTIONS, "_nrt": False})


def jit_stateful_inline(function: F) -> F:
    """Compile a part of such loops, as :func:`jit_inline` does."""
    return _compiled(function, {**OPTIONS, "_nrt": False, "forceinline": True})


@cache
def _compiler() -> tuple[Any, Any]:
    """Numba's decorator, and what keeps its code: imported where something is compiled."""
    import numba
    from numba.core.compiler_lock import global_compiler_lock

    from fastroof.compiled.code_cache import LoopCache

    # A child forked while another thread compiles would wait for ever for that thread's lock.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )
    return numba.njit, LoopCache


def _compiled(function: F, options: dict[str, Any]) -> F:
    if is_plain():
        return function
    njit, loop_cache = _compiler()
    compiled: Any = njit(**options)(function)
    # It is the function itself with NUMBA_DISABLE_JIT. Code from elsewhere is in no version: it could be old.
    if compiled is not function and function.__module__.startswith(f"{__package__}."):
        compiled._cache = loop_cache(function)
    return cast("F", compiled)
