"""Answers to the page's questions: a step, layouts over clients, and the capacity within limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.checks import beyond_context
from fastroof.columns import ORIGINS
from fastroof.errors import FastroofError, SimulationError
from fastroof.models.layout import ALL_TP_SIZES, Layout
from fastroof.report.front import pareto_front
from fastroof.report.plots import grouped_us, groups_of
from fastroof.report.steps import achieved
from fastroof.run import StepBatch
from fastroof.serving import ServingEstimate, estimate, fit
from fastroof.serving.scenarios import STEADY
from fastroof.simulation import Workload
from fastroof.simulation.capacity import capacity
from fastroof.simulation.pools import ranks_of
from fastroof.simulation.settings import EngineSettings, simulated_steps
from fastroof.stopping import check_stopped
from fastroof.sweep.recommendations.candidates import default_limits, default_limits_words
from fastroof.ui.commands import (
    capacity_command,
    capacity_limits,
    fit_command,
    lengths_written,
    serving_command,
    step_command,
)
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.arrays import Longs
    from fastroof.plan import StepPlan
    from fastroof.plan.explain import Explanation
    from fastroof.ui.plans import PlanStore
    from fastroof.ui.view import View


MOST_STEPS: Final = 2**24
"""Maximum steps of a simulation, as counted by :func:`fastroof.simulation.settings.simulated_steps`."""


def capacity_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Return the request rate that the view's layout serves within its limits, found by simulation."""
    limits = capacity_limits(view)
    if not limits:
        raise SimulationError("a capacity needs a limit: set one on TTFT or TPOT")
    prompts, outputs = lengths_written(view)
    workload = Workload(isl=prompts, osl=outputs)
    plan = store.plan(view, view.simulated_sizes).plan
    drawn = workload.trace(rate=1.0)
    settings = EngineSettings.of_plan(plan, max_num_batched_tokens=view.max_num_batched_tokens)
    check_steps(simulated_steps(drawn, settings, ranks=ranks_of(plan)), len(drawn))
    # None selects the engine's default
    options: dict[str, Any] = {"max_num_batched_tokens": view.max_num_batched_tokens}
    options |= {"max_num_seqs": None, "block_size": None, **limits}
    found = capacity(plan, workload, **options)
    return {**found.document(), "limits": limits, "command": capacity_command(store, view)}


def check_steps(steps: int, requests: int) -> None:
    """Refuse a simulation of more steps than MOST_STEPS."""
    if steps > MOST_STEPS:
        raise SimulationError(
            f"{requests:,} requests may take {steps:,} steps, the page's maximum is {MOST_STEPS:,}; use "
            "shorter outputs or the command line"
        )


OUTSIDE_MEMORY: Final = ("allow_modelled", "front_end")
"""Options of a plan that its memory does not depend on."""


def start_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Return whether the engine starts, and a GPU's memory by use."""
    options = {name: value for name, value in view.plan_options.items() if name not in OUTSIDE_MEMORY}
    found = fit(
        store.model(view.model),
        store.gpu(view.gpu),
        max_num_batched_tokens=view.max_num_batched_tokens,
        **options,
    )
    return {
        **found.document(),
        "memory_rows": found.memory_rows(),
        "facts": found.facts(),
        "changes": [[one.options(), one.max_model_len, one.concurrency] for one in found.changes],
        "asked": fit_command(store, view),
    }


POINTS_A_DOUBLING: Final = 8
LEAST_DECODES: Final = 8
BEYOND_MEMORY: Final = 1.5
"""End of the step's curve, as a multiple of the decodes that fit in memory; at least LEAST_DECODES."""
_ROUNDING: Final = 1e-9
SERVING: Final = (
    "ttft_ms", "tpot_ms", "request_latency_ms", "tokens_per_s_per_gpu", "wait_ms", "effective_concurrency",
    "mixed_share", "relative_error", "ttft_relative_error", "tpot_relative_error", "joules_per_token",
    "joules_relative_error",
)  # fmt: skip
"""Fields of :class:`fastroof.serving.ServingEstimate` that the page shows."""


