"""What ``fastroof models --roster`` prints: where plans cover what aiconfigurator-core can estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastroof.cli.output import console, print_json, print_table, shown_progress
from fastroof.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastroof.serving.evidence.roster import Cell, RosterRow, RosterSummary
    from fastroof.serving.evidence.support_matrix import Combination

NAMED_MODELS: Final = 4


def print_roster(
    models: Sequence[str], gpus: Sequence[str], engines: Sequence[str], failed: bool, as_json: bool
) -> None:
    """Compile a plan of every combination asked for, and print by GPU and engine how many there are."""
    from fastroof.serving.evidence.aiconfigurator_estimates import aiconfigurator_version
    from fastroof.serving.evidence.roster import roster_rows, summarise
    from fastroof.serving.evidence.support_matrix import published_models, read_support_matrix

    version = aiconfigurator_version()
    published = published_models()
    wanted = _wanted(read_support_matrix(), models, gpus, engines, failed)
    rows = []
    with shown_progress("plans", "combinations", quiet=False) as progress:
        for row in roster_rows(wanted, published):
            rows.append(row)
            progress(len(rows), len(wanted))
    loaded = sum(not isinstance(model, Exception) for model in published.values())
    if as_json:
        document = {
            "aiconfigurator_core": version,
            "configs": len(published),
            "configs_loaded": loaded,
            "combinations": [{**row._asdict(), "is_covered": row.is_covered} for row in rows],
        }
        print_json(document)
        return
    out = console()
    out.print(f"aiconfigurator-core {version}: {loaded} of {len(published)} config.json files load.\n")
    _print_failures(published)
    _print(summarise(rows), failed)


def _wanted(
    matrix: Sequence[Combination],
    models: Sequence[str],
    gpus: Sequence[str],
    engines: Sequence[str],
    failed: bool,
) -> list[Combination]:
    """Choose combinations; what is chosen by a name that the matrix has not is an error."""
    from fastroof import load_gpu
    from fastroof.serving.evidence.support_matrix import PASS

    chosen = {"model": list(models), "gpu": [load_gpu(name).name for name in gpus], "engine": list(engines)}
    for name, values in chosen.items():
        known = {getattr(one, name) for one in matrix}
        unknown = [value for value in values if value not in known]
        if unknown:
            raise PlanError(
                f"--{name} {', '.join(unknown)}: the support matrix has none; it has "
                f"{', '.join(sorted(known))}"
            )
    return [
        one
        for one in matrix
        if (one.wants_data if failed else one.verdict == PASS)
        and all(not values or getattr(one, name) in values for name, values in chosen.items())
    ]


def _print_failures(published: dict[str, Any]) -> None:
    from fastroof.serving.evidence.roster import in_short

    named: dict[str, list[str]] = {}
    for name, model in published.items():
        if isinstance(model, Exception):
            named.setdefault(in_short(str(model)), []).append(name)
    if named:
        columns = ("does not load because", "configs", "models")
        table = [(why, str(len(names)), _names_words(names)) for why, names in named.items()]
        print_table(columns, table, left=("does not load because", "models"))
        console().print()


def _print(summary: RosterSummary, failed: bool) -> None:
    out = console()
    if not summary.whole.total:
        out.print("No combination is left to plan.")
        return
    gpus, engines = ({place[i]: None for place in summary.cells} for i in (0, 1))
    table = [
        (gpu, *(_cell(summary.cells.get((gpu, engine))) for engine in engines), _row_total(summary, gpu))
        for gpu in gpus
    ]
    print_table(("gpu", *engines, "together"), table, left=("gpu",))
    whole = summary.whole
    out.print(
        f"\n{whole.covered:,} of {whole.total:,} combinations "
        f"{'without data there' if failed else 'that pass there'} have a plan from measured "
        f"kernels: {whole.measured:,} of measured ones alone, {whole.borrowed:,} with some borrowed, "
        f"{whole.streams_modelled:,} where norms and the like are modelled, {whole.modelled:,} where "
        f"others are. {whole.on_request:,} more have one with --allow-modelled.",
        soft_wrap=True,
    )
    _print_uncovered(summary.uncovered)
    for words, operators in (("borrowed", summary.borrowed), ("modelled", summary.modelled)):
        if operators:
            out.print()
            print_table((words, "combinations"), [(n, f"{c:,}") for n, c in operators.items()], left=(words,))


def _print_uncovered(uncovered: dict[str, list[RosterRow]]) -> None:
    if not uncovered:
        return
    console().print()
    columns = ("not covered because", "combinations", "on request", "models")
    table = [
        (
            why,
            f"{len(rows):,}",
            f"{sum(row.on_request for row in rows):,}",
            _names_words([row.model for row in rows]),
        )
        for why, rows in uncovered.items()
    ]
    print_table(columns, table, left=("not covered because", "models"))


def _names_words(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - NAMED_MODELS
    return ", ".join(distinct[:NAMED_MODELS]) + (f" and {more} more" if more > 0 else "")


def _row_total(summary: RosterSummary, gpu: str) -> str:
    cells = [cell for (of_gpu, _), cell in summary.cells.items() if of_gpu == gpu]
    return f"{sum(cell.covered for cell in cells)}/{sum(cell.total for cell in cells)}"


def _cell(cell: Cell | None) -> str:
    """Covered of all; then how many of the covered are measured, borrowed and modelled."""
    if cell is None:
        return ""
    parts = (cell.measured, cell.borrowed, cell.streams_modelled, cell.modelled)
    return f"{cell.covered}/{cell.total} ({' '.join(map(str, parts))})"
