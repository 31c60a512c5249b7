"""Compare estimates of random closed loops with simulations, by attention data-parallel ranks.

``python -m benchmarks.accuracy simulated-loops --questions 500 --ranks 1,2,4,8`` prints the
differences. Clients send their next request when the last one ends. Lengths are uniform, the shortest a fifth
below the longest. The last two thirds of each client's requests count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer

from fastroof.errors import FastroofError
from fastroof.plan import StepPlan, compile_plan
from fastroof.serving.estimate import estimate
from fastroof.serving.scenarios import STEADY
from fastroof.simulation import Workload, simulate
from fastroof.tables import Tables
from fastroof.units import MS_PER_S

EXPERTS: Final = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b")
DENSE: Final = ("llama-3.1-8b", "qwen3-8b")
ENGINES: Final = ("vllm", "vllm-0.12", "sglang", "trtllm-1.1")
SPREAD: Final = 0.2
REQUESTS_PER_CLIENT: Final = 45
LARGEST_STEP: Final = 16_384


class Question(NamedTuple):
    """A closed loop of ``clients`` with mean lengths; ``budget``: tokens per step of one rank."""

    model: str
    tp: int
    ranks: int
    ep: int
    engine: str
    isl: int
    osl: int
    clients: int
    budget: int
    dtype: str = "auto"
    kv_dtype: str = "auto"

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of running requests of a rank."""
        return min(1024, self.budget)


class Compared(NamedTuple):
    """Estimated over simulated TPOT, TTFT and throughput, less 1, and the simulated times."""

    question: Question
    tpot: float
    ttft: float
    throughput: float
    tpot_ms: float
    ttft_ms: float


def questions(ranks: int, seed: int = 0) -> Iterator[Question]:
    """Draw questions endlessly, half of them of MoE models."""
    rng = np.random.default_rng([seed, ranks])
    while True:
        models = EXPERTS if rng.random() < 0.6 else DENSE
        model = str(rng.choice(models))
        # bf16 weights of Mixtral need two GPUs
        tp = 2 if ranks == 1 and model == "mixtral-8x7b" else 1
        ep = ranks if models is EXPERTS and rng.random() < 0.7 else 1
        budget = int(rng.choice([2048, 4096, 8192]))
        question = Question(
            model, tp, ranks, ep, str(rng.choice(ENGINES)),
            isl=int(2 ** rng.uniform(7.0, 13.0)),
            osl=int(2 ** rng.uniform(5.0, 10.0)),
            clients=max(round(ranks * 2 ** rng.uniform(-0.5, 6.0)), 1),
            budget=budget,
        )  # fmt: skip
        # skip whole prompts that hardly fit a step
        if not question.engine.startswith("trtllm") or question.isl * 1.2 < budget - question.clients / ranks:
            yield question


def plan_of(
    question: Question, tables: Tables, plans: dict[Any, StepPlan], overhead_ms: float | None = 0.0
) -> StepPlan:
    """Compile the plan of a question, cached; by default for the engine's own clock."""
    key = (*question[:5], question.dtype, question.kv_dtype)
    if key not in plans:
        plans[key] = compile_plan(
            question.model, tables.gpu, tables, tp=question.tp, dp=question.ranks, ep=question.ep,
            engine=question.engine, dtype=question.dtype, kv_dtype=question.kv_dtype,
            max_num_batched_tokens=LARGEST_STEP, max_num_seqs=1024, front_end=overhead_ms,
        )  # fmt: skip
    return plans[key]


def _highest(mean: int) -> int:
    """Return the longest of uniform lengths with a mean."""
    return round(mean / (1.0 - SPREAD / 2.0))


def loop_of(question: Question) -> Workload:
    """Return the closed loop of a question."""
    lengths = [
        f"uniform:{max(round(most * (1.0 - SPREAD)), 1)}:{most}"
        for most in (_highest(question.isl), _highest(question.osl))
    ]
    return Workload(
        clients=question.clients, requests=question.clients * REQUESTS_PER_CLIENT,
        isl=lengths[0], osl=lengths[1],
    )  # fmt: skip


