"""``fastroof backends``: the programs that plans answer, in which releases, and what is installed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import typer

from fastroof.cli.options import Json
from fastroof.cli.output import console, print_json, print_table

EPILOG: Final = """\b
JSON: a list with one object per adapter: name, adapter, repository, licence, interface, checked (ISO date),
distribution, ran, signatures, followed, note, installed (empty if not).
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("backends", epilog=EPILOG)(backends)


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
    columns = (
        "program",
        "adapter",
        "run for real",
        "held to signatures",
        "written after",
        "checked",
        "installed here",
    )
    rows = [
        (
            one.name,
            one.adapter,
            ", ".join(one.ran) or "none",
            ", ".join(one.signatures),
            ", ".join(one.followed),
            one.checked.isoformat(),
            _installed_words(one.installed(), one.ran),
        )
        for one in known
    ]
    print_table(columns, rows, left=columns)
    notes = [f"{one.name}: {one.note}" for one in known if one.note]
    if notes:
        console().print()
        for note in notes:
            console().print(note, highlight=False)


def _installed_words(version: str, ran: tuple[str, ...]) -> str:
    if not version or version in ran:
        return version
    return f"{version}, which was not run"
