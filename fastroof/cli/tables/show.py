"""``fastroof tables list | show | import``: what was measured, and bringing more in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli import accuracy, validation
from fastroof.cli.errors import help_if_alone
from fastroof.cli.inputs import DEFAULT_GPU, gpu_folder, table_sets, tables_of
from fastroof.cli.options import Json
from fastroof.cli.output import console, print_json, print_table
from fastroof.errors import TableError

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable

__all__ = ["register"]

SHOWN_VALUES: Final = 12

LIST_EPILOG: Final = """\b
JSON: a list with one object a source: gpu, source, folder, licence, operators: one object an operator
[operator, rows, rank, serves]. serves is true where lookups use this source, which has the lowest rank.
"""
SHOW_EPILOG: Final = """\b
JSON: gpu, operator, source, rows, kernels (combinations of key values), keys and axes (name: all values
that occur, sorted), units (name: unit), latency_us (minimum and maximum).
"""
IMPORT_EPILOG: Final = """\b
Example:
  fastroof tables import aiconfigurator --system h200_sxm --backend vllm --version 0.24.0 -o my_tables
  fastroof step --model llama-3.1-8b --decode 64x4096 --tables my_tables/h200
"""

Where = Annotated[
    str | None, typer.Argument(metavar="[GPU|PATH]", help="A GPU's name or a folder of measured tables.")
]

Gpu = Annotated[str | None, typer.Option(help="Which GPU, where a folder holds several.")]

group = typer.Typer(help="List, show, check, import, judge measured tables.", rich_markup_mode=None)
imports = typer.Typer(help="Convert tables that others measured.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group.callback(invoke_without_command=True)(help_if_alone)
    imports.callback(invoke_without_command=True)(help_if_alone)
    group.command("list", epilog=LIST_EPILOG)(list_tables)
    group.command("show", epilog=SHOW_EPILOG)(show)
    validation.register(group)
    imports.command("aiconfigurator", epilog=IMPORT_EPILOG)(aiconfigurator)
    group.add_typer(imports, name="import")
    accuracy.register(group)
    app.add_typer(group, name="tables")


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


def show(
    operator: Annotated[
        str, typer.Argument(help="gemm, attention_prefill, attention_decode, moe, allreduce, ...")
    ],
    where: Where = DEFAULT_GPU,
    gpu: Gpu = None,
    source: Annotated[str | None, typer.Option(help="Which source, where there are several.")] = None,
    as_json: Json = False,
) -> None:
    """Show one operator's keys and axes."""
    tables = tables_of(where or DEFAULT_GPU, gpu, source)
    table = tables.table(operator)
    keys, axes = _values(table)
    latency_us = table.columns["latency_us"]
    if as_json:
        print_json(
            {
                "gpu": tables.gpu.name,
                "operator": operator,
                "source": table.source,
                "rows": table.num_rows,
                "kernels": len(table.groups()),
                "keys": keys,
                "axes": axes,
                "units": {c.name: c.unit for c in table.schema.required},
                "latency_us": {"minimum": latency_us.min(), "maximum": latency_us.max()},
            }
        )
        return
    out = console()
    out.print(
        f"{operator} of {tables.gpu.title}: {table.num_rows:,} rows of {len(table.groups()):,} kernels, "
        f"{latency_us.min():.3g} to {latency_us.max():.6g} us; source {table.source}\n",
        soft_wrap=True,
    )
    rows = [
        (c.name, kind, c.unit, str(len(values[c.name])), _listed(values[c.name]), c.meaning)
        for kind, columns, values in (("key", table.schema.keys, keys), ("axis", table.schema.axes, axes))
        for c in columns
    ]
    names = ("column", "kind", "unit", "values", "which", "meaning")
    print_table(names, rows, left=("column", "kind", "unit", "which", "meaning"))


def _values(table: MeasuredTable) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    keys, axes = (
        {c.name: sorted(set(table.columns[c.name].tolist())) for c in columns}
        for columns in (table.schema.keys, table.schema.axes)
    )
    return keys, axes


def _listed(values: list[Any]) -> str:
    if len(values) <= SHOWN_VALUES:
        return ", ".join(map(str, values))
    half = SHOWN_VALUES // 2
    return f"{', '.join(map(str, values[:half]))}, ... {', '.join(map(str, values[-half:]))}"


def aiconfigurator(
    system: Annotated[str, typer.Option(help="System of the package: h100_sxm, h200_sxm, a100_sxm, ...")],
    backend: Annotated[str, typer.Option(help="vllm, sglang or trtllm.")],
    version: Annotated[str, typer.Option(help="Version of the backend: 0.24.0.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder that gets <gpu>/aiconfigurator-<backend>-<version>/."),
    ],
    root: Annotated[
        Path | None,
        typer.Option(help="Folder of the package aiconfigurator_core; without it the installed one."),
    ] = None,
    table_format: Annotated[str, typer.Option("--format", help="parquet or csv.")] = "parquet",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a source that is already there.")
    ] = False,
) -> None:
    """Convert one system of the package aiconfigurator-core."""
    from fastroof.load.aiconfigurator import convert_aiconfigurator
    from fastroof.load.own import load_own

    if table_format not in ("parquet", "csv"):
        raise TableError(f"--format is parquet or csv, got {table_format!r}")
    folder = convert_aiconfigurator(
        system, backend, version, output, root, "csv" if table_format == "csv" else "parquet", overwrite
    )
    written = load_own(folder)
    rows = [(name, f"{table.num_rows:,}") for name, table in written.tables.items()]
    print_table(("operator", "rows"), rows, left=("operator",))
    typer.echo(f"wrote {folder}")
