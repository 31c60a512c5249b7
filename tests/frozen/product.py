"""Everything of the product that frozen answers are asked of: the one place that a renamed name touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from benchmarks.accuracy.validation import run_validation
from fastroof import (
    FastroofError,
    StepBatch,
    StepPlan,
    Tables,
    compile_plan,
    compile_plans,
    load_gpu,
    load_model,
    load_tables,
    run_sweep,
)
from fastroof.backends.c.plan_file import plan_bytes
from fastroof.backends.dynamo import write_dynamo_profile
from fastroof.backends.llm_d import fit_llm_d, llm_d_yaml
from fastroof.backends.llmservingsim import export_llmservingsim
from fastroof.run.batch import step_table
from fastroof.serving import (
    estimate,
    estimate_disaggregated,
    largest_batch,
    largest_context,
    least_gpus,
    match_workers,
)
from fastroof.sweep import best_batches
from fastroof.sweep import decode_times_us as decode_grid_us
from kernels_bench.grid.grid import grid_names, load_grid

__all__ = [
    "PRESETS",
    "FastroofError",
    "StepBatch",
    "StepPlan",
    "Tables",
    "best_batches",
    "compile_plan",
    "compile_together",
    "decode_grid_us",
    "estimate",
    "estimate_disaggregated",
    "export_llmservingsim",
    "fit_llm_d",
    "grid_names",
    "h100_tables",
    "largest_batch",
    "largest_context",
    "least_gpus",
    "llm_d_yaml",
    "load_gpu",
    "load_grid",
    "load_model",
    "load_tables",
    "match_workers",
    "plan_bytes",
    "run_sweep",
    "run_validation",
    "step_table",
    "write_dynamo_profile",
]

PRESETS = (
    "codellama-34b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-2-7b",
    "llama-3.1-70b",
    "llama-3.1-8b",
    "mistral-7b",
    "mistral-nemo",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "qwen2.5-7b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-8b",
    "yi-34b",
)
"""Models whose plans are on record."""


@cache
def h100_tables() -> Tables:
    """The tables that ship, loaded once."""
    return load_tables("h100")


def compile_together(requests: Sequence[Mapping[str, Any]], gpu: str, tables: Tables) -> list[StepPlan]:
    """Plans compiled by one call."""
    return list(compile_plans([{"runtime": "kernels", **one} for one in requests], gpu, tables))
