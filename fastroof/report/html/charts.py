"""What the page's charts need beside the rows: axes, limits, rooflines, and broken-down steps."""

from __future__ import annotations

from typing import Any

from fastroof.columns import ORIGINS
from fastroof.errors import FastroofError
from fastroof.report.front import ChosenRows
from fastroof.report.html.table import rounded
from fastroof.report.leading_steps import GROUPS, LeadingStep, StepSource
from fastroof.report.results_file import RateColumns, Results
from fastroof.units import MS_PER_S

__all__ = ["chart_facts", "gpu_roofs", "packed_steps"]


def chart_facts(results: Results) -> dict[str, Any]:
    """Say which columns the charts draw, and where limits are."""
    load = results.load()
    spec = results.metadata_json("fastroof.spec")
    workload = results.have(results.kind.workload)
    return {
        "x": RateColumns.USER,
        "y": RateColumns.GPU,
        "best": _wanted_most(results, spec),
        "is_complete": spec.get("keep") == "all",
        "load": load,
        "curves": results.have(results.kind.curves),
        "series": results.series(load),
        "settings": results.have(results.kind.settings),
        "workload": workload,
        "chosen": {name: rounded(value) for name, value in results.start_workload().items()},
        "limits": _limits(spec),
        "groups": GROUPS,
    }


def _wanted_most(results: Results, spec: dict[str, Any]) -> str:
    """Column of the sweep's objective."""
    objective = str(spec.get("objective", RateColumns.GPU))
    name = {"cost": "cost_per_million_tokens", "goodput": "tokens_per_s"}.get(objective, objective)
    return name if name in results else RateColumns.GPU


def _limits(spec: dict[str, Any]) -> dict[str, float]:
    """Limits of the sweep by the column that they are on."""
    given = spec.get("constraints") or spec
    limits = {
        name: value
        for name in ("ttft_ms", "tpot_ms", "request_latency_ms", "kv_share", "total_gpus")
        if isinstance(value := given.get(name), int | float) and value > 0
    }
    if "tpot_ms" in limits:
        limits[RateColumns.USER] = MS_PER_S / limits["tpot_ms"]
    return limits


def packed_steps(source: StepSource, chosen: ChosenRows, rows: dict[str, list[Any]]) -> dict[str, Any]:
    """Break down the steps of the leading rows."""
    place = {index: i for i, index in enumerate(chosen.indices.tolist())}
    steps_of_row = {}
    for index in chosen.leaders.tolist():
        row = place[index]
        steps = source.steps({name: values[row] for name, values in rows.items()})
        if steps:
            steps_of_row[str(row)] = [_packed(step) for step in steps]
    return steps_of_row


def _packed(step: LeadingStep) -> dict[str, Any]:
    return {
        "name": step.name,
        "what": step.what,
        "total_us": rounded(step.total_us),
        "groups": {name: rounded(us) for name, us in step.groups_us.items()},
        "operators": [
            [
                part.name,
                part.calls,
                *map(rounded, (part.total_us, part.flops, part.moved_bytes, part.mfu)),
                part.bound,
                ORIGINS[part.origin],
            ]
            for part in step.operators
        ],
    }


def gpu_roofs(source: StepSource, names: list[str]) -> dict[str, Any]:
    """Peaks and bandwidth of the GPUs, by the name that results call them; unknown ones are left out."""
    roofs = {}
    for name in names:
        try:
            gpu = source.gpu(name)
        except FastroofError:
            continue
        roofs[name] = {
            "title": gpu.title,
            "peaks": dict(gpu.peak_flops_per_s),
            "hbm_bytes_per_s": gpu.hbm_bytes_per_s,
        }
    return roofs
