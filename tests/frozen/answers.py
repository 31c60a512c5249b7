"""Answers with their questions, and their files."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.frozen.product import FastroofError

FOLDER: Final = Path(__file__).with_name("recorded")
CLOSE: Final = 1e-12
"""Relative difference of answers that go through transcendental functions of NumPy or LAPACK, whose last bit
depends on the processor that they run on, or through kernels that were made of such: experts' distributions,
blocks of latent attention."""
FEW: Final = 20
"""Numbers of a list that a document keeps one by one."""

SCHEMA: Final = pa.schema(
    [
        pa.field("case", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("quantity", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("argument", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("value", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("is_exact", pa.bool_(), nullable=False),
    ]
)


class Answer(NamedTuple):
    """One answer: a number, or a text where ``value`` is None."""

    case: str
    quantity: str
    argument: str
    value: float | None
    text: str | None
    is_exact: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is an answer to."""
        return self.case, self.quantity, self.argument

    def agrees(self, other: Answer) -> bool:
        """Whether it is the same answer: to the last bit, NaN being NaN, unless it need only be close."""
        if self.value is None or other.value is None:
            return (self.value, self.text) == (other.value, other.text)
        mine, its = np.float64(self.value), np.float64(other.value)
        if mine.view(np.int64) == its.view(np.int64) or (np.isnan(mine) and np.isnan(its)):
            return True
        # bits of numbers, so that 0.0 and -0.0 differ
        return not self.is_exact and bool(abs(mine - its) <= CLOSE * max(abs(mine), abs(its)))


