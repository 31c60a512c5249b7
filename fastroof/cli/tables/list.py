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
    sources: list[dict[str, Any]] = []
    for name in names:
        if where is None and not any(gpu_folder(name).glob("*/provenance.toml")):
            continue
        sources += _sources(name, gpu)
    if as_json:
        print_json(sources)
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
        for entry in sources
        for one in entry["operators"]
    ]
    columns = ("gpu", "source", "operator", "rows", "rank", "serves")
    print_table(columns, rows, left=("gpu", "source", "operator", "serves"))
    without = [name for name in names if not any(entry["gpu"] == name for entry in sources)]
    if where is None and without:
        console().print(f"\nno measured tables: {', '.join(without)}", soft_wrap=True)


def _sources(where: str, gpu: str | None) -> list[dict[str, Any]]:
    loaded = [(table_set, table_set.load()) for table_set in table_sets(where, gpu)]
    serving: dict[tuple[str, str], tuple[int, str]] = {}
    for table_set, measured in loaded:
        for operator in measured.tables:
            place = table_set.place(operator)
            serving[measured.gpu, operator] = min(serving.get((measured.gpu, operator), place), place)
    return [
        {
            "gpu": measured.gpu,
            "source": next(iter(measured.sources.values())),
            "folder": str(table_set.folder),
            "licence": next(iter(measured.tables.values())).provenance.get("licence"),
            "operators": [
                {
                    "operator": operator,
                    "rows": table.num_rows,
                    "rank": table_set.place(operator)[0] if table_set.source else None,
                    "serves": serving[measured.gpu, operator] == table_set.place(operator),
                }
                for operator, table in measured.tables.items()
            ],
        }
        for table_set, measured in loaded
    ]
