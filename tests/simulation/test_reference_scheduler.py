"""The naive scheduler against examples worked by hand, and against a second one."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from tests.reference.fleet import Fleet, serve
from tests.reference.made_workloads import a_trace, an_engine, made_workload
from tests.reference.pools import Pool
from tests.reference.replay import Schedule, TimedRequest, replay
from tests.reference.scheduler import FINISHED, REJECTED, TIMED_OUT


def step_us(new_tokens, context_len):
    """100 us a step and 1 us a new token."""
    return 100.0 + sum(new_tokens)


def served(trace, **engine):
    return serve(trace, an_engine(**engine), step_us)


def times(seen, name):
    return [getattr(request, name) for request in seen.requests]


def steps_of(seen):
    return [flight.made[0] for flight in seen.flights]


def held(seen):
    """New tokens of each step, by request."""
    return [{r.index: n for r, n in zip(s.requests, s.new_tokens, strict=True)} for s in steps_of(seen)]


def test_a_prompt_is_cut_at_the_budget_and_goes_on_with_decodes():
    seen = served(a_trace([0, 0], [10, 20], [2, 3]), max_num_batched_tokens=16, max_num_seqs=4)
    assert held(seen) == [{0: 10, 1: 6}, {0: 1, 1: 14}, {1: 1}, {1: 1}]
    assert [step.context_len for step in steps_of(seen)] == [[0, 0], [10, 6], [20], [21]]
    assert times(seen, "first_us") == [116.0, 231.0]
    assert times(seen, "last_us") == [231.0, 433.0]
    assert seen.gaps_us == [115.0, 101.0, 101.0]


def test_the_last_that_runs_gives_its_blocks_and_computes_all_again():
    seen = served(a_trace([0, 0], [2, 2], [5, 4]), num_gpu_blocks=8, block_size=1)
    assert held(seen) == [{0: 2, 1: 2}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {1: 5}]
    assert steps_of(seen)[-1].context_len == [0]
    assert times(seen, "first_us") == [104.0, 104.0]
    assert times(seen, "last_us") == [510.0, 615.0]
    assert times(seen, "preemptions") == [0, 1]
    # across the preemption too
    assert sorted(seen.gaps_us) == [101.0, 101.0, 102.0, 102.0, 102.0, 102.0, 307.0]
    assert seen.free_blocks == 8


def test_who_lacks_a_block_and_is_last_is_its_own_victim():
    seen = served(a_trace([0, 0], [4, 1], [2, 3]), num_gpu_blocks=6, block_size=1)
    # after a step 4 and 1 blocks are taken, after two all 6 are: then the first ends, and all is free
    assert held(seen) == [{0: 4, 1: 1}, {0: 1}, {1: 2}, {1: 1}]
    assert times(seen, "preemptions") == [0, 1]


def test_asynchronous_scheduling_sees_an_arrival_a_step_late():
    trace = a_trace([0, 50e-6], [10, 10], [2, 1])
    prompt = served(trace)
    late = served(trace, async_scheduling=True)
    assert held(prompt) == [{0: 10}, {0: 1, 1: 10}]
    assert held(late) == [{0: 10}, {0: 1}, {1: 10}]
    assert times(late, "last_us") == [211.0, 321.0]


def test_asynchronous_scheduling_frees_places_a_step_late():
    trace = a_trace([0, 0], [10, 10], [2, 1])
    late = served(trace, async_scheduling=True, max_num_seqs=1)
    # with its last token under way the first request still has the only place
    assert held(late) == [{0: 10}, {0: 1}, {1: 10}]
    assert [(flight.start_us, flight.end_us) for flight in late.flights] == [
        (0.0, 110.0),
        (110.0, 211.0),
        (211.0, 321.0),
    ]


def test_a_request_may_lose_its_blocks_with_its_last_token_under_way():
    trace = a_trace([0, 0], [4, 3], [3, 2])
    seen = served(trace, async_scheduling=True, num_gpu_blocks=9, block_size=1)
    # the second's last token is under way when the third step is made, in which the first lacks a block
    assert held(seen) == [{0: 4, 1: 3}, {0: 1, 1: 1}, {0: 1}]
    assert times(seen, "preemptions") == [0, 1]
    assert times(seen, "last_us") == [310.0, 209.0]
    assert seen.free_blocks == 9


@pytest.mark.parametrize(
    ("timeout_us", "status", "last_us"), [(211, FINISHED, 211.0), (210, TIMED_OUT, math.nan)]
)
def test_a_client_gives_up_after_its_time(timeout_us, status, last_us):
    seen = served(a_trace([0], [10], [2]), timeout_s=timeout_us / 1e6)
    assert seen.requests[0].status == status
    assert seen.requests[0].first_us == 110.0
    np.testing.assert_equal(seen.requests[0].last_us, last_us)
    assert seen.gaps_us == ([101.0] if status == FINISHED else [])
    assert len(seen.flights) == 2


def test_a_token_after_the_time_is_not_seen_and_others_have_the_room():
    trace = a_trace([0, 1e-6], [1000, 10], [9, 1])
    seen = served(trace, timeout_s=500e-6, max_num_seqs=1)
    # the second waits as long as the first runs, and both are gone when it ends
    assert times(seen, "status") == [TIMED_OUT, TIMED_OUT]
    assert np.isnan(times(seen, "first_us")).all()
    assert held(seen) == [{0: 1000}]
    late = served(trace, timeout_s=500e-6, max_num_seqs=1, async_scheduling=True)
    # its next token was scheduled, and its client is gone
    assert held(late) == [{0: 1000}, {0: 1}]
    third = served(a_trace([0, 800e-6], [1000, 10], [9, 1]), timeout_s=500e-6, max_num_seqs=1)
    assert times(third, "last_us")[1] == 1210.0
    assert third.free_blocks == 100_000


def test_a_client_of_a_closed_loop_sends_its_next_request_when_it_has_its_last_token():
    trace = a_trace([0] * 4, [10, 10, 10, 10], [1, 2, 1, 1], clients=2, think_s=30e-6)
    seen = served(trace)
    # the third is sent 30 us after the first's token, while the second decodes
    assert times(seen, "arrival_us") == [0.0, 0.0, 150.0, 251.0]
    assert held(seen) == [{0: 10, 1: 10}, {1: 1}, {2: 10}, {3: 10}]
    assert times(seen, "last_us") == [120.0, 221.0, 331.0, 441.0]
    at_once = served(a_trace([0] * 3, [10] * 3, [1, 3, 1], clients=2))
    assert held(at_once) == [{0: 10, 1: 10}, {1: 1, 2: 10}, {1: 1}]


def test_a_client_that_gave_up_sends_its_next_request():
    trace = a_trace([0] * 2, [10, 20], [5, 1], clients=1, think_s=0.0)
    seen = served(trace, timeout_s=300e-6)
    assert times(seen, "status") == [TIMED_OUT, FINISHED]
    assert times(seen, "arrival_us") == [0.0, 312.0]
    assert times(seen, "last_us")[1] == 432.0
    assert held(seen) == [{0: 10}, {0: 1}, {0: 1}, {1: 20}]


def test_prompts_are_whole_without_chunks():
    seen = served(
        a_trace([0, 0, 0], [10, 20, 5], [2, 1, 1]),
        max_num_batched_tokens=24,
        max_num_seqs=4,
        chunked_prefill=False,
    )
    # the third is not let past the second
    assert held(seen) == [{0: 10}, {0: 1, 1: 20}, {2: 5}]


def test_a_reserved_output_is_never_preempted():
    seen = served(a_trace([0, 0], [2, 2], [5, 4]), num_gpu_blocks=8, block_size=1, reserve_output=True)
    assert held(seen) == [{0: 2}, *[{0: 1}] * 4, {1: 2}, *[{1: 1}] * 3]
    assert times(seen, "preemptions") == [0, 0]


def test_room_for_a_whole_prompt_is_an_option():
    trace = a_trace([0, 0], [4, 6], [2, 1])
    engine = {"num_gpu_blocks": 8, "block_size": 1, "max_num_batched_tokens": 6, "max_num_seqs": 4}
    assert held(served(trace, **engine)) == [{0: 4}, {0: 1}, {1: 6}]
    # the second begins with 2 tokens, lacks blocks for the rest, and begins again
    piecemeal = served(trace, admit_whole_prompt=False, **engine)
    assert held(piecemeal) == [{0: 4, 1: 2}, {0: 1}, {1: 6}]
    assert times(piecemeal, "preemptions") == [0, 1]


def test_a_cached_prefix_is_context_until_a_preemption():
    seen = served(a_trace([0], [20], [2], [15]))
    assert [(step.new_tokens, step.context_len) for step in steps_of(seen)] == [([5], [15]), ([1], [20])]
    full = served(a_trace([0, 0], [2, 2], [5, 4], [0, 1]), num_gpu_blocks=8, block_size=1)
    assert held(full)[0] == {0: 2, 1: 1}
    assert steps_of(full)[-1].context_len == [0]


def test_prompts_first_holds_decodes_back():
    trace = a_trace([0, 0, 100e-6], [10, 20, 5], [3, 2, 1])
    seen = served(trace, order="prefill_first", max_num_batched_tokens=16, max_num_seqs=4)
    # two steps of prompts, decodes of both, and the third prompt comes before decodes
    assert held(seen) == [{0: 10, 1: 6}, {1: 14, 2: 2}, {2: 3}, {0: 1, 1: 1}, {0: 1}]
    assert times(seen, "first_us") == [116.0, 232.0, 335.0]
    assert times(seen, "last_us") == [538.0, 437.0, 335.0]
    assert seen.gaps_us == [437.0 - 116.0, 437.0 - 232.0, 101.0]


def test_prompts_first_preempts_in_a_step_of_decodes():
    seen = served(a_trace([0, 0], [2, 2], [5, 4]), order="prefill_first", num_gpu_blocks=8, block_size=1)
    assert held(seen) == [{0: 2, 1: 2}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {1: 5}]


def test_what_never_fits_is_rejected_and_the_rest_goes_on():
    trace = a_trace([0, 0, 0], [10, 100, 10], [1, 1, 120])
    seen = served(trace, num_gpu_blocks=6)
    assert times(seen, "status") == [FINISHED, REJECTED, REJECTED]
    assert (
        served(trace, chunked_prefill=False, max_num_batched_tokens=99, max_num_seqs=9).requests[1].status
        == REJECTED
    )
    closed = served(a_trace([0, 0, 0], [10, 100, 10], [1, 1, 1], clients=1), num_gpu_blocks=5)
    assert times(closed, "last_us")[2] == 220.0


def test_a_slower_clock_slows_steps_alone():
    trace = a_trace([0, 1], [10, 10], [2, 1])
    seen = serve(trace, an_engine(), step_us, time_scale=2.0)
    assert times(seen, "last_us") == [422.0, 1e6 + 220.0]


def test_ranks_take_turns_and_step_together():
    trace, pool = a_trace([0] * 3, [10, 20, 30], [2, 1, 1]), Pool(an_engine(), step_us, ranks=2)
    seen = Fleet(trace, pool).run()
    of_ranks = [[made.new_tokens for made in flight.made] for flight in seen.flights]
    assert of_ranks == [[[10, 30], [20]], [[1], []]]


@pytest.mark.slow
def test_it_is_the_second_scheduler():
    """Open loops of mixed steps; times are in seconds there."""
    compared = preemptions = 0
    for seed in range(400):
        trace, engine, _, _ = made_workload(Random(seed))
        is_replayed = engine.order == "mixed" and engine.chunked_prefill and engine.admit_whole_prompt
        is_replayed &= not engine.reserve_output and math.isinf(engine.timeout_s) and trace.clients is None
        if not is_replayed:
            continue
        mine = serve(trace, engine, step_us)
        if REJECTED in times(mine, "status"):
            continue
        rows = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.cached_tokens, strict=True)
        requests = [TimedRequest(float(at), *map(int, sizes)) for at, *sizes in rows]
        schedule = Schedule(
            engine.max_num_seqs, engine.max_num_batched_tokens, engine.num_gpu_blocks, engine.block_size,
            is_asynchronous=engine.async_scheduling,
        )  # fmt: skip
        theirs = replay(requests, lambda ranks: step_us(*ranks[0]), schedule)
        assert len(mine.flights) == theirs.steps
        assert sum(times(mine, "preemptions")) == theirs.preemptions
        np.testing.assert_allclose(times(mine, "first_us"), theirs.first_token_s * 1e6, rtol=1e-9)
        np.testing.assert_allclose(times(mine, "last_us"), theirs.last_token_s * 1e6, rtol=1e-9)
        compared += 1
        preemptions += theirs.preemptions
    assert compared > 50
    assert preemptions > 1000
