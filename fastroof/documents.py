"""Reading third-party TOML and JSON within limits, and writing YAML; nothing else parses or writes them.

The caller passes the error class to raise. Any content yields the parsed document or that error: the limits
rule out input that takes parsers hours or all memory, and integers too long for Python to print. A
:class:`Table` checks the keys and values of a TOML file.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from fastroof.checks import is_number, is_whole_number, one_line, shown, unknown_word
from fastroof.errors import FastroofError
from fastroof.file_access import read_bytes

T = TypeVar("T")
KeyPath = tuple[str | int, ...]
"""Keys of tables, and places in lists, from the top of a document."""

MOST_TOML_BYTES: Final = 4 * 2**20
"""Maximum size of a TOML document; the largest shipped one has a tenth of this."""

MOST_JSON_BYTES: Final = 64 * 2**20
"""Maximum size of a JSON document, unless the caller sets another."""

MOST_YAML_BYTES: Final = 16 * 2**20
"""Maximum size of a YAML document."""

MOST_DIGITS: Final = 100
"""Maximum length of a number in YAML."""

MOST_SIZE: Final = 2**40
"""Maximum whole number of a table's key, unless the caller sets another."""

MOST_PROBLEMS: Final = 20
"""Maximum number of problems that an error lists."""

MOST_NESTING: Final = 64
"""Maximum nesting of lists and tables, and maximum number of parts of a dotted key."""

_DIGITS: Final = re.compile(r"[-+0-9_:.]+")
_WORD: Final = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_KEY: Final = re.compile(rf"\s*(\[{{0,2}})[ \t]*+({_WORD}(?:[ \t]*+\.[ \t]*+{_WORD})*+)")
_TOKEN: Final = re.compile(
    r"""\"{3}(?:\\.|(?!\"{3}).)*+\"{3,5}|'{3}(?:(?!'{3}).)*+'{3,5}|"(?:\\.|[^"\\\n])*+"|'[^'\n]*+'|#[^\n]*+|[][{}\n]""",
    re.DOTALL,
)
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


def parse_yaml(content: str, what: str, error: type[FastroofError] = FastroofError) -> list[Any]:
    """Parse the documents of a YAML file."""
    import yaml

    text = _text(content, what, error, MOST_YAML_BYTES, "YAML")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = aliases = merges = 0
    try:
        # the loaders recurse, copy what is merged each time, and multiply out numbers such as 1:30:00
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            is_plain = isinstance(event, yaml.ScalarEvent) and not event.style
            merges += is_plain and event.value == "<<"
            if depth > MOST_NESTING or (merges and aliases > MOST_NESTING // 2):
                raise ValueError(f"more than {MOST_NESTING} nested lists and tables, or merged ones")
            if is_plain and len(event.value) > MOST_DIGITS and _DIGITS.fullmatch(event.value):
                raise ValueError(f"a number of more than {MOST_DIGITS} digits")
        return list(yaml.load_all(text, loader))
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as wrong:
        raise error(f"{what} is not YAML: {one_line(wrong)}") from None


def read_toml(path: Path, error: type[FastroofError]) -> dict[str, Any]:
    """Read and parse a TOML file."""
    return parse_toml(_read(path, str(path), error, MOST_TOML_BYTES), str(path), error)


def read_table(path: Path, error: type[FastroofError], what: str | None = None) -> Table:
    """Read a TOML file as a table that checks its keys; messages call it ``what``, by default its path."""
    named = str(path) if what is None else what
    return parse_table(_read(path, named, error, MOST_TOML_BYTES), named, error)


def parse_table(content: str | bytes, what: str, error: type[FastroofError]) -> Table:
    """Parse a TOML document as a table that checks its keys."""
    text = _text(content, what, error, MOST_TOML_BYTES, "TOML")
    return Table(parse_toml(text, what, error), what, error, text)


def read_json(path: Path, error: type[FastroofError]) -> Any:
    """Read and parse a JSON file."""
    return parse_json(_read(path, str(path), error, MOST_JSON_BYTES), str(path), error)


def read_text(path: Path, error: type[FastroofError], most_bytes: int) -> str:
    """Read a UTF-8 file of at most ``most_bytes``, with or without a byte order mark."""
    return _text(_read(path, str(path), error, most_bytes), str(path), error, most_bytes, "UTF-8 text")


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """Return documents as YAML in blocks, whose text is text for YAML 1.1 and 1.2."""
    import yaml

    def text(dumper: Any, value: str) -> Any:
        # PyYAML leaves 1e3, 0o7 and y plain, which readers of other versions take for numbers and a truth
        is_word = value[:1].isalpha() and value.lower() not in ("y", "n")
        style = "|" if "\n" in value else None if is_word else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    dumper.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=dumper, sort_keys=False, width=math.inf))


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


