"""``fastroof plot leading-steps``: what a sweep's best steps are made of."""

from __future__ import annotations

import typer

from fastroof.cli.plot.drawing import rows_to_draw, save
from fastroof.cli.plot.options import Output, Results, Where

__all__ = ["register"]


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("leading-steps")(leading_steps)


def leading_steps(results: Results, output: Output, where: Where = None) -> None:
    """What the steps of a sweep's best rows are made of."""
    from fastroof.report import draw_leading_steps

    swept, wanted = rows_to_draw(results, output, where)
    save(draw_leading_steps(swept, **wanted), output)
