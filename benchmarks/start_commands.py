"""How long commands take from their start to their end: ``python -m benchmarks.start_commands``.

A process each, by turns, so that all meet the same load; ``python -c pass`` is among them and what the ratios
are to. Seconds of a processor (user and system) are told beside those of a clock: a busy machine changes them
less. ``--beside FOLDER`` times another tree of fastroof by turns with this one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

STEP: Final = ("step", "--model", "llama-3.1-8b", "--decode", "64x4096")
COMMANDS: Final = {
    "step": STEP,
    "step --json": (*STEP, "--json"),
    "step --explain": (*STEP, "--explain"),
    "lookup": ("lookup", "gemm", "--m", "64,128", "--n", "6144", "--k", "4096"),
    "--help": ("--help",),
}
NOTHING_KEPT: Final = "step, nothing compiled or kept"
NO_PLAN: Final = "step, no plan kept"
BASELINE: Final = "python -c pass"


def seconds(words: list[str], environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """Seconds of a clock and of a processor that a process takes; ``-m`` runs what is in its folder."""
    start = time.perf_counter()
    child = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    said = child.stderr.read() if child.stderr is not None else b""
    _, status, used = os.wait4(child.pid, 0)
    clock = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.stderr is not None:
        child.stderr.close()
    if child.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {child.returncode}: {said.decode()}")
    return clock, used.ru_utime + used.ru_stime


def timed(trees: dict[str, Path], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of every command of every tree, round by round; a first round warms caches and is not told."""
    every: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds + 1):
            measured = {BASELINE: seconds([sys.executable, "-c", "pass"], dict(os.environ), Path(scratch))}
            for name, tree in trees.items():
                warm, cold = Path(scratch, name), Path(scratch, f"{name} cold")
                shutil.rmtree(cold, ignore_errors=True)
                environment = {
                    **os.environ,
                    "PYTHONPATH": str(tree),
                    "FASTROOF_CACHE_DIR": str(warm),
                    "FASTROOF_TABLES_IMPORT": "never",
                    "FASTROOF_TABLES": str(warm / "tables"),
                }
                run = [sys.executable, "-m", "fastroof"]
                for command, words in COMMANDS.items():
                    measured[f"{name}{command}"] = seconds([*run, *words], environment, tree)
                measured[f"{name}{NO_PLAN}"] = seconds(
                    [*run, *STEP], {**environment, "FASTROOF_KEEP_PLANS": "never"}, tree
                )
                empty = {"FASTROOF_CACHE_DIR": str(cold), "XDG_CACHE_HOME": str(cold)}
                measured[f"{name}{NOTHING_KEPT}"] = seconds([*run, *STEP], {**environment, **empty}, tree)
            if number:
                for command, taken in measured.items():
                    every.setdefault(command, []).append(taken)
    return every


def main() -> None:
    """Time the commands, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--beside", type=Path, help="another tree of fastroof")
    given = parser.parse_args()
    trees = {"": Path(__file__).resolve().parents[1]}
    if given.beside is not None:
        trees["beside: "] = given.beside.resolve()
    every = timed(trees, given.rounds)
    base = [statistics.median(column) for column in zip(*every[BASELINE], strict=True)]
    print(f"{'command':45} {'clock ms':>9} {'x pass':>7} {'processor ms':>13} {'x pass':>7}")
    for command, taken in every.items():
        clock, processor = (statistics.median(column) for column in zip(*taken, strict=True))
        print(
            f"{command:45} {clock * 1e3:9.0f} {clock / base[0]:7.1f} {processor * 1e3:13.0f} "
            f"{processor / base[1]:7.1f}"
        )


if __name__ == "__main__":
    main()
