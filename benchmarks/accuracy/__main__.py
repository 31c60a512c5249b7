"""``python -m benchmarks.accuracy``: validate and fit the shipped profiles, and run studies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from typer.main import get_command

from fastroof.command_group import new_app

PROGRAM: Final = "python -m benchmarks.accuracy"
MODULES: Final = {
    "judge": "judge",
    "benches": "benches",
    "fit": "fit_command",
    "refit": "refit",
    "front-ends": "front_end_study",
    "learning-curve": "learning_curve_on_sample",
    "planted-faults": "planted_faults",
    "kv-room": "kv_room",
    "own-rows": "own_rows",
    "own-grid": "own_grid",
    "step-intervals": "step_intervals",
    "most-served": "most_served",
    "expert-steps": "aiconfigurator_steps",
    "energy": "energy",
    "roster": "roster",
    "silicon-sample": "silicon_sample",
    "agreement": "agreement",
    "simulated-loops": "simulated_loops",
    "simulated-ranks": "simulated_ranks",
    "whole-runs": "whole_runs",
}
"""Modules by command; each has a ``main`` with the command's options."""

EPILOG: Final = """\b
The default command is judge: python -m benchmarks.accuracy --gpu all --markdown
"""


def run(words: Sequence[str], standalone: bool = False) -> None:
    """Run a command; ``judge`` by default."""
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words = ["judge", *words]
    # importing all commands takes seconds
    chosen = words[:1] if words[0] in MODULES else MODULES
    app = new_app(PROGRAM, "Measure the accuracy of the shipped profiles, and fit them.", EPILOG)
    for name in chosen:
        module = import_module(f"benchmarks.accuracy.{MODULES[name]}")
        app.command(name, epilog=getattr(module, "EPILOG", None))(module.main)
    get_command(app).main(list(words), prog_name=PROGRAM, standalone_mode=standalone)


if __name__ == "__main__":
    run(sys.argv[1:], standalone=True)
