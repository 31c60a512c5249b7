"""``kernels-bench allreduce`` and ``collectives``: over several GPUs, one process each."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fastroof.errors import MeasureError
from kernels_bench.command_options import (
    EXIT_INTERRUPTED,
    DeadlineOfPart,
    HostGpu,
    PointsSeed,
    check_deadline,
    listed,
)

if TYPE_CHECKING:
    from fastroof.config.gpu import GpuSpec

GLOO_RANKS: Final = 2


Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the journal and the tables.")]
Gpus = Annotated[str, typer.Option(help="Numbers of GPUs, comma-separated.  [default: 2,4,8 as available]")]
Backend = Annotated[
    str, typer.Option(help="nccl for GPUs, or gloo to test the harness on a CPU with a few small messages.")
]


def collectives(
    output: Output,
    gpus: Gpus = "",
    backend: Backend = "nccl",
    gpu: HostGpu = None,
    deadline: DeadlineOfPart = None,
    seed: PointsSeed = 0,
) -> None:
    """Measure all-gather, reduce-scatter and all-to-all over several GPUs of this host, and write tables.

    `kernels-bench run` does so too at its end where it sees two GPUs or more. OUTPUT may hold such a run,
    or all-reduces: its journal is gone on with, and points that it has are not measured again. Exit codes:
    0 done or at the deadline, 2 an error, 130 interrupted.
    """
    _measure("collective", "collectives", output, gpus, backend, gpu, deadline, seed)


def allreduce(
    output: Output,
    gpus: Gpus = "",
    backend: Backend = "nccl",
    gpu: HostGpu = None,
    deadline: DeadlineOfPart = None,
    seed: PointsSeed = 0,
) -> None:
    """Measure all-reduce over several GPUs of this host, and write the tables that fastroof reads.

    With vllm installed its own all-reduce is measured (mode graph, which plans read), and NCCL always (mode
    nccl), both in CUDA graphs. `kernels-bench run` does so too at its end where it sees two GPUs or more.
    OUTPUT may hold such a run: its journal is gone on with, and points that it has are not measured again.
    Exit codes: 0 done or at the deadline, 2 an error, 130 interrupted.
    """
    _measure("allreduce", "all-reduces", output, gpus, backend, gpu, deadline, seed)


def _measure(
    operator: str,
    words: str,
    output: Path,
    gpus: str,
    backend: str,
    given: str | None,
    deadline_s: float | None,
    seed: int,
) -> None:
    from kernels_bench.commands.run import Reporter, print_report, terminable
    from kernels_bench.journal import find_journals
    from kernels_bench.run.allreduce import measure_allreduce
    from kernels_bench.run.allreduce_points import MODES, points_by_ranks
    from kernels_bench.run.card import measured_gpu, refuse_other_gpu, write_gpu_file
    from kernels_bench.run.facts import run_facts
    from kernels_bench.run.monitor import HostMonitor, open_monitor
    from kernels_bench.run.run_options import RunOptions
    from kernels_bench.run.session import TABLES_RESERVE_S, usable_bytes, write_tables_of

    began_s = monotonic()
    check_deadline(deadline_s)
    if backend not in MODES:
        raise MeasureError(f"unknown backend {backend!r}; there are {', '.join(MODES)}")
    with terminable(), Reporter() as reporter:
        worlds = _worlds(gpus, backend)
        on_cpu = backend == "gloo"
        _need_torch()
        monitor = HostMonitor() if on_cpu else open_monitor()
        card = measured_gpu(given, monitor.facts(), on_cpu)
        refuse_other_gpu(output, card)
        journal, run_id = _journal(output, card)
        points = points_by_ranks(operator, worlds, backend)
        write_gpu_file(output, card, given)
        reporter.start(points, card.title)
        options = RunOptions(
            gpu=card.name,
            run_id=run_id,
            seed=seed,
            deadline_s=None if deadline_s is None else deadline_s - (monotonic() - began_s),
            reserve_s=TABLES_RESERVE_S if deadline_s is not None else 0.0,
            max_bytes=usable_bytes(on_cpu),
            start={"device": "cpu" if on_cpu else "gpu", "providers": ["torch", "vllm"], **run_facts()},
            on_progress=reporter.progress,
            say=reporter.say,
        )
        try:
            report = measure_allreduce(points, backend, monitor, monotonic, journal, options)
        finally:
            if journal.is_file():
                write_tables_of(find_journals(output), output, reporter.say)
    print_report(report, words, journal, output)
    if report.left:
        typer.echo(f"the same command again measures what is left in {output}")
    if report.reason == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def _worlds(given: str, backend: str) -> list[int]:
    from kernels_bench.run.allreduce_points import usable_worlds, visible_gpus

    if bad := [word for word in listed(given) if not word.isdecimal()]:
        raise MeasureError(f"--gpus {bad[0]!r} is not a number of GPUs; use numbers such as 2,4,8")
    wanted = [int(word) for word in listed(given)]
    if backend == "gloo":
        # Ranks on a CPU are as many as one asks for.
        return usable_worlds(wanted or [GLOO_RANKS], max(wanted, default=GLOO_RANKS))
    return usable_worlds(wanted, visible_gpus())


def _need_torch() -> None:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MeasureError(
            f"torch cannot be imported ({error}); collectives need it: pip install 'torch>=2.11'"
        ) from None
    if not dist.is_available():
        raise MeasureError("this torch is built without torch.distributed, which collectives need")


def _journal(output: Path, card: GpuSpec) -> tuple[Path, str]:
    """Return the journal to continue, a new one where the folder has none, and the run's name."""
    from kernels_bench.journal import find_journals, read_journal, starts
    from kernels_bench.output.table_sets import TABLES_FOLDER
    from kernels_bench.run.facts import new_run_id

    for journal in reversed(find_journals(output)):
        if first := starts(read_journal(journal)):
            return journal, str(first[0]["run_id"])
    if (output / TABLES_FOLDER).exists():
        raise MeasureError(f"{output / TABLES_FOLDER} has tables without a journal; give another -o")
    run_id = new_run_id()
    return output / f"journal-{run_id}.jsonl", run_id
