"""From a request to tables: what works here, which GPU it is, the journal, the run, the tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from fastroof.config.gpu import GPU_FILE, GpuSpec
from fastroof.errors import MeasureError
from fastroof.units import GIB
from kernels_bench.journal import done_keys, find_journals, read_journal, starts
from kernels_bench.operators.communication import BY_RANKS
from kernels_bench.output.table_sets import TABLES_FOLDER
from kernels_bench.protocol import Availability, Clock, Monitor, Point, Provider, Timer
from kernels_bench.run.card import CPU, measured_gpu, refuse_other_gpu, write_gpu_file
from kernels_bench.run.facts import new_run_id, run_facts
from kernels_bench.run.request import Request, choose_providers
from kernels_bench.run.run_options import Progress, RunOptions, RunReport, measuring_order
from kernels_bench.sentinels import sentinel_points

if TYPE_CHECKING:
    from kernels_bench.grid.grid import Grid

TABLES_RESERVE_S: Final = 3.0
"""Kept before a deadline for writing tables."""
USABLE_MEMORY: Final = 0.85
HOST_BYTES: Final = GIB
COLLECTIVES_SHARE: Final = 0.1
"""Of the time until a deadline, reserved for collectives if there are several GPUs."""


def run_request(
    request: Request,
    folder: Path,
    *,
    resume: Path | None = None,
    deadline_s: float | None = None,
    on_start: Callable[[Sequence[Point], str], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[RunReport, Path]:
    """Measure the requested points and write the tables."""
    # what only a run needs is imported when one begins
    from kernels_bench.grid.grid import load_grid
    from kernels_bench.run.monitor import HostMonitor, open_monitor
    from kernels_bench.run.runner import measure
    from kernels_bench.run.timing import CpuTimer, GraphTimer

    clock = monotonic
    started_s = clock()
    grid = load_grid(request.grid)
    answers = choose_providers(request.providers)
    providers = [provider for provider, _ in answers]
    on_cpu = any(provider.name == CPU for provider in providers)
    monitor: Monitor = HostMonitor() if on_cpu else open_monitor()
    given = request.gpu
    if resume is not None and given is not None and given.endswith(".toml"):
        given = str(folder / GPU_FILE)  # the copy: the path may have been relative
    gpu = measured_gpu(given, monitor.facts(), on_cpu)
    journal, run_id = _journal(folder, gpu, grid, resume)
    points, taken = _points(grid, request, gpu, providers, on_cpu, say)
    points, collectives = _collectives(points, request, on_cpu, say)
    # what is done does not pay for the first calls of this process
    done = set() if resume is None else done_keys(read_journal(resume))
    # before anything is written: without CUDA there is nothing to write
    timer: Timer = CpuTimer() if on_cpu else GraphTimer()
    write_gpu_file(folder, gpu, given)
    if on_start is not None:
        on_start(points, gpu.title)
    spent_s = clock() - started_s
    left_s = None if deadline_s is None else deadline_s - spent_s
    for_collectives_s = COLLECTIVES_SHARE * left_s if left_s is not None and collectives else 0.0
    options = RunOptions(
        gpu=gpu.name,
        run_id=run_id,
        seed=request.seed,
        deadline_s=left_s,
        reserve_s=TABLES_RESERVE_S + for_collectives_s if deadline_s is not None else 0.0,
        max_bytes=usable_bytes(on_cpu),
        sentinels=tuple(grid.sentinels()) or sentinel_points(tiny=on_cpu),
        estimate_s=_estimates([p for p in points if p.key in taken - done], request.seed, gpu, on_cpu),
        start=_start_facts(request, grid, answers, on_cpu),
        on_progress=on_progress,
        say=say,
    )
    report = measure(points, providers, timer, monitor, clock, journal, options)
    try:
        if collectives:
            spent_s = clock() - started_s
            options = replace(
                options,
                deadline_s=None if deadline_s is None else deadline_s - spent_s,
                reserve_s=TABLES_RESERVE_S if deadline_s is not None else 0.0,
            )
            report = _measure_collectives(report, collectives, monitor, clock, journal, options)
    finally:
        write_tables_of([journal], folder, say)
    return report, journal


def _collectives(
    points: Sequence[Point], request: Request, on_cpu: bool, say: Callable[[str], None]
) -> tuple[list[Point], list[Point]]:
    """Part the points into those of one GPU and the collectives that the GPUs here can measure."""
    from kernels_bench.run.allreduce_points import points_by_ranks, usable_worlds, visible_gpus

    given = [p for p in points if p.operator in BY_RANKS]
    alone = [p for p in points if p.operator not in BY_RANKS]
    wanted = [name for name in BY_RANKS if not request.only or name in request.only]
    if on_cpu or not wanted:
        return list(points), []
    num_gpus = visible_gpus()
    if num_gpus < 2:
        say(
            "all-reduce is left to another source, other collectives too: "
            f"they need two GPUs or more, torch sees {num_gpus} here"
        )
        return alone, []
    if not given:
        worlds = usable_worlds((), num_gpus)
        return alone, [point for name in wanted for point in points_by_ranks(name, worlds)]
    fitting = [p for p in given if p.values["num_gpus"] <= num_gpus]
    if len(fitting) < len(given):
        say(
            f"{len(given) - len(fitting)} collectives of the grid need more than the {num_gpus} GPUs here "
            "and are left to another source"
        )
    return alone, fitting


def _measure_collectives(
    before: RunReport,
    points: Sequence[Point],
    monitor: Monitor,
    clock: Clock,
    journal: Path,
    options: RunOptions,
) -> RunReport:
    from kernels_bench.run.allreduce import joined, measure_allreduce

    if before.reason in ("interrupted", "device lost"):
        return replace(before, left=before.left + len(points))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()  # the first rank shares this process's GPU
    return joined(before, measure_allreduce(points, "nccl", monitor, clock, journal, options))


def write_tables_of(journals: Sequence[Path], folder: Path, say: Callable[[str], None]) -> None:
    """Write the tables of an output folder's journals, where they have any row."""
    from kernels_bench.output.tables import write_tables

    if not any(record["type"] == "row" for journal in journals for record in read_journal(journal)):
        say(f"no point was measured, so there are no tables; reasons: {', '.join(map(str, journals))}")
        return
    written = write_tables(journals, folder / TABLES_FOLDER, overwrite=True)
    for key, why in written.left_out.items():
        say(f"left out of the tables, too fast to be true: {key}: {why}")


