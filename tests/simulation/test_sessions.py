"""Sessions: requests that start after others, equal to a naive scheduler's to the last bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace, Workload
from fastroof.errors import SimulationError, TraceError
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.steady import Run
from tests.reference.made_workloads import (
    PLANS,
    a_trace,
    an_engine,
    made_clients,
    made_sessions,
    made_workload,
)
from tests.reference.scheduler import REJECTED
from tests.simulation.test_exactness import assert_equal, prove

SESSIONS = 1000
"""Number of workloads of the proof, of which CI takes a fifth."""


@pytest.fixture(scope="module")
def plans(h100):
    return {
        kind: fastroof.compile_plan(model, "h100", h100, engine="vllm", max_num_batched_tokens=2048)
        for kind, model in PLANS.items()
    }


def a_session_workload(seed, kind=None):
    work = made_workload(Random(seed), kind)
    return work._replace(trace=made_sessions(Random(seed), work.trace))


@pytest.mark.loops
def test_small_sessions_are_served_as_by_a_naive_scheduler(plans):
    """Every line of the loops, with the JIT off too."""
    _, statuses = prove(plans, (a_session_workload(seed, "tiny") for seed in range(100)))
    assert (statuses > 10).all()


def test_sessions_of_clients_are_served_as_by_a_naive_scheduler(plans):
    works = [made_workload(Random(seed), "tiny") for seed in range(60)]
    closed = [work._replace(trace=made_clients(Random(at), work.trace)) for at, work in enumerate(works)]
    _, statuses = prove(plans, closed)
    assert (statuses > 5).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.release) for part in range(1, 5))]
)
def test_sessions_are_served_as_by_a_naive_scheduler(plans, part):
    works = [a_session_workload(seed) for seed in range(part, SESSIONS, 5)]
    _, statuses = prove(plans, works)
    print(f"{len(works)} workloads, requests finished, timed out, rejected: {statuses.tolist()}")
    assert (statuses > 50).all()


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["tiny", "usual", "scarce"]))
def test_any_sessions_are_served_to_the_bit(plans, seed, kind):
    prove(plans, [a_session_workload(seed, kind)])


# -- what sessions keep to ------------------------------------------------------------------------


def ends_us(got):
    """When requests ended that were not given up."""
    return np.where(got.status == 0, got.last_us, np.nan)


@pytest.mark.parametrize("seed", range(20))
def test_a_request_starts_a_delay_after_its_last_parent(plans, seed):
    work = a_session_workload(seed, "usual")
    trace, settings = work.trace, replace(work.settings, timeout_s=math.inf, num_gpu_blocks=10**6)
    got = run_engine(plans["whole"], trace, settings)
    for row in np.flatnonzero(got.status != REJECTED):
        parents = trace.parents[trace.parent_offsets[row] : trace.parent_offsets[row + 1]]
        least_us = trace.arrival_s[row] * 1e6
        if len(parents):
            least_us = max(least_us, ends_us(got)[parents].max() + trace.delay_s[row] * 1e6)
        assert got.arrival_us[row] == least_us


def test_sessions_of_one_request_are_a_plain_trace(plans):
    work = made_workload(Random(7), "usual")
    plain = replace(work.trace, clients=None, think_s=0.0)
    alone = replace(plain, parents=np.full(len(plain), -1), order=None)
    assert_equal(*(run_engine(plans["whole"], trace, work.settings) for trace in (plain, alone)))


def test_a_chain_without_delays_is_one_client_of_a_closed_loop(plans):
    lengths = [30, 40, 50, 60], [5, 6, 7, 8]
    chain = a_trace([0.0] * 4, *lengths, parents=np.arange(-1, 3), delay_s=[0.0, 0.5, 0.5, 0.5])
    client = a_trace([0.0] * 4, *lengths, clients=1, think_s=0.5)
    assert_equal(*(run_engine(plans["whole"], trace, an_engine()) for trace in (chain, client)))


def test_a_join_waits_for_the_last_and_a_fan_out_for_one(plans):
    """One call, two tools at once, one answer that waits for both."""
    trace = a_trace(
        [0.0] * 4,
        [100, 200, 300, 400],
        [10, 10, 200, 10],
        parents=np.array([0, 0, 1, 2]),
        parent_offsets=np.array([0, 0, 1, 2, 4]),
        delay_s=[0.0, 1.0, 2.0, 0.25],
    )
    got = run_engine(plans["whole"], trace, an_engine())
    arrival_us, last_us = got.arrival_us, got.last_us
    assert arrival_us[1] == last_us[0] + 1e6
    assert arrival_us[2] == last_us[0] + 2e6
    assert arrival_us[3] == last_us[2] + 0.25e6 > last_us[1] + 0.25e6
    assert trace.session.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"parents": [-1, 1, -1]}, "row 1: parent 1 is the request itself"),
        ({"parents": [-1, 7, 0]}, "row 1: parent 7 is not a row, 0 to 2"),
        ({"parents": [-1, -2, 0]}, "row 1: parent -2 is not a row"),
        ({"parents": [1, 0, -1]}, "row 0: its parents wait for it, or for others"),
        ({"parents": [2, 0, 1]}, "row 0: its parents wait for it, or for others"),
        ({"parents": [-1, 0]}, "has 3 requests, parents 2"),
        ({"parents": [-1, 0, 0.5]}, "parents must hold whole numbers"),
        ({"parents": [-1, 0, 0], "delay_s": [0, -1, 0]}, "row 1: delay_s must be seconds from 0"),
        ({"parents": [-1, 0, 0], "delay_s": [0, math.nan, 0]}, "row 1: delay_s must be seconds from 0"),
        ({"parents": [-1, 0, 0], "delay_s": [1, 0, 0]}, "row 0: delay_s must be 0 without a parent"),
        ({"parents": [-1, 0, 0], "delay_s": [0, 0]}, "has 3 requests, delay_s 2"),
        ({"parents": [-1, 0, 1], "delay_s": [0, 9e9, 9e9]}, "row 2: arrival_s must be seconds"),
        ({"parents": [-1, 0, 0], "session": [1, 1, 2]}, "row 2: its parent, row 0, is in session 1"),
        ({"parents": [0, 1], "parent_offsets": [0, 0, 2, 1]}, "parent_offsets must be"),
        ({"parents": [0, 1], "parent_offsets": [0, 3, 1, 2]}, "parent_offsets must not decrease"),
        ({"delay_s": [0, 1, 1]}, "delay_s goes with parents"),
        ({"parents": [-1, -1, 0], "session": [1, 1, 1], "clients": 2}, "clients start a session with one"),
    ],
)
def test_wrong_links_are_one_line(given, match):
    with pytest.raises(TraceError, match=match) as raised:
        Trace([0.0, 0.0, 0.0], [8, 8, 8], [1, 1, 1], **given)
    assert "\n" not in str(raised.value)


def test_a_faster_trace_keeps_its_delays():
    trace = Trace([0, 0, 8, 9], [1, 2, 3, 4], [1] * 4, parents=[-1, 0, -1, 0], delay_s=[0, 6, 0, 0])
    assert trace.arrival_s.tolist() == [0.0, 6.0, 8.0, 9.0]
    fast = trace.rate_scaled(2)
    # the second request follows by its delay, the last by its own arrival
    assert fast.arrival_s.tolist() == [0.0, 4.0, 4.5, 6.0]
    assert fast.input_tokens.tolist() == [1, 3, 4, 2]
    assert fast.in_file_order(fast.input_tokens).tolist() == [1, 2, 3, 4]


def test_a_part_of_a_trace_keeps_the_links_within_it():
    trace = Trace([0, 5, 9], [1, 2, 3], [1] * 3, parents=[-1, 0, 1], delay_s=[0, 1, 1])
    first, last = trace.limited(2), trace.sliced(4)
    assert first.parents.tolist(), first.parent_offsets.tolist() == ([0], [0, 0, 1])
    assert last.parents.tolist() == [0]
    assert last.arrival_s.tolist() == [1.0, 5.0]
    assert last.delay_s.tolist() == [0.0, 1.0]


# -- files ----------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def written(content, name="trace.jsonl"):
        path = tmp_path / name
        lines = [content] if isinstance(content, str) else [f"{json.dumps(row)}\n" for row in content]
        path.write_text("".join(lines))
        return path

    return written


def links(trace):
    """Parents of each row in the file's order, as its rows."""
    return trace.table()["parent"].to_pylist()


