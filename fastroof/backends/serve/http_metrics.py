"""What an HTTP server counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from fastroof._version import __version__
from fastroof.backends.serve.message_forms import FORMS, PROTOCOL
from fastroof.errors import FastroofError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastroof.backends.serve.http_calls import Calls
    from fastroof.backends.serve.messages import Answered
    from fastroof.plan import StepPlan

__all__ = ["METRICS_TYPE", "ServeMetrics"]

METRICS_TYPE: Final = CONTENT_TYPE_LATEST
"""Content type of :meth:`ServeMetrics.text`."""

_SECONDS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    10,
    60,
)
_OUTCOMES: Final = ("answered", "refused", "failed")


class ServeMetrics:
    """Counts of one server, in a registry of its own.

    ``fastroof_messages_total`` by form and outcome (answered, refused: the message is wrong, failed: a fault
    of the server), ``fastroof_message_seconds`` by form (computing alone), ``fastroof_steps_total``,
    ``fastroof_turned_away_total`` by status (what never became a message: no token, too long, too many),
    ``fastroof_abandoned_calls_total`` and ``fastroof_timed_out_calls_total`` (ended since their client had
    left, and at the time limit), ``fastroof_calls`` and ``fastroof_connections`` now, ``fastroof_draining``,
    and what is served: ``fastroof_build_info``, ``fastroof_plan_info``.

    Parameters
    ----------
    plans : mapping of str to StepPlan
        By name.
    calls : Calls
        How many run, were abandoned and timed out.
    connections : callable
        How many there are now.
    """

    def __init__(
        self,
        plans: Mapping[str, StepPlan],
        calls: Calls,
        connections: Callable[[], float],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._messages = Counter(
            "fastroof_messages", "Messages by form and outcome.", ("form", "outcome"), registry=registry
        )
        self._seconds = Histogram(
            "fastroof_message_seconds",
            "Seconds to answer a message.",
            ("form",),
            registry=registry,
            buckets=_SECONDS,
        )
        self._steps = Counter("fastroof_steps", "Steps that were timed.", registry=registry)
        self._turned_away = Counter(
            "fastroof_turned_away",
            "Requests that were no messages, by status.",
            ("status",),
            registry=registry,
        )
        for form in ("none", *(form.name for form in FORMS)):
            self._seconds.labels(form)
            for outcome in _OUTCOMES:
                self._messages.labels(form, outcome)
        for name, words, now in (
            (
                "fastroof_calls",
                "Calls that are being answered, or whose work goes on.",
                lambda: calls.running,
            ),
            ("fastroof_connections", "Open connections.", connections),
            ("fastroof_draining", "1 once the server is told to stop.", lambda: calls.is_draining),
        ):
            Gauge(name, words, registry=registry).set_function(now)
        registry.register(_Ended(calls))
        built = Gauge("fastroof_build_info", "What serves.", ("version", "protocol"), registry=registry)
        built.labels(__version__, str(PROTOCOL)).set(1)
        plan_info = Gauge(
            "fastroof_plan_info", "What is served.", ("plan", "model", "gpu", "tp"), registry=registry
        )
        for name, plan in plans.items():
            told = plan.describe()
            plan_info.labels(name, *(str(told[what]) for what in ("model", "gpu", "tp"))).set(1)

    def count(self, answered: Answered, seconds: float) -> None:
        """Count a message that was answered in so many seconds."""
        error = answered.error
        outcome = "answered" if error is None else "refused" if isinstance(error, FastroofError) else "failed"
        self._messages.labels(answered.form, outcome).inc()
        self._seconds.labels(answered.form).observe(seconds)
        if error is None:
            self._steps.inc(len(answered.reply.get("latency_us", ())))

    def turn_away(self, status: int) -> None:
        """Count a request that did not become a message."""
        self._turned_away.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all of it."""
        return generate_latest(self._registry)


class _Ended(Collector):
    """Calls that were ended early, as they are counted where they end."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield both counts."""
        for name, words, count in (
            ("abandoned", "Calls whose client left before their answer.", self._calls.abandoned),
            ("timed_out", "Calls that took longer than the limit.", self._calls.timed_out),
        ):
            yield CounterMetricFamily(f"fastroof_{name}_calls", words, value=count)
