"""``fastroof export``: plans and their times as files that other programs read."""

from __future__ import annotations

import typer

from fastroof.cli.export import c, npz, simulators
from fastroof.command_group import help_if_alone

group = typer.Typer(help="Write plans and times as files that other programs read.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group.callback(invoke_without_command=True)(help_if_alone)
    for command in (c, npz, simulators):
        command.register(group)
    app.add_typer(group, name="export")
