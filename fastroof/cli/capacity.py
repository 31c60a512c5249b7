"""``fastroof capacity``: how many requests a second deployments serve within limits on percentiles."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.checks import shown
from fastroof.cli.fleet_options import FLEET, given_fleet
from fastroof.cli.named_plans import DRAFTS, drafts_said
from fastroof.cli.option_groups import (
    ENGINE_FACTS,
    ENGINE_SETTINGS,
    EXECUTION,
    TABLES,
    engine_settings,
    plan_options,
)
from fastroof.cli.options import LIMITS_MS, Json, limited_percentile
from fastroof.cli.output import (
    counted,
    limit_words,
    percent,
    plan_facts,
    print_json,
    print_line,
    print_table,
    range_words,
)
from fastroof.cli.workload_options import AT_ONCE, WORKLOAD, print_left_out, workload_requests
from fastroof.command_group import GroupValues, options_given, taking
from fastroof.errors import SimulationError
from fastroof.progress import shown_progress
from fastroof.simulation.fleet_options import AUTOSCALE

if TYPE_CHECKING:
    from fastroof import StepPlan
    from fastroof.simulation.capacity import Capacity
    from fastroof.simulation.capacity_search import Limits
    from fastroof.simulation.fewest_replicas import FewestReplicas, HourlyReplicas
    from fastroof.simulation.most_sessions import MostSessions

EPILOG: Final = (
    """\b
Examples:
  fastroof capacity --model llama-3.1-8b --ttft 500 --tpot 50 \\
      --num-requests 10000 --isl lognormal:1024:0.5 --osl 200
  fastroof capacity --model llama-3.1-70b --tp 4 --engine sglang --trace mine.csv --ttft 300 --percentile 90
  fastroof capacity --model llama-3.1-8b --trace mine.csv --rate-scale 4 --ttft 500 --fewest
  fastroof capacity --model llama-3.1-8b --ttft 500 --turns 3 --calls uniform:1:8 --tool 1.5 --think 20
  fastroof capacity --model llama-3.1-8b --hourly file:day.txt --ttft 500 --fewest --by-hour
  fastroof capacity --model llama-3.1-8b --trace agents.jsonl --sessions --kv-tiers vllm-offloading:100GB \\
      --ttft 2000 --tpot 40
  fastroof capacity my.toml -o capacities.parquet --resume

