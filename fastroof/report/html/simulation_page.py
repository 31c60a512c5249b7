"""The interactive page of a simulated run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof._version import __version__
from fastroof.arrays import Floats, Longs
from fastroof.report.html.document import checked_page_path, write_page
from fastroof.report.html.page import rounded
from fastroof.simulation.requests import checked_limits
from fastroof.units import GB, SECONDS_PER_HOUR, US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.requests import RequestTimes
    from fastroof.simulation.simulation import Simulation


POINTS: Final = 240
"""Maximum number of points per distribution."""

MOST_DOTS: Final = 2000
"""Maximum number of requests drawn as dots; more are drawn as percentiles over stretches of time."""

STRETCHES: Final = 120
FEWEST: Final = 20
"""Minimum mean requests per stretch: fewer make a percentile meaningless."""


def series_values(sim: Simulation) -> dict[str, list[Any]]:
    """Return the time series of a simulation as lists of rounded values."""
    table = sim.series()
    return {name: [rounded(value) for value in table[name].to_pylist()] for name in table.column_names}


def requests_over_time(sim: Simulation, name: str) -> dict[str, Any]:
    """Return a latency by arrival time: of each request, or percentiles over stretches of time."""
    values: Floats = getattr(sim.times, name)
    has_value = sim.times.is_finished & np.isfinite(values)
    arrival_s, times_ms = sim.outcomes.arrival_us[has_value] / US_PER_S, values[has_value]
    if len(times_ms) <= MOST_DOTS:
        return {"time_s": _short(arrival_s), "ms": _short(times_ms)}
    count = min(STRETCHES, len(times_ms) // FEWEST)
    edges = np.linspace(arrival_s.min(), arrival_s.max(), count + 1)
    place = np.clip(np.searchsorted(edges, arrival_s, side="right") - 1, 0, count - 1)
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(count + 1))
    sorted_ms = times_ms[order]
    middles: list[float] = []
    halves: list[float] = []
    tails: list[float] = []
    for i in range(count):
        of_stretch = sorted_ms[bounds[i] : bounds[i + 1]]
        if len(of_stretch):
            middles.append(float(edges[i] + edges[i + 1]) / 2.0)
            half, tail = np.percentile(of_stretch, (50, 99)).tolist()
            halves.append(half)
            tails.append(tail)
    columns = {"time_s": middles, "p50": halves, "p99": tails}
    return {key: [rounded(value) for value in listed] for key, listed in columns.items()}


def cumulative(values: Floats) -> dict[str, list[Any]]:
    """Return the cumulative distribution at some points, dense in the tail."""
    if not len(values):
        return {"ms": [], "share": []}
    ordered = np.sort(values)
    ranks = _ranks(len(ordered))
    return {"ms": _short(ordered[ranks]), "share": _short((ranks + 1) / len(ordered))}


def _ranks(count: int) -> Longs:
    """Return the ranks to draw: evenly spaced, and denser towards the largest."""
    if count <= POINTS:
        return np.arange(count)
    even = np.linspace(0, count - 1, POINTS // 2)
    tail = count - np.geomspace(1.0, count / 10.0, POINTS // 2)
    return np.unique(np.concatenate([even, tail]).astype(np.int64))


def _gaps(counts: Longs, middles_us: Floats) -> dict[str, list[Any]]:
    """Return the cumulative distribution of a histogram."""
    total = int(counts.sum())
    if not total:
        return {"ms": [], "share": []}
    filled = np.flatnonzero(counts)
    upto = np.cumsum(counts[filled])
    drawn = np.unique(np.searchsorted(upto, _ranks(total), side="right"))
    return {"ms": _short(middles_us[filled[drawn]] / 1e3), "share": _short(upto[drawn] / total)}


def distributions(sim: Simulation, with_range: bool) -> dict[str, dict[str, Any]]:
    """Return the distributions of TTFT, TPOT, ITL and E2E."""
    from fastroof.simulation.requests import gap_values_us

    runs: list[tuple[str, RequestTimes, Longs]] = [("here", sim.times, sim.outcomes.gaps)]
    if with_range:
        for name, (run, times) in zip(("fast", "slow"), sim.scaled_runs, strict=True):
            runs.append((name, times, run.gaps))
    middles_us = gap_values_us(len(sim.outcomes.gaps), 0)
    found: dict[str, dict[str, Any]] = {}
    for quantity in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        found[quantity] = {
            name: _gaps(gaps, middles_us) if quantity == "itl_ms" else cumulative(times.of_finished(quantity))
            for name, times, gaps in runs
        }
    return found


def _short(values: Floats) -> list[Any]:
    return [rounded(float(value)) for value in values if not math.isnan(value)]


_SCRIPTS: Final = ("look.js", "percentiles.js", "over_time.js", "distributions.js", "run.js")

_MANY_SECONDS: Final = 1e4
_TIMES: Final = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL, all gaps",
    "e2e_ms": "E2E",
    "transfer_ms": "Transfer of KV cache",
    "session_e2e_ms": "Session",
}


def write_simulation_report(
    sim: Simulation,
    output: str | Path,
    *,
    limits: Mapping[str, float] | None = None,
    answers: Mapping[str, Any] | None = None,
) -> Path:
    """Write a simulated run as one self-contained interactive page.

    Parameters
    ----------
    sim : Simulation
        Simulation to show, from :func:`fastroof.simulate`.
    output : str or Path
        Path of the page, ending in .html; an existing file is replaced atomically.
    limits : mapping of str to float, optional
        Limits of a request, ms, by ``ttft_ms``, ``tpot_ms`` and ``e2e_ms``: drawn, and used for goodput.
    answers : mapping, optional
        Result of ``sim.summary`` with these limits, if already computed.

    Returns
    -------
    Path
        Path of the page.

    Raises
    ------
    FastroofError
        If a limit is invalid, or the page cannot be written.

    Examples
    --------
    >>> write_simulation_report(None, "report.pdf")
    Traceback (most recent call last):
    fastroof.errors.FastroofError: output report.pdf must end in .html
    """
    output = checked_page_path(output)
    given: dict[str, Any] = checked_limits(limits or {})
    answers = sim.summary(**given) if answers is None else answers
    found = answers.get("range")
    has_range = found is not None and found["relative_error"] is not None
    document = {
        "facts": {"limits": given},
        "figures": [[name, words] for name, words in run_figures(answers).items()],
        "percentiles": [
            {
                "name": words,
                "values": {key: rounded(value) for key, value in answers[name].items()},
                "range": (
                    {key: [rounded(value) for value in pair] for key, pair in found[name].items()}
                    if has_range and found is not None and name in found
                    else None
                ),
            }
            for name, words in _TIMES.items()
            if name in answers
        ],
        "series": series_values(sim),
        "by_arrival": {name: requests_over_time(sim, name) for name in ("ttft_ms", "e2e_ms")},
        "distributions": distributions(sim, has_range),
        "error": None if not has_range or found is None else rounded(found["relative_error"]),
        "warnings": list(answers["warnings"]),
        "notes": _notes(sim, answers),
    }
    write_page(
        output,
        "simulation.html",
        heading=f"{sim.plan.model.name} on {_up_to(sim)}{sim.gpus} x {sim.plan.gpu.title}: {sim.trace.name}",
        subtitle=_subtitle(sim),
        styles=("simulation.css",),
        scripts=_SCRIPTS,
        document=document,
    )
    return output


def _up_to(sim: Simulation) -> str:
    """Return ``up to`` if a rule starts and stops replicas."""
    return "up to " if sim.outcomes.lives is not None else ""


def _subtitle(sim: Simulation) -> str:
    plan, settings = sim.plan, sim.settings
    words = [
        f"{len(sim):,} requests simulated",
        f"engine {plan.profile.title}",
        f"{_up_to(sim)}{sim.replicas} engine{'s' * (sim.replicas > 1)} on "
        f"{sim.gpus} GPU{'s' * (sim.gpus > 1)}",
        f"{plan.dtype} weights, {plan.kv_dtype} KV cache",
        f"max_num_batched_tokens {settings.max_num_batched_tokens:,}, max_num_seqs {settings.max_num_seqs:,}",
    ]
    words.append(f"{sim.outcomes.counters['num_gpu_blocks']:,} blocks of {settings.block_size}")
    words.append(f"measured tables {plan.tables_hash[:12]}" if plan.tables_hash else "no measured tables")
    words.append(f"fastroof {__version__}")
    return "; ".join(words)


def run_figures(answers: Mapping[str, Any]) -> dict[str, str]:
    """Return a run's figures other than times as text."""
    running, waiting, used = (answers[name] for name in ("running", "waiting", "kv_use"))
    figures = {
        "requests finished": f"{answers['finished']:,} of {answers['requests']:,}",
        "duration": _duration(answers["duration_s"]),
        "requests/s": _number(answers["requests_per_s"]),
        "output tokens/s": _number(answers["output_tokens_per_s"]),
        "input tokens/s": _number(answers["input_tokens_per_s"]),
        "running, mean (peak)": f"{_number(running['mean'])} ({running['peak']:,.0f})",
        "waiting, mean (peak)": f"{_number(waiting['mean'])} ({waiting['peak']:,.0f})",
        "KV cache, mean (peak)": f"{_percent(used['mean'])} ({_percent(used['peak'])})",
        "busy": _percent(answers["busy"]),
        "steps": f"{answers['steps']:,}",
        "preemptions": f"{answers['preemptions']:,}",
    }
    if answers["timed_out"]:
        figures["timed out"] = f"{answers['timed_out']:,}"
    if answers["rejected"]:
        figures["rejected"] = f"{answers['rejected']:,}"
    for name, pool in answers.get("pools", {}).items():
        figures[f"{name} engines"] = f"{pool['replicas']:,} of tp {pool['tp']}, {_percent(pool['busy'])} busy"
    if "autoscaling" in answers:
        scaling = answers["autoscaling"]
        count = scaling["replicas"]
        figures["replicas, mean (range)"] = f"{_number(count['mean'])} ({count['min']:,} to {count['max']:,})"
        figures["GPU hours"] = _number(scaling["gpu_hours"])
        for name, fleet in scaling.get("fixed", {}).items():
            words = "GPU hours, fixed at the peak" if name == "at_peak" else "GPU hours, fewest fixed"
            figures[words] = "-" if fleet is None else _number(fleet["gpu_hours"])
    if "sessions" in answers:
        sessions = answers["sessions"]
        figures["sessions finished"] = f"{sessions['finished']:,} of {sessions['sessions']:,}"
        figures["requests of a session"] = _number(sessions["requests_each"], 3)
    if "prefix_cache" in answers:
        figures["prompts in the prefix cache"] = _percent(answers["prefix_cache"]["hit_rate"])
    if "kv_tiers" in answers:
        tiers = answers["kv_tiers"]
        figures["of them in the GPU"] = _percent(tiers["gpu_hit_rate"])
        for one in tiers["tiers"]:
            fetched, written = (_number(one[f"{name}_bytes"] / GB) for name in ("fetched", "written"))
            words = f"{_percent(one['hit_rate'])}; {fetched} GB fetched, {written} GB stored"
            figures[f"in KV tier {one['name']}"] = words
        figures["requests waited for tiers"] = _duration(tiers["request_wait_s"])
        figures["steps waited for tiers"] = _duration(tiers["step_wait_s"])
    goodput = answers.get("goodput")
    if goodput is not None:
        rate = _number(goodput["requests_per_s"])
        figures["goodput"] = f"{rate} requests/s ({_percent(goodput['share'])})"
    energy = answers.get("energy")
    if energy is not None:
        error = f"\N{PLUS-MINUS SIGN}{_percent(energy['relative_error'])}"
        figures["J a token"] = f"{_number(energy['joules_per_token'])} ({error}, {energy['basis']})"
        figures["W a GPU"] = _number(energy["watts_per_gpu"], 3)
    return figures


