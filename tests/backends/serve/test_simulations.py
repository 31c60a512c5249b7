"""Simulations over the servers: the answers of fastroof.simulate, within limits; what is refused undrawn."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import tracemalloc

import pytest

import fastroof
from fastroof.backends.serve import simulations
from fastroof.backends.serve.answers import ServedPlans, answer_line
from fastroof.backends.serve.limits import ServeLimits
from fastroof.errors import BackendError, FastroofError, StoppedError
from fastroof.simulation import Workload, load_trace

LIMITS = ServeLimits(
    max_simulated_requests=2000,
    max_answered_requests=50,
    max_simulated_steps=200_000,
    max_message_bytes=2**22,
    max_simulated_bytes=2**24,
)
TRACE = {"arrival_s": [3, 0.5, 0], "input_tokens": [2000, 100, 7], "output_tokens": [5, 1, 200]}
WORKLOAD = {"rate": 20, "requests": 40, "isl": "lognormal:500:0.5", "osl": 30, "seed": 7}
OPTIONS_GIVEN = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "num_gpu_blocks": 2000, "block_size": 16}


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, engine="vllm", max_num_batched_tokens=1024, max_num_seqs=64
    )


@pytest.fixture(scope="module")
def served(plan):
    return ServedPlans({"eight": plan}, LIMITS)


def reply_to(served, request):
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
    reply = reply_to(
        served, {"id": 1, "simulate": {"workload": WORKLOAD, "options": options, "requests": True}}
    )
    expected = fastroof.simulate(plan, Workload(**WORKLOAD).trace(), **options)
    assert reply.keys() == {"id", "summary", "requests"}
    assert reply["summary"] == json.loads(json.dumps(as_json(expected.summary())))
    assert reply["requests"] == as_json(expected.requests.to_pydict())
    assert len(reply["requests"]["ttft_ms"]) == 40


def test_a_trace_is_answered_in_its_order(plan, served):
    options = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
    reply = reply_to(served, {"simulate": {"trace": TRACE, "options": options, "requests": True}})
    expected = fastroof.simulate(plan, load_trace(TRACE), **options)
    assert reply["requests"] == as_json(expected.requests.to_pydict())
    assert reply["requests"]["input_tokens"] == TRACE["input_tokens"]
    # an output of one token has no time between tokens
    assert reply["requests"]["tpot_ms"][1] is None
    short = reply_to(served, {"simulate": {"trace": TRACE, "options": options}})
    assert short == {"id": None, "summary": reply["summary"]}


WRONG = {
    "no object": (5, '"simulate" must be an object, got 5'),
    "neither": ({}, 'needs either "trace" or "workload"'),
    "both": ({"trace": TRACE, "workload": WORKLOAD}, 'needs either "trace" or "workload"'),
    "another member": ({"workload": WORKLOAD, "output": "/etc/x"}, "no key 'output'"),
    "requests no flag": ({"workload": WORKLOAD, "requests": 1}, "valid boolean"),
    "options no object": ({"workload": WORKLOAD, "options": [1]}, "options\" must be an object"),
    "another option": ({"workload": WORKLOAD, "options": {"requests_path": "x"}}, "no key 'requests_path'"),
    "a trace by its path": ({"trace": "/etc/passwd"}, "trace\" must be an object"),
    "another column": ({"trace": {**TRACE, "hash_ids": [1]}}, "no key 'hash_ids'"),
    "a column of words": ({"trace": {**TRACE, "arrival_s": ["1", "2"]}}, "must be a valid number"),
    "a column of lists": ({"trace": {**TRACE, "arrival_s": [[1], [2], [3]]}}, "must be a valid number"),
    "a column of flags": ({"trace": {**TRACE, "input_tokens": [True] * 3}}, "must be a valid integer"),
    "a huge integer": ({"trace": {**TRACE, "input_tokens": [10**40, 1, 1]}}, "input_tokens"),
    "uneven columns": ({"trace": {**TRACE, "input_tokens": [1]}}, "input_tokens"),
    "a long column": ({"trace": {**TRACE, "arrival_s": ["x"] * 2001}}, "2001 requests are more"),
    "a long trace": (
        {"trace": dict.fromkeys(("arrival_s", "input_tokens", "output_tokens"), [1] * 51), "requests": True},
        "51 requests are more than the 50",
    ),
    "a column less": ({"trace": {"arrival_s": [1]}}, "needs \"input_tokens\""),
    "no rows": ({"trace": {"arrival_s": [], "input_tokens": [], "output_tokens": []}}, "request"),
    "a prompt of nothing": ({"trace": {**TRACE, "input_tokens": [0, 1, 1]}}, "input_tokens"),
    "a workload by its path": ({"workload": "file:/etc/passwd"}, "workload\" must be an object"),
    "lengths of a file": ({"workload": {**WORKLOAD, "isl": "file:/etc/passwd"}}, "whole number"),
    "lengths of a list": ({"workload": {**WORKLOAD, "osl": [1, 2]}}, "whole number"),
    "hours of a file": ({"workload": {"hourly": "file:/etc/passwd"}}, "hourly\" must be a valid list"),
    "seconds of a file": ({"workload": {**WORKLOAD, "think_s": "file:/etc/passwd"}}, "seconds, exponential"),
    "no distribution": ({"workload": {**WORKLOAD, "osl": "lognormal:x"}}, "osl"),
    "another argument": ({"workload": {**WORKLOAD, "path": "x"}}, "no key 'path'"),
    "a private argument": ({"workload": {**WORKLOAD, "_drawn": {}}}, "no key '_drawn'"),
    "no rate": ({"workload": {"requests": 5}}, "rate"),
    "too many hours": ({"workload": {"hourly": [1] * 8785}}, "at most 8784 items"),
    "too many requests by the hour": ({"workload": {"hourly": [1]}}, "3600 requests are more"),
    "too many clients": ({"workload": {"clients": 2001, "requests": 9}}, "2001 clients are more"),
    "too many requests": ({"workload": {**WORKLOAD, "requests": 2001}}, "more than the 2000"),
    "too many to return": ({"workload": {**WORKLOAD, "requests": 51}, "requests": True}, "more than the 50"),
    "too many steps": (
        {"workload": {**WORKLOAD, "requests": 2000, "osl": 101}, "options": OPTIONS_GIVEN},
        "more than the 200000",
    ),
    "too many chunks": (
        {"workload": {**WORKLOAD, "requests": 1000, "isl": 3000},
         "options": {"max_num_batched_tokens": 16, "max_num_seqs": 4}},
        "more than the 200000",
    ),
    "too many looks": (
        {"workload": {**WORKLOAD, "requests": 400, "osl": 2},
         "options": {**OPTIONS_GIVEN, "replicas": 64, "router": "least_kv"}},
        "400 requests on 64 replicas may take 20[0-9]{4} steps, more than the 200000",
    ),
    "too many replicas": (
        {"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "replicas": 10**6}}, "more than the 200000",
    ),
    "no replicas": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "replicas": 0}}, "greater than or"),
    "too much memory": (
        {"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "replicas": 1024}}, "bytes, more than",
    ),
    "beyond the plan": ({"workload": WORKLOAD, "options": OPTIONS_GIVEN | {"max_num_seqs": 65}}, "seqs 65"),
    "no size": ({"workload": WORKLOAD, "options": {"max_num_seqs": "many"}}, "max_num_seqs"),
    "blocks of nothing": ({"workload": WORKLOAD, "options": {"block_size": 0}}, "block_size"),
    "no room": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "num_gpu_blocks": 2}}, "block"),
    "no time": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "time_scale": -1.0}}, "time_scale"),
    "a list": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "timeout_s": [1]}}, "timeout_s"),
    "no router": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "router": "x"}}, "router"),
    "an order in a list": ({"workload": WORKLOAD, "options": {**OPTIONS_GIVEN, "order": ["mixed"]}}, "order"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_an_error(plan, served, name):
    message, words = WRONG[name]
    with pytest.raises(FastroofError, match=words):
        served.answer({"simulate": message})
    reply = reply_to(served, {"id": "x", "simulate": message})
    assert reply.keys() == {"id", "error", "message"}
    assert issubclass(getattr(fastroof.errors, reply["error"]), FastroofError)
    assert "the server failed" not in reply["message"]


UNBOUNDED = ServeLimits(max_simulated_steps=2**60, max_simulated_bytes=2**40, max_call_s=1)
LONG = {
    "workload": {"rate": 1e5, "requests": 2**20, "isl": 1, "osl": 2},
    "options": {**OPTIONS_GIVEN, "replicas": 4096, "router": "least_kv"},
}


def test_a_line_ends_at_the_time_limit(plan):
    served = ServedPlans({"eight": plan}, UNBOUNDED)
    fastroof.simulate(plan, TRACE, **{**OPTIONS_GIVEN, "replicas": 2, "router": "least_kv"})  # compiled
    spent = time.process_time()
    reply = json.loads(answer_line(served, json.dumps({"id": 7, "simulate": LONG}).encode()))
    assert reply["message"] == "the call took longer than the limit of 1 s (max_call_s): ask for less"
    assert time.process_time() - spent < 30
    assert "latency_us" in reply_to(served, {"batch_size": 1, "kv_len": 9})
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_simulate_goes_with_nothing_else(served):
    reply = reply_to(served, {"simulate": {"workload": WORKLOAD}, "batch_size": 1, "kv_len": 1})
    assert (reply["error"], "simulate" in reply["message"]) == ("BackendError", True)
    reply = reply_to(served, {"plan": "nine", "simulate": {"workload": WORKLOAD}})
    assert "no plan 'nine'" in reply["message"]


def test_what_a_server_takes_is_described(served):
    limits = served.describe()["limits"]
    assert limits["max_simulated_requests"] == 2000
    assert limits["max_answered_requests"] == 50
    assert limits["max_simulated_steps"] == 200_000
    assert limits["max_call_s"] == 60


# Before anything is drawn


def refuse_to_draw(*_):
    raise AssertionError("drawn before it was refused")


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ({"hourly": [27777]}, "99997200 requests are more than the 1048576"),
        ({"hourly": [11111]}, "39999600 requests are more than the 1048576"),
        ({"rate": 1, "requests": 10**8}, "100000000 requests are more than the 1048576"),
        ({"rate": 1, "requests": 10**30}, "requests"),
        ({"clients": 10**8, "requests": 2}, "100000000 clients are more than the 1048576"),
    ],
)
def test_a_workload_that_is_too_large_is_refused_before_it_is_drawn(plan, monkeypatch, workload, words):
    served = ServedPlans({"eight": plan})
    monkeypatch.setattr(Workload, "_at_unit_rate", refuse_to_draw)
    with pytest.raises(FastroofError, match=words):
        served.answer({"simulate": {"workload": workload}})


def test_a_file_that_never_ends_or_never_answers_is_not_opened(served, tmp_path):
    """A call that opened the FIFO would wait for its writer, and one that read zeros would fill memory."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, "/dev/zero", "/etc/hostname"):
        for name in ("hourly", "isl", "osl", "cached_tokens", "growth_tokens", "turns"):
            reply = reply_to(served, {"simulate": {"workload": {"rate": 1, name: f"file:{path}"}}})
            assert reply["error"] == "BackendError"
            assert reply["message"].startswith(('"simulate.workload.', f'"{name}" must be'))


