"""``fastroof tables``: what was measured, what is wrong with it, and bringing more in."""

from __future__ import annotations

import typer

from fastroof.cli.tables import (
    campaigns,
    diff,
    flag,
    holdout,
    import_aiconfigurator,
    import_llmservingsim,
    import_vidur,
    list,
    show,
    survey,
    validate,
)
from fastroof.command_group import help_if_alone

__all__ = ["register"]

group = typer.Typer(
    help="List, show, check, import, judge measured tables.",
    epilog="Alone it lists them.",
    rich_markup_mode=None,
)
imports = typer.Typer(help="Convert tables that others measured.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group.callback(invoke_without_command=True)(list.list_or_command)
    imports.callback(invoke_without_command=True)(help_if_alone)
    for command in (list, show, validate, diff, flag, campaigns, survey):
        command.register(group)
    for program in (import_aiconfigurator, import_vidur, import_llmservingsim):
        program.register(imports)
    group.add_typer(imports, name="import")
    holdout.register(group)
    app.add_typer(group, name="tables")
