"""The table of benchmarks/README.md, measured here and now: ``python -m benchmarks.table``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import fastroof
from benchmarks import cases
from fastroof.bench.timing import Machine, Measured, measure, share_of, this_machine, time_of_ns
from fastroof.bench.workload import Setup, Workload, new_setup
from fastroof.bench.workloads import WORKLOADS
from fastroof.units import GB

ABSENT = "not installed"
README = Path(__file__).with_name("README.md")


class Row(NamedTuple):
    """One line: its name on the command line, what is asked for, what limits it, and how it is built."""

    name: str
    target: str
    limit: str
    build: Callable[[Setup], Workload]
    whole: bool = False
    """Whether the target is for all units of a call rather than for one."""


def _lookup(operator: str) -> Callable[[Setup], Workload]:
    return partial(cases.lookup, operator=operator)


PEERS = ">= 10 x scipy, ahead of interpn"

ROWS = (
    Row("decode", ">= 55 % of stream, >= 100 x NumPy", "gathers of two axes, and the checks", cases.decode),
    Row("decode-int64", "-", "the same, with 24 bytes a step", cases.decode_int64),
    Row("prefill", "-", "as decode, with a quadratic weight and a prefix", WORKLOADS["prefill"]),
    Row(
        "ragged-decode",
        ">= 50 % of stream",
        "the sums over a step, one lookup a step",
        WORKLOADS["ragged-decode"],
    ),
    Row("ragged-decode-int64", ">= 50 % of stream", "the same, with 16 bytes a request", cases.ragged_int64),
    Row(
        "ragged-mixed",
        ">= 45 % of stream, >= 15 x NumPy",
        "six integer sums a request",
        WORKLOADS["ragged-mixed"],
    ),
    Row("sweep", ">= 3 x NumPy", "instructions a step, and writing its 8 bytes", WORKLOADS["sweep"]),
    Row("sweep-best", ">= 10 x NumPy", "instructions a step, and one comparison", WORKLOADS["sweep-best"]),
    *(
        Row(f"{name}-windowed", target, limit, partial(cases.windowed, name=name))
        for name, target, limit in (
            ("decode", ">= 0.9 x the plan without", "the same table of lines"),
            ("prefill", "-", "the pairs of each chunk with its prefix, of two kinds of layers"),
            ("ragged-decode", "-", "a sum more a request, an axis and two cells more a step"),
            ("ragged-mixed", "-", "a sum more a request, four more a chunk, up to five cells more a step"),
            ("sweep-best", ">= 0.9 x the plan without", "instructions a step, and one comparison"),
        )
    ),
    Row("gemm", PEERS, "three axes of scattered (n, k), MFU and origin", _lookup("gemm")),
    Row("attention_decode", PEERS, "checks, MFU and origin around the lookup", _lookup("attention_decode")),
    Row("attention_prefill", PEERS, "as decode, and the price of a prefix", _lookup("attention_prefill")),
    Row("plans", "< 50 ms, < 200 MB", "Python's work a plan", WORKLOADS["plans"], whole=True),
    Row("plan", "< 300 us", "summing operators over 8193 token counts", WORKLOADS["plan"]),
    Row("pack", "-", "sorting and padding measured rows, once a process", WORKLOADS["pack"]),
    Row("scalar", "< 1.5 us", "Python's checks of two ints", WORKLOADS["scalar"]),
    Row("scalar-callable", "<= 120 ns", "a Python call and two conversions", WORKLOADS["scalar-callable"]),
    Row("one-row", "< 5 us", "NumPy's checks of two arrays", WORKLOADS["one-row"]),
    Row("one-step", "-", "the call of a compiled loop", WORKLOADS["one-step"]),
    Row(
        "decode-threads",
        ">= 1.8 x one thread",
        "memory, which all cores share",
        partial(cases.in_threads, name="decode"),
    ),
    Row("sweep-best-threads", ">= 3 x one thread", "starting threads, uneven rows", cases.sweep_in_threads),
    Row("command", "< 1.0 s", "importing numba, loading tables and loops", WORKLOADS["command"]),
    Row("import", "< 60 ms", "Python's imports", WORKLOADS["import"]),
    Row("aiconfigurator-steps", "-", "that engine takes one step a call", cases.aiconfigurator_steps),
    Row("aiconfigurator-gemms", "-", "that engine takes one GEMM a call", cases.aiconfigurator_gemms),
)


def lines(setup: Setup, rounds: int, names: list[str]) -> Iterator[str]:
    """The table in Markdown, each line when it is measured; without names every workload."""
    yield "| work | target | measured | baselines | what limits it |"
    yield "|---|---|---|---|---|"
    for row in ROWS:
        if names and row.name not in names:
            continue
        try:
            workload = row.build(setup)
        except ImportError as error:
            yield f"| {error.name} | - | {ABSENT} | - | - |"
            continue
        done = measure(workload, rounds)
        cells = (workload.title, row.target, _measured(done, row.whole), _baselines(done), row.limit)
        yield f"| {' | '.join(cells)} |"


def _measured(done: Measured, whole: bool) -> str:
    words = [f"{time_of_ns(done.ns_per_unit)} a {done.workload.unit}"]
    if whole:
        words = [f"{time_of_ns(done.ns_per_unit * done.workload.count)}, {words[0]}"]
    for name, ratio in done.ratios.items():
        words.append(f"**{share_of(ratio)}** of stream" if name == "stream" else f"**{ratio:,.3g} x** {name}")
    return ", ".join(words)


def _baselines(done: Measured) -> str:
    words = [f"{name} {time_of_ns(ns)}" for name, ns in done.baseline_ns.items()]
    if "stream" in done.baseline_ns:
        moved = done.workload.bytes_per_unit
        rate = moved / done.baseline_ns["stream"]
        words.append(f"{moved:.3g} B a {done.workload.unit}, stream {rate * 1e9 / GB:.0f} GB/s")
    return ", ".join(words) or "-"


def print_table(
    parser: argparse.ArgumentParser,
    known: Sequence[str],
    table: Callable[[Setup, int, list[str]], Iterator[str]],
    page: Path,
    mark: str,
    rounds: int,
    how: str,
) -> None:
    """Print a table as it is measured, then the machine and how; ``--write`` puts them into a page."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default all")
    parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds after the first call")
    parser.add_argument("--quick", action="store_true", help="small sizes: a try, no figures")
    parser.add_argument("--write", action="store_true", help=f"put the table into {page.name}")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; valid names are {', '.join(known)}")
    if options.write and (options.quick or options.names):
        parser.error("--write is for the whole table, measured at full size")
    setup = new_setup("llama-3.1-8b", "h100", fastroof.load_tables("h100"), quick=options.quick)
    before = this_machine()
    printed = []
    for line in table(setup, options.rounds, options.names):
        print(line, flush=True)
        printed.append(line)
    where = f"{where_measured(before)}; {how.format(rounds=options.rounds)}"
    print(f"\n{where}")
    if options.write:
        write_between(page, "\n".join([*printed, "", *textwrap.wrap(where, 115)]), mark)


def main() -> None:
    """Print the table and the machine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    how = "medians of {rounds} rounds, baselines by turns with the work; one thread where none are named."
    print_table(parser, [row.name for row in ROWS], lines, README, "table", 7, how)


def where_measured(before: Machine) -> str:
    """Name the machine, the versions, and its load before and now."""
    versions = ", ".join(f"{name} {version}" for name, version in before.versions.items())
    load = f"load {before.load_average:.2f} before and {this_machine().load_average:.2f} after"
    return f"{before.cpu}, {before.cores} cores; {versions}; {load}"


def write_between(page: Path, table: str, mark: str) -> None:
    """Put a table between its marks in a page: the comments ``mark`` and ``/mark``."""
    start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} has no marks {start} and {end}")
    page.write_text(f"{before}{start}\n{table}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
