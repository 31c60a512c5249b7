"""Recorded signatures of the programs that adapters serve, and what holds stand-ins to them.

``PROGRAM.toml`` next to this file lists what a program's source declares, in a named release or commit: its
facts, not its code. A line is ``name(parameters)`` of a function, method or class, ``name`` of a field, a key
of a configuration, or ``file: column``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Interface(NamedTuple):
    """What one file of a program declares."""

    program: str
    repository: str
    licence: str
    release: str  # empty where no release has it
    commit: str
    path: str
    signatures: tuple[str, ...]
    note: str = ""

    @property
    def of(self) -> str:
        """The release, or the commit in short."""
        return self.release or self.commit[:7]


def recorded(program: str) -> list[Interface]:
    """Every interface in PROGRAM.toml."""
    text = tomllib.loads((HERE / f"{program}.toml").read_text("utf-8"))
    shared = {name: text[name] for name in ("program", "repository", "licence")}
    blank = {"release": "", "commit": ""}
    return [
        Interface(**{**blank, **shared, **one, "signatures": tuple(one["signatures"])})
        for one in text["interface"]
    ]


def every_program() -> list[str]:
    """Names of the files beside this one."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def python_differences(interface: Interface, names: dict[str, Any]) -> list[str]:
    """What of the recorded signatures a Python stand-in has otherwise; names maps the first word of each."""
    differences = []
    for line in interface.signatures:
        name, has_parameters, _ = line.partition("(")
        first, *rest = name.split(".")
        if first not in names:
            differences.append(f"{line}: there is no {first}")
            continue
        at = names[first]
        owner = at
        for part in rest:
            owner, at = at, inspect.getattr_static(at, part, None)
        if not has_parameters:
            if at is None and rest and rest[-1] not in _fields(owner):
                differences.append(f"{line}: the stand-in has no such field")
        elif at is None:
            differences.append(f"{line}: the stand-in has none")
        else:
            ours, theirs = _own_parameters(at), _parameters(line)
            if ours != theirs:
                differences.append(f"{line}: the stand-in takes {ours}")
    return differences


def text_differences(interface: Interface, source: str) -> list[str]:
    """The recorded signatures that a stand-in's source (Go, Rust) does not have, whatever its white space."""
    have = re.sub(r"\s+", " ", source)
    return [line for line in interface.signatures if re.sub(r"\s+", " ", line) not in have]


def _fields(cls: Any) -> set[str]:
    declared = {name for base in inspect.getmro(cls) for name in getattr(base, "__annotations__", {})}
    made = {each.name for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return declared | made | set(getattr(cls, "__slots__", ()))


def _parameters(line: str) -> list[tuple[str, bool]]:
    """Names of the parameters of a recorded line, and whether each has a default."""
    text = line[line.index("(") : line.rindex(")") + 1]
    arguments = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    several = arguments.posonlyargs + arguments.args
    plain = [False] * (len(several) - len(arguments.defaults)) + [True] * len(arguments.defaults)
    named = [(one.arg, has) for one, has in zip(several, plain, strict=True)]
    named += [(f"*{arguments.vararg.arg}", False)] if arguments.vararg else []
    named += [
        (one.arg, default is not None)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return named + ([(f"**{arguments.kwarg.arg}", False)] if arguments.kwarg else [])


def _own_parameters(what: Any) -> list[tuple[str, bool]]:
    if isinstance(what, (staticmethod, classmethod)):
        what = what.__func__
    if isinstance(what, property):
        what = what.fget
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        (stars.get(one.kind, "") + name, one.default is not inspect.Parameter.empty)
        for name, one in inspect.signature(what).parameters.items()
    ]
