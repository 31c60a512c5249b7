"""Plans served over HTTP: answers, errors, limits, tokens, metrics, the OpenAPI document, stopping."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import fastroof
from fastroof.backends.serve.answers import ServedPlans, answer_line
from fastroof.backends.serve.limits import ServeLimits, listening_socket
from fastroof.backends.serve.messages import MESSAGES as KINDS
from fastroof.errors import BackendError
from tests.backends.serve.test_messages import MESSAGES
from tests.fuzz.mutators import mutated_text
from tests.http_replies import JSON, Reply, send
from tests.reference.waiting import until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
prometheus = pytest.importorskip("prometheus_client.parser")

from fastroof.backends.serve import http_listener  # noqa: E402
from fastroof.backends.serve.http_about import openapi_document  # noqa: E402
from fastroof.backends.serve.http_server import HttpServer, serve_http  # noqa: E402

LINES = {"Content-Type": "application/jsonl"}
ONE = {"batch_size": 64, "kv_len": 4096}


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=2048, max_num_seqs=64, engine="kernels"
    )


@pytest.fixture(scope="module")
def server(plan: fastroof.StepPlan) -> Iterator[HttpServer]:
    with HttpServer({"eight": plan}) as running:
        yield running


def post(server: HttpServer, message: Any, **headers: str) -> Reply:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return send(server, "POST", "/message", body, {**JSON, **headers})


def metric(server: HttpServer, name: str, **labels: str) -> float:
    text = send(server, "GET", "/metrics").body.decode()
    for family in prometheus.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"no {name} {labels}")


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_answered_as_its_line_would_be(server, plan, name):
    message = {"id": 7, **MESSAGES[name]}
    reply = post(server, message)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    expected = answer_line(ServedPlans({"eight": plan}), json.dumps(message).encode())
    assert reply.body + b"\n" == expected


def test_lines_are_answered_line_by_line(server, plan):
    lines = [json.dumps({"id": i, **message}).encode() for i, message in enumerate(MESSAGES.values())]
    lines += [b"no JSON", b'{"batch_size": 0, "kv_len": 9}']
    served = ServedPlans({"eight": plan})
    expected = b"".join(answer_line(served, line) for line in lines)
    for kind in ("application/jsonl", "application/x-ndjson; charset=utf-8"):
        reply = send(server, "POST", "/message", b"\n \n" + b"\n".join(lines), {"Content-Type": kind})
        assert (reply.status, reply.headers["content-type"]) == (200, "application/jsonl")
        assert reply.body == expected
    assert send(server, "POST", "/message", b"", LINES).body == b""


@pytest.mark.parametrize(
    ("status", "error", "body"),
    [
        (400, "BackendError", b"nothing"),
        (400, "BackendError", b'{"forecast": 1}'),
        (400, "BackendError", b'{"v": 2, "batch_size": 64, "kv_len": 9}'),
        (400, "BackendError", b'{"plan": "nine", "batch_size": 64, "kv_len": 9}'),
        (400, "BatchError", b'{"id": "x", "batch_size": 0, "kv_len": 9}'),
        (400, "PlanRangeError", b'{"batch_size": 65, "kv_len": 9}'),
    ],
)
def test_a_wrong_message_gets_an_error(server, status, error, body):
    reply = post(server, body)
    assert (reply.status, reply.read["error"]) == (status, error)
    assert reply.read["id"] == ("x" if b'"x"' in body else None)


def test_what_is_not_served_is_refused(server):
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/message", 405),
        ("POST", "/metrics", 405),
        ("OPTIONS", "/message", 405),
        ("GET", "/steps", 405),
    ):
        reply = send(server, method, path)
        assert (reply.status, reply.read["error"]) == (status, "BackendError")
        assert "POST /message" in reply.read["message"]
    # what a page of another origin may send without asking
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        reply = send(server, "POST", "/message", json.dumps(ONE), {"Content-Type": kind})
        assert (reply.status, kind in reply.read["message"]) == (415, True)
    assert post(server, ONE, Host="fastroof.example").status == 421
    assert post(server, ONE, Host="localhost:1").status == 200


def test_a_fault_of_the_server_is_named(server, monkeypatch, capfd):
    def fails(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(ServedPlans, "times", fails)
    before = metric(server, "fastroof_messages_total", form="decode", outcome="failed")
    reply = post(server, {"id": 3, **ONE})
    assert (reply.status, reply.read["id"]) == (500, 3)
    assert "the server failed on this message: RuntimeError: out of order" in reply.read["message"]
    assert metric(server, "fastroof_messages_total", form="decode", outcome="failed") == before + 1
    assert "out of order" in capfd.readouterr().err


def test_metrics_count(server, plan):
    counter = "fastroof_messages_total"
    names = [
        (counter, {"form": "decode", "outcome": "answered"}),
        (counter, {"form": "none", "outcome": "refused"}),
    ]
    names += [("fastroof_steps_total", {}), ("fastroof_turned_away_total", {"status": "415"})]
    send(server, "POST", "/message", b"", {"Content-Type": "text/plain"})
    before = [metric(server, name, **labels) for name, labels in names]
    post(server, {"batch_size": [1, 2, 3], "kv_len": 9})
    post(server, b"{}")
    send(server, "POST", "/message", b"", {"Content-Type": "text/plain"})
    after = [metric(server, name, **labels) for name, labels in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 3, 1]
    assert metric(server, "fastroof_message_seconds_count", form="decode") >= 1
    assert metric(server, "fastroof_calls") == 0
    assert metric(server, "fastroof_plan_info", plan="eight", model="llama-3.1-8b", gpu="h100", tp="1") == 1
    assert metric(server, "fastroof_build_info", version=fastroof.__version__, protocol="1") == 1


def test_health_and_description(server, plan):
    health = {"status": "ok", "calls": 0, "abandoned": 0, "timed_out": 0}
    assert send(server, "GET", "/healthz").read == health
    described = send(server, "GET", "/describe").read
    assert described == {"id": None, **ServedPlans({"eight": plan}).describe()}


@pytest.mark.slow
@pytest.mark.parametrize("needs_token", [False, True])
def test_the_document_is_open_api(needs_token):
    validator = pytest.importorskip("openapi_spec_validator")
    document = openapi_document(needs_token)
    validator.validate(document)
    assert ("401" in document["paths"]["/describe"]["get"]["responses"]) == needs_token


@pytest.mark.slow
def test_every_message_and_reply_is_of_the_document(server):
    jsonschema = pytest.importorskip("jsonschema")
    document = send(server, "GET", "/openapi.json").read
    post_of = document["paths"]["/message"]["post"]
    requested = post_of["requestBody"]["content"]["application/json"]["schema"]
    names = [kind["$ref"].rpartition("/")[2] for kind in requested["oneOf"]]
    assert names == [kind.__name__ for kind in KINDS]
    answered = post_of["responses"]["200"]["content"]["application/json"]["schema"]
    refused = post_of["responses"]["400"]["content"]["application/json"]["schema"]
    requested, answered, refused = (
        jsonschema.Draft202012Validator({**document, **schema}) for schema in (requested, answered, refused)
    )
    for message in MESSAGES.values():
        requested.validate(message)
        answered.validate(post(server, message).read)
    refused.validate(post(server, b"{}").read)
    for wrong in (
        {},
        {"batch_size": 0, "kv_len": 9},
        {**ONE, "other": 1},
        {"simulate": {"workload": {"hourly": "file:/etc/hostname"}}},
        {"simulate": {"workload": {"rate": 1, "isl": "file:x"}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            requested.validate(wrong)
    workload = document["components"]["schemas"]["Workload"]["properties"]
    assert workload["hourly"]["description"] == "requests/s in each hour"


# Limits


class Held:
    """A call that waits in the server until it is let go."""

    def __init__(self, server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go = threading.Event()
        self.replies: list[Reply] = []
        answer = ServedPlans.answer

        def waits(served: ServedPlans, document: dict[str, Any]) -> Any:
            if "memory" in document:
                self._may_go.wait(60)
            return answer(served, document)

        monkeypatch.setattr(ServedPlans, "answer", waits)
        self._thread = threading.Thread(target=self._post, args=(server,))
        self._thread.start()
        while not send(server, "GET", "/healthz").read["calls"]:
            time.sleep(0.001)

    def _post(self, server: HttpServer) -> None:
        with suppress(ConnectionError, http.client.HTTPException):
            self.replies.append(post(server, {"memory": True}))

    def abandon(self) -> None:
        self._may_go.set()
        self._thread.join()
        assert not self.replies

    def let_go(self) -> Reply:
        self._may_go.set()
        self._thread.join()
        return self.replies[0]


def test_too_long_a_body_is_refused_before_it_is_read(plan):
    limits = ServeLimits(max_message_bytes=1000, max_line_bytes=100)
    with HttpServer({"eight": plan}, limits=limits) as server:
        assert post(server, b" " * 64 + json.dumps(ONE).encode()).status == 200
        assert post(server, b" " * 101).status == 413
        assert send(server, "POST", "/message", iter([b" " * 60] * 2), JSON).status == 413  # in parts
        assert send(server, "POST", "/message", b" " * 1001, LINES).status == 413
        lines = send(server, "POST", "/message", b"[" * 101 + b"\n" + json.dumps(ONE).encode(), LINES)
        first, second = lines.body.splitlines()
        assert "a message of JSON is longer than the 100 bytes of a line" in json.loads(first)["message"]
        assert "latency_us" in json.loads(second)
        assert send(server, "GET", "/healthz").read["calls"] == 0


def test_replies_to_lines_have_a_longest(plan):
    limits = ServeLimits(max_message_bytes=200)
    with HttpServer({"eight": plan}, limits=limits) as server:
        *answered, last = send(server, "POST", "/message", b'{"memory":true}\n' * 9, LINES).body.splitlines()
    assert 0 < len(answered) < 9
    assert "replies are longer than 200 bytes" in json.loads(last)["message"]


def test_bodies_together_have_room(plan):
    """Three bodies wait for their ends; there is no room for a fourth."""
    limits = ServeLimits(max_calls=4, max_message_bytes=4000, max_line_bytes=900)
    head = b"POST /message HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/jsonl\r\n"
    head += b"Content-Length: 3000\r\n\r\n"
    with HttpServer({"eight": plan}, limits=limits) as server, ExitStack() as held:
        client = held.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
        client.sendall(head + b" " * 2000)
        until(lambda: send(server, "GET", "/healthz").read["calls"] == 1)
        reply = send(server, "POST", "/message", b" " * 2001, LINES)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "other messages take all memory" in reply.read["message"]
        assert post(server, ONE).status == 200
        client.sendall(b" " * 1000)
        assert client.recv(12) == b"HTTP/1.1 200"
        assert send(server, "POST", "/message", b" " * 2001, LINES).status == 200


def test_more_calls_than_may_run_are_refused_and_tried_again(plan, monkeypatch):
    with HttpServer({"eight": plan}, limits=ServeLimits(max_calls=1)) as server:
        held = Held(server, monkeypatch)
        reply = post(server, ONE)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert held.let_go().status == 200
        assert post(server, ONE).status == 200
        assert metric(server, "fastroof_turned_away_total", status="503") == 1


FEW = ServeLimits(max_simulated_requests=100, max_simulated_steps=50_000, max_message_bytes=2**16)


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_with_wrong_bytes_are_answered_or_refused(plan, kind, capfd):
    """Mutate a good message of every kind: its reply has words, and the next is answered."""
    rng = random.Random(f"http {kind}")
    others = [json.dumps(message).encode() for message in MESSAGES.values()]
    met: Counter[int] = Counter()
    with HttpServer({"eight": plan}, limits=FEW) as server:
        for _ in range(30):
            body = mutated_text(json.dumps({"id": 7, **MESSAGES[kind]}).encode(), rng, others)
            reply = post(server, body)
            met[reply.status] += 1
            assert reply.status in {200, 400, 413}, body
            assert reply.status == 200 or reply.read["message"]
            assert b"the server failed" not in reply.body, body
        assert post(server, {"id": 7, **MESSAGES[kind]}).read["id"] == 7
        assert send(server, "GET", "/healthz").read["calls"] == 0
    assert met[400]
    assert capfd.readouterr().err == ""


# Tokens


def test_a_token_is_required(plan):
    with HttpServer({"eight": plan}, token="sesame") as server:
        for given in (
            {},
            {"Authorization": "Bearer sesam"},
            {"Authorization": "sesame"},
            {"Authorization": ""},
        ):
            reply = post(server, ONE, **given)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            for path in ("/describe", "/metrics", "/openapi.json"):
                assert send(server, "GET", path, headers=given).status == 401
        assert send(server, "GET", "/healthz").status == 200
        right = {"Authorization": "Bearer sesame"}
        assert post(server, ONE, Host="fastroof.example", **right).status == 200
        assert b'turned_away_total{status="401"} 16.0' in send(server, "GET", "/metrics", headers=right).body


# Starting, stopping


def test_a_loop_that_dies_before_it_listens_is_reported(plan, monkeypatch):
    """Whatever keeps it from listening, who made the server hears of it, and the port is free again."""

    def dies(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(http_listener.uvicorn.Config, "load", dies)
    before = threading.active_count()
    made: list[BaseException] = []

    def make() -> None:
        try:
            HttpServer({"eight": plan}, port=port)
        except BackendError as error:
            made.append(error)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    thread = threading.Thread(target=make, daemon=True)  # it may wait for ever
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "No space left on device" in str(made[0])
    assert f"127.0.0.1:{port}" in str(made[0])
    assert threading.active_count() == before
    listening_socket("127.0.0.1", port, None).close()


def test_calls_in_flight_are_finished(plan, monkeypatch):
    server = HttpServer({"eight": plan})
    held = Held(server, monkeypatch)
    with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not idle.recv(4096).endswith(b"}"):
            pass
        stopping = pool.submit(server.drain)
        assert idle.recv(1) == b""  # connections without a call are closed
        with pytest.raises(ConnectionError):
            post(server, ONE)
        assert not stopping.done()
        assert held.let_go().status == 200
        assert stopping.result()
    assert server.drain()


def test_draining_ends_though_a_call_does_not(plan, monkeypatch):
    server = HttpServer({"eight": plan})
    held = Held(server, monkeypatch)
    assert not server.drain(0.1)
    with pytest.raises(ConnectionError):
        post(server, ONE)
    held.abandon()


def test_signals_need_the_main_thread(plan):
    errors: list[BaseException] = []

    def run() -> None:
        try:
            serve_http({"eight": plan}, "127.0.0.1", 0)
        except BackendError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.mark.slow
def test_the_command_serves_until_a_signal(plan, tmp_path):
    token = tmp_path / "token"
    token.write_text("sesame\n")
    command = [
        sys.executable,
        "-m",
        "fastroof",
        "serve",
        "llama-3.1-8b,max_num_batched_tokens=512,max_num_seqs=64",
    ]
    with subprocess.Popen(
        [*command, "--http", "127.0.0.1:0", "--token-file", str(token), "--max-steps", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        line = running.stdout.readline()
        port = int(line.partition("http://127.0.0.1:")[2].partition(":")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for sizes, status in (([64], 200), ([64] * 3, 400)):
            message = json.dumps({"batch_size": sizes, "kv_len": 4096})
            connection.request("POST", "/message", message, {**JSON, "Authorization": "Bearer sesame"})
            reply = connection.getresponse()
            assert (reply.status, reply.read() != b"") == (status, True)
        connection.close()
        running.send_signal(signal.SIGTERM)
        rest, error = running.communicate(timeout=60)
        assert (running.returncode, rest, error) == (0, "", "")


def test_without_its_packages_the_command_names_what_to_install(tmp_path):
    script = (
        "import sys; sys.modules['starlette.applications'] = None; sys.argv[1:] = ['serve', 'llama-3.1-8b', "
        "'--http', '127.0.0.1:0']; from fastroof.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path.cwd())
    assert done.returncode == 2
    assert "pip install 'fastroof[http]'" in done.stderr


def test_replies_are_not_held_back(server):
    """Nagle's algorithm would hold a reply's body back until its head is acknowledged."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/healthz")
    connection.getresponse().read()
    held = [each.transport.get_extra_info("socket") for each in server._server.server_state.connections]
    assert held
    assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in held)
    connection.close()
