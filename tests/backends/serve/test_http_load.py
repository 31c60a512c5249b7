"""What a server over HTTP does with messages that cost much, clients that leave, and bodies that are slow."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import fastroof
from fastroof.backends.serve.answers import ServedPlans
from fastroof.backends.serve.limits import ServeLimits

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from fastroof.backends.serve import http_calls
from fastroof.backends.serve.http_server import HttpServer
from tests.backends.serve.test_http import LINES, ONE, metric, post
from tests.http_replies import JSON, send
from tests.reference.waiting import is_idle, until

OPTIONS = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
SMALL = {"rate": 100, "requests": 100, "isl": 100, "osl": 10}
MANY = {"rate": 100_000, "requests": 2**20, "isl": 1, "osl": 2}


def simulating(workload: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"id": 7, "simulate": {"workload": workload, "options": {**OPTIONS, **options}}}


LONG = simulating(MANY, replicas=4096, router="least_kv")
"""A message of some 200 bytes whose answer takes minutes."""

UNBOUNDED = ServeLimits(max_simulated_steps=2**60, max_simulated_bytes=2**40, max_call_s=600)


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, engine="vllm", max_num_batched_tokens=1024, max_num_seqs=64
    )
    # compiled before anything is timed
    for options in ({}, {"replicas": 2}, {"replicas": 2, "router": "least_kv"}):
        fastroof.simulate(plan, fastroof.Workload(**SMALL).trace(), **OPTIONS, **options)
    return plan


@pytest.fixture(scope="module")
def server(plan: fastroof.StepPlan) -> Iterator[HttpServer]:
    with HttpServer({"eight": plan}) as running:
        yield running


def health(server: HttpServer) -> dict[str, Any]:
    return dict(send(server, "GET", "/healthz").read)


def sent_off(server: HttpServer, message: Any, kind: dict[str, str]) -> socket.socket:
    """Post a message and do not wait for its answer."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    client = socket.create_connection(("127.0.0.1", server.port), 60)
    head = f"POST /message HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: {kind['Content-Type']}\r\n\r\n".encode() + body)
    return client


# What it costs


@pytest.mark.parametrize(
    "message",
    [
        LONG,
        simulating(MANY, replicas=256, router="power_of_two"),
        simulating({**SMALL, "requests": 2**20, "osl": 300}),
        simulating({**SMALL, "isl": 2**20, "requests": 2**18}, max_num_batched_tokens=64),
        simulating({"clients": 100, "requests": 10_000, "isl": 9, "osl": 99}, replicas=999),
        simulating(MANY, replicas=4096),
    ],
    ids=["issue", "routed", "outputs", "chunks", "closed", "round robin"],
)
def test_what_would_cost_too_much_is_refused_at_once(server: HttpServer, message: dict[str, Any]) -> None:
    spent = time.process_time()
    reply = post(server, message)
    assert (reply.status, reply.read["id"]) == (400, 7)
    most = ServeLimits().max_simulated_steps
    assert f"more than the {most} of a simulation here (max_simulated_steps)" in reply.read["message"]
    assert time.process_time() - spent < 30


def test_a_call_ends_at_its_time_limit(plan: fastroof.StepPlan) -> None:
    limits = ServeLimits(max_simulated_steps=2**60, max_simulated_bytes=2**40, max_call_s=1)
    with HttpServer({"eight": plan}, limits=limits) as server:
        spent = time.process_time()
        reply = post(server, LONG)
        assert time.process_time() - spent < 30
        assert (reply.status, reply.read["id"], reply.read["error"]) == (503, 7, "StoppedError")
        assert "longer than the limit of 1 s (max_call_s)" in reply.read["message"]
        until(is_idle)
        assert health(server) == {"status": "ok", "calls": 0, "abandoned": 0, "timed_out": 1}
        assert metric(server, "fastroof_timed_out_calls_total") == 1
        assert post(server, ONE).status == 200


def test_a_stream_of_lines_is_one_call(plan: fastroof.StepPlan) -> None:
    limits = ServeLimits(max_simulated_steps=2**60, max_simulated_bytes=2**40, max_call_s=1)
    lines = b"\n".join(json.dumps(message).encode() for message in [ONE, *[LONG] * 50, ONE])
    with HttpServer({"eight": plan}, limits=limits) as server:
        spent = time.process_time()
        first, second = map(json.loads, send(server, "POST", "/message", lines, LINES).body.splitlines())
        assert time.process_time() - spent < 30
        assert "latency_us" in first
        assert (second["id"], second["error"]) == (7, "StoppedError")
        until(lambda: health(server) == {"status": "ok", "calls": 0, "abandoned": 0, "timed_out": 1})


