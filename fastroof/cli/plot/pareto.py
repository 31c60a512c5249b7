"""``fastroof plot pareto``: a sweep's best deployments."""

from __future__ import annotations

from typing import Annotated

import typer

from fastroof.cli.plot.drawing import rows_to_draw, save
from fastroof.cli.plot.options import Output, Results, Where

__all__ = ["register"]


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("pareto")(pareto)


def pareto(
    results: Results,
    output: Output,
    colour_by: Annotated[
        str, typer.Option(help="Column with colours and fronts of its own, as model, tp or dtype.")
    ] = "model",
    where: Where = None,
) -> None:
    """Tokens/s per user against per GPU, of a sweep."""
    from fastroof.report import draw_pareto

    swept, wanted = rows_to_draw(results, output, where, leave=(colour_by,))
    save(draw_pareto(swept, colour_by=colour_by, **wanted), output)
