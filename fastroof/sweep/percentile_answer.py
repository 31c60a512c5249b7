"""Answers by a percentile, from the closed form's ranks and simulations; families compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fastroof.sweep.answers import Answer, Choice, Comparison, Margin, margins_of, nearest_of, ranked_choices
from fastroof.sweep.deployments import DeploymentSpec
from fastroof.sweep.deployments.columns import MINIMIZED
from fastroof.sweep.percentile_capacity import LIMITED, limit_name, percentile_limits
from fastroof.sweep.percentile_search import FAMILIES, PercentileSearch, family_of
from fastroof.sweep.replay import Replay


def why_mean_of(spec: DeploymentSpec, percentile: float, replay: Replay | None = None) -> str:
    """Return why a question cannot be answered by a percentile; empty if it can."""
    if not percentile_limits(spec, percentile):
        return "no time has a limit"
    if spec.objective == "tokens_per_s_per_user":
        return "the objective does not depend on how many requests are served"
    if spec.objective == "energy":
        return "energy is that of mean steps"
    if "clients" in spec.per:
        return "the number of clients is given"
    if spec.speculation is not None and replay is None:
        return "draft tokens are counted as means; `fastroof capacity` simulates them"
    return ""


def by_percentile(answer: Answer, search: PercentileSearch, objective: str, least: int) -> Answer:
    """Answer by simulation what the closed form has ranked by means."""
    found = search.found([choice.row for choice in answer.choices], least)
    limits_on = f"p{search.percentile:g}"
    nearest = answer.nearest
    if found.nearest is not None:
        row, measured = found.nearest
        values = {name: measured.get(limit_name(name, search.percentile)) for name in LIMITED}
        nearest = nearest_of(search.spec, row, values, limits_on)
    choices = tuple(
        choice._replace(margins=_margins(search, choice))
        for choice in ranked_choices(search.spec, objective, found.served)
    )
    if not any(choice.percentile and not choice.percentile.why_not for choice in choices):
        choices = ()
    return answer._replace(
        choices=choices, nearest=None if choices else nearest, limits_on=limits_on, simulated=found.simulated
    )


def _margins(search: PercentileSearch, choice: Choice) -> tuple[Margin, ...]:
    """Return how far the percentiles are from their limits, and the row from the others."""
    row, most = choice.row, choice.percentile
    if most is None or most.why_not:
        return margins_of(search.spec, row)
    values = {"kv_share": row["kv_share"], "total_gpus": row["total_gpus"]}
    for name in LIMITED:
        value = most.values_ms.get(limit_name(name, search.percentile), math.nan)
        values[name] = None if math.isnan(value) else value
    return margins_of(search.spec, values)


def compared_of(spec: DeploymentSpec, objective: str, choices: Sequence[Choice]) -> tuple[Comparison, ...]:
    """Compare the best deployment of each family with the best aggregated one within nodes."""
    tried = {
        family_of(spec, {"gpu": gpu, "mode": mode, "tp": tp, **split._asdict()})
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
