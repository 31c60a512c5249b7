"""A stand-in for LLMServingSim's reader, since the simulator is not a package that installs.

It reads a bundle and sums a step by the simulator's rules, written anew from its
serving/core/trace_generator.py at 0d3de681adbd9c515fc378e94e3e625b6e250dad:

* ``time_us`` becomes whole nanoseconds, at least one;
* layers of tokens and of sequences are linear between their rows and beyond the last two, held below the
  first, and cut to whole nanoseconds;
* attention is linear along prefill_chunk, n_decode, prefill_key and kv_decode, each slice of
  (prefill_chunk, n_decode) with an axis of keys of its own and each key with one of contexts; a slice
  that is missing is replaced by the nearest; decodes of several lengths count as their mean, cut to a whole
  number; without a skew fit nothing is corrected;
* release 1.1.0 reads ``kv_prefill`` in the place of prefill_key, all prompts' contexts, summed; and its
  attention is linear in logarithms, but where a stretch begins at 0;
* a step is a prologue, all layers' blocks, and a head (profiler/models/llama.yaml and qwen3.yaml).
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COLUMNS = {
    "dense.csv": ["layer", "tokens", "time_us"],
    "per_sequence.csv": ["layer", "sequences", "time_us"],
    "attention.csv": [
        "layer", "prefill_chunk", "prefill_key", "kv_prefill", "n_decode", "kv_decode", "decode_q_len",
        "time_us",
    ],
}  # fmt: skip
PROLOGUE = ("embedding",)
HEAD = ("final_layernorm", "lm_head", "sampler")
PRE_ATTENTION = ("layernorm", "qkv_proj", "qk_norm", "rotary_emb", "attention")
POST_ATTENTION = ("o_proj", "layernorm", "gate_up_proj", "act_fn", "down_proj")
TP_STABLE = ("layernorm", "final_layernorm", "sampler")


def _nanoseconds(time_us: str) -> int:
    return max(round(float(time_us) * 1000.0), 1)


def _place(axis: Sequence[float], x: float) -> tuple[int, int, float]:
    """Two neighbours on an axis and how far x lies from the first to the second; held below the axis."""
    if len(axis) == 1 or x <= axis[0]:
        return 0, 0, 0.0
    upper = min(bisect_right(axis, x), len(axis) - 1)
    lower = upper - 1
    return lower, upper, (x - axis[lower]) / (axis[upper] - axis[lower])


def _log_place(axis: Sequence[float], x: float) -> tuple[int, int, float]:
    lower, upper, share = _place(axis, x)
    if axis[lower] > 0 and lower < upper:
        share = math.log(x / axis[lower]) / math.log(axis[upper] / axis[lower])
    return lower, upper, share


def _between(
    axis: Sequence[float], values: Sequence[float], x: float, place: Callable[..., Any] = _place
) -> float:
    lower, upper, share = place(axis, x)
    return values[lower] + share * (values[upper] - values[lower])


class Bundle:
    """A variant's folder, read for one tensor-parallel size."""

    def __init__(self, folder: Path, tp: int, *, is_released: bool = False) -> None:
        self.is_released = is_released
        self.rows: dict[str, dict[str, dict[float, int]]] = {}
        stable = folder / "tp1"
        for place, keep in ((folder / f"tp{tp}", None), (stable, TP_STABLE)):
            for name in ("dense.csv", "per_sequence.csv"):
                if not (place / name).is_file():
                    continue
                for layer, key, time_us in self._read(place / name):
                    if keep is None or layer in keep:
                        self.rows.setdefault(layer, {})[int(key)] = _nanoseconds(time_us)
        slices: dict[tuple[int, int], dict[float, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        for layer, chunk, key, kv_prefill, count, context, queries, time_us in self._read(
            folder / f"tp{tp}" / "attention.csv"
        ):
            assert (layer, queries) == ("attention", "1")
            of_prompts = int(kv_prefill) if is_released else float(key)
            slices[int(chunk), int(count)][of_prompts][int(context)] = _nanoseconds(time_us)
        self.curves = {layer: _sorted(points) for layer, points in self.rows.items()}
        self.slices = {
            pair: _sorted({key: _sorted(points) for key, points in by_key.items()})
            for pair, by_key in slices.items()
        }
        self.chunks = sorted({chunk for chunk, _ in slices})
        self.counts = sorted({count for _, count in slices})

    def _read(self, path: Path) -> list[list[str]]:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        assert header == COLUMNS[path.name]
        return rows

    def layer_ns(self, layer: str, rows: int) -> int:
        return max(int(_between(*self.curves[layer], max(rows, 1))), 1)

    def attention_ns(self, chunk: int, key: float, count: int, context: int) -> int:
        place = _log_place if self.is_released else _place
        low_chunk, high_chunk, chunk_share = place(self.chunks, chunk)
        low_count, high_count, count_share = place(self.counts, count)

        def corner(i: int, j: int) -> float:
            pair = (self.chunks[i], self.counts[j])
            if pair not in self.slices:
                pair = min(self.slices, key=lambda p: (p[0] - pair[0]) ** 2 + (p[1] - pair[1]) ** 2)
            keys, columns = self.slices[pair]
            lower, upper, share = place(keys, key)
            low = _between(*columns[lower], context, place)
            return low + share * (_between(*columns[upper], context, place) - low)

        low = corner(low_chunk, low_count)
        low += count_share * (corner(low_chunk, high_count) - low)
        high = corner(high_chunk, low_count)
        high += count_share * (corner(high_chunk, high_count) - high)
        return max(round(max(int(low + chunk_share * (high - low)), 1)), 1)

    def step_ns(self, requests: Sequence[tuple[int, int]], num_layers: int) -> int:
        """One step of (new_tokens, context_len), without what the network model adds."""
        prompts = [(new, context) for new, context in requests if new > 1]
        contexts = [context for new, context in requests if new == 1]
        tokens = sum(new for new, _ in requests)
        chunk = sum(new for new, _ in prompts)
        key = sum(new * (context + new / 2) for new, context in prompts) / chunk if chunk else 0.0
        if self.is_released:
            key = sum(context for _, context in prompts)
        mean = sum(contexts) // len(contexts) if contexts else 0
        block = self.attention_ns(chunk, key, len(contexts), mean)
        for layer in (*PRE_ATTENTION, *POST_ATTENTION):
            # a layer that the profile lacks is skipped, as a model without qk_norm has none
            if layer != "attention" and layer in self.curves:
                block += self.layer_ns(layer, tokens)
        ends = sum(self.layer_ns(layer, tokens) for layer in (*PROLOGUE, "final_layernorm"))
        ends += sum(self.layer_ns(layer, len(requests)) for layer in ("lm_head", "sampler"))
        return ends + num_layers * block


def _sorted(points: dict) -> tuple[list, list]:
    axis = sorted(points)
    return axis, [points[x] for x in axis]
