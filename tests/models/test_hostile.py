"""Hostile files: whatever a place of one becomes, a model loads and answers, or raises a ModelError."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.errors import ModelError
from fastroof.models import Layout, load_model
from fastroof.models.execution import Execution
from fastroof.models.named import PRESETS, preset_config
from tests.models.test_families import CASES

FILES: dict[str, dict[str, Any]] = {
    **{name: file for name, (file, _, _) in CASES.items()},
    **{name: preset_config(name) for name in PRESETS},
}
NUMBERS = (0, -1, 1, 2, 7, 2**31 - 1, 2**31, 10**400, 0.5, -0.0, float("nan"), float("inf"))
TEXTS = ("", "8", "sliding_attention", "*")
LISTS: tuple[list[Any], ...] = ([], [0], [[]], [1, "2"], ["full_attention"])
OBJECTS: tuple[dict[str, Any], ...] = ({}, {"no_op": True}, {"quant_method": "fp8"})
VALUES = (None, True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS)

Place = tuple[Any, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every place of a file: its fields, theirs, and some entries of lists."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for index in {0, len(value) - 1} if value else ():
            yield from places(value[index], (*at, index))


PLACES = [(name, place) for name, file in FILES.items() for place in places(file)]


def changed(name: str, place: Place, how: Any) -> dict[str, Any]:
    """The file with one place removed (``...``), doubled (``"twice"`` of a list) or replaced."""
    file = copy.deepcopy(FILES[name])
    holder: Any = file
    for key in place[:-1]:
        holder = holder[key]
    if how is ...:
        del holder[place[-1]]
    elif how == "twice" and isinstance(holder[place[-1]], list):
        holder[place[-1]] = holder[place[-1]] * 2
    else:
        holder[place[-1]] = how
    return file


def answers(file: dict[str, Any]) -> None:
    """Load a file, and read all that a plan reads of it."""
    try:
        model = load_model(file)
    except ModelError:
        return
    assert 0 < model.active_parameters <= model.num_parameters
    assert model.num_layers == sum(group.count for group in model.layers) > 0
    assert model.kv_bytes_per_token(Layout(), "bf16") >= 0
    for kind in model.kinds:
        assert kind.activation_width(model.hidden, Layout()) >= 0
        kind.calls(model.hidden, Layout(), Execution())
    assert hash(model) == hash(copy.deepcopy(model))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from((*VALUES, ..., "twice")))
def test_one_place_may_be_anything(at: tuple[str, Place], how: Any) -> None:
    answers(changed(*at, how))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(sorted(FILES)), st.data())
def test_a_part_of_one_family_may_stand_in_another(at: tuple[str, Place], other: str, data: Any) -> None:
    name, place = at
    donor: Any = FILES[name]
    for key in place:
        donor = donor[key]
    target = data.draw(st.sampled_from([p for n, p in PLACES if n == other]))
    answers(changed(other, target, copy.deepcopy(donor)))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.sampled_from(sorted(FILES)))
def test_two_files_may_be_one(one: str, other: str) -> None:
    answers({**FILES[one], **FILES[other]})
    answers({**FILES[one], "text_config": FILES[other]})


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_are_json_and_load_as_they_are(name: str) -> None:
    assert load_model(json.loads(json.dumps(FILES[name]))) == load_model(FILES[name])
