"""``fastroof tables``: what was measured, what is wrong with it, and bringing more in."""

from __future__ import annotations

import typer

from fastroof.cli.tables import imports, judge, list, validate
from fastroof.command_group import help_if_alone

__all__ = ["register"]

group = typer.Typer(
    help="List, show, check, import, judge measured tables.",
    epilog="Alone it lists them.",
    rich_markup_mode=None,
)
import_group = typer.Typer(help="Convert tables that others measured.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group.callback(invoke_without_command=True)(list.list_or_command)
    import_group.callback(invoke_without_command=True)(help_if_alone)
    list.register(group)
    list.register_show(group)
    validate.register(group)
    judge.register_diff(group)
    judge.register_flag(group)
    judge.register(group)
    judge.register_survey(group)
    imports.register(import_group)
    imports.register_import_vidur(import_group)
    imports.register_import_llmservingsim(import_group)
    group.add_typer(import_group, name="import")
    judge.register_holdout(group)
    app.add_typer(group, name="tables")
