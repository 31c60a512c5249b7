"""The user's runs in commands: options, and the output of a fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from fastroof.cli.checkout import DATA, WITH_DATA
from fastroof.cli.named_plans import DRAFTS
from fastroof.cli.options import option
from fastroof.cli.output import counted, print_facts, print_line, print_records, print_table
from fastroof.command_group import Group, GroupValues
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    from fastroof.evidence.own_fit import FittedCost, OwnFit
    from fastroof.evidence.own_runs import OwnRow, OwnRuns
    from fastroof.evidence.steps.measured_steps import MeasuredStep

MOST_NAMED: Final = 20
"""Runs or steps that are left out for one reason are named up to this number, and counted above it."""

OWN_DATA: Final[Group] = {
    "runs": option(
        list[Path],
        "File of a load generator, or a folder of such files; repeatable: vllm bench serve, "
        "sglang.bench_serving, aiperf, genai-perf, guidellm, inference-perf, InferenceX, or the table that a "
        "benchmark printed (- for standard input).",
        "PATH",
        "--runs",
    ),
    "steps": option(
        Path,
        "Whole steps, alone or with --runs: steps.csv of `kernels-bench steps`, .json of `vllm bench "
        "forward`, .parquet of aisimulate's forward passes.",
    ),
    "engine_args": option(
        Path,
        "With --runs or --steps: how the engine was started: its command line or log in a .txt, or its "
        "flags (vLLM's --config), Compose file or manifest in a .json, .toml or .yaml.  [default: "
        "engine_args.* or start.sh in each run's folder]",
    ),
    "engine_version": option(
        str, "With --runs or --steps: version of the engine, such as 0.15.1.  [default: the image's]"
    ),
    "model": option(
        str, "With --runs or --steps: preset or config.json, if the engine's arguments name another path."
    ),
    **DRAFTS,
}
"""A user's own runs and steps, and how their engine was started."""


def own_runs_of(
    data: GroupValues, gpu: str | None, engine: str | None, *, by_default: str = "", warn: bool = True
) -> OwnRuns:
    """Read runs and steps, and print to stderr what is ignored and assumed.

    ``engine`` is that of all runs, ``by_default`` that of runs whose arguments name none.
    """
    from fastroof.evidence.own_runs import read_own_runs

    runs, steps = data["runs"] or (), data["steps"]
    if not runs and steps is None:
        raise FastroofError(f"{' '.join(WITH_DATA)} go with {' or '.join(DATA)}")
    given = {"engine": engine, "version": data["engine_version"], "model": data["model"], "gpu": gpu}
    given |= {name: data[name] for name in DRAFTS}
    own = read_own_runs(runs, data["engine_args"], given, engine=by_default, steps=steps)
    for words in own.warnings if warn else ():
        typer.echo(f"note: {words}", err=True)
    return own


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
            **{name: getattr(fitted, f"{name}_mape") for name in ("kernels", "packaged", "fitted")},
            "left_out": fitted.fit.left_out_mape,
        },
        "suspects": [asdict(one) for one in fitted.suspects],
        "curve": [point._asdict() for point in fitted.curve],
        "runs": [
            {
                "run": row.row,
                **{name: getattr(row, name) for name in ("isl", "osl", "concurrency", "tpot_ms")},
                "drafts": None if row.speculation is None else str(row.speculation),
                "left_out": row.not_fitted,
            }
            for row in own.rows
        ],
        "steps": [
            {"step": step.name, "phase": step.phase, "latency_us": step.latency_us, "left_out": step.left_out}
            for step in own.steps
        ],
        "warnings": list(own.warnings),
        "output": None if output is None else str(output),
    }