A specification is that of a sweep with [workload] and [slo] instead of a load: each deployment is a row of
the results, ranked by requests/s per GPU. `fastroof sweep` takes it too, with keys as options.
Every rate and deployment gets the same requests; only their arrivals are scaled. With sessions
(--turns, --calls, or a trace of them) the rate counts session starts, in sessions/s; delays within a
session (--think, --tool, or the trace's) are not scaled.

\b
JSON of --model: version, model, gpu, tp, pp, dp, ep, moe_tp, dtype, kv_dtype, engine, tables_hash,
left_out (rows of the trace's file by reason), num_draft_tokens, accepted, draft, accepted_from (these with
draft tokens), requests_per_s (0 where no rate keeps the limits), requests_per_s_per_gpu, limit (what breaks
first beyond it; throughput: arrivals are faster than what is served; none: no rate breaks one), low, high
(with steps one standard error longer and shorter),
relative_error, basis, sampling_error (relative standard error by chance), tolerance, replicas, gpus,
requests, counted (without ramp and drain), simulations, at_capacity (percentiles), simulated: one object a
rate [requests_per_s, holds, served_per_s, growth, goodput, and the percentiles]. Of sessions also
sessions_per_s (requests_per_s / requests_per_session) and open_sessions, the mean number at once. With
--fewest: replicas, gpus (0 where too many would be needed), limit, requests_per_s, sessions_per_s (of
sessions), at_replicas; with --by-hour hours: one object
each with hour and these, peak (replicas), gpu_hours, gpu_hours_at_peak. With --sessions: sessions (the most
at once; limit none: all there are), low and high (of them), limit, relative_error, basis, replicas, gpus,
requests, simulations, at_capacity, simulated. JSON of a specification: as `fastroof sweep`, best: one object
a group.
"""
    + ENGINE_FACTS
)

DEFAULT_RESULTS: Final = Path("capacities.parquet")
_OF_SPECIFICATION: Final = frozenset({"results", *EXECUTION})
_OF_BOTH: Final = frozenset({"spec", *LIMITS_MS, "slo", "threads", "as_json"})
_SHORT: Final = re.compile(r"([a-z0-9]+_p[0-9_]+)(?:_ms)?[=:]([0-9]*\.?[0-9]+)")


@taking(
    limited=LIMITS_MS,
    workload={**WORKLOAD, **AT_ONCE},
    plan=plan_options(without=("cp",)),
    given=ENGINE_SETTINGS,
    fleet_options={name: option for name, option in FLEET.items() if name not in AUTOSCALE},
    speculative=DRAFTS,
    run=EXECUTION,
    measured=TABLES,
)
def capacity(
    *,
    context: typer.Context,
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC.toml]", help="Specification of deployments, instead of --model."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Preset (see fastroof models) or path of a config.json."),
    ] = None,
    limited: GroupValues,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="LIMITS",
            help="Limits on several percentiles, in ms: ttft_p90=300,ttft_p99=900,e2e_p99_9=10000.",
        ),
    ] = None,
    workload: GroupValues,
    period: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds that the trace covers, and after which it is repeated.  [default: until a mean gap "
            "after its last request]",
        ),
    ] = None,
    draws: Annotated[
        int, typer.Option(min=1, metavar="TIMES", help="Number of draws, to estimate the sampling error.")
    ] = 1,
    steady: Annotated[
        bool,
        typer.Option(
            "--steady/--no-steady",
            help="Draw more requests, or repeat the trace, until ramp and drain do not matter; or count the "
            "requests given, all of them.",
        ),
    ] = True,
    plan: GroupValues,
    fleet_options: GroupValues,
    speculative: GroupValues,
    fewest: Annotated[
        bool,
        typer.Option(
            "--fewest",
            help="Find the fewest replicas at the requests' rate (--rate, of sessions if they have several, "
            "or --rate-scale), or with --clients.",
        ),
    ] = False,
    by_hour: Annotated[
        bool, typer.Option("--by-hour", help="With --fewest: for each hour of the trace, or of --hourly.")
    ] = False,
    given: GroupValues,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            "-o",
            help="Results of a specification: .parquet, .csv or .jsonl.  [default: capacities.parquet]",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Number of threads.  [default: all processors]")
    ] = None,
    run: GroupValues,
    measured: GroupValues,
    as_json: Json = False,
) -> None:
    """Find the most requests/s within limits on percentiles.

    The same requests are simulated at different rates to find the largest at which percentiles of TTFT, TPOT,
    ITL and E2E keep their limits, for one deployment or for all of a specification.
    """
    from fastroof.host import usable_processors

    if (spec is None) == (model is None):
        raise SimulationError("give --model MODEL, or a specification (SPEC.toml)")
    _refuse_ignored(spec, options_given(context))
    workers = threads or usable_processors()
    limits = _limits(limited, slo)
    if spec is not None:
        _of_specification(spec, limits, results, {**run, "threads": workers}, as_json)
        return
    assert model is not None
    if workload["rate"] is not None and not fewest:
        raise SimulationError("--rate needs --fewest: without it the rate is the answer")
    sessions = workload.pop("sessions")
    if sessions and fewest:
        raise SimulationError("--sessions finds their number, --fewest that of replicas: give one of them")
    requests = workload_requests(**workload, period=period)
    settings = engine_settings(given)
    fleet_options |= dict.fromkeys(AUTOSCALE)
    fleet = given_fleet(model, fleet_options, plan, settings, speculative, measured)
    served, speculation = fleet.pools[-1].plan, fleet.pools[-1].speculation
    options = {**limits, "threads": workers}
    found: Any
    show: Callable[[StepPlan, Any], None]
    if by_hour and not fewest:
        raise SimulationError("--by-hour goes with --fewest: the fewest replicas of each hour")
    if fewest:
        from fastroof.simulation.fewest_replicas import fewest_by_hour, fewest_replicas

        find, show = (fewest_by_hour, _print_hours) if by_hour else (fewest_replicas, _print_fewest)
        found = find(fleet, requests, steady=steady, **options)
    elif sessions:
        from fastroof.simulation.most_sessions import most_sessions

        found, show = most_sessions(fleet, requests, **options), _print_sessions
    else:
        from fastroof import capacity as largest_rate

        found = largest_rate(fleet, requests, steady=steady, draws=draws, **options)
        show = _print_capacity
    if as_json:
        left_out = getattr(requests, "left_out", {})
        drafts = drafts_said(speculation)
        facts = {**plan_facts(served), "tables_hash": served.tables_hash, "left_out": left_out, **drafts}
        print_json({**facts, **found.document()})
        return
    show(served, found)
    if speculation is not None:
        print_line(str(speculation))
    print_left_out(requests)


def _refuse_ignored(spec: Path | None, given: dict[str, str]) -> None:
    """Raise if a specification gets options of a model, or a model those of a specification."""
    for name, option in given.items():
        if spec is not None and name not in _OF_SPECIFICATION | _OF_BOTH:
            raise SimulationError(f"{option} goes with --model; {spec} is a specification, which has its own")
        if spec is None and name in _OF_SPECIFICATION:
            raise SimulationError(f"{option} goes with a specification (.toml); --json prints the answer")


def _limits(given: GroupValues, more: str | None) -> dict[str, Any]:
    """Return the limits by name, as capacities name them."""
    from fastroof.simulation.capacity_search import limit_name

    percentile = limited_percentile(given.pop("percentile"), given.pop("mean"))
    limits = {limit_name(name, percentile): most for name, most in given.items() if most is not None}
    for part in more.split(",") if more is not None else ():
        match = _SHORT.fullmatch(part.strip())
        if match is None:
            raise SimulationError(
                f"--slo needs limits in ms like ttft_p90=300,itl_p99=80,e2e_p99_9=10000; got {shown(part)}"
            )
        limits[f"{match[1]}_ms"] = float(match[2])
    return limits


def _of_specification(
    path: Path, limits: dict[str, Any], given: Path | None, run: dict[str, Any], as_json: bool
) -> None:
    """Find the capacities of all deployments of a specification."""
    from fastroof import SweepError, run_sweep
    from fastroof.cli.sweep import print_summary, resumable, say_where
    from fastroof.sweep import CapacitySpec, load_spec

    spec = load_spec(path, {"slo": limits} if limits else None)
    if not isinstance(spec, CapacitySpec):
        raise SweepError(f"{path} has neither [workload] nor [slo]; run it with `fastroof sweep`")
    results = DEFAULT_RESULTS if given is None else given
    executor = "ray" if run["address"] else "local"
    if given is None:
        say_where(results, f"the sweep of {path}")
    with resumable(results), shown_progress("capacity", "deployments", quiet=as_json) as shown:
        summary = run_sweep(spec, results, executor=executor, **run, progress=shown)
    print_summary(summary, as_json=as_json, quiet=False)


def _print_capacity(plan: StepPlan, most: Capacity) -> None:
    """Print the capacity of one deployment and its other rates."""
    gpus = f"{most.replicas} x {plan.layout} on {most.gpus} x {plan.gpu.name}"
    print_line(
        f"{plan.model.name}, {gpus}, {plan.dtype} weights, engine {plan.profile.title}: {_most_words(most)}"
    )
    if most.relative_error is not None:
        print_line(
            f"  {range_words(vars(most))} if steps are longer or shorter by one standard error, "
            f"{percent(most.relative_error)} ({most.basis})"
        )
    else:
        print_line(f"  steps' error is {most.basis}")
    if most.sampling_error is not None:
        print_line(f"  by chance ±{percent(most.sampling_error)}, one standard error")
    print_line()
    rates = sorted(most.seen)
    at = rates.index(most.requests_per_s) if most.requests_per_s in most.seen else 0
    shown = sorted({*rates[max(at - 2, 0) : at + 3], rates[-1]})
    each = most.requests_per_session
    rows = [
        [
            *([] if each is None else [_rate_words(rate / each)]),
            _rate_words(rate),
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
    part = "" if most.counted == most.requests else f"; {most.counted:,} count, without ramp and drain"
    print_line(f"\n{most.simulations} simulations of up to {most.requests:,} requests{part}")


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
        return f"{rate}; above it, requests arrive faster than they are served"
    return f"{rate}; above it, {limit} exceeds its limit first"


def _print_sessions(plan: StepPlan, most: MostSessions) -> None:
    """Print the most sessions at once, and other numbers of them."""
    limit = limit_words(most.limit)
    words = f"{most.sessions:,} at once; with one more, {limit} exceeds its limit first"
    if most.limit == "none":
        words = f"all {most.sessions:,} at once keep the limits"
    elif not most.sessions:
        words = f"not even one keeps {limit}"
    print_line(f"{_deployment_words(plan)}, {counted(most.gpus, 'GPU')}: {words}")
    if most.relative_error is not None:
        error = percent(most.relative_error)
        print_line(f"  {most.low:,} to {most.high:,} with steps {error} longer or shorter ({most.basis})")
    print_line()
    rows = [
        [
            f"{clients:,}",
            "yes" if most.limits.holds(seen) else "no",
            f"{seen.served_per_s:,.4g}",
            *(f"{value:,.4g}" for value in seen.values_ms),
        ]
        for clients, seen in sorted(most.seen.items())
    ]
    print_table(["at once", "kept", "served/s", *_limit_columns(most.limits)], rows)
    print_line(f"\n{most.simulations} simulations of {most.requests:,} requests, which all count")


def _print_fewest(plan: StepPlan, few: FewestReplicas) -> None:
    """Print the fewest replicas that keep the limits."""
    rate = _rate_words(few.requests_per_s, " requests/s")
    if few.sessions_per_s is not None and math.isfinite(few.sessions_per_s):
        rate = f"{few.sessions_per_s:,.4g} sessions/s, {rate}"
    name = f"{_deployment_words(plan)}, {rate}"
    limit = limit_words(few.limit)
    if not few.replicas:
        print_line(f"{name}: {max(few.seen)} replicas do not keep {limit}")
    elif few.limit == "none":
        print_line(f"{name}: 1 replica is enough, {counted(few.gpus, 'GPU')}")
    else:
        print_line(f"{name}: {few.replicas} replicas, {few.gpus} GPUs; one fewer breaks {limit}")
    print_line()
    rows = [
        [
            f"{count:,}",
            "yes" if few.limits.holds(seen) else "no",
            *(f"{value:,.4g}" for value in seen.values_ms),
        ]
        for count, seen in few.seen.items()
    ]
    print_table(["replicas", "kept", *_limit_columns(few.limits)], rows)


def _print_hours(plan: StepPlan, hourly: HourlyReplicas) -> None:
    """Print the fewest replicas of each hour."""
    if hourly.peak:
        words = f"up to {counted(hourly.peak, 'replica')}, {hourly.gpu_hours:,.4g} GPU hours"
        words += f" ({hourly.gpu_hours_at_peak:,.4g} with {hourly.peak} at all hours)"
    else:
        words = "some hours need more replicas than were tried"
    print_line(f"{_deployment_words(plan)}: {words}")
    print_line()
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


def _rate_words(per_s: float, unit: str = "") -> str:
    return "all at once" if math.isinf(per_s) else f"{per_s:,.4g}{unit}"


def _deployment_words(plan: StepPlan) -> str:
    return f"{plan.model.name}, {plan.layout} on {plan.gpu.name}, engine {plan.profile.title}"


def _limit_columns(limits: Limits) -> list[str]:
    return [f"{limit_words(limit.name)} ms" for limit in limits.percentiles]
