"""What journals hold, checked: one row a point, the runs that measured them, sentinels and skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastroof.checks import is_number, is_whole_number, shown
from fastroof.columns import LATENCY, PROVIDER, SPREAD_COLUMNS
from fastroof.errors import MeasureError
from fastroof.load.rows import MOST_INT
from fastroof.operators.registry import OPERATORS
from kernels_bench.journal import read_journal
from kernels_bench.protocol import Point

Record = Mapping[str, Any]

_TIMES: Final = (LATENCY.name, *(c.name for c in SPREAD_COLUMNS))


@dataclass(frozen=True)
class Run:
    """One start of ``kernels-bench``: its facts and its sentinels."""

    # Its run_id; a start that resumed the run of the same id has ``#2``, ``#3`` behind it.
    name: str
    # The journal's lines; ``end`` is empty where the run was killed.
    start: Record
    end: Record
    sentinels: tuple[Record, ...]
    rows: int


@dataclass(frozen=True)
class Recorded:
    """All that some journals hold."""

    # The line of each measured point by its key; a later line of one journal replaces an earlier one.
    rows: Mapping[str, Record]
    # The line of each point that was tried and has no row.
    skips: Mapping[str, Record]
    runs: tuple[Run, ...]

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that the runs name, each once."""
        return tuple(dict.fromkeys(str(run.start["gpu"]) for run in self.runs))


def read_journals(journals: Sequence[Path]) -> Recorded:
    """Read and check journals whose points are apart."""
    if not journals:
        raise MeasureError("no journal was given; kernels-bench run writes one, journal.jsonl")
    rows: dict[str, Record] = {}
    skips: dict[str, Record] = {}
    runs: list[Run] = []
    measured_in: dict[str, Path] = {}
    for path in map(Path, journals):
        mine: dict[str, Record] = {}
        for start, lines in _by_start(path):
            for line in lines:
                if line["type"] == "row":
                    mine[_checked_key(path, line)] = line
                elif line["type"] == "skip":
                    skips[_key(line)] = line
            runs.append(_run(start, lines, runs))
        twice = [key for key in mine if key in measured_in]
        if twice:
            raise MeasureError(
                f"{len(twice)} points are in {measured_in[twice[0]]} and in {path}, as {twice[0]}: "
                f"these are runs of the same points; kernels-bench merge takes their median"
            )
        measured_in |= dict.fromkeys(mine, path)
        rows |= mine
    if not rows:
        raise MeasureError(f"{', '.join(map(str, journals))}: no measured row; {_why_none(skips)}")
    return Recorded(rows, {key: line for key, line in skips.items() if key not in rows}, tuple(runs))


def _by_start(path: Path) -> list[tuple[Record, list[Record]]]:
    """Split a journal into its runs: each start line with the lines up to the next."""
    if not path.is_file():
        raise MeasureError(f"{path}: no such journal; give the .jsonl file that kernels-bench run wrote")
    starts: list[tuple[Record, list[Record]]] = []
    for line in read_journal(path):
        kind = line.get("type")
        if kind == "start":
            if not isinstance(line.get("gpu"), str) or not line["gpu"]:
                raise MeasureError(f"{path}: a start line names no gpu: no journal of kernels-bench run")
            starts.append((line, []))
        elif not starts:
            raise MeasureError(
                f"{path}: the first line is {kind!r}, not 'start': no journal of kernels-bench run"
            )
        else:
            starts[-1][1].append(line)
    if not starts:
        raise MeasureError(f"{path}: an empty journal; the run stopped before it started, run it again")
    return starts


def _run(start: Record, lines: Sequence[Record], before: Sequence[Run]) -> Run:
    name = str(start.get("run_id") or f"run-{len(before) + 1}")
    again = sum(run.name.split("#")[0] == name for run in before)
    ends = [line for line in lines if line["type"] == "end"]
    return Run(
        name=f"{name}#{again + 1}" if again else name,
        start=start,
        end=ends[-1] if ends else {},
        sentinels=tuple(line for line in lines if line["type"] == "sentinel"),
        rows=len({_key(line) for line in lines if line["type"] == "row"}),
    )


def _key(line: Record) -> str:
    return Point(str(line["operator"]), line["values"]).key


def _checked_key(path: Path, line: Record) -> str:
    """Return the key of a row that fits its schema."""
    operator, values = line.get("operator"), line.get("values")
    schema = OPERATORS.get(str(operator))
    if schema is None or not isinstance(values, Mapping):
        raise MeasureError(
            f"{path}: a row of operator {operator!r}; the operators are {', '.join(OPERATORS)}"
        )
    columns = (*schema.keys, *schema.axes)
    names = {c.name for c in columns}
    key = _key(line)
    if set(values) != names:
        raise MeasureError(
            f"{path}: {key} has columns {', '.join(sorted(values))}; this version's {operator} has "
            f"{', '.join(sorted(names))}: measured by another version, so it cannot be used together"
        )
    for column in columns:
        cell = values[column.name]
        is_text = isinstance(cell, str) and cell
        if not (is_text if column.kind == "text" else is_whole_number(cell, column.minimum, MOST_INT)):
            raise MeasureError(f"{path}: {key}: {column.name} is {shown(cell)}, need {column.kind}")
    for name in _TIMES:
        time: Any = line.get(name)
        if not is_number(time) or not 0 < time <= MOST_INT:
            raise MeasureError(f"{path}: {key}: {name} is {shown(time)}, need a number above 0")
    if not isinstance(line.get(PROVIDER.name), str) or not line[PROVIDER.name]:
        raise MeasureError(f"{path}: {key} names no provider")
    return key


def _why_none(skips: Mapping[str, Record]) -> str:
    if not skips:
        return "the run stopped before its first point, run or resume it"
    first = next(iter(skips.values()))
    return f"all {len(skips)} points were skipped, the first because: {first.get('reason', 'no reason')}"
