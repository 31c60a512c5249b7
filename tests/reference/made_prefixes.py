"""Workloads whose prompts share prefixes, drawn at random, for pools that are too small for them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np

from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace
from tests.reference.made_workloads import made_sessions


class MadePrefixes(NamedTuple):
    """What is simulated: requests, an engine, and how slow its clock is."""

    trace: Trace
    settings: EngineSettings
    time_scale: float


def made_prefixes(random: Random, most: int = 60) -> MadePrefixes:
    """Draw a workload: prompts are walks in a tree, or all different, some with prefixes given."""
    block_size = random.choice([1, 2, 3, 4, 8])
    count = random.randint(1, most)
    inputs, more = _tree(random, count, block_size * random.choice([1, 2, 4]))
    cached = None
    if random.random() < 0.5:
        more = {}
        cached = [random.choice([0, random.randint(0, tokens - 1)]) for tokens in inputs]
    outputs = [random.randint(1, random.choice([3, 20, 80])) for _ in range(count)]
    needed = max(-(-sum(lengths) // block_size) for lengths in zip(inputs, outputs, strict=True))
    max_num_seqs = random.choice([1, 2, 4, 8, 16])
    budget = max(max_num_seqs, random.choice([1, 7, 16, 64, 256]))
    chunked = random.random() < 0.8
    if not chunked and random.random() < 0.9:
        budget = max(budget, *map(sum, zip(inputs, outputs, strict=True)))
    order = random.choice(["mixed", "mixed", "prefill_first"])
    settings = EngineSettings(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks=max(math.ceil(needed * random.choice([0.7, 1, 1, 1, 1.3, 2, 3, 8])), 1),
        block_size=block_size,
        chunked_prefill=chunked,
        order=order,
        reserve_output=random.random() < 0.15,
        admit_whole_prompt=order == "prefill_first" or random.random() < 0.7,
        async_scheduling=random.random() < 0.5,
        timeout_s=math.inf if random.random() < 0.6 else 0.004 * 2.0 ** random.randint(0, 9),
    )
    arrivals = [0.0] * count
    if random.random() < 0.25:
        more |= {"clients": random.randint(1, 20), "think_s": random.choice([0.0, 0.003, 0.2])}
    else:
        gap_s = random.choice([0.0, 1e-3, 0.01, 0.05, 0.3])
        # some at once
        gaps = [random.expovariate(1.0) * gap_s * (random.random() < 0.7) for _ in range(count)]
        arrivals = np.cumsum(gaps).tolist()
    trace = Trace(arrivals, inputs, outputs, cached, **more)
    if trace.clients is None and trace.hash_ids is None and random.random() < 0.6:
        # sessions whose prompts start with what came before, or with less of it
        linked = made_sessions(random, trace)
        history = [random.choice([0, tokens // 2, tokens, tokens]) for tokens in linked.input_tokens.tolist()]
        trace = replace(linked, cached_tokens=None, history_tokens=history)
    return MadePrefixes(trace, settings, random.choice([1.0, 1.7]))


def _tree(random: Random, count: int, hash_block_size: int) -> tuple[list[int], dict[str, Any]]:
    """Draw prompts from a tree of blocks; equal paths have equal ids, a block in part one of its own."""
    id_of: dict[tuple[tuple[int, int], ...], int] = {}
    ids: list[int] = []
    offsets, inputs = [0], []
    kinds, longest = random.randint(1, 6), random.choice([6, 30, 60])
    for _ in range(count):
        prompt = random.randint(1, longest)
        path: tuple[tuple[int, int], ...] = ()
        for start in range(0, prompt, hash_block_size):
            child = random.randint(0, kinds) if random.random() < 0.4 else 0
            path += ((child, min(hash_block_size, prompt - start)),)
            ids.append(id_of.setdefault(path, 7 + 3 * len(id_of)))
        inputs.append(prompt)
        offsets.append(len(ids))
    return inputs, {"hash_ids": ids, "hash_offsets": offsets, "hash_block_size": hash_block_size}