# What a call takes


@pytest.fixture(scope="module")
def of_ranks(h100):
    return fastroof.compile_plan(
        "qwen3-30b-a3b", "h100", h100, engine="vllm", dp=4, ep=4, max_num_batched_tokens=1024,
        max_num_seqs=64, allow_modelled=True,
    )  # fmt: skip


QUEUED = {"rate": 1e4, "requests": 100, "isl": 10, "osl": 2**14}
FOUR = {"max_num_batched_tokens": 512, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("workload", "options", "requests"),
    [
        (QUEUED, FOUR, False),
        (QUEUED, FOUR | {"replicas": 2}, False),
        (QUEUED, FOUR | {"replicas": 2, "router": "least_kv"}, True),
        ({"rate": 300, "requests": 20_000, "isl": 9, "osl": 2}, FOUR, True),
        ({"rate": 300, "requests": 20_000, "isl": 9, "osl": 2, "turns": 4}, FOUR, False),
    ],
)
def test_the_price_in_memory_covers_all_ranks_replicas_and_runs(
    of_ranks, monkeypatch, workload, options, requests
):
    message = {"simulate": {"workload": workload, "options": options, "requests": requests}}
    prices = []

    def priced(*arguments):
        prices.append(price(*arguments))
        return prices[-1]

    price = simulations.simulated_bytes
    monkeypatch.setattr(simulations, "simulated_bytes", priced)
    served = ServedPlans({"ranks": of_ranks}, ServeLimits())
    small = {**workload, "requests": 9}
    served.answer({"simulate": {"workload": small, "options": options, "requests": requests}})
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        served.answer(message)
        peak_bytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak_bytes <= prices[-1] <= 4 * peak_bytes
    refused = ServedPlans({"ranks": of_ranks}, ServeLimits(max_simulated_bytes=peak_bytes // 2))
    with pytest.raises(BackendError, match=r"would take [0-9]+ bytes, more than"):
        refused.answer(message)


def test_over_http(plan):
    pytest.importorskip("uvicorn")
    from fastroof.backends.serve.client import PlanClient
    from fastroof.backends.serve.http_server import HttpServer

    options = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
    with (
        HttpServer({"eight": plan}, limits=LIMITS) as server,
        PlanClient(f"http://127.0.0.1:{server.port}") as client,
    ):
        reply = client.ask({"simulate": {"workload": WORKLOAD, "options": options, "requests": True}})
        expected = fastroof.simulate(plan, Workload(**WORKLOAD).trace(), **options)
        assert reply["requests"] == as_json(expected.requests.to_pydict())
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