def step_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Return the step by operator, its curve, the roofline, and the clients' latency and throughput."""
    compiled = store.plan(view, view.step_sizes)
    plan = compiled.plan
    has_error = bool(plan.tables_hash)
    every = [(new, context) for count, new, context in view.requests for _ in range(count)]
    explained = plan.explain(every, with_error=has_error)
    clients = view.batch * plan.layout.batches_in_flight
    return {
        "version": __version__,
        "plan": _plan_facts(plan),
        "step": {**_step(plan, view, every, explained), "energy": _energy(plan, every, has_error)},
        "roofs": {
            "title": plan.gpu.title,
            "peaks": dict(plan.gpu.peak_flops_per_s),
            "hbm_bytes_per_s": plan.gpu.hbm_bytes_per_s,
        },
        "curve": _curve(plan, view, has_error),
        "serving": serving_numbers(store, view, clients),
        "notes": [*compiled.notes, *_notes(plan, view)],
        "commands": {
            "step": step_command(store, view),
            "serving": serving_command(store, view, clients),
        },
    }


def _plan_facts(plan: StepPlan) -> dict[str, Any]:
    layout, memory = plan.layout, plan.memory
    return {
        "model": plan.model.name,
        "has_experts": plan.model.has_experts,
        "max_position": plan.model.max_position,
        "gpu": plan.gpu.name,
        "gpu_title": plan.gpu.title,
        "gpu_bytes": plan.gpu.hbm_bytes,
        "layout": str(layout),
        "gpus": layout.world_size,
        "batches_in_flight": layout.batches_in_flight,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "lora": plan.lora_facts.get("lora"),
        "engine": plan.engine,
        "engine_title": plan.profile.title,
        "kernels": plan.kernels,
        "tables_hash": plan.tables_hash,
        "memory_bytes": memory.explain(),
        "max_kv_tokens": memory.max_kv_tokens,
    }


def _step(plan: StepPlan, view: View, every: list[tuple[int, int]], explained: Explanation) -> dict[str, Any]:
    group_of, groups = groups_of(plan), grouped_us(plan, explained.operators)
    operators = []
    for part in explained.operators:
        place = achieved(part)
        operators.append(
            {
                **part._asdict(),
                "origin": ORIGINS[part.origin],
                "group": group_of[part.role],
                "flops_per_byte": None if place is None else place[0],
                "flops_per_s": None if place is None else place[1],
                "bytes_per_s": part.moved_bytes / part.total_us * US_PER_S if part.total_us else None,
            }
        )
    added = explained.total_us - sum(groups.values())
    if added > _ROUNDING * explained.total_us:
        groups["runtime"] += added
    tokens = sum(new for new, _ in every)
    # with a batch in every stage, the slowest stage sets the pace
    paced_us = explained.total_us
    if plan.layout.pp > 1:
        paced_us = plan.cycle_us(StepBatch.from_requests([every] * plan.layout.pp))
    tokens_per_s = tokens * plan.batches_in_flight / paced_us * US_PER_S
    return {
        "requests": [list(part) for part in view.requests],
        "latency_us": explained.total_us,
        "relative_error": explained.relative_error,
        "origin": ORIGINS[explained.origin],
        "tokens": tokens,
        "tokens_per_s_per_gpu": tokens_per_s / plan.layout.world_size,
        "kv_share": _kv_share(plan, view),
        "operators": operators,
        "groups_us": {name: us for name, us in groups.items() if us > 0.0},
    }


def _energy(plan: StepPlan, every: list[tuple[int, int]], has_error: bool) -> dict[str, Any] | None:
    """Return the step's energy and power, or None if the GPU's power is unknown."""
    if not plan.gpu.tdp_w:
        return None
    drawn = plan.energy(StepBatch.from_requests([every]), with_error=has_error)
    names = ("joules", "joules_per_token", "watts", "relative_error")
    row = drawn.columns()
    return {**{name: float(row[name][0]) for name in names}, "basis": drawn.basis}


def spread_sizes(least: int, most: int, *others: int) -> Longs:
    """Return sizes evenly spaced on a log scale from ``least`` to ``most``, and the others."""
    doublings = np.log2(most / least)
    evenly = least * 2.0 ** np.linspace(0.0, doublings, round(doublings * POINTS_A_DOUBLING) + 1)
    return np.unique([*np.round(evenly).astype(np.int64), *others])