BAILIAN = [
    {"chat_id": one, "parent_chat_id": parent, "timestamp": at, "input_length": 40, "output_length": 9,
     "type": "text", "turn": turn, "hash_ids": [5, 6, 7]}
    for one, parent, at, turn in [(1, -1, 61.5, 1), (2, 1, 62.5, 2), (9, 77, 63.0, 4), (4, 1, 64.0, 2)]
]  # fmt: skip


def test_bailians_chats_follow_their_parents(write):
    trace = fastroof.load_trace(write(BAILIAN))
    # the third has its parent before the file begins
    assert links(trace) == [[], [0], [], [0]]
    assert trace.arrival_s.tolist() == [0.0, 1.0, 1.5, 2.5]
    assert trace.session.tolist() == [0, 0, 2, 0]
    assert trace.hash_block_size == 16


TURNS = [
    {"timestamp": 1000, "session_id": "a", "input_length": 300, "output_length": 40},
    {"timestamp": 500, "session_id": "b", "input_length": 30, "output_length": 4},
    {"session_id": "a", "delay": 2000, "input_length": 100, "output_length": 20},
    {"session_id": "a", "delay": 250.5, "input_length": 7, "output_length": 1},
]


def test_mooncakes_turns_follow_each_other_and_grow(write):
    trace = fastroof.load_trace(write(TURNS))
    table = trace.table().to_pydict()
    assert table["parent"] == [[], [], [0], [2]]
    assert table["delay_s"] == [0.0, 0.0, 2.0, 0.2505]
    assert table["input_tokens"] == [300, 30, 300 + 40 + 100, 300 + 40 + 100 + 20 + 7]
    assert table["arrival_s"] == [0.5, 0.0, 2.5, 2.7505]
    whole = [row | {"context_mode": "message_array_with_responses"} for row in TURNS]
    assert fastroof.load_trace(write(whole)).table()["input_tokens"].to_pylist() == [300, 30, 100, 7]
    without = [{k: v for k, v in row.items() if k != "timestamp"} for row in TURNS]
    assert fastroof.load_trace(write(without)).table()["arrival_s"].to_pylist() == [0.0, 0.0, 2.0, 2.2505]


