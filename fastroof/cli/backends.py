"""``fastroof backends``: the programs that plans answer, in which releases, and what is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from fastroof.cli.options import Json
from fastroof.cli.output import print_json, print_line, print_records

if TYPE_CHECKING:
    from fastroof.backends.releases import Program

EPILOG: Final = """\b
JSON: a list with one object per adapter: name, adapter, repository, licence, interface, checked (ISO date),
distribution, ran, signatures, followed, note, installed (empty if not).
"""


def backends(as_json: Json = False) -> None:
    """List the programs that adapters serve, by release."""
    from fastroof.backends.releases import programs

    known = programs()
    if as_json:
        print_json(
            [
                {**asdict(one), "checked": one.checked.isoformat(), "installed": one.installed()}
                for one in known
            ]
        )
        return
    columns: dict[str, Callable[[Program], str]] = {
        "program": lambda one: one.name,
        "adapter": lambda one: one.adapter,
        "run for real": lambda one: ", ".join(one.ran) or "none",
        "held to signatures": lambda one: ", ".join(one.signatures),
        "written after": lambda one: ", ".join(one.followed),
        "checked": lambda one: one.checked.isoformat(),
        "installed here": lambda one: _installed_words(one.installed(), one.ran),
    }
    print_records(known, columns, left=tuple(columns))
    notes = [f"{one.name}: {one.note}" for one in known if one.note]
    if notes:
        print_line()
        for note in notes:
            print_line(note)


def _installed_words(version: str, ran: tuple[str, ...]) -> str:
    if not version or version in ran:
        return version
    return f"{version}, which was not run"
