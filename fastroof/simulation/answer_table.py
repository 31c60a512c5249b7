"""A run's answers as a notebook shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastroof.columns import Column
from fastroof.html_tables import facts_html, html_table

__all__ = ["answers_html"]

_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")
_TIMES: Final = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token after the first",
    "itl_ms": "time between two tokens",
    "e2e_ms": "time to the last token",
    "transfer_ms": "time that a KV cache is sent",
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
    """Show times by percentile, then counts and throughput with their units, then the run's warnings."""
    heads = (
        Column("time", "text", "", "of the requests that finished"),
        *(Column(name, "float", "ms", "") for name in _STATISTICS),
    )
    shown = {meaning: answers[name] for name, meaning in _TIMES.items() if name in answers}
    times = ((meaning, *(spread[name] for name in _STATISTICS)) for meaning, spread in shown.items())
    facts = [(name, answers[name], unit) for name, unit in _FACTS.items()]
    facts += [("warning", sentence, "") for sentence in answers["warnings"]]
    return "\n".join([html_table(heads, times, caption), facts_html(facts, "counts and throughput")])
