"""Where aiconfigurator-core can estimate a model: how many plans of measured kernels, and what is missing."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

from benchmarks.accuracy.aiconfigurator_estimates import aiconfigurator_version
from benchmarks.accuracy.support_matrix import (
    PASS,
    Combination,
    published_models,
    read_support_matrix,
)
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import FastroofError
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import AUTO
from fastroof.plan import StepPlan
from fastroof.plan.support import STATUSES, compiled_quietly, typical_parts
from fastroof.tables import Tables, load_tables

SIZES: Final = (8, 4, 2, 1)
"""GPUs that share each layer, as they are tried: the first that a plan takes is the row's."""

_MEASURED, _BORROWED, _MODELLED, _REFUSED = STATUSES
_OF_ONE: Final = re.compile(
    r"\s*\([^()]*\)|\S+--\S+?_config(?:\.json)?\s*|; (?:measured: |it has |\d+ kernels? |allow_modelled=).*"
)
_STREAMED: Final = "elementwise"


class RosterRow(NamedTuple):
    """One combination of the support matrix, as plans have it.

    Attributes
    ----------
    model, gpu, engine, verdict : str
        The combination.
    tp : int
        The largest of :data:`SIZES` that a plan takes; 0 where none does.
    status : str
        measured, borrowed or modelled by the worst of its operators, or refused.
    on_request : bool
        Whether there is a plan with ``allow_modelled=True`` alone.
    fits : bool
        Whether weights leave room for KV cache at that tp.
    why : str
        What is missing without ``allow_modelled=True``; empty where nothing is.
    borrowed, modelled : tuple of str
        Operators that are, each once, whatever the kind of layer.
    streams_only : bool
        Whether all that is modelled only streams: norms, activations and the like, which are launches and
        bytes.
    """

    model: str
    gpu: str
    engine: str
    verdict: str
    tp: int
    status: str
    on_request: bool
    fits: bool
    why: str
    borrowed: tuple[str, ...] = ()
    modelled: tuple[str, ...] = ()
    streams_only: bool = False

    @property
    def is_covered(self) -> bool:
        """Whether a plan has it without asking for modelled parts."""
        return self.status != _REFUSED and not self.on_request


def roster_rows(
    combinations: Iterable[Combination], models: Mapping[str, ModelSpec | FastroofError]
) -> Iterator[RosterRow]:
    """Compile a plan of every combination, and say what it is made of.

    Parameters
    ----------
    combinations : iterable of Combination
        Which; those of one GPU are read from one set of tables.
    models : mapping of str to ModelSpec or FastroofError
        As :func:`published_models` has them; a model that is not there is refused.

    Yields
    ------
    RosterRow
        By GPU, in the order of the combinations.

    Notes
    -----
    Each is asked for with the engine's profile of its name, its format the checkpoint's, tensor parallelism
    alone. Its steps are those of :func:`fastroof.plan.support.typical_parts`.
    """
    by_gpu = sorted(combinations, key=attrgetter("gpu"))
    for name, of_gpu in itertools.groupby(by_gpu, key=attrgetter("gpu")):
        try:
            gpu, tables = load_gpu(name), load_tables(name)
        except FastroofError as error:
            yield from (_refused(one, str(error)) for one in of_gpu)
            continue
        yield from (_row(one, models.get(one.model), gpu, tables) for one in of_gpu)


def _refused(one: Combination, why: str) -> RosterRow:
    return RosterRow(*one[:4], 0, _REFUSED, on_request=False, fits=False, why=why)


def _row(
    one: Combination, model: ModelSpec | FastroofError | None, gpu: GpuSpec, tables: Tables
) -> RosterRow:
    if not isinstance(model, ModelSpec):
        return _refused(one, "no config.json of it" if model is None else str(model))
    missing = ""
    for allow_modelled in (False, True):
        for tp in SIZES:
            try:
                plan = compiled_quietly(
                    model, gpu, tables, one.engine, AUTO, Layout(tp), allow_modelled=allow_modelled
                )
                return _of_plan(one, plan, missing)
            except FastroofError as error:
                # that of the smallest: a larger one may be refused for what it cannot be split by
                why = str(error)
        missing = missing or why
    return _refused(one, missing)


def _of_plan(one: Combination, plan: StepPlan, missing: str) -> RosterRow:
    parts = typical_parts(plan)
    if not all(math.isfinite(part.total_us) and part.total_us >= 0.0 for part in parts):
        return _refused(one, "its steps have no time")
    roles = {curve.operator.role: curve.operator.operator for curve in plan.row_curves}
    names: dict[int, tuple[str, ...]] = {}
    for origin in (ORIGIN_BORROWED, ORIGIN_MODELLED):
        # operators of several kinds of layers are called by them
        found = (part.name.partition(" (")[0] for part in parts if part.origin == origin)
        names[origin] = tuple(dict.fromkeys(found))
    modelled = [part for part in parts if part.origin == ORIGIN_MODELLED]
    status = _MODELLED if modelled else _BORROWED if names[ORIGIN_BORROWED] else _MEASURED
    return RosterRow(
        *one[:4], plan.tp, status, on_request=bool(missing), fits=plan.has_room, why=missing,
        borrowed=names[ORIGIN_BORROWED], modelled=names[ORIGIN_MODELLED],
        streams_only=bool(modelled) and all(roles.get(part.role) == _STREAMED for part in modelled),
    )  # fmt: skip


