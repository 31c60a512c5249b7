"""What requests pass before and after an engine's scheduler: HTTP, templates, tokenizers, the API server."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from fastroof.checks import is_number, shown
from fastroof.engines.values import check_fields
from fastroof.errors import PlanError
from fastroof.units import US_PER_MS

MOST_OVERHEAD_MS: Final = 1e6
"""Maximum time outside the engine that a user may give, ms: a quarter of an hour."""


@dataclass(frozen=True)
class FrontEnd:
    """Time between a client and the engine's scheduler, in both directions together.

    Attributes
    ----------
    request_ms : float
        Time of a request, ms, in which nothing waits for it: connection, routing, the way back.
    token_us : float
        Time per prompt token, us: the chat template and the tokenizer.
    server_ms : float
        Time of a request on the API server's one thread, ms. Requests that arrive together share the
        thread, so that all of them reach the engine after the sum of their times; it handles
        ``1000 / server_ms`` requests/s.
    residual : float
        Relative standard error of TTFT with it, on models unseen by the fit; 0 if unknown.
    behind : str
        Whose runs the sizes are of, as :data:`NAMES`: the engine's own server, or Dynamo.
    source : str
        What the form was read in.
    evidence : str
        The runs that the sizes were fitted to, and those that judge them.
    """

    request_ms: float = 0.0
    token_us: float = 0.0
    server_ms: float = 0.0
    residual: float = 0.0
    source: str = ""
    evidence: str = ""
    behind: str = "plain"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def adds_nothing(self) -> bool:
        """Whether clients are the engine's own clock."""
        return not (self.request_ms or self.token_us or self.server_ms)

    @property
    def times_us(self) -> tuple[float, float, float]:
        """Time of a request, of a prompt token, and of a request on the API server, us."""
        return self.request_ms * US_PER_MS, self.token_us, self.server_ms * US_PER_MS

    def alone_us(self, tokens: Any) -> Any:
        """Return the time of requests of some prompt tokens that share the API server with no other, us."""
        request_us, token_us, server_us = self.times_us
        return request_us + server_us + token_us * tokens

    def words(self) -> str:
        """Return the times in words; ``nothing`` without any."""
        parts = (
            (self.request_ms, "ms a request"),
            (self.server_ms, "ms a request on the API server"),
            (self.token_us, "us a prompt token"),
        )
        return ", ".join(f"{value:.3g} {unit}" for value, unit in parts if value) or "nothing"


NO_FRONT_END: Final = FrontEnd()
"""The engine's own clock: nothing is added."""


DYNAMO: Final = FrontEnd(
    request_ms=5.0,
    token_us=2.0,
    source="router and HTTP server of Dynamo; vLLM's engine process behind it has neither",
    evidence="chosen on the TTFT of 84 runs of qwen3-32b by vLLM 0.12 behind Dynamo, of its public sample",
    behind="dynamo",
)
"""Dynamo's frontend, whose tokenizer is Rust's."""
NAMES: Final = ("plain", "dynamo", "none")
"""Named front ends: the engine's own server, Dynamo's, and the engine's own clock."""


def front_end_given(name: str, value: Any) -> str | float:
    """Return a front end as given: one of :data:`NAMES`, or the time of a request, ms."""
    if isinstance(value, str) and value not in NAMES:
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, str) and value in NAMES:
        return value
    if not is_number(value) or not 0.0 <= value <= MOST_OVERHEAD_MS:
        raise PlanError(
            f"{name} must be {', '.join(NAMES)} or milliseconds from 0 to {MOST_OVERHEAD_MS:,.0f}, "
            f"got {shown(value)}"
        )
    return float(value)


def front_end_of(given: str | float, own: FrontEnd, engine: str) -> FrontEnd:
    """Return the front end of a name or a time, before an engine whose own is ``own``."""
    if given == "none":
        return NO_FRONT_END
    if not isinstance(given, str):
        return FrontEnd(request_ms=given, source="given")
    if given == own.behind:
        return own
    if given == DYNAMO.behind:
        return DYNAMO
    raise PlanError(
        f"front_end {given!r}: the runs of {engine} were all behind {own.behind}; use {own.behind}, none or "
        "milliseconds"
    )
