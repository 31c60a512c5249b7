"""Loads that schedulers of engines serve in virtual time, and the comparison with `fastroof.simulate`."""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fastroof

ANY_TOKEN = 64

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "vocab_size": 128256,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "dtype": "bfloat16",
    "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


def write_model(folder: str) -> None:
    """Write the configuration of a model without weights."""
    Path(folder, "config.json").write_text(json.dumps(LLAMA))


class Run(NamedTuple):
    """A load, settings of the engine by the engine's names, and of `simulate` by its own."""

    name: str
    trace: fastroof.Trace
    engine: dict[str, Any]
    settings: dict[str, Any] = {}  # noqa: RUF012


class Counts(NamedTuple):
    """Numbers of steps and preemptions."""

    steps: int
    preemptions: int


def parents_of(trace: fastroof.Trace) -> list[int]:
    """The request that each one follows, or -1; here none follows several."""
    if trace.parents is None:
        return [-1] * len(trace)
    if trace.parent_offsets is None:
        return [int(parent) for parent in trace.parents]
    starts = trace.parent_offsets
    return [int(trace.parents[a]) if b > a else -1 for a, b in itertools.pairwise(starts)]


def prompts(trace: fastroof.Trace) -> dict[int, list[int]]:
    """Token ids of each prompt: equal where hash_ids or a session's history are, else distinct."""
    found: dict[int, list[int]] = {}
    parents = parents_of(trace)

    def add(place: int) -> None:
        start: list[int] = []
        if trace.hash_ids is not None:
            blocks = trace.hash_ids[trace.hash_offsets[place] : trace.hash_offsets[place + 1]].tolist()
            start = [1_000 + (b * 7_919 + t) % 100_000 for b in blocks for t in range(trace.hash_block_size)]
        elif (parent := parents[place]) >= 0:
            if parent not in found:
                add(parent)
            history = found[parent] + [ANY_TOKEN] * int(trace.output_tokens[parent])
            start = history[: int(trace.history_tokens[place])]
        count = int(trace.input_tokens[place])
        own = [1_000 + (place * 7_919 + token) % 100_000 for token in range(count - len(start))]
        found[place] = (start + own)[:count]

    for place in range(len(trace)):
        add(place)
    return found


class Clients:
    """Those who send a trace's requests, and note when tokens come."""

    def __init__(self, trace: fastroof.Trace) -> None:
        self.trace, self.tokens, self.open = trace, prompts(trace), 0
        self._children: dict[int, list[int]] = {}
        for place, parent in enumerate(parents_of(trace)):
            self._children.setdefault(parent, []).append(place)
        self._waiting = [(float(trace.arrival_s[place]), place) for place in self._children[-1]]
        heapq.heapify(self._waiting)
        count = len(trace)
        self._start_s, self._first_s, self._last_s = np.zeros(count), np.full(count, np.nan), np.zeros(count)

    @property
    def next_s(self) -> float | None:
        """When the next request is sent, or None."""
        return self._waiting[0][0] if self._waiting else None

    def due(self, now_s: float) -> Iterator[int]:
        """Send the requests whose time has come."""
        while self._waiting and self._waiting[0][0] <= now_s:
            start_s, place = heapq.heappop(self._waiting)
            self._start_s[place] = start_s
            self.open += 1
            yield place

    def receive(self, place: int, now_s: float, *, is_last: bool) -> None:
        """Note a token; requests that follow the last one are sent later."""
        self._first_s[place] = np.fmin(self._first_s[place], now_s)
        self._last_s[place] = now_s
        if is_last:
            self.open -= 1
            for child in self._children.get(place, ()):
                ready_s = max(float(self.trace.arrival_s[child]), now_s + float(self.trace.delay_s[child]))
                heapq.heappush(self._waiting, (ready_s, child))

    def milliseconds(self) -> dict[str, Any]:
        """Return times of each request by the names of `simulate`."""
        return {
            "ttft_ms": 1e3 * (self._first_s - self._start_s),
            "tpot_ms": 1e3 * (self._last_s - self._first_s) / np.maximum(self.trace.output_tokens - 1, 1),
            "e2e_ms": 1e3 * (self._last_s - self._start_s),
        }


def compare(
    run: Run,
    serve: Callable[[Clients], Counts],
    simulate: Callable[[fastroof.Trace], fastroof.Simulation],
) -> bool:
    """Print a row, and return whether counts are equal and times to nine digits."""
    clients = Clients(run.trace)
    began = time.perf_counter()
    theirs = serve(clients)
    seconds = time.perf_counter() - began
    simulated = simulate(run.trace)
    ours = simulated.summary()
    worst = 0.0
    for name, times in clients.milliseconds().items():
        found = np.nan_to_num(simulated.requests.column(name).to_numpy())[run.trace.order]
        worst = max(worst, float(np.max(np.abs(found - times) / np.maximum(times, 1e-3))))
    counts = list(zip(theirs, (ours["steps"], ours["preemptions"]), strict=True))
    shown = " | ".join(f"{a:,}" if a == b else f"{a:,} against {b:,}" for a, b in counts)
    print(f"| {run.name} | {len(run.trace):,} | {shown} | {worst:.1g} | {seconds:.1f} s |", flush=True)
    return all(a == b for a, b in counts) and worst < 1e-9


def open_loop() -> fastroof.Trace:
    """500 requests at 10 a second, of lognormal lengths."""
    lengths = {"isl": "lognormal:1500:0.8:6000", "osl": "lognormal:150:0.7:800"}
    return fastroof.Workload(rate=10, requests=500, seed=1, **lengths).trace()


def equal_prefixes() -> fastroof.Trace:
    """400 prompts of whole blocks of 512 tokens along a tree of 3 x 4 x 5 branches."""
    rng = np.random.default_rng(5)
    ids = [
        [1 + a, 10 + 4 * a + b, 100 + 20 * a + 5 * b + c, 1000 + place]
        for place, (a, b, c) in enumerate(rng.integers(0, (3, 4, 5), (400, 3)).tolist())
    ]
    return fastroof.Trace(
        np.cumsum(rng.exponential(0.08, 400)),
        np.full(400, 4 * 512),
        rng.integers(20, 200, 400),
        hash_ids=np.concatenate(ids),
        hash_offsets=np.arange(401) * 4,
        hash_block_size=512,
    )


def sessions() -> fastroof.Trace:
    """400 requests of sessions of 3 turns of 3 calls."""
    return fastroof.Workload(
        rate=1.5, requests=400, turns=3, calls=3, isl=1500, growth_tokens=300, osl=120,
        think_s=4, tool_s=0.5, seed=3,
    ).trace()  # fmt: skip