def _points(
    grid: Grid,
    request: Request,
    gpu: GpuSpec,
    providers: Sequence[Provider],
    on_cpu: bool,
    say: Callable[[str], None],
) -> tuple[list[Point], set[str]]:
    """Return the requested points within the budget, and the keys of those that a provider here takes.

    Other points stay: they cost no time, and the journal states why they have no row.
    """
    from kernels_bench.grid.estimate import fit_budget, unfit

    points = grid.points()
    if request.only:
        # Collectives have default points if the grid gives none.
        have = sorted({p.operator for p in points} | (set() if on_cpu else set(BY_RANKS)))
        unknown = [name for name in request.only if name not in have]
        if unknown:
            raise MeasureError(f"--only {', '.join(unknown)}: grid {grid.name} has {', '.join(have)}")
        points = [p for p in points if p.operator in request.only]
    taken = {point.key for point in points if _is_taken(point, providers)}
    if request.budget_s is not None:
        if on_cpu:
            raise MeasureError("a budget is reckoned with a GPU's rates; pass --deadline on a CPU")
        beyond = {point.key for point, _ in unfit(points, gpu)}
        fitting = [point for point in points if point.key not in beyond]
        costing = [point for point in fitting if point.key in taken]
        _, dropped = fit_budget(costing, gpu, request.budget_s)
        say(
            f"the budget of {request.budget_s:g} s drops {len(dropped):,} points, {len(beyond):,} "
            f"cannot be measured on {gpu.title}, {len(fitting) - len(costing):,} are taken by no provider "
            "here and cost nothing; kernels-bench plan lists the first two"
        )
        left_out = {point.key for point in dropped}
        points = [point for point in fitting if point.key not in left_out]
    return points, taken


def _is_taken(point: Point, providers: Sequence[Provider]) -> bool:
    """Whether a provider here takes a point; of collectives, whether there are as many GPUs."""
    from kernels_bench.run.allreduce_points import visible_gpus
    from kernels_bench.run.runner import refusal

    if point.operator in BY_RANKS:
        return visible_gpus() >= max(2, int(point.values["num_gpus"]))
    return any(refusal(provider, point) is None for provider in providers)


def _estimates(points: Sequence[Point], seed: int, gpu: GpuSpec, on_cpu: bool) -> Callable[[Point], float]:
    """Return seconds by point, 0 for others; on a CPU all alike, which the run's own pace then corrects."""
    from kernels_bench.grid.estimate import estimate_all, first_call_seconds

    if on_cpu:
        return lambda _: 0.02
    ordered = measuring_order(points, seed)
    seconds = {
        point.key: one.seconds + first_s
        for point, one, first_s in zip(
            ordered, estimate_all(ordered, gpu), first_call_seconds(ordered), strict=True
        )
    }
    return lambda point: seconds.get(point.key, 0.0)


def _journal(folder: Path, gpu: GpuSpec, grid: Grid, resume: Path | None) -> tuple[Path, str]:
    """Return the journal to write and the run's name; refuse a folder that is not free for it."""
    refuse_other_gpu(folder, gpu)
    if resume is not None:
        first = starts(read_journal(resume))[0]
        if first.get("grid_sha256") != grid.sha256:
            raise MeasureError(
                f"grid {grid.path} is not what {resume} began with (SHA-256 {first.get('grid_sha256')}); "
                "put the old one back, or run the new one with another -o"
            )
        return resume, str(first["run_id"])
    journals = find_journals(folder)
    if journals:
        raise MeasureError(
            f"{folder} holds the run {journals[-1].name}: `kernels-bench resume {folder}` continues it; "
            "a new run needs another -o, and kernels-bench merge joins several"
        )
    if (folder / TABLES_FOLDER).exists():
        raise MeasureError(f"{folder / TABLES_FOLDER} has tables without a journal; give another -o")
    run_id = new_run_id()
    return folder / f"journal-{run_id}.jsonl", run_id


def usable_bytes(on_cpu: bool) -> int:
    """Return the bytes that the inputs of one point may take on the device, or on the host."""
    if on_cpu:
        return HOST_BYTES
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes * USABLE_MEMORY)


def _start_facts(
    request: Request, grid: Grid, answers: Sequence[tuple[Provider, Availability]], on_cpu: bool
) -> dict[str, Any]:
    given = request.grid
    # what finds the grid again from any working directory
    place = given if given is None or not Path(given).is_file() else str(grid.path.resolve())
    return {
        "device": CPU if on_cpu else "gpu",
        "providers": [provider.name for provider, _ in answers],
        "grid": grid.name,
        "grid_title": grid.title,
        "grid_sha256": grid.sha256,
        "request": asdict(replace(request, grid=place)),
        **run_facts(answers),
    }