def print_own_fit(fitted: OwnFit) -> None:
    """Print a fit of a user's own runs."""
    every: list[OwnRow | MeasuredStep] = [*fitted.rows, *fitted.steps]
    first = every[0]
    version = f" {first.engine_version}" if first.engine_version else ", version unknown"
    models = ", ".join(dict.fromkeys(one.model for one in every))
    runs, steps = counted(len(fitted.rows), "run"), counted(len(fitted.steps), "step")
    taken = " and ".join([runs] * bool(fitted.rows) + [steps] * bool(fitted.steps))
    what = "run" if fitted.rows else "step"
    errors_of = "TPOT, mean error" if fitted.rows else "step time, mean error"
    facts = {
        "profile": fitted.profile.name,
        "engine": f"{first.engine}{version} on {first.gpu}: {models}",
        f"{what}s": f"{taken} fitted, {len(fitted.left_out)} left out",
    }
    drafts = dict.fromkeys(str(row.speculation) for row in fitted.rows if row.speculation is not None)
    if drafts:
        facts["drafts"] = "; ".join(drafts)
    if fitted.steps and fitted.steps[0].timed != "engine":
        facts["without"] = "LM head, sampler and host: serving takes longer than this profile predicts"
    print_facts(facts | {"chosen": f"{fitted.fit.candidate.name}, by leaving each {what} out"})
    if fitted.costs:
        print_line()
        columns: dict[str, Callable[[FittedCost], str]] = {
            "cost": lambda cost: cost.name,
            "us": lambda cost: f"{cost.us:.3g}",
            "95 % interval": lambda cost: (
                "-" if math.isnan(cost.low_us) else f"{cost.low_us:.3g} to {cost.high_us:.3g}"
            ),
            "packaged": lambda cost: f"{fitted.packaged.get(cost.name, 0.0):.3g}",
        }
        print_records(fitted.costs, columns, left=("cost",))
    print_line()
    print_table(
        (errors_of, ""),
        [
            ("kernels alone", _percent(fitted.kernels_mape)),
            ("the packaged profile", _percent(fitted.packaged_mape)),
            (f"fitted, on these {what}s", _percent(fitted.fitted_mape)),
            (f"fitted, each {what} left out", _percent(fitted.fit.left_out_mape)),
        ],
        left=(errors_of,),
    )
    if fitted.curve:
        print_line()
        print_table(
            (f"{what}s fitted", f"error on {what}s left out", "of 8 in 10 subsets"),
            [
                (
                    str(point.runs),
                    _percent(point.mape),
                    f"{point.low:.1%} to {point.high:.1%}" if point.draws else "each in turn",
                )
                for point in fitted.curve
            ],
        )
        print_line(_more(fitted, what))
    if fitted.rows:
        print_line(f"\n{_suspects(fitted)}")
    if fitted.left_out:
        print_line(f"\nnot fitted: {counted(len(fitted.left_out), what)}")
        by_reason = Counter(fitted.left_out.values())
        for run, reason in fitted.left_out.items():
            alike = by_reason.pop(reason, 0)
            if alike > MOST_NAMED:
                print_line(f"  {alike} {what}s: {reason}")
            elif alike:
                by_reason[reason] = alike
                print_line(f"  {run}: {reason}")


def _suspects(fitted: OwnFit) -> str:
    """Return which kernels look wrong, in words."""
    from fastroof.evidence.suspect_kernels import LEAST_RUNS

    if fitted.suspects:
        return "\n".join(map(str, fitted.suspects))
    if sum(1 for row in fitted.rows if row.speculation is None) < LEAST_RUNS:
        return f"at least {LEAST_RUNS} runs without speculative decoding are needed to find a wrong kernel"
    return "no kernel looks wrong: what its multiplier would explain is within the runs' own scatter"


def _more(fitted: OwnFit, what: str) -> str:
    """Return what more runs would gain, in words, from the last two points of the curve."""
    if len(fitted.curve) < 2:
        return f"\n5 {what}s or more also show the error after 3"
    before, last = fitted.curve[-2], fitted.curve[-1]
    gained = before.mape - last.mape
    little, much = f"more {what}s help little", f"more {what}s of other loads should still help"
    words = little if gained < 0.005 else much
    return (
        f"\nfrom {before.runs} to {last.runs} {what}s the error fell by {gained * 100.0:.1f} points: {words}"
    )


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"
