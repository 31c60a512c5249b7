"""What commands print of a simulated run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from fastroof.cli.output import console, counted, percent, print_facts, print_table

if TYPE_CHECKING:
    from fastroof import Simulation

__all__ = ["print_simulation", "simulation_document"]

_TIMES: Final = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
_LIMITS: Final = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
_ENDS: Final = {"timed_out": "timed out", "rejected": "rejected"}
_STEPS: Final = {
    "decode_steps": "decodes",
    "mixed_steps": "decodes and prompts",
    "prefill_steps": "prompts",
}


def simulation_document(sim: Simulation, answers: dict[str, Any]) -> dict[str, Any]:
    """Lay a run and its answers out as one JSON document."""
    plan, trace = sim.plan, sim.trace
    return {
        "version": plan.version,
        "model": plan.model.name,
        "gpu": plan.gpu.name,
        "tp": plan.tp,
        "pp": plan.layout.pp,
        "dp": plan.layout.dp,
        "ep": plan.layout.ep,
        "moe_tp": plan.layout.moe_tp,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "runtime": plan.runtime,
        "replicas": sim.replicas,
        "tables_hash": plan.tables_hash,
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "clients": trace.clients,
            "left_out": trace.left_out,
            "input_tokens": float(trace.input_tokens.mean()),
            "output_tokens": float(trace.output_tokens.mean()),
        },
        "settings": vars(sim.settings),
        **answers,
        "output_tokens_per_s_per_gpu": answers["output_tokens_per_s"] / sim.gpus,
    }


def print_simulation(sim: Simulation, answers: dict[str, Any]) -> None:
    """Print a run's answers for people."""
    out, plan, trace = console(), sim.plan, sim.trace
    gpus = sim.gpus
    layout = plan.layout
    split = "" if layout.world_size == plan.tp == layout.moe_tp else f" ({layout})"
    out.print(
        f"{plan.model.name} on {gpus} x {plan.gpu.title}{split}, {plan.dtype} weights, {plan.kv_dtype} KV "
        f"cache, runtime {plan.runtime}",
        soft_wrap=True,
    )
    rate = answers["arrivals_per_s"]
    arrivals = "all at once" if math.isnan(rate) else f"{rate:,.4g} requests/s"
    sent = f"{trace.clients:,} clients" if trace.is_closed else arrivals
    out.print(
        f"{len(trace):,} requests of {trace.name}, {sent}, {trace.input_tokens.mean():,.0f} tokens a prompt "
        f"and {trace.output_tokens.mean():,.0f} an answer in the mean",
        soft_wrap=True,
    )
    for reason, rows_left_out in trace.left_out.items():
        out.print(f"left out: {counted(rows_left_out, 'row')} ({reason})", soft_wrap=True)
    out.print()
    found = answers.get("range")
    pairs = None if found is None or found["relative_error"] is None else found
    keys = list(answers["ttft_ms"])
    rows = []
    for name, words in _TIMES.items():
        rows.append((words, *(_ms(answers[name][key]) for key in keys)))
        if pairs is not None:
            rows.append(("", *(" - ".join(map(_ms, pairs[name][key])) for key in keys)))
    print_table(("ms", *keys), rows, left=("ms",))
    out.print()
    print_facts(_facts(sim, answers, pairs))


def _ms(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:,.0f}" if value >= 1000.0 else f"{value:,.2f}" if value < 100.0 else f"{value:,.1f}"


def _facts(sim: Simulation, answers: dict[str, Any], pairs: dict[str, Any] | None) -> list[tuple[str, str]]:
    gpus = sim.gpus
    tokens = answers["output_tokens_per_s"]
    per_gpu = f" ({tokens / gpus:,.0f} a GPU)" if gpus > 1 else ""
    others = [f"{answers[name]:,} {words}" for name, words in _ENDS.items() if answers[name]]
    facts = [
        ("finished", ", ".join([f"{answers['finished']:,} in {answers['duration_s']:,.4g} s", *others])),
    ]
    if not answers["steps"]:
        # there are no rates, shares or means of a run without time
        return [*facts, ("steps", "none: no request ran")]
    facts += [
        (
            "throughput",
            f"{answers['requests_per_s']:,.4g} requests/s, {tokens:,.0f} output tokens/s{per_gpu}",
        ),
    ]
    goodput = answers.get("goodput")
    if goodput is not None:
        limits = ", ".join(f"{_LIMITS[name]} {limit:g} ms" for name, limit in goodput["limits"].items())
        rate, share = f"{goodput['requests_per_s']:,.4g} requests/s", percent(goodput["share"])
        facts.append(("goodput", f"{rate}, {share} of all, within {limits}"))
        flips = () if pairs is None else pairs["flips"]
        verdicts = {
            name: "open" if name in flips else "kept" if is_kept else "broken"
            for name, is_kept in goodput["p99_within"].items()
        }
        words = ", ".join(f"{_LIMITS[name]} {verdict}" for name, verdict in verdicts.items())
        facts.append(("limits at p99", words))
    use = {name: answers[name] for name in ("running", "waiting", "kv_use")}
    facts += [
        ("running", f"{use['running']['mean']:,.1f} in the mean, {use['running']['peak']:,.0f} at most"),
        ("waiting", f"{use['waiting']['mean']:,.1f} in the mean, {use['waiting']['peak']:,.0f} at most"),
        (
            "KV cache",
            f"{percent(use['kv_use']['mean'])} in the mean, {percent(use['kv_use']['peak'])} at most of "
            f"{sim.outcomes.counters['num_gpu_blocks']:,} blocks of {sim.settings.block_size}",
        ),
        ("steps", f"{answers['steps']:,}: {_steps(answers)}; {percent(answers['busy'])} of the time"),
        ("preemptions", f"{answers['preemptions']:,}"),
    ]
    cache = answers.get("prefix_cache")
    if cache is not None:
        again = f", {cache['found_again_tokens']:,} tokens after preemptions"
        evictions = f"{cache['evictions']:,} evictions"
        facts.append(("prefix cache", f"{percent(cache['hit_rate'])} of prompts{again}; {evictions}"))
    if "pools" in answers:
        pools = (
            f"{pool['replicas']} x tp {pool['tp']} {name} ({percent(pool['busy'])} busy)"
            for name, pool in answers["pools"].items()
        )
        sent = answers["transfer_ms"]
        facts.append(("pools", ", ".join(pools)))
        facts.append(("transfers", f"{_ms(sent['mean'])} ms in the mean, {_ms(sent['p99'])} at p99"))
    if pairs is not None:
        error = percent(pairs["relative_error"])
        facts.append(
            ("below times", f"on steps {error} faster - slower: one standard error {pairs['basis']}")
        )
    elif "range" in answers:
        facts.append(("step error", answers["range"]["basis"]))
    return facts


def _steps(answers: dict[str, Any]) -> str:
    return ", ".join(f"{answers[name]:,} of {words}" for name, words in _STEPS.items() if answers[name])
