"""The interactive page of a sweep's results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastroof._version import __version__
from fastroof.checks import whole_number
from fastroof.columns import ORIGINS
from fastroof.errors import FastroofError
from fastroof.report.front import ChosenRows, choose_rows
from fastroof.report.html.document import checked_page_path, write_page
from fastroof.report.plots import GROUPS
from fastroof.report.results_file import RateColumns, Results, read_results
from fastroof.report.steps import LeadingStep, StepSource
from fastroof.units import MS_PER_S

DIGITS: Final = 6
"""Significant digits of numbers on the page; the results file has full precision."""


def rounded(value: Any) -> Any:
    """Round a float for the page; None if it is not finite. Other values stay unchanged."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        # a number without a fraction needs no decimal point
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    return value


def packed_columns(results: Results, rows: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Encode columns for the page."""
    return [_packed(results, name, values) for name, values in rows.items()]


def _packed(results: Results, name: str, values: Sequence[Any]) -> dict[str, Any]:
    kind, unit, meaning = results.describe(name)
    column: dict[str, Any] = {"name": name, "kind": kind, "unit": unit, "meaning": meaning}
    if kind == "text":
        words = list(dict.fromkeys(values))
        if len(words) == 1:
            return column | {"constant": words[0]}
        place = {word: i for i, word in enumerate(words)}
        return column | {"words": words, "codes": [place[value] for value in values]}
    numbers = [rounded(value) for value in values]
    if len(set(numbers)) == 1:
        return column | {"constant": numbers[0]}
    return column | {"values": numbers}


def chart_facts(results: Results) -> dict[str, Any]:
    """Return the columns that the charts draw, and the limits."""
    load = results.load()
    spec = results.metadata_json("fastroof.spec")
    workload = results.have(results.kind.workload)
    return {
        "x": RateColumns.USER,
        "y": RateColumns.GPU,
        "best": _objective_column(results, spec),
        "is_complete": spec.get("keep") == "all",
        "load": load,
        "curves": results.have(results.kind.curves[load]),
        "series": results.series(load),
        "settings": results.have(results.kind.settings),
        "workload": workload,
        "chosen": {name: rounded(value) for name, value in results.start_workload().items()},
        "limits": _limits(spec),
        "groups": list(GROUPS),
    }


_OBJECTIVE_COLUMNS: Final = {
    "cost": "cost_per_million_tokens",
    "goodput": "tokens_per_s",
    "energy": "joules_per_token",
}


def _objective_column(results: Results, spec: dict[str, Any]) -> str:
    """Return the column of the sweep's objective."""
    objective = str(spec.get("objective", RateColumns.GPU))
    name = _OBJECTIVE_COLUMNS.get(objective, objective)
    return name if name in results else RateColumns.GPU


def _limits(spec: dict[str, Any]) -> dict[str, float]:
    """Return the sweep's limits by column."""
    constraints = spec.get("constraints") or spec
    limits = {
        name: value
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "request_latency_ms", "kv_share", "total_gpus")
        if isinstance(value := constraints.get(name), int | float) and value > 0
    }
    if "tpot_ms" in limits:
        limits[RateColumns.USER] = MS_PER_S / limits["tpot_ms"]
    return limits


