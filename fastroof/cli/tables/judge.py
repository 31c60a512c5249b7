"""Judging tables: hold-out errors, differences between sources, and families of unsound rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.gpu_tables import import_progress, tables_of
from fastroof.cli.options import FolderGpu, Json
from fastroof.cli.output import percent, print_json, print_line, print_records, print_table
from fastroof.errors import LookupInputError, TableError

if TYPE_CHECKING:
    from fastroof.judging.coverage import CoverageRow, SurveyRow
    from fastroof.load.compare import Comparison
    from fastroof.tables import Tables
    from fastroof.tables.holdout import HoldoutRow
    from fastroof.uncertainty.campaign import CampaignFigure


Judged = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Operator to judge; repeatable.  [default: all]")
]

CAMPAIGNS_EPILOG: Final = """\b
error: relative standard error with which 80 % intervals around one source hold the other's values. common:
the part that all calls of a step share. same: kernels of one library in both sources; any, or two engines:
what each runs. long: at least 4 times the least latency of the family. Rows of families that tests find
unsound are left out. An empty GPU or family: pooled.

\b
JSON: made_from, and figures: objects [operator, family, gpu, kernels, length, scale, common, pairs, points].
"""


def campaigns(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SET]...",
            help="GPU/SOURCE, folders, or package:GPU/BACKEND/VERSION.  [default: the package's current "
            "version of each engine]",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write: .json.")] = None,
    as_json: Json = False,
) -> None:
    """Estimate errors from points that several campaigns measured."""
    from fastroof._version import __version__
    from fastroof.atomic_files import write_whole
    from fastroof.load.aiconfigurator import SYSTEMS, available, data_folder
    from fastroof.load.package_import import current_version
    from fastroof.uncertainty.campaign import campaigns_text, pooled_figures

    engines = {} if sets else dict.fromkeys((system, engine) for system, engine, _ in available())
    # versions of one engine share hosts, or differ by faults that a later one mended
    words = sets or [
        f"package:{SYSTEMS[system]}/{engine}/{current_version(data_folder(), system, engine)}"
        for system, engine in engines
    ]
    figures = pooled_figures(_pairs(words))
    rows: list[dict[str, Any]] = [
        one._asdict() | {"scale": round(one.scale, 4), "common": round(one.common, 4)} for one in figures
    ]
    document = {"made_from": {"fastroof": __version__, "sets": words}, "figures": rows}
    if output is not None:
        write_whole(output, campaigns_text(document))
    if as_json:
        print_json(document)
        return
    columns: dict[str, Callable[[CampaignFigure], str]] = {
        **{name: attrgetter(name) for name in ("operator", "family", "gpu", "kernels", "length")},
        "error": lambda one: percent(one.scale),
        "common": lambda one: percent(one.common),
        "pairs": lambda one: f"{one.pairs}",
        "points": lambda one: f"{one.points:,}",
    }
    print_records(figures, columns, left=("operator", "family", "gpu", "kernels", "length"))


def _pairs(words: list[str]) -> list[CampaignFigure]:
    """Compare all sources of each GPU, one GPU after another."""
    from fastroof.load import load_measured
    from fastroof.load.by_name import PACKAGE_PREFIX
    from fastroof.load.compare import compare_sources
    from fastroof.operators.registry import OPERATORS

    by_gpu: dict[str, list[str]] = {}
    for word in words:
        is_there = word.startswith(PACKAGE_PREFIX)
        gpu = word.removeprefix(PACKAGE_PREFIX).partition("/")[0] if is_there else load_measured(word).gpu
        by_gpu.setdefault(gpu, []).append(word)
    pairs: list[CampaignFigure] = []
    for gpu, named in by_gpu.items():
        typer.echo(f"comparing {len(named)} sources of {gpu}", err=True)
        loaded = [load_measured(word) for word in named]
        for operator in OPERATORS.values():
            tables = [one.tables[operator.name] for one in loaded if operator.name in one.tables]
            if len(tables) > 1 and operator.axes:
                pairs += compare_sources(operator.name, loaded[0].gpu, tables)
    return pairs


HOLDOUT_EPILOG: Final = """\b
Errors are absolute, relative to the measured latency; bias is their signed mean. inside: every corner
around the point was kept and measured; outside: the rest.