PLAIN = """session,parent,delay_s,arrival_s,input_tokens,output_tokens,status
x,,0,0,10,5,200
x,0,1.5,,12,6,500
x,1,2.5,,14,7,200
y,-1,,3,9,9,200
x,0 2,1,,5,5,200
"""


def test_plain_columns_and_a_failed_request_between_two(write):
    trace = fastroof.load_trace(write(PLAIN, "trace.csv"))
    assert trace.left_out == {"status 500": 1}
    # what followed the failed one follows its parent
    assert links(trace) == [[], [0], [], [0, 1]]
    assert trace.table()["delay_s"].to_pylist() == [0.0, 2.5, 0.0, 1.0]
    again = fastroof.load_trace(trace.table())
    assert again.table().to_pydict() == trace.table().to_pydict()


def test_a_log_with_session_ids_alone_stays_a_plain_trace(write):
    rows = "arrival_s,input_tokens,output_tokens,session_id\n0,9,1,a\n1,9,1,a\n"
    assert not fastroof.load_trace(write(rows, "log.csv")).has_parents
    named = fastroof.load_trace(write(rows, "log.csv"), columns="session=session_id")
    assert links(named) == [[], [0]]
    other = rows.replace("session_id", "of").replace("0,9,1,a\n", "0,9,1,a\n")
    assert links(fastroof.load_trace(write(other, "log.csv"), columns="session=of")) == [[], [0]]


