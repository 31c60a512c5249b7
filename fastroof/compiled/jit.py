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


CHECKED: Final = ((0, 62), (0, 68))
"""First and last minor release of Numba that the tests have compiled all loops with."""


@cache
def compiler() -> tuple[Any, Any]:
    """Return the dispatcher of loops and their cache; imported when something compiles."""
    import numba
    from numba.core.compiler_lock import global_compiler_lock

    # a child forked while another thread compiles would wait forever for that thread's lock
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )
    return loop_compiler(numba.__version__)


def loop_compiler(numba_version: str) -> tuple[Any, Any]:
    """Return the dispatcher of loops and their cache; Numba's own and None if its interface has changed."""
    from fastroof.compiled.code_cache import cache_folders, say_once

    try:
        from fastroof.compiled.dispatcher import LoopDispatcher
        from fastroof.compiled.loop_cache import LoopCache, check_compiler

        release = tuple(int(number) for number in numba_version.split(".")[:2])
        is_checked = CHECKED[0] <= release <= CHECKED[1]
        # a folder of this version is there once something has compiled
        if not is_checked and not any(folder.is_dir() for folder in cache_folders()):
            check_compiler({"nopython": True, "boundscheck": None, **OPTIONS})
    except Exception as error:  # whatever a private interface of another release raises
        reason = str(error).partition("\n")[0]
        say_once(
            f"fastroof does not know the interface of numba {numba_version} ({type(error).__name__}: "
            f"{reason}), so Numba's own dispatcher compiles loops, at every start and in twice the time; "
            f"pip install 'numba<{CHECKED[1][0]}.{CHECKED[1][1] + 1}'"
        )
        return _numbas_own, None
    return LoopDispatcher, LoopCache


def _numbas_own(function: F, _: Any, options: dict[str, Any]) -> F:
    import numba

    return cast("F", numba.jit(**options)(function))


def uses_records() -> bool:
    """Return whether loops run uncompiled, where arrays of records need a type of their own."""
    if is_plain():
        return True
    from numba.core import config

    return bool(config.DISABLE_JIT)  # type: ignore[attr-defined]


def _compiled(function: F, options: dict[str, Any]) -> F:
    if is_plain():
        return function
    from numba.core import config

    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    dispatcher, loop_cache = compiler()
    compiled: Any = dispatcher(function, {}, {"nopython": True, "boundscheck": None, **options})
    # code from elsewhere is in no version and may be stale
    if loop_cache is not None and function.__module__.startswith(f"{__package__}."):
        compiled._cache = loop_cache(function)
    return cast("F", compiled)
