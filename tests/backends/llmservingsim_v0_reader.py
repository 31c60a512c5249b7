"""A stand-in for the reader of LLMServingSim v1.0.0, since the simulator is not a package that installs.

It reads a folder of perf_models and sums a step by the simulator's rules, written anew from its
inference_serving/trace_generator.py and scheduler.py at 9e3f0ece7cab1393f176a74d38601ef07103f2d3:

* layers are looked up by (layer, input, 0, tp), lm_head by the requests, the others by the step's tokens;
  the first of several rows counts, and a key without a row is an error;
* attention is a row of prompts and a row of decodes, looked up by :func:`prefill_key` and :func:`decode_key`;
* a decode's length counts its new token, and the context of a prompt is always taken for 0: the scheduler
  neither splits prompts nor tells attention of a cached prefix;
* every layer's block is the same, and the network's and the memory's times are added elsewhere.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

COLUMNS = {
    "layers.csv": ["layer_name", "input", "kv_cache", "tp_size", "latency(ns)"],
    "predictions/attn_prefill_predictions.csv": ["kv_cache_size", "prefill_chunk_size", "prediction"],
    "predictions/attn_decode_predictions.csv": ["batch_size", "kv_cache_size", "prediction"],
}
BLOCK = (
    "input_layernorm", "q_proj", "k_proj", "v_proj", "rope", "o_proj", "post_layernorm", "gate_proj",
    "up_proj", "act_fn", "down_proj",
)  # fmt: skip
ENDS = ("embedding", "final_layernorm", "lm_head")

Request = tuple[int, int]


def is_decode(request: Request) -> bool:
    """Whether a request of (new_tokens, context_len) has had its prompt."""
    return request[0] == 1 and request[1] > 0


def decode_key(requests: Sequence[Request]) -> tuple[int, int]:
    """Number of decodes, and their mean length in whole blocks of 64."""
    lengths = [context + 1 for new, context in requests if is_decode((new, context))]
    if not lengths:
        return 0, 0
    return len(lengths), -(-(sum(lengths) // len(lengths)) // 64) * 64


def prefill_key(requests: Sequence[Request]) -> tuple[int, int]:
    """The context of prompts, which is not known, and the root of all squared tokens in blocks of 32."""
    if all(map(is_decode, requests)):
        return 0, 0
    chunk = round(sum(new**2 for new, _ in requests) ** 0.5)
    return 0, math.ceil(chunk / 32) * 32


class Profile:
    """A model's folder, read for one tensor-parallel size."""

    def __init__(self, folder: Path, tp: int) -> None:
        self.folder = folder / f"tp{tp}"
        tables = [self._read(self.folder, name) for name in COLUMNS]
        self.layers: dict[tuple[str, int, int, int], int] = {}
        for layer, rows, kv_cache, tp_size, latency_ns in tables[0]:
            self.layers.setdefault((layer, int(rows), int(kv_cache), int(tp_size)), int(latency_ns))
        self.prefill, self.decode = (
            {(int(first), int(second)): int(latency_ns) for first, second, latency_ns in reversed(table)}
            for table in tables[1:]
        )
        self.tp = tp

    @staticmethod
    def _read(folder: Path, name: str) -> list[list[str]]:
        with (folder / name).open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        assert header == COLUMNS[name]
        return rows

    def layer_ns(self, layer: str, rows: int) -> int:
        return self.layers[layer, rows, 0, self.tp]

    def attention_ns(self, requests: Sequence[Request]) -> int:
        prompts, decodes = prefill_key(requests), decode_key(requests)
        return (self.prefill[prompts] if prompts != (0, 0) else 0) + (
            self.decode[decodes] if decodes != (0, 0) else 0
        )

    def step_ns(self, requests: Sequence[Request], num_layers: int) -> int:
        """One step of (new_tokens, context_len)."""
        rows = dict.fromkeys((*ENDS, *BLOCK), sum(new for new, _ in requests))
        rows["lm_head"] = len(requests)
        block_ns = sum(self.layer_ns(layer, rows[layer]) for layer in BLOCK) + self.attention_ns(requests)
        return sum(self.layer_ns(layer, rows[layer]) for layer in ENDS) + num_layers * block_ns
