"""Where a file of aiconfigurator-core lies: which engine's or library's folder, and which version's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from fastroof.operators.foreign_rows import PackageFile, version_order

__all__ = ["Place", "find_place", "paired_version", "versions_of"]


class Place(NamedTuple):
    """A file of the package."""

    path: Path
    asked: str

    @property
    def version(self) -> str:
        """The version whose folder it lies in."""
        return self.path.parent.name


def versions_of(folder: Path, file: str) -> list[str]:
    """Versions below an engine's or a library's folder that have a file, oldest first."""
    return sorted((p.parent.name for p in folder.glob(f"*/{file}.parquet")), key=version_order)


def paired_version(system_file: Path, library: str) -> str:
    """Return the version of NCCL or oneCCL that the package pairs a system with; empty if it names none."""
    text = system_file.read_text(encoding="utf-8") if system_file.is_file() else ""
    version = re.search(rf"^\s*{library}_version:\s*['\"]?([\w.]+)", text, re.MULTILINE)
    return version[1] if version else ""


def find_place(system: Path, wanted: PackageFile, engine: str, version: str) -> Place | None:
    """Return where a file lies, of the wanted version or the nearest one that has it."""
    places = [(engine, version)]
    if wanted.backend is not None:
        yaml = system.parents[1] / f"{system.name}.yaml"
        places.insert(0, (wanted.backend, paired_version(yaml, wanted.backend)))
    for owner, asked in places:
        folder = system / wanted.folder / owner
        have = versions_of(folder, wanted.file)
        if have:
            older = [v for v in have if version_order(v) <= version_order(asked)]
            newest = older or (have[:1] if asked else have)
            served = asked if asked in have else newest[-1]
            return Place(folder / served / f"{wanted.file}.parquet", "" if served == asked else asked)
    return None
