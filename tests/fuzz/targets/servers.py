"""What reaches servers: messages of JSON, lines on a pipe, Arrow streams of steps."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

import fastroof
from fastroof.backends.serve.answers import ServedPlans, answer_text, write_reply
from fastroof.backends.serve.arrow_steps import read_steps, read_times, write_times
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.stdio import serve_pipe
from fastroof.errors import BackendError, FastroofError
from tests.backends.serve.test_messages import MESSAGES
from tests.fuzz.arrow_mutators import mutated_table
from tests.fuzz.made_plans import plan_of
from tests.fuzz.mutators import mutated_bytes, mutated_text, mutated_tree
from tests.fuzz.target import Target, Wrong, all_finite

FEW = ServeLimits(
    max_steps=1000,
    max_requests=5000,
    max_message_bytes=2**17,
    max_line_bytes=2**16,
    max_simulated_requests=50,
    max_answered_requests=50,
    max_simulated_steps=20_000,
)
SIZES = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
MORE: tuple[dict[str, Any], ...] = (
    {"requests": [[[5, 0]]], "errors": True, "stages": True},
    {
        "simulate": {
            "trace": {"arrival_s": [0, 1], "input_tokens": [9, 8], "output_tokens": [3, 2]},
            "options": SIZES,
        }
    },
    {
        "simulate": {
            "workload": {"rate": 5, "requests": 9, "isl": "uniform:9:90"},
            "options": SIZES,
            "requests": True,
        }
    },
    {"memory": True, "max_num_batched_tokens": 64, "max_num_seqs": 4},
)
ALL = (*MESSAGES.values(), *MORE)


def small_plan() -> fastroof.StepPlan:
    return plan_of(max_num_batched_tokens=2048, max_num_seqs=256)


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
    """Raise the error of a reply, or Wrong if it is not a valid refusal."""
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


class Streams(Served):
    """All lines that one client sends on a pipe; each gets its reply."""

    name = "serve.pipe"
    suffix = ".bin"
    is_bytes = True
    ci_cases = 700

    def examples(self) -> list[bytes]:
        return [b"\n".join(every_message())]

    def case(self, random: Random) -> bytes:
        count = random.choice((1, 1, 2, 3))
        return b"\n".join(mutated_message(random) for _ in range(count)) + random.choice(
            (b"", b"\n", b"\n\n")
        )

    def check(self, case: bytes) -> None:
        # what is right is answered, whatever came before
        case += b'\n{"batch_size": 64, "kv_len": 900}'
        with tempfile.TemporaryFile() as sent, tempfile.TemporaryFile() as found:
            sent.write(case)
            sent.seek(0)
            serve_pipe(self.served, sent.fileno(), found.fileno())
            found.seek(0)
            lines = found.read().splitlines()
        if len(lines) != sum(bool(line.strip()) for line in case.split(b"\n")):
            raise Wrong(f"{len(lines)} replies")
        *others, last = map(json.loads, lines)
        if last.get("latency_us") != [self.plan.decode_us(64, 900)]:
            raise Wrong(f"the next message has {last}")
        for reply in others:
            reads_well(reply)


LISTS = pa.array([[1], [2, 3], []], pa.list_(pa.int32()))
BATCHES = (
    pa.table(
        {"batch_size": pa.array([1, 7, 64], pa.int32()), "kv_len": pa.array([9, 700, 9000], pa.int32())}
    ),
    pa.table({"batch_size": pa.array([1, 7]), "kv_len": pa.array([9, 700])}),
    pa.table({"new_tokens": LISTS, "context_len": LISTS}),
    pa.table({"new_tokens": LISTS.cast(pa.large_list(pa.int64())), "context_len": LISTS}),
)


def stream_of(table: Any, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


class ArrowSteps(Served):
    """Arrow streams of steps, as bodies of a request."""

    name = "serve.arrow"
    suffix = ".bin"
    is_bytes = True
    ci_cases = 1500

    def examples(self) -> list[bytes]:
        return [stream_of(table) for table in BATCHES]

    def case(self, random: Random) -> bytes:
        table = random.choice(BATCHES)
        if random.random() < 0.7:
            table = mutated_table(table, random, BATCHES)
        try:
            stream = stream_of(table, random.choice((None, None, None, "zstd", "lz4")))
        except (pa.ArrowException, ValueError, OSError):
            stream = stream_of(BATCHES[0])
        return mutated_bytes(stream, random) if random.random() < 0.4 else stream

    def check(self, case: bytes) -> None:
        steps = read_steps(case, FEW)
        times_us = steps.times_us(self.plan)
        found = read_times(write_times(times_us))
        all_finite(found)
        if len(found[0]) != steps.num_steps or (found[0] < 0).any():
            raise Wrong(f"{steps.num_steps} steps have {found!r:.80}")


TARGETS = [Messages, Streams, ArrowSteps]
