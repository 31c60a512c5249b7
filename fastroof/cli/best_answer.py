"""The answer of ``fastroof best``: what to run and how, why, the runners-up, or the nearest deployment."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

from fastroof.cli.named_plans import drafts_words
from fastroof.cli.output import (
    console,
    counted,
    limit_words,
    percent,
    print_line,
    print_table,
)

if TYPE_CHECKING:
    from pathlib import Path

    from fastroof.engines.launch import Command
    from fastroof.sweep import Deployment
    from fastroof.sweep.answers import Answer, Choice, Margin
    from fastroof.sweep.replay import Replay

_NAMES: Final = {
    "ttft_ms": ("TTFT", "ms"),
    "tpot_ms": ("TPOT", "ms"),
    "itl_ms": ("ITL", "ms"),
    "request_latency_ms": ("request latency", "ms"),
    "kv_share": ("share of the KV cache", ""),
    "total_gpus": ("GPUs", ""),
}
_OBJECTIVES: Final = {
    "tokens_per_s_per_gpu": "tokens/s a GPU",
    "tokens_per_s_per_user": "tokens/s a user",
    "tokens_per_s": "tokens/s",
    "cost_per_million_tokens": "cost of 1M tokens",
    "joules_per_token": "J per output token",
}
_ROLES: Final = {
    "server": "it",
    "prefill": "a worker that prefills",
    "decode": "a worker that decodes",
    "router": "the router in front of them",
}


def say_default_limits(limits: Mapping[str, float], model: str = "") -> None:
    """Say which limits a question did not give, as the first line of its answer."""
    from fastroof.sweep.recommendations.candidates import default_limits_words

    if limits:
        names = ", ".join(f"--{name.removesuffix('_ms')}" for name in limits)
        print_line(f"{model}limits by default: {default_limits_words(limits)}; change with {names}")


def print_answer(
    answer: Answer,
    objective: str,
    would_fit: dict[str, Any] | None,
    engines: Mapping[str, str],
    replay: Replay | None = None,
) -> None:
    """Print what to run for one model and load; ``engines`` are their titles by name."""
    from fastroof.models.layout import copies_words

    say_default_limits(answer.default_limits)
    group = dict(answer.group)
    loads = ", ".join(f"{name} {value:,g}" for name, value in group.items() if name != "model")
    title = f"{group['model']}{' at ' if loads else ''}{loads}"
    if not answer.choices:
        _print_none(answer, title, would_fit, engines)
        return
    first = answer.choices[0]
    row = first.row
    print_line(
        f"{title}: run {copies_words(row)} on {row['total_gpus']} x {row['gpu']}, {row['dtype']} weights, "
        f"{row['kv_dtype']} KV cache, engine {engines[row['engine']]}, steps of up to "
        f"{row['max_num_batched_tokens']:,} tokens and {row['max_num_seqs']:,} requests{drafts_words(row)}"
    )
    for line in _why(answer, objective, replay):
        print_line(line, 2)
    print_line()
    limits = sorted(margin.name for margin in first.margins)
    same = {
        name: len({choice.row[column] for choice in answer.choices}) == 1 for name, column in _FACTS.items()
    }
    columns = ["layout", *_FACTS, "clients", _OBJECTIVES[objective], "behind"]
    of = "" if answer.limits_on == "mean" else f"{answer.limits_on} "
    columns += [of * (name in TIMES) + " ".join(_NAMES[name]).strip() for name in limits]
    columns += ["KV cache", "bound by"]
    left = ["layout", *_FACTS, "bound by"]
    rows = [_cells(choice, limits) for choice in answer.choices]
    if answer.limits_on != "mean":
        columns += ["requests/s", "one error", "limited by", "by mean"]
        left.append("limited by")
        rows = [cells + _percentile_cells(choice) for cells, choice in zip(rows, answer.choices, strict=True)]
    # what all have, the first sentence says
    kept = [place for place, name in enumerate(columns) if not same.get(name, False)]
    print_table(
        [columns[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        left=left,
        least=("by mean", "limited by", "bound by"),
    )
    for choice in answer.choices:
        if choice.percentile is not None and choice.percentile.why_not:
            print_line(f"{copies_words(choice.row)} not simulated: {choice.percentile.why_not}")
    for line in _family_words(answer):
        print_line(line)
    print_line()


_FAMILIES: Final = {
    "aggregated": "within nodes",
    "experts_across_nodes": "expert parallelism across nodes",
    "stages_across_nodes": "pipeline stages across nodes",
    "disaggregated": "separate workers for prefill and decode",
}


def _family_words(answer: Answer) -> list[str]:
    """Say how far the best of each way to deploy is from the best aggregated one within nodes."""
    from fastroof.models.layout import copies_words

    lines = []
    for one in answer.families:
        if one.family == "aggregated":
            continue
        name = _FAMILIES[one.family]
        if one.choice is None:
            lost = "not simulated" if one.family == "stages_across_nodes" and not answer.why_mean else ""
            lines.append(f"{name}: {lost or 'not within the limits'}")
        elif one.gain is None:
            lines.append(f"{name}: {copies_words(one.choice.row)}; nothing within nodes keeps the limits")
        else:
            more = "more" if one.gain >= 0.0 else "less"
            base = next(each.choice for each in answer.families if each.family == "aggregated")
            against = f" than {copies_words(base.row)}" if base is not None else ""
            lines.append(f"{name}: {copies_words(one.choice.row)}, {percent(abs(one.gain))} {more}{against}")
    return lines


TIMES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "request_latency_ms")
"""Limits that apply to a percentile or a mean."""


def _limits_words(answer: Answer, replay: Replay | None) -> list[str]:
    """Say what the limits are on, and why."""
    if replay is not None:
        requests = f"all {len(replay.trace):,} requests of {replay.trace.name}"
        return [f"limits are on {answer.limits_on} of {requests}, replayed once, at {replay.load_words}"]
    if answer.limits_on != "mean":
        return [f"limits are on {answer.limits_on}, by simulation of requests that arrive at random"]
    if answer.why_mean == "no time has a limit":
        return []
    if answer.why_mean:
        return [f"limits are on means of a steady state: {answer.why_mean}"]
    return ["limits are on means of a steady state: percentiles of requests that arrive at random are longer"]


_FACTS: Final = {"GPU": "gpu", "dtype": "dtype", "KV": "kv_dtype", "engine": "engine"}
"""Columns that the first sentence names for the best deployment."""


def _print_none(
    answer: Answer, title: str, would_fit: dict[str, Any] | None, engines: Mapping[str, str]
) -> None:
    from fastroof.models.layout import copies_words

    lost = sorted(answer.infeasible.items(), key=lambda item: -item[1])
    print_line(f"{title}: no deployment is within the limits")
    print_line(_lost_words(lost, answer.candidates), 2)
    if answer.nearest is not None:
        row, limits_on = answer.nearest.row, answer.nearest.limits_on
        clients = f"{row['clients']:,.0f} clients" if round(row["clients"]) != 1 else "one client"
        if limits_on != "mean":
            rate = row["request_rate_per_s"]
            clients = "hardly any load" if rate is None else f"{rate:,.4g} requests/s"
        settings = [
            f"{'' if limits_on == 'mean' else f'{limits_on} '}{_NAMES[name][0]} "
            f"{answer.nearest.values[name]:,.4g}{f' {unit}' if (unit := _NAMES[name][1]) else ''} "
            f"({'within' if times <= 1.0 else f'{times:.3g} times'} the limit)"
            for name, times in answer.nearest.exceeds.items()
        ]
        print_line(
            f"nearest: {copies_words(row)} on {row['total_gpus']} x {row['gpu']}, {row['dtype']} weights, "
            f"engine {engines[row['engine']]}, with {clients}: {', '.join(settings)}",
            2,
        )
    if would_fit is not None:
        print_line(
            f"{would_fit['total_gpus']} x {would_fit['gpu']} would hold it, as {copies_words(would_fit)}: "
            f"{would_fit['weight_bytes'] / 1e9:,.3g} GB of weights on a GPU",
            2,
        )
    print_line()


def _percentile_cells(choice: Choice) -> list[str]:
    """Return the simulated capacity of a choice at the percentile, and its rank by the closed form."""
    most = choice.percentile
    if most is None or most.why_not:
        return ["-", "-", "not simulated", "" if most is None else f"{most.place}."]
    rates = f"{most.requests_per_s:,.4g}", f"{most.low:,.4g} to {most.high:,.4g}"
    return [*rates, limit_words(most.limit), f"{most.place}."]


def _lost_words(lost: Sequence[tuple[str, int]], candidates: int) -> str:
    from fastroof.sweep.deployments.kind import INFEASIBLE

    of = "; ".join(f"{INFEASIBLE.get(reason, reason)} ({count:,})" for reason, count in lost)
    of = of or "simulated requests break a limit, or come faster than they are served"
    counted = f"none of {candidates:,} candidates (deployments at a load) qualifies:"
    is_too_long = lost and {reason for reason, _ in lost} <= {"context", "layout", "tp"}
    may_help = "Shorter requests or another model" if is_too_long else "Looser limits, less load or more GPUs"
    return f"{counted} {of}. {may_help} may help"


def _why(answer: Answer, objective: str, replay: Replay | None) -> list[str]:
    """Why a deployment is recommended, in sentences."""
    from fastroof.models.layout import copies_words
    from fastroof.sweep.answers import EQUAL

    first, *others = answer.choices
    row, most = first.row, first.percentile
    clients = f"{row['clients']:,.0f} clients" if row["clients"] >= 1.0 else "less than one client"
    does = f"{first.objective:,.4g} {_OBJECTIVES[objective]}"
    if objective == "cost_per_million_tokens":
        does = (
            f"1M output tokens for {first.objective:,.4g}, {row['tokens_per_s_per_gpu']:,.4g} tokens/s a GPU"
        )
    if most is not None and not most.why_not and row["request_rate_per_s"] is None:
        sampled = "" if most.sampling_error is None else f" (±{percent(most.sampling_error)} by chance)"
        clients = f"{most.requests_per_s:,.4g} requests/s{sampled}, from {clients} on average"
        does = does.replace(" with", " at")
    lines = [
        f"{does} with {clients}; most of a step is bound by {row['bound']}, {percent(row['kv_share'])} of "
        "the KV cache is in use"
    ]
    if first.margins:
        nearest = "nearest limit: " if len(first.margins) > 1 else "limit: "
        of = "" if answer.limits_on == "mean" else f"{answer.limits_on} "
        words = [of * (margin.name in TIMES) + _margin_words(margin) for margin in first.margins]
        lines.append(nearest + ", ".join(words))
    lines += _free_words(first)
    lines += _limits_words(answer, replay)
    if first.at_edge:
        lines.append("this is the largest load that was tried: a larger one may be better")
    ahead = min(others, key=lambda choice: choice.behind, default=first)
    if ahead.behind <= -EQUAL:
        lines.append(
            f"{copies_words(ahead.row)} would be {percent(-ahead.behind)} ahead, within the error of such a "
            f"comparison, {percent(ahead.tie_within)}: the simpler deployment is recommended"
        )
    equals = sum(abs(choice.behind) < EQUAL for choice in others)
    ties = sum(choice.is_tie and choice.behind >= EQUAL for choice in others)
    if equals:
        what = "runner-up does" if equals == 1 else "runners-up do"
        lines.append(f"{equals} {what} as well, less simply, with longer requests or on more GPUs")
    if ties:
        what = "runner-up ties" if ties == 1 else "runners-up tie"
        lines.append(f"{ties} {what} with it within the error of such a comparison: measure before choosing")
    return lines


def _free_words(choice: Choice) -> list[str]:
    """Say the means of times without a limit, which queues may lengthen unseen."""
    limited = {margin.name for margin in choice.margins}
    words = [
        f"{_NAMES[name][0]} {choice.row[name]:,.1f} ms"
        for name in ("ttft_ms", "tpot_ms")
        if name not in limited and choice.row[name] is not None and math.isfinite(choice.row[name])
    ]
    return [f"without a limit, on average: {', '.join(words)}"] if words else []


def _margin_words(margin: Margin) -> str:
    name, unit = _NAMES[margin.name]
    unit = f" {unit}" if unit else ""
    return f"{name} {margin.value:,.4g} of {margin.limit:,g}{unit} ({percent(margin.left)} left)"


def _cells(choice: Choice, limits: Sequence[str]) -> list[str]:
    from fastroof.models.layout import copies_words
    from fastroof.sweep.answers import EQUAL

    row = choice.row
    margins = {margin.name: margin for margin in choice.margins}
    behind = percent(abs(choice.behind)) + " ahead" * (choice.behind < 0.0) + " (tie)" * choice.is_tie
    behind = "" if abs(choice.behind) < EQUAL else behind
    cells = [copies_words(row), *(row[column] for column in _FACTS.values()), f"{row['clients']:,.0f}"]
    cells += [f"{choice.objective:,.4g}", behind]
    cells += [f"{margins[name].value:,.4g}" if name in margins else "" for name in limits]
    return [*cells, percent(row["kv_share"]), row["bound"]]


def print_how_to_run(deployment: Deployment) -> None:
    """Print the commands of a deployment."""
    price = deployment.price
    if price is not None:
        print_line(
            f"costs {price.an_hour:,.4g} an hour: {price.of_output:,.4g} for 1M output tokens, "
            f"{price.of_all:,.4g} for 1M tokens of prompts and outputs"
        )
    for role, command in deployment.commands.items():
        print_line(f"to run {_ROLES[role]}{_copies_words(deployment, role)}:")
        print_command(command)
        if command.config:
            from fastroof.documents import yaml_text

            print_line(f"with {command.config_name}:")
            _print_indented(yaml_text(command.config))
    if deployment.benchmark is not None:
        rate, row = deployment.benchmark_rate, deployment.row
        load = f"{rate:,.4g} requests/s" if rate else f"{deployment.benchmark_clients:,}"
        if deployment.copies > 1:
            load += f" of the {row['requests_per_s']:,.4g}" if rate else f" of the {row['clients']:,.0f}"
        what = "one copy" if deployment.copies else "all workers"
        print_line(f"to check it, {what} with {load}{'' if rate else ' clients'}:")
        print_command(deployment.benchmark)
    for note in deployment.notes:
        print_line(note)
    print_line()


def _copies_words(deployment: Deployment, role: str) -> str:
    each, copies = counted(deployment.gpus_each, "GPU"), deployment.replicas.get(role, 0)
    if copies < 2:
        return f", on {each}" if copies else ""
    return f", {copies} times, each on {each} and with separate ports, the first"


def print_command(command: Command) -> None:
    """Print a command to be copied."""
    _print_indented(command.shell(width=min(console().width - 2, 76)))


def _print_indented(text: str) -> None:
    print_line()
    typer.echo(textwrap.indent(text.rstrip("\n"), "  "))
    print_line()


def print_saved(written: list[Path]) -> None:
    """Print which files were written."""
    folder = written[0].parent
    print_line(f"written to {folder}: {', '.join(str(path.relative_to(folder)) for path in written)}")


def deployment_document(deployment: Deployment | None) -> dict[str, Any] | None:
    """Return how to run a deployment, for JSON."""
    if deployment is None:
        return None
    engine = deployment.engine

    def words(command: Command) -> dict[str, Any]:
        return {
            "command": command.words(),
            "config": dict(command.config) or None,
            "environment": dict(command.environment),
        }

    numbers = ("copies", "gpus_each", "benchmark_clients", "benchmark_rate")
    return {
        "checkpoint": deployment.checkpoint.name,
        "engine": None if engine is None else engine.title,
        **{name: None if engine is None else getattr(engine, name) for name in ("release", "image")},
        **{name: getattr(deployment, name) for name in numbers},
        "servers": {role: words(command) for role, command in deployment.servers.items()},
        "router": None if deployment.router is None else words(deployment.router),
        "placement": [
            {"role": one.role, "number": one.number, "gpus": one.gpus, **one.address._asdict()}
            for one in deployment.placement
        ],
        "benchmark": None if deployment.benchmark is None else words(deployment.benchmark),
        "price": None if deployment.price is None else deployment.price._asdict(),
        "notes": list(deployment.notes),
    }
