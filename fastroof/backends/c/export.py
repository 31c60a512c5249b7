"""A folder that a C, Go or Rust program builds with: plan files, header, object code, examples."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof._version import __version__
from fastroof.atomic_files import write_errors, write_files
from fastroof.backends.c.objects import FUNCTIONS, object_code
from fastroof.backends.c.plan_file import plan_bytes
from fastroof.compiled.c_api import ABI_VERSION
from fastroof.errors import BackendError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

LINK: Final = "libfastroof_step.dylib" if sys.platform == "darwin" else "libfastroof_step.so"
"""What ``-lfastroof_step`` finds."""

LIBRARY: Final = LINK if sys.platform == "darwin" else f"{LINK}.{ABI_VERSION}"
"""The library itself, and its SONAME: what programs ask the loader for."""

PKG_CONFIG: Final = "fastroof_step.pc"
_LINE: Final = "SPDX-License-Identifier: Apache-2.0"

_COMMENTS: Final = {
    ".c": "/* {} */",
    ".h": "/* {} */",
    ".go": "// {}",
    ".mod": "// {}",
    ".rs": "// {}",
    ".pc": "# {}",
}
_HEADER: Final = "fastroof_step.h"
_OBJECT: Final = "fastroof_step.o"
# Go compiles every C file next to its own: its example has a folder to itself
_GO: Final = ("go/example.go", "go/go.mod", "blis/blis.go", "blis/kernel.go")
_EXAMPLES: Final = ("example.c", "simulate.c", "example.rs", *_GO)


class CExport(NamedTuple):
    """What :func:`export_c` wrote.

    Attributes
    ----------
    plans : dict of str to Path
        The plan files by name.
    files : tuple of Path
        Everything else.
    without : str
        Why there is no shared library; empty if there is one.
    """

    plans: dict[str, Path]
    files: tuple[Path, ...]
    without: str


def export_c(
    plans: Mapping[str, StepPlan],
    folder: str | Path,
    *,
    cpu: str | None = None,
    target: str | None = None,
    shared: bool | None = None,
) -> CExport:
    """Write plans and everything that a program without Python needs to time steps with them.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        Plans by name: each becomes ``NAME.plan``.
    folder : str or Path
        Output folder, made if missing. All files are written or none; others in it stay.
    cpu : str, optional
        The oldest CPU that must run the code, see :func:`fastroof.backends.c.objects.object_code`.
    target : str, optional
        The system that programs run on, one of :data:`fastroof.backends.c.objects.TARGETS`; this one by
        default.
    shared : bool, optional
        Whether to link ``libfastroof_step`` too, with ``$CC``, or ``cc``, or the target's gcc. By default
        if it is installed.

    Returns
    -------
    CExport
        The files.

    Raises
    ------
    BackendError
        If a name is no file's name, LLVM does not know the CPU or the target, or the library is asked for and
        there is no linker, or it fails.

    Examples
    --------
    >>> import fastroof, tempfile
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +NORMALIZE_WHITESPACE
    ...     sorted(path.name for path in export_c({"llama-8b": plan}, folder, shared=False).files)
    ['LICENSE', 'blis.go', 'example.c', 'example.go', 'example.rs', 'fastroof_step.h', 'fastroof_step.o',
     'go.mod', 'kernel.go', 'simulate.c']
    """
    folder = Path(folder)
    if not plans:
        raise BackendError("no plan to export: give at least one, by name")
    for name in plans:
        if not name or name.startswith(".") or Path(name).name != name:
            raise BackendError(f"{name!r} is not a valid name of a plan file: use letters, digits, - and .")
    contents = {f"{name}.plan": plan_bytes(plan, name) for name, plan in plans.items()}
    packaged = resources.files("fastroof.backends.c")
    for name in (_HEADER, *_EXAMPLES):
        contents[name] = with_licence_line(name, (packaged / name).read_bytes())
    contents["LICENSE"] = licence_bytes()
    linker = None if shared is False else find_linker(target)
    without = ""
    if shared is not False and linker is None:
        compiler = f"{target}-gcc" if target else "cc"
        without = f"no C compiler links {LIBRARY}: install {compiler} or set CC, or link {_OBJECT} itself"
        if shared:
            raise BackendError(without)
    contents[_OBJECT] = object_code(cpu, target)
    if linker is not None:
        contents[LIBRARY] = link_library(linker, contents[_OBJECT])
        contents[PKG_CONFIG] = with_licence_line(PKG_CONFIG, pkg_config_text().encode())
    links = {LINK: LIBRARY} if linker is not None and LINK != LIBRARY else {}
    if os.path.lexists(folder) and not folder.is_dir():
        raise BackendError(f"{folder} is a file: give a folder")
    with write_errors(str(folder), BackendError):
        write_files(folder, contents, links)
    files = [folder / name for name in (*contents, *links) if not name.endswith(".plan")]
    return CExport({name: folder / f"{name}.plan" for name in plans}, tuple(files), without)


def find_linker(target: str | None) -> list[str] | None:
    """Return the linking compiler and its options: ``$CC``, else the target's gcc or cc; None if missing."""
    words = shlex.split(os.environ.get("CC", "")) or [f"{target}-gcc" if target else "cc"]
    program = shutil.which(words[0])
    return None if program is None else [program, *words[1:]]


def link_library(linker: list[str], code: bytes) -> bytes:
    """Link object code as :data:`LIBRARY`, which exports only the functions of fastroof_step.h."""
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
            message = done.stderr.strip() or f"exit status {done.returncode}"
            raise BackendError(f"{shlex.join(linker)} could not link {LIBRARY}: {message}")
        return (place / LIBRARY).read_bytes()


def pkg_config_text() -> str:
    """Return the file for pkg-config, which finds library and header in its own folder."""
    return f"""\
prefix=${{pcfiledir}}
libdir=${{prefix}}
includedir=${{prefix}}

Name: fastroof_step
Description: How long one step of LLM inference takes on a GPU, from a plan file
Version: {__version__}
Libs: -L${{libdir}} -lfastroof_step
Cflags: -I${{includedir}}
"""


def with_licence_line(name: str, text: bytes) -> bytes:
    """Put the licence's SPDX line before a text, as a comment of its language, unless it has one."""
    if _LINE.encode() in text:
        return text
    line = _COMMENTS[Path(name).suffix].format(_LINE).encode()
    # Go takes a comment right above its package for the package's documentation
    return line + (b"\n\n" if name.endswith(".go") else b"\n") + text


def licence_bytes() -> bytes:
    """Return the text of the licence, of the checkout or of the installed package."""
    beside = Path(__file__).parents[3]
    # another package's file may lie beside an installed one
    if (beside / "pyproject.toml").is_file() and (beside / "LICENSE").is_file():
        return (beside / "LICENSE").read_bytes()
    try:
        known = metadata.distribution("fastroof")
        text = known.read_text("licenses/LICENSE") or known.read_text("LICENSE")
    except metadata.PackageNotFoundError:
        text = None
    if not text:
        raise BackendError("this copy of fastroof has no LICENSE to export: install it from a wheel again")
    return text.encode()
