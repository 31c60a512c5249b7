"""A folder that a C, Go or Rust program builds with: plan files, header, object code, examples."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.backends.c.objects import DEFAULT_CPU, object_code
from fastroof.backends.c.plan_file import plan_bytes
from fastroof.errors import BackendError
from fastroof.whole_files import write_output

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["CExport", "export_c"]

_HEADER: Final = "fastroof_step.h"
_OBJECT: Final = "fastroof_step.o"
_LIBRARY: Final = "libfastroof_step.dylib" if sys.platform == "darwin" else "libfastroof_step.so"
# Go compiles every C file next to its own: its example has a folder to itself
_EXAMPLES: Final = ("example.c", "simulate.c", "example.rs", "go/example.go", "go/go.mod", "blis/blis.go")


class CExport(NamedTuple):
    """What :func:`export_c` wrote.

    Attributes
    ----------
    plans : dict of str to Path
        The plan files by name.
    files : tuple of Path
        Everything else.
    without : str
        Why there is no shared library; empty where there is one.
    """

    plans: dict[str, Path]
    files: tuple[Path, ...]
    without: str


def export_c(
    plans: Mapping[str, StepPlan], folder: str | Path, *, cpu: str = DEFAULT_CPU, library: bool = True
) -> CExport:
    """Write plans and everything that a program without Python needs to time steps with them.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        Plans by name: each becomes ``NAME.plan``.
    folder : str or Path
        Where to; made if it is not there. Each file is written whole or not at all.
    cpu : str
        The oldest CPU that the code is to run on, see :func:`fastroof.backends.c.objects.object_code`.
    library : bool
        Whether to link a shared library too, with ``$CC`` or ``cc``.

    Returns
    -------
    CExport
        The files.

    Raises
    ------
    BackendError
        If a name is no file's name, LLVM does not know the CPU, or the linker fails.

    Examples
    --------
    >>> import fastroof, tempfile
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"))
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +NORMALIZE_WHITESPACE
    ...     sorted(path.name for path in export_c({"llama-8b": plan}, folder, library=False).files)
    ['blis.go', 'example.c', 'example.go', 'example.rs', 'fastroof_step.h', 'fastroof_step.o', 'go.mod',
     'simulate.c']
    """
    folder = Path(folder)
    if not plans:
        raise BackendError("there is no plan to export: give one at least, by name")
    for name in plans:
        if not name or name.startswith(".") or Path(name).name != name:
            raise BackendError(
                f"{name!r} cannot be the name of a plan file: letters, digits, - and . will do"
            )
    contents = {f"{name}.plan": plan_bytes(plan, name) for name, plan in plans.items()}
    packaged = resources.files("fastroof.backends.c")
    contents |= {name: (packaged / name).read_bytes() for name in (_HEADER, *_EXAMPLES)}
    contents[_OBJECT] = object_code(cpu)
    without = ""
    if library:
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            without = f"no C compiler links {_LIBRARY}: set CC, or link {_OBJECT} into the program"
        else:
            contents[_LIBRARY] = _linked(compiler, contents[_OBJECT])
    try:
        for name in contents:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise BackendError(f"{folder} is a file: give a folder") from None
    for name, content in contents.items():
        write_output(folder / name, content, error=BackendError)
    files = tuple(folder / name for name in contents if not name.endswith(".plan"))
    return CExport({name: folder / f"{name}.plan" for name in plans}, files, without)


def _linked(compiler: str, code: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / _LIBRARY
        source = Path(place) / _OBJECT
        source.write_bytes(code)
        done = subprocess.run(
            [compiler, "-shared", "-o", made, source], capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            raise BackendError(f"{compiler} could not link {_LIBRARY}: {said}")
        return made.read_bytes()
