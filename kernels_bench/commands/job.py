"""``kernels-bench job``: job files for Slurm and Kubernetes, and following what they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fastroof.atomic_files import write_whole
from fastroof.errors import MeasureError
from kernels_bench.command_options import EXIT_INTERRUPTED
from kernels_bench.jobs.job_files import MOUNT, JobOptions, render_kubernetes, render_slurm
from kernels_bench.jobs.submit import Ended, submit_kubernetes, submit_slurm

SECONDS_PER_MINUTE = 60

Name = Annotated[str, typer.Option(help="Name of the job.")]
Gpus = Annotated[int, typer.Option(help="GPUs of the job; more than one measures all-reduce too.")]
Cpus = Annotated[int, typer.Option(help="CPU cores of the job.")]
Memory = Annotated[int, typer.Option(help="Host memory of the job, GiB.")]
Time = Annotated[int, typer.Option("--time", help="Time limit of the job, minutes.")]
Budget = Annotated[int | None, typer.Option(help="Seconds to measure.  [default: the whole grid]")]
Grid = Annotated[str, typer.Option(help="Grid, by name or by its path inside the job.")]
Rest = Annotated[list[str] | None, typer.Argument(help="Further arguments of kernels-bench run, after --.")]
File = Annotated[Path | None, typer.Option("-o", help="Write the job file here instead of printing it.")]
Submit = Annotated[bool, typer.Option("--submit", help="Submit the job and follow it until it ends.")]
Poll = Annotated[float, typer.Option(hidden=True, min=0.0, help="Seconds between status checks.")]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    job = typer.Typer(help="Write a job file that measures on a cluster.", no_args_is_help=True)
    job.command("slurm")(_slurm)
    job.command("kubernetes")(_kubernetes)
    app.add_typer(job, name="job")


def _slurm(
    output: Annotated[str, typer.Option(help="Folder of the run, on a file system shared by all nodes.")],
    arguments: Rest = None,
    name: Name = "kernels-bench",
    image: Annotated[
        str, typer.Option(help="Container image to run in with Apptainer: a .sif file or registry/name:tag.")
    ] = "",
    gpus: Gpus = 1,
    cpus: Cpus = 8,
    memory: Memory = 64,
    minutes: Time = 30,
    budget: Budget = None,
    grid: Grid = "",
    partition: Annotated[str, typer.Option(help="Partition that has the GPU.")] = "",
    account: Annotated[str, typer.Option(help="Account to charge.")] = "",
    file: File = None,
    submit: Submit = False,
    poll_seconds: Poll = 10.0,
) -> None:
    """Write a batch script for sbatch."""
    options = JobOptions(
        output=output,
        name=name,
        image=image,
        num_gpus=gpus,
        num_cpus=cpus,
        memory_gib=memory,
        time_limit_s=minutes * SECONDS_PER_MINUTE,
        budget_s=budget,
        grid=grid,
        arguments=tuple(arguments or ()),
        partition=partition,
        account=account,
    )
    text = render_slurm(options)
    _written(text, file, submit)
    if submit:
        _follow(lambda: submit_slurm(text, _say, poll_seconds), f"in {output}, on the nodes' file system")


def _kubernetes(
    image: Annotated[str, typer.Option(help="Container image that has kernels-bench and torch.")],
    claim: Annotated[str, typer.Option(help="Persistent volume claim that the results are written to.")],
    arguments: Rest = None,
    output: Annotated[str, typer.Option(help="Folder of the run, on the claim.")] = "kernels-bench",
    name: Name = "kernels-bench",
    gpus: Gpus = 1,
    cpus: Cpus = 8,
    memory: Memory = 64,
    minutes: Time = 30,
    budget: Budget = None,
    grid: Grid = "",
    user: Annotated[
        int | None,
        typer.Option(help="User id to run as, if the image's user is root; OpenShift chooses one itself."),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace to submit to.")] = "",
    file: File = None,
    submit: Submit = False,
    poll_seconds: Poll = 10.0,
) -> None:
    """Write a Job manifest for kubectl or oc."""
    options = JobOptions(
        output=output,
        name=name,
        image=image,
        num_gpus=gpus,
        num_cpus=cpus,
        memory_gib=memory,
        time_limit_s=minutes * SECONDS_PER_MINUTE,
        budget_s=budget,
        grid=grid,
        arguments=tuple(arguments or ()),
        claim=claim,
        user_id=user,
    )
    text = render_kubernetes(options)
    _written(text, file, submit)
    if submit:
        _follow(
            lambda: submit_kubernetes(text, _say, namespace, poll_seconds),
            f"in {output} on the claim {claim} ({MOUNT}/{output} in the job)",
        )


def _written(text: str, file: Path | None, submit: bool) -> None:
    if file is not None:
        try:
            write_whole(file, text)
        except OSError as error:
            raise MeasureError(f"{file} cannot be written: {error.strerror or error}") from error
        typer.echo(f"wrote {file}")
    elif not submit:
        typer.echo(text, nl=False)


def _follow(submit: Callable[[], Ended], where: str) -> None:
    try:
        ended = submit()
    except KeyboardInterrupt:
        typer.echo(f"no longer following; the job continues, and its tables will be {where}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(f"{ended.job}: {ended.state}; the tables are {where}")


def _say(line: str) -> None:
    typer.echo(line)
