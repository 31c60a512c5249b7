"""One question, one answer: random deployments asked of best, estimate and simulate.

``python -m benchmarks.accuracy agreement --questions 500`` prints the quantiles of estimated over simulated
TPOT, throughput and TTFT, and the largest differences. Questions are drawn over all engines, layouts, formats
and lengths; clients send their next request as the last one ends, and fit the KV cache. Best and estimate are
the same closed form: their difference is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import numpy as np
import typer

from benchmarks.accuracy.simulated_loops import Compared, Question, compare, plan_of
from fastroof.engines import engine_names, load_engine
from fastroof.errors import FastroofError
from fastroof.models import load_model
from fastroof.plan import StepPlan
from fastroof.tables import Tables

MODELS: Final = (
    "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b", "gemma-3-27b", "mixtral-8x7b", "qwen3-30b-a3b",
    "qwen3-235b-a22b", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v3",
)  # fmt: skip
DTYPES: Final = ("auto", "auto", "bf16", "fp8", "fp8_block")
KV_DTYPES: Final = ("auto", "auto", "fp8")
QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
QUANTITIES: Final = ("tpot", "throughput", "ttft")
MOST_STEPS: Final = 3e6
"""Output tokens of a simulation, at most: a few seconds for 500 questions."""


def questions(seed: int = 0) -> Iterator[Question]:
    """Draw questions endlessly."""
    rng = np.random.default_rng(seed)
    engines = engine_names()
    while True:
        model = load_model(str(rng.choice(MODELS)))
        engine = str(rng.choice(engines))
        ranks = int(rng.choice((1, 1, 2, 4, 8)))
        tp = int(rng.choice([size for size in (1, 2, 4, 8) if size * ranks <= 16]))
        # experts of one layer on separate GPUs, or each shared by all
        ep = tp * ranks if model.has_experts and rng.random() < 0.5 else 1
        budget = int(rng.choice((1024, 2048, 4096, 8192)))
        question = Question(
            model.name, tp, ranks, ep, engine,
            isl=int(2 ** rng.uniform(5.0, 15.0)),
            osl=int(2 ** rng.uniform(3.0, 11.0)),
            clients=max(round(ranks * 2 ** rng.uniform(-1.0, 8.0)), 1),
            budget=budget, dtype=str(rng.choice(DTYPES)), kv_dtype=str(rng.choice(KV_DTYPES)),
        )  # fmt: skip
        is_chunked = load_engine(engine).scheduling.chunked_prefill
        # whole prompts that hardly fit a step wait for each other's
        fits = is_chunked or question.isl * 1.2 < budget - question.clients / ranks
        # beyond the context, best has no answer
        fits = fits and 1.2 * (question.isl + question.osl) <= model.max_position
        if fits and question.clients * question.osl < MOST_STEPS / 45:
            yield question


def answered(
    tables: Tables, seed: int = 0, overhead_ms: float | None = None
) -> Iterator[tuple[Compared, StepPlan]]:
    """Yield questions endlessly that have a plan and KV room, with both answers.

    By default behind the engine's front end, as users see them; 0 ms is the engine's own clock.
    """
    plans: dict[Any, StepPlan] = {}
    for question in questions(seed):
        try:
            plan = plan_of(question, tables, plans, overhead_ms)
            found = compare(question, plan)
        except FastroofError:
            continue
        if found is not None:
            yield found, plan


def worst(found: Sequence[Compared], count: int = 10) -> list[Compared]:
    """Return the questions with the largest difference of any quantity, in ln, largest first."""

    def difference(one: Compared) -> float:
        return max(abs(math.log1p(getattr(one, name))) for name in QUANTITIES)

    return sorted(found, key=difference, reverse=True)[:count]


def main(
    questions: Annotated[int, typer.Option(help="Number of questions.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    gpu: Annotated[str, typer.Option(help="GPU.")] = "h100",
    listed: Annotated[int, typer.Option(help="Number of largest differences to list.")] = 10,
) -> None:
    """Compare estimates of random deployments with simulations: quantiles, and the largest differences."""
    from fastroof.tables import load_tables

    found = [one for (one, _), _ in zip(answered(load_tables(gpu), seed), range(questions), strict=False)]
    groups: dict[str, list[Compared]] = {"all": found}
    for one in found:
        groups.setdefault(one.question.engine, []).append(one)
        groups.setdefault("dp 1" if one.question.ranks == 1 else "dp 2 to 8", []).append(one)
    heads = " | ".join(f"p{100 * share:g}" for share in QUANTILES)
    print(f"| questions | | estimated / simulated, % | {heads} | worst | within 5 % |")
    print(f"|---|---:|---|{'---:|' * (len(QUANTILES) + 2)}")
    for name, some in groups.items():
        for quantity in QUANTITIES:
            off = np.array([getattr(one, quantity) for one in some]) * 100.0
            values = *np.quantile(off, QUANTILES), off[np.abs(off).argmax()]
            cells = [*(f"{value:+.1f}" for value in values), f"{(np.abs(off) <= 5.0).mean():.0%}"]
            print(f"| {name} | {len(some)} | {quantity} | {' | '.join(cells)} |")
    print("\nLargest differences, %:\n")
    for one in worst(found, listed):
        parts = ", ".join(f"{name} {100.0 * getattr(one, name):+.1f}" for name in QUANTITIES)
        print(f"* {parts}: {one.question}")
