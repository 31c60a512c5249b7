"""``guidellm benchmark`` (``guidellm run``): a report of several benchmarks.

Recorded from releases 0.3.1 and 0.8.1; 0.2.1, 0.4.0 and 0.5.4 were read in their wheels. The strategy moved
from ``args`` to ``config`` in 0.4. In every release, ``inter_token_latency_ms`` is the time per token after
the first; ``time_per_output_token_ms`` divides by all tokens, and includes TTFT from 0.4 on. From
0.4 on its mean weights requests by their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from fastroof.errors import TableError
from fastroof.evidence.load_generators.documents import Document, number, part, spread_of_std, text
from fastroof.evidence.load_generators.figures import CONSTANT, POISSON, Figures
from fastroof.units import MS_PER_S

NAME: Final = "guidellm"

_CLOSED: Final = ("concurrent", "synchronous", "throughput")
_OPEN: Final[Mapping[str, str]] = {"constant": CONSTANT, "async": CONSTANT, "poisson": POISSON}


def is_written_by(document: Document) -> bool:
    """Return whether this tool wrote the document."""
    listed = document.get("benchmarks")
    return isinstance(listed, list) and all(isinstance(b, Mapping) and "metrics" in b for b in listed)


def figures_of(where: str, document: Document, name: str) -> list[Figures]:
    """Read the benchmarks of a report."""
    if not document["benchmarks"]:
        raise TableError(f"{where}: a report without benchmarks; was the run cut off?")
    return [
        _figures(f"{where}, benchmark {i}", one, f"{name} {i}")
        for i, one in enumerate(document["benchmarks"], start=1)
    ]


def _figures(where: str, one: Document, name: str) -> Figures:
    strategy = part(one, "config", "strategy") or part(one, "args", "strategy")
    kind = text(strategy, "type_", "kind")
    clients = rate = math.nan
    refused = ""
    if kind == "synchronous":
        clients = 1.0
    elif kind in _CLOSED:
        clients = number(where, strategy, "streams" if kind == "concurrent" else "max_concurrency")
    elif kind in _OPEN:
        rate = number(where, strategy, "rate")
        clients = number(where, strategy, "max_concurrency")
    else:
        refused = f"strategy {kind or 'unknown'} has neither clients nor a rate; use concurrent"
    totals = part(one, "metrics", "request_totals") or part(one, "request_totals")
    model = text(part(one, "worker"), "backend_model") or text(part(one, "config", "backend"), "model")
    duration_s = number(where, one, "duration")
    return Figures(
        file=where,
        name=name,
        generator=NAME,
        model=model,
        requests=number(where, totals, "successful"),
        failed=_or_zero(number(where, totals, "errored")),
        isl=_mean(where, one, "prompt_token_count"),
        osl=_mean(where, one, "output_token_count"),
        ttft_ms=_mean(where, one, "time_to_first_token_ms"),
        tpot_ms=_mean(where, one, "inter_token_latency_ms") or math.nan,
        latency_ms=_mean(where, one, "request_latency") * MS_PER_S,
        clients=clients,
        rate_per_s=rate,
        arrivals=_OPEN.get(kind, ""),
        duration_s=duration_s,
        length_spread=spread_of_std(
            _mean(where, one, "prompt_token_count"),
            number(where, part(one, "metrics", "prompt_token_count", "successful"), "std_dev"),
        ),
        refused=refused,
    )


def _mean(where: str, one: Document, metric: str) -> float:
    return number(f"{where}, {metric}", part(one, "metrics", metric, "successful"), "mean")


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
