"""``fastroof warm``: compile the loops of common questions ahead, for images and offline machines."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Annotated, Final

import typer

from fastroof.cli.output import console
from fastroof.errors import FastroofError
from fastroof.progress import shown_progress

EPILOG: Final = """\b
Examples:
  fastroof warm
  FASTROOF_CACHE_DIR=/var/cache/fastroof fastroof warm --jobs 4

Runs what README shows, small examples of best, capacity, compare, fit, serving, simulate and sweep, and a
plan's calls from Python. plot roofline, plot step and export npz need no other loops; step and lookup compile
nothing; sessions, export c and bench compile more. What the installed wheel carries is not compiled again.
"""

PLAN_CALLS: Final = "from fastroof.cli.warm import call_a_plan; call_a_plan()"

GROUPS: Final = (
    (
        "fastroof simulate --model llama-3.1-8b --limit 50",
        "fastroof capacity --model llama-3.1-8b --limit 50 --ttft 500 --tpot 50",
    ),
    (
        "fastroof serving --model llama-3.1-8b --isl 1000 --osl 200 --clients 64",
        "fastroof serving --model llama-3.1-8b --isl 1000 --osl 200 --clients 64 --disaggregated 2:1",
        "fastroof serving --model qwen3-30b-a3b --dp 4 --ep 4 --isl 1024 --osl 256 --clients 64",
        "fastroof fit --model llama-3.1-70b --tp 2",
        "fastroof compare --model llama-2-7b --decode 32x4096 --prefill 2048",
        "fastroof sweep",
        "fastroof best --model Qwen/Qwen3-32B-FP8 --gpus 2 --isl 4000 --osl 500 --ttft 500 --tpot 30",
    ),
    ("fastroof simulate --model llama-3.1-8b --limit 50 --timeout 60", PLAN_CALLS),
)
"""Questions whose loops are compiled: each group in one process after another, groups at the same time."""


COST: Final = "80 to 100 seconds of processor time"


def warm(
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="NUMBER", help="Processes at the same time.  [default: one per processor]"
        ),
    ] = None,
) -> None:
    """Compile loops ahead of their first use."""
    from fastroof.compiled.code_cache import VERSION, cache_folders
    from fastroof.compiled.shipped_loops import shipped_loops
    from fastroof.host import usable_processors

    began = time.perf_counter()
    folders = cache_folders()
    before = _loops(folders)
    processors = jobs or usable_processors()
    if not (before or shipped_loops(VERSION).level):
        what = f"{COST} on {processors} processors"
        console(stderr=True).print(f"compiling loops for this machine, once: {what}")
    shown = shown_progress("compiling loops", "questions", quiet=True)
    shown(0, sum(map(len, GROUPS)))
    counting = Lock()

    def count() -> None:
        with counting:
            shown(shown.done + 1, shown.total)

    with shown, ThreadPoolExecutor(processors) as pool:
        for done in as_completed([pool.submit(_run, group, count) for group in GROUPS]):
            done.result()
    made = _loops(folders) - before
    if made:
        where = ", ".join(sorted({str(path.parent) for path in made}))
        seconds = time.perf_counter() - began
        console().print(f"compiled {len(made)} loops in {seconds:.0f} s: {where}", soft_wrap=True)
    else:
        console().print("nothing to compile")


def _loops(folders: Sequence[Path]) -> set[Path]:
    return {path for folder in folders for path in folder.glob("*.loop")}


def _run(questions: Sequence[str], count: Callable[[], None]) -> None:
    """Run and count questions, a process each: a command may select plain Python for its whole process."""
    # this package, also where Python does not look by itself; the folders are those of this process
    here = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    if given := environment.get("FASTROOF_CACHE_DIR"):
        environment["FASTROOF_CACHE_DIR"] = os.path.abspath(given)
    for question in questions:
        program = ["-m", *shlex.split(question)] if question.startswith("fastroof ") else ["-c", question]
        with TemporaryDirectory() as folder:  # a sweep writes its results
            done = subprocess.run(
                [sys.executable, *program],
                cwd=folder, env=environment,
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            )  # fmt: skip
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise FastroofError(f"`{question}` failed: {reason}")
        count()


def call_a_plan() -> None:
    """Call what guides show from Python: steps as numbers, arrays, batches, lookups, the example sweep."""
    from importlib import resources

    import numpy as np

    import fastroof

    tables = fastroof.load_tables("h100")
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", tables)
    plan.decode_us(64, 4096)
    plan.scalar(64, 4096)
    plan.step_scalar([1, 512], [4096, 0])
    steps = fastroof.StepBatch.from_requests([[(2048, 0)] + [(1, 4000)] * 32])
    plan.step_us(steps)
    plan.run(steps, with_error=True)
    for dtype in (np.int32, np.int64):
        sizes = np.array([64, 128], dtype)
        plan.decode_us(sizes, sizes)
        plan.prefill_us(sizes, sizes)
    tables.lookup("gemm", m=[64, 128], n=6144, k=4096)
    fastroof.run_sweep(str(resources.files("fastroof.sweep.deployments") / "example.toml"), "swept.parquet")
