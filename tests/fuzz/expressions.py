"""Arguments as text that Python evaluates: a case can be read, kept in a file and typed in again."""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import math
import re
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from tests.fuzz.target import SkippedError


class OddInt(int):
    """An int of another class."""


class NoSequence:
    """What looks like a sequence of three and has no items."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("no array")

    def __index__(self) -> int:
        raise TypeError("no index")

    def __iter__(self) -> Any:
        raise TypeError("no items")

    def __len__(self) -> int:
        return 3


def captured(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a call is given: the name ``f`` of cases that are calls."""
    return arguments, options


NAMES: dict[str, Any] = {
    "f": captured,
    "np": np, "pa": pa, "array": array.array, "Decimal": decimal.Decimal, "Fraction": fractions.Fraction,
    "OddInt": OddInt, "NoSequence": NoSequence, "date": datetime.date, "nan": float("nan"),
    "inf": float("inf"),
}  # fmt: skip
ODD = re.split(
    r"\s{2,}",
    """
    None  True  False  1.0  1.5  nan  inf  -inf  1e308  '8'  ''  b'8'  b''  10**400  10**30  2**31
    2**32  2**63  2**64  -2**63  -2**63-1  np.int8(3)  np.uint64(2**64-1)  np.uint64(5)  np.float64(2)
    np.float32(nan)  np.bool_(True)  np.datetime64('2020')  np.timedelta64(3)  np.str_('3')
    np.longdouble(3)  np.float16(7)  []  ()  [1]  (1, 2)  [[1, 2], [3]]  [[]]  {}  {1: 2}  {1, 2}
    object()  Decimal(3)  Fraction(3, 1)  Fraction(1, 2)  bytearray(b'ab')  bytearray(b'')
    memoryview(b'abcdefgh')  memoryview(b'ab')[::-1]  range(1, 4)  iter([1, 2])  map(int, '12')  1j
    complex(1, 0)  Ellipsis  int  str  print  len  np.ma.masked  np.ma.array([1, 2], mask=[0, 1])
    np.ma.array([1, 2])  np.ma.array(3, mask=True)  np.array(3)  np.array(-3)  np.array([], int)
    np.array([], np.float64)  np.zeros((0, 3), int)  np.zeros((2, 0), np.int32)  np.array(['a', 'b'])
    np.array([b'1'])  np.array([1, 2], object)  np.array([1, None], object)
    np.array([10**30, 1], object)  np.array([1, 'x'], object)  np.array([1, 2], '>i4')
    np.array([1, 2], '>i8')  np.array([1, 2], np.uint64)  np.array([2**63, 2**64-1], np.uint64)
    np.array([True, False])  np.array([1.0, 2.0])  np.array([1.0, nan])  np.array([inf, 1], np.float32)
    np.array([1j])  np.array(['2020'], 'M8[D]')  np.array([3], 'm8[s]')  np.zeros(2, 'i4,f8')
    np.zeros(2, [('a', int)])  np.rec.array([(1, 2)])  np.broadcast_to(3, (4,))
    np.broadcast_to(3, 10**6)  np.arange(1, 7)[::-2]  np.arange(1, 13).reshape(3, 4).T
    np.frombuffer(b'\\1\\0\\0\\0\\2\\0\\0\\0', np.int32)
    np.frombuffer(b'x' * 17, np.uint8)[1:].view(np.int64)  np.ones(3, np.int8)  np.ones((1,) * 30, int)
    np.array([1] * 5)[:, None]  array('i', [1, 2])  array('d', [1.0])  array('b', [1, -1])  array('i')
    array('Q', [2**64-1])  pa.array([1, 2])  pa.array([1, None])  pa.scalar(3)  pa.table({'a': [1]})
    OddInt(3)  NoSequence()  [OddInt(3)]  [NoSequence()]  [1, 'a']  ['1']  [None]  [True, False]  [True]
    [1, 2.5]  [1.0]  [10**30]  [2**63]  [-1]  [1] * 2000  date(2020, 1, 1)  'a' * 5000  10**5000
    -(10**5000)  np.void(b'abc')  frozenset([1])  type('X', (int,), {})(3)
    type('X', (np.ndarray,), {})((2,), int)  np.array([[1], [2, 3]], object)  slice(3)  '\\ud800'  '\\0'
    """.strip(),
)
"""What is hardly a size; two spaces between them."""
DTYPES = (
    "int64", "int64", "int32", "int32", "int16", "uint8", "uint32", "uint64", ">i8", ">i4", "object",
    "float64", "int8",
)  # fmt: skip
LAYOUTS = (
    "",
    "",
    "",
    "",
    "[::-1]",
    "[::2]",
    "[None]",
    "[:, None]",
    "[:0]",
    "[:1]",
    ".reshape(1, -1)",
    ".copy('F')",
)
EDGES = (0, -1, 1, 1, 2, 3, 64, 100, 2047, 2048, 2049, 4096, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 + 1, 2**62)


def integer(random: Random, most: int) -> str:
    """Return an integer, mostly one that will do."""
    if random.random() < 0.8:
        return str(random.randint(1, most))
    return str(random.choice((*EDGES, most, most + 1)))


def integer_array(random: Random, most: int, count: int | None = None) -> str:
    """Return an array of integers, mostly of a kind that will do."""
    count = random.choice((0, 1, 2, 3, 5, 40)) if count is None else count
    numbers = [random.randint(1, most) for _ in range(count)]
    if numbers and random.random() < 0.3:
        numbers[random.randrange(count)] = random.choice(EDGES)
    if random.random() < 0.2:
        return repr(numbers)
    dtype = random.choice(DTYPES)
    info = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else None
    if info is not None:
        numbers = [min(max(number, int(info.min)), int(info.max)) for number in numbers]
    return f"np.array({numbers}, {dtype!r}){random.choice(LAYOUTS)}"


def odd(random: Random) -> str:
    """Return something that is hardly an integer."""
    return random.choice(ODD)


def sizes(random: Random, most: int) -> str:
    """Return what might be given for a size."""
    what = random.random()
    if what < 0.45:
        return integer(random, most)
    return integer_array(random, most) if what < 0.7 else odd(random)


def evaluated(text: str, names: dict[str, Any]) -> Any:
    """Evaluate a case; ``names`` holds NAMES.

    Raises
    ------
    SkippedError
        If Python or NumPy cannot make these arguments, which is no fault of the product.
    """
    try:
        return eval(text, names)
    except (SyntaxError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
        raise SkippedError(text) from None


def call_text(name: str, words: dict[str, str]) -> bytes:
    """Write a case that is a call of something by its name."""
    return f"f({name!r}, {', '.join(f'{key}={value}' for key, value in words.items())})".encode()


MOST_POINTS = 2_000_000


def skip_many_points(options: dict[str, Any]) -> None:
    """Raise SkippedError where arrays broadcast to so many points that they are fine, and take long."""
    several = [np.shape(value) for value in options.values() if isinstance(value, np.ndarray)]
    try:
        count = math.prod(np.broadcast_shapes(*several))
    except ValueError:
        return  # the product's to refuse
    if count > MOST_POINTS:
        raise SkippedError
