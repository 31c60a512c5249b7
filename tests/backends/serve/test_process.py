"""``fastroof serve`` as a process: how it starts and ends, what is on its pipes, and its client."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fastroof
from fastroof import StepBatch
from fastroof.backends.serve import frames
from fastroof.backends.serve.client import StdioClient
from fastroof.cli import app
from fastroof.errors import BackendError, BatchError, FastroofError, PlanRangeError

CHECKOUT = Path(__file__).resolve().parents[3]
PLAN = "llama-3.1-8b,max_tokens=512,max_seqs=64"
SERVE = [sys.executable, "-m", "fastroof", "serve", PLAN]
ONE = b'{"id": 1, "batch_size": 64, "kv_len": 4096}\n'
WAIT_S = 60


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm", max_tokens=512, max_seqs=64)


@pytest.fixture(scope="module")
def client():
    with StdioClient([PLAN, "llama-3.1-70b,tp=4,name=seventy"], ["--max-steps", "2000000"]) as client:
        yield client


@contextmanager
def serving(*command, greeting=ONE):
    """A server that has answered once, so that it is past its start."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    server = subprocess.Popen(command or [*SERVE, "--stdio"], bufsize=0, **pipes)
    try:
        server.stdin.write(greeting)
        yield server, server.stdout.readline()
    finally:
        server.kill()
        server.wait()
        for stream in (server.stdin, server.stdout, server.stderr):
            stream.close()


def rest_of(server):
    """What a server says until it ends, and its exit code; it must say nothing on standard error."""
    said, err = server.communicate(timeout=WAIT_S)
    assert err == b""
    return said, server.returncode


def arrived_bytes(stream):
    return struct.unpack("i", fcntl.ioctl(stream, termios.FIONREAD, bytes(4)))[0]


def test_a_client_asks_for_more_than_times(client, plan):
    found = client.decode_with_errors([1, 64], 4096)
    assert found.latency_us.tolist() == plan.decode_us([1, 64], 4096).tolist()
    assert found.relative_error.tolist() == plan.decode_error([1, 64], 4096).tolist()
    steps = StepBatch.from_requests([[(100, 0), (1, 4095)], [], [(1, 9)] * 8])
    found = client.step_with_errors(steps)
    assert found.latency_us.tolist() == plan.step_us(steps).tolist()
    assert np.array_equal(found.relative_error, plan.step_error(steps), equal_nan=True)
    assert client.step_with_errors([]).latency_us.size == 0
    told = client.ask({"plan": 0, "memory": True})
    assert told["memory"]["max_kv_tokens"] == plan.memory.max_kv_tokens
    with pytest.raises(BatchError, match="must be at least 1"):
        client.decode_with_errors(0, 9)
    with pytest.raises(BackendError, match="an object needs"):
        client.ask({"forecast": 1})
    assert client.decode_us(64, 4096) == plan.decode_us(64, 4096)


@pytest.mark.slow
def test_the_end_of_its_input_ends_it(plan):
    with serving() as (server, first):
        server.stdin.write(ONE[:-1])  # the last line may lack its end
        said, code = rest_of(server)
    assert (said, code) == (first.strip() + b"\n", 0)
    assert json.loads(first)["latency_us"] == [plan.decode_us(64, 4096)]


@pytest.mark.slow
def test_a_file_is_answered_as_well(tmp_path, plan):
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    asked.write_bytes(ONE * 3)
    with asked.open("rb") as source, answered.open("wb") as out:
        done = subprocess.run([*SERVE, "--stdio"], stdin=source, stdout=out, check=True, timeout=WAIT_S)
    assert done.returncode == 0
    lines = [json.loads(line) for line in answered.read_text().splitlines()]
    assert [line["latency_us"] for line in lines] == [[plan.decode_us(64, 4096)]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_what_has_arrived(stop):
    with serving() as (server, first):
        server.stdin.write(ONE * 3000)
        server.send_signal(stop)
        said, code = rest_of(server)
    assert (said, code) == (first * 3000, 0)


@pytest.mark.slow
def test_a_signal_ends_it_where_it_waits():
    with serving() as (server, _):
        server.terminate()
        assert server.wait(WAIT_S) == 0
        assert server.stdout.read() + server.stderr.read() == b""


@pytest.mark.slow
def test_what_a_signal_cuts_off_gets_an_error():
    with serving() as (server, first):
        server.stdin.write(ONE + ONE[:20])
        server.terminate()
        said, code = rest_of(server)
    whole, cut = said.splitlines(keepends=True)
    assert (whole, code) == (first, 0)
    assert "the server was stopped after 20 bytes of a line" in json.loads(cut)["message"]


@pytest.mark.slow
def test_a_signal_in_a_frame_gets_an_error():
    request = b"".join(frames.request_frame(7, frames.DECODE, 0, [np.ones(1000, np.int64)] * 2))
    with StdioClient([PLAN]) as client:
        client.send_bytes(request, request[:-8])
        os.kill(client.pid, signal.SIGTERM)
        assert len(client.receive()) == 1000
        cut = client.receive_reply()
        assert cut.request_id == 7
        assert "the server was stopped after" in str(cut.answer)
        with pytest.raises(BackendError, match="the server ended with exit code 0"):
            client.receive()


@pytest.mark.slow
def test_a_second_signal_ends_it_though_nobody_reads():
    with serving() as (server, _):
        long = {"batch_size": [1] * 200_000, "kv_len": 9}
        server.stdin.write(json.dumps(long).encode() + b"\n")
        full = fcntl.fcntl(server.stdout, fcntl.F_GETPIPE_SZ)
        while arrived_bytes(server.stdout) < full:
            time.sleep(0.01)
        server.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.5)
        server.terminate()
        assert server.wait(WAIT_S) == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
