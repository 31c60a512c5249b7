"""What sweeps answer: rows, counts and best of both kinds, and grids in arrays."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from tests.frozen import product
from tests.frozen.answers import Answers


def _swept(answers: Answers, name: str, spec: dict[str, Any]) -> None:
    """Run a sweep, and keep its rows, schema and counts."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.parquet"
        summary = product.run_sweep(spec, output)
        table = pq.read_table(output)
    schema = table.schema
    answers.text(name, "schema", ", ".join(f"{field.name}: {field.type}" for field in schema))
    answers.text(name, "metadata", ", ".join(sorted(key.decode() for key in schema.metadata)))
    answers.text(name, "infeasible", ", ".join(f"{k} {v}" for k, v in sorted(summary.infeasible.items())))
    answers.number(name, "rows", summary.rows)
    rows = [f"row {i}" for i in range(table.num_rows)]
    for column in table.column_names:
        values = table[column].to_pylist()
        if all(isinstance(value, int | float) or value is None for value in values):
            numbers = [np.nan if value is None else value for value in values]
            answers.numbers(name, column, rows, numbers)
        else:
            answers.text(name, column, " | ".join(map(str, values)))


STEPS: Final = {
    "models": ["llama-3.1-8b", "qwen3-32b", "qwen2.5-7b"],
    "tp": [1, 4, 8],
    "dtype": ["bf16", "fp8"],
    "batch_size": {"start": 1, "stop": 512, "factor": 4},
    "kv_len": [300, 4096, 100_000],
    "tpot_ms": 40.0,
}


def steps() -> Answers:
    answers = Answers()
    _swept(answers, "best", STEPS)
    every = {
        "models": ["llama-3.1-8b", "mistral-nemo"],
        "tp": [2],
        "batch_size": [1, 7, 64],
        "kv_len": [100, 5000],
    }
    for runtime in ("kernels", "vllm", "trtllm"):
        _swept(answers, f"all, {runtime}", {**every, "kv_dtype": ["fp8"], "runtime": runtime, "keep": "all"})
    _swept(answers, "nearest", {**every, "method": "nearest"})
    return answers


LOADS: Final[dict[str, Any]] = {
    "isl": [500, 5000],
    "osl": [50, 700],
    "clients": [1, 20, 64, 300],
    "dtype": ["fp8"],
    "max_num_batched_tokens": [2048, 8192],
}


def deployments() -> Answers:
    """Sweeps over aggregated deployments of vLLM, and of kernels alone."""
    answers = Answers()
    models = {"models": ["llama-3.1-70b"], "tp": [2, 4, 8], "total_gpus": [8]}
    for runtime in ("vllm", "kernels"):
        _swept(answers, f"all, {runtime}", {**models, **LOADS, "runtime": [runtime], "keep": "all"})
    best = {
        **LOADS,
        "models": ["llama-3.1-8b", "qwen3-32b"],
        "total_gpus": [4, 8],
        "clients": [1, 8, 64, 512],
    }
    limits = {"ttft_ms": 800, "tpot_ms": 30}
    for objective in ("tokens_per_s_per_gpu", "tokens_per_s_per_user", "goodput"):
        _swept(answers, f"best, {objective}", {**best, "objective": objective, "constraints": limits, "k": 2})
    cost = {"objective": "cost", "gpu_hour_price": 2.5, "constraints": limits, "k": 2}
    _swept(answers, "best, cost, prefixes", {**best, **cost, "prefix_hit": [0.0, 0.5]})
    _swept(answers, "pareto", {**best, "keep": "pareto", "histogram": True})
    rates = {key: value for key, value in best.items() if key != "clients"}
    _swept(answers, "best, rates", {**rates, "rate": [0.5, 4, 50], "constraints": limits, "k": 1})
    return answers


def deployments_of_trtllm() -> Answers:
    """A sweep over aggregated deployments of TensorRT-LLM."""
    answers = Answers()
    models = {"models": ["llama-3.1-70b"], "tp": [2, 4, 8], "total_gpus": [8]}
    _swept(answers, "all, trtllm", {**models, **LOADS, "runtime": ["trtllm"], "keep": "all"})
    return answers


def disaggregated_deployments() -> Answers:
    """Sweeps over deployments whose workers prefill or decode."""
    answers = Answers()
    spec = {
        **LOADS,
        "models": ["llama-3.1-70b"],
        "mode": ["disaggregated"],
        "tp": [2, 4],
        "total_gpus": [16],
        "clients": [1, 64],
        "max_num_batched_tokens": [8192],
    }
    for runtime in ("vllm", "kernels"):
        _swept(answers, f"all, {runtime}", {**spec, "runtime": [runtime], "keep": "all"})
    both = {**spec, "mode": ["aggregated", "disaggregated"], "link_bytes_per_s": 50e9, "k": 3}
    _swept(answers, "best, both modes", both)
    return answers


def grids_of_steps() -> Answers:
    answers = Answers()
    tables = product.h100_tables()
    plans = [
        product.compile_plan("llama-3.1-8b", "h100", tables, tp=tp, engine=runtime)
        for tp, runtime in ((1, "kernels"), (2, "vllm"), (4, "trtllm"))
    ]
    batches, lengths = np.arange(1, 513), np.array([1, 100, 4096, 5000, 131_072])
    for kv_len, times_us in zip(
        lengths, product.decode_grid_us(plans, batches, lengths).swapaxes(0, 1), strict=True
    ):
        answers.many("decode_grid_us", f"kv {kv_len}", times_us)
    best = product.best_batches(plans, batches, lengths, tpot_ms=20.0)
    cells = [f"tp {plan.tp}, kv {kv_len}" for plan in plans for kv_len in lengths]
    for name, values in best._asdict().items():
        answers.numbers("best_batches", name, cells, values)
    return answers
