"""``fastroof export c``: plans for programs without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.named_plans import PLANS_HELP, GpuOption, PlansArgument, named_plans
from fastroof.cli.options import Source, TablesPath
from fastroof.cli.output import console
from fastroof.command_group import warn

__all__ = ["register"]

EPILOG: Final = f"""\b
Examples:
  fastroof export c llama-3.1-8b -o step && cd step && cc -O2 example.c fastroof_step.o -o example
  fastroof export c llama-3.1-70b,tp=4,dtype=fp8,name=big qwen2.5-7b -o step --cpu host

{PLANS_HELP}
Written: NAME.plan a plan (memory-mappable, with a CRC), fastroof_step.h, fastroof_step.o,
libfastroof_step.so where a C compiler links it, and examples in C, Go and Rust.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("c", epilog=EPILOG)(c)


def c(
    plans: PlansArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to.")],
    cpu: Annotated[
        str | None,
        typer.Option(help="Oldest CPU to run on, as LLVM calls it, or host.  [default: x86-64-v3]"),
    ] = None,
    library: Annotated[
        bool, typer.Option("--library/--no-library", help="Link a shared library too, with $CC or cc.")
    ] = True,
    gpu: GpuOption = None,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Write plans for C, Go, Rust: plan files, a header, an object file.

    The code is compiled from the loops that answer in Python, and gives the same bits.
    """
    from fastroof.backends.c import export_c
    from fastroof.backends.c.objects import DEFAULT_CPU

    named = named_plans(plans, gpu, tables, source)
    done = export_c(named, output, cpu=cpu or DEFAULT_CPU, library=library)
    out = console()
    for path in (*done.plans.values(), *done.files):
        out.print(f"{path}  {path.stat().st_size:,} bytes", soft_wrap=True, highlight=False)
    if done.without:
        warn(done.without)