def test_a_closed_output_ends_it_quietly(asks):
    with serving() as (server, _):
        server.stdout.close()
        if asks:
            server.stdin.write(ONE * 100)
        assert server.wait(WAIT_S) == 0
        assert server.stderr.read() == b""


@pytest.mark.slow
def test_only_replies_are_on_its_output():
    code = """
import os, sys, warnings
from fastroof.backends.serve.stdio import protocol_output, serve_stdio
from fastroof.cli.named_plans import named_plans
with protocol_output() as output_fd:
    print("printed")
    os.write(1, b"written")
    serve_stdio(named_plans(["llama-3.1-8b"]), output_fd=output_fd)
print("afterwards")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=ONE, capture_output=True, check=True, timeout=WAIT_S
    )
    reply, after = done.stdout.splitlines()
    assert json.loads(reply)["id"] == 1
    assert after == b"afterwards"
    assert sorted([b"printed", b"written"]) == sorted(done.stderr.replace(b"written", b"written\n").split())


@pytest.mark.slow
def test_a_plan_that_cannot_be_compiled_is_said_on_standard_error():
    done = subprocess.run(
        [sys.executable, "-m", "fastroof", "serve", "nine", "--stdio"],
        input=ONE,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"fastroof: error: unknown model 'nine'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs one of --stdio, --flight"),
        (["--stdio", "--flight", "127.0.0.1:0"], "needs one of --stdio, --flight"),
        (["--stdio", "--token-file", "token"], "are of --flight"),
        (["--stdio", "--tls-cert", "cert"], "are of --flight"),
        (["--flight", "127.0.0.1:0", "--tls-cert", "cert"], "need each other"),
        (["--flight", "127.0.0.1"], "is not HOST:PORT"),
        (["--flight", "127.0.0.1:70000"], "is not HOST:PORT"),
        (["--flight", "::1:8815"], "is not HOST:PORT"),
        (["--flight", "127.0.0.1:0", "--token-file", "/dev/null"], "/dev/null must hold a token"),
        (["--flight", "0.0.0.0:0"], "token"),
        (["--stdio", "--max-steps", "0"], "max-steps"),
    ],
)
def test_what_the_command_refuses(arguments, message):
    done = CliRunner().invoke(app, ["serve", PLAN, *arguments], prog_name="fastroof")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("fastroof: error: ")
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_flight_says_where_it_listens_and_a_signal_ends_it(tmp_path, host):
    pytest.importorskip("pyarrow.flight")
    token = tmp_path / "token"
    token.write_text("secret\n")
    command = [*SERVE, "--flight", f"{host}:0", "--token-file", str(token)]
    with serving(*command, greeting=b"") as (server, first):
        words = first.decode().split()
        assert words[:4] == ["serving", "1", "plan", "at"]
        assert words[4].startswith(f"grpc+tcp://{host}:")
        assert int(words[4].strip(":").rpartition(":")[2]) > 0
        server.terminate()
        assert rest_of(server) == (b"", 0)


# ---------------------------------------------------------------------------------------------- client


def test_client_answers_as_the_plan(client, plan):
    assert client.plan_names == ["llama-3.1-8b", "seventy"]
    one = client.decode_us(64, 4096)
    assert type(one) is float
    assert one == plan.decode_us(64, 4096)
    batch, kv = np.arange(1, 9)[:, None], np.arange(100, 105, dtype=np.int32)
    assert np.array_equal(client.decode_us(batch, kv), plan.decode_us(batch, kv))
    steps = StepBatch.from_requests([[(100, 0)], [], [(1, 4095)] * 64])
    assert np.array_equal(client.step_us(steps), plan.step_us(steps))
    assert client.step_us([[(100, 0), (1, 7)]])[0] == plan.step_scalar([100, 1], [0, 7])
    assert client.step_scalar([100, 1], [0, 7]) == plan.step_scalar([100, 1], [0, 7])
    assert client.step_scalar([], []) == 0.0
    assert client.decode_us(8, 100, plan="seventy") == client.decode_us(8, 100, plan=1) != one


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.decode_us(64, 0), BatchError, "kv_len must be at least 1"),
        (lambda c: c.decode_us(65, 10), PlanRangeError, "max_seqs=65"),
        (lambda c: c.decode_us(64, 1.5), BatchError, "must hold integers"),
        (lambda c: c.decode_us(2**70, 4), BatchError, "must fit int64"),
        (lambda c: c.decode_us(4, 4, plan=-1), BatchError, "plan -1"),
        (lambda c: c.decode_us(4, 4, plan=7), BackendError, "no plan 7"),
        (lambda c: c.step_us([[(0, 1)]]), BatchError, "new_tokens must be at least 1"),
        (lambda c: c.step_us([[(1, 1)]], plan="nine"), BackendError, "no plan 'nine'"),
        (lambda c: c.step_scalar([1], [1, 2]), BatchError, "two lists"),
        (lambda c: c.step_scalar([1.5], [1]), BatchError, "two lists"),
        (lambda c: c.step_scalar([-1], [1]), BatchError, "at least 1, got -1"),
        (lambda c: c.step_us(StepBatch([], [], [0] * 2_000_002)), BackendError, "2000001 steps are more"),
        (lambda c: c.send_decode([1, 2], [1]), BackendError, "one list each"),
    ],
)
def test_client_raises_the_servers_errors_and_goes_on(client, plan, call, error, message):
    with pytest.raises(error, match=message) as raised:
        call(client)
    assert isinstance(raised.value, FastroofError)
    assert client.decode_us(64, 4096) == plan.decode_us(64, 4096)


def test_client_may_send_more_than_the_pipes_hold(client, plan):
    rng = np.random.default_rng(0)
    batch, kv = rng.integers(1, 65, 500_000, dtype=np.int32), rng.integers(2, 9000, 500_000, dtype=np.int32)
    asked = [(batch[i:], kv[i:]) for i in range(8)]
    for sizes in asked:
        client.send_decode(*sizes)
    for _ in range(3000):
        client.send_decode([64], [4096])
    for sizes in asked:
        assert np.array_equal(client.receive(), plan.decode_us(*sizes))
    assert {float(client.receive()[0]) for _ in range(3000)} == {plan.decode_us(64, 4096)}


@pytest.mark.slow
def test_client_takes_replies_as_they_are(client):
    client.send_bytes(*frames.request_frame(9, frames.DESCRIBE))
    with pytest.raises(BackendError, match="is not of times alone"):
        client.receive()
    client.send_bytes(b"junk" * 12)
    client.send_bytes(*frames.request_frame(3, frames.DECODE, 0, [np.array([1]), np.array([2])]))
    assert client.receive_reply().request_id == frames.NO_ID
    assert client.receive_reply().request_id == 3


@pytest.mark.slow
def test_client_says_what_the_server_said_when_it_ended():
    with pytest.raises(BackendError, match="exit code 2: fastroof: error: unknown model 'nine'"):
        StdioClient(["nine"])
    with StdioClient([PLAN]) as client:
        os.kill(client.pid, signal.SIGKILL)
        client._server.wait()
        with pytest.raises(BackendError, match="exit code -9: it said nothing"):
            client.decode_us(1, 2)


@pytest.mark.slow
def test_client_refuses_what_is_no_reply():
    with StdioClient([PLAN]) as client:
        client._inbox += struct.pack("<40x")
        with pytest.raises(BackendError, match="no reply of version 1"):
            client.receive()


@pytest.mark.slow
def test_example_runs(capsys):
    from fastroof.backends.serve import stdio_example

    stdio_example.main()
    said = capsys.readouterr().out
    assert "us to and fro" in said
    assert "BatchError: kv_len must be at least 1" in said


@pytest.mark.slow
@pytest.mark.parametrize("route", ["stdio", "flight"])
def test_soak_loses_nothing(tmp_path, route):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.soak_serve", "--route", route, "--no-load"]
    options = ["--clients", "4", "--seconds", "4", "--json", str(figures)]
    subprocess.run([*command, *options], cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)
    met = json.loads(figures.read_text())[route]["soak"]
    assert (met["lost"], met["differing"], met["unrefused"], met["failures"]) == (0, 0, 0, [])
    assert met["good"] > 100
    assert met["refused"] > 100
    assert met["departures"] > 0
