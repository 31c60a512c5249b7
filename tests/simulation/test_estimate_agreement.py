"""The closed form of ``estimate`` against simulated closed loops: one question, answered twice.

A client of these loops sends its next request as its last answer ends, which is when a step ends. The closed
form takes a request to come at a random time; ``steps_met`` of its naive version says what that changes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

import fastroof
from fastroof.simulation.engine import run_engine
from tests.reference.made_workloads import a_trace, an_engine
from tests.reference.serving import closed_form

BUDGET = 8192
MODES = {
    # runtime, what its scheduler does, and the same in the words of the closed form
    "vllm": ("vllm", {}, {}),
    "trtllm": (
        "trtllm",
        {"chunked_prefill": False, "reserve_output": True},
        {"is_chunked": False, "osl_reserved": 1.0},
    ),
}
# isl, osl, clients, and tokens of a step
LIGHT = [
    (1024, 128, 2, BUDGET), (1024, 128, 8, BUDGET), (1024, 128, 32, BUDGET), (128, 512, 64, BUDGET),
    (4096, 64, 16, BUDGET), (1024, 128, 32, 2048), (1024, 128, 128, BUDGET), (512, 16, 64, BUDGET),
]  # fmt: skip
CUT = [(4096, 128, 16, 2048), (1024, 128, 64, 1024)]


class Seen(NamedTuple):
    """Means over the requests of a simulation's later rounds, us."""

    ttft_us: float
    tpot_us: float
    cycle_us: float


@pytest.fixture(scope="module")
def plans(h100):
    return {
        runtime: fastroof.compile_plan("llama-3.1-8b", "h100", h100, runtime=runtime, max_tokens=BUDGET)
        for runtime in ("vllm", "trtllm", "sglang")
    }


def simulated(plan, isl, osl, clients, *, spread=1 / 3, rounds=60, think_us=0.0, **engine):
    """Serve clients that begin at once; lengths a third apart have taken them apart after twenty rounds."""
    rng = np.random.default_rng(isl + osl)
    half = spread / (2.0 - spread)
    shape = clients * rounds
    inputs, outputs = (
        np.maximum(1, np.rint(mean * rng.uniform(1.0 - half, 1.0 + half, shape))).astype(np.int32)
        for mean in (isl, osl)
    )
    trace = a_trace(np.zeros(shape), inputs, outputs, clients=clients, think_s=think_us / 1e6)
    got = run_engine(
        plan, trace, an_engine(**{"max_num_seqs": 1024, "max_num_batched_tokens": BUDGET, **engine})
    )
    later = slice(clients * (rounds // 3), clients * (rounds - 2))
    assert not got.status.any()
    ttft_us = (got.first_us - got.arrival_us)[later]
    gaps = (outputs - 1.0)[later]
    cycle_us = (got.last_us - got.arrival_us)[later] + think_us
    tpot_us = ((got.last_us - got.first_us)[later] / np.maximum(gaps, 1.0))[gaps > 0]
    return Seen(
        float(ttft_us.mean()), float(tpot_us.mean()) if len(tpot_us) else math.nan, float(cycle_us.mean())
    )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("mode", "isl", "osl", "clients", "budget"),
    [(mode, *sizes) for mode in MODES for sizes in (LIGHT + CUT if mode == "vllm" else LIGHT)],
)
def test_the_closed_form_of_requests_that_meet_whole_steps(plans, mode, is_async, isl, osl, clients, budget):
    runtime, engine, words = MODES[mode]
    plan = plans[runtime]
    seen = simulated(
        plan, isl, osl, clients, async_scheduling=is_async, max_num_batched_tokens=budget, **engine
    )
    expected = closed_form(plan, isl, osl, clients, budget, steps_met=float(is_async), **words)
    cycle_us = expected.ttft_us + (osl - 1) * expected.tpot_us
    # as the closed form states: 5 % of TPOT and throughput, 25 % of TTFT
    assert expected.tpot_us == pytest.approx(seen.tpot_us, rel=0.05)
    assert cycle_us == pytest.approx(seen.cycle_us, rel=0.05)
    assert expected.ttft_us == pytest.approx(seen.ttft_us, rel=0.25)
