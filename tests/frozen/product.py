"""All of the product that frozen answers use: the one place that a renamed name touches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import fastroof
from benchmarks.accuracy.validation import run_validation
from fastroof import (
    FastroofError,
    StepBatch,
    StepPlan,
    Tables,
    capacity,
    compile_plans,
    fit,
    load_gpu,
    load_model,
    load_tables,
    load_trace,
    simulate,
)
from fastroof.backends.c.plan_file import plan_bytes
from fastroof.backends.dynamo import write_dynamo_profile
from fastroof.backends.llm_d import fit_llm_d, llm_d_yaml
from fastroof.backends.llmservingsim import export_llmservingsim
from fastroof.backends.serve.answers import ServedPlans, answer_line
from fastroof.run.batch import step_table
from fastroof.serving import (
    estimate,
    estimate_disaggregated,
)
from fastroof.simulation import Autoscaler, Fleet, Link, Pool, Trace, Workload
from fastroof.sweep import best_batches, recommend, recommend_for_spec, recommend_shared
from fastroof.sweep import decode_times_us as decode_grid_us
from kernels_bench.grid.grid import grid_names, load_grid

__all__ = [
    "PRESETS",
    "Autoscaler",
    "FastroofError",
    "Link",
    "StepBatch",
    "StepPlan",
    "Tables",
    "Trace",
    "Workload",
    "answered",
    "best_batches",
    "capacity",
    "compile_plan",
    "compile_together",
    "decode_grid_us",
    "estimate",
    "estimate_disaggregated",
    "export_llmservingsim",
    "fit",
    "fit_llm_d",
    "grid_names",
    "h100_tables",
    "llm_d_yaml",
    "load_gpu",
    "load_grid",
    "load_model",
    "load_tables",
    "load_trace",
    "memory_fields",
    "plan_bytes",
    "recommend",
    "recommend_for_spec",
    "recommend_shared",
    "run_sweep",
    "run_validation",
    "simulate",
    "simulate_pools",
    "step_table",
    "tables_of",
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
def tables_of(gpu: str) -> Tables:
    """A GPU's tables that ship, loaded once."""
    return load_tables(gpu)


def h100_tables() -> Tables:
    """The tables that most of the record is of."""
    return tables_of("h100")


_SWEPT = {"max_num_batched_tokens": "max_num_batched_tokens", "max_num_seqs": "max_num_seqs"}
"""Keys of specifications in the record, and their names now."""


def _renamed(options: Mapping[str, Any], names: Mapping[str, str] = {}) -> dict[str, Any]:
    """Options with today's names, and the engine of the record: ``trtllm`` was what is ``trtllm-1.0`` now."""
    given = {{"runtime": "engine", **names}.get(name, name): value for name, value in options.items()}
    if given.get("engine") == "trtllm":
        given["engine"] = "trtllm-1.0"
    elif isinstance(given.get("engine"), list):
        given["engine"] = ["trtllm-1.0" if one == "trtllm" else one for one in given["engine"]]
    return given


def simulate_pools(plans: Sequence[StepPlan], trace: Trace, link: Link, given: Mapping[str, Any]) -> Any:
    """A simulation of a pool that prefills and one that decodes, whose options the record has together."""
    pools = []
    for plan, name in zip(plans, ("prefill", "decode"), strict=True):
        own = {word: given[key] for word in ("replicas", "router") if (key := f"{name}_{word}") in given}
        own |= {"timeout_s": given.get("timeout_s"), **given.get(name, {})}
        if name == "prefill" and "prefix_cache" in given:
            own["prefix_cache"] = given["prefix_cache"]
        pools.append(Pool(plan, **own))
    run = {name: given[name] for name in ("on_too_long", "time_scale") if name in given}
    return simulate(Fleet(pools, link=link), trace, **run)


def compile_plan(*given: Any, **options: Any) -> StepPlan:
    return fastroof.compile_plan(*given, **_renamed(options))


def memory_fields(plan: StepPlan) -> dict[str, Any]:
    """A plan's memory by the names of the record: ``blocks`` were what are ``parts`` now."""
    fields = plan.memory._asdict()
    del fields["parts_per_block"]
    named = {"parts": "blocks", "part_bytes": "block_bytes"}
    return {named.get(name, name.replace("_parts", "_blocks")): value for name, value in fields.items()}


def run_sweep(spec: Any, *given: Any, **options: Any) -> Any:
    return fastroof.run_sweep(
        _renamed(spec, _SWEPT) if isinstance(spec, Mapping) else spec, *given, **options
    )


def compile_together(requests: Sequence[Mapping[str, Any]], gpu: str, tables: Tables) -> list[StepPlan]:
    return list(compile_plans([{"engine": "kernels", **_renamed(one)} for one in requests], gpu, tables))


def answered(plans: Mapping[str, StepPlan], messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replies of the server to messages, as their JSON reads; HTTP and pipes have them in common."""
    served = ServedPlans(plans)
    return [json.loads(answer_line(served, json.dumps(message).encode())) for message in messages]
