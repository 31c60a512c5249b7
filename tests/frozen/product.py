"""Everything of the product that frozen answers are asked of: the one place that a renamed name touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

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
    model_names,
    run_sweep,
)
from fastroof.backends.c.plan_file import plan_bytes
from fastroof.backends.dynamo import write_dynamo_profile
from fastroof.backends.llm_d import fit_llm_d, llm_d_yaml
from fastroof.backends.llmservingsim import export_llmservingsim
from fastroof.backends.llmservingsim_v0 import export_llmservingsim_v0
from fastroof.results import step_table
from fastroof.serving import (
    estimate,
    estimate_disaggregated,
    largest_batch,
    largest_context,
    least_gpus,
    match_workers,
)
from fastroof.serving.evidence.validation import run_validation
from fastroof.sweep import best_batches
from fastroof.sweep import decode_times_us as decode_grid_us
from kernels_bench.grid.grid import grid_names, load_grid

__all__ = [
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
    "export_llmservingsim_v0",
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
    "model_names",
    "plan_bytes",
    "run_sweep",
    "run_validation",
    "step_table",
    "write_dynamo_profile",
]


@cache
def h100_tables() -> Tables:
    """The tables that ship, loaded once."""
    return load_tables("h100")


def compile_together(requests: Sequence[Mapping[str, Any]], gpu: str, tables: Tables) -> list[StepPlan]:
    """Plans compiled by one call."""
    return list(compile_plans(requests, gpu, tables))
