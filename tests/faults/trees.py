"""The contents of a folder, in a form that can be compared."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from fastroof.atomic_files import is_unfinished

__all__ = ["Tree", "contents", "is_hidden_half", "restore"]

Tree = dict[str, Any]
"""Contents by path: a file's data, a link's destination; folders end in a slash."""

# how long a sweep took, and what a picture's maker wrote of the moment
_OF_THE_MOMENT = re.compile(rb"(?<=_s\": )[0-9.e+-]+|(?<=<dc:date>)[^<]*")


def contents(folder: Path) -> Tree:
    """Return everything in a folder, hidden or not."""
    found: Tree = {}
    for above, folders, names in os.walk(folder):
        for name in folders:
            path = Path(above, name)
            found[f"{path.relative_to(folder)}/"] = os.readlink(path) if path.is_symlink() else "folder"
        for name in names:
            path = Path(above, name)
            found[str(path.relative_to(folder))] = os.readlink(path) if path.is_symlink() else _content(path)
    return found


def _content(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".parquet" and data[:4] == data[-4:] == b"PAR1" and len(data) > 12:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        about = b"".join(b"%s=%s" % item for item in sorted((file.metadata.metadata or {}).items()))
        about = re.sub(rb"ARROW:schema=[^=]*", b"", about)
        rows = file.read().replace_schema_metadata(None).to_pylist()
        data = b"%s %s" % (_OF_THE_MOMENT.sub(b"", about), repr(rows).encode())
    data = _OF_THE_MOMENT.sub(b"", data)
    return f"{len(data)} bytes, {hashlib.sha256(data).hexdigest()[:16]}"


def is_hidden_half(name: str) -> bool:
    """Whether a name below a folder is, or lies in, what was being written when the process was killed."""
    return any(is_unfinished(Path(part)) for part in name.rstrip("/").split("/"))


def restore(saved: Path, folder: Path) -> None:
    """Make a folder what it was when it was saved, links included."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder, symlinks=True)
