"""A profile for LLMServingSim, the head of its files, and a step as the simulator sums it.

Run it as ``python -m tests.examples.llmservingsim``.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np

import fastroof
from fastroof.backends.llmservingsim import export_llmservingsim

BATCH, CONTEXT = 64, 4095


def main() -> None:
    """Export a plan, show the files, and add up a decode step."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    with tempfile.TemporaryDirectory() as perf:
        folder = export_llmservingsim(plan, perf).folder
        print(folder.relative_to(perf))
        for path in sorted(folder.glob("tp1/*.csv")):
            print(f"\n{path.name}, {len(path.read_text().splitlines()) - 1} rows")
            print("".join(f"  {line}\n" for line in path.read_text().splitlines()[:4]), end="")
        step_us = decodes_us(folder / "tp1", plan.model.num_layers)
    own_us = plan.decode_us(BATCH, CONTEXT + 1)
    print(f"\n{BATCH} decodes after {CONTEXT} tokens: {step_us:.3f} us by the files and {own_us:.3f} us")
    print("by the plan: layers are whole nanoseconds")


def decodes_us(folder: Path, num_layers: int) -> float:
    """One step: every layer between its two nearest rows, those of a block once for each of the model."""
    block_us = ends_us = 0.0
    for name in ("dense.csv", "per_sequence.csv"):
        layers: dict[str, list[list[float]]] = {}
        for layer, *point in read(folder / name):
            layers.setdefault(layer, []).append([float(value) for value in point])
        for layer, points in layers.items():
            latency_us = float(np.interp(BATCH, *np.array(points).T))
            if layer in ("embedding", "final_layernorm", "lm_head", "sampler"):
                ends_us += latency_us
            else:
                # a block has two norms, and one of everything else
                block_us += latency_us * (2 if layer == "layernorm" else 1)
    wanted = ["attention", "0", "0", "0", str(BATCH), str(CONTEXT), "1"]
    block_us += next(float(row[-1]) for row in read(folder / "attention.csv") if row[:-1] == wanted)
    return ends_us + num_layers * block_us


def read(path: Path) -> list[list[str]]:
    """Rows of a CSV file, without its header."""
    with path.open(newline="", encoding="ascii") as file:
        return list(csv.reader(file))[1:]


if __name__ == "__main__":
    main()
