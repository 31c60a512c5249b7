"""Faults of the C library's calls in this process, which was started with ``failing_calls.c`` before all."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

__all__ = ["KINDS", "How", "NoShim", "Shim", "command_with_faults"]

SOURCE = Path(__file__).with_name("failing_calls.c")

KINDS = {
    "open": 1, "write": 2, "fsync": 4, "close": 8, "rename": 16, "link": 32, "unlink": 64, "mkdir": 128,
    "alloc": 256,
}  # fmt: skip
"""Kinds of calls and their bits, as the C source has them."""

# Arrow's and mimalloc's own pools would take memory past malloc
ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}


class How(IntEnum):
    """How a fault goes on: one call alone, all that follow, those after half a write, or the process ends."""

    ONCE = 0
    EVER = 1
    HALF = 2
    KILL = 3


def command_with_faults(
    module: str, words: Sequence[str], folder: Path
) -> tuple[list[str], dict[str, str]] | str:
    """Return command and environment of a module that can arm faults, or why that is impossible.

    Parameters
    ----------
    module : str
        Which is run as ``python -m``.
    words : sequence of str
        Its arguments.
    folder : Path
        Takes the compiled source.
    """
    if not sys.platform.startswith("linux"):
        return "calls are made to fail on Linux alone"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "no C compiler"
    library = folder / "failing_calls.so"
    built = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode:
        return f"{compiler} cannot build {SOURCE.name}: {built.stderr.strip()[-300:]}"
    environment = {**os.environ, **ENVIRONMENT, "LD_PRELOAD": str(library)}
    return [sys.executable, "-m", module, *words], environment


class Shim:
    """The faults of this process.

    Raises
    ------
    RuntimeError
        If it was not started by :func:`command_with_faults`.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "faults_arm"):
            raise RuntimeError("not started with failing_calls.so; see command_with_faults")
        self._library.faults_arm.argtypes = [
            ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_size_t,
        ]  # fmt: skip
        self._library.faults_where.restype = ctypes.c_char_p
        self._library.faults_count_of.restype = self._library.faults_met.restype = ctypes.c_long

    def arm(
        self,
        folder: Path,
        kinds: Sequence[str],
        number: int,
        error: int = 0,
        how: How = How.ONCE,
        least_bytes: int = 0,
    ) -> None:
        """Let the n-th call of these kinds below a folder fail, or none where ``number`` is 0.

        Of memory, allocations of at least so many bytes count.
        """
        bits = sum(KINDS[kind] for kind in kinds)
        self._library.faults_arm(os.fsencode(folder), bits, number, error, how, least_bytes)

    def disarm(self) -> None:
        self._library.faults_disarm()

    @property
    def counts(self) -> dict[str, int]:
        """Calls of each kind since they were armed."""
        return {kind: int(self._library.faults_count_of(bit)) for kind, bit in KINDS.items()}

    @property
    def met(self) -> int:
        """Calls that failed."""
        return int(self._library.faults_met())

    @property
    def where(self) -> str:
        """The first call that failed, and its path."""
        return os.fsdecode(self._library.faults_where())


class NoShim(Shim):
    """No faults, and nothing that has to be built for them."""

    counts = {}  # type: ignore[assignment]  # noqa: RUF012
    met = 0  # type: ignore[assignment]
    where = ""  # type: ignore[assignment]

    def __init__(self) -> None:
        pass

    def disarm(self) -> None:
        """All calls go through anyway."""