def _curve(plan: StepPlan, view: View, has_error: bool) -> dict[str, Any]:
    """Return the step's time over its number of decodes, or over its prompt tokens."""
    prompt = view.prompt_tokens
    if view.kind == "prefill":
        name, at = "prompt tokens", prompt
        sizes = spread_sizes(16, plan.max_num_batched_tokens, at)
        steps = [[(int(size), 0)] for size in sizes]
        batch = StepBatch.from_requests(steps)
        full = float(plan.memory.max_kv_tokens)
    else:
        name, at = "decodes", view.batch
        full = float(plan.memory.max_sequences(view.decode_kv_len))
        # steps far beyond the memory cannot run
        most = max(LEAST_DECODES, int(BEYOND_MEMORY * full), int(BEYOND_MEMORY * at))
        sizes = spread_sizes(
            1, min(most, plan.max_num_seqs - bool(prompt), plan.max_num_batched_tokens - prompt), at
        )
        batch = _growing(sizes, view.decode_kv_len - 1, prompt)
    times = plan.run(batch, with_error=has_error)
    parts = {name.removesuffix("_us"): us for name, us in times.components._asdict().items()}
    return {
        "x_name": name,
        "x": sizes.tolist(),
        "at": at,
        "fits": full,
        "latency_us": times.latency_us.tolist(),
        "relative_error": None if times.relative_error is None else times.relative_error.tolist(),
        "origin": [ORIGINS[code] for code in times.origin.tolist()],
        "parts_us": {name: us.tolist() for name, us in parts.items() if us.any()},
    }


def _growing(sizes: Longs, context: int, prompt: int) -> StepBatch:
    """Return steps with the given numbers of decodes, each with the prompt if it has tokens."""
    counts = sizes + bool(prompt)
    ends = np.cumsum(counts)
    new = np.ones(ends[-1], np.int64)
    contexts = np.full(ends[-1], context, np.int64)
    if prompt:
        new[ends - 1], contexts[ends - 1] = prompt, 0
    return StepBatch(new, contexts, np.concatenate([[0], ends]))


def _estimated(plan: StepPlan, view: View, clients: Any, **options: Any) -> ServingEstimate:
    """Estimate a view's load; ``clients`` may be an array."""
    return estimate(
        plan,
        view.isl,
        view.osl,
        clients,
        max_num_batched_tokens=view.budget,
        max_num_seqs=view.max_num_seqs,
        with_error=bool(plan.tables_hash),
        **options,
    )


def serving_numbers(store: PlanStore, view: View, clients: int) -> dict[str, Any]:
    """Return latency and throughput for a number of clients, or why they cannot be estimated."""
    try:
        plan = store.plan(view, view.serving_sizes(clients)).plan
        seen = _estimated(plan, view, clients, with_energy=bool(plan.gpu.tdp_w))
    except FastroofError as error:
        return {"clients": clients, "problem": str(error)}
    return {"clients": clients, **{name: getattr(seen, name) for name in SERVING}}


def _notes(plan: StepPlan, view: View) -> list[str]:
    notes = []
    memory, share = plan.memory, _kv_share(plan, view)
    if share is None:
        notes.append(
            f"the weights and the working set of a step leave no room for KV cache on {plan.gpu.title}: use "
            "more GPUs or a smaller format"
        )
    elif share > 1.0:
        most = int(memory.max_sequences(view.decode_kv_len))
        fits = f", the maximum is {most:,} decodes at kv_len {view.decode_kv_len:,}" if view.decodes else ""
        notes.append(f"the step's requests do not fit the KV cache{fits}; the step cannot run as shown")
    longest = max(new + context for _, new, context in view.requests)
    if too_long := beyond_context(plan.model.name, plan.model.max_position, longest):
        notes.append(too_long)
    return notes


def _kv_share(plan: StepPlan, view: View) -> float | None:
    """Return the share of the KV cache that the step's requests take; None if there is no room for any."""
    memory = plan.memory
    held = sum(count * memory.parts_per_request(new + context) for count, new, context in view.requests)
    return float(held / memory.parts) if memory.parts > 0 else None


