"""Starts: fresh Python processes, timed from outside or, for an import, inside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import fastroof
from fastroof.bench.workload import Setup, Workload
from fastroof.errors import FastroofError

__all__ = ["import_seconds", "step_command"]

PACKAGE: Final = Path(fastroof.__file__).resolve().parents[1]
IMPORT: Final = (
    "import time; began = time.perf_counter(); import fastroof; print(time.perf_counter() - began)"
)


def _python(*arguments: str) -> str:
    """What a fresh interpreter prints, which finds the fastroof that this process runs."""
    paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FastroofError(f"python {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def import_seconds(setup: Setup) -> Workload:
    """Build ``import fastroof`` in a fresh process; the interpreter's own start is left out."""
    return Workload(
        "import", "import fastroof, fresh process", "process", 1,
        lambda: float(_python("-c", IMPORT)), reports_seconds=True,
    )  # fmt: skip


def step_command(setup: Setup) -> Workload:
    """Build ``fastroof step`` from process start to answer; the first call warms the cache of loops."""
    command = ("-m", "fastroof", "step", "--model", "llama-3.1-8b", "--decode", "64x4096")
    return Workload(
        "command", "fastroof step ..., process start to answer, warm cache", "process", 1,
        lambda: _python(*command),
    )  # fmt: skip