With --against nothing is hidden: the points are the other set's rows, by family, which is in the column of
the grid. A source with exactly these rows is left out. Errors and intervals then include how far
campaigns are apart.

\b
JSON: a list with one object per grid, method and region: operator, grid, method, region, points, mape,
median, p90, p99, bias, all errors as fractions; with --coverage one per grid and region: operator, grid,
region, points, level_50, level_80, level_90, level_95 (shares of the points in intervals that claim so much),
lowest_80, highest_80 (over four draws), quartiles_80 (from small to large errors claimed), median_error.
"""


def holdout(
    where: Annotated[
        str | None, typer.Argument(metavar="[GPU|PATH]", help="A GPU's name or a folder of measured tables.")
    ] = None,
    gpu: FolderGpu = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Source to judge.  [default: all]")
    ] = None,
    operator: Judged = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Method to judge; repeatable.  [default: all]")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="SET", help="Judge on the rows of another campaign: GPU/SOURCE or a folder."),
    ] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Judge the errors that lookups predict.")
    ] = False,
    first_rows: Annotated[
        bool,
        typer.Option("--first-rows", help="Hide the lower half of an axis instead of every second value."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Judge lookups on left-out points, or on another campaign's."""
    if coverage and method:
        raise LookupInputError("--coverage judges the roofline lookup and takes no --method")
    tables = tables_of(where, gpu, source)
    options: dict[str, Any] = {}
    if operator:
        options["operators"] = operator
    if method:
        options["methods"] = method
    if first_rows:
        from fastroof.tables.holdout import FIRST_ROWS

        options["grids"] = FIRST_ROWS
    if not as_json:
        options["progress"] = lambda words: typer.echo(f"holding out: {words}", err=True)
    if against is not None:
        from fastroof.judging.coverage import judged_by
        from fastroof.load import load_measured

        options["campaign"] = load_measured(against)
        tables = judged_by(tables, options["campaign"])
    if coverage:
        _coverage(tables, options, as_json=as_json)
        return
    if against is not None:
        from fastroof.tables.holdout import run_against

        rows = run_against(tables, **options)
    else:
        rows = tables.holdout(**options)
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    left = ("operator", "grid", "method", "region")
    columns: dict[str, Callable[[HoldoutRow], str]] = {
        **{name: attrgetter(name) for name in left},
        "points": lambda row: f"{row.points:,}",
        "MAPE": lambda row: _share(row.mape),
        **{name: partial(_share_of, name) for name in ("median", "p90", "p99", "bias")},
    }
    print_records(rows, columns, left=left)


def _coverage(tables: Tables, options: dict[str, Any], *, as_json: bool) -> None:
    from fastroof.judging.coverage import run_coverage, run_coverage_against

    rows = (run_coverage_against if "campaign" in options else run_coverage)(tables, **options)
    if as_json:
        print_json([row._asdict() for row in rows])
    else:
        columns: dict[str, Callable[[CoverageRow], str]] = {
            **{name: attrgetter(name) for name in ("operator", "grid", "region")},
            "points": lambda row: f"{row.points:,}",
            **{f"{level} %": partial(_share_of, f"level_{level}", digits=0) for level in (50, 80, 90, 95)},
            "80 %, draws": lambda row: f"{row.lowest_80 * 100.0:.0f} to {row.highest_80 * 100.0:.0f}",
            "80 %, quartiles": lambda row: " ".join(f"{s * 100.0:.0f}" for s in row.quartiles_80),
            "error": lambda row: _share(row.median_error),
        }
        left = ("operator", "grid", "region", "80 %, draws", "80 %, quartiles")
        print_records(rows, columns, left=left)


SETS: Final = "GPU, GPU/SOURCE, a folder, or package:GPU/BACKEND/VERSION of the installed package"