def an_agent(**given):
    """A session of the KV-cache tester: a call, an agent of two calls, and a call that waits for it."""
    calls = [
        {"t": 0.5, "type": "n", "model": "m", "in": 130, "out": 10, "hash_ids": [1, 2, 3], "api_time": 2.0},
        {"t": 3.0, "type": "subagent", "agent_id": "a", "status": "completed", "requests": [
            {"t": 3.0, "type": "s", "model": "m", "in": 64, "out": 10, "hash_ids": [9], "api_time": 1.0},
            {"t": 5.0, "type": "n", "model": "m", "in": 100, "out": 3, "hash_ids": [9]},
        ]},
        {"t": 10.0, "type": "n", "in": 190, "out": 10, "hash_ids": [1, 2, 4], "think_time": 1.25},
    ]  # fmt: skip
    return {"id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": calls} | given


def test_agents_are_joined_by_the_call_after_them(write):
    trace = fastroof.load_trace(write([an_agent(), an_agent(id="t")]))
    table = trace.table().to_pydict()
    assert table["parent"] == [[], [0], [1], [0, 2], [], [4], [5], [4, 6]]
    # by the recorded end of the call before, or by the time to think
    assert table["delay_s"][:4] == [0.0, 0.5, 1.0, 1.25]
    assert table["session"] == [0] * 4 + [1] * 4
    assert trace.hash_block_size == 64
    # ids are a session's own, and the partial block without an id is never found
    assert table["hash_ids"][3][:2] == table["hash_ids"][0][:2]
    assert not set(table["hash_ids"][0]) & set(table["hash_ids"][4])
    assert len(table["hash_ids"][2]) == 2
    alone = an_agent()
    alone["requests"][1]["status"] = "async_launched"
    assert links(fastroof.load_trace(write(json.dumps(alone, indent=1), "one.json"))) == [[], [0], [1], [0]]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("0,0\n", "line 2: parent '0' is the row itself"),
        ("7,0\n", "line 2: parent '7' is no row, 0 to 0 of the file"),
        ("a,0\n", "line 2: parent 'a' is no row"),
        (",0\n1,0\n", "line 3: parent '1' is the row itself"),
        ("1,0\n0,0\n", "row 0: its parents wait for it"),
        (",0\n0,-1\n", "line 3: delay_s must be from 0 to 1e"),
        (",0\n0,1e30\n", "line 3: delay_s must be from 0 to 1e"),
        (",0\n0,soon\n", "delay_s must be numbers"),
    ],
)
def test_wrong_files_are_one_line(write, content, match):
    rows = "".join(f"{line},0,9,1\n" for line in content.split())
    path = write(f"parent,delay_s,arrival_s,input_tokens,output_tokens\n{rows}", "wrong.csv")
    with pytest.raises(TraceError, match=match) as raised:
        fastroof.load_trace(path)
    assert str(path) in str(raised.value) or "wrong" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"block_size": 0}, "session 1: block_size must be a whole number"),
        ({"requests": 5}, "session 1 must be an object with requests"),
        ({"requests": []}, "has no requests"),
        ({"requests": [5]}, "session 1, request 1 must be an object"),
        ({"requests": [{"type": "subagent", "t": 0}]}, "an agent must have requests"),
        ({"requests": [{"type": "subagent", "t": 0, "requests": [5]}]}, "request 1.1 must be an object"),
        ({"requests": [{"t": -1, "in": 5, "out": 1}]}, "t must be seconds of at least 0"),
        ({"requests": [{"t": 0, "in": "x", "out": 1}]}, "in must be whole tokens"),
        ({"requests": [{"t": 0, "in": 5, "out": 1, "hash_ids": [1, 2]}]}, "has 2 ids, and a prompt of 5"),
        ({"requests": [{"t": 0, "in": 5, "out": 1, "hash_ids": ["a"]}]}, "must be a list of whole numbers"),
        ({"requests": [{"t": 0, "in": 5, "out": 1, "api_time": "x"}]}, "api_time must be seconds"),
    ],
)
def test_wrong_agents_are_one_line(write, given, match):
    with pytest.raises(TraceError, match=match) as raised:
        fastroof.load_trace(write([an_agent(**given)]))
    assert "\n" not in str(raised.value)


