"""Answers by a percentile, from the closed form's ranks and simulations; families compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastroof.sweep.answers import Answer, Choice, Comparison, Margin, Nearest, margins_of
from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.deployments.columns import MINIMIZED
from fastroof.sweep.percentile_capacity import (
    DRAFTS_BY_MEANS,
    LIMITED,
    PercentileCapacity,
    limit_name,
    percentile_limits,
    weights,
    why_not_simulated,
)
from fastroof.sweep.percentile_search import FAMILIES, Found, PercentileSearch, family, family_of


def why_mean_of(spec: DeploymentSpec, percentile: float) -> str:
    """Return why a question cannot be answered by a percentile; empty if it can."""
    if not percentile_limits(spec, percentile):
        return "no time has a limit"
    if spec.objective == "tokens_per_s_per_user":
        return "the objective does not depend on how many requests are served"
    if spec.objective == "energy":
        return "energy is that of mean steps"
    if "clients" in spec.per:
        return "the number of clients is given"
    if spec.speculation is not None:
        return DRAFTS_BY_MEANS
    return ""


def by_percentile(answer: Answer, search: PercentileSearch, objective: str, least: int) -> Answer:
    """Answer by simulation what the closed form has ranked by means."""
    reasons = {why_not_simulated(choice.row) for choice in answer.choices}
    if answer.choices and "" not in reasons:
        return answer._replace(why_mean=", ".join(sorted(reasons)))
    found = search.found([choice.row for choice in answer.choices], least)
    limits_on = f"p{search.percentile:g}"
    nearest = answer.nearest
    if found.nearest is not None:
        row, measured = found.nearest
        names = {limit_name(name, search.percentile): name for name in LIMITED}
        values = {names[name]: value for name, value in measured.items()}
        shares = {names[name]: value / search.limits[name] for name, value in measured.items()}
        exceeds = dict(sorted(shares.items(), key=lambda item: -item[1]))
        nearest = Nearest(row, exceeds, values, limits_on)
    choices = _simulated_choices(search, objective, found)
    if not any(choice.percentile and not choice.percentile.why_not for choice in choices):
        choices = ()
    return answer._replace(
        choices=choices, nearest=None if choices else nearest, limits_on=limits_on, simulated=found.simulated
    )


def _simulated_choices(search: PercentileSearch, objective: str, found: Found) -> tuple[Choice, ...]:
    """Return the simulated deployments with the reasons for their rank."""
    spec = search.spec
    rows = [row for row, _ in found.ranked]
    capacities = [most for _, most in found.ranked]
    divided_by = weights(spec, rows)
    served = [most.requests_per_s / by for most, by in zip(capacities, divided_by, strict=True)]
    if spec.rate is not None:
        served = [row["requests_per_s"] / by for row, by in zip(rows, divided_by, strict=True)]
    choices = []
    for place, (row, most) in enumerate(found.ranked):
        ratio = served[place] / served[0] if served[0] > 0.0 else math.nan
        error, its = most.relative_error, capacities[0].relative_error
        is_close = ratio > 0.0 and error is not None and its is not None
        is_tie = is_close and place > 0 and abs(math.log(ratio)) < math.hypot(error or 0.0, its or 0.0)
        left = margins_of(spec, row) if most.why_not else _percentile_margins(search, row, most)
        choice = Choice(
            row, row[objective], row["relative_error"], abs(1.0 - ratio) if place else 0.0, is_tie, left,
            at_edge=False, percentile=most,
        )  # fmt: skip
        choices.append(choice)
    return tuple(choices)


def _percentile_margins(
    search: PercentileSearch, row: Mapping[str, Any], most: PercentileCapacity
) -> tuple[Margin, ...]:
    """Return how far the percentiles are from their limits, and the row from the others."""
    values = {"kv_share": row["kv_share"], "total_gpus": row["total_gpus"]}
    for name in LIMITED:
        value = most.values_ms.get(limit_name(name, search.percentile), math.nan)
        values[name] = None if math.isnan(value) else value
    return margins_of(search.spec, values)


def compared_of(spec: DeploymentSpec, objective: str, choices: Sequence[Choice]) -> tuple[Comparison, ...]:
    """Compare the best deployment of each family with the best aggregated one within nodes."""
    tried = {
        family(spec, gpu, mode, tp, *split[:3])
        for gpu, mode, (tp, split) in itertools.product(spec.gpu_names, spec.mode, spec.splits)
    }
    if len(tried) < 2:
        return ()
    best: dict[str, Choice] = {}
    for choice in choices:
        if choice.percentile is None or not choice.percentile.why_not:
            best.setdefault(family_of(spec, choice.row), choice)
    base = best.get(FAMILIES[0])
    compared = []
    for name in FAMILIES:
        if name not in tried:
            continue
        first, gain = best.get(name), None
        if first is not None and base is not None:
            ratio = first.row[objective] / base.row[objective]
            gain = (1.0 / ratio if spec.objective in MINIMIZED else ratio) - 1.0
        compared.append(Comparison(name, first, gain))
    return tuple(compared)
