"""What reaches servers: messages of JSON, streams of lines and frames, Flight's calls, requests of HTTP."""

from __future__ import annotations

import json
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

import fastroof
from fastroof.backends.serve.answer import ServedPlans
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.messages import answer_text, write_reply
from fastroof.backends.serve.stdio import serve_pipe
from fastroof.errors import BackendError, FastroofError
from tests.backends.serve.test_messages import MESSAGES
from tests.backends.serve.test_stdio import REPLY_MAGIC, frame
from tests.fuzz.arrow_mutators import mutated_table
from tests.fuzz.made_plans import plan_of
from tests.fuzz.mutators import mutated_bytes, mutated_text, mutated_tree
from tests.fuzz.target import SkippedError, Target, Wrong, all_finite

__all__ = ["TARGETS"]

REPLY = struct.Struct("<8sHHIQQQ")
FEW = ServeLimits(
    max_steps=1000,
    max_requests=5000,
    max_message_bytes=2**17,
    max_line_bytes=2**16,
    max_simulated_requests=50,
    max_answered_requests=50,
    max_simulated_steps=20_000,
)
MORE: tuple[dict[str, Any], ...] = (
    {"requests": [[[5, 0]]], "errors": True, "stages": True},
    {"simulate": {"trace": {"arrival_s": [0, 1], "input_tokens": [9, 8], "output_tokens": [3, 2]}}},
    {"simulate": {"workload": {"rate": 5, "requests": 9, "input_tokens": "uniform:9:90"}, "requests": True}},
    {"memory": True, "max_tokens": 64, "max_seqs": 4},
)
ALL = (*MESSAGES.values(), *MORE)


def small_plan() -> fastroof.StepPlan:
    return plan_of(max_tokens=2048, max_seqs=256)


def one_message(random: Random) -> dict[str, Any]:
    """Return a message as it should be, with what any message may have."""
    message: dict[str, Any] = dict(random.choice(ALL))
    for name, values in (("id", (7, "x")), ("v", (1,)), ("plan", ("eight", 0))):
        if random.random() < 0.3:
            message[name] = random.choice(values)
    return message


def mutated_message(random: Random) -> bytes:
    """Return a message that was mutated as a tree, as text or as bytes."""
    if random.random() < 0.7:
        tree = mutated_tree(one_message(random), random, ALL)
        return json.dumps(tree).encode(errors="surrogatepass")
    return mutated_text(json.dumps(one_message(random)).encode(), random)


def reads_well(reply: dict[str, Any]) -> None:
    """Raise what a reply refuses with, or Wrong where it is none."""
    if "error" in reply:
        if "the server failed" in reply["message"]:
            raise Wrong(reply["message"])
        raise BackendError(reply["message"])
    all_finite(reply)
    if any(time_us < 0 for time_us in reply.get("latency_us", ())):
        raise Wrong("a step takes less than no time")


class Served(Target):
    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.plan = small_plan()
        self.served = ServedPlans({"eight": self.plan}, FEW)


def every_message() -> list[bytes]:
    return [json.dumps(message).encode() for message in ALL]


class Messages(Served):
    """Messages as they are answered, however they came."""

    name = "serve.message"
    suffix = ".json"
    is_bytes = True
    ci_cases = 1500

    def examples(self) -> list[bytes]:
        return every_message()

    def case(self, random: Random) -> bytes:
        return mutated_message(random)

    def check(self, case: bytes) -> None:
        answered = answer_text(self.served, case)
        if answered.error is not None and not isinstance(answered.error, FastroofError):
            raise answered.error
        reads_well(json.loads(write_reply(answered.reply)))


