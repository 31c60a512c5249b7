"""``fastroof plot``: pictures of tables, plans and sweeps."""

from __future__ import annotations

import typer

from fastroof.cli.plot import curves, leading_steps, mfu, pareto, roofline, step
from fastroof.command_group import help_if_alone

__all__ = ["register"]

group = typer.Typer(help="Draw tables, plans and sweeps as PNG or SVG.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group.callback(invoke_without_command=True)(help_if_alone)
    for command in (roofline, mfu, step, pareto, curves, leading_steps):
        command.register(group)
    app.add_typer(group, name="plot")
