"""Engines whose prompts wait for steps or slots: by hand, by option, and what is refused."""

from __future__ import annotations

import json

import pytest

import fastroof
from fastroof.engines import load_engine
from fastroof.engines.launch import engine_commands
from fastroof.errors import BatchError, FastroofError, SimulationError
from fastroof.serving import estimate
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.settings import EngineSettings
from fastroof.sweep.kinds import load_spec
from tests.command_line import good
from tests.engines.test_launch import launch_settings, options_of
from tests.reference.fleet import serve
from tests.reference.made_workloads import a_trace, an_engine

LOAD = {"rate": 12, "requests": 600, "isl": 2000, "osl": 100, "seed": 1}


@pytest.fixture(scope="module")
def plans(h100):
    return {
        engine: fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine=engine)
        for engine in ("vllm", "sglang", "kernels")
    }


def step_us(new_tokens, context_len):
    return 100.0 + sum(new_tokens)


def held(trace, **engine):
    """New tokens of each step, by request."""
    seen = serve(trace, an_engine(**{"max_num_seqs": 4, **engine}), step_us)
    return [
        {r.index: n for r, n in zip(s.requests, s.new_tokens, strict=True)}
        for f in seen.flights
        for s in f.made
    ]


def test_an_interval_counts_from_a_step_with_prompts_to_the_next():
    trace = a_trace([0, 50e-6, 260e-6], [10, 20, 30], [9, 9, 9])
    steps = held(trace, prefill_schedule_interval=4)
    # the second comes in the first step and waits for three of decodes; so does the third
    assert [sorted(step.items()) for step in steps[:9]] == [
        [(0, 10)], [(0, 1)], [(0, 1)], [(0, 1)], [(0, 1), (1, 20), (2, 30)],
        *[[(0, 1), (1, 1), (2, 1)]] * 4,
    ]  # fmt: skip


def test_a_cut_prompt_waits_too_and_none_without_decodes():
    trace = a_trace([0, 50e-6], [4, 40], [9, 2])
    steps = held(trace, prefill_schedule_interval=3, max_num_batched_tokens=16)
    assert [step.get(1, 0) for step in steps] == [0, 0, 0, 15, 0, 0, 15, 0, 0, 10, 1]
    alone = held(a_trace([0], [40], [2]), prefill_schedule_interval=3, max_num_batched_tokens=16)
    assert [step[0] for step in alone] == [16, 16, 8, 1]


def test_requests_that_found_no_room_end_the_pause():
    trace = a_trace([0, 50e-6, 50e-6], [4, 12, 12], [9, 2, 2])
    steps = held(trace, prefill_schedule_interval=3, max_num_batched_tokens=16)
    # 12 and 3 of 12 tokens with a decode: none waits; with no room for a third, the rest goes on at once
    assert [(step.get(1, 0), step.get(2, 0)) for step in steps[3:5]] == [(12, 3), (1, 0)]
    steps = held(trace, prefill_schedule_interval=3, max_num_batched_tokens=13)
    assert [(step.get(1, 0), step.get(2, 0)) for step in steps[3:5]] == [(12, 0), (1, 11)]


def test_decode_steps_follow_each_step_of_prompts_that_run_first():
    trace = a_trace([0, 50e-6], [4, 40], [9, 2])
    steps = held(trace, order="prefill_first", prefill_decode_interval=2, max_num_batched_tokens=16)
    assert [step.get(1, 0) for step in steps[:9]] == [0, 0, 0, 16, 0, 0, 16, 0, 0]
    assert [0 in step for step in steps[:9]] == [True, True, True, False, True, True, False, True, True]


def test_prompts_start_when_enough_slots_are_free():
    trace = a_trace([0, 0, 0, 50e-6, 60e-6], [4] * 5, [3, 4, 9, 3, 3])
    slots = {"order": "prefill_first", "max_num_seqs": 3}
    at_once = held(trace, **slots)
    batched = held(trace, **slots, min_free_slots_delay=2)
    first = [next(i for i, step in enumerate(steps) if 3 in step) for steps in (at_once, batched)]
    assert first == [3, 4]
    assert batched[4] == {3: 4, 4: 4}


def test_the_command_line_and_python_have_one_answer(plans):
    words = ["--model", "llama-3.1-8b", "--rate", "12", "--num-requests", "600", "--isl", "2000"]
    words += ["--osl", "100", "--seed", "1", "--no-range", "--json"]
    trace = fastroof.Workload(**LOAD).trace()
    given = {"prefill_schedule_interval": 6}
    done = good("simulate", *words, "--prefill-schedule-interval=6")
    found = json.loads(done)
    seen = fastroof.simulate(plans["vllm"], trace, **given).summary(with_range=False)
    assert found["ttft_ms"] == json.loads(json.dumps(seen["ttft_ms"]))
    assert found["settings"].items() >= given.items()
    for engine, paused in (("vllm", given), ("sglang", {"prefill_decode_interval": 6})):
        plain, spaced = (
            fastroof.simulate(plans[engine], trace, **one).summary(with_range=False) for one in ({}, paused)
        )
        assert spaced["ttft_ms"]["mean"] > plain["ttft_ms"]["mean"]


