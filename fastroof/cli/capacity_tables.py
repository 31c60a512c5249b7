"""Tables of capacities for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fastroof.cli.output import console, counted, duration, percent, print_table

if TYPE_CHECKING:
    from fastroof import StepPlan
    from fastroof.simulation.capacity import Capacity
    from fastroof.simulation.capacity_search import Limits
    from fastroof.simulation.fewest_replicas import FewestReplicas, HourlyReplicas
    from fastroof.sweep import CapacitySummary

MOST_GROUPS: Final = 40
"""Groups whose best deployment is printed; all are in the file."""

_NAMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def limit_words(name: str) -> str:
    """Write a limit's name: ``p99 TTFT`` for ``ttft_p99_ms``."""
    what, _, rest = name.partition("_p")
    if what not in _NAMES or not rest.endswith("_ms"):
        return name
    return f"p{rest.removesuffix('_ms').replace('_', '.')} {_NAMES[what]}"


def range_words(row: Mapping[str, Any]) -> str:
    """Format how an error of the steps changes a rate."""
    if row["relative_error"] is None:
        return "unknown"
    return f"{row['low']:,.4g} to {row['high']:,.4g}"


def print_capacities(summary: CapacitySummary) -> None:
    """Print the best deployment of each group, and the counts."""
    from fastroof.sweep.capacities.kind import LOST

    out = console()
    best = summary.best[:MOST_GROUPS]
    if best:
        out.print("Most requests per second and GPU within the limits:\n", soft_wrap=True)
        _print_rows(best)
        if len(summary.best) > len(best):
            out.print(f"and {len(summary.best) - len(best):,} more groups", soft_wrap=True)
    else:
        out.print("No deployment keeps the limits at any rate.", soft_wrap=True)
    out.print()
    for reason, reasons in summary.skipped.items():
        out.print(f"left out, {LOST[reason]}: {'; '.join(reasons)}", soft_wrap=True)
    out.print(
        f"capacities of {summary.candidates:,} deployments in {duration(summary.total_s)}: "
        f"{summary.feasible:,} keep the limits",
        soft_wrap=True,
    )
    for reason, count in sorted(summary.infeasible.items(), key=lambda pair: -pair[1]):
        out.print(f"  {count:>9,} do not: {LOST[reason]}", soft_wrap=True)
    out.print(f"{summary.rows:,} rows in {summary.output}", soft_wrap=True)


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    from fastroof.models.layout import split_words

    columns = (
        "model", "GPUs", "layout", "dtype", "engine", "tokens a step", "max requests",
        "requests/s a GPU", "requests/s", "one error", "limited by",
    )  # fmt: skip
    cells = [
        (
            row["model"],
            f"{row['total_gpus']} x {row['gpu']}",
            f"{row['replicas']} x {split_words(row)}",
            row["dtype"],
            row["engine"],
            f"{row['max_num_batched_tokens']:,}",
            f"{row['max_num_seqs']:,}",
            f"{row['requests_per_s_per_gpu']:,.4g}",
            f"{row['requests_per_s']:,.4g}",
            range_words(row),
            limit_words(row["limit"]),
        )
        for row in rows
    ]
    print_table(columns, cells, left=("model", "GPUs", "layout", "dtype", "engine", "limited by"))
    sampled = [row["sampling_error"] for row in rows if row["sampling_error"] is not None]
    if sampled:
        console().print(f"\nby chance up to ±{percent(max(sampled))}, one standard error", soft_wrap=True)


def print_capacity(plan: StepPlan, most: Capacity) -> None:
    """Print the capacity of one deployment and its other rates."""
    out = console()
    gpus = f"{most.replicas} x {plan.layout} on {most.gpus} x {plan.gpu.name}"
    out.print(
        f"{plan.model.name}, {gpus}, {plan.dtype} weights, engine {plan.profile.title}: {_most_words(most)}",
        soft_wrap=True,
    )
    if most.relative_error is not None:
        out.print(
            f"  {range_words(vars(most))} with steps one standard error off, {percent(most.relative_error)} "
            f"({most.basis})",
            soft_wrap=True,
        )
    else:
        out.print(f"  steps' error is {most.basis}", soft_wrap=True)
    if most.sampling_error is not None:
        out.print(f"  by chance ±{percent(most.sampling_error)}, one standard error", soft_wrap=True)
    out.print()
    rates = sorted(most.seen)
    at = rates.index(most.requests_per_s) if most.requests_per_s in most.seen else 0
    shown = sorted({*rates[max(at - 2, 0) : at + 3], rates[-1]})
    each = most.requests_per_session
    rows = [
        [
            *([] if each is None else ["all at once" if rate == math.inf else f"{rate / each:,.4g}"]),
            "all at once" if rate == math.inf else f"{rate:,.4g}",
            "yes" if most.limits.holds(most.seen[rate]) else "no",
            f"{most.seen[rate].served_per_s:,.4g}",
            *(f"{value:,.4g}" for value in most.seen[rate].values_ms),
            *([percent(most.seen[rate].goodput)] if most.limits.of_request else []),
        ]
        for rate in shown
    ]
    goodput = ["within limits"] if most.limits.of_request else []
    of_sessions = [] if each is None else ["sessions/s"]
    print_table(
        [*of_sessions, "requests/s", "kept", "served/s", *_limit_columns(most.limits), *goodput], rows
    )
    counted = "" if most.counted == most.requests else f"; {most.counted:,} count, without ramp and drain"
    out.print(
        f"\n{most.simulations} simulations of up to {most.requests:,} requests{counted}", soft_wrap=True
    )


