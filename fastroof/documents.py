"""Reading third-party TOML and JSON within limits; nothing else parses them.

The caller passes the error class to raise. Any content yields the parsed document or that error: the limits
rule out input that takes parsers hours or all memory, and integers too long for Python to print.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fastroof.checks import shown
from fastroof.errors import FastroofError
from fastroof.file_access import read_bytes

MOST_TOML_BYTES: Final = 4 * 2**20
"""Maximum size of a TOML document; the largest shipped one has a tenth of this."""

MOST_JSON_BYTES: Final = 64 * 2**20
"""Maximum size of a JSON document, unless the caller sets another."""

MOST_NESTING: Final = 64
"""Maximum nesting of lists and tables, and maximum number of parts of a dotted key."""

_WORD: Final = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY: Final = re.compile(rf"(?<![A-Za-z0-9_-]){_WORD}(?:[ \t]*+\.[ \t]*+{_WORD}){{{MOST_NESTING}}}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"the key {shown(twice)} is given twice")
    return document


_PERMISSIVE: Final = json.JSONDecoder()
_STRICT: Final = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
_INT64: Final = range(-(2**63), 2**63)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def parse_toml(content: str | bytes, what: str, error: type[FastroofError] = FastroofError) -> dict[str, Any]:
    """Parse a TOML document."""
    text = _text(content, what, error, MOST_TOML_BYTES, "TOML")
    for line in text.split("\n"):
        # the parser's time and memory grow with the square of a key's parts
        if line.count(".") >= MOST_NESTING and _LONG_KEY.search(line):
            raise error(f"{what} has a key of more than {MOST_NESTING} parts")
    values = _parsed(tomllib.loads, text, what, "TOML", error)
    _check_values(values, what, error, has_any_integer=False)
    return values  # type: ignore[no-any-return]


def parse_json(
    content: str | bytes,
    what: str,
    error: type[FastroofError] = FastroofError,
    *,
    most_bytes: int = MOST_JSON_BYTES,
    is_strict: bool = False,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse a JSON document; a strict one has neither NaN, Infinity nor a key twice."""
    text = _text(content, what, error, most_bytes, "JSON")
    if pairs is not None:
        decoder = json.JSONDecoder(object_pairs_hook=pairs)
    else:
        decoder = _STRICT if is_strict else _PERMISSIVE
    value = _parsed(decoder.decode, text, what, "JSON", error)
    if not _is_flat(text):
        _check_values(value, what, error, has_any_integer=True)
    return value


def read_toml(path: Path, error: type[FastroofError], what: str | None = None) -> dict[str, Any]:
    """Read and parse a TOML file; messages call it ``what``, by default its path."""
    named = str(path) if what is None else what
    return parse_toml(_read(path, named, error, MOST_TOML_BYTES), named, error)


def read_json(
    path: Path, error: type[FastroofError], what: str | None = None, *, most_bytes: int = MOST_JSON_BYTES
) -> Any:
    """Read and parse a JSON file; messages call it ``what``, by default its path."""
    named = str(path) if what is None else what
    return parse_json(_read(path, named, error, most_bytes), named, error, most_bytes=most_bytes)


def read_text(path: Path, error: type[FastroofError], most_bytes: int) -> str:
    """Read a UTF-8 file of at most ``most_bytes``, with or without a byte order mark."""
    return _text(_read(path, str(path), error, most_bytes), str(path), error, most_bytes, "UTF-8 text")


def _read(path: Path, what: str, error: type[FastroofError], most_bytes: int) -> bytes:
    try:
        return read_bytes(path, most_bytes + 1)
    except (OSError, ValueError) as failure:
        # a NUL in the file name raises ValueError
        reason = getattr(failure, "strerror", None) or failure
        raise error(f"{what} cannot be read ({reason})") from None


def _text(content: str | bytes, what: str, error: type[FastroofError], most_bytes: int, language: str) -> str:
    if len(content) > most_bytes:
        raise error(f"{what} is too large: the maximum is {most_bytes:,} bytes")
    if isinstance(content, str):
        return content
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as failure:
        raise error(f"{what} is not {language}: {failure}") from None


def _parsed(
    parse: Callable[[str], Any], text: str, what: str, language: str, error: type[FastroofError]
) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise _too_deep(what, error) from None
    except MemoryError:
        raise error(f"{what} needs more memory than is available") from None
    except ValueError as failure:
        # also raised for integers with more digits than Python reads
        raise error(f"{what} is not {language}: {failure}") from None


def _too_deep(what: str, error: type[FastroofError]) -> FastroofError:
    return error(f"{what} has more than {MOST_NESTING} nested lists or tables")


def _is_flat(text: str) -> bool:
    """Return whether brackets prove shallow nesting, which saves walking a batch of a million sizes."""
    if text.count("[") + text.count("{") <= MOST_NESTING:
        return True
    brackets = text.encode("utf-8", "surrogatepass").translate(None, _NO_BRACKETS)
    for _ in range(MOST_NESTING):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return False


def _check_values(value: Any, what: str, error: type[FastroofError], has_any_integer: bool) -> None:
    """Reject values nested too deeply, and integers of more than 64 bits."""
    level = [value]
    for depth in range(MOST_NESTING + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict | list):
                if depth == MOST_NESTING:
                    raise _too_deep(what, error)
                inner += one.values() if isinstance(one, dict) else one
            elif not has_any_integer and isinstance(one, int) and one not in _INT64:
                raise error(f"{what} has an integer of more than 64 bits")
        level = inner
