"""``fastroof simulate``: a trace of requests through a serving engine, request by request."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import fastroof
from fastroof.cli.fleet_options import FLEET, given_fleet
from fastroof.cli.named_plans import DRAFTS
from fastroof.cli.option_groups import (
    ENGINE_FACTS,
    ENGINE_SETTINGS,
    TABLES,
    engine_settings,
    plan_options,
)
from fastroof.cli.options import LIMITS_MS, Json, Model, limited_percentile, warn_beyond_context
from fastroof.cli.output import (
    ORIGIN_WORDS,
    TIMES,
    layout_suffix,
    percent,
    plan_words,
    print_facts,
    print_json,
    print_line,
    print_table,
    time_words,
)
from fastroof.cli.workload_options import WORKLOAD, print_left_out, workload_trace
from fastroof.command_group import GroupValues, taking, warn
from fastroof.units import GB, US_PER_S

if TYPE_CHECKING:
    from fastroof import Simulation


_TIMES: Final = {f"{name}_ms": words for name, words in TIMES.items()} | {"session_e2e_ms": "session"}
_SHOWN_TURNS: Final = 8
_ENDS: Final = {"timed_out": "timed out", "rejected": "rejected"}
_STEPS: Final = {"decode_steps": "decodes", "mixed_steps": "decodes and prompts", "prefill_steps": "prompts"}


def print_simulation(sim: Simulation, answers: dict[str, Any]) -> None:
    """Print a run's answers for people."""
    plan, trace = sim.plan, sim.trace
    at_most = "up to " * any("autoscaling" in one for one in (answers, *answers.get("pools", {}).values()))
    print_line(plan_words(plan, f"{at_most}{sim.gpus} x {plan.gpu.title}{layout_suffix(plan.layout)}"))
    rate = answers["arrivals_per_s"]
    arrivals = "all at once" if math.isnan(rate) else f"{rate:,.4g} requests/s"
    sent = arrivals
    if trace.is_closed:
        what, count = "requests", len(trace)
        if "sessions" in answers:
            what, count = "sessions", answers["sessions"]["sessions"]
        each = count / (trace.clients or 1)
        sent = f"{trace.clients:,} clients of {each:,.3g} {what} each, all started together"
    print_line(
        f"{len(trace):,} requests of {trace.name}, {sent}, {trace.input_tokens.mean():,.0f} tokens a prompt "
        f"and {trace.output_tokens.mean():,.0f} an answer on average"
    )
    print_left_out(trace)
    drafting = sim.pools[-1].drafting
    if drafting is not None:
        print_line(f"{drafting.speculation}; simulated {answers['acceptance_length']:,.3f}")
    if plan.execution.adapters is not None:
        most = plan.execution.adapters.active
        print_line(
            f"every request has a LoRA adapter, and steps up to {most}; which has which is not simulated"
        )
    print_line()
    found = answers.get("range")
    pairs = None if found is None or found["relative_error"] is None else found
    keys = list(answers["ttft_ms"])
    rows = []
    for name, words in _TIMES.items():
        if name not in answers:
            continue
        rows.append((words, *(_ms(answers[name][key]) for key in keys)))
        if pairs is not None and name in pairs:
            rows += [
                (f"  {which}", *(_ms(pairs[name][key][place]) for key in keys))
                for place, which in enumerate(("faster", "slower"))
            ]
    print_table(("ms", *keys), rows, left=("ms",))
    print_line()
    if "sessions" in answers:
        _print_turns(answers["sessions"]["by_turn"])
        print_line()
    print_facts(_facts(sim, answers, pairs))


def _print_turns(by_turn: list[dict[str, Any]]) -> None:
    """Print times by turn: of the first ones, and of the last."""
    shown = by_turn if len(by_turn) <= _SHOWN_TURNS else [*by_turn[: _SHOWN_TURNS - 1], by_turn[-1]]
    rows = [
        (
            f"{one['turn']}",
            f"{one['requests']:,}",
            f"{one['input_tokens']:,.0f}",
            *(_ms(one[name][key]) for name in ("ttft_ms", "e2e_ms") for key in ("mean", "p99")),
        )
        for one in shown
    ]
    heads = ("turn", "requests", "prompt", "TTFT mean", "TTFT p99", "E2E mean", "E2E p99")
    print_table(heads, rows)


def _ms(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:,.0f}" if value >= 1000.0 else f"{value:,.2f}" if value < 100.0 else f"{value:,.1f}"


