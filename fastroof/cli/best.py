"""``fastroof best``: the deployment to run, the runners-up, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.cli.options import Json
from fastroof.cli.output import console, duration, percent, print_json, print_table
from fastroof.cli.progress import shown_progress
from fastroof.processors import usable_processors

if TYPE_CHECKING:
    from fastroof.sweep.best import Answer, Choice, Margin

__all__ = ["register"]

EPILOG: Final = """\b
Examples:
  fastroof best
  fastroof sweep --example > my.toml; fastroof best my.toml --runners-up 5
  fastroof best my.toml --percentile 99

A runner-up is the best deployment of another GPU, mode, tp, dtype, KV cache or runtime.

\b
JSON: objective, candidates, skipped (plans that could not be compiled), total_s, answers: one object a model
and load [group, candidates, feasible, infeasible (reason: candidates), choices: the best first, one object a
deployment [objective, relative_error (of a decode step's time), behind (share of the best), is_tie (no
further behind than errors say), at_edge (at the largest load of the specification), margins [name, value,
limit, left (share of the limit)], row (the columns of a sweep's results), percentile (null without
--percentile; then behind and is_tie are of what is served within it) [requests_per_s, low, high (with steps
one standard error longer and shorter), tokens_per_s_per_gpu, limit (what binds), place (in the closed form's
order), why_not (why it was not simulated)]]].
"""

_EQUAL: Final = 1e-8
_NAMES: Final = {
    "ttft_ms": ("TTFT", "ms"),
    "tpot_ms": ("TPOT", "ms"),
    "request_latency_ms": ("request latency", "ms"),
    "kv_share": ("share of the KV cache", ""),
    "total_gpus": ("GPUs", ""),
}
_OBJECTIVES: Final = {
    "tokens_per_s_per_gpu": "tokens/s a GPU",
    "tokens_per_s_per_user": "tokens/s a user",
    "tokens_per_s": "tokens/s",
    "cost_per_million_tokens": "cost of 1M tokens",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("best", epilog=EPILOG)(best)


def best(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SPEC.toml]", help="Deployments to compare; without it `fastroof sweep --example`."
        ),
    ] = None,
    runners_up: Annotated[int, typer.Option(min=0, help="Runners-up of each at most.")] = 3,
    percentile: Annotated[
        float | None,
        typer.Option(
            metavar="P", help="Rank the leaders anew by requests/s with this percentile within the limits."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="With --percentile: requests to simulate.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="With --percentile: seed of their arrivals.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to use.  [default: all processors]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which deployment to run, and why.

    Every deployment that the specification of a sweep asks for is estimated; for each model, and each load
    where it has several, the best within the limits is named with the next best of other kinds. The limits
    are on means; with --percentile the leaders are simulated, request by request, and ranked by that.
    """
    from importlib import resources

    from fastroof.sweep import best_deployments

    packaged = resources.files("fastroof.sweep.deployments") / "example.toml"
    with resources.as_file(packaged) as example, shown_progress("best", "candidates", quiet=as_json) as shown:
        answers = best_deployments(
            example if spec is None else spec,
            runners_up=runners_up,
            percentile=percentile,
            requests=requests,
            seed=seed,
            threads=threads or usable_processors(),
            progress=shown,
        )
    if as_json:
        print_json(_document(answers))
        return
    for answer in answers.answers:
        _print(answer, answers.objective, percentile)
    out = console()
    for why in answers.skipped:
        out.print(f"left out: {why}", soft_wrap=True)
    out.print(f"{answers.candidates:,} deployments compared in {duration(answers.total_s)}", soft_wrap=True)


def _document(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _document(item) for name, item in value._asdict().items()}
    return [_document(item) for item in value] if isinstance(value, list | tuple) else value


