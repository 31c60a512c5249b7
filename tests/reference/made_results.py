"""Results files as a sweep over deployments writes them, made row by row from serving estimates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import fastroof
from fastroof.errors import FastroofError
from fastroof.serving import estimate

INTS = {
    "tp", "replicas", "total_gpus", "isl", "osl", "clients", "max_num_batched_tokens", "prefill_workers",
    "decode_workers", "weight_bytes", "max_kv_tokens",
}  # fmt: skip
TEXTS = {"model", "gpu", "mode", "dtype", "kv_dtype", "engine", "bound", "exceeds", "origin"}
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
LIMITS = {"ttft_ms": 2000.0, "tpot_ms": 30.0}


def deployment(plan: fastroof.StepPlan, isl: int, osl: int, clients: int) -> dict[str, Any]:
    """One row: one replica that serves so many clients."""
    found = estimate(plan, isl, osl, clients, requests_per_client="steady").columns()
    step_s = found["request_latency_ms"] / 1e3
    rate = found["tokens_per_s_per_gpu"] * plan.tp
    exceeds = next((name[:-3] for name, most in LIMITS.items() if found[name] > most), None)
    return {
        "model": plan.model.name, "gpu": plan.gpu.name, "mode": "aggregated", "tp": plan.tp, "replicas": 1,
        "total_gpus": plan.tp, "dtype": plan.dtype, "kv_dtype": plan.kv_dtype, "engine": plan.engine,
        "isl": isl, "osl": osl, "clients": clients, "request_rate_per_s": None,
        "max_num_batched_tokens": 8192, "prefix_hit": 0.0, "prefill_workers": 0, "decode_workers": 0,
        "ttft_ms": found["ttft_ms"], "tpot_ms": found["tpot_ms"], "itl_ms": found["itl_ms"],
        "request_latency_ms": found["request_latency_ms"], "tokens_per_s": rate,
        "tokens_per_s_per_gpu": found["tokens_per_s_per_gpu"],
        "tokens_per_s_per_user": 1e3 / found["tpot_ms"],
        "requests_per_s": rate / osl, "cost_per_million_tokens": 2.5 / 3600.0 / rate * plan.tp * 1e6,
        "effective_concurrency": found["effective_concurrency"],
        "decode_step_ms": found["decode_step_us"] / 1e3, "mixed_step_ms": found["mixed_step_us"] / 1e3,
        "mixed_share": found["mixed_share"], "wait_ms": found["wait_ms"],
        "kv_share": min(1.0, clients * (isl + osl / 2) / plan.memory.max_kv_tokens),
        "weight_bytes": plan.memory.weight_bytes, "max_kv_tokens": plan.memory.max_kv_tokens,
        "bound": "memory" if step_s else "host", "relative_error": 0.04, "exceeds": exceeds,
        "origin": "interpolated",
    }  # fmt: skip


def deployments(tables: fastroof.Tables) -> Iterator[dict[str, Any]]:
    """Rows of a small sweep."""
    for model in ("llama-3.1-8b", "qwen3-8b"):
        for tp in (1, 2, 4):
            for dtype in ("bf16", "fp8"):
                plan = fastroof.compile_plan(model, "h100", tables, tp=tp, dtype=dtype, engine="vllm")
                for isl, osl in ((1024, 128), (4000, 500)):
                    for clients in CONCURRENCY:
                        try:
                            yield deployment(plan, isl, osl, clients)
                        except FastroofError:
                            continue


def write_deployments(path: Path, rows: Sequence[Mapping[str, Any]], tables_hash: str, **spec: Any) -> Path:
    """Write rows as a results file, with the metadata of a sweep."""
    names = list(rows[0])
    kinds = [pa.string() if n in TEXTS else pa.int64() if n in INTS else pa.float64() for n in names]
    metadata = {
        "fastroof.version": fastroof.__version__,
        "fastroof.tables_hash": tables_hash,
        "fastroof.kind": "deployments",
        "fastroof.spec": json.dumps({"constraints": LIMITS, **spec}),
        "fastroof.counts": json.dumps({"evaluated": len(rows), "infeasible": {"memory": 3, "heads": 0}}),
    }
    fields = [
        pa.field(n, k, metadata={"unit": "ms" if n.endswith("_ms") else ""})
        for n, k in zip(names, kinds, strict=True)
    ]
    schema = pa.schema(fields, metadata=metadata)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema), path, row_group_size=100)
    return path
