"""A naive deployment sweep: every candidate in nested loops, one call each; the best and fronts by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from fastroof import compile_plan, load_model
from fastroof.engines import load_engine
from fastroof.errors import PlanError, PlanRangeError
from fastroof.serving import estimate, estimate_disaggregated
from tests.reference.shards import shard

LIMITS = {
    "ttft": ("ttft_ms", "ttft_ms"),
    "tpot": ("tpot_ms", "tpot_ms"),
    "request_latency": ("request_latency_ms", "request_latency_ms"),
    "kv_share": ("kv_share", "kv_share"),
    "total_gpus": ("total_gpus", "total_gpus"),
}


def _dtypes(spec):
    """Formats of checkpoints that are not quantised: bf16 where auto is asked for."""
    return ["bf16" if dtype == "auto" else dtype for dtype in spec.dtype]


def layouts_of(total: int, tp: int, mode: str) -> list[tuple[int, int, int]]:
    """Replicas, prefill workers and decode workers; empty where the GPUs do not divide."""
    if total % tp:
        return []
    if mode == "aggregated":
        return [(total // tp, 0, 0)]
    return [(0, x, total // tp - x) for x in range(1, total // tp)]


def candidates(spec: Any, tables: Any) -> list[dict[str, Any]]:
    """Estimate all points of a spec with total_gpus and clients; ``reason`` is why one failed."""
    found = []
    for model, mode, tp, dtype in itertools.product(spec.models, spec.mode, spec.tp, _dtypes(spec)):
        for total in spec.total_gpus:
            laid_out = layouts_of(total, tp, mode)
            for layout in laid_out or [None]:
                for isl, osl, clients, budget in itertools.product(
                    spec.isl, spec.osl, spec.clients, spec.max_num_batched_tokens
                ):
                    row = {
                        "model": load_model(model).name, "mode": mode, "tp": tp, "dtype": dtype, "isl": isl,
                        "osl": osl, "clients": float(clients), "max_num_batched_tokens": budget,
                        "total_gpus": total, "reason": None,
                    }  # fmt: skip
                    if layout is None:
                        row["reason"] = "layout"
                    else:
                        row |= dict(
                            zip(("replicas", "prefill_workers", "decode_workers"), layout, strict=True)
                        )
                        row |= one(spec, tables, row)
                    found.append(row)
    return found


def one(spec: Any, tables: Any, row: dict[str, Any]) -> dict[str, Any]:
    model = load_model(row["model"])
    try:
        shard(model, row["tp"])
    except PlanError:
        return {"reason": "tp"}
    # memory is kept for the activations of the largest step
    most = row["max_num_batched_tokens"] if row["mode"] == "disaggregated" else 20_000
    engine = load_engine(spec.engine[0])
    own = replace(engine.scheduling, max_num_batched_tokens=row["max_num_batched_tokens"], by_card=False)
    plan = compile_plan(
        model, "h100", tables, tp=row["tp"], dtype=row["dtype"], engine=replace(engine, scheduling=own),
        max_num_batched_tokens=most, max_num_seqs=20_000,
    )  # fmt: skip
    memory = plan.memory_of(
        max_num_batched_tokens=row["max_num_batched_tokens"], max_num_seqs=spec.max_num_seqs[0]
    )
    room = memory.max_kv_tokens
    if row["isl"] + row["osl"] > model.max_position:
        return {"reason": "context"}
    if memory.held_tokens(row["isl"] + row["osl"]) > room:
        return {"reason": "memory"}
    sizes = (row["isl"], row["osl"])
    try:
        if row["mode"] == "aggregated":
            clients = row["clients"] / row["replicas"]
            found = estimate(
                plan, *sizes, max(clients, 1.0), row["max_num_batched_tokens"],
                max_num_seqs=spec.max_num_seqs[0], requests_per_client="steady",
            )  # fmt: skip
            tokens = found.tokens_per_s_per_gpu * row["tp"] * row["replicas"] * min(clients, 1.0)
            held = memory.held_tokens(row["isl"] + 0.5 * row["osl"])
            kv_share = found.effective_concurrency * held / room
        else:
            workers = (row["prefill_workers"], row["decode_workers"])
            found = estimate_disaggregated(
                plan, plan, *sizes, row["clients"], *workers, row["max_num_batched_tokens"],
                max_num_seqs=spec.max_num_seqs[0],
            )  # fmt: skip
            tokens = found.tokens_per_s_per_gpu * row["tp"] * sum(workers)
            kv_share = found.kv_load
    except PlanRangeError:
        return {"reason": "memory"}
    answer = {
        "ttft_ms": found.ttft_ms,
        "tpot_ms": found.tpot_ms,
        "request_latency_ms": found.request_latency_ms,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens / row["total_gpus"],
        "tokens_per_s_per_user": 1e3 / found.tpot_ms,
        "kv_share": kv_share,
        "wait_ms": found.wait_ms,
    }
    for reason, (column, limit) in LIMITS.items():
        most = getattr(spec.constraints, limit)
        if most is not None and (answer | row)[column] > most:
            return answer | {"reason": reason}
    return answer


def best(rows: list[dict[str, Any]], per: tuple[str, ...], k: int, value: Any) -> list[dict[str, Any]]:
    """Best k rows of each group, groups in the order of their values; of equals the first."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if row["reason"] is None:
            groups.setdefault(tuple(row[name] for name in per), []).append(row)
    return [row for _, group in sorted(groups.items()) for row in sorted(group, key=lambda r: -value(r))[:k]]


def front(rows: list[dict[str, Any]], per: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows that no other of the group beats, by comparing all with all; of equals the first."""
    x, y = "tokens_per_s_per_user", "tokens_per_s_per_gpu"
    kept = []
    there = [row for row in rows if row["reason"] is None]
    for i, a in enumerate(there):
        beaten = False
        for j, b in enumerate(there):
            if i == j or any(a[name] != b[name] for name in per):
                continue
            as_much = b[x] >= a[x] and b[y] >= a[y]
            beaten |= as_much and (b[x] > a[x] or b[y] > a[y] or j < i)
        if not beaten:
            kept.append(a)
    return kept
