"""``fastroof plot``: pictures of tables, plans and sweeps."""

from __future__ import annotations

import typer

from fastroof.cli.plot import plot
from fastroof.command_group import help_if_alone

__all__ = ["register"]

group = typer.Typer(help="Draw tables, plans and sweeps as PNG or SVG.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group.callback(invoke_without_command=True)(help_if_alone)
    for register_command in (
        plot.register_roofline,
        plot.register_mfu,
        plot.register_step,
        plot.register_pareto,
        plot.register,
        plot.register_leading_steps,
    ):
        register_command(group)
    app.add_typer(group, name="plot")
