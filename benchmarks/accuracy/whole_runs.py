"""Compare estimates of whole runs with simulations: bursts and closed loops, start included.

``python -m benchmarks.accuracy whole-runs --questions 300`` draws models, engines, lengths and their spread,
clients and requests of each. Every request counts, as in a benchmark's means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer

from fastroof.errors import FastroofError
from fastroof.plan import StepPlan, compile_plan
from fastroof.serving.estimate import estimate
from fastroof.simulation import Trace, simulate
from fastroof.tables import Tables, load_tables

PLANS: Final = (
    ("qwen3-32b", "h100", 4, "vllm-0.12.0"),
    ("qwen3-32b", "h100", 8, "vllm-0.12.0"),
    ("llama-3.1-8b", "h100", 1, "vllm"),
    ("gpt-oss-120b", "h200", 2, "vllm"),
    ("llama-3.1-70b", "h200", 4, "vllm"),
    ("qwen3-30b-a3b", "h100", 2, "vllm"),
    ("qwen3-32b", "h200", 2, "sglang"),
    ("llama-3.1-8b", "h100", 1, "sglang"),
    ("llama-3.1-70b", "b200", 4, "trtllm-1.1.0"),
    ("qwen3-32b", "h100", 4, "trtllm-1.0.0"),
)
"""Model, GPU, tp and engine."""
SPREADS: Final = (0.0, 0.2, 0.8)
MOST_TOKENS: Final = 3e6
"""Maximum output tokens of a run."""
NEAR: Final = 0.1
BURST, CLOSED = "burst", "closed"
QUANTITIES: Final = ("ttft", "tpot", "throughput")


class Run(NamedTuple):
    """A run; of each request its prompt and output."""

    plan: int
    kind: str
    clients: int
    spread: float
    isl: Any
    osl: Any

    @property
    def trace(self) -> Trace:
        """Its requests, which all clients start together."""
        clients = None if self.kind == BURST else self.clients
        return Trace(np.zeros(len(self.isl)), self.isl, self.osl, clients=clients)


class ComparedRun(NamedTuple):
    """Estimated over simulated means, less 1."""

    run: Run
    order: str
    waits: bool
    ttft: float
    tpot: float
    throughput: float


def runs(seed: int, plans: int) -> Iterator[Run]:
    """Draw runs endlessly: a third are bursts, others have 2 to 20 requests a client."""
    rng = np.random.default_rng(seed)
    while True:
        plan, kind = int(rng.integers(plans)), (BURST, CLOSED, CLOSED)[rng.integers(3)]
        isl, osl, clients = (int(2 ** rng.uniform(*powers)) for powers in ((7, 14), (4, 10.5), (2, 8.5)))
        count = clients * (1 if kind == BURST else int(rng.integers(2, 21)))
        spread = float(rng.choice(SPREADS))
        if count * osl <= MOST_TOKENS:
            least = 1.0 - spread
            lengths = (rng.integers(max(1, int(most * least)), most + 1, count) for most in (isl, osl))
            yield Run(plan, kind, clients, spread, *lengths)


def compare(run: Run, plan: StepPlan) -> ComparedRun:
    """Answer a run by both."""
    seen = simulate(plan, run.trace, block_size=None).summary()
    got = estimate(
        plan, float(run.isl.mean()), float(run.osl.mean()), run.clients, length_spread=run.spread,
        requests_per_client=len(run.isl) / run.clients,
    )  # fmt: skip
    per_s = got.tokens_per_s_per_gpu * plan.layout.world_size
    return ComparedRun(
        run, plan.profile.scheduling.order, got.wait_ms > 0.0,
        got.ttft_ms / seen["ttft_ms"]["mean"] - 1.0, got.tpot_ms / seen["tpot_ms"]["mean"] - 1.0,
        per_s / seen["output_tokens_per_s"] - 1.0,
    )  # fmt: skip


def sample(plans: Sequence[StepPlan], count: int, seed: int) -> list[ComparedRun]:
    """Compare so many runs; those that an engine refuses are skipped."""
    found: list[ComparedRun] = []
    for run in runs(seed, len(plans)):
        try:
            found.append(compare(run, plans[run.plan]))
        except FastroofError:
            continue
        if len(found) == count:
            break
    return found


def plans_on(tables: Mapping[str, Tables], front_end: str | None) -> list[StepPlan]:
    """Compile the plans of some GPUs."""
    return [
        compile_plan(
            model, gpu, tables[gpu], tp=tp, engine=engine, max_num_batched_tokens=16384, front_end=front_end
        )
        for model, gpu, tp, engine in PLANS
        if gpu in tables
    ]


def main(
    questions: Annotated[int, typer.Option(help="Number of runs.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 52,
    front_end: Annotated[str, typer.Option(help="plain, dynamo, none, milliseconds or own.")] = "none",
) -> None:
    """Compare estimated with simulated runs: mean, median and signed error, and the share within 10 %."""
    tables = {gpu: load_tables(gpu) for gpu in dict.fromkeys(plan[1] for plan in PLANS)}
    plans = plans_on(tables, None if front_end == "own" else front_end)
    found = sample(plans, questions, seed)
    print("| kind | order | spread | runs | TTFT | TPOT | output tokens/s |\n|---|---|---:|---:|---|---|---|")
    groups: dict[tuple[str, str, str], list[ComparedRun]] = {("all", "", ""): found}
    for one in found:
        kind = f"{one.run.kind}, {'some wait' if one.waits else 'all fit'}"
        groups.setdefault((kind, one.order, f"{one.run.spread:g}"), []).append(one)
    for key, some in sorted(groups.items()):
        cells = " | ".join(_errors([getattr(one, name) for one in some]) for name in QUANTITIES)
        print(f"| {' | '.join(key)} | {len(some)} | {cells} |")


def _errors(errors: Sequence[float]) -> str:
    known = np.array([error for error in errors if np.isfinite(error)]) * 100.0
    size = np.abs(known)
    near = (size < 100.0 * NEAR).mean()
    return f"{size.mean():.1f}, {np.median(size):.1f}, {known.mean():+.1f}, {near:.0%}"
