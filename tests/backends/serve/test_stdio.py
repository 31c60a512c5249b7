"""``fastroof serve --stdio``: the same bits as the plans, in order, and nothing that comes ends it."""

from __future__ import annotations

import json
import os
import socket
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import StepBatch
from fastroof.backends.serve.answers import ServedPlans, as_refusal
from fastroof.backends.serve.limits import ServeLimits
from fastroof.backends.serve.stdio import serve_pipe
from fastroof.errors import BackendError, BatchError

LIMITS = ServeLimits(max_steps=1000, max_requests=5000, max_message_bytes=2**17, max_line_bytes=2**16)


@pytest.fixture(scope="module")
def plans(h100):
    small = {"max_num_batched_tokens": 512, "max_num_seqs": 64}
    eight = fastroof.compile_plan("llama-3.1-8b", "h100", h100, **{"engine": "kernels", **small})
    return {
        "eight": eight,
        "seventy": fastroof.compile_plan(
            "llama-3.1-70b", "h100", h100, tp=4, **{"engine": "kernels", **small}
        ),
    }


@pytest.fixture(scope="module")
def served(plans):
    return ServedPlans(plans, LIMITS)


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
        output = replies.read()
    for thread in threads:
        thread.join()
    return output


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


def test_description_names_what_is_served(plans, served):
    (line,) = exchange(served, [b'{"id": 1, "describe": true}']).splitlines()
    reply = json.loads(line)
    assert reply["id"] == 1
    assert [plan["name"] for plan in reply["plans"]] == list(plans)
    assert reply["fastroof"] == fastroof.__version__
    assert reply["limits"]["max_steps"] == LIMITS.max_steps
    assert reply["protocol"] == 1


def test_what_is_too_long_is_not_held(served):
    line = b"[" * 2**20
    tracemalloc.start()
    try:
        output = exchange(served, [*[line] * 32, b"\n", b'{"describe": true}'])
        assert len(output.splitlines()) == 2
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**24


def test_a_fault_of_the_server_is_answered_and_ends_nothing(plans, capsys):
    class Broken:
        def decode_us(self, batch_size, kv_len):
            raise RuntimeError("a bug")

    served = ServedPlans({**plans, "broken": Broken()})
    fault, good = lines(
        served,
        {"id": 7, "plan": 2, "batch_size": 1, "kv_len": 2},
        {"plan": 0, "batch_size": 64, "kv_len": 4096},
    )
    assert fault == {
        "id": 7,
        "error": "BackendError",
        "message": "the server failed on this message: RuntimeError: a bug",
    }
    assert good["latency_us"] == [plans["eight"].decode_us(64, 4096)]
    assert "RuntimeError: a bug" in capsys.readouterr().err
    assert str(as_refusal(BatchError("x"))) == "x"


def lines(served, *requests):
    sent = b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in requests)
    return [json.loads(line) for line in exchange(served, [sent]).splitlines()]


@given(st.lists(st.tuples(DECODES | RAGGED, WHICH, st.booleans()), max_size=8), st.integers(1, 4096))
def test_lines_are_the_plans_times_to_the_bit_in_order(plans, served, questions, piece):
    sent = b""
    for i, (arrays, which, as_pairs) in enumerate(questions):
        names = ("new_tokens", "context_len", "offsets") if len(arrays) == 3 else ("batch_size", "kv_len")
        request = {"id": i, "plan": which, **{n: a.tolist() for n, a in zip(names, arrays, strict=True)}}
        if len(arrays) == 3 and as_pairs:
            pairs = np.stack(arrays[:2], 1).tolist()
            steps = [pairs[a:b] for a, b in zip(arrays[2][:-1], arrays[2][1:], strict=True)]
            request = {"id": i, "plan": which, "requests": steps}
        sent += json.dumps(request).encode() + b"\r\n\n"
    replies = exchange(served, [sent[i : i + piece] for i in range(0, len(sent), piece)]).splitlines()
    for i, (line, (arrays, which, _)) in enumerate(zip(replies, questions, strict=True)):
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
    "{}": ("BackendError", "a message needs one of"),
    '{"kv_len": [1]}': ("BackendError", 'kv_len needs "batch_size"'),
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
    '{"plan": 0, "batch_size": [99], "kv_len": [4]}': ("PlanRangeError", "max_num_seqs=99"),
    '{"plan": 0, "batch_size": [1%s], "kv_len": [4]}' % ("0" * 30): ("BatchError", "must hold integers"),
    '{"plan": 0, "batch_size": [1%s], "kv_len": [4]}' % ("0" * 9999): ("BackendError", "is not JSON"),
    '{"plan": 0, "requests": 5}': ("BatchError", "one list of"),
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
    "[" * 50_000: ("BackendError", "more than 64 nested lists"),
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


def test_a_socket_may_be_both_ends(plans, served):
    ours, theirs = socket.socketpair()
    server = threading.Thread(target=serve_pipe, args=(served, theirs.fileno(), theirs.fileno()))
    server.start()
    with ours, theirs:
        for number in range(3):
            ours.sendall(b'{"id": %d, "plan": 0, "batch_size": 64, "kv_len": 4096}\n' % number)
            reply = json.loads(ours.recv(1000))
            assert reply == {"id": number, "latency_us": [plans["eight"].decode_us(64, 4096)]}
        ours.shutdown(socket.SHUT_WR)
        server.join()
