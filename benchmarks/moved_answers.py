"""Step times that another set of tables moves, by GPU, engine and the operator that moves most.

    python benchmarks/moved_answers.py OLD NEW     # folders such as bench_data of two checkouts

Every preset in its own formats, at tp 1 and 8 where they fit, on each GPU of NEW: decode steps of 1, 64 and
256 sequences and a prompt of 2,048 tokens, kernels and engine.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fastroof
from fastroof.errors import FastroofError

ENGINES = ("vllm", "trtllm", "sglang")
STEPS = {
    "1 x 2048": [(1, 2047)],
    "64 x 4096": [(1, 4095)] * 64,
    "256 x 1024": [(1, 1023)] * 256,
    "prompt of 2048": [(2048, 0)],
}
MOVED = 0.02


class Answer(NamedTuple):
    """Time of a step, and of its parts by role."""

    total_us: float
    parts: dict[str, float]


def answers(
    tables: fastroof.Tables, gpu: str, engine: str, models: list[str]
) -> Iterator[tuple[tuple[str, int, str], Answer]]:
    """Yield the answers of every preset that a plan can be made for."""
    for model in models:
        for tp in (1, 8):
            try:
                plan = fastroof.compile_plan(
                    model, gpu, tables, tp=tp, engine=engine, max_num_batched_tokens=2048, max_num_seqs=256
                )
                for name, step in STEPS.items():
                    explained = plan.explain(step)
                    parts: dict[str, float] = defaultdict(float)
                    for part in explained.operators:
                        parts[part.role] += part.total_us
                    yield (model, tp, name), Answer(explained.total_us, parts)
            except FastroofError:
                continue


def main() -> None:
    """Print how many answers moved, by how much, and by which part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--gpu", action="append", help="[default: all of NEW]")
    parser.add_argument("--model", action="append", help="[default: all presets]")
    parser.add_argument("--list", action="store_true", help="print every answer that moved")
    given = parser.parse_args()
    models = given.model or list(fastroof.model_names())
    gpus = given.gpu or sorted(path.parent.parent.name for path in given.new.glob("*/*/gemm.parquet"))
    print("| GPU | engine | step | answers | moved | median | p10 to p90 | by |")
    print("|---|---|---|---:|---:|---:|---:|---|")
    for gpu in dict.fromkeys(gpus):
        old, new = (fastroof.load_tables(folder / gpu) for folder in (given.old, given.new))
        for engine in ENGINES:
            print(f"{gpu} {engine}", file=sys.stderr)
            before, after = (dict(answers(one, gpu, engine, models)) for one in (old, new))
            for step in STEPS:
                _summary(before, after, (gpu, engine, step), listed=given.list)


def _summary(
    before: dict[tuple[str, int, str], Answer],
    after: dict[tuple[str, int, str], Answer],
    place: tuple[str, str, str],
    *,
    listed: bool,
) -> None:
    ratios, causes = [], defaultdict(list)
    same_case = [key for key in before if key in after and key[2] == place[2]]
    for key in same_case:
        a, b = before[key], after[key]
        ratio = b.total_us / a.total_us
        if abs(ratio - 1.0) <= MOVED:
            continue
        roles = a.parts.keys() | b.parts.keys()
        cause = max(roles, key=lambda role: abs(b.parts.get(role, 0.0) - a.parts.get(role, 0.0)))
        ratios.append(ratio)
        causes[cause].append(ratio)
        if listed:
            print(f"  {place[0]} {place[1]} {key[0]} tp {key[1]}, {key[2]}: {ratio:.3f}, by {cause}")
    if not same_case:
        return
    spread = "" if not ratios else "{:.2f} | {:.2f} to {:.2f}".format(*np.quantile(ratios, (0.5, 0.1, 0.9)))
    by = ", ".join(
        f"{cause} {len(some)} ({np.median(some):.2f})"
        for cause, some in sorted(causes.items(), key=lambda one: -len(one[1]))[:4]
    )
    print(f"| {' | '.join(place)} | {len(same_case)} | {len(ratios)} | {spread or ' | '} | {by} |")


if __name__ == "__main__":
    main()
