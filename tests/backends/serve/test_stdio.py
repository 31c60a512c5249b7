"""``fastroof serve --stdio``: the same bits as the plans, in order, and nothing that comes ends it.

Requests and replies are packed and read here by the specification in ``fastroof.backends.serve.frames``, not
by its code.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import StepBatch
from fastroof.backends.serve import frame_reader, frames, json_lines, pipe
from fastroof.backends.serve.answer import ServedPlans, as_refusal
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.stdio import serve_pipe
from fastroof.errors import BackendError, BatchError, FastroofError, PlanRangeError

MAGIC = bytes.fromhex("F5 46 52 73 74 65 70 FA")
REPLY_MAGIC = bytes.fromhex("F5 46 52 74 69 6D 65 FA")
NAMED = 0xFFFFFFFF
NO_ID = 0xFFFFFFFFFFFFFFFF
BAD_ID = 0xBAD0BAD0BAD0BAD0
ERRORS = {16: BackendError, 17: BatchError, 18: PlanRangeError, 19: FastroofError}
LIMITS = ServeLimits(max_steps=1000, max_requests=5000, max_message_bytes=2**17, max_line_bytes=2**16)


@pytest.fixture(scope="module")
def plans(h100):
    small = {"max_tokens": 512, "max_seqs": 64}
    eight = fastroof.compile_plan("llama-3.1-8b", "h100", h100, **{"runtime": "kernels", **small})
    return {
        "eight": eight,
        "seventy": fastroof.compile_plan(
            "llama-3.1-70b", "h100", h100, tp=4, **{"runtime": "kernels", **small}
        ),
    }


@pytest.fixture(scope="module")
def served(plans):
    return ServedPlans(plans, LIMITS)


class Reply(NamedTuple):
    request_id: int
    status: int
    body: bytes

    @property
    def times(self):
        assert self.status == 0, self.body
        return np.frombuffer(self.body)


def exchange(served, pieces):
    """What a server on two pipes answers to pieces of bytes, until its input ends."""
    (server_in, to_server), (from_server, server_out) = os.pipe(), os.pipe()

    def send():
        with os.fdopen(to_server, "wb", buffering=0) as out:
            for piece in pieces:
                out.write(piece)

    def serve():
        try:
            serve_pipe(served, server_in, server_out)
        finally:
            os.close(server_in)
            os.close(server_out)

    threads = [threading.Thread(target=work) for work in (send, serve)]
    for thread in threads:
        thread.start()
    with os.fdopen(from_server, "rb") as replies:
        said = replies.read()
    for thread in threads:
        thread.join()
    return said


def frame(request_id, arrays=(), plan=0, kind=None, **changes):
    """A request by the specification; ``changes`` lie about its header."""
    arrays = [np.asarray(array) for array in arrays]
    kind = {0: 0, 2: 1, 3: 2}[len(arrays)] if kind is None else kind
    body = b"".join(a.tobytes() + bytes(-a.nbytes % 8) for a in arrays)
    if isinstance(plan, str):
        name = plan.encode()
        body += name + bytes(-len(name) % 8 if name else 8)
    fields = {
        "magic": MAGIC,
        "version": 1,
        "kind": kind,
        "width": arrays[0].itemsize if arrays else 8,
        "plan": NAMED if isinstance(plan, str) else plan,
        "id": request_id,
        "body": len(body),
        "steps": {0: 0, 2: len(arrays[0]) if arrays else 0, 3: len(arrays[-1]) - 1 if arrays else 0}[
            len(arrays)
        ],
        "requests": len(arrays[0]) if len(arrays) == 3 else 0,
    }
    fields.update(changes)
    return struct.pack("<8sHBBIQQQQ", *fields.values()) + body


def read_replies(said):
    replies = []
    while said:
        magic, version, status, zero, request_id, size, count = struct.unpack_from("<8sHHIQQQ", said)
        assert (magic, version, zero, size % 8) == (REPLY_MAGIC, 1, 0, 0)
        body, said = said[40 : 40 + size], said[40 + size :]
        assert len(body) == size
        if status == 0:
            assert count * 8 == size
        else:
            assert not any(body[count:])
            body = body[:count]
        replies.append(Reply(request_id, status, body))
    return replies


def decode_arrays(count, dtype=np.int64, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(1, 65, count, dtype=dtype), rng.integers(2, 9000, count, dtype=dtype)


def ragged_arrays(sizes, dtype=np.int64, seed=0):
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    offsets = np.cumsum([0, *sizes])
    return rng.integers(1, 8, count, dtype=dtype), rng.integers(0, 5000, count, dtype=dtype), offsets


RAGGED = st.builds(
    ragged_arrays,
    st.lists(st.integers(0, 64), max_size=12),
    st.sampled_from([np.int32, np.int64]),
    st.integers(0, 99),
)
DECODES = st.builds(
    decode_arrays, st.integers(0, 40), st.sampled_from([np.int32, np.int64]), st.integers(0, 99)
)
WHICH = st.sampled_from([0, 1, "eight", "seventy"])


def expected_us(plans, arrays, which):
    plan = plans[which] if isinstance(which, str) else list(plans.values())[which]
    return plan.decode_us(*arrays) if len(arrays) == 2 else plan.step_us(StepBatch(*arrays))


# ---------------------------------------------------------------------------------------------- binary


@given(st.lists(st.tuples(DECODES | RAGGED, WHICH), max_size=8), st.integers(1, 4096))
def test_frames_are_the_plans_times_to_the_bit_in_order(plans, served, asked, piece):
    sent = b"".join(frame(i, arrays, which) for i, (arrays, which) in enumerate(asked))
    pieces = [sent[i : i + piece] for i in range(0, len(sent), piece)]
    replies = read_replies(exchange(served, pieces))
    assert [reply.request_id for reply in replies] == list(range(len(asked)))
    for reply, (arrays, which) in zip(replies, asked, strict=True):
        assert reply.times.tobytes() == expected_us(plans, arrays, which).tobytes()


def test_a_message_of_the_largest_size_is_answered(plans):
    arrays = decode_arrays(2**20 + 1, np.int32)
    small = decode_arrays(3, np.int32)
    sent = frame(1, small) + frame(2, arrays) + frame(3, small) + frame(4, arrays)
    replies = read_replies(exchange(ServedPlans(plans), [sent]))
    assert [reply.request_id for reply in replies] == [1, 2, 3, 4]
    for reply, sizes in zip(replies, (small, arrays) * 2, strict=True):
        assert np.array_equal(reply.times, plans["eight"].decode_us(*sizes))


def test_description_says_what_is_served(plans, served):
    (reply,) = read_replies(exchange(served, [frame(5)]))
    assert (reply.request_id, reply.status) == (5, 1)
    said = json.loads(reply.body)
    assert [plan["name"] for plan in said["plans"]] == list(plans)
    assert said["fastroof"] == fastroof.__version__
    assert said["limits"]["max_steps"] == LIMITS.max_steps
    assert said["protocol"] == 1
    (line,) = exchange(served, [b'{"id": 1, "describe": true}']).splitlines()
    assert json.loads(line) == {"id": 1, **said}


ONE = ([64], [4096])
WRONG = {
    "version": (frame(7, ONE, version=2), BackendError, "version 2"),
    "kind": (frame(7, ONE, kind=9), BackendError, "kind 9"),
    "width": (frame(7, ONE, width=2), BackendError, "2 bytes"),
    "steps beyond the body": (frame(7, ONE, steps=2), BackendError, "take 32 bytes"),
    "requests of decode steps": (frame(7, ONE, requests=1), BackendError, "1 requests"),
    "an odd body": (frame(7, ONE, body=17), BackendError, "17"),
    "a body beyond the stream": (frame(7, ONE, body=2**63), BackendError, "bytes are more than"),
    "steps beyond the limit": (frame(7, decode_arrays(1001)), BackendError, "1001 steps are more than"),
    "absurd steps": (frame(7, ONE, steps=2**60, body=2**64 - 16), BackendError, "steps are more"),
    "requests beyond the limit": (frame(7, ragged_arrays([5001])), BackendError, "5001 requests"),
    "bytes beyond the limit": (frame(7, [np.zeros(2**20)] * 2, steps=1), BackendError, "bytes are more"),
    "plan number": (frame(7, ONE, plan=2), BackendError, "no plan 2 .* 0 eight, 1 seventy"),
    "plan name": (frame(7, ONE, plan="nine"), BackendError, "no plan 'nine'"),
    "empty plan name": (frame(7, ONE, plan=""), BackendError, "no plan ''"),
    "name too long": (frame(7, ONE, plan="n" * 264), BackendError, "name of a plan"),
    "name not UTF-8": (frame(7, ONE, plan="nine").replace(b"nine", b"ni\xf5e"), BackendError, "UTF-8"),
    "filled up otherwise": (
        frame(7, [np.ones(1, np.int32)] * 2)[:-4] + b"\0\0\0\1", BackendError, "filled up with zeros",
    ),
    "no size": (frame(7, ([64, 1], [4096, 0])), BatchError, "kv_len must be at least 1, got 0 at position 1"),
    "negative": (frame(7, ([-5], [4096])), BatchError, "batch_size must be at least 1, got -5"),
    "a step beyond the plan": (frame(7, ([65], [4096])), PlanRangeError, "max_seqs=65"),
    "offsets from 1": (frame(7, ([1, 1], [4, 4], [1, 2])), BatchError, "offsets of one step"),
    "offsets that end early": (frame(7, ([1, 1], [4, 4], [0, 1, 1])), BatchError, "end at the 2 requests"),
    "offsets that fall": (frame(7, ([1, 1], [4, 4], [0, 2, 1, 2])), BatchError, "offsets must not fall"),
    "a new_tokens of 0": (frame(7, ([1, 0], [4, 4], [0, 1, 2])), BatchError, "request 0 of step 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_frame_gets_one_error_and_the_next_is_answered(plans, served, name):
    wrong, error, message = WRONG[name]
    said = exchange(served, [frame(1, ONE) + wrong + frame(2, ONE) + wrong])
    first, one, second, two = read_replies(said)
    assert (first.request_id, second.request_id) == (1, 2)
    assert first.times == second.times == plans["eight"].decode_us(64, 4096)
    for reply in (one, two):
        assert (reply.request_id, ERRORS[reply.status]) == (7, error)
        with pytest.raises(error, match=message):
            raise error(reply.body.decode())


@pytest.mark.parametrize("junk", [b"x", b"{}\n", bytes(48), bytes(4099), MAGIC[:5], REPLY_MAGIC * 40])
def test_bytes_between_frames_get_one_error(served, junk):
    first, error, second = read_replies(exchange(served, [frame(1, ONE) + junk + frame(2, ONE)]))
    assert (first.request_id, error.request_id, second.request_id) == (1, NO_ID, 2)
    assert b"are dropped" in error.body
    assert first.body == second.body


@pytest.mark.parametrize("missing", [1, 3, 4, 8, 100, 792, 799])
def test_a_frame_cut_short_costs_no_other(plans, served, missing):
    arrays = decode_arrays(50)
    following = [frame(i, ONE) for i in range(20)]
    said = exchange(served, [frame(7, arrays)[:-missing], *following])
    cut, *others = read_replies(said)
    assert (cut.request_id, ERRORS[cut.status]) == (7, BatchError)
    assert [reply.request_id for reply in others] == list(range(20))
    assert {reply.times[0] for reply in others} == {plans["eight"].decode_us(64, 4096)}


@pytest.mark.parametrize("kept", [1, 40, 47, 48, 60, 63])
def test_a_frame_that_the_end_cuts_off_gets_an_error(served, kept):
    first, cut = read_replies(exchange(served, [frame(1, ONE), frame(7, ONE)[:kept]]))
    assert first.status == 0
    assert cut.request_id == (7 if kept >= 48 else NO_ID)
    assert b"the stream ended after" in cut.body


def cut(whole, at):
    return whole[: at % len(whole)]


def spoilt(whole, at, byte):
    return whole[: at % len(whole)] + bytes([byte]) + whole[at % len(whole) + 1 :]


def promised(steps, kind, width):
    return frame(BAD_ID, kind=kind, width=width, steps=steps, body=2 * width * steps)


BAD_FRAMES = st.builds(frame, st.just(BAD_ID), DECODES | RAGGED, WHICH)
BROKEN = st.one_of(
    st.binary(min_size=1, max_size=200),
    st.builds(cut, BAD_FRAMES, st.integers(1)),
    st.builds(spoilt, BAD_FRAMES, st.integers(0), st.integers(0, 255)),
    st.builds(promised, st.integers(0, 1000), st.integers(0, 3), st.sampled_from([4, 8])),
    st.builds(lambda count, rest: (MAGIC * 3)[:count] + rest, st.integers(1, 24), st.binary(max_size=60)),
)


@given(
    st.lists(BROKEN | st.builds(lambda arrays, which: (arrays, which), DECODES | RAGGED, WHICH), max_size=12),
    st.integers(1, 600),
)
def test_of_whole_frames_none_is_lost_whatever_is_between(plans, served, items, piece):
    good = [item for item in items if isinstance(item, tuple)]
    written, number = [frame(0, ONE)], 0
    for item in items:
        if isinstance(item, tuple):
            number += 1
            written.append(frame(number, *item))
        else:
            written.append(item)
    sent = b"".join(written)
    replies = read_replies(exchange(served, [sent[i : i + piece] for i in range(0, len(sent), piece)]))
    answered = [reply for reply in replies if reply.request_id <= len(good)]
    assert [reply.request_id for reply in answered] == list(range(len(good) + 1))
    for reply, (arrays, which) in zip(answered[1:], good, strict=True):
        assert reply.times.tobytes() == expected_us(plans, arrays, which).tobytes()


def test_what_is_too_long_is_not_held(served):
    megabyte = bytes(2**20)
    line = b"[" * 2**20
    tracemalloc.start()
    try:
        said = exchange(served, [frame(1, ONE), frame(7, body=2**25), *[megabyte] * 32, frame(2, ONE)])
        assert [reply.request_id for reply in read_replies(said)] == [1, 7, 2]
        said = exchange(served, [*[line] * 32, b"\n", b'{"describe": true}'])
        assert len(said.splitlines()) == 2
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**24


def test_a_fault_of_the_server_is_answered_and_ends_nothing(plans, capsys):
    class Broken:
        def decode_us(self, batch_size, kv_len):
            raise RuntimeError("a bug")

    served = ServedPlans({**plans, "broken": Broken()})
    fault, good = read_replies(exchange(served, [frame(7, decode_arrays(2), 2), frame(1, ONE)]))
    assert ERRORS[fault.status] is BackendError
    assert fault.body == b"the server failed on this message: RuntimeError: a bug"
    assert good.times == plans["eight"].decode_us(64, 4096)
    assert "RuntimeError: a bug" in capsys.readouterr().err
    assert str(as_refusal(BatchError("x"))) == "x"


def test_writing_is_what_the_specification_says(plans):
    arrays = [np.array([1, 2, 3], np.int32), np.array([4, 5, 6], np.int32)]
    written = b"".join(frames.request_frame(7, frames.DECODE, "eight", arrays))
    assert written == frame(7, arrays, "eight")
    ragged = ragged_arrays([3, 0, 2])
    assert b"".join(frames.request_frame(8, frames.RAGGED, 1, ragged)) == frame(8, ragged, 1)
    assert b"".join(frames.request_frame(9, frames.DESCRIBE)) == frame(9)
    assert frames.one_decode_frame(1, 0, 64, 4096) == frame(1, ONE)
    assert frames.one_step_frame(1, 1, [3, 1], [0, 7]) == frame(1, ([3, 1], [0, 7], [0, 2]), 1)
    with pytest.raises(BackendError, match="at most 256 bytes"):
        frames.request_frame(7, frames.DECODE, "n" * 257, arrays)


def times_and_errors(said):
    *_, status, _, _, size, count = struct.unpack_from("<8sHHIQQQ", said)
    assert (status, size, len(said)) == (2, 16 * count, 40 + size)
    return np.frombuffer(said[40:]).reshape(2, count)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("which", [1, "seventy"])
def test_standard_errors_are_the_plans_to_the_bit(plans, served, which, dtype):
    plan = plans["seventy"]
    for count in (0, 1, 7, 1000):
        sizes = decode_arrays(count, dtype)
        times, errors = times_and_errors(exchange(served, [frame(1, sizes, which, kind=3)]))
        assert times.tobytes() == plan.decode_us(*sizes).tobytes()
        assert errors.tobytes() == plan.decode_error(*sizes).tobytes()
    for counts in ([], [0], [5], [0, 3, 64, 0, 1]):
        arrays = ragged_arrays(counts, dtype)
        times, errors = times_and_errors(exchange(served, [frame(1, arrays, which, kind=4)]))
        assert times.tobytes() == plan.step_us(StepBatch(*arrays)).tobytes()
        assert errors.tobytes() == plan.step_error(StepBatch(*arrays)).tobytes()


def message(request_id, text):
    """A message of JSON by the specification."""
    return (
        frame(request_id, kind=5, steps=len(text), body=-(-len(text) // 8) * 8) + text + bytes(-len(text) % 8)
    )


def test_messages_in_frames_are_answered_as_lines(served):
    texts = [
        b'{"id": "x", "plan": 1, "memory": true}',
        b'{"plan": 0, "explain": [[100, 0], [1, 7]], "errors": true}',
        b'{"plan": "eight", "requests": [[[1, 7]]], "stages": true}',
    ]
    sent = b"".join(message(number, text) for number, text in enumerate(texts))
    replies = read_replies(exchange(served, [sent]))
    assert [(reply.request_id, reply.status) for reply in replies] == [(0, 1), (1, 1), (2, 1)]
    assert [reply.body for reply in replies] == exchange(served, [b"\n".join(texts)]).splitlines()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (message(7, b'{"x": 1}'), "an object needs"),
        (message(7, b""), "is not JSON"),
        (message(7, b"\xff" * 8), "is not JSON"),
        (message(7, b'{"plan": 0, "memory": true}')[:-8], "is not JSON|filled up with zeros"),
        (message(7, b" " * (2**16 + 1)), "longer than the 65536 bytes of a line"),
        (frame(7, kind=5, steps=9, body=8), "takes 16"),
        (frame(7, kind=5, requests=1), "its header 1 requests"),
        (frame(7, ([0], [5]), kind=3), "at least 1, got 0"),
        (frame(7, ([1, 1], [4, 4], [1, 2]), kind=4), "offsets"),
        (frame(7, ([1], [5]), "nine", kind=3), "no plan 'nine'"),
    ],
)
def test_wrong_messages_and_errors_cost_no_other(plans, served, wrong, said):
    error, good = read_replies(exchange(served, [wrong + frame(1, ONE)]))
    assert (error.request_id, good.request_id) == (7, 1)
    with pytest.raises(FastroofError, match=said):
        raise ERRORS[error.status](error.body.decode())
    assert good.times == plans["eight"].decode_us(64, 4096)


# ---------------------------------------------------------------------------------------------- lines


def lines(served, *requests):
    sent = b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in requests)
    return [json.loads(line) for line in exchange(served, [sent]).splitlines()]


@given(st.lists(st.tuples(DECODES | RAGGED, WHICH, st.booleans()), max_size=8), st.integers(1, 4096))
def test_lines_are_the_plans_times_to_the_bit_in_order(plans, served, asked, piece):
    sent = b""
    for i, (arrays, which, as_pairs) in enumerate(asked):
        names = ("new_tokens", "context_len", "offsets") if len(arrays) == 3 else ("batch_size", "kv_len")
        request = {"id": i, "plan": which, **{n: a.tolist() for n, a in zip(names, arrays, strict=True)}}
        if len(arrays) == 3 and as_pairs:
            pairs = np.stack(arrays[:2], 1).tolist()
            steps = [pairs[a:b] for a, b in zip(arrays[2][:-1], arrays[2][1:], strict=True)]
            request = {"id": i, "plan": which, "requests": steps}
        sent += json.dumps(request).encode() + b"\r\n\n"
    replies = exchange(served, [sent[i : i + piece] for i in range(0, len(sent), piece)]).splitlines()
    for i, (line, (arrays, which, _)) in enumerate(zip(replies, asked, strict=True)):
        reply = json.loads(line)
        assert reply.keys() == {"id", "latency_us"}
        assert reply["id"] == i
        assert reply["latency_us"] == expected_us(plans, arrays, which).tolist()


def test_a_number_stands_for_all_steps_and_one_plan_needs_no_name(plans):
    served = ServedPlans({"eight": plans["eight"]})
    one, three = lines(
        served, {"batch_size": 64, "kv_len": 4096}, {"id": "x", "batch_size": [1, 2, 3], "kv_len": 4096}
    )
    assert one == {"id": None, "latency_us": [plans["eight"].decode_us(64, 4096)]}
    assert three == {"id": "x", "latency_us": plans["eight"].decode_us([1, 2, 3], 4096).tolist()}


WRONG_LINES = {
    "{": ("BackendError", "is not JSON"),
    "\xff": ("BackendError", "is not JSON"),
    "[1]": ("BackendError", "must be an object"),
    "{}": ("BackendError", "an object needs"),
    '{"kv_len": [1]}': ("BackendError", r"an object needs .*got \['kv_len'\]"),
    '{"plan": 0, "batch_size": [1], "kv_len": [NaN]}': ("BackendError", "NaN is not valid JSON"),
    '{"plan": 0, "batch_size": [1], "kv_len": [-Infinity]}': ("BackendError", "-Infinity is not valid JSON"),
    '{"plan": 0, "batch_size": [1], "kv_len": [1e999]}': ("BatchError", "kv_len must hold integers"),
    '{"plan": 0, "batch_size": [1], "kv_len": [4.5]}': ("BatchError", "kv_len must hold integers"),
    '{"plan": 0, "batch_size": [true], "kv_len": [4]}': ("BatchError", "batch_size must hold integers"),
    '{"plan": 0, "batch_size": ["1"], "kv_len": [4]}': ("BatchError", "batch_size must hold integers"),
    '{"plan": 0, "batch_size": [[1], [2]], "kv_len": [4, 5]}': ("BatchError", "one list of integers"),
    '{"plan": 0, "batch_size": [[1], 2], "kv_len": [4, 5]}': ("BatchError", "must hold integers"),
    '{"plan": 0, "batch_size": [1, 2], "kv_len": [1, 2, 3]}': ("BatchError", "do not broadcast"),
    '{"plan": 0, "batch_size": [0], "kv_len": [4]}': ("BatchError", "at least 1, got 0"),
    '{"plan": 0, "batch_size": [99], "kv_len": [4]}': ("PlanRangeError", "max_seqs=99"),
    '{"plan": 0, "batch_size": [1%s], "kv_len": [4]}' % ("0" * 30): ("BatchError", "must hold integers"),
    '{"plan": 0, "batch_size": [1%s], "kv_len": [4]}' % ("0" * 9999): ("BackendError", "is not JSON"),
    '{"plan": 0, "requests": 5}': ("BatchError", "a list of"),
    '{"plan": 0, "requests": [[[1, 2, 3]]]}': ("BatchError", r"got \[1, 2, 3\]"),
    '{"plan": 0, "requests": [[[-1, 2]]]}': ("BatchError", "at least 1, got -1"),
    '{"plan": 0, "new_tokens": [1], "context_len": [1], "offsets": [0, 2]}': ("BatchError", "end at the 1"),
    '{"plan": 0, "new_tokens": [1], "context_len": [1], "offsets": 5}': ("BatchError", "one list"),
    '{"plan": 0, "new_tokens": [1], "context_len": [1], "offsets": []}': ("BatchError", "offsets"),
    '{"plan": 0, "batch_size": %s, "kv_len": 4}' % ([1] * 1001): ("BackendError", "1001 steps are more"),
    '{"plan": 0, "requests": [%s]}' % ([[1, 1]] * 5001): ("BackendError", "5001 requests are more"),
    '{"plan": 2, "batch_size": 1, "kv_len": 4}': ("BackendError", "no plan 2"),
    '{"plan": -1, "batch_size": 1, "kv_len": 4}': ("BackendError", "no plan -1"),
    '{"plan": "nine", "batch_size": 1, "kv_len": 4}': ("BackendError", "no plan 'nine'"),
    '{"plan": true, "batch_size": 1, "kv_len": 4}': ("BackendError", "name or a number"),
    '{"batch_size": 1, "kv_len": 4}': ("BackendError", "which of 2 plans"),
    '{"id": [], "plan": 0, "batch_size": 1, "kv_len": 4}': ("BackendError", "id must be"),
    '{"describe": 1}': ("BackendError", "must be true"),
    "[" * 50_000: ("BackendError", "more than 64 lists"),
    " " * 2**17: ("BackendError", "longer than the 65536 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_LINES, ids=lambda line: line[:60])
def test_a_wrong_line_gets_one_error_and_the_next_is_answered(plans, served, wrong):
    good = {"id": 1, "plan": 0, "batch_size": [64], "kv_len": [4096]}
    first, error, second = lines(served, good, wrong.encode("latin-1"), good)
    assert first == second == {"id": 1, "latency_us": [plans["eight"].decode_us(64, 4096)]}
    name, message = WRONG_LINES[wrong]
    assert error.keys() == {"id", "error", "message"}
    assert (error["id"], error["error"]) == (None, name)
    with pytest.raises(BackendError, match=message):
        raise BackendError(error["message"])


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "id",
                    "plan",
                    "requests",
                    "batch_size",
                    "kv_len",
                    "new_tokens",
                    "context_len",
                    "offsets",
                    "describe",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())
ANY_LINE = st.binary(max_size=60).filter(lambda line: b"\n" not in line and line[:1] != MAGIC[:1]) | ANY_JSON


@given(st.lists(ANY_LINE, max_size=6))
def test_any_lines_are_answered_one_by_one(plans, served, wrong):
    good = b'{"id": "good", "plan": 0, "batch_size": 64, "kv_len": 4096}'
    replies = lines(served, *[line for each in wrong for line in (each, good)])
    told = [reply for reply in replies if reply["id"] == "good"]
    assert len(told) == len(wrong)
    assert len(replies) == len(wrong) + sum(bool(line.strip()) for line in wrong)
    assert all(reply["latency_us"] == [plans["eight"].decode_us(64, 4096)] for reply in told)


# ---------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "8"])
def test_a_limit_is_a_whole_number(value):
    with pytest.raises(BackendError, match="max_steps must be a whole number of at least 1"):
        ServeLimits(max_steps=value)


def test_plans_are_as_many_as_the_limits_allow(plans):
    with pytest.raises(BackendError, match="2 plans are more than the 1"):
        ServedPlans(plans, ServeLimits(max_plans=1))
    with pytest.raises(BackendError, match="no plan to serve"):
        ServedPlans({})


def test_readers_take_what_was_read_already(tmp_path):
    nothing = tmp_path / "nothing"
    nothing.touch()
    with nothing.open("rb") as empty, nothing.open("wb") as out:
        inflow = pipe.Inflow(empty.fileno(), pipe.Outflow(out.fileno()))
        reader = frame_reader.FrameReader(inflow, LIMITS, frame(3, ONE))
        found = reader.next_frame()
        assert found is not None
        assert found.header.request_id == 3
        assert reader.next_frame() is None
        assert json_lines.LineReader(inflow, LIMITS, b"a\nb").next_line() == b"a"


def test_a_socket_may_be_both_ends(plans, served):
    ours, theirs = socket.socketpair()
    server = threading.Thread(target=serve_pipe, args=(served, theirs.fileno(), theirs.fileno()))
    server.start()
    with ours, theirs:
        for number in range(3):
            ours.sendall(frame(number, ONE))
            (reply,) = read_replies(ours.recv(1000))
            assert (reply.request_id, reply.times) == (number, plans["eight"].decode_us(64, 4096))
        ours.shutdown(socket.SHUT_WR)
        server.join()
