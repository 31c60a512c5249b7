"""Cache of compiled loops on disk: one file each, named by a digest of its inputs and checked when read.

Numba's own cache is unsafe in a folder shared by many processes: its index and its data are two files, so
two processes that compile one loop for two signatures may write the same data file; a truncated file raises
in every later process; and it unpickles whatever it finds.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm
from numba.core import config
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime import nrt
from numba.core.serialize import dumps

from fastroof.compiled.compile_turns import Turn
from fastroof.compiled.dispatcher import is_callee, rebuilt_callee, reduced_callee
from fastroof.compiled.shipped_loops import Cpu, compiler_versions, read_shipped, shipped_cpus
from fastroof.compiled.trusted_files import UntrustedFolder, cache_roots, opened, read_trusted, write_trusted

_UNUSED: Final = timedelta(days=30)
_FOLDER_NAME: Final = re.compile(r"loops-[0-9a-f]{16}")
_FILE_NAME: Final = re.compile(r".+\.loop(\.[0-9a-f]+|\.lock)?")

COMPILING: Final = "compiling %s"
COMPILED: Final = "compiled %s"
"""Debug messages at the start and end of a compilation; compilations nest."""

_log: Final = logging.getLogger("fastroof.compiled")

# numba has no types for these
_runtime: Any = vars(nrt)["_nrt"].c_helpers
_rebuild: Any = CompileResult._rebuild
_pickled: Any = dumps


def code_version() -> str | None:
    """Return a digest of the loops' sources, the compiler and its settings; None without sources."""
    names = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
    settings = [str(getattr(config, name, None)) for name in names]
    digest = hashlib.sha256(repr((compiler_versions(), settings)).encode())
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16] if sources else None


# now and not at the first call: after an edit in between, old code would be stored under the new version
_VERSION: Final = code_version()


def cache_folders() -> tuple[Path, ...]:
    """Return the folders for this version's compiled code, best first; none needs to exist."""
    return tuple(root / f"loops-{_VERSION}" for root in cache_roots()) if _VERSION else ()


def cached_files(folders: tuple[Path, ...], name: str) -> Iterator[bytes]:
    """Read a cached file from each folder that has it, trusted and undamaged."""
    for folder in folders:
        with suppress(OSError, ValueError), opened(folder) as at:
            data = read_trusted(at, name)
            with suppress(OSError):
                os.utime(".", dir_fd=at)  # in use: see _remove_unused
            yield data


def store(folders: tuple[Path, ...], name: str, payload: bytes) -> None:
    """Write a cached file into the first folder that is trusted and can be written."""
    distrusted = ""
    for folder in folders:
        try:
            _make(folder)
            write_trusted(folder, name, payload)
            return
        except UntrustedFolder as error:
            distrusted = distrusted or str(error)
        except OSError:
            continue
    if distrusted:
        _say_once(
            f"compiled code is not cached, so every start compiles it: {distrusted}; set "
            "FASTROOF_CACHE_DIR to a folder that is yours alone"
        )


def _make(folder: Path) -> None:
    """Make a folder unless it is there; a new one is of a new version, or of a new cache."""
    if not folder.is_dir():
        with opened(folder, create=True):
            pass
        with suppress(OSError), opened(folder.parent) as above:
            _remove_unused(above)


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
        self._turns: dict[Any, Turn] = {}

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
            _log.debug(COMPILING, self._function.__qualname__)
            turn = self._turn(signature, target_context.codegen().magic_tuple())
            self._turns[signature] = turn
            # it may have been stored since
            code = self._read(signature, target_context)
            if code is not None:
                _log.debug(COMPILED, self._function.__qualname__)
        return code

    def _turn(self, signature: Any, cpu: Cpu) -> Turn:
        folders = self._folders()
        for folder in folders:
            with suppress(OSError):
                _make(folder)
                break
        return Turn(folders, self._file_name(self._key(signature, cpu)))

    def end_turn(self, signature: Any) -> None:
        """Let other processes read, or compile, the code for a signature."""
        turn = self._turns.pop(signature, None)
        if turn is not None:
            turn.end()

    def _read(self, signature: Any, target_context: Any) -> Any:
        cpu = target_context.codegen().magic_tuple()
        key = self._key(signature, cpu)
        for data in cached_files(self._folders(), self._file_name(key)):
            with suppress(Exception):  # damaged in any way
                return _compiled(data, key, target_context)
        for other in shipped_cpus(cpu):
            key = self._key(signature, other)
            with suppress(Exception):
                return _compiled(read_shipped(_VERSION, self._file_name(key)), key, target_context)
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store the code compiled for a signature."""
        _log.debug(COMPILED, self._function.__qualname__)
        if not compiled.library.has_dynamic_globals:  # addresses of this process
            key = self._key(signature, compiled.codegen.magic_tuple())
            parts = reduced_callee(compiled) if is_callee() else compiled._reduce()
            store(self._folders(), self._file_name(key), _pickled((key, parts)))
        self.end_turn(signature)

    def _key(self, signature: Any, cpu: Cpu) -> tuple[Any, ...]:
        function = self._function
        cells = _pickled(tuple(cell.cell_contents for cell in function.__closure__ or ()))
        place = (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        kind = "IR" if is_callee() else "code"
        # the CPU and its features, since machines may share a home
        return (kind, *place, hashlib.sha256(cells).hexdigest(), signature, cpu)

    def _file_name(self, key: tuple[Any, ...]) -> str:
        name = self._function.__qualname__.rpartition(".")[2]
        return f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.loop"


def _compiled(payload: bytes, key: tuple[Any, ...], target_context: Any) -> Any:
    """Return the code in a file if it is that of a key."""
    stored, parts = pickle.loads(payload)
    if stored != key:
        raise ValueError("another loop's code")
    return (rebuilt_callee if key[0] == "IR" else _rebuild)(target_context, *parts)


def _remove_unused(root: int) -> None:
    """Remove folders of other versions that have not been used for long, and nothing else."""
    oldest = time.time() - _UNUSED.total_seconds()
    with suppress(OSError), _listed(".", root) as folders:
        for folder in filter(_FOLDER_NAME.fullmatch, os.listdir(folders)):
            with suppress(OSError), _listed(folder, folders) as files:
                if os.fstat(files).st_mtime < oldest:
                    for file in filter(_FILE_NAME.fullmatch, os.listdir(files)):
                        os.unlink(file, dir_fd=files)
                    os.rmdir(folder, dir_fd=folders)


@contextmanager
def _listed(name: str, above: int) -> Iterator[int]:
    """Open a folder for reading; links are refused."""
    at = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        yield at
    finally:
        os.close(at)


@cache
def _say_once(words: str) -> None:
    """Log once what costs seconds at every start; a log message, as a warning may be raised as an error."""
    logging.getLogger("fastroof").warning("fastroof: %s", words)