def packed_steps(source: StepSource, chosen: ChosenRows, rows: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the broken-down steps of the leading rows, encoded for the page."""
    place = {index: i for i, index in enumerate(chosen.indices.tolist())}
    steps_of_row = {}
    for index in chosen.leaders.tolist():
        row = place[index]
        steps = source.steps({name: values[row] for name, values in rows.items()})
        if steps:
            steps_of_row[str(row)] = [_packed_step(step) for step in steps]
    return steps_of_row


def _packed_step(step: LeadingStep) -> dict[str, Any]:
    return {
        "name": step.name,
        "what": step.what,
        "total_us": rounded(step.total_us),
        "groups": {name: rounded(us) for name, us in step.groups_us.items()},
        "operators": [
            [
                part.name,
                part.calls,
                *map(rounded, (part.total_us, part.flops, part.moved_bytes, part.mfu)),
                part.bound,
                ORIGINS[part.origin],
            ]
            for part in step.operators
        ],
    }


def gpu_roofs(source: StepSource, names: list[str]) -> dict[str, Any]:
    """Return peaks and bandwidth of known GPUs by their name in the results."""
    roofs = {}
    for name in names:
        try:
            gpu = source.gpu(name)
        except FastroofError:
            continue
        roofs[name] = {
            "title": gpu.title,
            "peaks": dict(gpu.peak_flops_per_s),
            "hbm_bytes_per_s": gpu.hbm_bytes_per_s,
        }
    return roofs


MAX_ROWS: Final = 20_000
"""Default maximum of rows on a page: about 6 MB of data plus 1.2 MB of plotly.js, still quick to filter."""

_MOST_ROWS: Final = 200_000
_SCRIPTS: Final = (
    "data.js", "names.js", "filters.js", "look.js", "hover.js", "pareto.js", "curves.js", "step.js",
    "table.js", "selected.js", "verdict.js", "exports.js", "address.js", "start.js",
)  # fmt: skip


class ReportFile(NamedTuple):
    """A written report.

    Attributes
    ----------
    path : Path
        Path of the page.
    num_bytes : int
        Size of the page, B.
    num_rows, num_shown : int
        Number of rows in the results, and on the page.
    num_explained : int
        Number of rows whose steps are broken down.
    notes : tuple of str
        Notes of the page on omitted data.
    """

    path: Path
    num_bytes: int
    num_rows: int
    num_shown: int
    num_explained: int
    notes: tuple[str, ...]


def write_report(results: str | Path, output: str | Path, *, max_rows: int = MAX_ROWS) -> ReportFile:
    """Write a sweep's results as one self-contained interactive page.

    Parameters
    ----------
    results : str or Path
        Parquet file of a sweep over deployments or steps.
    output : str or Path
        Path of the page, ending in .html; an existing file is replaced atomically.
    max_rows : int
        Maximum number of rows on the page: of a larger sweep the Pareto fronts, the best of each setting,
        points of their curves, and an even sample of the others.

    Returns
    -------
    ReportFile
        Size, counts and notes.

    Raises
    ------
    FastroofError
        If the results are missing or empty, or the page cannot be written.

    Notes
    -----
    Steps are broken down by plans compiled from the current tables that the results' spec names. Rows whose
    plan cannot be compiled any more have no breakdown; the page's notes give the reasons.

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
        heading=_title(swept),
        subtitle=_subtitle(swept),
        scripts=_SCRIPTS,
        document=document,
    )
    return ReportFile(output, num_bytes, swept.num_rows, len(chosen.indices), len(steps), tuple(notes))


def _title(results: Results) -> str:
    models = [str(model) for model in results.codes("model")[1]]
    gpus = [str(gpu) for gpu in results.codes("gpu")[1]]
    model_names = ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    return f"{model_names} on {', '.join(gpus) if len(gpus) <= 3 else f'{len(gpus)} GPUs'}"


def _subtitle(results: Results) -> str:
    """Return the sources of the numbers in one line."""
    words = [f"{results.num_rows:,} {results.kind.noun} of {results.path.name}"]
    version = results.metadata.get("fastroof.version")
    words.append(f"swept with fastroof {version}" if version else "swept with an unknown version")
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
            f"The sweep kept only the best {spec.get('k', 1)} of each group, which are often neighbours: use "
            "keep = 'pareto' or 'all' for fronts and curves."
        )
    counts = _counted(results.metadata_json("fastroof.counts"))
    if counts:
        notes.append(f"The sweep counted {counts}.")
    if source.stale:
        notes.append(
            "The measured tables have changed since the sweep; steps are broken down with the new ones."
        )
    total = sum(source.problems.values())
    if total:
        why = "; ".join(list(source.problems)[:3])
        more = f"; and {len(source.problems) - 3} other reasons" if len(source.problems) > 3 else ""
        notes.append(f"{total} of {num_leaders} leading rows have no step breakdown: {why}{more}.")
    return notes


def _counted(counts: dict[str, Any]) -> str:
    """Format counts by name as text, followed by their counts by reason."""
    words = []
    for name, value in counts.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{n:,} {r}" for r, n in value.items() if isinstance(n, int) and n)
            if inner:
                words.append(f"{name}: {inner}")
        elif isinstance(value, int):
            words.append(f"{value:,} {name}")
    return "; ".join(words)