DIFF_EPILOG: Final = """\b
Example:
  fastroof tables diff package:h100/vllm/0.24.0 package:h100/sglang/0.5.14 --operator gemm
  fastroof tables diff package:{gpu}/vllm/0.24.0 package:{gpu}/vllm/0.25.0 --gpu h100 --gpu b200
  fastroof tables diff h100 results/run --sources

\b
Ratios are latency of B / latency of A; rms is of their logarithm. Flagged: a median beyond 1.5 either way
over at least 8 points.

\b
With --gpu: what moved, median (p10 to p90), for calls of up to 64 tokens, sequences or KiB, and for larger
ones. Families whose rows are equal are left out.

\b
JSON: a, b, families: objects [operator, family, points, only_a, only_b, median, rms, p10, p90, is_flagged];
with --sources a list of such families with source; with --gpu a list of objects [gpu, operator, family, size,
points, median, p10, p90].
"""


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=f"First set: {SETS}.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Second set.")],
    operator: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Operator to compare; repeatable.  [default: all]"),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Sum up by GPU, in place of {gpu} in A and B; repeatable."),
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Compare B with each source of A, the closest first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare the kernels of two engines or versions at common points."""
    from fastroof.load import load_measured
    from fastroof.load.compare import diff_sources, diff_tables

    if sources and gpu:
        raise TableError("--sources compares by family; it goes with --operator and --json only")
    if gpu:
        _moved(a, b, gpu, operator, as_json=as_json)
        return
    if sources:
        compared = diff_sources(load_measured(a), load_measured(b), operator)
        if as_json:
            print_json([{"source": source, **asdict(one)} for source, one in compared])
        else:
            rows = [(source, *_row(one)) for source, one in compared]
            print_table(("source", *_HEADS), rows, left=("source", "operator", "family"))
        return

    families = diff_tables(load_measured(a), load_measured(b), names=(a, b), operators=operator)
    if as_json:
        print_json({"a": a, "b": b, "families": [asdict(one) for one in families]})
        return
    print_line(f"A: {a}\nB: {b}")
    print_table(_HEADS, [_row(one) for one in families], left=("operator", "family"))
    print_line(f"flagged: {sum(one.is_flagged for one in families)} of {len(families)} families")


_HEADS: Final = (
    "operator", "family", "common", "only A", "only B", "median", "rms", "p10", "p90", "flag"
)  # fmt: skip


def _moved(a: str, b: str, gpus: list[str], operators: list[str] | None, *, as_json: bool) -> None:
    from fastroof.load import load_measured
    from fastroof.load.compare import find_moved

    found = {}
    for gpu in gpus:
        old, new = (load_measured(name.replace("{gpu}", gpu)) for name in (a, b))
        found[gpu] = {one.place: one for one in find_moved(old, new, operators)}
    if as_json:
        print_json([{"gpu": gpu, **one._asdict()} for gpu, rows in found.items() for one in rows.values()])
        return
    places = sorted({place for rows in found.values() for place in rows})
    cells = [
        (*place, *(rows[place].text if place in rows else "" for rows in found.values())) for place in places
    ]
    print_table(("operator", "family", "size", *gpus), cells, left=("operator", "family", "size"))


def _row(d: Comparison) -> tuple[str, ...]:
    ratios = tuple("" if value is None else f"{value:.3f}" for value in (d.median, d.rms, d.p10, d.p90))
    counts = (f"{d.points:,}", f"{d.only_a:,}", f"{d.only_b:,}")
    return (d.operator, " ".join(d.family.values()), *counts, *ratios, "flag" if d.is_flagged else "")


SURVEY_EPILOG: Final = """\b
inside, outside: mean absolute error of hidden points, every second value of each axis kept. same 80 %: share
of other sources' values in its 80 % intervals where both ran one library's kernels; any 80 %: of all common
points, as answers for the other's engine. unlike: layers of experts with even routing that take less than 0.6
or more than 1.6 times as long with ep as with tp at 4,096 tokens (refused beyond 2.5: the work is equal), or
more than twice another engine's time at every number of tokens; listed below the table.

