"""Whole-step tables of aisimulate: ``fpm_forward_perf.parquet``, forward-pass measurements of one engine.

Format read in collector/fpm_forward of aisimulate 0.13.0.dev202610270000000085 (schemas 6 and 7). A row is a
deployment and an iteration by its totals per rank: ``batch_size`` requests that share
``total_prefill_tokens`` new and ``total_kv_read_tokens`` cached tokens evenly. vLLM's time is Dynamo's, from
schedule to output; SGLang's is its own timer of the forward on the device. The package lists the tables of a
public data set (systems/profiles) but holds none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fastroof.checks import is_number, is_whole_number, one_of, shown
from fastroof.documents import read_json
from fastroof.engines import EngineProfile, engine_of_version, serving_engines
from fastroof.errors import FastroofError, TableError
from fastroof.evidence.steps.measured_steps import (
    MeasuredStep,
    Timed,
    phase_of,
    plan_dtype_of,
    read_step_columns,
)
from fastroof.load.aiconfigurator import SYSTEMS
from fastroof.models.execution import DTYPES
from fastroof.units import US_PER_MS

PASS_DATASET: Final = "forward-pass table"
PARTITION: Final = "balanced_v1"
TIMED: Final[Mapping[str, Timed]] = {"vllm": "engine", "sglang": "kernels"}
NEEDED: Final = (
    "model_path", "system", "backend", "backend_version", "gemm_quant_mode", "kv_cache_dtype",
    "workload_kind", "tp", "pp", "dp", "moe_ep", "batch_size", "total_prefill_tokens",
    "total_kv_read_tokens", "latency_ms",
)  # fmt: skip
FURTHER: Final = ("cp", "partition_policy", "kv_seed_regime", "execution_profile", "moe_quant_mode")
_SIZES: Final = ("tp", "pp", "dp", "moe_ep", "batch_size")
_TOKENS: Final = ("total_prefill_tokens", "total_kv_read_tokens")
MOST_ROWS: Final = 2**20
LARGEST_SIZE: Final = 2**30
MOST_REQUESTS: Final = 2**16
MOST_MS: Final = 1e6

MODES: Final[Mapping[str, tuple[str, str]]] = {
    "bf16": ("bfloat16", "bfloat16"),
    "mxfp4": ("bfloat16", "w4a16_mxfp4"),
    **{name: (name, name) for name in ("fp8", "fp8_block", "int4_wo", "nvfp4", "nvfp4_wo")},
}
"""Formats and the package's words for those of their GEMMs and experts."""

_DTYPES: Final = {"bfloat16": "bf16", "fp8_static": "fp8", "fp8_ootb": "fp8"}
"""The package's words for formats that have another name here."""


def read_pass_table(path: Path) -> list[MeasuredStep]:
    """Read the steps of a table, and verify it against its record if that lies next to it."""
    _verify(path)
    columns = read_step_columns(path, "a table of forward passes", NEEDED, FURTHER, MOST_ROWS)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return list(_steps(path, rows))


def _verify(path: Path) -> None:
    """Compare the file with the digest in its metadata, if there are any."""
    record = path.with_suffix(".metadata.json")
    if not record.is_file():
        return
    document = read_json(record, TableError)
    digest = document.get("parquet_sha256") if isinstance(document, Mapping) else None
    if digest != hashlib.sha256(path.read_bytes()).hexdigest():
        raise TableError(f"{path} differs from its record {record.name}: it was changed, or written in part")


