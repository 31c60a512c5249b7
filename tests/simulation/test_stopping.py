"""Work that is ended: every loop of simulations sees it, and what it may cost is known before it runs."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.errors import StoppedError
from fastroof.simulation import Autoscaler, Trace, Workload, fleet_arrays
from fastroof.simulation.settings import EngineSettings, simulated_steps
from fastroof.stopping import Stop, check_stopped, stop_flag
from tests.reference.waiting import until

OPTIONS = {"max_num_batched_tokens": 512, "max_num_seqs": 16}
OPEN = Workload(rate=50, requests=30, isl=100, osl=20).trace()
CLOSED = Workload(clients=4, requests=30, isl=100, osl=20).trace()
FEW = Workload(rate=50, requests=6, isl=100, osl=4).trace()
FEW_CLIENTS = Workload(clients=4, requests=6, isl=100, osl=4).trace()
AUTOSCALED = Autoscaler("concurrency", 1, max_replicas=3, startup_s=0.01, interval_s=0.01)
LOOPS: dict[str, tuple[Trace, dict[str, Any]]] = {
    "one engine": (FEW, {}),
    "clients of one engine": (FEW_CLIENTS, {}),
    "replicas that share": (FEW, {"replicas": 3}),
    "replicas that are routed to": (FEW, {"replicas": 3, "router": "least_kv"}),
    "clients of replicas": (FEW_CLIENTS, {"replicas": 3, "router": "least_load"}),
    "a pool": (FEW, {"prefix_cache": "lru"}),
    "pools": (FEW, {"prefix_cache": "lru", "replicas": 3, "router": "prefix_aware"}),
    "autoscaled replicas": (FEW, {"autoscaler": AUTOSCALED}),
    "clients of autoscaled replicas": (FEW_CLIENTS, {"autoscaler": AUTOSCALED}),
}
RANKED = ("one engine", "clients of one engine", "replicas that share", "replicas that are routed to")


@pytest.fixture(scope="module")
def plans(h100: fastroof.Tables) -> dict[int, fastroof.StepPlan]:
    sizes = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "engine": "vllm"}
    return {
        1: fastroof.compile_plan("llama-3.1-8b", "h100", h100, **{"engine": "kernels", **sizes}),
        2: fastroof.compile_plan("mixtral-8x7b", "h100", h100, dp=2, ep=2, **{"engine": "kernels", **sizes}),
        # ranks of a dense model are engines by themselves
        3: fastroof.compile_plan("llama-3.1-8b", "h100", h100, dp=2, **{"engine": "kernels", **sizes}),
    }


@pytest.mark.loops
@pytest.mark.parametrize(("ranks", "names"), [((1,), tuple(LOOPS)), ((2, 3), RANKED)])
def test_every_loop_ends_on_request(plans, monkeypatch, ranks, names) -> None:
    for number, name in itertools.product(ranks, names):
        plan, (trace, options) = plans[number], LOOPS[name]
        whole = fastroof.simulate(plan, trace, **OPTIONS, **options).summary()
        stop = Stop()
        with stop.watched(), monkeypatch.context() as patched:
            assert fastroof.simulate(plan, trace, **OPTIONS, **options).summary() == whole
            stop.set("a client left")
            # so that the loop begins
            patched.setattr(fleet_arrays, "stop_flag", lambda: np.ones(1, np.int64))
            with pytest.raises(StoppedError, match="a client left"):
                fastroof.simulate(plan, trace, **OPTIONS, **options)


def test_a_loop_that_runs_is_ended_by_another_thread(plans) -> None:
    # minutes, where nothing ends it
    trace = Workload(rate=1e5, requests=2**18, isl=1, osl=2).trace()
    options = {**OPTIONS, "replicas": 4096, "router": "least_kv"}
    fastroof.simulate(plans[1], OPEN, **options)
    stop = Stop()
    timer = threading.Timer(0.1, stop.set, ["enough"])
    with stop.watched():
        timer.start()
        with pytest.raises(StoppedError, match="enough"):
            fastroof.simulate(plans[1], trace, **options)
    assert not stop.is_late


def test_runs_of_the_range_are_ended_too(plans) -> None:
    sim = fastroof.simulate(plans[1], OPEN, **OPTIONS)
    stop = Stop()
    with stop.watched():
        stop.set("a client left")
        with pytest.raises(StoppedError, match="a client left"):
            sim.range()
    assert sim.range()["relative_error"] > 0.0


def test_a_time_limit_sets_the_flag_of_a_loop() -> None:
    stop = Stop(0.5, "too long")
    before = threading.active_count()
    with stop.watched():
        check_stopped()
        assert threading.active_count() == before  # nothing that takes long yet
        flag = stop_flag()
        assert flag[0] == 0
        until(lambda: bool(flag[0]))
        assert stop.is_late
        for ended in (check_stopped, stop_flag):
            with pytest.raises(StoppedError, match="too long"):
                ended()
    check_stopped()  # this is of another work
    assert stop_flag()[0] == 0
    with Stop(60.0).watched():
        stop_flag()
    until(lambda: threading.active_count() <= before)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=12),
    replicas=st.integers(1, 3),
    budget=st.sampled_from([16, 100, 512]),
    router=st.sampled_from(["round_robin", "least_kv"]),
    clients=st.sampled_from([None, 1, 3]),
)
def test_no_simulation_exceeds_its_step_limit(plans, sizes, replicas, budget, router, clients) -> None:
    prompts, outputs = zip(*sizes, strict=True)
    trace = Trace(np.linspace(0.0, 0.1, len(sizes)), prompts, outputs, clients=clients)
    settings = EngineSettings.of_plan(plans[1], max_num_batched_tokens=budget, max_num_seqs=16)
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 16, "replicas": replicas}
    sim = fastroof.simulate(plans[1], trace, **options, router=router)
    assert sim.summary()["steps"] <= simulated_steps(trace, settings, replicas, router)
    assert sim.summary()["steps"] <= simulated_steps(trace, settings)


def test_what_a_router_looks_at_counts() -> None:
    settings = EngineSettings(512, 16, 1000)
    steps = simulated_steps(OPEN, settings)
    assert steps == 30 * 21
    assert simulated_steps(OPEN, settings, 4) == steps + 4 * 30
    assert simulated_steps(OPEN, settings, 4, "least_kv") == steps + 8 * 4 * 30
    assert simulated_steps(CLOSED, settings, 4) == 4 * steps + 8 * 4 * 30
    sessions = Workload(rate=50, requests=30, turns=3, isl=100, osl=20).trace()
    assert simulated_steps(sessions, settings, 4) == 4 * simulated_steps(sessions, settings) + 8 * 4 * 30
    assert simulated_steps(OPEN, settings, 4, "least_kv", 2) == 2 * (steps + 8 * 4 * 30)


def test_the_time_limit_holds_for_every_piece_of_the_work() -> None:
    """A stream of messages is one call whose pieces run one after the other."""
    stop = Stop(0.5, "too long")
    for _ in range(2):
        with stop.watched():
            flag = stop_flag()
    with stop.watched():
        flag = stop_flag()
        until(lambda: bool(flag[0]))
    assert stop.is_late


class After(Stop):
    """A stop at one of its checks."""

    def __init__(self, check: int) -> None:
        super().__init__()
        self.left = check

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.set("the time is over")
        super().check()


@pytest.mark.parametrize(
    "workload",
    [
        {"hourly": [0.5, 1]},
        {"clients": 4},
        {"rate": 5, "turns": "uniform:1:4"},
    ],
    ids=str,
)
def test_the_clock_of_a_call_is_checked_while_requests_are_drawn(workload: dict[str, Any]) -> None:
    drawn = Workload(**workload)
    for check in range(6):
        with After(check).watched(), pytest.raises(StoppedError, match="the time is over"):
            Workload(**workload).trace()
    with After(1000).watched():
        assert len(drawn.trace()) > 0
