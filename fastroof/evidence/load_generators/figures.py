"""The figures of one run in a load generator's file, and whether it is a steady state that a fit can use.

Every generator's file is reduced to the same figures; only this module decides what becomes of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from fastroof.units import MS_PER_S

MOST_FAILED: Final = 0.05
"""Share of failed requests above which the others do not represent the intended load."""

LEAST_ROUNDS: Final = 2.0
"""Minimum requests per client; with fewer, start and end (not all clients busy) are most of the run."""

ADDS_UP: Final = 0.2
"""Tolerance between TTFT + TPOT (OSL - 1) and a request's latency: lengths vary, token counts may not."""

KEEPS_UP: Final = 0.9
"""Share of the requested rate below which requests pile up, so that there is no steady state."""

NEVER_SENT: Final = 0.6
"""Share of the rate below which requests were not sent or answered, though TTFT shows no waiting.

A few long answers also make a run end later, but not by this much."""

MOST_WAITING: Final = 0.25
"""Share of its latency that a request waits for its first token if requests pile up."""

LEAST_BUSY: Final = 0.5
"""Mean share of busy clients, by Little's law, below which the clients do not represent the load."""

POISSON: Final = "poisson"
CONSTANT: Final = "constant"


@dataclass(frozen=True)
class Figures:
    """Figures of a run in a file; nan or an empty text if missing."""

    file: str
    name: str
    generator: str
    model: str = ""
    requests: float = math.nan
    failed: float = 0.0
    isl: float = math.nan
    osl: float = math.nan
    ttft_ms: float = math.nan
    tpot_ms: float = math.nan
    latency_ms: float = math.nan
    has_medians: bool = False
    clients: float = math.nan
    rate_per_s: float = math.nan
    arrivals: str = ""
    duration_s: float = math.nan
    accepted: float = math.nan
    drafts: str = ""
    length_spread: float = math.nan
    refused: str = ""


@dataclass(frozen=True)
class GeneratorRun:
    """One run for a fit: clients with one request in flight each, or the reason why it is left out.

    Attributes
    ----------
    file, name, generator, model : str
        The file, the run's name in it, the program that wrote it, and the model's name there.
    isl, osl : float
        Mean tokens of a prompt and of an output.
    concurrency : float
        Requests in flight when a request arrives, itself included.
    concurrency_from : str
        Description of how that is known.
    requests_per_client : float
        nan if the load was a rate instead of clients.
    ttft_ms, tpot_ms : float
        Means over requests, ms.
    length_spread : float
        Range of the prompts' lengths over their mean, as if it were uniform; nan if unknown.
    refused : str
        Why no fit should use it and what to change; empty if it is usable.
    path : str
        The file.
    accepted : float
        Mean tokens per request and step of speculative decoding; nan if the file has none.
    drafts : str
        Words of the file that say that it decoded speculatively; empty if it does not say so.
    """

    file: str
    name: str
    generator: str
    model: str
    isl: float
    osl: float
    concurrency: float
    concurrency_from: str
    requests_per_client: float
    ttft_ms: float
    tpot_ms: float
    length_spread: float = math.nan
    refused: str = ""
    path: str = ""
    accepted: float = math.nan
    drafts: str = ""


def run_of(figures: Figures) -> GeneratorRun:
    """Convert the figures of a file to a run."""
    refused = figures.refused or _refusal(figures)
    concurrency, known_from, rounds = math.nan, "", math.nan
    if not refused:
        concurrency, known_from, rounds, refused = _in_flight(figures)
    return GeneratorRun(
        figures.file,
        figures.name,
        figures.generator,
        figures.model,
        figures.isl,
        figures.osl,
        concurrency,
        known_from,
        rounds,
        figures.ttft_ms,
        figures.tpot_ms,
        figures.length_spread,
        refused,
        accepted=figures.accepted,
        drafts=figures.drafts or _drafts_words(figures.accepted),
    )


def _drafts_words(accepted: float) -> str:
    return "" if math.isnan(accepted) else f"{accepted:.3g} tokens a step"


