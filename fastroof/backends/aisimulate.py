"""Tables for AISimulate: a plan's steps as the whole-forward parquet of ``fpm_interpolation``.

The format is that of fastroof.evidence.steps.pass_tables, schema 6. The reader is native: FpmForwardTable in
crates/core/src/perfmodel/perf_database/fpm_forward.rs at 0647f740 and FpmForwardOp in
operators/fpm_forward.rs at 028e34b9 of ai-dynamo/aisimulate (Apache-2.0); how its engine
asks, predict_prefill_duration of crates/core/src/engine/scheduler. What it takes was tried on aisimulate
0.13.0.dev202610270000000085.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fastroof.arrays import Longs
from fastroof.atomic_files import write_output
from fastroof.backends.mixed_steps import BLOCK_TOKENS, MAX_BATCH_SIZE, added_us, sizes_of
from fastroof.backends.plan_facts import INSTEAD
from fastroof.backends.releases import warn_of_release
from fastroof.documents import yaml_text
from fastroof.errors import BackendError
from fastroof.evidence.steps.pass_tables import MODES, PARTITION
from fastroof.load.aiconfigurator import system_of
from fastroof.models.named import PRESETS
from fastroof.parquet import CHECKED_PAGES
from fastroof.units import US_PER_MS

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

BACKEND_VERSIONS: Final = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
"""What the release calls the current version of each engine; those of A100 and B60 are others."""

SIDECAR: Final = {
    "schema_name": "aic_fpm_forward_perf",
    "schema_version": 6,
    "coordinate_system": "iteration_totals_balanced_v1",
    "measurement_policy": "dynamo_native_single_sample_v1",
}
"""What the reader insists on; that policy is of measurements, though these are predictions."""

BOUND_TO_CONFIGS: Final = ("DeepseekV41ForCausalLM", "Glm5NextForConditionalGeneration")
"""Architectures whose rows carry a digest of the checkpoint's config."""

KV_MODES: Final = {"bf16": "bfloat16", "fp8": "fp8"}

TOKEN_POINTS, KV_POINTS = 8, 4
"""Points for each doubling of the new tokens of prompts, and of the cached tokens of decodes."""

JUMP: Final = 0.01
"""Where one more token takes so much longer both numbers are points: another kernel, or padding, begins."""

FIRST_CONTEXT: Final = 16
MOST_TOKENS: Final = 2**32 - 1
LEAST_US: Final = 1e-3


