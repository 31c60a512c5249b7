"""``fastroof capacity``: how many requests a second deployments serve within limits on percentiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof._version import __version__
from fastroof.checks import shown
from fastroof.cli.capacity_tables import print_capacity, print_fewest
from fastroof.cli.named_plans import gpu_and_tables
from fastroof.cli.options import (
    ENGINE,
    AllowModelled,
    AsyncScheduling,
    BlockSize,
    ChunkedPrefill,
    Dp,
    Dtype,
    Ep,
    Gpu,
    Json,
    KvDtype,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MemoryFraction,
    Method,
    NumGpuBlocks,
    Order,
    Pp,
    ReserveOutput,
    Routing,
    Runtime,
    Source,
    TablesPath,
    Timeout,
    Tp,
    number_or_engine,
)
from fastroof.cli.output import print_json
from fastroof.cli.workload_options import (
    Arrivals,
    Burstiness,
    Cached,
    Input,
    Limit,
    NumRequests,
    Output,
    Ramp,
    Rate,
    RateScale,
    Seed,
    TraceFile,
    TraceFormat,
    asked_requests,
)
from fastroof.default_runtime import DEFAULT_RUNTIME
from fastroof.errors import SimulationError

if TYPE_CHECKING:
    from fastroof import StepPlan

EPILOG: Final = """\b
Examples:
  fastroof capacity llama-3.1-8b --runtime vllm --ttft-p99 500 --tpot-p99 50 \\
      --num-requests 10000 --input lognormal:1024:0.5 --output 200
  fastroof capacity llama-3.1-70b --tp 4 --runtime vllm --trace mine.csv --slo ttft_p90=300,itl_p99=80
  fastroof capacity llama-3.1-8b --runtime vllm --trace mine.csv --rate-scale 4 --ttft-p99 500 --fewest
  fastroof capacity my.toml -o capacities.parquet --resume

A specification is that of a sweep with [workload] and [slo] instead of a load: every deployment of it is a
row of the results, ranked by requests a second of a GPU. `fastroof sweep` takes it too, with shards and keys
as options. The requests of all rates and deployments are the same: their arrivals are scaled.

