"""The one decorator of every compiled loop, and where compiled code is cached."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import platformdirs
from numba.core import config

__all__ = ["Flags", "Floats", "Ints", "cache_folder", "jit"]

F = TypeVar("F", bound=Callable[..., Any])
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]
Flags = npt.NDArray[np.uint8]


def cache_folder() -> Path | None:
    """Folder of the compiled code: ``FASTROOF_CACHE_DIR`` or the user's cache, by code version.

    Numba notices an edit to the decorated function's own file only, not to a callee in another one,
    so the folder's name holds a digest of all the loops' sources. None where nothing can be written.
    """
    # checked and unchecked code must not share a cache: numba itself would mix them
    checks = os.environ.get("NUMBA_BOUNDSCHECK", "")
    digest = hashlib.sha256(f"{numba.__version__} {checks}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    roots = [os.environ.get("FASTROOF_CACHE_DIR"), platformdirs.user_cache_dir("fastroof")]
    for root in filter(None, roots):
        folder = Path(root) / f"loops-{digest.hexdigest()[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


_FOLDER = cache_folder()


def jit(function: F) -> F:
    """Compile a loop: no GIL, NumPy's division, strict IEEE order, cached on disk."""
    cached = _FOLDER is not None
    before = getattr(config, "CACHE_DIR", "")
    if cached:
        setattr(config, "CACHE_DIR", str(_FOLDER))  # noqa: B010  numba sets its options the same way
    try:
        compiled: Any = numba.njit(cache=cached, nogil=True, error_model="numpy")(function)
    finally:
        setattr(config, "CACHE_DIR", before)  # noqa: B010
    return cast("F", compiled)