def _steps(path: Path, rows: list[dict[str, Any]]) -> Iterator[MeasuredStep]:
    cases: dict[tuple[str, str, str, str, str], tuple[str, str, EngineProfile, str]] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        _check(where, row)
        modes = row["gemm_quant_mode"], str(row.get("moe_quant_mode"))
        key = (row["model_path"], row["backend"], row["backend_version"], *modes)
        if key not in cases:
            cases[key] = _deployment(where, *key)
        dtype, plan_dtype, profile, left_out = cases[key]
        phase = row["workload_kind"]
        new, context = _requests(where, phase, *(row[name] for name in ("batch_size", *_TOKENS)))
        kv_dtype = _DTYPES.get(row["kv_cache_dtype"], row["kv_cache_dtype"])
        yield MeasuredStep(
            row["model_path"], SYSTEMS.get(row["system"], row["system"]), row["tp"], dtype, kv_dtype,
            phase_of(new, context), new, context, row["latency_ms"] * US_PER_MS, row["pp"], row["dp"],
            row["moe_ep"], 0, TIMED[row["backend"]], PASS_DATASET, row["backend"], row["backend_version"],
            profile, plan_dtype, left_out or _why_not(row),
        )  # fmt: skip


def _check(where: str, row: Mapping[str, Any]) -> None:
    for name in NEEDED[:7]:
        if not isinstance(row[name], str) or not row[name]:
            raise TableError(f"{where}: {name} must be text, got {shown(row[name])}")
    for name in _SIZES + _TOKENS:
        most = MOST_REQUESTS if name == "batch_size" else LARGEST_SIZE
        if not is_whole_number(row[name], 1 if name in _SIZES else 0, most):
            raise TableError(f"{where}: {name} must be a whole number up to {most:,}, got {shown(row[name])}")
    if not is_number(row["latency_ms"]) or not 0.0 < row["latency_ms"] <= MOST_MS:
        raise TableError(
            f"{where}: latency_ms must be above 0 and at most {MOST_MS:g}, got {row['latency_ms']!r}"
        )
    one_of(f"{where}: backend", row["backend"], TIMED, TableError)


def _deployment(
    where: str, model: str, backend: str, version: str, gemm: str, experts: str
) -> tuple[str, str, EngineProfile, str]:
    """Return a deployment's dtype, its plan's, its profile, and why no plan represents it."""
    assert backend in serving_engines()
    profile = engine_of_version(backend, version)
    named = [dtype for dtype, modes in MODES.items() if modes == (gemm, experts)]
    dtype = named[0] if named else _DTYPES.get(gemm, gemm)
    if dtype not in DTYPES:
        return dtype, dtype, profile, f"GEMMs in {gemm} are not modelled; valid are {', '.join(DTYPES)}"
    try:
        return dtype, plan_dtype_of(model, dtype), profile, ""
    except FastroofError as error:
        return dtype, dtype, profile, str(error)


def _requests(
    where: str, phase: str, batch: int, new_tokens: int, cached: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return new and cached tokens of each request of an iteration."""
    if phase == "decode":
        if new_tokens or cached < batch:
            raise TableError(f"{where}: decodes need no prefill tokens and a cached token each")
        return (1,) * batch, _shares(cached, batch)
    if phase != "prefill":
        raise TableError(f"{where}: workload_kind must be prefill or decode, got {shown(phase)}")
    if new_tokens < batch:
        raise TableError(f"{where}: {batch} prompts need as many prefill tokens, got {new_tokens}")
    return _shares(new_tokens, batch), _shares(cached, batch)


def _shares(total: int, requests: int) -> tuple[int, ...]:
    """Share tokens among requests as evenly as possible."""
    each, more = divmod(total, requests)
    return (each + 1,) * more + (each,) * (requests - more)


def _why_not(row: Mapping[str, Any]) -> str:
    """Return why a row cannot be compared; empty if it can."""
    if row.get("cp") not in (None, 1):
        return f"context parallelism over {row['cp']} GPUs is not compared"
    if row.get("partition_policy") not in (None, PARTITION):
        return f"requests of {row['partition_policy']} are not known"
    if row.get("execution_profile") not in (None, "", "full"):
        return f"execution profile {str(row['execution_profile'])[:40]} is another step than a plan's"
    if row.get("kv_seed_regime") == "fake_fallback":
        return "its KV cache was not filled by real tokens, which routes experts otherwise"
    return ""