def _facts(sim: Simulation, answers: dict[str, Any], pairs: dict[str, Any] | None) -> dict[str, str]:
    from fastroof.simulation.deployment import mean_gpus

    gpus = mean_gpus(sim, answers)
    tokens = answers["output_tokens_per_s"]
    per_gpu = f" ({tokens / gpus:,.0f} a GPU)" if gpus > 1 else ""
    ended = [f"{answers['finished']:,} in {time_words(answers['duration_s'] * US_PER_S)}"]
    ended += [f"{answers[name]:,} {words}" for name, words in _ENDS.items() if answers[name]]
    facts = {"finished": ", ".join(ended)}
    if not answers["steps"]:
        # a run of no duration has no rates, shares or means
        return facts | {"steps": "none: no request ran"}
    facts["throughput"] = (
        f"{answers['requests_per_s']:,.4g} requests/s, {tokens:,.0f} output tokens/s{per_gpu}"
    )
    if drawn := answers.get("energy"):
        facts["energy"] = (
            f"{drawn['joules_per_token']:,.4g} J a token ±{percent(drawn['relative_error'])}, "
            f"{drawn['watts_per_gpu']:,.0f} W a GPU, {percent(drawn['idle_joules'] / drawn['joules'])} "
            f"of {drawn['joules']:,.4g} J idle; power {drawn['basis']}"
        )
    if goodput := answers.get("goodput"):
        limits = ", ".join(f"{_TIMES[name]} {limit:g} ms" for name, limit in goodput["limits"].items())
        rate, share = f"{goodput['requests_per_s']:,.4g} requests/s", percent(goodput["share"])
        facts["goodput"] = f"{rate}, {share} of all, within {limits}"
        flips = () if pairs is None else pairs["flips"]
        verdicts = {
            name: "open" if name in flips else "kept" if is_kept else "broken"
            for name, is_kept in goodput["kept"].items()
        }
        facts[f"limits {_at(goodput['percentile'])}"] = ", ".join(
            f"{_TIMES[name]} {verdict}" for name, verdict in verdicts.items()
        )
    if "autoscaling" in answers:
        facts |= _scaling_facts(answers["autoscaling"])
    for name in ("running", "waiting"):
        facts[name] = f"{answers[name]['mean']:,.1f} mean, {answers[name]['peak']:,.0f} max"
    use = answers["kv_use"]
    facts["KV cache"] = (
        f"{percent(use['mean'])} mean, {percent(use['peak'])} max of "
        f"{sim.outcomes.counters['num_gpu_blocks']:,} blocks of {sim.settings.block_size}"
    )
    kinds = ", ".join(f"{answers[name]:,} of {words}" for name, words in _STEPS.items() if answers[name])
    facts["steps"] = f"{answers['steps']:,}: {kinds}; {percent(answers['busy'])} of the time"
    facts["preemptions"] = f"{answers['preemptions']:,}"
    if sessions := answers.get("sessions"):
        facts["sessions"] = (
            f"{sessions['finished']:,} of {sessions['sessions']:,} finished, "
            f"{sessions['requests_each']:,.3g} requests each"
        )
    if cache := answers.get("prefix_cache"):
        again = f", {cache['found_again_tokens']:,} tokens after preemptions"
        evictions = f"{cache['evictions']:,} evictions"
        facts["prefix cache"] = f"{percent(cache['hit_rate'])} of prompts{again}; {evictions}"
    if "kv_tiers" in answers:
        facts |= _tier_facts(answers["kv_tiers"])
    if "pools" in answers:
        facts["pools"] = ", ".join(
            f"{pool['replicas']} x tp {pool['tp']} {name} ({percent(pool['busy'])} busy)"
            for name, pool in answers["pools"].items()
        )
        for name, pool in answers["pools"].items():
            if "autoscaling" in pool:
                own = _scaling_facts(pool["autoscaling"])
                facts[name] = f"{own['replicas']}; {own['GPU hours']} GPU hours"
        sent = answers["transfer_ms"]
        facts["transfers"] = f"{_ms(sent['mean'])} ms mean, {_ms(sent['p99'])} at p99"
    if pairs is not None:
        error = percent(pairs["relative_error"])
        facts["faster, slower"] = f"on steps {error} off: one standard error {pairs['basis']}"
    else:
        error, basis = answers["relative_error"], answers["basis"]
        facts["step error"] = basis if error is None else f"±{percent(error)}, one standard error {basis}"
    facts["origin"] = f"of decodes {ORIGIN_WORDS[answers['origin']]}"
    return facts


