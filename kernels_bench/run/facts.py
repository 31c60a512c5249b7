"""Software facts of a journal's start line: versions, commit, the time it began."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from fastroof._version import __version__
from fastroof.checks import shown
from fastroof.errors import MeasureError
from kernels_bench.protocol import Availability, Provider

COMMIT_VARIABLE: Final = "KERNELS_BENCH_COMMIT"
"""Environment variable: the commit that runs, for a copy of the checkout that travels without its .git."""

_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}(-dirty)?")

_DECIDING: Final = (
    "AITER_", "CUDA_", "CUBLAS", "CUDNN_", "DG_", "FLASHINFER_", "HIP", "HSA_", "KERNELS_BENCH_", "NCCL_",
    "ROCR_", "TENSILE_", "TORCH", "TRITON_", "VLLM_",
)  # fmt: skip

_DISTRIBUTIONS: Final = {
    "numpy": "numpy",
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "aiter": "amd-aiter",
    "vllm": "vllm",
    "apache-tvm-ffi": "apache-tvm-ffi",
}


def working(providers: Iterable[Provider]) -> list[tuple[Provider, Availability]]:
    """Ask each provider whether it works here."""
    answers = []
    for provider in providers:
        try:
            answer = provider.availability()
        except Exception as error:
            answer = Availability(False, f"{type(error).__name__}: {error}")
        answers.append((provider, answer))
    return answers


def software_versions(answers: Iterable[tuple[Provider, Availability]] = ()) -> dict[str, str]:
    """Return the versions of everything that a latency depends on."""
    versions = {"fastroof": __version__, "python": platform.python_version()}
    for name, distribution in _DISTRIBUTIONS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(distribution)
    # Only where a provider has imported it: the import takes seconds.
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(Exception):  # a build without them
            versions["torch"] = str(torch.__version__)
            versions |= {
                name: version for name in ("cuda", "hip") if (version := getattr(torch.version, name, None))
            }
            versions["cudnn"] = str(torch.backends.cudnn.version())
    for _, answer in answers:
        if answer.works:
            versions |= dict(answer.versions or {})
    return versions


def environment() -> dict[str, str]:
    """Return the environment variables by which libraries choose kernels, or that change their time."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_DECIDING)}


def checkout_commit() -> str:
    """Return the commit that this runs from, with ``-dirty`` appended if files differ from it."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            commit, changed = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
            return f"{commit}-dirty" if changed else commit
    given = os.environ.get(COMMIT_VARIABLE, "").strip()
    if given and not _COMMIT.fullmatch(given):
        raise MeasureError(
            f"{COMMIT_VARIABLE} is {shown(given)}, which is not a commit: give 7 to 64 hexadecimal digits, "
            "with -dirty appended if files differ"
        )
    return given


def _git(root: Path, *arguments: str) -> str:
    command = ("git", "-C", str(root), *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def now_iso() -> str:
    """Return the time now, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_facts(answers: Iterable[tuple[Provider, Availability]] = ()) -> dict[str, Any]:
    """Return what every start line has: software, environment, command, time and commit."""
    return {
        "versions": software_versions(answers),
        "environment": environment(),
        "command": shlex.join(["kernels-bench", *sys.argv[1:]]),
        "started": now_iso(),
        "commit": checkout_commit(),
    }


def new_run_id() -> str:
    """Return a name for a run: the time now in UTC, and six digits that no other run of that second has."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