\b
JSON of a model: version, model, gpu, tp, dtype, kv_dtype, runtime, tables_hash, requests_per_s (0 where no
rate keeps the limits), requests_per_s_per_gpu, limit (what breaks first beyond it; throughput: arrivals are
faster than what is served; none: all at once keep all), low, high (with steps one standard error longer and
shorter), relative_error, basis, sampling_error, tolerance, replicas, gpus, requests, simulations, at_capacity
(percentiles), simulated: one object a rate [requests_per_s, holds, served_per_s, growth, goodput, and the
percentiles]. With --fewest: replicas, gpus (0 where too many would be needed), limit, requests_per_s,
at_replicas. JSON of a specification: as `fastroof sweep`, best: one object a group.
"""

DEFAULT_RESULTS: Final = Path("capacities.parquet")
_SHORT: Final = re.compile(r"([a-z0-9]+_p[0-9_]+)(?:_ms)?[=:]([0-9]*\.?[0-9]+)")
Most = float | None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("capacity", epilog=EPILOG)(capacity)


def _limit(option: str, what: str) -> Any:
    return typer.Option(option, metavar="MS", help=f"Most that the 99th percentile of {what} may be.")


def capacity(
    what: Annotated[
        str,
        typer.Argument(metavar="MODEL|SPEC.toml", help="A model's name or config.json; or a specification."),
    ],
    ttft_p99: Annotated[Most, _limit("--ttft-p99", "TTFT")] = None,
    tpot_p99: Annotated[Most, _limit("--tpot-p99", "TPOT")] = None,
    e2e_p99: Annotated[Most, _limit("--e2e-p99", "whole requests")] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="LIMITS", help="More limits, ms: ttft_p90=300,itl_p99=80,e2e_p99_9=10000."),
    ] = None,
    trace: TraceFile = None,
    trace_format: TraceFormat = None,
    limit: Limit = None,
    arrivals: Arrivals = None,
    burstiness: Burstiness = None,
    ramp: Ramp = None,
    num_requests: NumRequests = None,
    input: Input = None,
    output: Output = None,
    cached: Cached = None,
    seed: Seed = None,
    draws: Annotated[
        int, typer.Option(min=1, help="Draw so often, to see what chance does to the answer.")
    ] = 1,
    gpu: Gpu = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    ep: Ep = 1,
    routing: Routing = None,
    allow_modelled: AllowModelled = False,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    runtime: Runtime = DEFAULT_RUNTIME,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas that share the requests.")] = 1,
    router: Annotated[
        str, typer.Option(help="How they do: round_robin, least_outstanding, least_load, least_kv, ...")
    ] = "round_robin",
    fewest: Annotated[
        bool,
        typer.Option("--fewest", help="Find the fewest replicas at the requests' own rate instead."),
    ] = False,
    rate: Rate = None,
    rate_scale: RateScale = None,
    max_num_batched_tokens: MaxNumBatchedTokens = ENGINE,
    max_num_seqs: MaxNumSeqs = ENGINE,
    num_gpu_blocks: NumGpuBlocks = None,
    block_size: BlockSize = ENGINE,
    memory_fraction: MemoryFraction = None,
    async_scheduling: AsyncScheduling = None,
    order: Order = None,
    chunked_prefill: ChunkedPrefill = None,
    reserve_output: ReserveOutput = None,
    timeout: Timeout = None,
    tolerance: Annotated[float, typer.Option(help="How near the rate is searched for, relative.")] = 0.01,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            "-o",
            help="Of a specification: .parquet, .csv or .jsonl.  [default: capacities.parquet]",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads.  [default: all processors]")] = None,
    engine: Annotated[str, typer.Option(help="Of a specification: where it runs, local or ray.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster: auto, host:port.  [default: start one here]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Drop what such a run has done.")] = False,
    as_json: Json = False,
    tables: TablesPath = None,
    source: Source = None,
    method: Method = "roofline",
) -> None:
    """Find the most requests a second within percentiles.

    The same requests are simulated at one rate after the other, until the largest is found at which
    percentiles of TTFT, TPOT, ITL and E2E keep their limits: of one deployment, or of all of a specification.
    """
    from fastroof.processors import usable_processors

    workers = threads or usable_processors()
    limits = _limits({"ttft_p99_ms": ttft_p99, "tpot_p99_ms": tpot_p99, "e2e_p99_ms": e2e_p99}, slo)
    if what.endswith(".toml"):
        _of_specification(Path(what), limits, results, engine, address, workers, resume, restart, as_json)
        return
    if rate is not None and not fewest:
        raise SimulationError("--rate goes with --fewest: without it the rate is what is searched for")
    asked = asked_requests(
        trace=trace, trace_format=trace_format, limit=limit, rate_scale=rate_scale, rate=rate,
        arrivals=arrivals, burstiness=burstiness, ramp=ramp, num_requests=num_requests, input=input,
        output=output, cached=cached, seed=seed,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "max_num_batched_tokens": number_or_engine("--max-num-batched-tokens", max_num_batched_tokens),
        "max_num_seqs": number_or_engine("--max-num-seqs", max_num_seqs),
        "block_size": number_or_engine("--block-size", block_size),
        "num_gpu_blocks": num_gpu_blocks,
        "async_scheduling": async_scheduling,
        "order": order,
        "chunked_prefill": chunked_prefill,
        "reserve_output": reserve_output,
        "timeout_s": timeout,
    }
    split = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "routing": routing}
    formats = {"dtype": dtype, "kv_dtype": kv_dtype, "memory_fraction": memory_fraction, "method": method}
    plan = _plan(
        what, (gpu, tables, source), runtime, settings, {**split, **formats, "allow_modelled": allow_modelled}
    )
    facts = {
        "version": __version__, "model": plan.model.name, "gpu": plan.gpu.name, "tp": plan.tp,
        "dtype": plan.dtype, "kv_dtype": plan.kv_dtype, "runtime": plan.runtime,
        "tables_hash": plan.tables_hash,
    }  # fmt: skip
    if fewest:
        from fastroof.simulation.capacity_search import fewest_replicas

        few = fewest_replicas(plan, asked, routing=router, threads=workers, **settings, **limits)
        if as_json:
            print_json({**facts, **few.document()})
        else:
            print_fewest(plan, few)
        return
    from fastroof import capacity as largest_rate

    most = largest_rate(
        plan, asked, replicas=replicas, routing=router, tolerance=tolerance, draws=draws, threads=workers,
        **settings, **limits,
    )  # fmt: skip
    if as_json:
        print_json({**facts, **most.document()})
    else:
        print_capacity(plan, most)


def _limits(given: dict[str, float | None], more: str | None) -> dict[str, Any]:
    """Limits by the names that capacities have."""
    limits = {name: most for name, most in given.items() if most is not None}
    for part in more.split(",") if more is not None else ():
        match = _SHORT.fullmatch(part.strip())
        if match is None:
            raise SimulationError(
                f"--slo needs limits in ms like ttft_p90=300,itl_p99=80,e2e_p99_9=10000; got {shown(part)}"
            )
        limits[f"{match[1]}_ms"] = float(match[2])
    return limits


def _plan(
    model: str,
    measured: tuple[str | None, str | None, str | None],
    runtime: str,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> StepPlan:
    """Compile a plan for the steps that the engine makes."""
    from fastroof import compile_plan
    from fastroof.engines import load_engine

    spec, tables = gpu_and_tables(*measured)
    profile = load_engine(runtime)
    own = profile.scheduling
    seqs = settings["max_num_seqs"] or own.max_num_seqs
    tokens = settings["max_num_batched_tokens"] or own.max_num_batched_tokens
    return compile_plan(
        model, spec, tables, runtime=profile, max_tokens=max(tokens, seqs), max_seqs=seqs, **options
    )


def _of_specification(
    path: Path,
    limits: dict[str, Any],
    given: Path | None,
    engine: str,
    address: str | None,
    threads: int,
    resume: bool,
    restart: bool,
    as_json: bool,
) -> None:
    """Find the capacities of all deployments of a specification."""
    from fastroof import SweepError, run_sweep
    from fastroof.cli.output import shown_progress
    from fastroof.cli.sweep import print_summary, resumable, say_where
    from fastroof.sweep import CapacitySpec, load_spec

    spec = load_spec(path, {"slo": limits} if limits else None)
    if not isinstance(spec, CapacitySpec):
        raise SweepError(
            f"{path} has neither [workload] nor [slo], which say what is served and within which "
            "percentiles: it is one of `fastroof sweep`"
        )
    results = DEFAULT_RESULTS if given is None else given
    if given is None:
        say_where(results, f"the sweep of {path}")
    with resumable(results), shown_progress("capacity", "deployments", quiet=as_json) as shown:
        summary = run_sweep(
            spec, results, engine, threads=threads, address=address, resume=resume, restart=restart,
            progress=shown,
        )  # fmt: skip
    print_summary(summary, as_json=as_json, quiet=False)
