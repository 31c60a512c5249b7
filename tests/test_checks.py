"""How messages show what was given, and that none of them fails over it."""

import ast
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.checks import is_number, is_whole_number, one_line, one_of, shown, whole_number

ROOT = Path(fastroof.__file__).parent.parent


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


UNWRITABLE = {
    "an integer": 10**5000,
    "a negative integer": -(10**5000),
    "an integer in a list": [10**5000],
    "an integer in a dict": {"a": (10**5000,)},
    "lists within lists": nested(100_000),
    "a broken object": Broken(),
    "a broken object in an array": np.array([Broken()], object),
}


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text() | st.binary(), st.lists))
def test_what_can_be_written_is_shown_by_its_beginning(value):
    whole = repr(value)
    if len(whole) <= 60:
        assert shown(value) == whole
    if not isinstance(value, str | bytes):  # whose quotes go by what is in them
        assert shown(value) == whole[:60]
    assert len(shown(value)) <= 60


@pytest.mark.parametrize(
    "given", [np.ones((4, 3)), np.ma.array([1, 2]), pa.array([1, 2]), pa.table({"a": [1]})], ids=type
)
def test_what_has_several_lines_is_shown_in_one(given):
    assert "\n" in repr(given)
    assert 9 < len(shown(given)) <= 60
    assert "\n" not in shown(given)


def test_third_party_messages_have_one_line():
    assert one_line(ValueError("no\n  column: 3\n")) == "no column: 3"
    assert len(one_line(ValueError("x" * 500))) == 200


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_cannot_be_written_has_words(what):
    assert 3 < len(shown(UNWRITABLE[what])) < 60


def test_a_list_of_millions_is_not_written_out():
    class Element:
        written = 0

        def __repr__(self) -> str:
            Element.written += 1
            return "one"

    shown([Element()] * 10**6)
    assert Element.written <= 60


@pytest.mark.parametrize("what", UNWRITABLE)
def test_no_check_fails_over_a_value(what):
    assert not is_number(UNWRITABLE[what])
    assert not is_whole_number(UNWRITABLE[what], 1, 2**63)
    with pytest.raises(fastroof.FastroofError, match="threads must be a whole number"):
        whole_number("threads", UNWRITABLE[what], 1, 64)


def test_a_duration_is_not_a_number_though_numpy_calls_it_an_integer():
    for duration in (np.timedelta64(3), np.timedelta64(3, "s"), np.timedelta64("nat")):
        assert not is_whole_number(duration)
        assert not is_number(duration)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_numbers_of_any_width_are_distinguished_without_a_warning(kind):
    assert is_number(kind(3))
    assert not is_number(kind("inf"))
    assert not is_number(kind("nan"))


WORDS = ("local", "ray")
NO_WORDS = ([], ["ray"], {"ray": 1}, np.array(["ray", "x"]), np.array("ray"), b"ray", None, 1, "", 10**5000)


@pytest.mark.parametrize("value", NO_WORDS, ids=shown)
def test_anything_but_some_words_is_refused(value):
    assert one_of("engine", "ray", WORDS) == "ray"
    with pytest.raises(fastroof.FastroofError, match="engine must be one of local, ray, got "):
        one_of("engine", value, WORDS)


def test_messages_show_values_in_that_one_way():
    places = []
    for package in ("fastroof", "kernels_bench"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text("utf-8")
            if "!r:" not in text:  # parsing all takes seconds
                continue
            for node in ast.walk(ast.parse(text)):
                cut = (
                    isinstance(node, ast.FormattedValue) and node.conversion == ord("r") and node.format_spec
                )
                if cut and path.name != "checks.py":
                    places.append(f"{path}:{node.lineno}")
    assert places == []
