"""``fastroof tables list``: what was measured, by source."""

from __future__ import annotations

from typing import Any, Final

import typer

from fastroof.cli.gpu_tables import gpu_folder, table_sets
from fastroof.cli.options import Json
from fastroof.cli.output import console, print_json, print_table
from fastroof.cli.tables.options import Gpu, Where

__all__ = ["register"]

EPILOG: Final = """\b
JSON: a list with one object a source: gpu, source, folder, licence, operators: one object an operator
[operator, rows, rank, serves]. serves is true where lookups use this source, which has the lowest rank.
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("list", epilog=EPILOG)(list_tables)


def list_tables(where: Where = None, gpu: Gpu = None, as_json: Json = False) -> None:
    """List sources, their operators, rows and ranks.

    Without an argument, those of every GPU that has any.
    """
    from fastroof import gpu_names

    names = gpu_names() if where is None else [where]
    found: list[dict[str, Any]] = []
    for name in names:
        if where is None and not any(gpu_folder(name).glob("*/provenance.toml")):
            continue
        found += _sources(name, gpu)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            entry["gpu"],
            entry["source"],
            one["operator"],
            f"{one['rows']:,}",
            "-" if one["rank"] is None else str(one["rank"]),
            "yes" if one["serves"] else "no",
        )
        for entry in found
        for one in entry["operators"]
    ]
    columns = ("gpu", "source", "operator", "rows", "rank", "serves")
    print_table(columns, rows, left=("gpu", "source", "operator", "serves"))
    without = [name for name in names if not any(entry["gpu"] == name for entry in found)]
    if where is None and without:
        console().print(f"\nno measured tables: {', '.join(without)}", soft_wrap=True)


def _sources(where: str, gpu: str | None) -> list[dict[str, Any]]:
    loaded = [(found, found.load()) for found in table_sets(where, gpu)]
    serving: dict[tuple[str, str], tuple[int, str]] = {}
    for found, measured in loaded:
        for operator in measured.tables:
            place = found.place(operator)
            serving[measured.gpu, operator] = min(serving.get((measured.gpu, operator), place), place)
    return [
        {
            "gpu": measured.gpu,
            "source": next(iter(measured.sources.values())),
            "folder": str(found.folder),
            "licence": next(iter(measured.tables.values())).provenance.get("licence"),
            "operators": [
                {
                    "operator": operator,
                    "rows": table.num_rows,
                    "rank": found.place(operator)[0] if found.source else None,
                    "serves": serving[measured.gpu, operator] == found.place(operator),
                }
                for operator, table in measured.tables.items()
            ],
        }
        for found, measured in loaded
    ]
