"""Simulations over the servers: what fastroof.simulate answers, within limits; wrong messages end nothing."""

from __future__ import annotations

import json
import math
import threading
import time

import pytest

import fastroof
from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.messages import answer_line
from fastroof.backends.serve.questions import OPTIONS, simulation_answer
from fastroof.errors import BackendError, FastroofError, StoppedError
from fastroof.simulation import Workload, load_trace

LIMITS = ServeLimits(
    max_simulated_requests=2000,
    max_answered_requests=50,
    max_simulated_steps=200_000,
    max_message_bytes=2**22,
)
TRACE = {"arrival_s": [3, 0.5, 0], "input_tokens": [2000, 100, 7], "output_tokens": [5, 1, 200]}
WORKLOAD = {"rate": 20, "requests": 40, "input_tokens": "lognormal:500:0.5", "output_tokens": 30, "seed": 7}
OPTIONS_GIVEN = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "num_gpu_blocks": 2000, "block_size": 16}


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm", max_tokens=1024, max_seqs=64)


@pytest.fixture(scope="module")
def served(plan):
    return ServedPlans({"eight": plan}, LIMITS)


def asked(served, request):
    (line,) = answer_line(served, json.dumps(request).encode()).splitlines()
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON"))


def as_json(value):
    """What JSON holds of an answer in Python."""
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@pytest.mark.parametrize(
    "options", [{}, OPTIONS_GIVEN, {"replicas": 2}, {"async_scheduling": False, "timeout_s": 0.5}]
)
def test_a_workload_has_the_answer_of_python(plan, served, options):
    options = {"max_num_batched_tokens": 1024, "max_num_seqs": 64} | options
    said = asked(served, {"id": 1, "simulate": {"workload": WORKLOAD, "options": options, "requests": True}})
    expected = fastroof.simulate(plan, Workload(**WORKLOAD).trace(), **options)
    assert said.keys() == {"id", "summary", "requests"}
    assert said["summary"] == json.loads(json.dumps(as_json(expected.summary())))
    assert said["requests"] == as_json(expected.requests.to_pydict())
    assert len(said["requests"]["ttft_ms"]) == 40


def test_a_trace_is_answered_in_its_order(plan, served):
    options = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
    said = asked(served, {"simulate": {"trace": TRACE, "options": options, "requests": True}})
    expected = fastroof.simulate(plan, load_trace(TRACE), **options)
    assert said["requests"] == as_json(expected.requests.to_pydict())
    assert said["requests"]["input_tokens"] == TRACE["input_tokens"]
    # an output of one token has no time between tokens
    assert said["requests"]["tpot_ms"][1] is None
    short = asked(served, {"simulate": {"trace": TRACE, "options": options}})
    assert short == {"id": None, "summary": said["summary"]}


WRONG = {
    "no object": (5, "must be an object"),
    "neither": ({}, "give one of the two"),
    "both": ({"trace": TRACE, "workload": WORKLOAD}, "give one of the two"),
    "another member": ({"workload": WORKLOAD, "output": "/etc/x"}, "must be an object"),
    "requests no flag": ({"workload": WORKLOAD, "requests": 1}, "true or false"),
    "options no object": ({"workload": WORKLOAD, "options": [1]}, '"options" must be'),
    "another option": ({"workload": WORKLOAD, "options": {"requests_path": "x"}}, '"options" must be'),
    "a trace by its path": ({"trace": "/etc/passwd"}, '"trace" must be'),
    "another column": ({"trace": {**TRACE, "hash_ids": [1]}}, '"trace" must be'),
    "a column of words": ({"trace": {**TRACE, "arrival_s": ["1", "2", "3"]}}, "list of numbers"),
    "a column of lists": ({"trace": {**TRACE, "arrival_s": [[1], [2], [3]]}}, "list of numbers"),
    "a column of flags": ({"trace": {**TRACE, "input_tokens": [True, True, True]}}, "list of numbers"),
    "a huge integer": ({"trace": {**TRACE, "input_tokens": [10**40, 1, 1]}}, "input_tokens"),
    "uneven columns": ({"trace": {**TRACE, "input_tokens": [1]}}, "input_tokens"),
    "a column less": ({"trace": {"arrival_s": [1]}}, "input_tokens"),
    "no rows": ({"trace": {"arrival_s": [], "input_tokens": [], "output_tokens": []}}, "request"),
    "a prompt of nothing": ({"trace": {**TRACE, "input_tokens": [0, 1, 1]}}, "input_tokens"),
    "a workload by its path": ({"workload": "file:/etc/passwd"}, '"workload" must be'),
    "lengths of a file": ({"workload": {**WORKLOAD, "input_tokens": "file:/etc/passwd"}}, "starts with"),
    "lengths of a list": ({"workload": {**WORKLOAD, "output_tokens": [1, 2]}}, "starts with"),
    "no distribution": ({"workload": {**WORKLOAD, "output_tokens": "lognormal:x"}}, "output_tokens"),
    "another argument": ({"workload": {**WORKLOAD, "path": "x"}}, "arguments of Workload"),
    "a private argument": ({"workload": {**WORKLOAD, "_drawn": {}}}, "arguments of Workload"),
    "no rate": ({"workload": {"requests": 5}}, "rate"),
    "too many requests": ({"workload": {**WORKLOAD, "requests": 2001}}, "more than the 2000"),
    "too many to be told": ({"workload": {**WORKLOAD, "requests": 51}, "requests": True}, "more than the 50"),
    "too many steps": (
        {"workload": {**WORKLOAD, "requests": 2000, "output_tokens": 101}, "options": OPTIONS_GIVEN},
        "more than the 200000",
    ),
    "too many chunks": (
        {"workload": {**WORKLOAD, "requests": 1000, "input_tokens": 3000},
         "options": {"max_num_batched_tokens": 16, "max_num_seqs": 4}},
        "more than the 200000",
    ),
    "too many looks": (
        {"workload": {**WORKLOAD, "requests": 400, "output_tokens": 2},
         "options": {**OPTIONS_GIVEN, "replicas": 64, "routing": "least_kv"}},
        "400 requests on 64 replicas may take 205200 steps, more than the 200000",
    ),
    "too many replicas": (
        {"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "replicas": 10**6}}, "more than the 200000",
    ),
    "too much memory": (
        {"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "replicas": 4096}}, "bytes, more than",
    ),
    "beyond the plan": ({"workload": WORKLOAD, "options": OPTIONS_GIVEN | {"max_num_seqs": 65}}, "seqs 65"),
    "no size": ({"workload": WORKLOAD, "options": {"max_num_seqs": "many"}}, "max_num_seqs"),
    "blocks of nothing": ({"workload": WORKLOAD, "options": {"block_size": 0}}, "block_size"),
    "no room": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "num_gpu_blocks": 2}}, "block"),
    "no time": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "time_scale": -1.0}}, "time_scale"),
    "a list": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "timeout_s": [1]}}, "timeout_s"),
    "no router": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "routing": "x"}}, "routing"),
    "an order in a list": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "order": ["mixed"]}}, "order"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_an_error(plan, served, name):
    message, words = WRONG[name]
    with pytest.raises(FastroofError, match=words):
        simulation_answer(plan, message, LIMITS)
    said = asked(served, {"id": "x", "simulate": message})
    assert said.keys() == {"id", "error", "message"}
    assert issubclass(getattr(fastroof.errors, said["error"]), FastroofError)
    assert "the server failed" not in said["message"]


