"""Workloads and engines drawn at random, that go where a scheduler goes wrong: full caches, bursts, ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numba import config

from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace

PLANS = {"whole": "llama-3.1-8b", "windowed": "gpt-oss-20b"}
"""Models of the plans that time steps: layers that attend to all, and some that attend to a window."""


class MadeWorkload(NamedTuple):
    """What is simulated: requests, an engine, which plan times it, and how slow its clock is."""

    trace: Trace
    settings: EngineSettings
    plan: str
    time_scale: float


def sampled(seeds: Sequence[int]) -> Sequence[int]:
    """Return the seeds; without the JIT a third, as coverage of lines and bounds needs no more."""
    return seeds[::3] if config.DISABLE_JIT else seeds


def a_trace(
    arrival_s: Sequence[float],
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
    cached_tokens: Sequence[int] | None = None,
    **more: Any,
) -> Trace:
    cached = [0] * len(arrival_s) if cached_tokens is None else cached_tokens
    return Trace(
        arrival_s=np.array(arrival_s, np.float64),
        input_tokens=np.array(input_tokens, np.int32),
        output_tokens=np.array(output_tokens, np.int32),
        cached_tokens=np.array(cached, np.int32),
        **more,
    )


ROOMY = EngineSettings(max_num_batched_tokens=2048, max_num_seqs=256, num_gpu_blocks=100_000)
"""An engine in which nothing lacks."""


def an_engine(**given: Any) -> EngineSettings:
    """Return an engine in which nothing lacks but what is given."""
    return replace(ROOMY, **given)


def made_workload(random: Random, kind: str | None = None) -> MadeWorkload:
    """Draw a workload of a kind; by default half of all lack blocks nearly all the time.

    ``scarce``: long outputs beside short prompts, and few blocks; ``large``: hundreds of requests at once;
    ``tiny``: a few short ones; ``usual``: any other.
    """
    kind = kind or random.choices(["scarce", "usual", "large"], [20, 19, 1])[0]
    block_size = random.choice([1, 7, 16, 16, 32] if kind != "tiny" else [1, 2, 3])
    inputs, outputs = _lengths(random, kind)
    count = len(inputs)
    cached = [0] * count
    if random.random() < 0.3:
        cached = [random.choice([0, random.randint(0, tokens - 1)]) for tokens in inputs]
    max_num_seqs = random.choice(
        {"scarce": [8, 16, 64], "large": [64, 300, 512], "tiny": [1, 2, 4, 9]}.get(kind, [1, 2, 4, 8, 16, 32])
    )
    needed = [-(-sum(lengths) // block_size) for lengths in zip(inputs, outputs, strict=True)]
    blocks = sum(needed) + random.randint(0, 3)
    if kind in ("scarce", "tiny") or random.random() < 0.4:
        # at least one request has room
        blocks = math.ceil(max(needed) * random.choice([1.0, 1.0, 1.3, 2.0, 3.0]))
    if random.random() < 0.05:
        # some have not
        blocks = max(blocks // 2, 1)
    budget = random.choice([1, 16, 33, 64, 256, 2048] if kind != "tiny" else [1, 4, 9, 40])
    chunked = random.random() < 0.75
    if not chunked and random.random() < 0.9:
        budget = max(budget, *map(sum, zip(inputs, outputs, strict=True)))
    order = random.choice(["mixed", "mixed", "prefill_first"])
    if order == "mixed":
        budget = max(budget, max_num_seqs)
    settings = EngineSettings(
        max_num_batched_tokens=min(budget, 2048),
        max_num_seqs=max_num_seqs,
        num_gpu_blocks=blocks,
        block_size=block_size,
        order=order,
        chunked_prefill=chunked,
        admit_whole_prompt=order == "prefill_first" or random.random() < 0.75,
        reserve_output=kind != "scarce" and random.random() < 0.15,
        async_scheduling=random.random() < 0.5,
        timeout_s=_timeout_s(random, kind),
    )
    more: dict[str, Any] = {}
    arrivals = [0.0] * count
    if random.random() < 0.25:
        more = {"clients": random.randint(1, 24), "think_s": random.choice([0.0, 0.0, 0.003, 0.5])}
    else:
        arrivals = _arrivals(random, count)
    return MadeWorkload(
        a_trace(arrivals, inputs, outputs, cached, **more),
        settings,
        random.choice(sorted(PLANS)),
        random.choice([1.0, 1.0, 1.0, 0.5, 1.7]),
    )


def _lengths(random: Random, kind: str) -> tuple[list[int], list[int]]:
    """Draw inputs and outputs; the longer outputs are beside inputs, the more often blocks run out."""
    if kind == "scarce":
        count, longest_input, longest_output = random.randint(40, 90), 8, random.choice([30, 80, 150, 300])
    elif kind == "large":
        count, longest_input, longest_output = random.randint(100, 400), 100, random.choice([3, 20])
    elif kind == "tiny":
        count, longest_input, longest_output = (
            random.randint(1, 12),
            random.choice([1, 9, 9, 130]),
            random.choice([9, 9, 25]),
        )
    else:
        count = random.randint(1, 60)
        longest_input = random.choice([1, 8, 40, 200, 700])
        longest_output = random.choice([1, 2, 10, 60, 150])
    # some go over the edge of a window of 128 tokens while they decode
    shortest_input = 100 if longest_input == 130 else 1
    inputs = [random.randint(shortest_input, longest_input) for _ in range(count)]
    outputs = [random.randint(1, longest_output) for _ in range(count)]
    if random.random() < 0.25:
        # all alike
        inputs, outputs = inputs[:1] * count, outputs[:1] * count
    return inputs, outputs


def _timeout_s(random: Random, kind: str) -> float:
    """Clients wait for ever, or from less than a step on."""
    if random.random() < (0.75 if kind != "tiny" else 0.4):
        return math.inf
    return 0.004 * 2.0 ** random.randint(0, 11 if kind != "tiny" else 6)


def _arrivals(random: Random, count: int) -> list[float]:
    """All at once, in bursts of equal ones, at random, or so far apart that the engine idles."""
    gap_s = random.choice([0.0, 0.0, 1e-3, 0.01, 0.05, 0.2, 1.0])
    burst = random.choice([1, 1, 2, 7])
    at_s, arrivals = random.choice([0.0, 0.0, 3.25]), []
    while len(arrivals) < count:
        arrivals += [at_s] * burst
        at_s += random.expovariate(1.0) * gap_s * burst
    return arrivals[:count]


def made_sessions(random: Random, trace: Trace) -> Trace:
    """Let requests of a trace wait for others, some by delays alone, some by recorded arrivals too."""
    count = len(trace)
    chance, reach = random.choice([0.3, 0.7, 1.0]), random.choice([1, 3, count])
    delays_s = random.choice([[0.0], [0.0, 0.004], [0.001, 0.05, 0.3], [0.0, 1.0]])
    is_recorded = random.choice([0.0, 0.5, 1.0])
    parents, offsets, delay_s, arrival_s = [], [0], [], []
    for row in range(count):
        own: list[int] = []
        if row and random.random() < chance:
            first = max(row - reach, 0)
            own = random.sample(range(first, row), min(random.choice([1, 1, 1, 2, 3]), row - first))
        parents += own
        offsets.append(len(parents))
        delay_s.append(random.choice(delays_s) if own else 0.0)
        arrival_s.append(0.0 if own and random.random() >= is_recorded else float(trace.arrival_s[row]))
    # rows of a file come in any order
    order = random.sample(range(count), count)
    place = np.argsort(order)
    counts = np.diff(offsets)[order]
    moved = [place[parents[at]] for row in order for at in range(offsets[row], offsets[row + 1])]
    return replace(
        trace,
        arrival_s=np.array(arrival_s)[order],
        input_tokens=trace.input_tokens[order],
        output_tokens=trace.output_tokens[order],
        cached_tokens=trace.cached_tokens[order],
        parents=np.array(moved, np.int64),
        parent_offsets=np.concatenate([[0], np.cumsum(counts)]),
        delay_s=np.array(delay_s)[order],
        clients=None,
        think_s=0.0,
        order=None,
    )


def made_clients(random: Random, trace: Trace) -> Trace:
    """Let clients have sessions of a trace's requests one after the other, each begun by one request."""
    last: dict[int, list[int]] = {}
    parents, offsets, session, delay_s = [], [0], [], []
    most, delays_s = random.choice([1, 3, len(trace)]), random.choice([[0.0], [0.0, 0.02]])
    for row in range(len(trace)):
        of = random.randrange(most)
        own = random.sample(last.get(of, []), min(random.choice([1, 1, 2]), len(last.get(of, []))))
        last.setdefault(of, []).append(row)
        parents += own
        offsets.append(len(parents))
        session.append(of)
        delay_s.append(random.choice(delays_s) if own else 0.0)
    links = {"parents": np.array(parents, np.int64), "parent_offsets": offsets, "session": session}
    whole = replace(trace, **links, delay_s=delay_s, clients=None, think_s=0.0, order=None)
    closed = whole.by_clients(random.choice([1, 2, 5, len(trace)]))
    return replace(closed, think_s=random.choice([0.0, 0.004]))