class Answers:
    """Answers of one group, in the order of their computation.

    Parameters
    ----------
    is_exact : bool
        Whether they are compared to the last bit.
    """

    def __init__(self, *, is_exact: bool = True) -> None:
        self.is_exact = is_exact
        self.listed: list[Answer] = []

    def numbers(self, case: str, quantity: str, arguments: Iterable[Any], values: Any) -> None:
        flat = np.asarray(values, np.float64).reshape(-1).tolist()
        for argument, value in zip(arguments, flat, strict=True):
            # a stated error is made with exponentials and logarithms, whatever is made next to it
            is_error = any(name.endswith("relative_error") for name in (quantity, str(argument)))
            is_exact = self.is_exact and not is_error
            self.listed.append(Answer(case, quantity, str(argument), value, None, is_exact))

    def number(self, case: str, quantity: str, value: Any) -> None:
        self.numbers(case, quantity, [""], [value])

    def text(self, case: str, quantity: str, text: str, argument: Any = "") -> None:
        self.listed.append(Answer(case, quantity, str(argument), None, text, self.is_exact))

    def many(self, case: str, quantity: str, values: Any) -> None:
        """Keep the hash of many numbers' bits, or two sums of them where they need only be close."""
        array = np.ascontiguousarray(values, "<f8")
        if self.is_exact:
            array = np.where(np.isnan(array), np.nan, array)
            self.text(case, quantity, hashlib.sha256(array.tobytes()).hexdigest()[:16], array.shape)
            return
        flat = array.reshape(-1)
        # in the order of their places too, so that no two can change places; fsum rounds once
        weighted = flat * (1.0 + np.arange(flat.size) / max(flat.size, 1))
        sums = [math.fsum(flat.tolist()), math.fsum(weighted.tolist())]
        self.numbers(case, quantity, [f"{array.shape}, {name}" for name in ("sum", "by place")], sums)

    def record(self, case: str, record: Any, *, without: tuple[str, ...] = ()) -> None:
        """Keep the fields of a named tuple, or a dict: numbers, arrays of them, and texts."""
        fields = record if isinstance(record, dict) else record._asdict()
        for name, value in fields.items():
            if name in without:
                continue
            if value is None or isinstance(value, str):
                self.text(case, name, str(value))
                continue
            array = np.asarray(value)
            if array.dtype.kind in "biuf":
                self.numbers(case, name, range(array.size), array)
            else:
                self.text(case, name, str(value))

    def document(self, case: str, answer: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> None:
        """Keep every number and text of nested dicts and lists, by its path in them."""
        for quantity, value in answer.items():
            if quantity not in without:
                self._leaves(case, str(quantity), (), value, without)

    def _leaves(
        self, case: str, quantity: str, path: tuple[str, ...], value: Any, without: tuple[str, ...]
    ) -> None:
        argument = " ".join(path)
        if isinstance(value, list | tuple) and len(value) > FEW and {*map(type, value)} <= {int, float}:
            self.many(f"{case}, {argument}" if path else case, quantity, value)
        elif isinstance(value, Mapping | list | tuple):
            inner = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name, each in inner:
                if name not in without:
                    self._leaves(case, quantity, (*path, str(name)), each, without)
        elif isinstance(value, int | float | np.generic):
            self.numbers(case, quantity, [argument], [value])
        else:
            self.text(case, quantity, str(value), argument)

    def refusal(self, case: str, call: Callable[[], Any]) -> None:
        """Keep the type of the error that a question is answered with, or that there is none."""
        try:
            call()
        except FastroofError as error:
            self.text(case, "error", type(error).__name__)
        else:
            self.text(case, "error", "none")


class Difference(NamedTuple):
    """An answer that is not the recorded one; None if it is missing."""

    recorded: Answer | None
    current: Answer | None

    @property
    def relative(self) -> float:
        """How far apart two numbers are, of the recorded; inf where one is no number."""
        if self.recorded is None or self.current is None:
            return float("inf")
        before, after = self.recorded.value, self.current.value
        if before is None or after is None or not before:
            return float("inf")
        return abs(after / before - 1.0)

    @property
    def key(self) -> tuple[str, str, str]:
        """What the answers are to."""
        one = self.recorded or self.current
        assert one is not None
        return one.key

    @property
    def quantity(self) -> str:
        return self.key[1]

    def __str__(self) -> str:
        shown = [
            "nothing" if a is None else a.text if a.value is None else f"{a.value!r}"
            for a in (self.recorded, self.current)
        ]
        return f"{', '.join(filter(None, self.key))}: {shown[0]} was recorded, now it is {shown[1]}"


def differences(recorded: list[Answer], current: list[Answer]) -> list[Difference]:
    """Compare answers by what they are answers to."""
    for listed in (recorded, current):
        twice = [key for key, times in Counter(answer.key for answer in listed).items() if times > 1]
        assert not twice, f"two answers to one question: {twice[:3]}"
    now = {answer.key: answer for answer in current}
    found = [Difference(answer, now.pop(answer.key, None)) for answer in recorded]
    found += [Difference(None, answer) for answer in now.values()]
    return [d for d in found if d.recorded is None or d.current is None or not d.recorded.agrees(d.current)]


def recorded_cases(group: str) -> set[str]:
    """Read the cases of a group's record."""
    return set(pq.read_table(FOLDER / f"{group}.parquet", columns=["case"])["case"].unique().to_pylist())


def read_answers(group: str, part: str = "") -> list[Answer]:
    """Read a group's record, or the cases of one of its parts, which begin with its name and a colon."""
    table = pq.read_table(FOLDER / f"{group}.parquet")
    if part:
        table = table.filter(pc.starts_with(table["case"].cast(pa.string()), f"{part}: "))
    columns = table.to_pydict()
    return [Answer(*row) for row in zip(*(columns[name] for name in Answer._fields), strict=True)]


def write_answers(group: str, listed: list[Answer]) -> int:
    """Write a group's record, and return its bytes."""
    columns = [pa.array([row[i] for row in listed], field.type) for i, field in enumerate(SCHEMA)]
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{group}.parquet"
    # numbers are bits that no dictionary shortens, but equal ones stand side by side in many plans
    pq.write_table(pa.table(columns, SCHEMA), path, compression="zstd", compression_level=19)
    return path.stat().st_size
