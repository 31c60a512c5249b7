"""Processor seconds of commands in a fresh home, and again: ``python -m benchmarks.first_run``.

It times the fastroof that this Python has installed: a wheel with compiled loops, or a source install, which
compiles at a first run. Run it away from the checkout to time a wheel (``python PATH/first_run.py``). With
``--check`` it only runs each command once, and fails if that compiled anything; no seconds fail it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from fastroof.units import MIB

PAGE: Final = """
from fastroof.ui.answers import layouts_answer, step_answer
from fastroof.ui.plans import PlanStore
from fastroof.ui.view import View

store, view = PlanStore(None, None), View()
step_answer(store, view)
layouts_answer(store, view)
"""

COMMANDS: Final = {
    "step": (0.5, "step --model llama-3.1-8b --decode 64x4096"),
    "fit": (1.0, "fit --model llama-3.1-70b --gpu h100 --tp 2"),
    "serving": (1.5, "serving --model llama-3.1-8b --isl 1024 --osl 256 --clients 64"),
    "serving of ranks": (
        1.5,
        "serving --model qwen3-30b-a3b --dp 4 --ep 4 --isl 1024 --osl 256 --clients 64",
    ),
    "simulate": (1.5, "simulate --model llama-3.1-8b --trace example"),
    "capacity": (2.0, "capacity --model llama-3.1-8b --trace example --ttft 500 --tpot 50"),
    "best": (
        3.0,
        "best --model Qwen/Qwen3-32B-FP8 --gpus 8 --isl 4000 --osl 500 --ttft 500 --tpot 30 --price h100=2.5",
    ),
    "sweep": (4.0, "sweep"),
    "ui, first picture": (2.0, PAGE),
}
"""Targets of a first run from a wheel, processor seconds, and what is run."""


Used = tuple[float, float, float]
"""Seconds of a clock and of a processor, and peak memory in MiB."""


def used_by(words: list[str], environment: dict[str, str], folder: Path) -> Used:
    """Return what a process uses that runs in a folder, with its children."""
    start = time.perf_counter()
    child = subprocess.Popen(
        words, cwd=folder, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    stderr = child.stderr.read() if child.stderr is not None else b""
    _, status, used = os.wait4(child.pid, 0)
    clock = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.stderr is not None:
        child.stderr.close()
    if child.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {child.returncode}: {stderr.decode()}")
    return clock, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / MIB


def seconds(question: str, home: str) -> float:
    """Return the processor seconds of a question in a home."""
    program = ["-c", question] if question == PAGE else ["-m", "fastroof", *question.split()]
    # a sweep writes into the working directory
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("FASTROOF_", "XDG_"))},
        "HOME": home,
        "FASTROOF_CACHE_DIR": f"{home}/cache",
        "FASTROOF_TABLES_IMPORT": "never",
    }
    return used_by([sys.executable, *program], environment, Path(home))[1]


def main() -> None:
    """Time each command in a home of its own, and print a line of a table each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="run each once; fail if that compiled a loop")
    parser.add_argument("commands", nargs="*", default=list(COMMANDS), help="some of them")
    given = parser.parse_args()
    print("| command | target | first run | second run | loops compiled |\n|---|---|---|---|---|")
    compiled = 0
    for name in given.commands:
        target, question = COMMANDS[name]
        with tempfile.TemporaryDirectory() as home:
            first = seconds(question, home)
            second = "-" if given.check else f"{seconds(question, home):.2f} s"
            loops = len(list(Path(home).rglob("*.loop")))
        compiled += loops
        print(f"| {name} | {target:.1f} s | {first:.2f} s | {second} | {loops} |", flush=True)
    if given.check and compiled:
        raise SystemExit(f"first runs compiled {compiled} loops, which the wheel should carry")


if __name__ == "__main__":
    main()
