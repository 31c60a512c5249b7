"""A folder that a C, Go or Rust program builds with: plan files, header, object code, examples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.atomic_files import write_errors, write_files
from fastroof.backends.c.library import (
    LIBRARY,
    LINK,
    PKG_CONFIG,
    find_linker,
    link_library,
    pkg_config_text,
)
from fastroof.backends.c.licence import licence_bytes, with_licence_line
from fastroof.backends.c.objects import object_code
from fastroof.backends.c.plan_file import plan_bytes
from fastroof.errors import BackendError

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["CExport", "export_c"]

_HEADER: Final = "fastroof_step.h"
_OBJECT: Final = "fastroof_step.o"
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
        Where to; made if it is not there. All files are written or none; others there stay.
    cpu : str, optional
        The oldest CPU that the code is to run on, see :func:`fastroof.backends.c.objects.object_code`.
    target : str, optional
        The system that programs run on, one of :data:`fastroof.backends.c.objects.TARGETS`; this one by
        default.
    shared : bool, optional
        Whether to link ``libfastroof_step`` too, with ``$CC``, or ``cc``, or the target's gcc. By default
        where that is there.

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
     'go.mod', 'simulate.c']
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
    for name in (_HEADER, *_EXAMPLES):
        contents[name] = with_licence_line(name, (packaged / name).read_bytes())
    contents["LICENSE"] = licence_bytes()
    linker = None if shared is False else find_linker(target)
    without = ""
    if shared is not False and linker is None:
        compiler = f"{target}-gcc" if target else "cc"
        without = f"no C compiler links {LIBRARY}: install {compiler} or set CC, or link {_OBJECT} alone"
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
