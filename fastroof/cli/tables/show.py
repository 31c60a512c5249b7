"""``fastroof tables show``: the keys and axes of one operator's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import DEFAULT_GPU, tables_of
from fastroof.cli.options import Json
from fastroof.cli.output import console, print_json, print_table
from fastroof.cli.tables.options import Gpu, Where

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable

__all__ = ["register"]

SHOWN_VALUES: Final = 12

EPILOG: Final = """\b
JSON: gpu, operator, source, rows, kernels (combinations of key values), keys and axes (name: all values
that occur, sorted), units (name: unit), latency_us (minimum and maximum).
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("show", epilog=EPILOG)(show)


def show(
    operator: Annotated[
        str, typer.Argument(help="gemm, attention_prefill, attention_decode, moe, allreduce, ...")
    ],
    where: Where = None,
    gpu: Gpu = None,
    source: Annotated[str | None, typer.Option(help="Which source, where there are several.")] = None,
    as_json: Json = False,
) -> None:
    """Show one operator's keys and axes."""
    tables = tables_of(gpu or DEFAULT_GPU, None, source) if where is None else tables_of(where, gpu, source)
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
