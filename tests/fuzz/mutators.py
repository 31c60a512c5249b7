"""Ways to mutate an input: bytes, text with its values and lines, and trees of JSON or TOML."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 64, 1000, 2**24, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**18,
    10**400, -(2**63), 0.5, 1.5, -0.0, 1e-308, 5e-324, 1e15, 1e300, 1e308, -1e308, float("nan"),
    float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "8", "1e3", "x", "*", "nan", "inf", "null", "true", "a\0b", "\x1b[31m", "é", "\ud800", "日本",
    "..", "/", "../../etc/passwd", "a" * 5000, "%s%n", "{0}", "${x}", "<script>", "bf16", "fp8", "h100",
    "-", "--help",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, *NUMBERS, *TEXTS, [], [0], [[]], [1, "2"], [1, 2, 3], [None], [1] * 3000, ["x"] * 50,
    {}, {"x": 1}, {"": {}}, [{}], {"start": 1, "stop": 8, "factor": 2},
    {"start": 1, "stop": 2**40, "step": 1}, {"a": {"b": {"c": [1]}}},
)  # fmt: skip
HOSTILE_WORDS: tuple[str, ...] = (
    "0", "-1", "1", "2", "true", "false", "null", "nan", "-nan", "inf", "-inf", "NaN", "Infinity", "1e308",
    "-1e308", "1e400", "1e-400", "5e-324", "0x10", "0o7", "1_000", "1__0", "01", "+1", ".5", "5.", "9" * 30,
    "9" * 5000, "9223372036854775807", "9223372036854775808", "-9223372036854775809", "2147483648",
    "16777217", '""', '"x"', "''", '"8"', '"\\u0000"', '"\\ud800"', '"""', "[]", "[[]]", "{}", "[1, 2]",
    '[1, "a"]', "{a = 1}", '{"a": 1}', "[" * 2000, "{" * 50, "1979-05-27", "1979-05-27T07:32:00Z",
    "07:32:00", "#", "\0", "\ufeff", "\x7f", "é", "\r", "\n", "\t", ",", ";", "=", ":", ".", "a.b.c",
    "a." * 2000 + "a", '"a"."b"', "-", "\\", '"', "'", "]", "}", "[a]", "[[a]]", "x" * 3000, "bf16", "fp8",
    "h100", "../x", "1.7976931348623157e308", "4.9e-324", "1e22", "0.1",
)  # fmt: skip
_TOKEN = re.compile(rb"[-+]?\d[\w.+-]*|\"[^\"\n]{0,200}\"|'[^'\n]{0,200}'|[A-Za-z_][\w.-]*")
_ODD_BYTES = (
    b"\0",
    b"\xff",
    b"\xfe\xff",
    b"\xef\xbb\xbf",
    b"\x80",
    b"\xed\xa0\x80",
    b"\r\n",
    b"\x1f\x8b",
    b"PAR1",
)


def mutated_bytes(content: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Flip, set, insert, remove, repeat, cut or splice, one to four times."""
    mutated = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        size = len(mutated)
        at = random.randrange(size + 1)
        match random.randrange(9):
            case 0 if at < size:
                mutated[at] ^= 1 << random.randrange(8)
            case 1 if at < size:
                mutated[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
            case 2:
                mutated[at:at] = random.randbytes(random.choice((1, 2, 4, 8, 40)))
            case 3:
                del mutated[at : at + random.choice((1, 2, 4, 8, 100, 1000))]
            case 4:
                end = at + random.choice((1, 4, 16, 200))
                mutated[at:at] = mutated[at:end] * random.choice((1, 2, 10))
            case 5:
                del mutated[at:]
            case 6 if others:
                other = random.choice(others)
                start = random.randrange(len(other) + 1)
                mutated[at : at + random.randrange(50)] = other[start : start + random.randrange(200)]
            case 7:
                # a number of two, four or eight bytes, where formats keep counts and offsets
                wide = random.choice((2, 4, 8))
                number = random.choice(
                    (0, 1, 2 ** (8 * wide) - 1, 2 ** (8 * wide - 1), random.getrandbits(8 * wide))
                )
                at -= at % wide
                mutated[at : at + wide] = number.to_bytes(wide, random.choice(("little", "big")))
            case _:
                mutated[at:at] = random.choice(_ODD_BYTES)
    return bytes(mutated)


def mutated_text(
    content: bytes, random: Random, others: Sequence[bytes] = (), words: Sequence[str] = HOSTILE_WORDS
) -> bytes:
    """Replace values, and remove, repeat, swap or borrow lines, one to three times; now and then bytes."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        what = random.randrange(10)
        if what < 5:
            tokens = list(_TOKEN.finditer(content))
            if tokens:
                found = random.choice(tokens)
                if random.random() < 0.2:
                    new = random.choice(tokens).group()
                else:
                    new = random.choice(words).encode(errors="surrogatepass")
                content = content[: found.start()] + new + content[found.end() :]
            continue
        if what == 5:
            content = mutated_bytes(content, random, others)
            continue
        lines = content.split(b"\n")
        at = random.randrange(len(lines))
        if what == 6:
            del lines[at]
        elif what == 7:
            lines[at:at] = [lines[at]] * random.choice((1, 1, 2, 30))
        elif what == 8:
            to = random.randrange(len(lines))
            lines[at], lines[to] = lines[to], lines[at]
        elif others:
            lines[at:at] = [random.choice(random.choice(others).split(b"\n"))]
        content = b"\n".join(lines)
    return content


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a tree: its fields, theirs, and the entries of lists."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 8)):
            yield from places(value[index], (*at, index))


def _is_short(value: Any) -> bool:
    """Whether it is a number that floats and texts can hold: others stay as they are."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, float) or value.bit_length() < 1000)


def mutated_tree(
    tree: Any, random: Random, others: Sequence[Any] = (), values: Sequence[Any] = VALUES
) -> Any:
    """Remove, replace, double or move places of a tree, or bring in what another has, one to three times."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        known = list(places(tree))
        if not known:
            return random.choice(values)
        place = random.choice(known)
        holder = tree
        for key in place[:-1]:
            holder = holder[key]
        key = place[-1]
        match random.randrange(9):
            case 0:
                del holder[key]
            case 1 if isinstance(holder[key], list):
                holder[key] = holder[key] * random.choice((2, 2, 50))
            case 2 if isinstance(holder, dict):
                holder[random.choice(("", "x", key * 2 if isinstance(key, str) else "y"))] = holder[key]
            case 3:
                holder[key] = [copy.deepcopy(holder[key])]
            case 4:
                donor = random.choice(others) if others else tree
                theirs = list(places(donor))
                if theirs:
                    for part in random.choice(theirs):
                        donor = donor[part]
                    holder[key] = copy.deepcopy(donor)
            case 5 if _is_short(holder[key]):
                number = holder[key]
                holder[key] = random.choice(
                    (number + 1, -number, number * 1024, str(number), number / 3, number - 1)
                )
            case _:
                holder[key] = copy.deepcopy(random.choice(values))
    return tree