def test_fewer_steps_with_prompts_keep_a_limit_on_gaps_at_a_higher_rate(plans):
    load = fastroof.Workload(**LOAD)
    limits = {"itl_p90_ms": 20, "with_range": False, "steady": False}
    plain, spaced = (
        fastroof.capacity(plans["vllm"], load, prefill_schedule_interval=interval, **limits).requests_per_s
        for interval in (1, 16)
    )
    assert spaced > 1.2 * plain


def test_a_profile_sets_it_for_every_command(plans, h100):
    vllm = load_engine("vllm")
    own = vllm.scheduling.__class__(**{**vars(vllm.scheduling), "prefill_schedule_interval": 6})
    profile = vllm.__class__(**{**vars(vllm), "scheduling": own})
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine=profile)
    assert EngineSettings.of_plan(plan).prefill_schedule_interval == 6
    trace = fastroof.Workload(**LOAD).trace()
    set_by_hand = fastroof.simulate(plans["vllm"], trace, prefill_schedule_interval=6)
    assert fastroof.simulate(plan, trace).summary(with_range=False) == set_by_hand.summary(with_range=False)
    given = estimate(plans["vllm"], 500, 200, 16, prefill_schedule_interval=6)
    assert estimate(plan, 500, 200, 16).ttft_ms == given.ttft_ms


def test_start_commands_have_the_options():
    for engine, pauses in (
        ("vllm", {"prefill_schedule_interval": 6}),
        ("sglang", {"prefill_decode_interval": 2, "min_free_slots_delay": 4}),
    ):
        commands = engine_commands(engine)
        assert commands is not None
        found = options_of(commands.server(launch_settings(pauses=pauses)))
        assert {name: found[f"--{name.replace('_', '-')}"] for name in pauses} == {
            name: str(value) for name, value in pauses.items()
        }
        assert not {
            word
            for word in options_of(commands.server(launch_settings()))
            if "interval" in word or "slots" in word
        }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prefill_schedule_interval": 0}, "prefill_schedule_interval must be a whole number from 1"),
        ({"prefill_decode_interval": 1.5}, "prefill_decode_interval must be a whole number from 0"),
        (
            {"prefill_decode_interval": 2},
            'prefill_decode_interval 2 needs order="prefill_first", got order="mixed"',
        ),
        ({"order": "prefill_first", "prefill_schedule_interval": 2}, 'needs order="mixed"'),
    ],
)
def test_what_an_engine_cannot_do_is_refused(plans, given, why):
    with pytest.raises(SimulationError, match=why):
        fastroof.simulate(plans["kernels"], a_trace([0], [9], [9]), **given)


def test_what_has_no_closed_form_is_refused(plans, h100, tmp_path):
    for given, why in (
        ({"order": "prefill_first"}, 'needs order="mixed"'),
        ({"isl": 9000}, "not estimated for prompts of several steps"),
    ):
        sizes = {"isl": 500, "osl": 200, "clients": 16} | given
        with pytest.raises(BatchError, match=why):
            estimate(plans["kernels"], **sizes, prefill_schedule_interval=4)
    ranks = fastroof.compile_plan("qwen3-30b-a3b", "h100", h100, dp=2, ep=2)
    with pytest.raises(BatchError, match="not estimated for ranks that share experts"):
        estimate(ranks, 500, 200, 16, prefill_schedule_interval=4)
    sim = fastroof.simulate(ranks, fastroof.Workload(**LOAD).trace(), prefill_schedule_interval=4)
    assert sim.summary(with_range=False)["finished"] == LOAD["requests"]
    path = tmp_path / "mine.toml"
    path.write_text('engine = "vllm"\n[scheduling]\nprefill_schedule_interval = 4\n')
    spec = {"kind": "deployments", "models": ["llama-3.1-8b"], "engine": [str(path)], "isl": 100, "osl": 10}
    with pytest.raises(FastroofError, match="sweeps do not model prefill_schedule_interval 4"):
        load_spec(spec | {"clients": 4, "gpus": ["h100"]})


def test_of_a_version_without_the_option_it_is_refused(h100):
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm-0.31")
    with pytest.raises(
        SimulationError, match=r"invalid for vllm >=0.31,<0.32: vllm applies it without ranks"
    ):
        run_engine(plan, a_trace([0], [9], [9]), EngineSettings.of_plan(plan, prefill_schedule_interval=2))