def _at(percentile: float | None) -> str:
    """Return what limits apply to."""
    return "on means" if percentile is None else f"at p{percentile:g}"


def _tier_facts(tiers: dict[str, Any]) -> dict[str, str]:
    """Return where prompts were found, what the tiers sent and got, and how long was waited."""
    shares = {"the GPU": tiers["gpu_hit_rate"]} | {one["name"]: one["hit_rate"] for one in tiers["tiers"]}
    facts = {"found in": ", ".join(f"{name} {percent(share)}" for name, share in shares.items())}
    for one in tiers["tiers"]:
        sizes = {key: f"{one[f'{key}_bytes'] / GB:,.4g} GB" for key in ("fetched", "written", "peak")}
        words = f"{sizes['fetched']} fetched, {sizes['written']} stored, peak {sizes['peak']}"
        facts[f"KV tier {one['name']}"] = words
    waits = f"{tiers['request_wait_s']:,.4g} s of requests, {tiers['step_wait_s']:,.4g} s of steps"
    return facts | {"waits for tiers": waits}


def _scaling_facts(scaling: dict[str, Any]) -> dict[str, str]:
    """Return the replicas over the run and their GPU hours, compared with fixed fleets."""
    count = scaling["replicas"]
    changes = f"{scaling['started']:,} started, {scaling['stopped']:,} stopped"
    facts = {
        "replicas": f"{count['mean']:,.2f} mean, {count['min']:,} to {count['max']:,}; {changes}",
        "GPU hours": f"{scaling['gpu_hours']:,.4g}",
    }
    for name, fleet in scaling.get("fixed", {}).items():
        words = "fixed at the peak" if name == "at_peak" else "fewest fixed"
        if fleet is None:
            facts[words] = f"more than {scaling['max_replicas']:,} replicas for the limits"
            continue
        kept = "kept" if all(fleet["kept"].values()) else "broken"
        facts[words] = (
            f"{fleet['replicas']:,} replicas, {fleet['gpu_hours']:,.4g} GPU hours, "
            f"{percent(fleet['share'])} within the limits; {_at(fleet['percentile'])} {kept}"
        )
    return facts


EPILOG: Final = (
    """\b
Examples:
  fastroof simulate --model llama-3.1-8b
  fastroof simulate --model llama-3.1-70b --tp 4 --trace mine.csv --rate-scale 2 --ttft 500 --tpot 50
  fastroof simulate --model llama-3.1-8b --max-num-batched-tokens 2048 \\
      --max-num-seqs 256 --requests requests.parquet --report run.html
  fastroof simulate --model llama-3.1-8b --rate 20 --isl lognormal:1024:0.5 --osl lognormal:200:0.7
  fastroof simulate --model llama-3.1-8b --rate 60 --replicas 4 --router least_outstanding
  fastroof simulate --model llama-3.1-8b --hourly file:day.txt --autoscale concurrency:32 --max-replicas 8 \
      --startup 120 --ttft 1000 --tpot 50
  fastroof simulate --model llama-3.1-8b --rate 20 --prefill-replicas 2 --decode-replicas 1 --kv-bandwidth 50
  fastroof simulate --model llama-3.1-8b --trace mooncake.jsonl --kv-tiers vllm-offloading:200GB
  fastroof simulate --model llama-3.1-8b --trace agents.jsonl --clients 16
  fastroof simulate --model llama-3.1-70b --tp 8 --num-draft-tokens 3 --accepted 0.8,0.5,0.3 --draft mtp
  fastroof simulate --model llama-3.1-8b --rate 0.5 --turns 5 --calls uniform:1:10 --isl 4000 --growth 500 \
      --think exponential:20 --tool 1.5 --system-prompt 2000

Percentiles are over requests that finished; ITL is over all gaps between two tokens of a request. Where the
load is near saturation, or the error of a step decides whether a limit is kept, the same requests are
simulated on steps one standard error faster and slower too.

\b
JSON: version, model, gpu, tp, pp, dp, ep, moe_tp, dtype, kv_dtype, lora (if any), engine, replicas,
num_draft_tokens, accepted (given), draft, accepted_from (these with draft tokens), tables_hash,
trace [name, requests, clients, left_out (rows by reason), input_tokens, output_tokens (means)],
settings (fields of EngineSettings),
ttft_ms, tpot_ms, itl_ms, e2e_ms [mean, p50, p90, p95, p99], requests, finished, timed_out, rejected,
duration_s, arrivals_per_s, requests_per_s, input_tokens_per_s, output_tokens_per_s,
output_tokens_per_s_per_gpu, steps, mixed_steps, prefill_steps, decode_steps, preemptions, running, waiting,
kv_use [mean, peak], busy, relative_error (of a step, null if unknown), basis, origin (of decodes), warnings;
with draft tokens acceptance_length (mean tokens that a decode keeps of
a step); with --energy energy [joules, busy_joules, idle_joules,
joules_per_token, watts_per_gpu, relative_error, basis]; with limits goodput [limits, requests, share,
requests_per_s, percentile (null for means), kept];
with a simulated prefix cache prefix_cache [hit_rate, looked_up_tokens, found_tokens, found_again_tokens,
evictions]; with --kv-tiers kv_tiers [gpu_hit_rate, tiers: name, hit_rate, found_tokens, fetched_bytes,
written_bytes, evicted_bytes, peak_bytes; request_wait_s, step_wait_s]; with sessions session_e2e_ms [mean,
p50, p90, p95, p99] and sessions [sessions, finished, requests_each, by_turn: turn, requests, input_tokens,
output_tokens, ttft_ms, e2e_ms]; near saturation or with
--range, range [relative_error, basis, near_saturation, amplification, flips, and pairs: faster, slower];
with --autoscale autoscaling [rule and its numbers, replicas (mean, min, max), started, stopped, gpu_hours,
and with limits fixed: at_peak and fewest with replicas, gpu_hours, share, percentile, kept];
with pools transfer_ms [mean, p50, p90, p95, p99], pools [prefill, decode:
tp, replicas, steps, busy, with --autoscale autoscaling], and settings of a decode engine.
"""
    + ENGINE_FACTS
)