# -- drawn sessions and results -------------------------------------------------------------------

DRAWN = {
    "rate": 2,
    "requests": 60,
    "turns": "uniform:1:4",
    "calls": "uniform:1:3",
    "isl": "uniform:50:90",
    "growth_tokens": 10,
    "osl": "uniform:5:9",
    "think_s": "exponential:3",
    "tool_s": "uniform:0.5:0.75",
    "system_tokens": 100,
}


def test_drawn_prompts_hold_what_came_before():
    trace = Workload(**DRAWN).trace()
    table = trace.table().to_pydict()
    for row, parents in enumerate(table["parent"]):
        if not parents:
            assert 150 <= table["input_tokens"][row] <= 190
            assert table["cached_tokens"][row] == 100
            continue
        (before,) = parents
        history = table["input_tokens"][before] + table["output_tokens"][before]
        assert (table["input_tokens"][row], table["cached_tokens"][row]) == (history + 10, history)
        assert table["session"][row] == table["session"][before]
        assert table["delay_s"][row] > 0
    tools = [delay for delay in table["delay_s"] if 0.5 <= delay <= 0.75]
    assert len(tools) > 15


def test_another_rate_of_sessions_changes_only_when_they_begin():
    slow, fast = (Workload(**DRAWN | {"rate": rate}).trace() for rate in (1, 4))
    one, other = slow.table().to_pydict(), fast.table().to_pydict()
    assert all(one[name] == other[name] for name in one if name != "arrival_s")
    begin = [row for row, parents in enumerate(one["parent"]) if not parents]
    np.testing.assert_allclose(
        [one["arrival_s"][row] for row in begin], 4 * np.array(other["arrival_s"])[begin]
    )


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"turns": 0}, "turns must be"),
        ({"calls": "many"}, "calls must be"),
        ({"clients": 3, "rate": None}, "give turns and calls, or clients"),
        ({"think_s": "exponential:-1"}, "think_s must be seconds"),
        ({"tool_s": math.inf}, "tool_s must be seconds"),
        ({"tool_s": "uniform:3:2"}, "tool_s must be seconds"),
        ({"think_s": "lognormal:0:1"}, "think_s must be seconds"),
        ({"system_tokens": -1}, "system_tokens must be"),
        ({"turns": 1, "calls": 1, "think_s": 0}, "go with several turns or calls"),
        ({"turns": 10**5, "requests": 10**5, "growth_tokens": 10**3}, "prompts grow to"),
    ],
)
def test_wrong_sessions_of_a_workload(given, match):
    with pytest.raises(TraceError, match=match):
        Workload(**DRAWN | given).trace()