def _print(answer: Answer, objective: str, percentile: float | None) -> None:
    from fastroof.cli.sweep_summary import layout_words

    out = console()
    group = dict(answer.group)
    loads = ", ".join(f"{name} {value:,g}" for name, value in group.items() if name != "model")
    title = f"{group['model']}{' at ' if loads else ''}{loads}"
    if not answer.choices:
        lost = sorted(answer.infeasible.items(), key=lambda item: -item[1])
        out.print(f"{title}: no deployment is within the limits", soft_wrap=True)
        out.print(f"  {_lost_words(lost, answer.candidates)}\n", soft_wrap=True)
        return
    first = answer.choices[0]
    row = first.row
    out.print(
        f"{title}: run {layout_words(row)} on {row['total_gpus']} x {row['gpu']}, {row['dtype']} weights, "
        f"{row['kv_dtype']} KV cache, runtime {row['runtime']}, steps of up to {row['max_batched_tokens']:,} "
        f"tokens{_drafts_words(row)}",
        soft_wrap=True,
    )
    for line in _why(first, objective, answer.choices[1:]):
        out.print(f"  {line}", soft_wrap=True)
    out.print()
    limits = [margin.name for margin in first.margins]
    columns = ["layout", "GPU", "dtype", "KV", "clients", _OBJECTIVES[objective], "behind"]
    columns += [" ".join(_NAMES[name]).strip() for name in sorted(limits)]
    columns += ["KV cache", "bound by"]
    left = ["layout", "GPU", "dtype", "KV", "bound by"]
    rows = [_cells(choice, sorted(limits)) for choice in answer.choices]
    if percentile is not None:
        limited = f"limit at p{percentile:g}"
        columns += [f"p{percentile:g} requests/s", "one error", "tokens/s a GPU at it", limited, "was"]
        left.append(limited)
        rows = [cells + _percentile_cells(choice) for cells, choice in zip(rows, answer.choices, strict=True)]
    print_table(columns, rows, left=left)
    for choice in answer.choices:
        if choice.percentile is not None and choice.percentile.why_not:
            out.print(
                f"{layout_words(choice.row)} not simulated: {choice.percentile.why_not}", soft_wrap=True
            )
    out.print()


def _percentile_cells(choice: Choice) -> list[str]:
    """What a choice serves within the percentile, and where the closed form had it."""
    from fastroof.cli.capacity_tables import limit_words

    most = choice.percentile
    if most is None or most.why_not:
        return ["-", "-", "-", "not simulated", "" if most is None else f"{most.place}."]
    return [
        f"{most.requests_per_s:,.4g}",
        f"{most.low:,.4g} to {most.high:,.4g}",
        f"{most.tokens_per_s_per_gpu:,.4g}",
        limit_words(most.limit),
        f"{most.place}.",
    ]


def _drafts_words(row: dict[str, Any]) -> str:
    if not row["num_draft_tokens"]:
        return ""
    return f", {row['num_draft_tokens']} draft tokens ({row['draft']}), {row['accepted']:g} tokens a step"


def _lost_words(lost: Sequence[tuple[str, int]], candidates: int) -> str:
    from fastroof.sweep.deployments.summary import INFEASIBLE

    of = "; ".join(f"{INFEASIBLE.get(reason, reason)}: {count:,}" for reason, count in lost)
    return f"of {candidates:,} candidates of this model {of}. Looser limits, less load or more GPUs may do"


def _why(first: Choice, objective: str, others: Sequence[Choice]) -> list[str]:
    """Why a deployment is recommended, in sentences."""
    row = first.row
    clients = f"{row['concurrency']:,.0f} clients" if row["concurrency"] >= 1.0 else "less than one client"
    lines = [
        f"{first.objective:,.4g} {_OBJECTIVES[objective]} with {clients}; most of a step is bound by "
        f"{row['bound']}, {percent(row['kv_share'])} of the KV cache is in use"
    ]
    if first.margins:
        nearest = "nearest limit: " if len(first.margins) > 1 else "limit: "
        lines.append(nearest + ", ".join(_margin_words(margin) for margin in first.margins))
    if first.at_edge:
        lines.append("this is the largest load of the specification: a larger one may be better still")
    equals = sum(choice.behind < _EQUAL for choice in others)
    ties = sum(choice.is_tie for choice in others) - equals
    if equals:
        what = "runner-up does" if equals == 1 else "runners-up do"
        lines.append(f"{equals} {what} as well, with longer requests or on more GPUs")
    if ties:
        what = "runner-up is" if ties == 1 else "runners-up are"
        lines.append(f"{ties} {what} no further behind than the estimates' errors: measure both")
    return lines


def _margin_words(margin: Margin) -> str:
    name, unit = _NAMES[margin.name]
    unit = f" {unit}" if unit else ""
    return f"{name} {margin.value:,.4g} of {margin.limit:,g}{unit} ({percent(margin.left)} left)"


def _cells(choice: Choice, limits: Sequence[str]) -> list[str]:
    from fastroof.cli.sweep_summary import layout_words

    row = choice.row
    margins = {margin.name: margin for margin in choice.margins}
    behind = "" if choice.behind < _EQUAL else percent(choice.behind) + " (tie)" * choice.is_tie
    cells = [layout_words(row), row["gpu"], row["dtype"], row["kv_dtype"], f"{row['concurrency']:,.0f}"]
    cells += [f"{choice.objective:,.4g}", behind]
    cells += [f"{margins[name].value:,.4g}" if name in margins else "" for name in limits]
    return [*cells, percent(row["kv_share"]), row["bound"]]