def write_fpm(
    plan: StepPlan,
    path: str | Path,
    *,
    backend_version: str | None = None,
    model: str | None = None,
    max_isl: int | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    max_context: int | None = None,
    beside: tuple[int, int] | None = None,
) -> int:
    """Write a plan as a table that AISimulate reads, its record, and an engine's configuration with both.

    Parameters
    ----------
    plan : StepPlan
        What to tabulate; its engine determines what is added to the kernels.
    path : str or Path
        The table, a .parquet; the record is next to it as .metadata.json, the configuration as .yaml.
    backend_version : str, optional
        The engine's version in AISimulate, which takes few; by default :data:`BACKEND_VERSIONS`. It names
        rows and changes no time.
    model : str, optional
        The model's name in AISimulate; by default the preset's first Hugging Face name.
    max_isl : int, optional
        Most new prompt tokens in a step, AISimulate's max_batched_tokens; by default the plan's.
    max_batch_size : int
        Most requests in a step, its max_sequences.
    max_context : int, optional
        Most tokens that a request attends to; by default the model's positions.
    beside : (int, int), optional
        Decodes that usually run next to prompts and their tokens, see
        :func:`fastroof.backends.mixed_steps.decodes_beside`: prompts become what they add to those.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    BackendError
        If the format has no name for the plan's engine, formats or layout, a limit is not an integer of at
        least 1, the path does not end in .parquet or its folder does not exist, or decodes take longer next
        to prefill while ``beside`` is not given.
    PlanRangeError
        If max_isl or max_batch_size is larger than the plan.
    TableError
        If AISimulate has no system with the plan's GPU.

    Warns
    -----
    ReleaseWarning
        If AISimulate is installed here in a release that the table was not tried with.

    Notes
    -----
    A row is a step of requests that share its tokens evenly. AISimulate draws straight lines: decodes between
    cached tokens of each number of requests, prompts between new tokens of each number of prompts. Prompts
    after contexts are rows for powers of two; between them it scales the nearest rows by its own roofline.
    It times a step as prompts + decodes, which both read the weights; a real step reads them once.

    Examples
    --------
    >>> import fastroof, tempfile
    >>> from fastroof.evidence.steps.pass_tables import read_pass_table
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Path(folder) / "llama.parquet"
    ...     rows = write_fpm(plan, table, max_batch_size=4, max_context=1024)
    ...     steps = read_pass_table(table)
    >>> len(steps) == rows, steps[-1].name
    (True, '4x1@1023')
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise BackendError(f"a table of AISimulate is a .parquet file, got {path}")
    identity = _identity(plan, backend_version, model)
    warn_of_release("aisimulate.py")
    sizes = sizes_of(plan, "AISimulate", max_isl, max_batch_size, max_context, beside)
    rows = _rows(plan, *sizes)
    count, running = len(rows["latency_ms"]), sizes[-1]
    columns: dict[str, Any] = {name: pa.repeat(pa.scalar(value), count) for name, value in identity.items()}
    if running is not None:
        added = f"added to {running[0]} decodes of {running[1]} tokens"
        columns["execution_profile"] = np.where(rows["workload_kind"] == "prefill", added, "full")
    content = pa.BufferOutputStream()
    pq.write_table(pa.table(columns | rows), content, compression="zstd", **CHECKED_PAGES)
    table = content.getvalue().to_pybytes()
    record = {
        **SIDECAR,
        **{name: identity[name] for name in ("system", "backend", "backend_version")},
        "row_count": count,
        "parquet_sha256": hashlib.sha256(table).hexdigest(),
        "fastroof_plan": plan.describe(),
    }
    engine = _engine(plan, path, identity, *sizes[:3])
    for suffix, written in (
        (".parquet", table),
        (".metadata.json", json.dumps(record, indent=1).encode()),
        (".yaml", yaml_text({"engine": engine}).encode()),
    ):
        write_output(path.with_suffix(suffix), written, error=BackendError)
    return count


def _rows(
    plan: StepPlan, most_new: int, most_batch: int, longest: int, beside: tuple[int, int] | None
) -> dict[str, Any]:
    """Tabulate steps by the totals that AISimulate asks for."""
    most_kv = plan.memory.tokens_beside_states(most_batch) or MOST_TOKENS
    lengths = np.arange(1, most_new + 1)
    alone_us = added_us(plan, np.ones_like(lengths), lengths, np.zeros_like(lengths), beside)
    jumps = np.flatnonzero(np.abs(np.diff(alone_us)) > JUMP * alone_us[:-1])
    tokens = np.unique(np.r_[_nodes(1, most_new, TOKEN_POINTS), jumps + 1, jumps + 2])
    contexts = np.r_[0, _nodes(min(FIRST_CONTEXT, longest - 1), longest - 1, 1)]
    parts = []
    for batch in range(1, most_batch + 1):
        if batch <= most_new:
            is_power = batch & (batch - 1) == 0
            new, cached = np.meshgrid(
                np.union1d(tokens[tokens > batch], batch), batch * contexts[: None if is_power else 1]
            )
            parts.append(_part(plan, "prefill", batch, new.ravel(), cached.ravel(), beside))
        cached = _nodes(batch, max(batch, min(batch * (longest - 1), most_kv, MOST_TOKENS)), KV_POINTS)
        parts.append(_part(plan, "decode", batch, np.full_like(cached, batch), cached, None))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _identity(plan: StepPlan, backend_version: str | None, model: str | None) -> dict[str, Any]:
    """Return what AISimulate compares of a row with its configuration."""
    backend, layout = plan.profile.engine, plan.layout
    lacks = []
    if backend not in BACKEND_VERSIONS:
        lacks.append(f"engine {plan.profile.name} (valid: {', '.join(BACKEND_VERSIONS)})")
    if plan.dtype not in MODES:
        lacks.append(f"format {plan.dtype} (valid: {', '.join(MODES)})")
    if plan.kv_dtype not in KV_MODES:
        lacks.append(f"KV cache in {plan.kv_dtype} (valid: {', '.join(KV_MODES)})")
    if layout.cp > 1:
        lacks.append(f"context parallelism over {layout.cp} GPUs")
    if plan.model.architecture in BOUND_TO_CONFIGS:
        lacks.append(f"{plan.model.architecture}, whose rows carry a digest of the checkpoint's config")
    if lacks:
        raise BackendError(f"AISimulate's table has no place for {' and '.join(lacks)}; {INSTEAD}")
    gemm, experts = MODES[plan.dtype]
    moe_tp, moe_ep = (layout.moe_tp, layout.ep) if plan.model.has_experts else (1, 1)
    return {
        "cell_id": "fastroof",
        "model_path": PRESETS.get(plan.model.name, (plan.model.name,))[0] if model is None else model,
        "system": system_of(plan.gpu.name),
        "backend": backend,
        "backend_version": BACKEND_VERSIONS[backend] if backend_version is None else backend_version,
        "weight_quantization": gemm,
        "gemm_quant_mode": gemm,
        "moe_quant_mode": experts,
        "fmha_quant_mode": "bfloat16",
        "comm_quant_mode": "half",
        "kv_cache_dtype": KV_MODES[plan.kv_dtype],
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "moe_tp": moe_tp,
        "moe_ep": moe_ep,
        "cp": 1,
        "moe_backend": "auto",
        "attention_backend": "auto",
        "enable_wideep": False,
        "enable_eplb": False,
        "partition_policy": PARTITION,
    }


def _engine(
    plan: StepPlan, path: Path, identity: dict[str, Any], most_new: int, most_batch: int, longest: int
) -> dict[str, Any]:
    """Return the engine of ``aisimulate predict`` that takes a table, with the plan's memory."""
    blocks = plan.memory.tokens_beside_states(most_batch) // BLOCK_TOKENS
    sizes = {
        "tensor": "tp", "pipeline": "pp", "attention_data": "dp",
        "moe_tensor": "moe_tp", "moe_expert": "moe_ep",
    }  # fmt: skip
    modes = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode")
    capacity = {"capacity": {"type": "fixed", "blocks": blocks}} if blocks else {}
    worker = {
        "parallelism": {name: identity[column] for name, column in sizes.items()},
        "scheduler": {"max_batched_tokens": most_new, "max_sequences": most_batch},
        "kv_cache": {"block_size": BLOCK_TOKENS, **capacity},
        "timing": {
            "estimation_mode": "fpm_interpolation",
            "fpm_parquet_path": str(path.absolute()),
            **{name: identity[name] for name in modes},
            "kvcache_quant_mode": identity["kv_cache_dtype"],
        },
    }
    return {
        "model": identity["model_path"],
        "hardware": identity["system"],
        "backend": identity["backend"],
        "backend_version": identity["backend_version"],
        "context_length": longest,
        "workers": {"aggregated": worker},
    }


def _part(
    plan: StepPlan, kind: str, batch: int, new: Longs, cached: Longs, beside: tuple[int, int] | None
) -> dict[str, Any]:
    """Return rows of steps whose requests share their new and cached tokens evenly."""
    new_tokens, context_len = (
        ((total[:, None] + np.arange(batch)) // batch).ravel() for total in (new, cached)
    )
    times_us = added_us(plan, np.full_like(new, batch), new_tokens, context_len, beside)
    return {
        "workload_kind": np.full(len(new), kind),
        "batch_size": np.full_like(new, batch),
        "total_prefill_tokens": new if kind == "prefill" else np.zeros_like(new),
        "total_kv_read_tokens": cached,
        "latency_ms": np.maximum(times_us, LEAST_US) / US_PER_MS,
    }


def _nodes(least: int, most: int, points: int) -> Longs:
    """Return whole numbers from ``least`` to ``most``, ``points`` for each doubling."""
    doublings = np.arange(points * np.log2(most / least) + 1) / points
    nodes = np.rint(least * 2.0**doublings).astype(np.int64)
    return np.union1d(nodes[nodes < most], most)