@taking(
    workload=WORKLOAD,
    plan=plan_options(without=("cp",)),
    given=ENGINE_SETTINGS,
    fleet_options=FLEET,
    speculative=DRAFTS,
    limited={name: option for name, option in LIMITS_MS.items() if name != "itl"},
    measured=TABLES,
)
def simulate(
    *,
    model: Model,
    workload: GroupValues,
    plan: GroupValues,
    given: GroupValues,
    fleet_options: GroupValues,
    speculative: GroupValues,
    limited: GroupValues,
    too_long: Annotated[
        str,
        typer.Option(metavar="error|reject", help="What to do with requests that never fit the KV cache."),
    ] = "error",
    with_range: Annotated[
        bool | None,
        typer.Option(
            "--range/--no-range",
            help="Also simulate steps one standard error faster and slower.  [default: near saturation]",
        ),
    ] = None,
    energy: Annotated[
        bool, typer.Option("--energy", help="Estimate joules of all GPUs, and per output token.")
    ] = False,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one row per request: .parquet or .csv.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with time series and distributions: .html."),
    ] = None,
    measured: GroupValues,
    as_json: Json = False,
) -> None:
    """Simulate a serving engine, request by request.

    A trace of requests goes through the engine's scheduler step by step, each step timed by the plan:
    percentiles of TTFT, TPOT, ITL and E2E, throughput, goodput, queue, preemptions.
    """
    percentile = limited_percentile(limited.pop("percentile"), limited.pop("mean"))
    limits = {f"{name}_ms": most for name, most in limited.items() if most is not None}
    if requests is not None:
        from fastroof.simulation.requests import checked_requests_path

        checked_requests_path(requests)
    if report is not None:
        from fastroof.report.html.document import checked_page_path

        checked_page_path(report)
    settings = engine_settings(given)
    trace = workload_trace(**workload)
    fleet = given_fleet(model, fleet_options, plan, settings, speculative, measured)
    served = fleet.pools[-1].plan.model
    longest = int((trace.input_tokens + trace.output_tokens).max(initial=0))
    warn_beyond_context(served.name, served.max_position, longest)
    sim = fastroof.simulate(fleet, trace, seed=workload["seed"] or 0, on_too_long=too_long)
    answers = sim.summary(**limits, percentile=percentile, with_range=with_range)
    if energy:
        answers["energy"] = sim.energy()
    if requests is not None:
        sim.write_requests(requests)
    if report is not None:
        from fastroof.report.html import write_simulation_report

        write_simulation_report(sim, report, limits=limits, answers=answers)
    if as_json:
        from fastroof.simulation.deployment import simulation_document

        print_json(simulation_document(sim, answers))
        return
    print_simulation(sim, answers)
    for path, words in ((requests, f"{len(sim):,} requests"), (report, "the page")):
        if path is not None:
            typer.echo(f"wrote {path}: {words}")
    for words in answers["warnings"]:
        warn(words)
