"""``fastroof serve`` as a process: how it starts and ends, what is on its pipes."""

from __future__ import annotations

import fcntl
import json
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

import fastroof
from fastroof.cli import app

PLAN = "llama-3.1-8b,max_num_batched_tokens=512,max_num_seqs=64"
SERVE = [sys.executable, "-m", "fastroof", "serve", PLAN]
ONE = b'{"id": 1, "batch_size": 64, "kv_len": 4096}\n'
WAIT_S = 60


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, engine="vllm", max_num_batched_tokens=512, max_num_seqs=64
    )


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
    """Return a server's output until it ends, and its exit code; its standard error must be empty."""
    output, err = server.communicate(timeout=WAIT_S)
    assert err == b""
    return output, server.returncode


def arrived_bytes(stream):
    return struct.unpack("i", fcntl.ioctl(stream, termios.FIONREAD, bytes(4)))[0]


@pytest.mark.slow
def test_the_end_of_its_input_ends_it(plan):
    with serving() as (server, first):
        server.stdin.write(ONE[:-1])  # the last line may lack its end
        output, code = rest_of(server)
    assert (output, code) == (first.strip() + b"\n", 0)
    assert json.loads(first)["latency_us"] == [plan.decode_us(64, 4096)]


@pytest.mark.slow
def test_a_file_is_answered_as_well(tmp_path, plan):
    questions, answered = tmp_path / "questions.jsonl", tmp_path / "answered.jsonl"
    questions.write_bytes(ONE * 3)
    with questions.open("rb") as source, answered.open("wb") as out:
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
        output, code = rest_of(server)
    assert (output, code) == (first * 3000, 0)


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
        output, code = rest_of(server)
    whole, cut = output.splitlines(keepends=True)
    assert (whole, code) == (first, 0)
    assert "the server was stopped after 20 bytes of a line" in json.loads(cut)["message"]


@pytest.mark.slow
def test_a_second_signal_ends_it_though_its_output_is_unread():
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
@pytest.mark.parametrize("is_queried", [True, False])
def test_a_closed_output_ends_it_quietly(is_queried):
    with serving() as (server, _):
        server.stdout.close()
        if is_queried:
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
def test_a_plan_that_cannot_be_compiled_is_named_on_standard_error():
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
        ([], "needs either --stdio or --http"),
        (["--stdio", "--http", "127.0.0.1:0"], "needs either --stdio or --http"),
        (["--flight", "127.0.0.1:0"], "--flight"),
        (["--stdio", "--token-file", "token"], "goes with --http"),
        (["--http", "127.0.0.1:0", "--tls-cert", "cert"], "--tls-cert"),
        (["--http", "127.0.0.1"], "is not HOST:PORT"),
        (["--http", "127.0.0.1:70000"], "is not HOST:PORT"),
        (["--http", "::1:8815"], "is not HOST:PORT"),
        (["--http", "127.0.0.1:0", "--token-file", "/dev/null"], "/dev/null must hold a token"),
        (["--http", "0.0.0.0:0"], "token"),
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
def test_http_prints_where_it_listens_and_a_signal_ends_it(tmp_path, host):
    pytest.importorskip("uvicorn")
    token = tmp_path / "token"
    token.write_text("secret\n")
    command = [*SERVE, "--http", f"{host}:0", "--token-file", str(token)]
    with serving(*command, greeting=b"") as (server, first):
        words = first.decode().split()
        assert words[:4] == ["serving", "1", "plan", "at"]
        assert words[4].startswith(f"http://{host}:")
        assert int(words[4].strip(":").rpartition(":")[2]) > 0
        server.terminate()
        assert rest_of(server) == (b"", 0)
