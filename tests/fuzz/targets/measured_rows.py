"""Tables of a few rows of every operator, whose cells are any that a table may have: sizes up to 2^40."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

import fastroof
from fastroof.errors import LookupInputError
from fastroof.judging.validate import validate
from fastroof.operators.operator import METHODS
from fastroof.operators.registry import OPERATORS
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite
from tests.fuzz.targets.kernel_lookups import MADE, WORDS, shipped

MOST_ROWS = 12
ROWS: dict[str, dict[str, list[Any]]] = {
    **MADE,
    "lora": {
        "part": ["shrink"] * 4, "m": [1, 16, 256, 4096], "n": [16] * 4, "k": [4096] * 4, "adapters": [1] * 4,
        "latency_us": [4.0, 4.0, 5.0, 20.0],
    },
    "send_receive": {
        "num_nodes": [1, 1, 1, 2, 2, 2], "message_bytes": [1024, 2**20, 2**28] * 2,
        "latency_us": [5.0, 20.0, 1e4, 9.0, 60.0, 2e4],
    },
}  # fmt: skip
"""Of operators that the H100's tables do not have."""

SIZES = (0, 1, 2, 3, 31, 2**16, 2**20, 2**24, 2**28, 2**31, 2**32, 2**39, 2**40 - 1, 2**40, 2**40 + 1)
TIMES_US = (1e-3, 1e-3, 1.0, 1e3, 1e6, 1e9, 1e9, 1e9, 1e9, 1e9, 2e9)


class MeasuredRows(Target):
    """A case is JSON: the operator, and its columns."""

    name = "table.rows"
    suffix = ".json"
    ci_cases = 250

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.rows = {name: ROWS.get(name) or _some_rows(name) for name in OPERATORS}
        self.source = folder / "mine"
        self.source.mkdir()
        (self.source / "provenance.toml").write_text('gpu = "h100"\n')

    def examples(self) -> list[bytes]:
        return [_written(name, columns) for name, columns in self.rows.items()]

    def case(self, random: Random) -> bytes:
        name = random.choice(list(self.rows))
        columns = {key: list(values) for key, values in self.rows[name].items()}
        count = len(columns["latency_us"])
        if random.random() < 0.3:
            kept = sorted(random.choices(range(count), k=random.choice((1, 2, 5))))
            columns = {key: [values[row] for row in kept] for key, values in columns.items()}
            count = len(kept)
        wide = [key for key in columns if key != "latency_us"]
        # a column as a whole, or one cell of it
        for _ in range(random.choice((1, 1, 2, 3, 5))):
            key = random.choice(wide)
            is_text = isinstance(columns[key][0], str)
            value = random.choice(WORDS if is_text and random.random() < 0.95 else SIZES)
            rows = range(count) if random.random() < 0.5 else [random.randrange(count)]
            for row in rows:
                columns[key][row] = value
        what = random.random()
        if what < 0.7:
            for row in range(count) if what < 0.5 else [random.randrange(count)]:
                columns["latency_us"][row] = random.choice(TIMES_US)
        return _written(name, columns)

    def check(self, case: bytes) -> None:
        name, columns = json.loads(case)
        if name not in self.rows:
            raise SkippedError
        path = self.source / f"{name}.parquet"
        try:
            pa.parquet.write_table(pa.table(columns), path)
        except (pa.ArrowException, TypeError):
            raise SkippedError from None
        try:
            tables = fastroof.load_tables(self.source)
        finally:
            path.unlink()
        for report in validate(tables.measured, tables.gpu):
            all_finite(_numbers(report))
        if not OPERATORS[name].answers_lookups:
            return
        self._check_lookups(tables, name)
        tables.holdout(operators=[name])

    def _check_lookups(self, tables: fastroof.Tables, name: str) -> None:
        """What was measured is answered as it was measured, whatever the method, or refused by its sizes."""
        operator = OPERATORS[name]
        measured = tables.measured.tables[name].columns
        sizes = [column.name for column in (*operator.keys, *operator.axes)]
        points = list(zip(*(measured[size].tolist() for size in sizes), strict=True))
        for row in {0, len(points) - 1}:
            point = dict(zip(sizes, points[row], strict=True))
            wanted = {key: value for key, value in point.items() if key in operator.arguments}
            try:
                found = [tables.lookup(name, method=method, **wanted) for method in METHODS]
            except LookupInputError:
                continue
            error = tables.lookup(name, with_error=True, **wanted).relative_error
            all_finite([error, *(one.latency_us for one in found)])
            for one in found:
                if not one.latency_us > 0.0 or (
                    one.origin == 0
                    and points.count(points[row]) == 1
                    and one.latency_us != measured["latency_us"][row]
                ):
                    raise Wrong(f"{wanted} took {measured['latency_us'][row]} us, and is {one}")  # fmt: skip


def _some_rows(name: str) -> dict[str, list[Any]]:
    """Rows of the kernel that has the most, from end to end."""
    tables = shipped()
    schema = OPERATORS[name]
    key = max(tables.groups(name).items(), key=lambda one: len(one[1]))[0]
    rows = tables.rows(schema, key)
    places = np.unique(np.linspace(0, len(rows["latency_us"]) - 1, MOST_ROWS).astype(int))
    return {column.name: rows[column.name][places].tolist() for column in schema.required}


def _written(name: str, columns: dict[str, list[Any]]) -> bytes:
    return json.dumps([name, columns]).encode()


def _numbers(report: Any) -> list[Any]:
    shares = [report.mfu_min, report.mfu_max, report.bandwidth_max_bytes_per_s]
    return [*(one for one in shares if one is not None), [dict(one.worst) for one in report.findings]]


TARGETS = [MeasuredRows]