\b
JSON: a list with one object per source and operator: gpu, engine, source, operator, rows, mape_inside,
mape_outside, hidden, same_80, same_points, any_80, any_points (fractions; null without points), unsound
(rows of families that tests find unsound), unlike: a list [source, dtype, hidden, intermediate, topk,
num_experts, moe_tp, moe_ep, against, ratio].
"""

HEADS: Final = (
    "gpu", "engine", "source", "operator", "rows", "inside", "outside", "same 80 %", "same points",
    "any 80 %", "any points", "unsound", "unlike",
)  # fmt: skip


def survey(
    where: Annotated[list[str], typer.Argument(metavar="GPU|PATH...", help="GPUs or folders.")],
    operator: Judged = None,
    as_json: Json = False,
) -> None:
    """Judge every source of some GPUs, by hold-out and other campaigns."""
    from fastroof.judging.coverage import run_survey

    rows: list[SurveyRow] = []
    for name in where:
        tables = tables_of(name)
        rows += run_survey(tables, operators=operator, progress=lambda words: typer.echo(words, err=True))
    if as_json:
        print_json([{**row._asdict(), "unlike": [one.facts for one in row.unlike]} for row in rows])
        return
    print_table(HEADS, [_cells(row) for row in rows], left=HEADS[:4])
    for row in rows:
        for one in row.unlike:
            print_line(f"{row.gpu} {one.text}")


def _cells(row: SurveyRow) -> tuple[str, ...]:
    return (
        row.gpu, row.engine, row.source, row.operator, f"{row.rows:,}", _share(row.mape_inside),
        _share(row.mape_outside), _share(row.same_80, 0), f"{row.same_points:,}", _share(row.any_80, 0),
        f"{row.any_points:,}", f"{row.unsound:,}", f"{len(row.unlike):,}",
    )  # fmt: skip


def _share(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value * 100.0:.{digits}f} %"


def _share_of(name: str, row: Any, digits: int = 1) -> str:
    return _share(getattr(row, name), digits)


FLAG_EPILOG: Final = """\b
A kernel of a flagged family is served from another source that has it sound, and no answer out of one claims
a small error. Flags by hand are unchanged; so are all rows.

\b
JSON: a list with one object per family: source, operator, keys, test, reason, ratio, excess_us, serves, rows.
"""


def flag(
    where: Annotated[
        list[str], typer.Argument(metavar="GPU|PATH...", help="GPUs or folders whose sources to flag.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be flagged; write nothing.")
    ] = False,
    modules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Flag nothing; write the modules that take longer than their parts."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Flag families of rows that tests find wrong, in provenance.toml."""
    if modules is not None:
        _write_modules(where, modules)
        return
    flagged = [one for name in where for one in _flagged(name, dry_run=dry_run)]
    if as_json:
        print_json(flagged)
        return
    for one in flagged:
        keys = " ".join(f"{name} {list(cells)}" for name, cells in one["keys"].items())
        print_line(f"{one['source']} {one['operator']} {keys}: {one['test']}: {one['reason']}")
    typer.echo(f"{len(flagged)} families {'would be flagged' if dry_run else 'flagged'}")


def _flagged(where: str, *, dry_run: bool) -> list[dict[str, Any]]:
    from fastroof.load.family_checks import flag_source, siblings_of
    from fastroof.load.listing import table_sets
    from fastroof.load.unsound import unsound_families

    with import_progress(where) as progress:
        sets = table_sets(where, progress=progress)
    if any(one.source is None for one in sets):
        raise TableError(f"{where} has no provenance.toml to write into; import the tree first")
    loaded = [one.load() for one in sets]
    flagged: list[dict[str, Any]] = []
    for measured in loaded:
        provenance = flag_source(measured, siblings_of(measured, loaded), dry_run=dry_run)
        for operator, table in measured.tables.items():
            place = {"source": table.source, "operator": operator}
            flagged += [{**place, **family.as_dict()} for family in unsound_families(provenance, operator)]
    return flagged


def _write_modules(where: list[str], file: Path) -> None:
    """Write the list that ships, fastroof/load/known_unsound.toml."""
    from fastroof.atomic_files import write_whole
    from fastroof.judging.module_check import KERNELS, MODULE, kernel_families, module_families
    from fastroof.load.write import toml_text

    rows = []
    for name in where:
        tables = tables_of(name)
        found = {MODULE: module_families(tables)} | {name: kernel_families(tables, name) for name in KERNELS}
        for operator, of_source in found.items():
            for source, families in of_source.items():
                place = {"gpu": tables.gpu.name, "source": source, "operator": operator}
                rows += [{**place, **family.as_dict()} for family in families]
    write_whole(file, toml_text({"families": rows}))
    typer.echo(f"wrote {file}: {len(rows)} families")
