"""Answers are those on record, to the last bit but for the exceptions in ``tests.frozen.record``."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.frozen import product as shop
from tests.frozen.answers import FOLDER, Answer, Answers, differences, read_answers, recorded_cases
from tests.frozen.record import GROUPS, PARTS, summary

SECONDS = ("lookups-holdout", "sweeps-of-deployments")
"""Groups that take seconds; tests of holdouts and sweeps compare the same code with naive versions."""


PARTS_OF_SIMULATIONS = [(group, part) for group in PARTS if "simulations" in group for part in PARTS[group]]
OTHER_PARTS = [(group, part) for group in PARTS if "simulations" not in group for part in PARTS[group]]


def compare(recorded: list[Answer], current: Answers, group: str) -> None:
    found = differences(recorded, current.listed)
    assert not found, summary(group, found) + (
        "\nif it is meant: python -m tests.frozen.record " + group + ", and explain it in the commit"
    )


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=[pytest.mark.slow] if group in SECONDS else []) for group in GROUPS]
)
def test_answers_are_those_on_record(group):
    compare(read_answers(group), GROUPS[group](), group)


@pytest.mark.parametrize(("group", "part"), PARTS_OF_SIMULATIONS)
def test_simulations_are_those_on_record(group, part):
    compare(read_answers(group, part), PARTS[group][part](), group)


@pytest.mark.parametrize(("group", "part"), OTHER_PARTS)
def test_parts_are_those_on_record(group, part):
    compare(read_answers(group, part), PARTS[group][part](), group)


def test_every_record_is_of_a_group():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted([*GROUPS, *PARTS])


def test_every_recorded_case_is_of_a_part():
    for group, parts in PARTS.items():
        assert {case.partition(": ")[0] for case in recorded_cases(group)} == {*parts}, group


def test_every_preset_is_there_split_every_way():
    for model in shop.PRESETS:
        splits = product(
            (1, 2, 4, 8), ("bf16", "fp8", "fp8_block"), ("bf16", "fp8"), ("kernels", "vllm", "trtllm")
        )
        assert recorded_cases(f"plans-{model}") == {
            f"{model}, tp={tp}, dtype={dtype}, kv_dtype={kv_dtype}, runtime={runtime}"
            for tp, dtype, kv_dtype, runtime in splits
        }


def test_a_last_bit_is_a_difference():
    answers = Answers()
    answers.numbers("a case", "a quantity", ["exact"], [0.1])
    answers.is_exact = False
    answers.numbers("a case", "a quantity", ["close"], [0.1])
    answers.text("a case", "a text", "as it was")
    recorded = answers.listed
    assert not differences(recorded, recorded)

    def changed(place: int, **fields: object) -> list[Answer]:
        return [one._replace(**fields) if i == place else one for i, one in enumerate(recorded)]

    next_up = 0.1 + 2.0**-56
    assert next_up != 0.1
    assert len(differences(recorded, changed(0, value=next_up))) == 1
    assert not differences(recorded, changed(1, value=next_up))
    assert len(differences(recorded, changed(1, value=0.1 + 1e-12))) == 1
    assert len(differences(recorded, changed(2, text="as it is"))) == 1
    assert len(differences(recorded, recorded[1:])) == 1
    assert len(differences(recorded[1:], recorded)) == 1
    assert len(differences(changed(0, value=0.0), changed(0, value=-0.0))) == 1
    assert not differences(changed(0, value=float("nan")), changed(0, value=float("nan")))


def test_many_numbers_are_compared_as_one_answer():
    values = np.geomspace(1.0, 1e6, 90).reshape(3, 30)
    swapped = values[::-1]
    one_off = np.where(values == values[1, 7], 1.00001 * values, values)
    for is_exact, nearby in ((True, np.nextafter(values, 0.0)), (False, values * (1.0 + 1e-9))):
        recorded = Answers(is_exact=is_exact)
        recorded.many("a case", "times", values)
        for changed in (swapped, one_off, nearby, values.reshape(30, 3)):
            current = Answers(is_exact=is_exact)
            current.many("a case", "times", changed)
            assert differences(recorded.listed, current.listed)
    close = Answers(is_exact=False)
    close.many("a case", "times", np.nextafter(values, 0.0))
    assert not differences(recorded.listed, close.listed)


def test_every_leaf_of_a_document_is_an_answer():
    document = {
        "requests": 3,
        "busy": np.float64(0.5),
        "is_tie": True,
        "nothing": None,
        "times": {"p50": 1.5, "by turn": [{"mean": 1.0}, {"mean": 2.0, "relative_error": 0.1}]},
        "many": [0.25 * i for i in range(100)],
        "words": {"name": "a", "basis": "left out"},
        "empty": [],
    }
    answers = Answers()
    answers.document("a case", document, without=("basis",))
    kept = {
        (one.quantity, one.argument): one.text if one.value is None else one.value for one in answers.listed
    }
    assert kept.pop(("many", "(100,)"))
    assert kept == {
        ("requests", ""): 3.0,
        ("busy", ""): 0.5,
        ("is_tie", ""): 1.0,
        ("nothing", ""): "None",
        ("times", "p50"): 1.5,
        ("times", "by turn 0 mean"): 1.0,
        ("times", "by turn 1 mean"): 2.0,
        ("times", "by turn 1 relative_error"): 0.1,
        ("words", "name"): "a",
    }
    assert [one.argument for one in answers.listed if not one.is_exact] == ["by turn 1 relative_error"]
