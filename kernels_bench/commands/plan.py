"""``kernels-bench plan``: what a grid would measure, for how long and in how much memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fastroof.config.gpu import GpuSpec, load_gpu
from fastroof.units import GB
from kernels_bench.command_options import print_table
from kernels_bench.grid.estimate import (
    Estimate,
    estimate_all,
    first_call_seconds,
    fit_budget,
    run_seconds,
    unfit,
)
from kernels_bench.grid.grid import DEFAULT_GRID, Grid, grid_names, load_grid
from kernels_bench.protocol import Point


@dataclass(frozen=True)
class Plan:
    """A grid on a card: its points, what each takes, and which are left out."""

    grid: Grid
    gpu: GpuSpec
    points: list[Point]
    # By the point's key; ``seconds`` of the first point of a shape, by priority, include its first call.
    estimates: dict[str, Estimate]
    # Points the card cannot measure, and why.
    unfit: list[tuple[Point, str]]
    # The points it can measure, and of those what a budget leaves out.
    kept: list[Point]
    dropped: list[Point]

    def seconds(self, points: Sequence[Point]) -> float:
        """Seconds of measuring these points once."""
        return sum(self.estimates[point.key].seconds for point in points)

    def device_bytes(self, points: Sequence[Point]) -> int:
        """Device memory of the largest of these points."""
        return max((self.estimates[point.key].device_bytes for point in points), default=0)


def make_plan(grid: Grid, gpu: GpuSpec, budget_s: float | None = None) -> Plan:
    """Lay out a grid on a card."""
    points = grid.points()
    ordered = sorted(points, key=lambda point: point.priority)
    estimates = {
        point.key: one._replace(seconds=one.seconds + first_s)
        for point, one, first_s in zip(
            ordered, estimate_all(ordered, gpu), first_call_seconds(ordered), strict=True
        )
    }
    refused = unfit(points, gpu)
    refused_keys = {point.key for point, _ in refused}
    fitting = [point for point in points if point.key not in refused_keys]
    kept, dropped = (fitting, []) if budget_s is None else fit_budget(fitting, gpu, budget_s)
    return Plan(grid, gpu, points, estimates, refused, kept, dropped)


def plan(
    grid: Annotated[
        str, typer.Argument(help=f"A grid's TOML file, or one of {', '.join(grid_names())}.")
    ] = DEFAULT_GRID,
    gpu: Annotated[str, typer.Option(help="GPU to estimate for: a name or a gpu.toml.")] = "h100",
    budget: Annotated[
        float | None, typer.Option(help="Seconds to spend; shows which points are dropped.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    list_points: Annotated[bool, typer.Option("--points", help="List every point, one per line.")] = False,
) -> None:
    """Show what a grid would measure, before anything runs: points, seconds, memory, and what is dropped."""
    plan = make_plan(load_grid(grid), load_gpu(gpu), budget)
    if as_json:
        typer.echo(json.dumps(_document(plan, budget, list_points), indent=2))
        return
    _print_groups(plan, budget)
    _print_totals(plan, budget)
    if list_points:
        for line in _points(plan):
            typer.echo(
                f"{line['fate']}  {line['latency_us']:.1f} us  {line['seconds']:.4f} s  "
                f"{line['device_bytes'] / GB:.2f} GB  {line['key']}"
            )


def _document(plan: Plan, budget_s: float | None, list_points: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "grid": plan.grid.name,
        "title": plan.grid.title,
        "grid_sha256": plan.grid.sha256,
        "gpu": plan.gpu.name,
        "budget_s": budget_s,
        "groups": _groups(plan),
        "total": {
            "points": len(plan.kept),
            "seconds": run_seconds(plan.kept, plan.gpu),
            "first_call_seconds": sum(first_call_seconds(plan.kept)),
            "device_bytes": plan.device_bytes(plan.kept),
            "dropped": len(plan.dropped),
            "unfit": len(plan.unfit),
        },
        "unfit": [{"key": point.key, "group": point.group, "reason": reason} for point, reason in plan.unfit],
    }
    return {**document, "points": _points(plan)} if list_points else document


def _groups(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    refused = [point for point, _ in plan.unfit]
    for group in plan.grid.groups:
        own = _of_group(plan.points, group.name)
        kept = _of_group(plan.kept, group.name)
        rows.append(
            {
                "group": group.name,
                "operator": group.operator,
                "priority": group.priority,
                "points": len(own),
                "seconds": plan.seconds(own),
                "device_bytes": plan.device_bytes(own),
                "kept": len(kept),
                "kept_seconds": plan.seconds(kept),
                "dropped": len(_of_group(plan.dropped, group.name)),
                "unfit": len(_of_group(refused, group.name)),
                "in_earlier_groups": len({p.key for p in group.candidates}) - len(own),
                "beyond_limits": group.num_beyond_limits,
            }
        )
    return rows


def _of_group(points: Sequence[Point], name: str) -> list[Point]:
    return [point for point in points if point.group == name]


def _points(plan: Plan) -> list[dict[str, Any]]:
    fates = {point.key: "unfit" for point, _ in plan.unfit}
    fates |= {point.key: "drop" for point in plan.dropped}
    return [
        {
            "key": point.key,
            "operator": point.operator,
            "values": dict(point.values),
            "group": point.group,
            "priority": point.priority,
            "fate": fates.get(point.key, "keep"),
            **plan.estimates[point.key]._asdict(),
        }
        for point in plan.points
    ]


def _print_groups(plan: Plan, budget_s: float | None) -> None:
    heads = ["group", "priority", "points", "est. s", "largest GB"]
    rows = [
        [
            row["group"], str(row["priority"]), f"{row['points']:,}", f"{row['seconds']:.1f}",
            f"{row['device_bytes'] / GB:.2f}", f"{row['dropped']:,}",
        ]
        for row in _groups(plan)
    ]  # fmt: skip
    if budget_s is not None:
        heads.append("dropped")
    print_table(heads, [row[: len(heads)] for row in rows])


def _print_totals(plan: Plan, budget_s: float | None) -> None:
    total_s = run_seconds(plan.kept, plan.gpu)
    typer.echo(
        f"\ngrid {plan.grid.name} ({plan.grid.title}) on {plan.gpu.title}: {len(plan.kept):,} points, "
        f"about {total_s:.0f} s with the sentinels' repeats, "
        f"at most {plan.device_bytes(plan.kept) / GB:.1f} GB of device memory"
    )
    if first_s := sum(first_call_seconds(plan.kept)):
        typer.echo(f"of these, {first_s:.0f} s are a guess of what compiling and importing kernels takes")
    typer.echo("start-up, reference checks and points measured again come on top")
    if budget_s is not None:
        typer.echo(f"the budget of {budget_s:g} s drops {_dropped_words(plan)}")
    if plan.unfit:
        typer.echo(f"{len(plan.unfit):,} points cannot be measured on this card and are left out:")
        for group in plan.grid.groups:
            refused = [(point, reason) for point, reason in plan.unfit if point.group == group.name]
            if refused:
                point, reason = refused[0]
                typer.echo(f"  {len(refused):,} in {group.name}, the first {point.key}: {reason}")


def _dropped_words(plan: Plan) -> str:
    if not plan.dropped:
        return "nothing"
    parts = []
    for row in _groups(plan):
        if row["dropped"]:
            share = f"{row['dropped']:,} of" if row["kept"] else "all"
            parts.append(f"{share} {row['dropped'] + row['kept']:,} in {row['group']}")
    return f"{len(plan.dropped):,} points: {'; '.join(parts)}"