class Table:
    """A table whose keys are checked as they are read.

    Errors name the document, the line if its text is given, and the key. They are raised at once, or
    collected in ``problems`` for :meth:`check`.

    >>> Table({"m": 0}, "a.toml", FastroofError, "m = 0").size("m")
    Traceback (most recent call last):
    fastroof.errors.FastroofError: a.toml, line 1: m must be a whole number from 1 to 1,099,511,627,776, got 0
    """

    def __init__(
        self,
        data: Any,
        where: str,
        error: type[FastroofError],
        source: str = "",
        path: KeyPath = (),
        problems: list[tuple[int, str]] | None = None,
    ) -> None:
        self.where, self.error, self.source, self.path, self.problems = where, error, source, path, problems
        self.data: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
        if not isinstance(data, Mapping):
            self.fail(f"must be a table, got {shown(data)}")

    def problem(self, words: str, key: str = "", *, at: str = "") -> FastroofError:
        """Return an error about a key, or about the table at the line of a key."""
        return self.as_error([self.placed(words, key, at=at)])

    def fail(self, words: str, key: str = "", *, at: str = "") -> None:
        """Raise an error, or collect it."""
        if self.problems is None:
            raise self.problem(words, key, at=at)
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(self.placed(words, key, at=at))

    def check(self) -> None:
        """Raise the collected errors as one."""
        if self.problems:
            raise self.as_error(self.problems)

    def placed(self, words: str, key: str = "", *, at: str = "") -> tuple[int, str]:
        """Return a problem's line, 0 if unknown, and its words with the path of the key."""
        line = _line_of(self.source, (*self.path, key or at))
        name = ""
        for part in (*self.path, key) if key else self.path:
            dot = "" if not name else " " if name.endswith(":") else "."
            name += f" {part + 1}:" if isinstance(part, int) else f"{dot}{part}"
        colon = "" if not name else " " if key or name.endswith(":") else ": "
        return line, f"{name}{colon}{words}"

    def as_error(self, problems: list[tuple[int, str]]) -> FastroofError:
        """Return placed problems as one error."""
        words = "; ".join(f"line {line}: {words}" if line else words for line, words in sorted(problems))
        return self.error(f"{self.where}{', ' if words.startswith('line ') else ': '}{words}")

    def allow(self, known: Collection[str]) -> None:
        """Refuse keys that are not among the known ones."""
        for key in self.data:
            if key not in known:
                self.fail(unknown_word("key", str(key), known), at=str(key))

    def value(self, key: str) -> Any:
        """Return the value of a key that must be there."""
        if key not in self.data:
            self.fail("is missing", key)
        return self.data.get(key)

    def table(self, key: str) -> Table:
        """Return the table of a key; an empty one if it is missing."""
        given = self.data.get(key, {})
        if not isinstance(given, Mapping):
            self.fail(f"must be a table, got {shown(given)}", key)
            given = {}
        return self._part(given, key)

    def tables(self, key: str) -> list[Table]:
        """Return the list of tables of a key; an empty one if it is missing."""
        given = self.data.get(key, ())
        if not isinstance(given, list | tuple):
            self.fail(f"must be a list of tables, got {shown(given)}", key)
            return []
        return [self._part(one, key, place) for place, one in enumerate(given)]

    def _part(self, given: Any, *path: str | int) -> Table:
        return Table(given, self.where, self.error, self.source, (*self.path, *path), self.problems)

    def text(self, key: str) -> str:
        """Return a text that is not blank."""
        value = self.value(key)
        if isinstance(value, str) and value.strip():
            return value
        if key in self.data:
            self.fail(f"must be text, got {shown(value)}", key)
        return ""

    def texts(self, key: str, known: Collection[str] = ()) -> list[str]:
        """Return one text or a list of them, each one of the known ones if there are any."""
        given = self.value(key)
        words = list(given) if isinstance(given, list | tuple) else [given]
        if words and all(isinstance(word, str) and word.strip() for word in words):
            for word in words if known else ():
                if word not in known:
                    self.fail(unknown_word(key, word, known), at=key)
            return words
        if key in self.data:
            self.fail(f"must be text, or a list of texts, got {shown(given)}", key)
        return []

    def number(self, key: str, least: float, most: float) -> float:
        """Return a number within limits; nan if it is wrong and errors are collected."""
        value = self.value(key)
        if is_number(value) and least <= value <= most:
            return float(value)
        if key in self.data:
            self.fail(f"must be a number from {least:g} to {most:g}, got {shown(value, 40)}", key)
        return math.nan

    def size(self, key: str, least: int = 1, most: int = MOST_SIZE) -> int:
        """Return a whole number within limits; 0 if it is wrong and errors are collected."""
        value = self.value(key)
        if is_whole_number(value, least, most):
            return int(value)
        if key in self.data:
            self.fail(f"must be a whole number from {least:,} to {most:,}, got {shown(value, 40)}", key)
        return 0

    def build(self, made: Callable[..., T], **changes: Any) -> T:
        """Create an object of the keys and of changes; its class's errors get the file and the line."""
        values, needed = {**self.data, **changes}, _needed(made)
        self.allow(needed)
        for name, is_needed in needed.items():
            if is_needed and name not in values:
                raise self.problem("is missing", name)
        try:
            return made(**values)
        except self.error as error:
            named = sorted((key for key in self.data if str(error).startswith(key)), key=len)
            raise self.problem(str(error), at=named[-1] if named else "") from None


