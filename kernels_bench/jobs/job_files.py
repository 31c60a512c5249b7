"""Job files for clusters: Slurm and Kubernetes, rendered from the templates of this package."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath
from string import Template
from typing import Final

from fastroof.errors import MeasureError

MARGIN_S: Final = 180
"""What a job needs besides measuring: to start, import torch, check kernels and write tables."""
TABLES_S: Final = 60
"""The run stops this long before the cluster would kill it."""
MOUNT: Final = "/results"

_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_SLURM_WORD: Final = re.compile(r"[A-Za-z0-9_.,:-]+")


@dataclass(frozen=True)
class JobOptions:
    """What a job measures and what it asks the cluster for."""

    # Folder of the run. Of a Kubernetes job it lies on the claim: ``h100/run-1``.
    output: str
    # Name of the job: a DNS label.
    name: str = "kernels-bench"
    # Container image; Slurm runs without one where it is empty, Kubernetes needs one.
    image: str = ""
    # What the job gets; memory in GiB.
    num_gpus: int = 1
    num_cpus: int = 8
    memory_gib: int = 64
    # When the cluster ends it, s.
    time_limit_s: int = 1800
    # ``--budget`` of the run, s; None measures the whole grid.
    budget_s: int | None = None
    # Grid of the run, by name or by path as the job sees it; empty for the default.
    grid: str = ""
    # Further arguments of ``kernels-bench run``.
    arguments: tuple[str, ...] = ()
    # Slurm's; empty where the cluster has defaults.
    partition: str = ""
    account: str = ""
    # Kubernetes' persistent volume claim for the results.
    claim: str = ""
    # Kubernetes' user id; None where the image has a user that is not root, or OpenShift picks one.
    user_id: int | None = None

    def __post_init__(self) -> None:
        """Check what both kinds of job share."""
        _match(
            "name", self.name, _DNS_LABEL, "lower-case letters, digits and -, at most 63, as in h100-run-1"
        )
        for what, size in (
            ("GPUs", self.num_gpus),
            ("CPUs", self.num_cpus),
            ("GiB of memory", self.memory_gib),
        ):
            if size < 1:
                raise MeasureError(f"a job needs at least 1 of {what}, got {size}")
        if self.budget_s is not None and self.budget_s < 1:
            raise MeasureError(f"a budget is at least 1 s, got {self.budget_s}")
        least_s = (self.budget_s or 0) + MARGIN_S
        if self.time_limit_s < least_s:
            raise MeasureError(
                f"a time limit of {self.time_limit_s} s is too short: {self.budget_s or 0} s of budget and "
                f"{MARGIN_S} s to start and to write tables are {least_s} s"
            )
        for what, word in (
            ("output", self.output),
            ("image", self.image),
            ("grid", self.grid),
            *(("argument", argument) for argument in self.arguments),
        ):
            if not word.isprintable():
                raise MeasureError(f"{what} {word!r} has characters that cannot be printed")
        if not self.output or self.output.startswith("-"):
            raise MeasureError(f"output {self.output!r} is not a folder name; use one such as results/h100")
        if re.search(r"\s", self.image) or self.image.startswith("-"):
            raise MeasureError(f"image {self.image!r} is not an image; use one such as registry/name:tag")


def render_slurm(options: JobOptions) -> str:
    """Write a batch script for ``sbatch``.

    >>> print(render_slurm(JobOptions("results/h100", num_gpus=2)).splitlines()[6])
    #SBATCH --gres=gpu:2
    """
    directives = []
    for what, word in (("partition", options.partition), ("account", options.account)):
        if word:
            _match(what, word, _SLURM_WORD, "letters, digits and _ . , : -")
            directives.append(f"#SBATCH --{what}={word}\n")
    launcher = "kernels-bench"
    if options.image:
        # A name without a scheme is one of a registry; a file ends in .sif.
        local = "://" in options.image or options.image.endswith(".sif")
        image = shlex.quote(options.image if local else f"docker://{options.image}")
        launcher = f'apptainer exec --nv --bind "$output" {image} kernels-bench'
    return _template("slurm.sh").substitute(
        name=options.name,
        cpus=options.num_cpus,
        memory_gib=options.memory_gib,
        gpus=options.num_gpus,
        time_limit=_slurm_time(options.time_limit_s),
        directives="".join(directives),
        output=shlex.quote(options.output),
        launcher=launcher,
        script=_script(options, "kernels_bench"),
    )


def render_kubernetes(options: JobOptions) -> str:
    """Write a manifest of a Job for ``kubectl create`` or ``oc create``.

    >>> text = render_kubernetes(JobOptions("h100", image="registry/fastroof:1", claim="results"))
    >>> 'claimName: "results"' in text
    True
    """
    if not options.image:
        raise MeasureError("a Kubernetes job needs --image, one with kernels-bench and torch in it")
    if not options.claim:
        raise MeasureError("a Kubernetes job needs --claim, a persistent volume claim for the results")
    _match("claim", options.claim, _DNS_SUBDOMAIN, "lower-case letters, digits, - and .")
    inside = PurePosixPath(options.output)
    if inside.is_absolute() or ".." in inside.parts:
        raise MeasureError(f"output {options.output!r} must lie on the claim: a path such as h100/run-1")
    if options.user_id is not None and options.user_id < 1:
        raise MeasureError(f"user id {options.user_id} is root or none; the job runs as any other user")
    output = shlex.quote(f"{MOUNT}/{inside}")
    script = f'set -eu\noutput={output}\nmkdir -p -- "$output"\n{_script(options, "kernels-bench")}\n'
    # Kubernetes expands $(NAME) in commands, and $$ is how it spells one $.
    command = ["/bin/sh", "-c", script.replace("$", "$$")]
    security: dict[str, object] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if options.user_id is not None:
        security |= {"runAsUser": options.user_id, "fsGroup": options.user_id}
    return _template("kubernetes.yaml").substitute(
        name=json.dumps(options.name),
        cpus=options.num_cpus,
        memory_gib=options.memory_gib,
        gpus=options.num_gpus,
        time_limit_s=options.time_limit_s,
        image=_yaml(options.image),
        command=_yaml(command),
        pod_security=_yaml(security),
        mount=MOUNT,
        claim=json.dumps(options.claim),
    )


def _script(options: JobOptions, command: str) -> str:
    """Return the shell lines that measure into ``$output``, or continue an earlier job."""
    deadline_s = options.time_limit_s - TABLES_S
    run = ["--deadline", str(deadline_s)]
    if options.budget_s is not None:
        run += ["--budget", str(options.budget_s)]
    run += options.arguments
    if options.grid:
        run += ["--", options.grid]
    return (
        'if ls "$output"/journal-*.jsonl > /dev/null 2>&1; then\n'
        f'    {command} resume "$output" --deadline {deadline_s}\n'
        "else\n"
        f'    {command} run --output "$output" {shlex.join(run)}\n'
        "fi"
    )


def _yaml(value: object) -> str:
    """Return a value as JSON, which is YAML too."""
    return json.dumps(value, ensure_ascii=False)


def _slurm_time(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02d}:{minute:02d}:{second:02d}"


def _match(what: str, word: str, pattern: re.Pattern[str], need: str) -> None:
    if not pattern.fullmatch(word):
        raise MeasureError(f"{what} {word!r} is not a valid name for the cluster; use {need}")


def _template(name: str) -> Template:
    return Template((files("kernels_bench.jobs") / "templates" / name).read_text(encoding="utf-8"))
