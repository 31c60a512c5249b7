"""``fastroof capacity``: how many requests a second deployments serve within limits on percentiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fastroof._version import __version__
from fastroof.checks import shown
from fastroof.cli.capacity_tables import print_capacity, print_fewest, print_hours
from fastroof.cli.fleet_options import ROUTER
from fastroof.cli.gpu_tables import gpu_and_tables
from fastroof.cli.option_groups import (
    ENGINE_FACTS,
    ENGINE_SETTINGS,
    EXECUTION,
    TABLES,
    check_engine,
    engine_settings,
    plan_options,
    simulated_plan,
)
from fastroof.cli.options import Json
from fastroof.cli.output import print_json
from fastroof.cli.workload_options import WORKLOAD, print_left_out, workload_requests
from fastroof.command_group import GroupValues, options_given, taking
from fastroof.errors import SimulationError

EPILOG: Final = (
    """\b
Examples:
  fastroof capacity llama-3.1-8b --ttft-p99 500 --tpot-p99 50 \\
      --num-requests 10000 --input lognormal:1024:0.5 --output 200
  fastroof capacity llama-3.1-70b --tp 4 --engine sglang --trace mine.csv --slo ttft_p90=300,itl_p99=80
  fastroof capacity llama-3.1-8b --trace mine.csv --rate-scale 4 --ttft-p99 500 --fewest
  fastroof capacity llama-3.1-8b --ttft-p99 500 --turns 3 --calls uniform:1:8 --tool 1.5 --think 20
  fastroof capacity llama-3.1-8b --hourly file:day.txt --ttft-p99 500 --fewest --by-hour
  fastroof capacity my.toml -o capacities.parquet --resume