@cache
def _needed(made: Callable[..., Any]) -> dict[str, bool]:
    """Return a class's parameters, and whether each must be given."""
    return {one.name: one.default is one.empty for one in inspect.signature(made).parameters.values()}


def _line_of(source: str, path: KeyPath) -> int:
    """Return the line of a key in TOML, else of a key in it or of the nearest table around it; 0 if none."""
    found, table, counts = (0, 0), KeyPath(), dict[KeyPath, int]()
    for line, statement in _statements(source):
        key = _KEY.match(statement)
        if key is None:
            continue
        parts = [part.strip("\"'") if part[0] in "\"'" else part for part in re.findall(_WORD, key[2])]
        place = KeyPath() if key[1] else table
        for part in parts:
            place = (*place, counts[place] - 1, part) if place in counts else (*place, part)
        if key[1] == "[[":
            counts[place] = counts.get(place, 0) + 1
            place = (*place, counts[place] - 1)
        if key[1]:
            table = place
        differ = (i for i, (one, other) in enumerate(zip(place, path, strict=False)) if one != other)
        common = next(differ, min(len(place), len(path)))
        if common > found[0]:
            found = common, line
    return found[1]


def _statements(source: str) -> Iterator[tuple[int, str]]:
    """Yield the headings and keys of a valid TOML document with their values, and the lines they start on."""
    line, start, begun, depth = 1, 0, 1, 0
    for token in _TOKEN.finditer(f"{source}\n"):
        line += token[0].count("\n")
        depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
        if token[0] == "\n" and depth == 0:
            yield begun, source[start : token.start()]
            start, begun = token.end(), line
