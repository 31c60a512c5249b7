"""``fastroof export``: plans and their times as files that other programs read."""

from __future__ import annotations

import typer

from fastroof.cli.export.c import EPILOG as C
from fastroof.cli.export.c import c
from fastroof.cli.export.profiles import FPM, NPZ, fpm, npz
from fastroof.cli.export.simulators import LLM_D, LLMSERVINGSIM, TRACE, llm_d, llmservingsim, trace
from fastroof.command_group import Commands, help_if_alone


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = Commands(help="Write plans and times as files that other programs read.")
    group.callback(invoke_without_command=True)(help_if_alone)
    commands = (
        (c, C), (npz, NPZ), (fpm, FPM), (llmservingsim, LLMSERVINGSIM), (llm_d, LLM_D), (trace, TRACE)
    )  # fmt: skip
    for command, epilog in commands:
        group.command(command.__name__.replace("_", "-"), epilog=epilog)(command)
    app.add_typer(group, name="export")
