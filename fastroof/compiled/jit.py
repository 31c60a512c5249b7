"""The decorators of compiled loops."""

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
    # a second entry, for callers in C: unused, and 9 % of compile time
    "no_cfunc_wrapper": True,
    # explicit: otherwise a function that an inlined caller compiles first is inlined into every caller,
    # and what compiles, how long it takes and how fast it runs depend on which loop was asked for first
    "forceinline": False,
}


def jit(function: F) -> F:
    """Compile a loop: no GIL, NumPy's division, strict IEEE order; loops of this package are cached."""
    return _compiled(function, OPTIONS)


def jit_inline(function: F) -> F:
    """Compile a function as :func:`jit` does and inline it into every caller."""
    return _compiled(function, {**OPTIONS, "forceinline": True})


def jit_stateful(function: F) -> F:
    """Compile a loop that passes many arrays on as :func:`jit` does, without reference counts."""
    return _compiled(function, {**OPTIONS, "_nrt": False})


def jit_stateful_inline(function: F) -> F:
    """Compile a function as :func:`jit_stateful` does and inline it into every caller."""
    return _compiled(function, {**OPTIONS, "_nrt": False, "forceinline": True})


@cache
def _compiler() -> tuple[Any, Any, Any]:
    """Return Numba's settings, the dispatcher of loops and their cache; imported when something compiles."""
    from numba.core import config
    from numba.core.compiler_lock import global_compiler_lock

    from fastroof.compiled.code_cache import LoopCache
    from fastroof.compiled.dispatcher import LoopDispatcher

    # a child forked while another thread compiles would wait forever for that thread's lock
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )
    return config, LoopDispatcher, LoopCache


def _compiled(function: F, options: dict[str, Any]) -> F:
    if is_plain():
        return function
    config, dispatcher, loop_cache = _compiler()
    if config.DISABLE_JIT:
        return function
    compiled: Any = dispatcher(function, {}, {"nopython": True, "boundscheck": None, **options})
    # code from elsewhere is in no version and may be stale
    if function.__module__.startswith(f"{__package__}."):
        compiled._cache = loop_cache(function)
    return cast("F", compiled)
