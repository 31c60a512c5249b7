"""``kernels-bench smoke``: does measuring work on this host at all, within a minute."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kernels_bench.command_options import check_deadline, listed

if TYPE_CHECKING:
    from kernels_bench.protocol import Monitor, Point, Provider, Timer

EXIT_FAILED: Final = 1
DEADLINE_S: Final = 60.0

Record = Mapping[str, Any]


def smoke(
    providers: Annotated[
        str, typer.Option(help="Providers, comma-separated.  [default: all that work, except cpu]")
    ] = "",
    deadline: Annotated[float, typer.Option(help="Begin no point after this many seconds.")] = DEADLINE_S,
) -> None:
    """Check and time one point an operator with every provider that works here; save nothing.

    Each result is printed as soon as it is measured, one line each; the line ends with ok if the point
    agrees with its reference.

    Exit codes: 0 all agree with their references, 1 a check failed or a kernel did, 2 an error.
    """
    from kernels_bench.grid.grid import load_grid
    from kernels_bench.run.card import CPU
    from kernels_bench.run.monitor import HostMonitor, open_monitor
    from kernels_bench.run.request import choose_providers
    from kernels_bench.run.timing import CpuTimer, GraphTimer

    check_deadline(deadline)
    started_s = monotonic()
    answers = choose_providers(listed(providers))
    on_cpu = answers[0][0].name == CPU
    points = _one_each(load_grid("cpu" if on_cpu else "smoke").points())
    monitor: Monitor = HostMonitor() if on_cpu else open_monitor()
    timer: Timer = CpuTimer() if on_cpu else GraphTimer()
    records: list[Record] = []
    for provider, _ in answers:
        left_s = deadline - (monotonic() - started_s)
        if left_s <= 0:
            typer.echo(f"{provider.name}: not reached within {deadline:g} s", err=True)
            continue
        records += _smoke_one(provider, points, timer, monitor, left_s)
    rows = [r for r in records if r["type"] == "row"]
    bad = [r for r in records if r["type"] == "skip" and r["kind"] in ("reference", "error")]
    typer.echo(
        f"{len(rows)} points agree, {len(bad)} failed, {len(records) - len(rows) - len(bad)} skipped "
        f"in {monotonic() - started_s:.1f} s"
    )
    if bad or not rows:
        raise typer.Exit(EXIT_FAILED)


def _one_each(points: list[Point]) -> list[Point]:
    """Keep one point of each operator, kind and dtype."""
    kept: dict[tuple[Any, ...], Point] = {}
    for point in points:
        words = tuple(value for value in point.values.values() if isinstance(value, str))
        kept.setdefault((point.operator, *words), point)
    return list(kept.values())


def _smoke_one(
    provider: Provider, points: list[Point], timer: Timer, monitor: Monitor, left_s: float
) -> list[Record]:
    """Measure with one provider alone, print each row and skip, and return them."""
    from kernels_bench.journal import read_journal
    from kernels_bench.run.run_options import RunOptions
    from kernels_bench.run.runner import measure
    from kernels_bench.run.session import usable_bytes

    mine = [point for point in points if provider.refuses(point) is None]
    if not mine:
        return []
    printed: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal-smoke.jsonl"

        def print_new(_: object) -> None:
            records = [r for r in read_journal(journal) if r["type"] in ("row", "skip")]
            for record in records[len(printed) :]:
                typer.echo(f"{provider.name:<10}  {_line(record)}")
                printed.append(record)

        options = RunOptions(
            gpu="smoke",
            run_id=provider.name,
            deadline_s=left_s,
            max_bytes=usable_bytes(on_cpu=provider.name == "cpu"),
            on_progress=print_new,
            say=lambda sentence: typer.echo(sentence, err=True),
        )
        report = measure(mine, [provider], timer, monitor, monotonic, journal, options)
    if report.left:
        typer.echo(f"{provider.name}: {report.left} points left: {report.reason}", err=True)
    return printed


def _line(record: Record) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in record["values"].items() if value)
    point = f"{record['operator']:<24}"
    if record["type"] == "skip":
        return f"{point}  {sizes}  {record['kind']}: {record['reason']}"
    times = (
        f"{record['latency_us']:10.2f} us ({record['p25_us']:.2f} to {record['p75_us']:.2f}, "
        f"{record['num_replays']} replays)"
    )
    return f"{point}  {times}  {record['kernel']}  {sizes}  ok"
