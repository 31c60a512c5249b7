"""``fastroof tables import llmservingsim``: tables from that simulator's profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.options import GPU_NAMES
from fastroof.cli.tables.imported import Dtype, Output, Overwrite, TableFormat, print_source, table_format

__all__ = ["register"]

EPILOG: Final = """\b
Example:
  fastroof tables import llmservingsim LLMServingSim/profiler/perf --gpu rtx_pro_6000 -o my_tables
  fastroof step --model llama-3.1-8b --decode 64x4096 --tables my_tables/rtx_pro_6000
"""


def register(imports: typer.Typer) -> None:
    """Add the command."""
    imports.command("llmservingsim", epilog=EPILOG)(llmservingsim)


def llmservingsim(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Its profiler/perf (or perf_models), or a folder below it."),
    ],
    output: Output = None,
    gpu: Annotated[
        str | None, typer.Option(*GPU_NAMES, help="GPU, where the folder has several or names none.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Preset or config.json of the profiled model, where the folders name no preset's."),
    ] = None,
    dtype: Dtype = "bf16",
    written: TableFormat = "parquet",
    overwrite: Overwrite = False,
) -> None:
    """Convert profiles that LLMServingSim measured."""
    from fastroof.load.llmservingsim import convert_llmservingsim

    source = convert_llmservingsim(
        folder,
        output,
        gpu=gpu,
        model=model,
        dtype=dtype,
        format=table_format(written),
        overwrite=overwrite,
    )
    print_source(source)
