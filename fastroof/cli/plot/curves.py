"""``fastroof plot curves``: TTFT and TPOT of a sweep over its load."""

from __future__ import annotations

import typer

from fastroof.cli.plot.drawing import rows_to_draw, save
from fastroof.cli.plot.options import Output, Results, Where

__all__ = ["register"]


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("curves")(curves)


def curves(results: Results, output: Output, where: Where = None) -> None:
    """TTFT and TPOT of a sweep over its load."""
    from fastroof.report import draw_serving_curves

    swept, wanted = rows_to_draw(results, output, where, is_over_load=True)
    save(draw_serving_curves(swept, **wanted), output)
