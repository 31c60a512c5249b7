"""A run by the figures of a load generator's file, and whether it is a steady state that a fit can use.

Every format is reduced to the same figures; only this module decides what becomes of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
class GeneratorRun:
    """One run for a fit: clients with one request in flight each, or in ``refused`` why it is left out.

    What a file does not have is nan or an empty text. Times are means over requests; ``length_spread`` is the
    range of the prompts' lengths over their mean, as if it were uniform. ``concurrency`` are the requests in
    flight when one arrives, itself included, ``concurrency_from`` how that is known, and ``running`` the mean
    requests in flight by Little's law, the rate times the mean latency. ``accepted`` are mean tokens per
    request and step of speculative decoding, ``drafts`` the file's words for it.
    """

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
    concurrency: float = math.nan
    concurrency_from: str = ""
    requests_per_client: float = math.nan
    running: float = math.nan
    path: str = ""

    @property
    def latency_s(self) -> float:
        """Mean time of a request, s: its latency, or TTFT and the time of its tokens."""
        return (self.by_tokens_ms if math.isnan(self.latency_ms) else self.latency_ms) / MS_PER_S

    @property
    def by_tokens_ms(self) -> float:
        """Mean time of a request by its tokens, ms."""
        return self.ttft_ms + self.tpot_ms * (self.osl - 1.0)

    @property
    def has_rate(self) -> bool:
        """Whether requests were sent at a rate."""
        return math.isfinite(self.rate_per_s) and self.rate_per_s > 0.0


def with_concurrency(run: GeneratorRun) -> GeneratorRun:
    """Return a run with its requests in flight, or with the reason why no fit should use it."""
    drafts = run.drafts or ("" if math.isnan(run.accepted) else f"{run.accepted:.3g} tokens a step")
    # older files count only answered requests
    failed = 0.0 if math.isnan(run.failed) else run.failed
    run = replace(run, drafts=drafts, failed=failed, refused=run.refused or _refusal(run))
    if not run.refused:
        run = _open(run) if run.has_rate else _closed(run)
    return replace(run, concurrency_from="") if run.refused else run


def _refusal(run: GeneratorRun) -> str:
    """Return why the means are invalid; empty if they are valid."""
    if math.isnan(run.tpot_ms):
        if run.has_medians:
            return "it has medians and percentiles of the time per output token, but a fit needs the mean"
        return "it has no time per output token: requests must be streamed, with outputs of several tokens"
    if not run.requests >= 1:
        return "no request was answered"
    sent = run.requests + run.failed
    if run.failed > MOST_FAILED * sent:
        return f"{run.failed:g} of {sent:g} requests failed, more than {MOST_FAILED:.0%}"
    if not (1.0 <= run.isl < math.inf and 1.0 < run.osl < math.inf):
        return (
            f"mean lengths must be known, at least 1 token in and above 1 out; "
            f"got {run.isl:g} in and {run.osl:g} out"
        )
    if not 0.0 < run.tpot_ms < math.inf:
        return f"the time per output token must be above 0 ms, got {run.tpot_ms:g}"
    latency_ms, by_tokens_ms = run.latency_ms, run.by_tokens_ms
    if latency_ms <= 0.0:
        return f"the latency of a request must be above 0 ms, got {latency_ms:g}"
    if abs(by_tokens_ms / latency_ms - 1.0) > ADDS_UP:
        return (
            f"its means are inconsistent: a request took {latency_ms:.4g} ms, TTFT + TPOT x (OSL - 1) is "
            f"{by_tokens_ms:.4g}: tokens of one answer were counted in two ways, or lengths vary too much"
        )
    return ""


def _closed(run: GeneratorRun) -> GeneratorRun:
    clients, refused = run.clients, ""
    if not clients >= 1.0:
        refused = (
            "neither a number of clients nor a rate limited its requests: all were sent together, which is "
            "not a steady state; limit them (--max-concurrency or --concurrency)"
        )
        return replace(run, refused=refused)
    rounds = run.requests / clients
    if rounds < LEAST_ROUNDS:
        refused = (
            f"{run.requests:g} requests for {clients:g} clients: with fewer than {LEAST_ROUNDS:g} each "
            f"they are never in a steady state; send {5 * clients:g} or more"
        )
    elif (busy := run.requests * run.latency_s / run.duration_s) < LEAST_BUSY * clients:
        refused = (
            f"a mean of {busy:.3g} of {clients:g} clients were busy: the generator did not keep up, or "
            "waited between requests"
        )
    elif busy > clients * (1.0 + ADDS_UP):
        refused = (
            f"its figures are inconsistent: {clients:g} clients cannot have {busy:.3g} requests in flight"
        )
    run = replace(run, refused=refused, requests_per_client=rounds)
    if refused:
        return run
    known_from = run.concurrency_from or "clients of a closed loop"
    return replace(run, concurrency=clients, concurrency_from=known_from, running=busy)


def _open(run: GeneratorRun) -> GeneratorRun:
    rate, latency_s = run.rate_per_s, run.latency_s
    if not run.ttft_ms > 0.0 and math.isnan(run.latency_ms):
        return replace(run, refused="a rate without TTFT or latency does not determine the load")
    sending_s = run.duration_s - latency_s
    if not sending_s > latency_s:
        refused = (
            f"it lasted {run.duration_s:.4g} s, a request {latency_s:.4g} s: in less than the time "
            "of two requests, start and end are most of the run; send more"
        )
        return replace(run, refused=refused)
    # the last answer comes one latency after the last request; by chance a few more or fewer arrive
    sent = run.requests / sending_s
    chance = 2.0 / math.sqrt(run.requests) if run.arrivals == POISSON else 0.0
    waits = not run.ttft_ms < MOST_WAITING * latency_s * MS_PER_S
    if sent < ((KEEPS_UP if waits else NEVER_SENT) - chance) * rate:
        refused = (
            f"{rate:.4g} requests/s were requested and {sent:.4g} answered: they pile up, so that "
            "there is no steady state; send fewer, or limit them"
        )
        return replace(run, refused=refused)
    rate = min(rate, sent) if chance else rate
    met = running = rate * latency_s
    source = f"Little's law, {rate:.4g}/s x {latency_s:.4g} s"
    if run.arrivals == POISSON:
        met, source = met + 1.0, f"{source}, and the request itself: arrivals are Poisson"
    elif not run.arrivals:
        source = f"{source}, arrivals assumed to be evenly spaced"
    if run.clients >= 1.0:
        met = min(met, run.clients)
    return replace(run, concurrency=max(met, 1.0), concurrency_from=source, running=running)