def _most_words(most: Capacity) -> str:
    """Return the answer in a sentence."""
    limit = limit_words(most.limit)
    if most.requests_per_s == 0.0:
        return f"no rate keeps {limit}"
    rate = f"{most.requests_per_s:,.4g} requests/s ({most.requests_per_s_per_gpu:,.4g} a GPU)"
    what = "requests"
    if most.sessions_per_s is not None:
        what = "sessions"
        rate = f"{most.sessions_per_s:,.4g} sessions/s, {most.open_sessions:,.4g} open at once, {rate}"
    if most.limit == "none":
        return f"{rate}, its maximum throughput: even all {what} at once keep the limits"
    if most.limit == "throughput":
        return f"{rate}; beyond, requests arrive faster than they are served"
    return f"{rate}; beyond, {limit} breaks first"


def print_fewest(plan: StepPlan, few: FewestReplicas) -> None:
    """Print the fewest replicas that keep the limits."""
    out = console()
    name = f"{plan.model.name}, {plan.layout} on {plan.gpu.name}, engine {plan.profile.title}"
    rate = "all at once" if math.isinf(few.requests_per_s) else f"{few.requests_per_s:,.4g} requests/s"
    if few.sessions_per_s is not None and math.isfinite(few.sessions_per_s):
        rate = f"{few.sessions_per_s:,.4g} sessions/s, {rate}"
    name = f"{name}, {rate}"
    limit = limit_words(few.limit)
    if not few.replicas:
        out.print(f"{name}: {max(few.seen)} replicas do not keep {limit}", soft_wrap=True)
    elif few.limit == "none":
        out.print(f"{name}: 1 replica is enough, {counted(few.gpus, 'GPU')}", soft_wrap=True)
    else:
        out.print(
            f"{name}: {few.replicas} replicas, {few.gpus} GPUs; one fewer breaks {limit}", soft_wrap=True
        )
    out.print()
    rows = [
        [
            f"{count:,}",
            "yes" if few.limits.holds(seen) else "no",
            *(f"{value:,.4g}" for value in seen.values_ms),
        ]
        for count, seen in few.seen.items()
    ]
    print_table(["replicas", "kept", *_limit_columns(few.limits)], rows)


def print_hours(plan: StepPlan, hourly: HourlyReplicas) -> None:
    """Print the fewest replicas of each hour."""
    out = console()
    name = f"{plan.model.name}, {plan.layout} on {plan.gpu.name}, engine {plan.profile.title}"
    if hourly.peak:
        words = f"up to {counted(hourly.peak, 'replica')}, {hourly.gpu_hours:,.4g} GPU hours"
        words += f" ({hourly.gpu_hours_at_peak:,.4g} with {hourly.peak} at all hours)"
    else:
        words = "some hours need more replicas than were tried"
    out.print(f"{name}: {words}", soft_wrap=True)
    out.print()
    limits = next(each.limits for each in hourly.hours if each is not None)
    rows = []
    for hour, (each, rate) in enumerate(zip(hourly.hours, hourly.rates_per_s, strict=True)):
        if each is None:
            rows.append([f"{hour}", "0", "0", *("-" for _ in limits.percentiles)])
            continue
        values = [f"{value:,.4g}" for value in each.at_replicas.values()] or ["-"] * len(limits.percentiles)
        count = f"{each.replicas:,}" if each.replicas else f"over {max(each.seen):,}"
        rows.append([f"{hour}", f"{rate:,.4g}", count, *values])
    print_table(["hour", "requests/s", "replicas", *_limit_columns(limits)], rows)


def _limit_columns(limits: Limits) -> list[str]:
    return [f"{limit_words(limit.name)} ms" for limit in limits.percentiles]
