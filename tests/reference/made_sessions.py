"""Sessions drawn at random: chains, fan-outs and joins among the requests of a trace."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from fastroof.traces.trace import Trace


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
