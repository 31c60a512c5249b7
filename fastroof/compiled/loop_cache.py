"""Numba's cache interface over the files of :mod:`fastroof.compiled.code_cache`."""

from __future__ import annotations

import hashlib
import pickle
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llvmlite.binding as llvm
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime import nrt
from numba.core.serialize import dumps

from fastroof.compiled.code_cache import VERSION, cache_folders, cached_files, make_folder, store
from fastroof.compiled.compile_turns import Turn
from fastroof.compiled.dispatcher import (
    Callee,
    Compilation,
    LoopDispatcher,
    current,
    is_callee,
    rebuilt_callee,
    reduced_callee,
)
from fastroof.compiled.shipped_loops import FOLDER, Cpu, read_shipped, shipped_cpus

# numba has no types for these
_runtime: Any = vars(nrt)["_nrt"].c_helpers
_rebuild: Any = CompileResult._rebuild
_pickled: Any = dumps


@cache
def _name_runtime() -> None:
    """Give loaded code the addresses of the functions of Numba's runtime, which are written in C."""
    for name, address in _runtime.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


class LoopCache(NullCache):
    """Numba's cache interface over the files of one loop."""

    def __init__(
        self, function: Callable[..., Any], folders: Callable[[], tuple[Path, ...]] = cache_folders
    ) -> None:
        self._function: Any = function
        self._folders = folders
        self._turns: dict[Any, Turn | None] = {}

    @property
    def cache_path(self) -> str | None:
        """The folder of the cache, for Numba's statistics."""
        return next(map(str, self._folders()), None)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the cached code for a signature on this CPU, or None to compile it, until :meth:`end_turn`.

        While another process compiles it, this waits for its code.
        """
        # Numba refreshes the context here, which imports everything it can compile, SciPy too: 0.2 s, and
        # compiles its runtime: 40 ms and 30 MB. Code has that linked in, and compiling refreshes the context.
        _name_runtime()
        code = self._read(signature, target_context)
        if code is None:
            if getattr(current, "compilation", None) is None:
                current.compilation = Compilation(self._function, self._cached_names())
            current.compilation.begin(self._function)
            self._turns[signature] = None  # Ctrl-C may end the wait for it
            self._turns[signature] = self._turn(signature, target_context.codegen().magic_tuple())
            # it may have been stored since
            code = self._read(signature, target_context)
        return code

    def _cached_names(self) -> set[str]:
        """Return the names of loops that are cached for their callers."""
        folders = (*self._folders(), FOLDER / f"loops-{VERSION}")
        return {file.name.partition("-")[0] for folder in folders for file in folder.glob("*-IR-*.loop")}

    def _turn(self, signature: Any, cpu: Cpu) -> Turn:
        folders = self._folders()
        for folder in folders:
            with suppress(OSError):
                make_folder(folder)
                break
        return Turn(folders, self._file_name(self._key(signature, cpu)))

    def end_turn(self, signature: Any, *, is_compiled: bool = False) -> None:
        """Let other processes read, or compile, the code for a signature."""
        if signature in self._turns:
            if (turn := self._turns.pop(signature)) is not None:
                turn.end()
            if current.compilation.end(self._function, is_compiled=is_compiled):
                current.compilation = None

    def _read(self, signature: Any, target_context: Any) -> Any:
        cpu = target_context.codegen().magic_tuple()
        key = self._key(signature, cpu)
        for data in cached_files(self._folders(), self._file_name(key)):
            with suppress(Exception):  # damaged in any way
                return _compiled(data, key, target_context)
        for other in shipped_cpus(cpu):
            key = self._key(signature, other)
            with suppress(Exception):
                return _compiled(read_shipped(VERSION, self._file_name(key)), key, target_context)
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store the code compiled for a signature."""
        if not compiled.library.has_dynamic_globals:  # addresses of this process
            key = self._key(signature, compiled.codegen.magic_tuple())
            parts = reduced_callee(compiled) if is_callee() else compiled._reduce()
            store(self._folders(), self._file_name(key), _pickled((key, parts)))
        self.end_turn(signature, is_compiled=True)

    def _key(self, signature: Any, cpu: Cpu) -> tuple[Any, ...]:
        function = self._function
        cells = _pickled(tuple(cell.cell_contents for cell in function.__closure__ or ()))
        place = (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        kind = "IR" if is_callee() else "code"
        # the CPU and its features, since machines may share a home
        return (kind, *place, hashlib.sha256(cells).hexdigest(), signature, cpu)

    def _file_name(self, key: tuple[Any, ...]) -> str:
        name = self._function.__qualname__.rpartition(".")[2]
        return f"{name}-{key[0]}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.loop"


def _compiled(payload: bytes, key: tuple[Any, ...], target_context: Any) -> Any:
    """Return the code in a file if it is that of a key."""
    stored, parts = pickle.loads(payload)
    if stored != key:
        raise ValueError("another loop's code")
    return (rebuilt_callee if key[0] == "IR" else _rebuild)(target_context, *parts)


def check_compiler(options: dict[str, Any]) -> None:
    """Raise an error unless Numba compiles, links and stores a loop and its callee as known releases do."""

    def doubled(value: float) -> float:
        return value + value

    with_fixed_field: Any = type("Options", (namedtuple("Fields", "one"),), {"FIXED": {"one": 1.0}})

    def increased(value: float, options: Any) -> Any:
        return called(value) + options.one

    with TemporaryDirectory() as folder:
        called: Any = LoopDispatcher(doubled, {}, options)
        loop: Any = LoopDispatcher(increased, {}, options)
        for one in (called, loop):
            one._cache = LoopCache(one.py_func, lambda: (Path(folder),))
        answer = loop(3.0, with_fixed_field(1.0))
        is_callee = [isinstance(compiled.entry_point, Callee) for compiled in called.overloads.values()]
        if (answer, is_callee, called(3.0)) != (7.0, [True], 6.0):
            raise NotImplementedError("a loop that calls another one compiles to something else")
