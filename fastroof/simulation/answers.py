"""The results of a simulated run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrow import facts_html, html_table
from fastroof.columns import Column
from fastroof.simulation.engine import STATUS_NAMES
from fastroof.simulation.kv_tiers import tier_answers
from fastroof.simulation.requests import (
    STATISTICS,
    RequestTimes,
    engine_use,
    gap_spread,
    gap_values_us,
    spread,
)
from fastroof.simulation.session_answers import session_results
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.engine import Outcomes
    from fastroof.traces.trace import Trace


TIMES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
"""Results with a mean and percentiles."""

STEPS: Final = ("steps", "mixed_steps", "prefill_steps", "decode_steps")

FIRST_GAP_EXPONENT: Final = 0
"""Exponent of the first bin in the histogram of gaps: 1 us."""


def duration_us(outcomes: Outcomes) -> float:
    """Return the time from the first arrival to the end of the last step, us."""
    return float(outcomes.counters["end_us"]) - float(outcomes.arrival_us.min())


def run_answers(trace: Trace, outcomes: Outcomes, times: RequestTimes, engines: int) -> dict[str, Any]:
    """Return the results of a run by the names of :meth:`fastroof.simulation.Simulation.summary`."""
    over_us = duration_us(outcomes)
    per_s = US_PER_S / over_us if over_us > 0.0 else math.nan
    finished = times.is_finished
    status = np.bincount(np.asarray(outcomes.status), minlength=len(STATUS_NAMES)).tolist()
    gaps_ms = gap_values_us(len(outcomes.gaps), FIRST_GAP_EXPONENT) / US_PER_MS
    answers: dict[str, Any] = {
        name: gap_spread(outcomes.gaps, gaps_ms) if name == "itl_ms" else spread(times.of_finished(name))
        for name in TIMES
    }
    sent_us = float(outcomes.arrival_us.max() - outcomes.arrival_us.min())
    return answers | {
        "requests": len(finished),
        **dict(zip(STATUS_NAMES, status, strict=True)),
        "duration_s": over_us / US_PER_S,
        "arrivals_per_s": (len(finished) - 1) / sent_us * US_PER_S if sent_us > 0.0 else math.nan,
        "requests_per_s": int(finished.sum()) * per_s,
        "input_tokens_per_s": int(trace.input_tokens[finished].sum()) * per_s,
        "output_tokens_per_s": int(trace.output_tokens[finished].sum()) * per_s,
        **{name: int(outcomes.counters[name]) for name in STEPS},
        "preemptions": int(outcomes.counters["preemptions"]),
        **engine_use(outcomes, engines, over_us),
        **_drafts(outcomes.counters),
        **_prefix_cache(outcomes.counters),
        **tier_answers(outcomes.tiers, outcomes.counters),
        **session_results(trace, outcomes, times),
    }


def _drafts(counters: dict[str, Any]) -> dict[str, float]:
    """Return the mean tokens that decodes keep of a step, if they verify draft tokens."""
    if "kept_drafts" not in counters:
        return {}
    decodes = counters["decode_tokens"]
    return {"acceptance_length": 1.0 + counters["kept_drafts"] / decodes if decodes else math.nan}


def _prefix_cache(counters: dict[str, Any]) -> dict[str, Any]:
    """Return the hits in pools of blocks, if these were simulated."""
    if "found_tokens" not in counters:
        return {}
    looked_up = counters["looked_up_tokens"]
    names = ("looked_up_tokens", "found_tokens", "found_again_tokens", "evictions")
    rate = counters["found_tokens"] / looked_up if looked_up else math.nan
    return {"prefix_cache": {"hit_rate": rate, **{name: counters[name] for name in names}}}


_TIMES: Final = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token after the first",
    "itl_ms": "time between two tokens",
    "e2e_ms": "time to the last token",
    "transfer_ms": "time to send a KV cache",
    "session_e2e_ms": "time of a session",
}
_FACTS: Final = {
    "requests": "",
    "finished": "requests",
    "timed_out": "requests",
    "rejected": "requests",
    "duration_s": "s",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "preemptions": "",
    "busy": "of the duration",
}


def answers_html(answers: Mapping[str, Any], caption: str) -> str:
    """Return HTML of times by percentile, counts and throughput with units, and warnings."""
    heads = (
        Column("time", "text", "", "of the requests that finished"),
        *(Column(name, "float", "ms", "") for name in STATISTICS),
    )
    shown = {meaning: answers[name] for name, meaning in _TIMES.items() if name in answers}
    times = ((meaning, *(spread[name] for name in STATISTICS)) for meaning, spread in shown.items())
    facts = [(name, answers[name], unit) for name, unit in _FACTS.items()]
    facts += [("warning", sentence, "") for sentence in answers["warnings"]]
    return "\n".join([html_table(heads, times, caption), facts_html(facts, "counts and throughput")])
