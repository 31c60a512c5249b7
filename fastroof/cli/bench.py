"""``fastroof bench``: how fast fastroof is on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fastroof.cli.gpu_tables import measured_tables
from fastroof.cli.options import GPU_NAMES, Json, Model, TablesPath
from fastroof.cli.output import print_facts, print_json, print_line, print_records
from fastroof.defaults import DEFAULT_GPU
from fastroof.errors import FastroofError
from fastroof.units import GB, MS_PER_S

if TYPE_CHECKING:
    from fastroof import Tables
    from fastroof.bench.timing import BenchReport, Measured
    from fastroof.bench.workload import Setup, Workload

LOOKUP: Final = "lookup"
NAMES: Final = (
    "decode", "prefill", "ragged-decode", "ragged-mixed", "sweep", "sweep-best", "scalar",
    "scalar-callable", "one-row", "one-step", "plan", "plans", "pack", "import", "command",
)  # fmt: skip

EPILOG: Final = """\b
Examples:
  fastroof bench
  fastroof bench decode ragged-mixed --threads 4
  fastroof bench lookup --json > lookups.json

\b
Workloads:
  decode, prefill              arrays of steps of equal requests
  ragged-decode, ragged-mixed  steps of about 64 requests; mixed ones hold two prefill chunks
  sweep, sweep-best            plans x batches x lengths, written out, or the best batch kept
  scalar, scalar-callable      one step a call: plan.decode_us, and the callable plan.scalar
  one-row, one-step            one step a call, through arrays and as a ragged step
  plan, plans, pack            plans from curves that exist, 10,000 of them, tables packed
  import, command              a fresh process
  lookup                       every operator of every source of the tables, by every method

\b
Each runs once to warm up ("first call", with compilation or the loading of compiled loops), then
--repeat rounds by turns with its baselines; medians count. "of stream" is the rate as a share of that of
a compiled loop, on one thread, that only moves the same bytes; "x NumPy" how many times as fast as a
NumPy version, whose answers are checked against fastroof's.

\b
JSON: machine [cpu, cores, load_average_before, load_average_after], versions {name: version}, settings
[model, gpu, threads, rounds, quick], results: one object a workload [name, title, unit, count,
first_call_s, rounds_s, ns_per_unit, units_per_s, bytes_per_unit, bytes_per_s, baseline_ns_per_unit
{baseline: ns}, times_as_fast_as {baseline: ratio}].
"""


def bench(
    workload: Annotated[
        list[str] | None, typer.Argument(metavar="WORKLOAD", help="What to time.  [default: all but lookup]")
    ] = None,
    model: Model = "llama-3.1-8b",
    gpu: Annotated[
        str | None,
        typer.Option(*GPU_NAMES, help="GPU (see fastroof gpus).  [default: h100]", show_default=False),
    ] = None,
    tables: TablesPath = None,
    threads: Annotated[int, typer.Option(help="Number of threads for fastroof; baselines use one.")] = 1,
    repeat: Annotated[int, typer.Option(help="Number of rounds after the first call.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, only to try it.")] = False,
    as_json: Json = False,
) -> None:
    """Time fastroof on this machine."""
    names = _chosen(workload or list(NAMES))
    from fastroof.bench.timing import report_document, run_workloads
    from fastroof.bench.workload import new_setup

    spec, measured = measured_tables(gpu, tables, None)
    setup = new_setup(model, spec, measured, threads=threads, quick=quick)
    where = tables or gpu or DEFAULT_GPU
    report = run_workloads(setup, _workloads(names, setup, where), repeat, progress=_say)
    _say("")
    if as_json:
        print_json(report_document(report))
    else:
        _print(report)


def _chosen(names: list[str]) -> list[str]:
    """Check the names of workloads, each once."""
    unknown = [name for name in names if name not in (*NAMES, LOOKUP)]
    if unknown:
        if unknown[0].endswith(".json"):
            raise FastroofError(f"--json prints to standard output and takes no file: --json > {unknown[0]}")
        raise FastroofError(f"unknown workload {unknown[0]!r}: use {', '.join(NAMES)} or {LOOKUP}")
    return list(dict.fromkeys(names))


def _workloads(names: list[str], setup: Setup, where: str) -> Iterator[Workload]:
    from fastroof.bench.lookups import lookup_workloads
    from fastroof.bench.workloads import WORKLOADS

    for name in names:
        if name == LOOKUP:
            yield from lookup_workloads(setup, _sources(where))
        else:
            yield WORKLOADS[name](setup)


def _sources(where: str) -> dict[str, Tables]:
    """Return the tables of every source by name."""
    from fastroof.load.listing import table_sets
    from fastroof.tables import Tables

    loaded = [table_set.load() for table_set in table_sets(where)]
    return {next(iter(measured.sources.values())): Tables(measured, measured.gpu_spec) for measured in loaded}


def _say(name: str) -> None:
    """Show the running workload on one line of a terminal."""
    if sys.stderr.isatty():
        typer.echo(f"\r\033[K{name}", nl=False, err=True)


def _print(report: BenchReport) -> None:
    from fastroof.bench.timing import rate_of, time_of_ns

    machine, settings = report.machine, report.settings
    sizes = " (quick: sizes too small for figures)" if settings["quick"] else ""
    facts = {
        "machine": f"{machine.cpu}, {machine.cores} cores",
        "load": f"{machine.load_average:.2f} before, {report.load_average_after:.2f} after",
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "plan": f"{settings['model']} on {settings['gpu']}, threads {settings['threads']}",
        "rounds": f"{settings['rounds']}, medians{sizes}",
    }
    print_facts(facts)
    print_line()
    baselines = list(dict.fromkeys(name for one in report.results for name in one.baseline_ns))
    streams = any(one.workload.bytes_per_unit for one in report.results)
    columns: dict[str, Callable[[Measured], str]] = {
        "workload": lambda one: one.workload.name,
        "what": lambda one: one.workload.title,
        "time a unit": lambda one: f"{time_of_ns(one.ns_per_unit)} a {one.workload.unit}",
        "units/s": lambda one: rate_of(one.units_per_s),
    }
    if streams:
        columns["GB/s"] = lambda one: f"{one.bytes_per_s / GB:.2f}" if one.workload.bytes_per_unit else ""
    for name in baselines:
        columns["of stream" if name == "stream" else f"x {name}"] = partial(_ratio_words, name)
    columns["first call ms"] = lambda one: f"{one.first_s * MS_PER_S:,.0f}"
    print_records(report.results, columns, left=("workload", "what"))


def _ratio_words(baseline: str, one: Measured) -> str:
    from fastroof.bench.timing import share_of

    ratio = one.ratios.get(baseline)
    return "" if ratio is None else share_of(ratio) if baseline == "stream" else f"{ratio:,.3g}"