MOST_CLIENTS: Final = 1024
COLUMNS: Final = (
    "ttft_ms", "tpot_ms", "request_latency_ms", "tokens_per_s_per_gpu", "wait_ms",
    "tpot_relative_error", "ttft_relative_error",
)  # fmt: skip
"""Fields of :class:`fastroof.serving.ServingEstimate` for each point."""


def layouts_answer(store: PlanStore, view: View) -> dict[str, Any]:
    """Return the estimates of all layouts over clients, and the best within the limits."""
    clients = spread_sizes(1, min(MOST_CLIENTS, view.max_num_seqs))
    layouts = [_over_clients(store, view, split, clients) for split in splits_of(store, view)]
    given = {name: ms for name in ("ttft_ms", "tpot_ms") if (ms := getattr(view, name)) is not None}
    answered = [each for each in layouts if "problem" not in each]
    alone_ms = min((float(each["ttft_ms"][0]) for each in answered), default=0.0)
    by_default = default_limits(given, alone_ms)
    limits = given | by_default
    for each in answered:
        each["within"] = np.all([each[name] <= ms for name, ms in limits.items()] or [clients > 0], axis=0)
    if answered:
        tpot, rate = (np.concatenate([each[name] for each in answered]) for name in COLUMNS[1:4:2])
        front = pareto_front(-tpot, rate, np.zeros(len(tpot), np.int64)).reshape(len(answered), -1)
        for each, on_front in zip(answered, front, strict=True):
            each["on_front"] = on_front
    best = _best(store, view, layouts, limits)
    for each in answered:
        for name in ("clients", *COLUMNS, "within", "on_front"):
            each[name] = None if each[name] is None else each[name].tolist()
    words = default_limits_words(by_default)
    return {"layouts": layouts, "best": best, "limits": limits, "default_limits": words}


def splits_of(store: PlanStore, view: View) -> Iterator[dict[str, int]]:
    """Yield layouts on up to the view's number of GPUs: tp, and for models with experts dp and ep too."""
    has_experts = store.model(view.model).has_experts
    own = {name: getattr(view, name) for name in ("tp", "pp", "dp", "ep")}
    sizes = [size for size in ALL_TP_SIZES if size <= view.gpus]
    splits = [
        {"tp": tp, "pp": 1, "dp": dp, "ep": ep}
        for tp in sizes
        for dp in (sizes if has_experts else [1])
        if tp * dp <= view.gpus
        for ep in dict.fromkeys([1, tp * dp] if has_experts else [1])
    ]
    yield from splits
    if own not in splits:
        yield own


def _over_clients(store: PlanStore, view: View, split: dict[str, int], clients: Any) -> dict[str, Any]:
    check_stopped()
    facts: dict[str, Any] = {"split": split}
    try:
        layout = Layout(**split)
        facts |= {"layout": str(layout), "gpus": layout.world_size}
        facts["is_shown"] = all(getattr(view, name) == size for name, size in split.items())
        plan = store.plan(view, view.serving_sizes(1), split).plan
        # as fastroof best compares layouts
        seen = _estimated(plan, view, clients, requests_per_client=STEADY)
    except FastroofError as error:
        return {"layout": ", ".join(f"{name} {size}" for name, size in split.items()), **facts,
                "problem": str(error)}  # fmt: skip
    return {**facts, "clients": clients, **{name: getattr(seen, name) for name in COLUMNS}}


def _best(
    store: PlanStore, view: View, layouts: list[dict[str, Any]], limits: dict[str, float]
) -> dict[str, Any] | None:
    """Return the point with the most throughput per GPU within the limits; ties go to fewer GPUs."""
    best: tuple[float, int, int] | None = None
    for number, each in enumerate(layouts):
        if "problem" in each or not each["within"].any():
            continue
        rates = np.where(each["within"], each["tokens_per_s_per_gpu"], -np.inf)
        point = int(rates.argmax())
        if best is None or float(rates[point]) > best[0]:
            best = (float(rates[point]), number, point)
    if best is None:
        return None
    _, number, point = best
    chosen = layouts[number]
    clients = int(chosen["clients"][point])
    return {
        "layout": number,
        "point": point,
        "margins": {name: 1.0 - float(chosen[name][point]) / ms for name, ms in limits.items()},
        "command": serving_command(store, view, clients, chosen["split"]),
    }
