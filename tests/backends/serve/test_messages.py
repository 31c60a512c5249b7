"""Messages of JSON: Python's answers, whatever a message is; what is refused, and in which words."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import fastroof
from fastroof.backends.serve.answers import ServedPlans, answer_text
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.messages import MESSAGES as KINDS_OF_MESSAGES
from fastroof.backends.serve.messages import id_of, kind_of, parse_message
from fastroof.backends.serve.simulations import Options, Workload
from fastroof.errors import BackendError, FastroofError
from fastroof.simulation.fleet import POOL_OPTIONS
from fastroof.simulation.pools import POOLED_ROUTINGS, Link, takes_us, whole_kv_bytes

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
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=2048, max_num_seqs=64, engine="kernels"
    )


@pytest.fixture(scope="module")
def served(plan):
    return ServedPlans({"eight": plan})


def test_every_kind_has_a_message_here():
    assert {kind.kind for kind in KINDS_OF_MESSAGES} == MESSAGES.keys()
    for name, message in MESSAGES.items():
        assert kind_of(message).kind == name


@pytest.mark.parametrize("name", MESSAGES)
def test_the_schema_of_a_model_takes_what_the_model_takes(served, name):
    jsonschema = pytest.importorskip("jsonschema")
    message = {"id": 5, "v": 1, "plan": "eight", **MESSAGES[name]}
    schema = kind_of(message).model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(message, schema)
    json.dumps(served.answer(message), allow_nan=False)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**message, "other": 1}, schema)
    with pytest.raises(BackendError, match="has no key 'other'; valid: "):
        served.answer({**message, "other": 1})


@pytest.mark.parametrize("name", MESSAGES)
def test_version_1_is_the_default(served, name):
    assert served.answer({"v": 1, **MESSAGES[name]}) == served.answer(dict(MESSAGES[name]))


@pytest.mark.parametrize("version", [0, 2, True, 1.0, "1", None, [], {}])
@pytest.mark.parametrize("message", [MESSAGES["decode"], {"forecast": True}])
def test_another_version_is_refused_before_anything_else(served, version, message):
    with pytest.raises(BackendError, match='"v" must be 1, the version of the protocol; got'):
        served.answer({"v": version, **message})


def test_an_id_is_a_string_or_an_integer():
    assert [id_of({"id": given}) for given in ("x", 5, None)] == ["x", 5, None]
    assert id_of({}) is None
    for wrong in (True, 1.5, [], {}):
        with pytest.raises(BackendError, match="id must be"):
            id_of({"id": wrong})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[]", "must be an object"),
        (b"{", "is not JSON"),
        (b'{"a": NaN}', "NaN is not valid JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "more than 64 nested lists"),
        (b'{"decode": [64, 4096], "decode": [1, 1]}', "the key 'decode' is given twice"),
        (b'{"simulate": {"workload": {"rate": 1, "rate": 2}}}', "the key 'rate' is given twice"),
    ],
)
def test_only_objects_are_parsed_and_each_key_once(text, words):
    assert parse_message(b'{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    with pytest.raises(BackendError, match=words):
        parse_message(text)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"simulate": {"workload": {"prompt_len": 100}}},
            "\"workload\" has no key 'prompt_len'; valid: growth_tokens, rate, ramp, clients, osl",
        ),
        (
            {"simulate": {"workload": {"rate": 1}, "options": {"max_sequences": 1}}},
            "\"options\" has no key 'max_sequences'; valid: max_num_seqs, ",
        ),
        ({"simulate": {"worklod": {}}}, "\"simulate\" has no key 'worklod'; valid: workload, "),
        ({"kv_len": 9, "batchsize": 1}, "has no key 'batchsize'; valid: batch_size, "),
        ({"batchsize": 1}, "a message has no key 'batchsize'; valid: batch_size, "),
        ({"kv_len": 9}, 'a message with kv_len needs "batch_size"; it takes '),
        ({}, "a message needs one of describe, simulate, "),
        (
            {"kv_transfer": {"prompts": [1], "bandwidth": 1}},
            "\"kv_transfer\" has no key 'bandwidth'; valid: ",
        ),
    ],
)
def test_a_wrong_key_names_the_valid_ones_the_closest_first(served, message, words):
    with pytest.raises(BackendError) as raised:
        served.answer(message)
    assert str(raised.value).startswith(words) or words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_models_list_arguments_of_the_library_and_none_takes_a_path():
    assert Workload.model_fields.keys() <= inspect.signature(fastroof.Workload).parameters.keys()
    arguments = inspect.signature(fastroof.simulate).parameters.keys() | {*POOL_OPTIONS}
    assert Options.model_fields.keys() <= arguments
    assert not {"kv_tiers", "autoscaler", "prefix_cache", "trace"} & Options.model_fields.keys()
    assert set(get_args(Options.model_fields["router"].annotation)) == set(POOLED_ROUTINGS)


PATHS = ["file:/etc/hostname", "/etc/hostname", "file:/dev/zero", "../x", "x.csv"]


@pytest.mark.parametrize("path", PATHS)
def test_no_member_of_any_message_is_read_as_a_path(served, monkeypatch, path):
    """Put a path into every place of every message: nothing is opened, and the answer is an error."""

    def opened(*given, **more):
        raise AssertionError(f"a message made the server open {given}")

    served.answer(MESSAGES["simulate"])  # imports what it needs
    for name in ("open", "read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, opened)
    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr("os.open", opened)
    drawn = {"rate": 5, "requests": 3}
    given = [{"workload": {**drawn, name: 1}} for name in Workload.model_fields.keys() - {"name"}]
    given += [{"workload": drawn, "options": {name: 1}} for name in Options.model_fields]
    named = {str(number): {"simulate": message} for number, message in enumerate(given)}
    for name, message in {**MESSAGES, **named}.items():
        for where in places(message):
            reply = answer_text(served, json.dumps(replaced(message, where, path)).encode()).reply
            assert "error" in reply, (name, where)
            assert "the server failed" not in reply["message"]


def places(tree, before=()):
    """Return the paths of all members and elements of a message."""
    found = [before] if before else []
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        found += places(value, (*before, key))
    return found


def replaced(tree, where, value):
    """Return a copy of a message with another value in one place."""
    if not where:
        return value
    copy = tree.copy()
    copy[where[0]] = replaced(tree[where[0]], where[1:], value)
    return copy


# Answers other than times: the same as Python's


KINDS = {
    "dense": ("llama-3.1-8b", {}),
    "experts, ranks": ("qwen3-30b-a3b", {"dp": 2, "ep": 2}),
    "latent attention": ("deepseek-v3", {"tp": 8}),
    "windows": ("gemma-3-12b", {}),
    "states": ("bamba-9b", {}),
    "stages": ("llama-3.1-70b", {"tp": 2, "pp": 2}),
}


@pytest.fixture(scope="module", params=KINDS)
def served_plan(request, h100):
    model, options = KINDS[request.param]
    plan = fastroof.compile_plan(
        model,
        "h100",
        h100,
        max_num_batched_tokens=1024,
        max_num_seqs=32,
        allow_modelled=True,
        **{"engine": "kernels", **options},
    )
    served = ServedPlans({"one": plan})

    def answer(**message):
        return json.loads(json.dumps(served.answer(message), allow_nan=False))

    return plan, answer


def test_errors_and_stages_are_pythons(served_plan):
    plan, answer = served_plan
    requests = [[[100, 0], [1, 4095]], [[1, 100]] * 8]
    batch = fastroof.StepBatch.from_requests(requests)
    reply = answer(requests=requests, errors=True, stages=True)
    assert reply["latency_us"] == plan.step_us(batch).tolist()
    assert reply["relative_error"] == plan.step_error(batch).tolist()
    assert reply["stage_us"] == plan.stage_times_us(batch).tolist()
    reply = answer(batch_size=[8, 1], kv_len=2000, errors=True)
    assert reply["latency_us"] == plan.decode_us([8, 1], 2000).tolist()
    assert reply["relative_error"] == plan.decode_error([8, 1], 2000).tolist()
    reply = answer(new_tokens=100, context_len=[0, 50], batch_size=2, errors=True)
    chunks = fastroof.StepBatch([100] * 4, [0, 0, 50, 50], [0, 2, 4])
    assert reply["latency_us"] == plan.prefill_us(100, [0, 50], 2).tolist()
    assert reply["relative_error"] == plan.step_error(chunks).tolist()


def test_a_step_by_operator_is_pythons(served_plan):
    plan, answer = served_plan
    explained, reply = (
        plan.explain([(100, 0), (1, 4095)], with_error=True),
        answer(explain=[[100, 0], [1, 4095]], errors=True),
    )
    assert reply["total_us"] == explained.total_us
    assert reply["relative_error"] == explained.relative_error
    assert [(one["name"], one["total_us"], one["origin"]) for one in reply["operators"]] == [
        (one.name, one.total_us, one.origin) for one in explained.operators
    ]


def test_memory_and_pipelines_are_pythons(served_plan):
    plan, answer = served_plan
    reply = answer(memory=True)
    assert reply["memory"] == plan.memory.facts()
    assert [one["memory"] for one in reply["stages"]] == [one.memory.facts() for one in plan.stages]
    assert answer(memory=True, max_num_seqs=4)["memory"] == plan.memory_of(max_num_seqs=4).facts()
    [described] = answer(describe=True)["plans"]
    assert described["memory"] == reply["memory"]
    micro = [[[1, 999]] * 4, [[100, 0]]]
    batch, reply = fastroof.StepBatch.from_requests(micro), answer(pipeline=micro)
    assert reply["pipeline_us"] == plan.pipeline_us(batch)
    assert reply["cycle_us"] == plan.cycle_us(batch)
    assert reply["stage_us"] == plan.stage_times_us(batch).tolist()


def test_transfers_are_pythons(served_plan):
    plan, answer = served_plan
    sizes = np.array([1, 1000, 5000])
    reply = answer(kv_transfer={"prompts": sizes.tolist(), "bytes_per_s": 50e9, "latency_us": 10})
    assert reply["transfer_us"] == takes_us(plan, plan, sizes, Link(50e9, 10.0)).tolist()
    assert reply["kv_bytes"] == whole_kv_bytes(plan).kv_bytes(sizes).tolist()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"requests": [[[1, 1]]], "errors": 1}, '"errors" must be a valid boolean, got 1'),
        ({**PROMPTS["verify"], "errors": True}, "has no key 'errors'"),
        ({"explain": {"batch_size": 1}}, '"explain" needs "kv_len"'),
        ({"explain": 1}, '"explain" must be a list'),
        ({"memory": 1}, '"memory" must be true, got 1'),
        (
            {"memory": True, "max_num_batched_tokens": 0.5},
            '"max_num_batched_tokens" must be a valid integer, got 0.5',
        ),
        ({"kv_transfer": {}}, "prompts"),
        ({"kv_transfer": 1}, '"kv_transfer" must be an object, got 1'),
        ({"kv_transfer": {"prompts": [0]}}, "from 1 to"),
        ({"kv_transfer": {"prompts": [1], "bytes_per_s": 0}}, "greater than 0"),
        ({"kv_transfer": {"prompts": [1], "latency_us": -1}}, "greater than or equal to 0"),
        ({"kv_transfer": {"prompts": [1], "decode_plan": "none"}}, "no plan"),
        ({"v": 2, "memory": True}, "1"),
        ({"memory": True, "\ud800": 1}, "must be a valid string"),
        ({"simulate": {"workload": {"\udfff": 1}}}, "must be a valid string"),
    ],
)
def test_wrong_questions_are_refused(served, message, reason):
    with pytest.raises(FastroofError, match=reason):
        served.answer(message)


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
        ServedPlans({"eight": plan}, few).answer(message)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_micro_batches_count_once_a_stage(h100, pp):
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, pp=pp, max_num_batched_tokens=64, max_num_seqs=64, engine="kernels"
    )
    served, most = ServedPlans({"one": plan}, ServeLimits(max_detailed_steps=8)), 8 // pp
    stage_us = served.answer({"pipeline": [[[1, 99]]] * most})["stage_us"]
    assert sum(len(times) for times in stage_us) == 8
    with pytest.raises(BackendError, match=f"{most + 1} steps.* are more than the 8 of a message"):
        served.answer({"pipeline": [[[1, 99]]] * (most + 1)})