UNBOUNDED = ServeLimits(max_simulated_steps=2**60, max_message_bytes=2**33, max_call_s=1)
LONG = {
    "workload": {"rate": 1e5, "requests": 2**20, "input_tokens": 1, "output_tokens": 2},
    "options": {**OPTIONS_GIVEN, "replicas": 4096, "routing": "least_kv"},
}


def test_a_line_ends_at_the_time_limit(plan):
    served = ServedPlans({"eight": plan}, UNBOUNDED)
    fastroof.simulate(plan, TRACE, **{**OPTIONS_GIVEN, "replicas": 2, "routing": "least_kv"})  # compiled
    spent = time.process_time()
    said = json.loads(answer_line(served, json.dumps({"id": 7, "simulate": LONG}).encode()))["message"]
    assert said == "the call took longer than the limit of 1 s (max_call_s): ask for less"
    assert time.process_time() - spent < 30
    assert "latency_us" in asked(served, {"batch_size": 1, "kv_len": 9})
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_simulate_goes_with_nothing_else(served):
    said = asked(served, {"simulate": {"workload": WORKLOAD}, "batch_size": 1, "kv_len": 1})
    assert (said["error"], "simulate" in said["message"]) == ("BackendError", True)
    said = asked(served, {"plan": "nine", "simulate": {"workload": WORKLOAD}})
    assert "no plan 'nine'" in said["message"]


def test_what_a_server_takes_is_described(served):
    limits = served.describe()["limits"]
    assert limits["max_simulated_requests"] == 2000
    assert limits["max_answered_requests"] == 50
    assert limits["max_simulated_steps"] == 200_000
    assert limits["max_call_s"] == 60


def test_every_option_is_an_argument_of_simulate():
    import inspect

    assert set(OPTIONS) <= inspect.signature(fastroof.simulate).parameters.keys()


def test_over_http(plan):
    pytest.importorskip("uvicorn")
    from fastroof.backends.serve.client import PlanClient
    from fastroof.backends.serve.http_server import HttpServer

    options = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
    with (
        HttpServer({"eight": plan}, limits=LIMITS) as server,
        PlanClient(f"http://127.0.0.1:{server.port}") as client,
    ):
        said = client.ask({"simulate": {"workload": WORKLOAD, "options": options, "requests": True}})
        expected = fastroof.simulate(plan, Workload(**WORKLOAD).trace(), **options)
        assert said["requests"] == as_json(expected.requests.to_pydict())
        with pytest.raises(BackendError, match="more than the 2000"):
            client.ask({"simulate": {"workload": {**WORKLOAD, "requests": 10_000}}})
        with pytest.raises(BackendError, match="no plan 'nine'"):
            client.ask({"plan": "nine", "simulate": {"workload": WORKLOAD}})
    with (
        HttpServer({"eight": plan}, limits=UNBOUNDED) as server,
        PlanClient(f"http://127.0.0.1:{server.port}") as client,
        pytest.raises(StoppedError, match="longer than the limit of 1 s"),
    ):
        client.ask({"simulate": LONG})
