"""``fastroof tables campaigns``: what the sources of a GPU say of each other, as errors that answers have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.options import Json
from fastroof.cli.output import percent, print_json, print_table

if TYPE_CHECKING:
    from fastroof.uncertainty.campaign import CampaignFigure

__all__ = ["register"]

EPILOG: Final = """\b
error: so many relative standard errors around one source's values hold 80 % of the other's; common: the part
that all calls of a step share. same: kernels of one library in both sources; any, or two engines: what each
runs. long: at least 4 times the least latency of the family. Rows of families that tests find unsound are
left out. An empty GPU or family: pooled.

\b
JSON: made_from, and figures: objects [operator, family, gpu, kernels, length, scale, common, pairs, points].
"""


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("campaigns", epilog=EPILOG, short_help="Estimate what campaigns differ by.")(campaigns)


def campaigns(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SET]...",
            help="GPU/SOURCE, folders, or package:GPU/BACKEND/VERSION.  [default: all of the package]",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write them as TOML, as the shipped ones are.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Estimate from common points what campaigns on one GPU differ by."""
    from fastroof._version import __version__
    from fastroof.load.aiconfigurator import SYSTEMS, available
    from fastroof.load.write import toml_text
    from fastroof.uncertainty.campaign import pooled_figures
    from fastroof.whole_files import write_whole

    words = sets or [f"package:{SYSTEMS[s]}/{backend}/{version}" for s, backend, version in available()]
    figures = pooled_figures(_pairs(words))
    rows: list[dict[str, Any]] = [
        one._asdict() | {"scale": round(one.scale, 4), "common": round(one.common, 4)} for one in figures
    ]
    document = {"made_from": {"fastroof": __version__, "sets": words}, "figures": rows}
    if output is not None:
        write_whole(output, toml_text(document))
    if as_json:
        print_json(document)
        return
    text = [
        (*one[:5], percent(one.scale), percent(one.common), f"{one.pairs}", f"{one.points:,}")
        for one in figures
    ]
    columns = ("operator", "family", "gpu", "kernels", "length", "error", "common", "pairs", "points")
    print_table(columns, text, left=columns[:5])


def _pairs(words: list[str]) -> list[CampaignFigure]:
    """Compare all sources of each GPU, one GPU after another."""
    from fastroof.load.campaigns import compare_sources
    from fastroof.load.named import PACKAGE_PREFIX, load_named
    from fastroof.operators.registry import OPERATORS

    by_gpu: dict[str, list[str]] = {}
    for word in words:
        is_there = word.startswith(PACKAGE_PREFIX)
        gpu = word.removeprefix(PACKAGE_PREFIX).partition("/")[0] if is_there else load_named(word).gpu
        by_gpu.setdefault(gpu, []).append(word)
    pairs: list[CampaignFigure] = []
    for gpu, named in by_gpu.items():
        typer.echo(f"comparing {len(named)} sources of {gpu}", err=True)
        loaded = [load_named(word) for word in named]
        for operator in OPERATORS.values():
            tables = [one.tables[operator.name] for one in loaded if operator.name in one.tables]
            if len(tables) > 1 and operator.axes:
                pairs += compare_sources(operator.name, loaded[0].gpu, tables)
    return pairs
