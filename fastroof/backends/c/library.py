"""The object as a library to link: a SONAME, symbols of a version, and a file for pkg-config."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from fastroof._version import __version__
from fastroof.backends.c.objects import FUNCTIONS
from fastroof.compiled.c_api import ABI_VERSION
from fastroof.errors import BackendError

__all__ = ["LIBRARY", "LINK", "PKG_CONFIG", "find_linker", "link_library", "pkg_config_text"]

LINK: Final = "libfastroof_step.dylib" if sys.platform == "darwin" else "libfastroof_step.so"
"""What ``-lfastroof_step`` finds."""

LIBRARY: Final = LINK if sys.platform == "darwin" else f"{LINK}.{ABI_VERSION}"
"""The library itself, and its SONAME: what programs ask the loader for."""

PKG_CONFIG: Final = "fastroof_step.pc"


def find_linker(target: str | None) -> list[str] | None:
    """The compiler that links, and its options: ``$CC``, else the target's gcc or cc; None where none is."""
    words = shlex.split(os.environ.get("CC", "")) or [f"{target}-gcc" if target else "cc"]
    program = shutil.which(words[0])
    return None if program is None else [program, *words[1:]]


def link_library(linker: list[str], code: bytes) -> bytes:
    """Link object code as :data:`LIBRARY`, which shows the functions of fastroof_step.h alone.

    Raises
    ------
    BackendError
        If the linker fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "step.o").write_bytes(code)
        (place / "versions").write_text(
            f"FASTROOF_{ABI_VERSION} {{ global: {' '.join(f'{name};' for name in FUNCTIONS)} local: *; }};\n"
        )
        named = [f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={place / 'versions'}", "-Wl,-z,defs"]
        options = [] if sys.platform == "darwin" else named
        done = subprocess.run(
            [*linker, "-shared", *options, "-o", place / LIBRARY, place / "step.o"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            raise BackendError(f"{shlex.join(linker)} could not link {LIBRARY}: {said}")
        return (place / LIBRARY).read_bytes()


def pkg_config_text() -> str:
    """What pkg-config reads: the library and its header are where this file is, wherever that is moved to."""
    return "\n".join(
        [
            "prefix=${pcfiledir}",
            "libdir=${prefix}",
            "includedir=${prefix}",
            "",
            "Name: fastroof_step",
            "Description: How long one step of LLM inference takes on a GPU, from a plan file",
            f"Version: {__version__}",
            "Libs: -L${libdir} -lfastroof_step",
            "Cflags: -I${includedir}",
            "",
        ]
    )
