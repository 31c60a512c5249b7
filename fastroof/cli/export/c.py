"""``fastroof export c``: plans for programs without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from fastroof.cli.named_plans import PLAN_TABLES, PLANS_HELP, PlansArgument, named_plans, plans_words
from fastroof.cli.options import option
from fastroof.cli.output import print_line
from fastroof.command_group import Group, GroupValues, taking, warn

EPILOG: Final = f"""\b
Examples:
  fastroof export c llama-3.1-8b -o step && cd step && cc -O2 example.c fastroof_step.o -o example
  fastroof export c llama-3.1-70b,tp=4,dtype=fp8,name=big qwen2.5-7b -o step --cpu host
  fastroof export c llama-3.1-8b -o step --target aarch64-linux-gnu --shared

{PLANS_HELP}
Writes NAME.plan for each plan (memory-mappable, with a CRC), fastroof_step.h, fastroof_step.o, examples in C,
Go and Rust, LICENSE; with --shared, or if a C compiler is found, libfastroof_step.so and fastroof_step.pc.
"""


BUILD: Final[Group] = {
    "cpu": option(str, "Oldest CPU to run on, by LLVM's name, or host.  [default: x86-64-v3, generic]"),
    "target": option(str, "System to run on: x86_64-linux-gnu or aarch64-linux-gnu.  [default: this one]"),
    "shared": option(
        bool,
        "Link libfastroof_step too, with $CC or cc or the target's gcc.  [default: if found]",
        None,
        "--shared/--no-shared",
        show_default=False,
    ),
}
"""How the loops are compiled, as arguments of :func:`fastroof.backends.c.export_c`."""


@taking(build=BUILD, measured=PLAN_TABLES)
def c(
    *,
    plans: PlansArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to.")],
    build: GroupValues,
    measured: GroupValues,
) -> None:
    """Write plans for C, Go, Rust: plan files, a header, an object file.

    The code is compiled from the loops that Python calls, and returns the same bits.
    """
    from fastroof.backends.c import export_c

    named = named_plans(plans, **measured)
    done = export_c(named, output, **build)
    print_line(f"wrote {plans_words(named)}")
    for path in (*done.plans.values(), *done.files):
        print_line(f"{path}  {path.stat().st_size:,} bytes")
    if done.without:
        warn(done.without)