def framed_well(replies: bytes) -> None:
    """Read replies by the specification; raise as :func:`reads_well` for the first that refuses."""
    while replies:
        start, version, status, zero, _, size, count = REPLY.unpack_from(replies)
        body, replies = replies[REPLY.size :][:size], replies[REPLY.size + size :]
        if (start, version, zero, size % 8, len(body)) != (REPLY_MAGIC, 1, 0, 0, size):
            raise Wrong("what came is no reply")
        if status in (0, 2):
            times = np.frombuffer(body)
            all_finite(times)
            if len(times) != count * (1 + status // 2) or (times < 0).any():
                raise Wrong(f"{count} steps have {times!r:.80}")
        elif status == 1:
            reads_well(json.loads(body[:count]))
        else:
            reads_well({"error": "", "message": body[:count].decode()})


class Streams(Served):
    """All that one client sends on a pipe: lines, or frames; each gets its reply."""

    name = "serve.pipe"
    suffix = ".bin"
    is_bytes = True
    ci_cases = 700

    def examples(self) -> list[bytes]:
        sizes = np.array([1, 7]), np.array([9, 700])
        asked = [
            frame(1, sizes),
            frame(2, sizes, kind=3),
            frame(3, (*sizes, np.array([0, 2])), kind=4),
            frame(4),
        ]
        return [b"".join(asked), b"\n".join(every_message())]

    def _frame(self, random: Random) -> bytes:
        if random.random() < 0.3:
            text = (
                mutated_message(random) if random.random() < 0.5 else json.dumps(one_message(random)).encode()
            )
            size = -(-len(text) // 8) * 8
            header = frame(random.randrange(99), kind=5, body=size, steps=len(text))
            return header + text.ljust(size, b"\0")
        count = random.choice((0, 1, 1, 2, 9))
        dtype = random.choice((np.int32, np.int64))
        kind = random.choice((0, 1, 1, 2, 2, 3, 4))
        batch = np.array([random.randint(1, 70) for _ in range(count)], dtype)
        kv_len = np.array([random.randint(1, 9000) for _ in range(count)], dtype)
        arrays = {0: (), 1: (batch, kv_len), 3: (batch, kv_len)}.get(
            kind, (batch, kv_len, np.array([0, count], np.int64))
        )
        plan = random.choice((0, 0, 0, "eight", 1))
        made = frame(random.randrange(99), arrays, plan if kind else 0, kind)
        return mutated_bytes(made, random) if random.random() < 0.4 else made

    def case(self, random: Random) -> bytes:
        count = random.choice((1, 1, 2, 3))
        if random.random() < 0.6:
            return b"".join(self._frame(random) for _ in range(count))
        return b"\n".join(mutated_message(random) for _ in range(count)) + random.choice(
            (b"", b"\n", b"\n\n")
        )

    def check(self, case: bytes) -> None:
        with tempfile.TemporaryFile() as sent, tempfile.TemporaryFile() as said:
            sent.write(case)
            sent.seek(0)
            serve_pipe(self.served, sent.fileno(), said.fileno())
            said.seek(0)
            replies = said.read()
        if case[:1] == b"\xf5":
            if not replies:
                raise Wrong("no reply")
            framed_well(replies)
            return
        lines = replies.splitlines()
        if len(lines) != sum(bool(line.strip()) for line in case.split(b"\n")):
            raise Wrong(f"{len(lines)} replies")
        for line in lines:
            reads_well(json.loads(line))


LISTS = pa.array([[1], [2, 3], []], pa.list_(pa.int32()))
BATCHES = (
    pa.table(
        {"batch_size": pa.array([1, 7, 64], pa.int32()), "kv_len": pa.array([9, 700, 9000], pa.int32())}
    ),
    pa.table({"batch_size": pa.array([1, 7]), "kv_len": pa.array([9, 700])}),
    pa.table({"new_tokens": LISTS, "context_len": LISTS}),
    pa.table({"new_tokens": LISTS.cast(pa.large_list(pa.int64())), "context_len": LISTS}),
)
PATHS = ((b"eight",), (b"eight",), (b"eight", b"errors"), (b"nine",), (), (b"eight", b"x"), (b"\xff",))


def stream_of(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


class _Reader:
    """What a call of Flight reads, without a network: batches of a stream."""

    def __init__(self, stream: bytes) -> None:
        self._reader = pa.ipc.open_stream(stream)
        self.schema = self._reader.schema
        self._batches: Iterator[Any] = iter(self._reader)

    def read_chunk(self) -> Any:
        return SimpleNamespace(data=next(self._batches), app_metadata=None)


class _Writer:
    def __init__(self) -> None:
        self.columns: list[Any] = []
        self.told: list[bytes] = []

    def begin(self, schema: Any) -> None:
        self.schema = schema

    def write_batch(self, batch: Any) -> None:
        self.columns += [column.to_numpy() for column in batch.columns]

    def write_with_metadata(self, batch: Any, metadata: bytes) -> None:
        self.told.append(metadata)


class FlightCalls(Target):
    """Calls of a Flight service, at the functions that gRPC calls: exchanges, actions and descriptors."""

    name = "serve.flight"
    suffix = ".bin"
    ci_cases = 600

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        from pyarrow import flight

        from fastroof.backends.serve.flight_calls import Calls
        from fastroof.backends.serve.flight_service import PlanService

        self.flight = flight
        plans = {"eight": small_plan()}
        self.service = PlanService(
            "grpc://127.0.0.1:0", plans, ServedPlans(plans, FEW), Calls(FEW.max_calls), None
        )

    def close(self) -> None:
        self.service.shutdown()

    def examples(self) -> list[bytes]:
        streams = [stream_of(table) for table in BATCHES]
        exchanges = [b"exchange eight" + more + b"\n" + one for one in streams for more in (b"", b"/errors")]
        return [*exchanges, *(b"act message\n" + message for message in every_message())]

    def case(self, random: Random) -> bytes:
        what = random.random()
        if what < 0.15:
            kind = random.choice((b"message", b"message", b"simulate", b"health", b"x", b"\xc3\xa9"))
            return b"act " + kind + b"\n" + mutated_message(random)
        if what < 0.25:
            method = random.choice((b"get_flight_info", b"get_schema", b"do_get", b"do_put"))
            return method + b" " + b"/".join(random.choice(PATHS)) + b"\n"
        table = random.choice(BATCHES)
        if random.random() < 0.7:
            table = mutated_table(table, random, BATCHES)
        try:
            stream = stream_of(table)
        except (pa.ArrowException, ValueError, OSError):
            stream = stream_of(BATCHES[0])
        if random.random() < 0.2:
            stream = mutated_bytes(stream, random)
        return b"exchange " + b"/".join(random.choice(PATHS)) + b"\n" + stream

    def check(self, case: bytes) -> None:
        head, _, body = case.partition(b"\n")
        word, _, path = head.partition(b" ")
        parts = path.split(b"/") if path else []
        descriptor = self.flight.FlightDescriptor.for_path(*parts)
        try:
            if word == b"act":
                action = self.flight.Action(path.decode(errors="replace"), body)
                for said in self.service.do_action(None, action):
                    reads_well(json.loads(said))
            elif word == b"exchange":
                self._exchange(descriptor, body)
            elif word in (b"get_flight_info", b"get_schema"):
                getattr(self.service, word.decode())(None, descriptor)
            elif word == b"do_get":
                self.service.do_get(None, self.flight.Ticket(path))
            else:
                self.service.do_put(None, descriptor, None, None)
        except self.flight.FlightServerError as error:
            if not str(error).strip():
                raise Wrong("refused without a word") from None
            raise BackendError(str(error)) from None

    def _exchange(self, descriptor: Any, stream: bytes) -> None:
        try:
            reader = _Reader(stream)
        except (pa.ArrowException, OSError, ValueError):
            raise SkippedError from None
        writer = _Writer()
        asks = SimpleNamespace(get_middleware=lambda _: SimpleNamespace(reads_errors=False))
        try:
            self.service.do_exchange(asks, descriptor, reader, writer)
        except (pa.ArrowException, OSError) as error:
            # what Arrow cannot read gRPC never hands over
            if isinstance(error, self.flight.FlightError):
                raise
            raise SkippedError from None
        all_finite(writer.columns)


class Http(Target):
    """Bytes of a request, to a server over HTTP: its head and its body."""

    name = "serve.http"
    suffix = ".bin"
    ci_cases = 60
    waits_s = 0.1

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        from fastroof.backends.serve.http_server import HttpServer

        self.server = HttpServer({"eight": small_plan()}, limits=FEW)

    def close(self) -> None:
        self.server.__exit__(None, None, None)

    def case(self, random: Random) -> bytes:
        body = mutated_message(random) if random.random() < 0.5 else json.dumps(one_message(random)).encode()
        kind = random.choice(("application/json", "application/json", "application/jsonl"))
        head = (
            f"POST /message HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            f"Content-Type: {kind}\r\nConnection: close\r\n\r\n"
        ).encode()
        what = random.random()
        if what < 0.5:
            return head + body
        return mutated_text(head, random) + body if what < 0.75 else mutated_bytes(head + body, random)

    def check(self, case: bytes) -> None:
        said = b""
        with socket.create_connection(("127.0.0.1", self.server.port), 60) as client:
            with suppress(OSError):  # refused in the middle of it
                client.sendall(case)
            client.settimeout(self.waits_s)
            with suppress(OSError):
                while part := client.recv(2**16):
                    said += part
        if not said:
            raise BackendError("hung up, or it waits for more")
        head, _, body = said.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 ") or b"the server failed" in said:
            raise Wrong(f"{said!r:.200}")
        status = int(head[9:12])
        if status not in {200, 400, 404, 405, 408, 413, 415, 421}:
            raise Wrong(f"status {status}: {body!r:.200}")
        if status != 200:
            raise BackendError(f"status {status}: {body!r:.200}")


DATA, HEADERS, RST_STREAM, GOAWAY, END_STREAM = 0, 1, 3, 7, 1


def http2_frames(said: bytes) -> Iterator[tuple[int, int]]:
    """Yield the type and the flags of all frames of HTTP/2 that came whole."""
    while len(said) >= 9 and len(said) >= (size := 9 + int.from_bytes(said[:3])):
        yield said[3], said[4]
        said = said[size:]


def has_ended(said: bytes) -> bool:
    """Whether the server has answered or given up, so that nothing more is waited for."""
    return any(
        kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & END_STREAM)
        for kind, flags in http2_frames(said)
    )


class FlightSessions(Target):
    """All bytes of a session that a client had, mutated, to a server over Flight."""

    name = "serve.flight_session"
    suffix = ".bin"
    ci_cases = 40
    waits_s = 0.1

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        from pyarrow import flight

        from fastroof.backends.serve.flight import FlightServer
        from tests.backends.serve.test_flight_abuse import NAME, _exchange_once, _recorded

        self.server = FlightServer({NAME: small_plan()}, limits=FEW)
        location = f"grpc://127.0.0.1:{self.server.port}"
        batches = [table.to_batches()[0] for table in BATCHES]
        asks: list[Callable[[Any], Any]] = [
            lambda client, batch=batch: _exchange_once(client, batch) for batch in batches
        ]
        asks += [
            lambda client: list(client.list_flights()),
            lambda client: list(client.do_action(flight.Action("message", b'{"describe": true}'))),
        ]
        self.sessions = [_recorded(location, ask) for ask in asks]
        self.connect = lambda: flight.connect(location)
        self.flight, self.plan_name = flight, NAME

    def examples(self) -> list[bytes]:
        return self.sessions

    def close(self) -> None:
        self.server.__exit__(None, None, None)

    def case(self, random: Random) -> bytes:
        return mutated_bytes(random.choice(self.sessions), random, self.sessions)

    def check(self, case: bytes) -> None:
        said = b""
        with socket.create_connection(("127.0.0.1", self.server.port), 60) as raw, suppress(OSError):
            raw.sendall(case)
            raw.settimeout(self.waits_s)
            while not has_ended(said) and (part := raw.recv(2**16)):
                said += part
        if sum(case[-1:]) % 8 == 0:
            # the server goes on
            with self.connect() as client:
                [health] = client.do_action(self.flight.Action("health", b""))
                if json.loads(health.body.to_pybytes())["plans"][0]["name"] != self.plan_name:
                    raise Wrong("another plan is served")
        if all(kind != DATA for kind, _ in http2_frames(said)):
            raise BackendError(f"no data, but {said!r:.200}")


TARGETS = [Messages, Streams, FlightCalls, FlightSessions, Http]
