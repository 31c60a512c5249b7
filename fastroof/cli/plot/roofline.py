"""``fastroof plot roofline``: measured kernels under a GPU's roofs."""

from __future__ import annotations

from typing import Annotated

import typer

from fastroof.cli.options import GpuName, OneSource, TablesInstead
from fastroof.cli.plot.drawing import gpu_and_tables_to_draw, save
from fastroof.cli.plot.options import Output
from fastroof.command_group import warn

__all__ = ["register"]


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("roofline")(roofline)


def roofline(
    output: Output,
    gpu: GpuName = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Peaks and GEMMs to show: bf16, fp8, fp8_block; repeatable.  [default: bf16]"),
    ] = None,
    tables: TablesInstead = None,
    source: OneSource = None,
) -> None:
    """Measured kernels on the GPU's roofline."""
    from fastroof.report import draw_roofline

    spec, measured = gpu_and_tables_to_draw(output, gpu, tables, source)
    if measured is None:
        warn(f"no measured tables of {spec.name}: the picture has its roofs and no kernels")
    save(draw_roofline(spec, measured, dtypes=tuple(dict.fromkeys(dtype or ("bf16",)))), output)
