"""vLLM's scheduler in plain Python against cases that were worked out by hand, and the engine against it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastroof
from fastroof.errors import BatchError
from fastroof.simulation.fleet_run import run_replicas
from fastroof.simulation.settings import EngineSettings
from tests.reference.engines import Ranks
from tests.reference.replay import RankStep, ReplayedTimes, Schedule, TimedRequest, replay
from tests.reference.scheduler import Step

MS = 1e-3


class Steps(list[list[list[tuple[int, int]]]]):
    """Steps of 1 ms each, kept as (new tokens, context) of each request of each rank."""

    def __call__(self, ranks: Sequence[RankStep]) -> float:
        self.append([list(zip(*rank, strict=True)) for rank in ranks])
        return 1000.0

    def of_rank(self, rank: int = 0) -> list[list[tuple[int, int]]]:
        return [step[rank] for step in self]


def run(
    requests: Sequence[TimedRequest],
    *,
    seqs: int = 8,
    tokens: int = 100,
    blocks: int | None = None,
    ranks: int = 1,
    asynchronous: bool = False,
) -> tuple[ReplayedTimes, Steps]:
    steps = Steps()
    schedule = Schedule(seqs, tokens, blocks, block_size=10, ranks=ranks, is_asynchronous=asynchronous)
    return replay(requests, steps, schedule), steps


def test_a_prompt_is_cut_by_the_budget_and_ends_with_its_first_token() -> None:
    seen, steps = run([TimedRequest(0.0, 250, 3)])
    assert steps.of_rank() == [[(100, 0)], [(100, 100)], [(50, 200)], [(1, 250)], [(1, 251)]]
    assert seen.first_token_s.tolist() == [pytest.approx(3 * MS)]
    assert (seen.ttft_ms[0], seen.tpot_ms[0], seen.e2e_ms[0]) == pytest.approx((3.0, 1.0, 5.0))
    assert (seen.steps, seen.preemptions) == (5, 0)


def test_one_token_out_has_no_time_between_tokens() -> None:
    seen, steps = run([TimedRequest(0.5, 20, 1)])
    assert steps.of_rank() == [[(20, 0)]]
    assert seen.e2e_ms[0] == pytest.approx(1.0)
    assert math.isnan(seen.tpot_ms[0])


def test_a_cached_prefix_is_context_of_the_first_chunk() -> None:
    _, steps = run([TimedRequest(0.0, 250, 2, cached_tokens=160)])
    assert steps.of_rank() == [[(90, 160)], [(1, 250)]]


def test_running_requests_come_first_and_prompts_take_what_is_left() -> None:
    # the second arrives during the first step; its prompt shares the budget with a decode
    _, steps = run([TimedRequest(0.0, 30, 4), TimedRequest(0.5 * MS, 120, 2)])
    assert steps.of_rank() == [[(30, 0)], [(1, 30), (99, 0)], [(1, 31), (21, 99)], [(1, 32), (1, 120)]]


def test_no_more_requests_run_than_may() -> None:
    _, steps = run([TimedRequest(0.0, 10, 2)] * 3, seqs=2)
    assert [len(step) for step in steps.of_rank()] == [2, 2, 1, 1]


def test_a_waiting_prompt_needs_room_for_all_of_it_and_nothing_passes_it() -> None:
    # 8 of 10 blocks are taken; the second needs 5, so the third, which would fit, waits too
    requests = [TimedRequest(0.0, 75, 3), TimedRequest(0.0, 50, 1), TimedRequest(0.0, 10, 1)]
    _, steps = run(requests, tokens=200, blocks=10)
    assert steps.of_rank() == [[(75, 0)], [(1, 75)], [(1, 76)], [(50, 0), (10, 0)]]


def test_the_last_request_makes_room_and_computes_what_it_has_again() -> None:
    # two blocks each at the start, five in all: at 21 tokens both need a third
    requests = [TimedRequest(0.0, 19, 4), TimedRequest(0.0, 19, 4)]
    seen, steps = run(requests, blocks=5)
    assert steps.of_rank() == [
        [(19, 0), (19, 0)],
        [(1, 19), (1, 19)],
        # the first takes the fifth block, the second gives its two back
        [(1, 20)],
        # two are free, three are needed for its 21 tokens
        [(1, 21)],
        [(21, 0)],
        [(1, 21)],
    ]
    assert seen.preemptions == 1
    assert seen.first_token_s == pytest.approx([1 * MS, 1 * MS])
    assert seen.last_token_s == pytest.approx([4 * MS, 6 * MS])


def test_a_request_can_be_its_own_victim() -> None:
    # the first keeps four of six blocks; the second finds no third block for its 21st token
    requests = [TimedRequest(0.0, 31, 6), TimedRequest(0.0, 19, 4)]
    seen, steps = run(requests, blocks=6)
    assert steps.of_rank()[:4] == [[(31, 0), (19, 0)], [(1, 31), (1, 19)], [(1, 32)], [(1, 33)]]
    assert seen.preemptions == 1
    assert seen.last_token_s == pytest.approx([6 * MS, 8 * MS])


def test_asynchronous_steps_see_arrivals_a_step_late() -> None:
    requests = [TimedRequest(0.0, 10, 5), TimedRequest(0.5 * MS, 10, 1)]
    synchronous, _ = run(requests)
    assert synchronous.first_token_s[1] == pytest.approx(2 * MS)
    late, steps = run(requests, asynchronous=True)
    # the step from 1 to 2 ms was made at 0, the one after it at 1 ms
    assert steps.of_rank()[:3] == [[(10, 0)], [(1, 10)], [(1, 11), (10, 0)]]
    assert late.first_token_s[1] == pytest.approx(3 * MS)
    assert late.last_token_s[0] == synchronous.last_token_s[0] == pytest.approx(5 * MS)


def test_asynchronous_steps_have_places_back_a_step_late() -> None:
    requests = [TimedRequest(0.0, 10, 2), TimedRequest(0.0, 10, 1)]
    synchronous, _ = run(requests, seqs=1)
    late, steps = run(requests, seqs=1, asynchronous=True)
    # with nothing else to run, the place is known to be free when the last step of the first has ended
    assert steps.of_rank() == [[(10, 0)], [(1, 10)], [(10, 0)]]
    assert late.first_token_s[1] == synchronous.first_token_s[1] == pytest.approx(3 * MS)
    three = [*requests[:1], TimedRequest(0.0, 10, 4), TimedRequest(0.0, 10, 1)]
    assert run(three, seqs=2)[0].first_token_s[2] == pytest.approx(3 * MS)
    assert run(three, seqs=2, asynchronous=True)[0].first_token_s[2] == pytest.approx(4 * MS)


def test_an_idle_engine_starts_at_the_arrival() -> None:
    for asynchronous in (False, True):
        seen, _ = run([TimedRequest(2.0, 10, 2), TimedRequest(7.0, 10, 2)], asynchronous=asynchronous)
        assert seen.first_token_s == pytest.approx([2.001, 7.001])


def test_ranks_take_turns_and_step_together() -> None:
    requests = [TimedRequest(0.0, 10, 2), TimedRequest(0.0, 20, 1), TimedRequest(0.0, 30, 1)]
    _, steps = run(requests, ranks=2)
    assert list(steps) == [[[(10, 0), (30, 0)], [(20, 0)]], [[(1, 10)], []]]


def test_results_stand_in_the_order_of_the_requests() -> None:
    requests = [TimedRequest(3.0, 10, 1), TimedRequest(1.0, 10, 1), TimedRequest(2.0, 10, 1)]
    assert run(requests)[0].first_token_s == pytest.approx([3.001, 1.001, 2.001])


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "at least one request"),
        ([TimedRequest(math.nan, 10, 1)], "request 0 needs an arrival"),
        ([TimedRequest(0.0, 0, 1)], "at least 1 token"),
        ([TimedRequest(0.0, 10, 1), TimedRequest(0.0, 10, 1, 10)], "request 1 has 10 cached tokens"),
        ([TimedRequest(0.0, 90, 20)], "needs 11 blocks, there are 10"),
    ],
)
def test_requests_that_cannot_run_are_refused(requests: list[TimedRequest], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        run(requests, blocks=10)


def test_a_schedule_of_nothing_is_refused() -> None:
    with pytest.raises(BatchError, match="max_num_seqs must be at least 1, got 0"):
        Schedule(0, 100)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(8, 20),
    st.integers(1, 2),
    st.booleans(),
)
@example([(0, 23, 9), (0, 15, 7), (0, 7, 5)], 3, 7, 8, 1, True)
def test_every_request_gets_its_tokens_once(
    made: list[tuple[int, int, int]], seqs: int, tokens: int, blocks: int, ranks: int, asynchronous: bool
) -> None:
    requests = [TimedRequest(at * MS / 2, prompt, output) for at, prompt, output in made]
    seen, steps = run(
        requests, seqs=seqs, tokens=tokens, blocks=blocks, ranks=ranks, asynchronous=asynchronous
    )
    for step in steps:
        assert any(step)
        for rank in step:
            assert len(rank) <= seqs
            assert sum(new for new, _ in rank) <= tokens
            assert sum(-(-(new + context) // 10) for new, context in rank) <= blocks
    assert len(steps) == seen.steps
    computed = sum(new for step in steps for rank in step for new, _ in rank)
    least = sum(prompt + output - 1 for _, prompt, output in made)
    assert computed >= least
    # an asynchronous one that is preempted with its last token on the way computes nothing again
    assert computed == least or seen.preemptions > 0
    assert computed > least or seen.preemptions == 0 or asynchronous
    arrivals = np.array([request.arrival_s for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    assert (seen.first_token_s > arrivals).all()
    assert (seen.last_token_s >= seen.first_token_s + (outputs - 1) * MS * (1 - 1e-9)).all()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("ranks", "blocks"), [(1, 60), (1, 1000), (2, 60)])
def test_the_compiled_engine_serves_as_it_does(
    h100: fastroof.Tables, ranks: int, blocks: int, asynchronous: bool
) -> None:
    model = "llama-3.1-8b" if ranks == 1 else "qwen3-30b-a3b"
    plan = fastroof.compile_plan(model, "h100", h100, dp=ranks, ep=ranks, engine="vllm", front_end=0)
    rng = np.random.default_rng(ranks + blocks)
    count = 40
    prompt, output = rng.integers(1, 400, count), rng.integers(1, 120, count)
    arrival_s, cached = np.sort(rng.uniform(0.0, 0.4, count)), rng.integers(0, prompt)
    given = [
        TimedRequest(float(at), int(isl), int(osl), int(hit))
        for at, isl, osl, hit in zip(arrival_s, prompt, output, cached, strict=True)
    ]

    together = Ranks.of_plan(plan)

    def longest_us(steps: Sequence[RankStep]) -> float:
        if together is None:
            return float(max(plan.step_scalar(*step) for step in steps if step[0]))
        # what a step's requests are is nothing to its time
        made = [Step(list(step[0]), *map(list, step), verifies=[False] * len(step[0])) for step in steps]
        together.note_times(made)
        return max(step.time_us for step in made)

    schedule = Schedule(16, 256, blocks, ranks=ranks, is_asynchronous=asynchronous)
    seen = replay(given, longest_us, schedule)
    settings = EngineSettings(256, 16, blocks, async_scheduling=asynchronous)
    served = run_replicas(plan, fastroof.Trace(arrival_s, prompt, output, cached), settings)
    assert served.counters["preemptions"] == seen.preemptions
    assert bool(seen.preemptions) == (blocks == 60)
    # one clock counts us, the other s
    np.testing.assert_allclose(served.first_us, seen.first_token_s * 1e6, rtol=1e-12)
    np.testing.assert_allclose(served.last_us, seen.last_token_s * 1e6, rtol=1e-12)
