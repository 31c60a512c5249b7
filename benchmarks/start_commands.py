"""How long commands take from their start to their end: ``python -m benchmarks.start_commands``.

A process each, by turns, so that all meet the same load; ratios are to ``python -c pass``. A busy machine
changes seconds of a processor (user and system) less than those of a clock. Bytecode is compiled, as in an
installed package. ``--beside FOLDER`` times another tree of fastroof by turns with this one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.first_run import Used, used_by

STEP: Final = ("step", "--model", "llama-3.1-8b", "--decode", "64x4096")
COMMANDS: Final = {
    "step": STEP,
    "step --json": (*STEP, "--json"),
    "step --explain": (*STEP, "--explain"),
    "lookup": ("lookup", "gemm", "--m", "64,128", "--n", "6144", "--k", "4096"),
    "--help": ("--help",),
    "simulate": ("simulate", "--model", "llama-3.1-8b"),
    "simulate --range": ("simulate", "--model", "llama-3.1-8b", "--range"),
    "best": (
        *("best", "--model", "Qwen/Qwen3-32B-FP8", "--gpu", "h100", "--gpus", "8"),
        *("--isl", "4000", "--osl", "500", "--ttft", "500", "--tpot", "30"),
    ),
    "sweep": ("sweep",),
    "export c": ("export", "c", "llama-3.1-8b", "-o", "exported"),
}
NOTHING_KEPT: Final = "step, nothing compiled or kept"
NO_PLAN: Final = "step, no plan kept"
BASELINE: Final = "python -c pass"


def timed(trees: dict[str, Path], rounds: int) -> dict[str, list[Used]]:
    """Return what every command of every tree uses in each round, after a round that warms caches."""
    every: dict[str, list[Used]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds + 1):
            measured = {BASELINE: used_by([sys.executable, "-c", "pass"], dict(os.environ), Path(scratch))}
            for name, tree in trees.items():
                warm, cold = Path(scratch, name), Path(scratch, f"{name} cold")
                shutil.rmtree(cold, ignore_errors=True)
                environment = {
                    **os.environ,
                    "PYTHONPATH": str(tree),
                    "PYTHONPYCACHEPREFIX": str(Path(scratch, "bytecode")),
                    "PYTHONDONTWRITEBYTECODE": "",
                    "FASTROOF_CACHE_DIR": str(warm),
                    "FASTROOF_TABLES_IMPORT": "never",
                    "FASTROOF_TABLES": str(warm / "tables"),
                }
                run = [sys.executable, "-m", "fastroof"]
                for command, words in COMMANDS.items():
                    measured[f"{name}{command}"] = used_by([*run, *words], environment, Path(scratch))
                measured[f"{name}{NO_PLAN}"] = used_by(
                    [*run, *STEP], {**environment, "FASTROOF_KEEP_PLANS": "never"}, Path(scratch)
                )
                empty = {"FASTROOF_CACHE_DIR": str(cold), "XDG_CACHE_HOME": str(cold)}
                measured[f"{name}{NOTHING_KEPT}"] = used_by(
                    [*run, *STEP], {**environment, **empty}, Path(scratch)
                )
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
    print(
        f"{'command':45} {'clock ms':>9} {'x pass':>7} {'processor ms':>13} {'x pass':>7} {'least':>6}   MiB"
    )
    for command, taken in every.items():
        clock, processor, peak_mib = (statistics.median(column) for column in zip(*taken, strict=True))
        least = min(one[1] for one in taken)
        print(
            f"{command:45} {clock * 1e3:9.0f} {clock / base[0]:7.1f} {processor * 1e3:13.0f} "
            f"{processor / base[1]:7.1f} {least * 1e3:6.0f} {peak_mib:5.0f}"
        )


if __name__ == "__main__":
    main()