def _number(value: float, digits: int = 4) -> str:
    """Format a number with some significant digits and without an exponent; NaN as a dash."""
    if math.isnan(value):
        return "-"
    decimals = 0 if value == 0.0 else min(max(digits - 1 - math.floor(math.log10(abs(value))), 0), 6)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _percent(share: float) -> str:
    return f"{_number(100.0 * share, 3)}\N{NO-BREAK SPACE}%"


def _duration(seconds: float) -> str:
    """Format a duration in seconds, and in hours where these are many."""
    words = f"{_number(seconds)} s"
    return f"{_number(seconds / SECONDS_PER_HOUR, 2)} h ({words})" if seconds >= _MANY_SECONDS else words


def _notes(sim: Simulation, answers: Mapping[str, Any]) -> list[str]:
    notes = [
        "Percentiles are over finished requests; those of ITL are over all gaps between two tokens of a "
        "request, from a histogram, and accurate to 0.4 %."
    ]
    found = answers.get("range")
    if found is not None and found["relative_error"] is not None:
        notes.append(
            f"The range is for the same requests on steps {found['relative_error'] * 100:.1f} % faster and "
            f"slower: one standard error {found['basis']}."
        )
    elif found is not None:
        notes.append(f"The error of a step is {found['basis']}.")
    else:
        error = sim.step_error
        notes.append(
            f"One standard error of a step is {error.relative * 100:.1f} %, {error.basis}; the load is not "
            "near saturation, where queues amplify it."
            if error.is_known
            else f"The error of a step is {error.basis}."
        )
    return notes
