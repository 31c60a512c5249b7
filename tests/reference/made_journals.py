"""Journals of runs that never happened, for the tests of what is made of journals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels_bench.protocol import Point

HEADS = {"kv_dtype": "bf16", "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window": 0}


def gemm(m: int, n: int = 4096, k: int = 4096, dtype: str = "bf16") -> Point:
    return Point("gemm", {"dtype": dtype, "m": m, "n": n, "k": k}, group="gemm")


def decode(batch_size: int, kv_len: int, **keys: Any) -> Point:
    return Point(
        "attention_decode", {**HEADS, **keys, "batch_size": batch_size, "kv_len": kv_len}, group="decode"
    )


def prefill(q_len: int, kv_len: int | None = None, batch_size: int = 1, **keys: Any) -> Point:
    sizes = {"batch_size": batch_size, "q_len": q_len, "kv_len": kv_len or q_len}
    return Point("attention_prefill", {**HEADS, **keys, **sizes}, group="prefill")


def copy(m: int) -> Point:
    return Point(
        "elementwise", {"kind": "copy", "m": m, "width": 8192, "io_bytes": 4 * m * 8192}, group="copy"
    )


def row(point: Point, latency_us: float, **changes: Any) -> dict[str, Any]:
    """A row line; by default quartiles lie 1 % around the median."""
    return {
        "type": "row",
        "key": point.key,
        "operator": point.operator,
        "values": dict(point.values),
        "latency_us": latency_us,
        "p25_us": latency_us * 0.99,
        "p75_us": latency_us * 1.01,
        "min_us": latency_us * 0.98,
        "num_replays": 20,
        "provider": "torch",
        "kernel": "F.linear",
        "sm_clock_mhz": 1755.0,
        "power_w": 500.0,
        "temperature_c": 50.0,
        "throttle_reasons": 0,
        "remeasured": False,
        "order": 0,
        "at_s": 0.0,
        **changes,
    }


def sentinel(point: Point, round_: int, latency_us: float) -> dict[str, Any]:
    return row(point, latency_us) | {"type": "sentinel", "round": round_}


def skip(point: Point, kind: str, reason: str) -> dict[str, Any]:
    return {
        "type": "skip", "key": point.key, "operator": point.operator, "values": dict(point.values),
        "reason": reason, "kind": kind,
    }  # fmt: skip


def start(gpu: str = "h100", run_id: str = "run-a", **more: Any) -> dict[str, Any]:
    return {
        "type": "start",
        "run_id": run_id,
        "gpu": gpu,
        "facts": {"gpu_name": "NVIDIA H100 80GB HBM3", "driver": "580.1", "power_cap_w": 700.0, "cap": None},
        "versions": {"torch": "2.11.0+cu130", "cuda": "13.0"},
        "seed": 0,
        "grid": "h100",
        "grid_sha256": "ab" * 32,
        "request": {"grid": None, "only": [], "budget_s": 540.0},
        "command": "kernels-bench run -o 'a b'",
        "started": "2026-01-02T03:04:05Z",
        "commit": "c0ffee",
        **more,
    }


def steady_sentinels() -> list[dict[str, Any]]:
    return [sentinel(gemm(4096), i, 200.0 + 0.1 * (i % 3)) for i in range(6)]


def write_journal(
    path: Path,
    rows: Sequence[tuple[Point, float] | Mapping[str, Any]],
    *,
    first: Mapping[str, Any] | None = None,
    ended: bool = True,
    sentinels: Iterable[Mapping[str, Any]] | None = None,
) -> Path:
    """Write a journal: a start line, sentinels, rows (points with their time, or any lines), an end line."""
    first = start() if first is None else first
    lines = [row(*line) if isinstance(line, tuple) else line for line in rows]
    end = [{"type": "end", "run_id": first.get("run_id"), "reason": "complete"}] if ended else []
    every = [first, *(steady_sentinels() if sentinels is None else sentinels), *lines, *end]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in every), encoding="utf-8")
    return path