class Cell(NamedTuple):
    """Combinations of one GPU and engine, counted.

    Attributes
    ----------
    total, covered : int
        All of them, and those with a plan.
    measured, borrowed, streams_modelled, modelled : int
        The covered ones by the worst of their operators; ``streams_modelled`` where all that is modelled only
        streams.
    on_request : int
        More that have a plan with ``allow_modelled=True``.
    """

    total: int
    covered: int
    measured: int
    borrowed: int
    streams_modelled: int
    modelled: int
    on_request: int


@dataclass(frozen=True)
class RosterSummary:
    """Rows of a roster, counted.

    Attributes
    ----------
    cells : dict of (str, str) to Cell
        By GPU and engine.
    whole : Cell
        Of all rows.
    uncovered : dict of str to list of RosterRow
        Rows without a plan, by the reason in short: sizes and names left out.
    borrowed, modelled : dict of str to int
        Operators of covered rows and of those on request, with the number of rows that have them so.
    """

    cells: dict[tuple[str, str], Cell]
    whole: Cell
    uncovered: dict[str, list[RosterRow]]
    borrowed: dict[str, int]
    modelled: dict[str, int]


def summarise(rows: Sequence[RosterRow]) -> RosterSummary:
    """Count the rows of a roster.

    Examples
    --------
    >>> row = RosterRow("a/b", "h100", "vllm", "PASS", 8, "measured", False, True, "")
    >>> summarise([row, row._replace(status="refused", why="no moe table (a/b)")]).whole.covered
    1
    """
    places = sorted({(row.gpu, row.engine) for row in rows})
    uncovered: dict[str, list[RosterRow]] = {}
    for row in rows:
        if not row.is_covered:
            uncovered.setdefault(in_short(row.why), []).append(row)
    return RosterSummary(
        {place: _cell([row for row in rows if (row.gpu, row.engine) == place]) for place in places},
        _cell(rows),
        dict(sorted(uncovered.items(), key=lambda item: -len(item[1]))),
        _counted(row.borrowed for row in rows),
        _counted(row.modelled for row in rows),
    )


def _cell(rows: Collection[RosterRow]) -> Cell:
    covered = [row for row in rows if row.is_covered]
    by_status = Counter("streams" if row.streams_only else row.status for row in covered)
    return Cell(
        len(rows), len(covered), by_status[_MEASURED], by_status[_BORROWED], by_status["streams"],
        by_status[_MODELLED], sum(row.on_request for row in rows),
    )  # fmt: skip


def _counted(names: Iterable[tuple[str, ...]]) -> dict[str, int]:
    return dict(Counter(itertools.chain.from_iterable(names)).most_common())


def in_short(why: str) -> str:
    """Write a reason without what is one model's or one table's: files, brackets, what there is instead.

    Examples
    --------
    >>> in_short("configs/a--b_config.json has no plan yet: it needs a MLA operator (kv_lora_rank 512)")
    'has no plan yet: it needs a MLA operator'
    """
    return _OF_ONE.sub("", why)


def print_markdown() -> None:
    """Print the roster in Markdown: every combination that passes, then those without data."""
    models = published_models()
    loaded = sum(isinstance(model, ModelSpec) for model in models.values())
    version = aiconfigurator_version()
    print(f"{loaded} of {len(models)} config.json files of aiconfigurator-core {version} load.\n")
    for words, chosen in (("PASS", _passes), ("no data", _wants_data)):
        summary = summarise(list(roster_rows(filter(chosen, read_support_matrix()), models)))
        engines = sorted({engine for _, engine in summary.cells})
        columns = (
            f"{words}, by GPU",
            *engines,
            "measured",
            "borrowed",
            "norms modelled",
            "others",
            "on request",
        )
        _print_markdown(columns, _markdown_rows(summary, engines))
        kinds = (("borrowed", summary.borrowed), ("modelled", summary.modelled))
        for kind, operators in kinds:
            listed = ", ".join(f"{name} {count}" for name, count in operators.items())
            print(f"Operators {kind}, in so many combinations: {listed or 'none'}.\n")
        for why, rows in summary.uncovered.items():
            names = sorted({row.model.split("/")[-1] for row in rows})
            print(f"* {len(rows)} not covered: {why} ({', '.join(names)})")
        print()


def _passes(one: Combination) -> bool:
    return one.verdict == PASS


def _wants_data(one: Combination) -> bool:
    return one.wants_data


def _markdown_rows(summary: RosterSummary, engines: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A row a GPU, and one of all."""
    for gpu in dict.fromkeys(place[0] for place in summary.cells):
        cells = [summary.cells.get((gpu, engine)) for engine in engines]
        there = [cell for cell in cells if cell is not None]
        covered = ("" if cell is None else f"{cell.covered} of {cell.total}" for cell in cells)
        yield (gpu, *covered, *(str(sum(values)) for values in list(zip(*there, strict=True))[2:]))
    every = [[cell for (_, of), cell in summary.cells.items() if of == engine] for engine in engines]
    covered = (f"{sum(c.covered for c in cells)} of {sum(c.total for c in cells)}" for cells in every)
    yield ("together", *covered, *map(str, summary.whole[2:]))


def _print_markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for cells in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(cells)} |")
    print()