# Who leaves


@pytest.mark.parametrize("kind", [JSON, LINES], ids=["message", "lines"])
def test_work_ends_when_its_client_leaves(plan: fastroof.StepPlan, kind: dict[str, str]) -> None:
    message: Any = LONG if kind is JSON else b"\n".join([json.dumps(LONG).encode()] * 9)
    with HttpServer({"eight": plan}, limits=UNBOUNDED) as server:
        client = sent_off(server, message, kind)
        until(lambda: health(server)["calls"] == 1)
        time.sleep(0.5)
        assert health(server)["calls"] == 1
        client.close()
        until(lambda: health(server)["calls"] == 0)
        until(is_idle)
        assert health(server) == {"status": "ok", "calls": 0, "abandoned": 1, "timed_out": 0}
        assert metric(server, "fastroof_abandoned_calls_total") == 1


@pytest.mark.slow
def test_clients_that_leave_do_not_stop_the_service(plan: fastroof.StepPlan) -> None:
    """As many costly messages as there may be calls, sent off again and again."""
    limits = ServeLimits(max_simulated_steps=2**60, max_simulated_bytes=2**40, max_calls=4)
    with HttpServer({"eight": plan}, limits=limits) as server:
        for kind in (JSON, LINES):
            for _ in range(3):
                clients = [sent_off(server, LONG, kind) for _ in range(4)]
                time.sleep(0.1)
                for client in clients:
                    client.close()
                until(lambda: post(server, ONE).status == 200)
        until(lambda: health(server)["calls"] == 0)
        assert health(server)["abandoned"] > 0
        until(is_idle)


def test_a_server_that_stops_leaves_no_work_behind(plan: fastroof.StepPlan) -> None:
    server = HttpServer({"eight": plan}, limits=UNBOUNDED)
    with sent_off(server, LONG, JSON):
        until(lambda: health(server)["calls"] == 1)
        assert not server.drain(0.1)
    until(is_idle)


# Who is slow


def test_a_body_is_part_of_its_calls_time(plan: fastroof.StepPlan) -> None:
    """A slow body holds one call, until its time is over."""
    with HttpServer({"eight": plan}, limits=ServeLimits(max_calls=1, max_call_s=1)) as server:
        with socket.create_connection(("127.0.0.1", server.port), 60) as client:
            head = b"POST /message HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: 1000000\r\n\r\n{")
            reply = client.makefile("rb").read()
        assert reply.startswith(b"HTTP/1.1 408")
        assert b"longer than the 1 s of a call (max_call_s)" in reply
        assert post(server, ONE).status == 200
        assert health(server) == {"status": "ok", "calls": 0, "abandoned": 0, "timed_out": 1}


def test_work_that_never_ends_is_counted_and_holds_up_nothing(
    plan: fastroof.StepPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many calls as there may be, none of which notices that its time is over."""
    may_go = threading.Event()
    answer = ServedPlans.answer

    def waits(served: ServedPlans, document: dict[str, Any]) -> Any:
        if "memory" in document:
            may_go.wait(60)
        return answer(served, document)

    monkeypatch.setattr(ServedPlans, "answer", waits)
    monkeypatch.setattr(http_calls, "GRACE_S", 0.2)
    with HttpServer({"eight": plan}, limits=ServeLimits(max_calls=2, max_call_s=1)) as server:
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(lambda _: post(server, {"memory": True}), range(2)))
        assert [(reply.status, reply.read["error"]) for reply in replies] == [(503, "StoppedError")] * 2
        assert health(server) == {"status": "ok", "calls": 0, "abandoned": 0, "timed_out": 2}
        assert post(server, ONE).status == 200
        with sent_off(server, {"memory": True}, JSON):
            until(lambda: health(server)["calls"] == 1)
        until(lambda: health(server) == {"status": "ok", "calls": 0, "abandoned": 1, "timed_out": 3})
        assert server.drain()
    may_go.set()


@pytest.mark.slow
def test_others_are_answered_while_a_long_reply_is_made(plan: fastroof.StepPlan) -> None:
    body = json.dumps({"batch_size": [64] * 2**20, "kv_len": 4096}).encode()
    with HttpServer({"eight": plan}) as server:
        thread = threading.Thread(target=lambda: post(server, body))
        thread.start()
        answers = 0
        while thread.is_alive():
            assert health(server)["status"] == "ok"
            answers += 1
        # a reply that held all others would let through one before it and one behind it
        assert answers > 4