A specification is that of a sweep with [workload] and [slo] instead of a load: each deployment is a row of
the results, ranked by requests/s per GPU. `fastroof sweep` takes it too, with keys as options.
The requests of all rates and deployments are the same: their arrivals are scaled. Of sessions
(--turns, --calls, or a trace of them) the rate is that of their starts, sessions/s; delays between their
requests (--think, --tool, or the trace's) stay.

\b
JSON of a model: version, model, gpu, tp, pp, dp, ep, moe_tp, dtype, kv_dtype, engine, tables_hash,
left_out (rows of the trace's file by reason), requests_per_s (0 where no rate keeps the limits),
requests_per_s_per_gpu, limit (what breaks first beyond it; throughput: arrivals are faster than what is
served; none: no rate breaks one), low, high (with steps one standard error longer and shorter),
relative_error, basis, sampling_error (relative standard error by chance), tolerance, replicas, gpus,
requests, counted (without ramp and drain), simulations, at_capacity (percentiles), simulated: one object a
rate [requests_per_s, holds, served_per_s, growth, goodput, and the percentiles]. Of sessions also
sessions_per_s (requests_per_s / requests_per_session) and open_sessions, the mean number at once. With
--fewest: replicas, gpus (0 where too many would be needed), limit, requests_per_s, sessions_per_s (of
sessions), at_replicas; with --by-hour hours: one object
each with hour and these, peak (replicas), gpu_hours, gpu_hours_at_peak. JSON of a specification: as
`fastroof sweep`, best: one object a group.
"""
    + ENGINE_FACTS
)

DEFAULT_RESULTS: Final = Path("capacities.parquet")
_OF_SPECIFICATION: Final = frozenset({"results", *EXECUTION})
_OF_BOTH: Final = frozenset({"what", "ttft_p99", "tpot_p99", "e2e_p99", "slo", "threads", "as_json"})
_SHORT: Final = re.compile(r"([a-z0-9]+_p[0-9_]+)(?:_ms)?[=:]([0-9]*\.?[0-9]+)")
Most = float | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("capacity", epilog=EPILOG)(capacity)


def _limit(option: str, what: str) -> Any:
    return typer.Option(option, metavar="MS", help=f"Maximum 99th percentile of {what}.")


@taking(
    workload=WORKLOAD,
    plan=plan_options(without=("cp",)),
    given=ENGINE_SETTINGS,
    routed=ROUTER,
    run=EXECUTION,
    measured=TABLES,
)
def capacity(
    *,
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|SPEC.toml", help="Preset or config.json of a model, or a specification."
        ),
    ],
    ttft_p99: Annotated[Most, _limit("--ttft-p99", "TTFT")] = None,
    tpot_p99: Annotated[Most, _limit("--tpot-p99", "TPOT")] = None,
    e2e_p99: Annotated[Most, _limit("--e2e-p99", "whole requests")] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="LIMITS", help="More limits in ms: ttft_p90=300,itl_p99=80,e2e_p99_9=10000."),
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
    replicas: Annotated[int, typer.Option(min=1, help="Number of engines that share the requests.")] = 1,
    routed: GroupValues,
    fewest: Annotated[
        bool,
        typer.Option(
            "--fewest",
            help="Find the fewest replicas at the requests' rate (--rate, of sessions if they have several, "
            "or --rate-scale).",
        ),
    ] = False,
    by_hour: Annotated[
        bool,
        typer.Option("--by-hour", help="With --fewest: for each hour of the trace, or of --hourly."),
    ] = False,
    given: GroupValues,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", help="Relative tolerance of the search.")
    ] = 0.01,
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
    from fastroof.caching import usable_processors

    _refuse_ignored(what, options_given(context))
    workers = threads or usable_processors()
    limits = _limits({"ttft_p99_ms": ttft_p99, "tpot_p99_ms": tpot_p99, "e2e_p99_ms": e2e_p99}, slo)
    if what.endswith(".toml"):
        _of_specification(Path(what), limits, results, {**run, "threads": workers}, as_json)
        return
    check_engine(plan["engine"])
    if workload["rate"] is not None and not fewest:
        raise SimulationError("--rate needs --fewest: without it the rate is the answer")
    requests = workload_requests(**workload, period=period)
    settings = engine_settings(given)
    settings |= {"routing": routed.pop("router"), **routed, "threads": workers}
    served = simulated_plan(what, *gpu_and_tables(**measured), settings, plan)
    facts = {
        "version": __version__, "model": served.model.name, "gpu": served.gpu.name, "tp": served.tp,
        "pp": served.layout.pp, "dp": served.layout.dp, "ep": served.layout.ep,
        "moe_tp": served.layout.moe_tp, "dtype": served.dtype, "kv_dtype": served.kv_dtype,
        **served.lora_facts, **served.profile.facts, "tables_hash": served.tables_hash,
        "left_out": getattr(requests, "left_out", {}),
    }  # fmt: skip
    if by_hour:
        if not fewest:
            raise SimulationError("--by-hour goes with --fewest: the fewest replicas of each hour")
        from fastroof.simulation.fewest_replicas import fewest_by_hour

        hourly = fewest_by_hour(served, requests, steady=steady, **settings, **limits)
        if as_json:
            print_json({**facts, **hourly.document()})
        else:
            print_hours(served, hourly)
            print_left_out(requests)
        return
    if fewest:
        from fastroof.simulation.fewest_replicas import fewest_replicas

        few = fewest_replicas(served, requests, steady=steady, **settings, **limits)
        if as_json:
            print_json({**facts, **few.document()})
        else:
            print_fewest(served, few)
            print_left_out(requests)
        return
    from fastroof import capacity as largest_rate

    most = largest_rate(
        served, requests, replicas=replicas, tolerance=tolerance, draws=draws, steady=steady, **settings,
        **limits,
    )  # fmt: skip
    if as_json:
        print_json({**facts, **most.document()})
    else:
        print_capacity(served, most)
        print_left_out(requests)


def _refuse_ignored(what: str, given: dict[str, str]) -> None:
    """Raise if a specification gets options of a model, or a model those of a specification."""
    for name, option in given.items():
        if what.endswith(".toml") and name not in _OF_SPECIFICATION | _OF_BOTH:
            raise SimulationError(f"{option} goes with a model; {what} is a specification, which has its own")
        if not what.endswith(".toml") and name in _OF_SPECIFICATION:
            raise SimulationError(
                f"{option} goes with a specification (.toml), got {what}; --json prints the answer"
            )


def _limits(given: dict[str, float | None], more: str | None) -> dict[str, Any]:
    """Return the limits by name, as capacities name them."""
    limits = {name: most for name, most in given.items() if most is not None}
    for part in more.split(",") if more is not None else ():
        match = _SHORT.fullmatch(part.strip())
        if match is None:
            raise SimulationError(
                f"--slo needs limits in ms like ttft_p90=300,itl_p99=80,e2e_p99_9=10000; got {shown(part)}"
            )
        limits[f"{match[1]}_ms"] = float(match[2])
    return limits


def _of_specification(
    path: Path,
    limits: dict[str, Any],
    given: Path | None,
    run: dict[str, Any],
    as_json: bool,
) -> None:
    """Find the capacities of all deployments of a specification."""
    from fastroof import SweepError, run_sweep
    from fastroof.cli.output import shown_progress
    from fastroof.cli.sweep import print_summary, resumable, say_where
    from fastroof.sweep import CapacitySpec, load_spec

    spec = load_spec(path, {"slo": limits} if limits else None)
    if not isinstance(spec, CapacitySpec):
        raise SweepError(f"{path} has neither [workload] nor [slo]; run it with `fastroof sweep`")
    results = DEFAULT_RESULTS if given is None else given
    if given is None:
        say_where(results, f"the sweep of {path}")
    with resumable(results), shown_progress("capacity", "deployments", quiet=as_json) as shown:
        summary = run_sweep(spec, results, **run, progress=shown)
    print_summary(summary, as_json=as_json, quiet=False)
