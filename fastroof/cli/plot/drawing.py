"""What is drawn: the tables of a GPU, or the rows of a sweep; and writing the picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fastroof import GpuSpec, Tables
    from fastroof.report.results_file import Results as SweepResults

__all__ = ["gpu_and_tables_to_draw", "rows_to_draw", "save", "source_words"]


def source_words(tables: Tables) -> str:
    """Name the sources of tables, for the foot of a picture."""
    return ", ".join(sorted(set(tables.sources.values())))


def gpu_and_tables_to_draw(
    output: Path, gpu: str | None, tables: str | None, source: str | None
) -> tuple[GpuSpec, Tables | None]:
    """Find out what is missing before any time goes into a picture."""
    from fastroof.report import check_picture

    check_picture(output)
    return gpu_and_tables(gpu, tables, source)


def save(figure: Figure, output: Path) -> None:
    """Write a picture, and say so."""
    from fastroof.report import save_figure

    typer.echo(f"wrote {save_figure(figure, output)}")


def rows_to_draw(
    path: Path,
    output: Path,
    where: list[str] | None,
    *,
    leave: tuple[str, ...] = (),
    is_over_load: bool = False,
) -> tuple[SweepResults, dict[str, Any]]:
    """The results, and which rows to draw: of one workload, unless something else is asked for."""
    from fastroof.report import check_picture, read_results

    check_picture(output)
    results = read_results(path)
    wanted: dict[str, Any] = {}
    for text in where or ():
        name, sign, value = text.partition("=")
        if not sign or name not in results:
            columns = ", ".join(results.have((*results.kind.settings, *results.kind.workload)))
            raise FastroofError(f"--where {text} is not COLUMN=VALUE; the columns are {columns}")
        given = {str(each): each for each in results.codes(name)[1]}
        wanted[name] = given.get(value, value)
    start = results.start_workload()
    for name in results.have(results.kind.workload):
        if name not in (*wanted, *leave) and not (is_over_load and name == results.load()):
            wanted[name] = start[name]
    return results, wanted