def _refusal(figures: Figures) -> str:
    """Return why the means are invalid; empty if they are valid."""
    if math.isnan(figures.tpot_ms):
        if figures.has_medians:
            return "it has medians and percentiles of the time per output token, but a fit needs the mean"
        return "it has no time per output token: requests must be streamed, with outputs of several tokens"
    if not figures.requests >= 1:
        return "no request was answered"
    sent = figures.requests + figures.failed
    if figures.failed > MOST_FAILED * sent:
        return f"{figures.failed:g} of {sent:g} requests failed, more than {MOST_FAILED:.0%}"
    if not (1.0 <= figures.isl < math.inf and 1.0 < figures.osl < math.inf):
        return (
            f"mean lengths must be known, at least 1 token in and above 1 out; "
            f"got {figures.isl:g} in and {figures.osl:g} out"
        )
    if not 0.0 < figures.tpot_ms < math.inf:
        return f"the time per output token must be above 0 ms, got {figures.tpot_ms:g}"
    latency_ms, by_tokens_ms = figures.latency_ms, _by_tokens_ms(figures)
    if latency_ms <= 0.0:
        return f"the latency of a request must be above 0 ms, got {latency_ms:g}"
    if abs(by_tokens_ms / latency_ms - 1.0) > ADDS_UP:
        return (
            f"its means are inconsistent: a request took {latency_ms:.4g} ms, TTFT + TPOT x (OSL - 1) is "
            f"{by_tokens_ms:.4g}: tokens of one answer were counted in two ways, or lengths vary too much"
        )
    return ""


def _by_tokens_ms(figures: Figures) -> float:
    return figures.ttft_ms + figures.tpot_ms * (figures.osl - 1.0)


def _in_flight(figures: Figures) -> tuple[float, str, float, str]:
    """Return requests in flight, their source, requests per client, and why it is not a steady state."""
    latency_s = (_by_tokens_ms(figures) if math.isnan(figures.latency_ms) else figures.latency_ms) / MS_PER_S
    if math.isfinite(figures.rate_per_s) and figures.rate_per_s > 0.0:
        return _open(figures, latency_s)
    if not figures.clients >= 1.0:
        return (
            math.nan,
            "",
            math.nan,
            "neither a number of clients nor a rate limited its requests: all were sent together, which is "
            "not a steady state; limit them (--max-concurrency or --concurrency)",
        )
    clients = figures.clients
    rounds = figures.requests / clients
    if rounds < LEAST_ROUNDS:
        return (
            math.nan,
            "",
            rounds,
            f"{figures.requests:g} requests for {clients:g} clients: with fewer than {LEAST_ROUNDS:g} each "
            f"they are never in a steady state; send {5 * clients:g} or more",
        )
    busy = figures.requests * latency_s / figures.duration_s
    if busy < LEAST_BUSY * clients:
        return (
            math.nan,
            "",
            rounds,
            f"a mean of {busy:.3g} of {clients:g} clients were busy: the generator did not keep up, or "
            "waited between requests",
        )
    if busy > clients * (1.0 + ADDS_UP):
        return (
            math.nan,
            "",
            rounds,
            f"its figures are inconsistent: {clients:g} clients cannot have {busy:.3g} requests in flight",
        )
    return clients, "clients of a closed loop", rounds, ""


def _open(figures: Figures, latency_s: float) -> tuple[float, str, float, str]:
    rate = figures.rate_per_s
    if not figures.ttft_ms > 0.0 and math.isnan(figures.latency_ms):
        return math.nan, "", math.nan, "a rate without TTFT or latency does not determine the load"
    sending_s = figures.duration_s - latency_s
    if not sending_s > latency_s:
        refused = (
            f"it lasted {figures.duration_s:.4g} s, a request {latency_s:.4g} s: in less than the time "
            "of two requests, start and end are most of the run; send more"
        )
        return math.nan, "", math.nan, refused
    # the last answer comes one latency after the last request; by chance a few more or fewer arrive
    sent = figures.requests / sending_s
    chance = 2.0 / math.sqrt(figures.requests) if figures.arrivals == POISSON else 0.0
    waits = not figures.ttft_ms < MOST_WAITING * latency_s * MS_PER_S
    if sent < ((KEEPS_UP if waits else NEVER_SENT) - chance) * rate:
        refused = (
            f"{rate:.4g} requests/s were requested and {sent:.4g} answered: they pile up, so that "
            "there is no steady state; send fewer, or limit them"
        )
        return math.nan, "", math.nan, refused
    rate = min(rate, sent) if chance else rate
    mean = rate * latency_s
    source = f"Little's law, {rate:.4g}/s x {latency_s:.4g} s"
    met = mean
    if figures.arrivals == POISSON:
        met, source = mean + 1.0, f"{source}, and the request itself: arrivals are Poisson"
    elif not figures.arrivals:
        source = f"{source}, arrivals assumed to be evenly spaced"
    if figures.clients >= 1.0:
        met = min(met, figures.clients)
    return max(met, 1.0), source, math.nan, ""
