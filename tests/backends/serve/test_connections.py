"""Connections that are held and say nothing, while other clients ask."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.backends.serve.limits import (
    CONNECTIONS_A_CALL,
    PEER_CONNECTIONS_A_CALL,
    Connections,
    ServeLimits,
    Standing,
    peer_of,
)
from fastroof.errors import BackendError

pytest.importorskip("uvicorn")

from fastroof.backends.serve.http_server import HttpServer

SILENT = 300
LIMITS = ServeLimits(max_calls=8)
TOKEN = "sesame"
BOUND_S = 5.0


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_tokens=2048, max_seqs=64, engine="kernels")


def ask_http(port: int) -> float:
    return asked_http(http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S))


def asked_http(client: http.client.HTTPConnection) -> float:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    try:
        client.request("POST", "/message", json.dumps({"batch_size": 7, "kv_len": 700}), headers)
        return float(json.load(client.getresponse())["latency_us"][0])
    finally:
        client.close()


SAID = {
    "nothing": b"",
    "how it begins": b"POST /message HTTP/1.1\r\nHost: localhost\r\n",
    "what is refused": b"GET /describe HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@contextmanager
def sockets(port: int, peer: str, count: int, said: bytes) -> Iterator[list[socket.socket]]:
    """Connections of one address that say something, and then nothing more."""
    with ExitStack() as open_ones:
        held = []
        for _ in range(count):
            try:
                one = socket.create_connection(("127.0.0.1", port), 10, source_address=(peer, 0))
            except OSError as error:
                if not held and peer != "127.0.0.1":
                    pytest.skip(f"this machine has no address {peer}: {error}")
                raise
            held.append(open_ones.enter_context(one))
            with suppress(OSError):
                one.sendall(said)
        yield held


def answered_within(ask: Callable[[int], float], port: int, bound_s: float) -> float | None:
    """What a client hears that tries again where it is turned away."""
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        with suppress(BackendError, OSError, http.client.HTTPException):
            return ask(port)
        time.sleep(0.02)
    return None


def is_closed(one: socket.socket, within_s: float) -> bool:
    one.settimeout(within_s)
    try:
        while one.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.0.0.2"])
@pytest.mark.parametrize("words", SAID)
def test_silent_connections_keep_no_client_out(plan: fastroof.StepPlan, words: str, peer: str) -> None:
    with (
        HttpServer({"eight": plan}, token=TOKEN, limits=LIMITS) as server,
        sockets(server.port, peer, SILENT, SAID[words]) as held,
    ):
        for _ in range(3):
            assert answered_within(ask_http, server.port, BOUND_S) == plan.decode_us(7, 700)
        # no peer holds more than its share: those that came first have gone
        assert all(is_closed(one, 5.0) for one in held[: SILENT - PEER_CONNECTIONS_A_CALL * 8])


def test_silent_connections_keep_no_client_of_tls_out(
    plan: fastroof.StepPlan, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate

    def ask(port: int) -> float:
        context = ssl.create_default_context(cafile=cert)
        return asked_http(http.client.HTTPSConnection("localhost", port, timeout=BOUND_S, context=context))

    with (
        HttpServer({"eight": plan}, token=TOKEN, limits=LIMITS, tls_cert=cert, tls_key=key) as server,
        sockets(server.port, "127.0.0.1", SILENT, b"") as held,
    ):
        assert answered_within(ask, server.port, 2 * BOUND_S) == plan.decode_us(7, 700)
        assert all(is_closed(one, 5.0) for one in held[: SILENT - PEER_CONNECTIONS_A_CALL * 8])


def test_a_client_that_was_let_in_stays_while_others_come(plan: fastroof.StepPlan) -> None:
    """One connection, kept from before the flood to after it."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    with HttpServer({"eight": plan}, token=TOKEN, limits=LIMITS) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=BOUND_S)
        client.connect()
        kept = client.sock

        def ask_again() -> float:
            client.request("POST", "/message", json.dumps({"batch_size": 7, "kv_len": 700}), headers)
            answer = float(json.load(client.getresponse())["latency_us"][0])
            assert client.sock is kept
            return answer

        assert ask_again() == plan.decode_us(7, 700)
        with sockets(server.port, "127.0.0.1", SILENT, b""):
            assert ask_again() == plan.decode_us(7, 700)
        assert ask_again() == plan.decode_us(7, 700)
        client.close()


class Place(NamedTuple):
    number: int
    peer: str
    standing: Standing


@given(
    st.integers(0, 3),
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(Standing), st.booleans()), min_size=10, max_size=80
    ),
)
def test_who_gives_way(max_calls: int, came: list[tuple[str, Standing, bool]]) -> None:
    """Never more than there may be; whoever was let in stays; who goes has the least standing of its peer."""
    held: Connections[Place] = Connections(max_calls)
    there: list[Place] = []
    for number, (peer, standing, leaves) in enumerate(came):
        new = Place(number, peer, standing)
        before = list(there)
        gone = held.admit(new)
        there.append(new)
        if gone is not None:
            there.remove(gone)
            rivals = [each for each in before if each.peer == gone.peer]
            if gone is new:
                assert all(each.standing == Standing.LET_IN for each in rivals or before)
            else:
                assert gone.standing < Standing.LET_IN
                assert gone == min(rivals, key=lambda each: (each.standing, each.number))
        else:
            assert len(before) < CONNECTIONS_A_CALL * max_calls
        assert len(held) == len(there) <= CONNECTIONS_A_CALL * max_calls
        for each in "ab":
            assert sum(one.peer == each for one in there) <= PEER_CONNECTIONS_A_CALL * max_calls
        if leaves and there:
            held.forget(there.pop(0))
            held.forget(new if new not in there else there.pop())
    for one in there:
        held.forget(one)
    assert len(held) == 0
    assert not held._of_peer


def test_a_peer_is_an_address_or_a_network_of_one_machine() -> None:
    assert peer_of(("::ffff:192.0.2.7", 1, 0, 0)) == "192.0.2.7"
    assert peer_of(("2001:db8:0:1:ffff::1", 1, 0, 0)) == peer_of(("2001:db8:0:1::2", 1, 0, 0))
    assert peer_of(("2001:db8:0:1::1", 1, 0, 0)) != peer_of(("2001:db8:0:2::1", 1, 0, 0))
    assert peer_of(("fe80::1%eth0", 1, 0, 2)) == "fe80::"
    assert peer_of("") == peer_of(None) == ""
