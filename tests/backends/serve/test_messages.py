"""Messages of JSON: what Python answers, whatever a message is; and what the schemas say of them."""

from __future__ import annotations

import json

import pytest

import fastroof
from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.message_forms import FORM_OF, FORMS, message_schemas
from fastroof.backends.serve.messages import answer_message, parse_message, take_id
from fastroof.errors import BackendError

STEPS = {
    "decode": {"batch_size": [64, 1], "kv_len": 4096},
    "requests": {"requests": [[[100, 0], [1, 4095]], [[1, 100]]]},
    "ragged": {"new_tokens": [100, 1, 1], "context_len": [0, 4095, 100], "offsets": [0, 2, 3]},
}
MESSAGES = STEPS | {
    "simulate": {"simulate": {"workload": {"rate": 5, "requests": 20}, "options": {"max_num_seqs": 16}}},
    "describe": {"describe": True},
}


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_tokens=2048, max_seqs=64)


@pytest.fixture(scope="module")
def served(plan):
    return ServedPlans({"eight": plan})


def test_every_form_has_a_message_here_and_none_is_two():
    assert {form.name for form in FORMS} == MESSAGES.keys()
    for name, message in MESSAGES.items():
        assert FORM_OF[frozenset(message)].name == name
    assert all(form.needs.keys() <= members for members, form in FORM_OF.items())


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_and_replies_are_as_the_schemas_say(served, name):
    jsonschema = pytest.importorskip("jsonschema")
    schemas = message_schemas()
    message = {"id": 5, "v": 1, "plan": "eight", **MESSAGES[name]}
    jsonschema.Draft202012Validator.check_schema(schemas[name])
    jsonschema.validate(message, schemas[name])
    assert take_id(message) == 5
    reply = json.loads(json.dumps({"id": 5, **answer_message(served, message)}, allow_nan=False))
    jsonschema.validate(reply, schemas[f"{name}_reply"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**message, "other": 1}, schemas[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_version_1_is_what_is_meant_without_one(served, name):
    assert answer_message(served, {"v": 1, **MESSAGES[name]}) == answer_message(served, dict(MESSAGES[name]))


@pytest.mark.parametrize("version", [0, 2, True, 1.0, "1", None, [], {}])
@pytest.mark.parametrize("name", ["decode", "describe"])
def test_another_version_is_refused_with_those_that_are_spoken(served, version, name):
    with pytest.raises(BackendError, match=r'"v" must be a version .* which is 1; got'):
        answer_message(served, {"v": version, **MESSAGES[name]})


def test_an_unknown_form_of_another_version_is_told_the_version(served):
    with pytest.raises(BackendError, match=r"which is 1; got 2"):
        answer_message(served, {"v": 2, "forecast": True})
    with pytest.raises(BackendError, match=r"an object needs .* got \['forecast', 'v'\]"):
        answer_message(served, {"v": 1, "forecast": True})


def test_an_id_is_a_string_or_an_integer():
    assert [take_id({"id": given}) for given in ("x", 5, None)] == ["x", 5, None]
    assert take_id({}) is None
    for wrong in (True, 1.5, [], {}):
        with pytest.raises(BackendError, match="id must be"):
            take_id({"id": wrong})


def test_parsing_takes_objects_alone():
    assert parse_message(b'{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    for text in (b"[]", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000):
        with pytest.raises(BackendError, match="a message must be"):
            parse_message(text)
