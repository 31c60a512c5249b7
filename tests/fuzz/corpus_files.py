"""Cases that failed once: a file each in ``corpus/<target>``, compressed where it is long."""

from __future__ import annotations

import gzip
from pathlib import Path

__all__ = ["corpus_cases", "keep_case", "read_case"]

CORPUS = Path(__file__).parent / "corpus"
LONG_BYTES = 2000


def corpus_cases(target: str) -> dict[str, bytes]:
    """Return a target's cases by the names of their files."""
    folder = CORPUS / target
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        found[path.name] = read_case(path)
    return found


def read_case(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def keep_case(target: str, name: str, case: bytes, folder: Path = CORPUS) -> Path:
    """Write a case to the corpus, or next to it."""
    path = folder / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(case) > LONG_BYTES:
        path = path.with_name(f"{name}.gz")
        case = gzip.compress(case, 9, mtime=0)
    path.write_bytes(case)
    return path
