"""The user's runs in commands: options, and the output of a fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastroof.cli.output import console, counted, print_facts, print_table

if TYPE_CHECKING:
    from fastroof.serving.evidence.own_runs import OwnFit, OwnRuns

Runs = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs",
        metavar="PATH",
        help="File of a load generator, or a folder of such files; repeatable: vllm bench serve, "
        "sglang.bench_serving, aiperf, genai-perf, guidellm, inference-perf, InferenceX.",
    ),
]
EngineArgs = Annotated[
    Path | None,
    typer.Option(
        help="With --runs: how the engine was started: its command line or log in a .txt, or its flags "
        "(vLLM's --config), Compose or Kubernetes file in a .json, .toml or .yaml.  [default: engine_args.* "
        "in each run's folder]"
    ),
]
EngineVersion = Annotated[
    str | None,
    typer.Option(help="With --runs: version of the engine, such as 0.15.1.  [default: the image's]"),
]
OwnModel = Annotated[
    str | None,
    typer.Option(help="With --runs: preset or config.json, if the engine's arguments name another path."),
]


def own_runs_of(
    runs: Sequence[Path],
    engine_args: Path | None,
    given: Mapping[str, Any],
    *,
    engine: str = "",
    warn: bool = True,
) -> OwnRuns:
    """Read runs, and print warnings to stderr."""
    from fastroof.serving.evidence.own_runs import read_own_runs

    own = read_own_runs(runs, engine_args, given, engine=engine)
    if warn:
        print_warnings(own)
    return own


def print_warnings(own: OwnRuns) -> None:
    """Print to stderr what is ignored and assumed."""
    for words in own.warnings:
        typer.echo(f"note: {words}", err=True)


def own_document(fitted: OwnFit, own: OwnRuns, output: Path | None) -> dict[str, Any]:
    """Return the result of a fit as one JSON object."""
    profile = asdict(fitted.profile)
    return {
        "evidence": profile.pop("evidence"),
        "profile": profile,
        "costs": [cost._asdict() for cost in fitted.costs],
        "chosen": fitted.fit.candidate.name,
        "chosen_by": dict(fitted.fit.errors),
        "errors": {
            "kernels": fitted.kernels_mape,
            "packaged": fitted.packaged_mape,
            "fitted": fitted.fitted_mape,
            "left_out": fitted.fit.left_out_mape,
        },
        "suspects": [asdict(one) for one in fitted.suspects],
        "curve": [point._asdict() for point in fitted.curve],
        "runs": [
            {
                "run": row.row,
                "isl": row.isl,
                "osl": row.osl,
                "concurrency": row.concurrency,
                "tpot_ms": row.tpot_ms,
                "left_out": row.left_out,
            }
            for row in own.rows
        ],
        "warnings": list(own.warnings),
        "output": None if output is None else str(output),
    }


def print_own_fit(fitted: OwnFit, own: OwnRuns) -> None:
    """Print a fit of a user's own runs."""
    engine = own.engines[0]
    version = f" {engine.version}" if engine.version else ", version unknown"
    models = ", ".join(dict.fromkeys(row.model for row in fitted.rows))
    runs = counted(len(fitted.rows), "run")
    print_facts(
        [
            ("profile", fitted.profile.name),
            ("engine", f"{engine.engine}{version} on {engine.gpu}: {models}"),
            ("runs", f"{runs} fitted, {len(fitted.left_out)} left out"),
            ("chosen", f"{fitted.fit.candidate.name}, by leaving each run out"),
        ]
    )
    out = console()
    if fitted.costs:
        out.print()
        print_table(
            ("cost", "us", "95 % interval", "packaged"),
            [
                (
                    cost.name,
                    f"{cost.us:.3g}",
                    "-" if math.isnan(cost.low_us) else f"{cost.low_us:.3g} to {cost.high_us:.3g}",
                    f"{fitted.packaged.get(cost.name, 0.0):.3g}",
                )
                for cost in fitted.costs
            ],
            left=("cost",),
        )
    out.print()
    print_table(
        ("TPOT, mean error", ""),
        [
            ("kernels alone", _percent(fitted.kernels_mape)),
            ("the packaged profile", _percent(fitted.packaged_mape)),
            ("fitted, on these runs", _percent(fitted.fitted_mape)),
            ("fitted, each run left out", _percent(fitted.fit.left_out_mape)),
        ],
        left=("TPOT, mean error",),
    )
    if fitted.curve:
        out.print()
        print_table(
            ("runs fitted", "error on runs left out", "of 8 in 10 subsets"),
            [
                (
                    str(point.runs),
                    _percent(point.mape),
                    f"{point.low:.1%} to {point.high:.1%}" if point.draws else "each in turn",
                )
                for point in fitted.curve
            ],
        )
        out.print(_more(fitted), soft_wrap=True)
    out.print(f"\n{_suspects(fitted)}", soft_wrap=True)
    if fitted.left_out:
        out.print(f"\nnot fitted: {counted(len(fitted.left_out), 'run')}", soft_wrap=True)
        for run, reason in fitted.left_out.items():
            out.print(f"  {run}: {reason}", soft_wrap=True)


def _suspects(fitted: OwnFit) -> str:
    """Return which kernels look wrong, in words."""
    from fastroof.serving.evidence.suspect_kernels import LEAST_RUNS

    if fitted.suspects:
        return "\n".join(map(str, fitted.suspects))
    if len(fitted.rows) < LEAST_RUNS:
        return f"{LEAST_RUNS} runs are needed to tell whether a kernel looks wrong"
    return "no kernel looks wrong: what its multiplier would explain is within the runs' own scatter"


def _more(fitted: OwnFit) -> str:
    """Return what more runs would gain, in words, from the last two points of the curve."""
    if len(fitted.curve) < 2:
        return "\n5 runs or more also show the error after 3"
    before, last = fitted.curve[-2], fitted.curve[-1]
    gained = before.mape - last.mape
    words = "more runs help little" if gained < 0.005 else "more runs of other loads should still help"
    return f"\nfrom {before.runs} to {last.runs} runs the error fell by {gained * 100.0:.1f} points: {words}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"