def test_results_of_sessions_are_those_of_their_requests(plans):
    trace = Workload(**DRAWN).trace()
    sim = fastroof.simulate(plans["whole"], trace, max_num_batched_tokens=2048)
    requests, sessions, answers = sim.requests.to_pydict(), sim.sessions.to_pydict(), sim.summary()
    assert sum(sessions["requests"]) == len(trace) == 60
    for row, number in enumerate(sessions["session"]):
        own = [at for at, one in enumerate(requests["session"]) if one == number]
        start = min(requests["arrival_s"][at] for at in own)
        end = max(requests["arrival_s"][at] + requests["e2e_ms"][at] / 1e3 for at in own)
        assert sessions["start_s"][row] == start
        assert sessions["e2e_ms"][row] == pytest.approx((end - start) * 1e3, rel=1e-9)
        assert sessions["turns"][row] == len(own) == max(requests["turn"][at] for at in own)
    assert answers["session_e2e_ms"]["mean"] == pytest.approx(np.mean(sessions["e2e_ms"]))
    assert answers["sessions"]["finished"] == answers["sessions"]["sessions"] == len(sessions["session"])
    turns = answers["sessions"]["by_turn"]
    assert [one["turn"] for one in turns] == list(range(1, max(requests["turn"]) + 1))
    assert sum(one["requests"] for one in turns) == 60
    first = [requests["ttft_ms"][at] for at, turn in enumerate(requests["turn"]) if turn == 1]
    assert turns[0]["ttft_ms"]["mean"] == pytest.approx(np.mean(first))
    cut = fastroof.simulate(plans["whole"], trace, max_num_batched_tokens=2048, timeout_s=1e-4)
    assert set(cut.sessions["status"].to_pylist()) == {"cut"}
    assert math.isnan(cut.summary()["session_e2e_ms"]["mean"])


def a_row_of_sessions(count, requests, delay_s):
    """Sessions that start a second apart, of requests that follow each other."""
    first = np.tile(np.arange(requests) == 0, count)
    rows = np.arange(count * requests)
    return Trace(
        np.where(first, rows // requests, 0.0), [10] * len(rows), [2] * len(rows),
        parents=np.where(first, -1, rows - 1), delay_s=np.where(first, 0.0, delay_s),
    )  # fmt: skip


def test_turns_beyond_the_last_row_share_it(plans):
    sim = fastroof.simulate(plans["whole"], a_row_of_sessions(1, 34, 0.1), max_num_batched_tokens=2048)
    rows = sim.summary()["sessions"]["by_turn"]
    assert [row["turn"] for row in rows] == list(range(1, 33))
    assert [row["requests"] for row in rows] == [1] * 31 + [3]


def test_open_requests_are_those_of_the_sessions_open_at_any_moment(plans):
    trace = a_row_of_sessions(12, 2, 3.5)
    sim = fastroof.simulate(plans["whole"], trace, max_num_batched_tokens=2048)
    starts_s = np.array(sim.sessions["start_s"])
    ends_s = starts_s + np.array(sim.sessions["e2e_ms"]) / 1e3
    # seconds within five in which as many sessions start as end
    within_s = np.minimum(ends_s, 10.0) - np.maximum(starts_s, 5.0)
    open_requests = 2 * np.maximum(within_s, 0.0).sum() / 5.0
    assert Run.whole(trace).open_requests(sim.outcomes) == pytest.approx(open_requests, rel=1e-3)


def test_pools_serve_sessions_and_find_their_prompts_again(plans):
    """Prefill engines keep prompts, not the answers of decode engines: a single engine finds more."""
    trace = Workload(**DRAWN).trace()
    few = {"max_num_batched_tokens": 2048}
    pools = fastroof.simulate(fastroof.Fleet([fastroof.Pool(plans["whole"], **few)] * 2), trace)
    alone = fastroof.simulate(plans["whole"], trace, **few)
    found, most = (sim.summary() for sim in (pools, alone))
    assert found["sessions"]["finished"] == found["sessions"]["sessions"] == len(pools.sessions)
    assert 0.2 < found["prefix_cache"]["hit_rate"] < most["prefix_cache"]["hit_rate"]
    # each turn but the first follows an answer
    starts_us, turn = pools.outcomes.arrival_us, np.array(trace.turns)
    assert (starts_us[turn == 1] == trace.arrival_s[turn == 1] * 1e6).all()


def test_loads_without_sessions_are_refused(plans):
    plain = fastroof.simulate(plans["whole"], a_trace([0.0], [10], [2]), max_num_batched_tokens=2048)
    with pytest.raises(SimulationError, match="has no sessions"):
        _ = plain.sessions
