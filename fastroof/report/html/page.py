"""A sweep's results as one interactive page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof._version import __version__
from fastroof.checks import whole_number
from fastroof.report.front import choose_rows
from fastroof.report.html.charts import chart_facts, gpu_roofs, packed_steps
from fastroof.report.html.document import checked_page_path, write_page
from fastroof.report.html.table import packed_columns
from fastroof.report.leading_steps import StepSource
from fastroof.report.results_file import Results, read_results

__all__ = ["MAX_ROWS", "ReportFile", "write_report"]

MAX_ROWS: Final = 20_000
"""Rows on a page by default: about 6 MB of data beside 1.2 MB of plotly.js, and still quick to filter."""

_MOST_ROWS: Final = 200_000
_SCRIPTS: Final = (
    "page.js",
    "data.js",
    "names.js",
    "filters.js",
    "look.js",
    "hover.js",
    "pareto.js",
    "curves.js",
    "step.js",
    "table.js",
    "selected.js",
    "verdict.js",
    "exports.js",
    "address.js",
    "start.js",
)


class ReportFile(NamedTuple):
    """What was written.

    Attributes
    ----------
    path : Path
        The page.
    num_bytes : int
        Its size, B.
    num_rows, num_shown : int
        Rows of the results, and how many of them are on the page.
    num_explained : int
        Rows whose steps are broken down.
    notes : tuple of str
        What is left out and why, as the page says it.
    """

    path: Path
    num_bytes: int
    num_rows: int
    num_shown: int
    num_explained: int
    notes: tuple[str, ...]


def write_report(
    results: str | Path, output: str | Path, *, title: str | None = None, max_rows: int = MAX_ROWS
) -> ReportFile:
    """Write a sweep's results as one interactive page that loads nothing else.

    Parameters
    ----------
    results : str or Path
        Parquet file of a sweep over deployments or steps.
    output : str or Path
        The page, ending in .html; a file of that name is replaced when all of it is there.
    title : str, optional
        Heading; by default what was swept.
    max_rows : int
        Rows on the page: of a larger sweep those of the Pareto fronts, the best of each setting, points of
        their curves, and an even sample of the others.

    Returns
    -------
    ReportFile
        Size, counts and notes.

    Raises
    ------
    FastroofError
        If the results are none or empty, or the page cannot be written.

    Notes
    -----
    Steps are broken down by plans compiled from the tables that the results' spec names, as they are now.
    Rows whose plan cannot be compiled any more are on the page without a breakdown, which says why.

    Examples
    --------
    >>> write_report("results.csv", "report.html")
    Traceback (most recent call last):
    fastroof.errors.FastroofError: results.csv does not exist; fastroof sweep writes results
    """
    output = checked_page_path(output)
    max_rows = whole_number("max_rows", max_rows, most=_MOST_ROWS)
    swept = read_results(results)
    chosen = choose_rows(swept, max_rows)
    rows = swept.rows(chosen.indices)
    source = StepSource(swept)
    steps = packed_steps(source, chosen, rows)
    notes = _notes(swept, source, len(chosen.indices), len(chosen.leaders))
    heading = title or _title(swept)
    document = {
        "kind": swept.kind.name,
        "noun": swept.kind.noun,
        "num_rows": len(chosen.indices),
        "columns": packed_columns(swept, rows),
        "facts": chart_facts(swept),
        "steps": steps,
        "gpus": gpu_roofs(source, [str(gpu) for gpu in swept.codes("gpu")[1]]),
        "notes": notes,
    }
    num_bytes = write_page(
        output,
        "report.html",
        heading=heading,
        subtitle=_subtitle(swept),
        styles=("report.css",),
        scripts=_SCRIPTS,
        document=document,
    )
    return ReportFile(output, num_bytes, swept.num_rows, len(chosen.indices), len(steps), tuple(notes))


def _title(results: Results) -> str:
    models = [str(model) for model in results.codes("model")[1]]
    gpus = [str(gpu) for gpu in results.codes("gpu")[1]]
    named = ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    return f"{named} on {', '.join(gpus) if len(gpus) <= 3 else f'{len(gpus)} GPUs'}"


def _subtitle(results: Results) -> str:
    """Where the numbers come from, in one line."""
    words = [f"{results.num_rows:,} {results.kind.noun} of {results.path.name}"]
    version = results.metadata.get("fastroof.version")
    words.append(f"swept with fastroof {version}" if version else "swept with an unknown fastroof")
    tables = results.metadata.get("fastroof.tables_hash", "")
    words.append(f"measured tables {tables[:12]}" if tables else "no measured tables named")
    words.append(f"page by fastroof {__version__}")
    return "; ".join(words)


def _notes(results: Results, source: StepSource, num_shown: int, num_leaders: int) -> list[str]:
    notes = []
    if num_shown < results.num_rows:
        notes.append(
            f"This page holds {num_shown:,} of the {results.num_rows:,} rows: Pareto fronts of each model "
            "and workload, the best row of each setting, points of the curves, an even sample of the rest."
        )
    spec = results.metadata_json("fastroof.spec")
    if results.kind.name == "deployments" and spec.get("keep") == "best":
        notes.append(
            f"The sweep kept the best {spec.get('k', 1)} of each group, which are often neighbours: with "
            "keep = 'pareto' or 'all' there are fronts and curves."
        )
    counts = _counted(results.metadata_json("fastroof.counts"))
    if counts:
        notes.append(f"The sweep counted {counts}.")
    if source.stale:
        notes.append(
            "The measured tables have changed since the sweep; steps are broken down by the new ones."
        )
    total = sum(source.problems.values())
    if total:
        why = "; ".join(list(source.problems)[:3])
        more = f"; and {len(source.problems) - 3} other reasons" if len(source.problems) > 3 else ""
        notes.append(f"{total} of {num_leaders} leading rows have no step breakdown: {why}{more}.")
    return notes


def _counted(counts: dict[str, Any]) -> str:
    """Counts by name as words; counts by reason follow what they are counted under."""
    words = []
    for name, value in counts.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{n:,} {r}" for r, n in value.items() if isinstance(n, int) and n)
            if inner:
                words.append(f"{name}: {inner}")
        elif isinstance(value, int):
            words.append(f"{value:,} {name}")
    return "; ".join(words)
