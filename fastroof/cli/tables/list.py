"""``fastroof tables list`` and ``show``: measured tables by source, and their folders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import tables_of
from fastroof.cli.options import FolderGpu, Json
from fastroof.cli.output import print_json, print_line, print_records, print_table
from fastroof.errors import TableError

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.load.listing import TableSet


Where = Annotated[
    str | None,
    typer.Argument(metavar="[GPU|PATH]", help="GPU, or folder of measured tables.  [default: all GPUs]"),
]


LIST_EPILOG: Final = """\b
JSON: a list with one object per source: gpu, source, kind (shipped, imported or own; null in a published
tree), folder, licence, operators: one object per operator [operator, rows, rank, serves (lookups use this
source, which has the lowest rank)], missing: object (operator or file of the source's version: why it lacks
it).
"""


def list_or_command(context: typer.Context) -> None:
    """List tables if no command is given."""
    if context.invoked_subcommand is None:
        list_tables()


def list_tables(where: Where = None, gpu: FolderGpu = None, as_json: Json = False) -> None:
    """List sources, or the operators, rows and ranks of one GPU."""
    from fastroof import gpu_names, load_gpu
    from fastroof.config.paths import user_tables_root
    from fastroof.load.by_name import can_import, table_folders

    # --gpu without a folder is the GPU
    where, gpu = (gpu, None) if where is None else (where, gpu)
    names = [name for name in gpu_names() if table_folders(name)] if where is None else [where]
    sources = [source for name in names for source in _sources(name, gpu)]
    if as_json:
        print_json(sources)
        return
    if where is not None:
        _print_operators(sources)
        print_missing(sources)
        return
    _print_sources(sources)
    without = [name for name in gpu_names() if name not in names]
    importable = [name for name in without if can_import(name)]
    unmeasured = [load_gpu(name) for name in without if not can_import(name)]
    donors = [f"{gpu.name} ({gpu.kernels_of})" for gpu in unmeasured if gpu.kernels_of]
    modelled = [gpu.name for gpu in unmeasured if not gpu.kernels_of]
    print_line(f"\nimported and custom tables are in {user_tables_root()}")
    if importable:
        print_line(f"imported on first use: {', '.join(importable)}")
    if donors:
        print_line(f"kernels of another card, scaled: {', '.join(donors)}")
    if modelled:
        print_line(f"datasheet model only: {', '.join(modelled)}")


def _print_sources(sources: list[dict[str, Any]]) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **{name: itemgetter(name) for name in ("gpu", "source", "kind")},
        "operators": lambda one: str(len(one["operators"])),
        "rows": lambda one: f"{sum(table['rows'] for table in one['operators']):,}",
        "serves": lambda one: _listed([table["operator"] for table in one["operators"] if table["serves"]]),
    }
    print_records(sources, columns, left=("gpu", "source", "kind", "serves"))


def _listed(operators: list[str], shown: int = 3) -> str:
    if len(operators) <= shown + 1:
        return ", ".join(operators) or "-"
    return f"{', '.join(operators[:shown])} and {len(operators) - shown} more"


def _print_operators(sources: list[dict[str, Any]]) -> None:
    tables = [source | table for source in sources for table in source["operators"]]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **{name: itemgetter(name) for name in ("gpu", "source")},
        "kind": lambda one: one["kind"] or "-",
        "operator": itemgetter("operator"),
        "rows": lambda one: f"{one['rows']:,}",
        "rank": lambda one: "-" if one["rank"] is None else str(one["rank"]),
        "serves": lambda one: "yes" if one["serves"] else "no",
    }
    print_records(tables, columns, left=("gpu", "source", "kind", "operator", "serves"))


def print_missing(sources: list[dict[str, Any]], package: Path | None = None) -> None:
    """Print what sources lack of their versions, and files of the package that nothing reads."""
    from fastroof.load.by_name import planned_import
    from fastroof.load.package_rows import unread_files

    lacking = [(one["source"], one["missing"]) for one in sources]
    for gpu in dict.fromkeys(one["gpu"] for one in sources if one["kind"] == "imported"):
        with suppress(TableError):  # of a package that is damaged nothing is known
            if (planned := planned_import(gpu, package)) is not None:
                lacking += unread_files(planned.data / planned.system).items()
    by_reason: dict[tuple[str, str], list[str]] = {}
    for source, missing in lacking:
        for why in dict.fromkeys(missing.values()):
            what = ", ".join(name for name, reason in missing.items() if reason == why)
            by_reason.setdefault((what, why), []).append(source)
    for (what, why), names in by_reason.items():
        print_line(f"incomplete: {', '.join(names)}: {what}: {why}")


def _sources(where: str, gpu: str | None) -> list[dict[str, Any]]:
    from fastroof.load.listing import list_tables, table_sets

    sets = table_sets(where, gpu, imports=False)
    if any(one.source is None for one in sets):
        return [_tree(one) for one in sets]
    folders = dict.fromkeys(one.folder for one in sets)
    # several GPUs' folders are distinguished by their place, one GPU's by the order in which they serve
    together = [[folder] for folder in folders] if Path(where).is_dir() else [list(folders)]
    return [
        {**asdict(source), "folder": str(source.folder)}
        for folders in together
        for source in list_tables(folders)
    ]


def _tree(table_set: TableSet) -> dict[str, Any]:
    measured = table_set.load()
    return {
        "gpu": measured.gpu,
        "source": next(iter(measured.sources.values())),
        "kind": None,
        "folder": str(table_set.folder),
        "licence": next(iter(measured.tables.values())).provenance.get("licence"),
        "operators": [
            {"operator": operator, "rows": table.num_rows, "rank": None, "serves": True}
            for operator, table in measured.tables.items()
        ],
        "missing": {},
    }


SHOWN_VALUES: Final = 12

SHOW_EPILOG: Final = """\b
JSON: gpu, operator, source, rows, kernels (combinations of key values), keys and axes (name: all values
that occur, sorted), units (name: unit), latency_us (minimum and maximum).
"""


def show(
    operator: Annotated[
        str, typer.Argument(help="gemm, attention_prefill, attention_decode, moe, allreduce, ...")
    ],
    where: Where = None,
    gpu: FolderGpu = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Source.  [default: the one that serves]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one operator's keys and axes."""
    tables = tables_of(where, gpu, source)
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
    print_line(
        f"{operator} of {tables.gpu.title}: {table.num_rows:,} rows of {len(table.groups()):,} kernels, "
        f"{latency_us.min():.3g} to {latency_us.max():.6g} us; source {table.source}\n"
    )
    rows = [
        (c.name, kind, c.unit, str(len(values[c.name])), _some_values(values[c.name]), c.meaning)
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


def _some_values(values: list[Any]) -> str:
    if len(values) <= SHOWN_VALUES:
        return ", ".join(map(str, values))
    half = SHOWN_VALUES // 2
    return f"{', '.join(map(str, values[:half]))}, ... {', '.join(map(str, values[-half:]))}"
