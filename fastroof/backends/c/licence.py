"""The licence of what is exported: a line in each text, and the whole of it beside them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Final

import fastroof
from fastroof.errors import BackendError

__all__ = ["licence_bytes", "with_licence_line"]

_LINE: Final = "SPDX-License-Identifier: Apache-2.0"

_COMMENTS: Final = {
    ".c": "/* {} */",
    ".h": "/* {} */",
    ".go": "// {}",
    ".mod": "// {}",
    ".rs": "// {}",
    ".pc": "# {}",
}


def with_licence_line(name: str, text: bytes) -> bytes:
    """Put the licence's SPDX line before a text, as a comment of its language, unless it has one."""
    if _LINE.encode() in text:
        return text
    line = _COMMENTS[Path(name).suffix].format(_LINE).encode()
    # Go takes a comment right above its package for the package's documentation
    return line + (b"\n\n" if name.endswith(".go") else b"\n") + text


def licence_bytes() -> bytes:
    """The text of the licence, of the checkout or of the package that is installed.

    Raises
    ------
    BackendError
        If neither has it.
    """
    beside = Path(fastroof.__file__).parents[1]
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
