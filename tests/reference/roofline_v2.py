"""Roofline V2 for reading: one lookup and one step at a time, in plain Python floats.

The compiled version is held to these answers bit for bit, and both to the golden files.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LEAST_MFU = 1e-4
Rows = Sequence[tuple[float, ...]]


class Tables:
    """The rows of a tree, in file order: prefill[shape], decode[shape][tp], gemm[k, n]."""

    def __init__(self, root: Path) -> None:
        def rows(path: Path, *columns: str) -> Rows:
            with path.open(newline="") as file:
                return [tuple(float(row[c]) for c in columns) for row in csv.DictReader(file)]

        (gemm,) = root.glob("gemm/*/data.csv")
        decode = {}
        for path in sorted(root.glob("mha/decode/*/*-tp*.csv")):
            shape, _, tp = path.stem.rpartition("-tp")
            decode[shape, int(tp)] = rows(path, "batch_size", "kv_len", "mfu")
        self._keep(
            rows(gemm, "m", "k", "n", "mfu"),
            {path.stem: rows(path, "seq_len", "mfu") for path in sorted(root.glob("mha/prefill/*/*.csv"))},
            decode,
        )

    @classmethod
    def of_rows(cls, gemm: Rows, prefill: dict[str, Rows], decode: dict[tuple[str, int], Rows]) -> Tables:
        tables = cls.__new__(cls)
        tables._keep(gemm, prefill, decode)
        return tables

    def _keep(self, gemm: Rows, prefill: dict[str, Rows], decode: dict[tuple[str, int], Rows]) -> None:
        self.gemm: dict[tuple[float, float], list[tuple[float, float]]] = {}
        for m, k, n, mfu in gemm:
            self.gemm.setdefault((k, n), []).append((m, mfu))
        self.prefill = prefill
        self.decode: dict[str, dict[int, Rows]] = {}
        for (shape, tp), rows in decode.items():
            self.decode.setdefault(shape, {})[tp] = rows


def bracket(axis: Sequence[float], x: float) -> tuple[int, int]:
    """Nodes on both sides of x; the same node twice where x is a node or outside."""
    if x <= axis[0]:
        return 0, 0
    if x >= axis[-1]:
        return len(axis) - 1, len(axis) - 1
    i = next(i for i, node in enumerate(axis) if node >= x)
    return (i, i) if axis[i] == x else (i - 1, i)


def lerp(a: float, b: float, t: float) -> float:
    return a + (b - a) * t


def on_curve(rows: Rows, x: float) -> float:
    points = sorted(rows)
    axis = [p[0] for p in points]
    i, j = bracket(axis, x)
    mfu = points[i][1] if i == j else lerp(points[i][1], points[j][1], (x - axis[i]) / (axis[j] - axis[i]))
    if mfu >= LEAST_MFU:
        return mfu
    found = [p for p in rows if p[1] >= LEAST_MFU]
    return min(found, key=lambda p: abs(p[0] - x))[1] if found else LEAST_MFU


def prefill_mfu(tables: Tables, shape: str, seq_len: float) -> float:
    return on_curve(tables.prefill[shape], seq_len)


def decode_mfu(tables: Tables, shape: str, batch_size: float, kv_len: float, tp: int) -> float:
    tables_of_shape = tables.decode[shape]
    rows = tables_of_shape[min(tables_of_shape, key=lambda have: (abs(have - tp), have))]
    batches = sorted({r[0] for r in rows})
    kv_lens = sorted({r[1] for r in rows})
    cell = {(b, kv): mfu for b, kv, mfu in rows}
    b0, b1 = (batches[i] for i in bracket(batches, batch_size))
    kv0, kv1 = (kv_lens[i] for i in bracket(kv_lens, kv_len))
    tb = (batch_size - b0) / (b1 - b0) if b0 != b1 else 0.0
    tkv = (kv_len - kv0) / (kv1 - kv0) if kv0 != kv1 else 0.0
    at0 = lerp(cell.get((b0, kv0), 0.0), cell.get((b1, kv0), 0.0), tb)
    at1 = lerp(cell.get((b0, kv1), 0.0), cell.get((b1, kv1), 0.0), tb)
    mfu = lerp(at0, at1, tkv)
    if mfu >= LEAST_MFU:
        return mfu
    found = [r for r in rows if r[2] >= LEAST_MFU]
    if not found:
        return LEAST_MFU
    return min(found, key=lambda r: math.sqrt((r[0] - batch_size) ** 2 + (r[1] - kv_len) ** 2))[2]


def gemm_mfu(tables: Tables, m: float, k: float, n: float) -> float:
    over = [pair for pair in tables.gemm if pair[0] >= k and pair[1] >= n]
    if over:
        pair = min(over, key=lambda p: (p[0] - k) ** 2 + (p[1] - n) ** 2)
    else:
        pair = max(tables.gemm, key=lambda p: p[0] ** 2 + p[1] ** 2)
    return on_curve(tables.gemm[pair], m)


def nearest_attention(tables: Tables, num_heads: int, num_kv_heads: int, head_dim: int) -> str:
    wanted = (num_heads, num_kv_heads, head_dim)
    return min(tables.prefill, key=lambda shape: math.dist([int(x) for x in shape.split("-")], wanted))


class Model:
    """One model on one GPU type at one tensor-parallel size."""

    def __init__(self, tables: Tables, config: dict[str, Any], hardware: dict[str, Any], tp: int) -> None:
        self.tables, self.tp = tables, tp
        self.layers = config["num_hidden_layers"]
        self.hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_dim = self.hidden // self.heads
        self.ff = config.get("intermediate_size") or 4 * self.hidden
        self.width = config["bytes_per_param"]
        self.peak = hardware["TFlopsPeak"] * 1e12
        self.bandwidth = hardware["BwPeakTBs"] * 1e12 * (hardware.get("bwEfficiencyFactor") or 1.0)
        self.overhead_us = hardware["perLayerOverhead"] * self.layers / tp
        self.shape = nearest_attention(tables, self.heads, self.kv_heads, self.head_dim)
        kv = self.kv_heads * self.head_dim
        h = self.hidden
        self.gemms = [(h, h), (h, kv), (h, kv), (h, h), (h, self.ff), (h, self.ff), (self.ff, h)]
        self.weights = float(self.layers * sum(k * n for k, n in self.gemms) * self.width)

    def gemms_s(self, m: int) -> float:
        total = 0.0
        for k, n in self.gemms:
            compute = 2.0 * m * k * n / (self.peak * gemm_mfu(self.tables, m, k, n))
            total += max(compute, k * n * self.width / self.bandwidth)
        return total * (1.0 / self.tp) * self.layers

    def attention_flops(self, new: int, context: int) -> float:
        return 2.0 * self.heads * new * context * self.head_dim * 2.0

    def memory_s(self, requests: Sequence[tuple[int, int]]) -> float:
        """Seconds to move the bytes of (progress, new_tokens) requests and the weights, once."""
        total = 0.0
        for progress, new in requests:
            activations = self.layers * self.hidden * self.width * new * (0.75 if new == 1 else 0.85)
            growth = 2.0 * self.layers * self.kv_heads * self.head_dim * self.width * new
            access = 2.0 * self.layers * self.kv_heads * self.head_dim * self.width * progress
            access *= 0.80 if new == 1 else 0.92
            total += (activations + access + growth + self.weights - self.weights) / self.tp
        return (total + self.weights / self.tp) / self.bandwidth

    def decode_compute_s(self, progress: Sequence[int]) -> float:
        total = weighted = 0.0
        for context in progress:
            flops = self.attention_flops(1, context) * self.layers
            total += flops
            weighted += flops * decode_mfu(self.tables, self.shape, len(progress), context, self.tp)
        attention = total / (self.peak * (weighted / total)) / self.tp if total else 0.0
        return self.gemms_s(len(progress)) + attention

    def prefill_compute_s(self, requests: Sequence[tuple[int, int]]) -> float:
        buckets: dict[int, list[tuple[int, int]]] = {}
        for progress, new in requests:
            bucket = 512
            while bucket < progress + new and bucket < 65536:
                bucket *= 2
            buckets.setdefault(bucket, []).append((progress, new))
        total = 0.0
        for bucket in sorted(buckets):
            gemms = self.gemms_s(sum(new for _, new in buckets[bucket]))
            mfu = prefill_mfu(self.tables, self.shape, bucket)
            flops = 0.0
            for progress, new in buckets[bucket]:
                flops += self.attention_flops(new, progress + new)
            attention = flops * self.layers / 1.8 / (self.peak * mfu) / self.tp
            total += gemms + attention
        return total

    def step(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> tuple[float, ...]:
        """Time in us, then prefill compute and memory, decode compute and memory, in s."""
        parts = [0.0] * 4
        if prefill:
            parts[:2] = self.prefill_compute_s(prefill), self.memory_s(prefill)
        if decode:
            parts[2:] = self.decode_compute_s(decode), self.memory_s([(p, 1) for p in decode])
        return (max((max(parts) + self.overhead_us / 1e6) * 1e6, 1.0), *parts)


def write_tree(sample: Path, root: Path) -> Path:
    """Write the tables of the frozen sample as the files that they were taken from, and return the tree."""
    files: dict[str, list[str]] = {}
    for name, folder, keys, stem in (
        ("tables_gemm.csv", "gemm/h100", 0, "data"),
        ("tables_prefill.csv", "mha/prefill/h100", 1, "{}"),
        ("tables_decode.csv", "mha/decode/h100", 2, "{}-tp{}"),
    ):
        header, *lines = (sample / name).read_text().splitlines()
        for line in lines:
            cells = line.split(",")
            file = f"{folder}/{stem.format(*cells[:keys])}.csv"
            files.setdefault(file, [",".join(header.split(",")[keys:])]).append(",".join(cells[keys:]))
    for file, lines in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("\n".join(lines) + "\n")
    return root