def compare(question: Question, plan: StepPlan) -> Compared | None:
    """Answer a question by both; None if requests would wait for KV cache."""
    highest = _highest(question.isl), _highest(question.osl)
    of_rank = question.clients / question.ranks
    if (of_rank + 1.0) * 1.3 * sum(highest) > plan.memory.max_kv_tokens:
        return None
    trace = loop_of(question).trace()
    run = simulate(plan, trace, max_num_batched_tokens=question.budget, max_num_seqs=question.max_num_seqs)
    later = slice(question.clients * REQUESTS_PER_CLIENT // 3, question.clients * (REQUESTS_PER_CLIENT - 2))
    ttft_ms, tpot_ms, e2e_ms = (
        float(np.nanmean(run.requests.column(n).to_numpy()[later])) for n in ("ttft_ms", "tpot_ms", "e2e_ms")
    )
    isl, osl = float(trace.input_tokens.mean()), float(trace.output_tokens.mean())
    got = estimate(
        plan, isl, osl, question.clients, question.budget, max_num_seqs=question.max_num_seqs,
        requests_per_client=STEADY,
    )  # fmt: skip
    tokens_per_s = question.clients * osl / e2e_ms * MS_PER_S / plan.layout.world_size
    return Compared(
        question, got.tpot_ms / tpot_ms - 1.0, got.ttft_ms / ttft_ms - 1.0,
        got.tokens_per_s_per_gpu / tokens_per_s - 1.0, tpot_ms, ttft_ms,
    )  # fmt: skip


def sample(tables: Tables, ranks: Sequence[int], count: int, seed: int = 0) -> list[Compared]:
    """Compare ``count`` questions per number of ranks; those without a plan are skipped."""
    plans: dict[Any, StepPlan] = {}
    found: list[Compared] = []
    for number in ranks:
        most = len(found) + count // len(ranks)
        for question in questions(number, seed):
            if len(found) >= most:
                break
            try:
                answer = compare(question, plan_of(question, tables, plans))
            except FastroofError:
                continue
            if answer is not None:
                found.append(answer)
    return found


def kind_of(question: Question) -> str:
    """Return whether ranks of a question share experts."""
    return "experts" if question.model in EXPERTS else "dense"


def main(
    questions: Annotated[int, typer.Option(help="Number of closed loops per number of ranks.")] = 500,
    ranks: Annotated[str, typer.Option(help="Numbers of data-parallel ranks.")] = "1,2,4,8",
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    gpu: Annotated[str, typer.Option(help="GPU.")] = "h100",
) -> None:
    """Compare estimates with simulated closed loops, by ranks, engine and kind of model."""
    from fastroof.tables import load_tables

    numbers = [int(part) for part in ranks.split(",")]
    found = sample(load_tables(gpu), numbers, questions, seed)
    columns = "questions | TPOT median | p90 | worst | bias | within 5 % | TTFT median | p90 | bias"
    print(f"| dp | engine | model | {columns} |\n|---:|---|---|{'---:|' * 9}")
    for number in numbers:
        of_ranks = [one for one in found if one.question.ranks == number]
        _print_row(number, "all", "all", of_ranks)
        for engine in ENGINES:
            for kind in ("experts", "dense"):
                some = [x for x in of_ranks if (x.question.engine, kind_of(x.question)) == (engine, kind)]
                _print_row(number, engine, kind, some)


def _print_row(ranks: int, engine: str, kind: str, some: Sequence[Compared]) -> None:
    if not some:
        return
    tpot, ttft = (np.array([getattr(one, name) for one in some]) * 100.0 for name in ("tpot", "ttft"))
    worst = tpot[np.abs(tpot).argmax()]
    cells = (
        f"{len(some)}", f"{np.median(np.abs(tpot)):.2f}", f"{np.quantile(np.abs(tpot), 0.9):.1f}",
        f"{worst:+.1f}", f"{tpot.mean():+.1f}", f"{(np.abs(tpot) <= 5.0).mean():.0%}",
        f"{np.median(np.abs(ttft)):.1f}", f"{np.quantile(np.abs(ttft), 0.9):.1f}", f"{np.median(ttft):+.1f}",
    )  # fmt: skip
    print(f"| {ranks} | {engine} | {kind} | {' | '.join(cells)} |")
