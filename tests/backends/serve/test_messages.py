"""Messages of JSON: what Python answers, whatever a message is; and what the schemas say of them."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

import fastroof
from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.forms import FORM_OF, FORMS, message_schemas
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.messages import answer_message, parse_message, take_id
from fastroof.errors import BackendError, FastroofError
from fastroof.simulation.pools import Link, takes_us, whole_kv_bytes

STEPS = {
    "decode": {"batch_size": [64, 1], "kv_len": 4096},
    "requests": {"requests": [[[100, 0], [1, 4095]], [[1, 100]]]},
    "ragged": {"new_tokens": [100, 1, 1], "context_len": [0, 4095, 100], "offsets": [0, 2, 3]},
}
PROMPTS = {
    "prefill": {"new_tokens": [100, 200], "context_len": 50, "batch_size": [1, 2]},
    "verify": {"batch_size": [8, 1], "kv_len": 4096, "tokens": 4},
}
SIZES = {"max_num_batched_tokens": 2048, "max_num_seqs": 16}
MESSAGES = (
    STEPS
    | PROMPTS
    | {
        "explain": {"explain": [[100, 0], [1, 4095]]},
        "memory": {"memory": True},
        "pipeline": {"pipeline": [[[1, 999]] * 4] * 3},
        "kv_transfer": {"kv_transfer": {"prompts": [1000, 1], "bytes_per_s": 50e9, "latency_us": 3}},
        "simulate": {"simulate": {"workload": {"rate": 5, "requests": 20}, "options": SIZES}},
        "describe": {"describe": True},
    }
)


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_tokens=2048, max_seqs=64, engine="kernels")


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
    with pytest.raises(BackendError, match='"v" must be the version of the protocol, which is 1; got'):
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
        with pytest.raises(
            BackendError, match=r"a message (must be an object|is not JSON|has more than 64 nested lists)"
        ):
            parse_message(text)


# What is asked beside times: the same as Python's


KINDS = {
    "dense": ("llama-3.1-8b", {}),
    "experts, ranks": ("qwen3-30b-a3b", {"dp": 2, "ep": 2}),
    "latent attention": ("deepseek-v3", {"tp": 8}),
    "windows": ("gemma-3-12b", {}),
    "states": ("bamba-9b", {}),
    "stages": ("llama-3.1-70b", {"tp": 2, "pp": 2}),
}


@pytest.fixture(scope="module", params=KINDS)
def asked(request, h100):
    model, options = KINDS[request.param]
    plan = fastroof.compile_plan(
        model,
        "h100",
        h100,
        max_tokens=1024,
        max_seqs=32,
        allow_modelled=True,
        **{"engine": "kernels", **options},
    )
    served = ServedPlans({"one": plan})

    def ask(**message):
        return json.loads(json.dumps(answer_message(served, message), allow_nan=False))

    return plan, ask


def test_errors_and_stages_are_pythons(asked):
    plan, ask = asked
    requests = [[[100, 0], [1, 4095]], [[1, 100]] * 8]
    batch = fastroof.StepBatch.from_requests(requests)
    reply = ask(requests=requests, errors=True, stages=True)
    assert reply["latency_us"] == plan.step_us(batch).tolist()
    assert reply["relative_error"] == plan.step_error(batch).tolist()
    assert reply["stage_us"] == plan.stage_times_us(batch).tolist()
    reply = ask(batch_size=[8, 1], kv_len=2000, errors=True)
    assert reply["latency_us"] == plan.decode_us([8, 1], 2000).tolist()
    assert reply["relative_error"] == plan.decode_error([8, 1], 2000).tolist()
    reply = ask(new_tokens=100, context_len=[0, 50], batch_size=2, errors=True)
    chunks = fastroof.StepBatch([100] * 4, [0, 0, 50, 50], [0, 2, 4])
    assert reply["latency_us"] == plan.prefill_us(100, [0, 50], 2).tolist()
    assert reply["relative_error"] == plan.step_error(chunks).tolist()


def test_a_step_by_operator_is_pythons(asked):
    plan, ask = asked
    explained, reply = (
        plan.explain([(100, 0), (1, 4095)], with_error=True),
        ask(explain=[[100, 0], [1, 4095]], errors=True),
    )
    assert reply["total_us"] == explained.total_us
    assert reply["relative_error"] == explained.relative_error
    assert [(one["name"], one["total_us"], one["origin"]) for one in reply["operators"]] == [
        (one.name, one.total_us, one.origin) for one in explained.operators
    ]


def test_memory_and_pipelines_are_pythons(asked):
    plan, ask = asked
    reply = ask(memory=True)
    assert reply["memory"] == plan.memory.facts()
    assert [one["memory"] for one in reply["stages"]] == [one.memory.facts() for one in plan.stages]
    assert ask(memory=True, max_seqs=4)["memory"] == plan.memory_of(max_seqs=4).facts()
    [described] = ask(describe=True)["plans"]
    assert described["memory"] == reply["memory"]
    micro = [[[1, 999]] * 4, [[100, 0]]]
    batch, reply = fastroof.StepBatch.from_requests(micro), ask(pipeline=micro)
    assert reply["pipeline_us"] == plan.pipeline_us(batch)
    assert reply["cycle_us"] == plan.cycle_us(batch)
    assert reply["stage_us"] == plan.stage_times_us(batch).tolist()


def test_transfers_are_pythons(asked):
    plan, ask = asked
    sizes = np.array([1, 1000, 5000])
    reply = ask(kv_transfer={"prompts": sizes.tolist(), "bytes_per_s": 50e9, "latency_us": 10})
    assert reply["transfer_us"] == takes_us(plan, plan, sizes, Link(50e9, 10.0)).tolist()
    assert reply["kv_bytes"] == whole_kv_bytes(plan).kv_bytes(sizes).tolist()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"requests": [[[1, 1]]], "errors": 1}, '"errors" must be true or false'),
        ({**PROMPTS["verify"], "errors": True}, "needs"),
        ({"explain": {"batch_size": 1}}, '"explain" must be'),
        ({"memory": 1}, '"memory" must be true'),
        ({"memory": True, "max_tokens": 0.5}, "whole number"),
        ({"kv_transfer": {}}, "prompts"),
        ({"kv_transfer": {"prompts": [0]}}, "from 1 to"),
        ({"kv_transfer": {"prompts": [1], "bytes_per_s": 0}}, "above 0"),
        ({"kv_transfer": {"prompts": [1], "latency_us": -1}}, "at least 0"),
        ({"kv_transfer": {"prompts": [1], "decode_plan": "none"}}, "no plan"),
        ({"v": 2, "memory": True}, "1"),
    ],
)
def test_wrong_questions_are_refused(served, message, says):
    with pytest.raises(FastroofError, match=says):
        answer_message(served, message)


@pytest.mark.parametrize(
    "message",
    [
        {"explain": [[1, 1]] * 5},
        {"pipeline": [[[1, 1]]] * 4},
        {"batch_size": [1] * 4, "kv_len": 9, "errors": True},
        {"requests": [[[1, 1]] * 5], "stages": True},
        {"new_tokens": 9, "batch_size": 5, "errors": True},
    ],
)
def test_what_costs_more_than_times_has_limits_of_its_own(plan, message):
    few = ServeLimits(max_detailed_steps=3, max_detailed_requests=4)
    with pytest.raises(BackendError, match=r"are more than the [34] of"):
        answer_message(ServedPlans({"eight": plan}, few), message)


def test_mutated_messages_are_answered_or_refused(plan):
    """Members dropped, swapped between messages, replaced by what is none: some of all forms are answered."""
    rng = np.random.default_rng(20)
    served = ServedPlans({"eight": plan}, ServeLimits(max_simulated_requests=100, max_simulated_steps=50_000))
    junk = [None, True, -1, 0, 1.5, 2**40, 2**70, "x", [], {}, [[]], [[1]], [[[1, 2, 3]]], [[[1, None]]]]
    junk += [{"workload": {"rate": 5, "requests": each}} for each in (1, 0, -1, 2.5, "x", 10**9)]
    every = [pair for message in MESSAGES.values() for pair in message.items()]
    every += [("errors", True), ("stages", True), ("v", 1), ("v", 2), ("plan", 0), ("plan", "nine")]
    answered: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for _ in range(4000):
        form = list(MESSAGES)[rng.integers(len(MESSAGES))]
        message = dict(MESSAGES[form])
        for _ in range(rng.integers(1, 3)):
            what = rng.integers(3)
            if what == 0 and message:
                del message[list(message)[rng.integers(len(message))]]
            elif what == 1:
                name, value = every[rng.integers(len(every))]
                message[name] = value
            elif message:
                message[list(message)[rng.integers(len(message))]] = junk[rng.integers(len(junk))]
        found = FORM_OF.get(frozenset(message))
        try:
            json.dumps(answer_message(served, message), allow_nan=False)
            assert found is not None
            answered[found.name] += 1
        except FastroofError:
            refused[form] += 1
    assert answered.keys() == refused.keys() == MESSAGES.keys()
