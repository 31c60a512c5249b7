"""``fastroof export c``: plans for programs without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.named_plans import PLANS_HELP, GpuOption, PlansArgument, named_plans, plans_words
from fastroof.cli.options import Source, TablesPath
from fastroof.cli.output import console
from fastroof.command_group import warn

EPILOG: Final = f"""\b
Examples:
  fastroof export c llama-3.1-8b -o step && cd step && cc -O2 example.c fastroof_step.o -o example
  fastroof export c llama-3.1-70b,tp=4,dtype=fp8,name=big qwen2.5-7b -o step --cpu host
  fastroof export c llama-3.1-8b -o step --target aarch64-linux-gnu --shared

{PLANS_HELP}
Writes NAME.plan for each plan (memory-mappable, with a CRC), fastroof_step.h, fastroof_step.o, examples in C,
Go and Rust, LICENSE; with --shared, or if a C compiler is found, libfastroof_step.so and fastroof_step.pc.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("c", epilog=EPILOG)(c)


def c(
    plans: PlansArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to.")],
    cpu: Annotated[
        str | None,
        typer.Option(help="Oldest CPU to run on, by LLVM's name, or host.  [default: x86-64-v3, generic]"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="System to run on: x86_64-linux-gnu or aarch64-linux-gnu.  [default: this one]"),
    ] = None,
    shared: Annotated[
        bool | None,
        typer.Option(
            "--shared/--no-shared",
            help="Link libfastroof_step too, with $CC or cc or the target's gcc.  [default: if found]",
            show_default=False,
        ),
    ] = None,
    gpu: GpuOption = None,
    tables: TablesPath = None,
    source: Source = None,
) -> None:
    """Write plans for C, Go, Rust: plan files, a header, an object file.

    The code is compiled from the loops that Python calls, and returns the same bits.
    """
    from fastroof.backends.c import export_c

    named = named_plans(plans, gpu, tables, source)
    done = export_c(named, output, cpu=cpu, target=target, shared=shared)
    out = console()
    out.print(f"wrote {plans_words(named)}", soft_wrap=True, highlight=False)
    for path in (*done.plans.values(), *done.files):
        out.print(f"{path}  {path.stat().st_size:,} bytes", soft_wrap=True, highlight=False)
    if done.without:
        warn(done.without)
