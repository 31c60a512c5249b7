"""Workloads: random requests, drawn from a process of arrivals and distributions of lengths."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.checks import is_number, shown, whole_number
from fastroof.defaults import REQUESTS_PER_CLIENT
from fastroof.errors import TraceError
from fastroof.stopping import check_stopped
from fastroof.traces.trace import MOST_SECONDS, MOST_TOKENS, Trace
from fastroof.traces.workload_lengths import (
    CachedShare,
    Draws,
    Lengths,
    RecordedLength,
    UniformLength,
    parse_cached,
    parse_lengths,
)
from fastroof.traces.workload_rates import (
    by_hours,
    checked_hourly,
    checked_ramp,
    mean_of_ramp,
    ramped,
    unit_arrivals,
)
from fastroof.traces.workload_sessions import NO_DELAY, Delay, Turns, parse_delay, session_starts
from fastroof.units import SECONDS_PER_HOUR

ARRIVALS: Final = ("poisson", "gamma", "constant", "ramp", "hourly", "closed")
"""Kinds of arrivals."""

DEFAULT_REQUESTS: Final = 1000
MOST_REQUESTS: Final = 10**8
"""Maximum number of requests of a workload."""

_THINKS: Final = "think_s goes with clients, or several turns or calls, got arrivals {arrivals!r}"
_ARRIVALS: Final = 0
_STREAMS: Final = {
    "input_tokens": ("isl", 1),
    "output_tokens": ("osl", 2),
    "cached_tokens": ("cached_tokens", 3),
}
"""Field and stream of random numbers by column of a trace: changing one changes no other."""

_TURNS, _CALLS, _GROWTH, _THINK, _TOOL = range(4, 9)
"""Streams of sessions."""


@dataclass(frozen=True)
class Workload:
    """Random requests: a process of arrivals and distributions of lengths.

    Parameters
    ----------
    rate : float, optional
        Mean requests/s, or sessions/s where these have several; rates of ``ramp`` and ``hourly`` are scaled
        to this mean. May instead be given to :meth:`trace`.
    arrivals : str, optional
        ``"poisson"``, ``"gamma"``, ``"constant"``, ``"ramp"``, ``"hourly"`` or ``"closed"``; the default is
        the one that fits ``burstiness``, ``ramp``, ``hourly`` or ``clients`` if one is given, else
        ``"poisson"``.
    burstiness : float, default 1
        Shape of gamma-distributed gaps, as in vLLM's load generator: 1 is Poisson, less is burstier, more is
        more even. The gaps' coefficient of variation is ``1 / sqrt(burstiness)``. Applies to changing rates.
    ramp : tuple of float, optional
        Requests/s at the start and the end of the run, or at the ends of equally long parts of it, linear
        between: ``(2, 20)``, ``(2, 20, 2)``.
    hourly : tuple of float or str, optional
        Requests/s in each hour of the run, a day's profile for one, or ``"file:PATH"`` with them. They give
        ``requests``.
    clients : int, optional
        In a closed loop, the number of clients that send one request after the other.
    think_s : float or str, default 0
        Seconds from the end of an answer to the client's next request, in a closed loop, or to the next turn
        of a session. For sessions also ``"exponential:MEAN"``, ``"lognormal:MEAN:SIGMA"`` or
        ``"uniform:LEAST:MOST"``.
    requests : int, optional
        Number of requests (default: 1000, of a closed loop 10 a client); the last session is cut.
    turns, calls : int or str, default 1
        Turns of a session, and calls of an agent in each: numbers or distributions, as of tokens. With more
        than one, each request starts after the one before it, and its prompt is that one's prompt and answer
        with ``growth_tokens`` after them.
    tool_s : float or str, default 0
        Seconds from the end of a call to the next one of its turn, as ``think_s``: time of tools.
    growth_tokens : int, str or Trace, optional
        New tokens of a session's later prompts; by default those of ``isl``, which are the first's.
    system_tokens : int, default 0
        Tokens at the start of all prompts, before the others.
    isl, osl : int, str or Trace, default 1024 and 128
        Tokens of prompts and outputs: a number, ``"lognormal:MEAN:SIGMA[:MOST]"`` (mean of the tokens, sigma
        of their logarithm), ``"uniform:LEAST:MOST"``, ``"file:PATH"`` or a trace to draw from. Where both are
        of one trace, a request's two lengths come from one row.
    cached_tokens : int, str or Trace, default "auto"
        Prompt tokens in the prefix cache: the same forms, or ``"share:0.5"`` of the prompt; at most all but
        the last token, which is always computed. ``"history"`` is all that came before a prompt's new
        tokens, as if the cache never lost any. ``"auto"`` is history in sessions, else 0.
    seed : int, default 0
        Seed of the random numbers (PCG64). Arrivals and each length have separate streams.
    name : str
        Name in reports.

    Raises
    ------
    TraceError
        If a value is invalid, or two contradict each other.

    Notes
    -----
    Common random numbers: the same seed at another rate draws the same lengths and the same gaps, divided by
    the rate. Fewer requests are the first of more (except for ramps, which span the run).

    Examples
    --------
    >>> workload = Workload(rate=10, requests=3, isl="lognormal:1024:0.5", osl=64)
    >>> slow, fast = workload.trace(), workload.trace(rate=20)
    >>> (slow.arrival_s / 2 == fast.arrival_s).all() and (slow.input_tokens == fast.input_tokens).all()
    np.True_
    """

    rate: float | None = None
    arrivals: str = ""
    burstiness: float = 1.0
    ramp: tuple[float, ...] | None = None
    hourly: tuple[float, ...] | str | None = None
    clients: int | None = None
    think_s: float | str | Delay = 0.0
    requests: int = None  # type: ignore[assignment]
    isl: int | str | Trace | Lengths = 1024
    osl: int | str | Trace | Lengths = 128
    cached_tokens: int | str | Trace | Lengths | CachedShare = "auto"
    turns: int | str | Lengths = 1
    calls: int | str | Lengths = 1
    tool_s: float | str | Delay = 0.0
    growth_tokens: int | str | Trace | Lengths | None = None
    system_tokens: int = 0
    seed: int = 0
    name: str = "workload"
    _drawn: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not is_number(self.burstiness) or not 1e-3 <= float(self.burstiness) <= 1e6:
            raise TraceError(f"burstiness must be a number from 0.001 to 1e6, got {shown(self.burstiness)}")
        if not isinstance(self.arrivals, str) or self.arrivals not in ("", *ARRIVALS):
            raise TraceError(f"arrivals must be one of {', '.join(ARRIVALS)}, got {shown(self.arrivals)}")
        arrivals = self.arrivals or self._meant_arrivals()
        self._set(arrivals=arrivals)
        for name in ("turns", "calls", "growth_tokens"):
            if (length := getattr(self, name)) is not None:
                self._set(**{name: parse_lengths(name, length)})
        whole_number("system_tokens", self.system_tokens, 0, MOST_TOKENS, TraceError)
        self._set(tool_s=parse_delay("tool_s", self.tool_s))
        if self.has_sessions:
            if self.clients is not None:
                raise TraceError("sessions come at a rate: give turns and calls, or clients")
            self._set(think_s=parse_delay("think_s", self.think_s))
        elif isinstance(self.think_s, str) and arrivals != "closed":
            raise TraceError(_THINKS.format(arrivals=arrivals))
        elif not _are_seconds(self.think_s):
            raise TraceError(f"think_s must be seconds from 0 to {MOST_SECONDS:g}, got {shown(self.think_s)}")
        elif self.growth_tokens is not None or self.system_tokens or self.tool_s != NO_DELAY:
            raise TraceError("growth_tokens, system_tokens and tool_s go with several turns or calls")
        self._check_together()
        # fractions are numbers, too, but numpy makes arrays of objects of them
        self._set(burstiness=float(self.burstiness))
        if not self.has_sessions:
            think_s: Any = self.think_s
            self._set(think_s=float(think_s))
        if self.rate is not None:
            self._set(rate=_checked_rate(self.rate))
        if self.ramp is not None:
            self._set(ramp=checked_ramp(self.ramp))
        if self.hourly is not None:
            self._set_hourly()
        if self.clients is not None:
            whole_number("clients", self.clients, 1, MOST_REQUESTS, TraceError)
        if self.requests is None:
            requests = DEFAULT_REQUESTS if self.clients is None else self.clients * REQUESTS_PER_CLIENT
            self._set(requests=min(requests, MOST_REQUESTS))
        whole_number("requests", self.requests, 1, MOST_REQUESTS, TraceError)
        _checked_seed(self.seed)
        for name in ("isl", "osl"):
            self._set(**{name: parse_lengths(name, getattr(self, name))})
        if not self.keeps_history:
            self._set(cached_tokens=parse_cached(0 if self._is_auto else self.cached_tokens))

    def _set(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    @property
    def has_sessions(self) -> bool:
        """Whether requests follow each other in sessions."""
        return UniformLength(1, 1) not in (self.turns, self.calls) or self.turns != self.calls

    @property
    def keeps_history(self) -> bool:
        """Whether all tokens before a prompt's new ones count as cached."""
        cached = self.cached_tokens
        is_meant = self._is_auto or (isinstance(cached, str) and cached.strip() == "history")
        return is_meant and self.has_sessions

    @property
    def _is_auto(self) -> bool:
        return isinstance(self.cached_tokens, str) and self.cached_tokens == "auto"

    def _meant_arrivals(self) -> str:
        given = {"closed": self.clients, "ramp": self.ramp, "hourly": self.hourly}
        usual = "poisson" if self.burstiness == 1.0 else "gamma"
        return next((name for name, value in given.items() if value is not None), usual)

    def _check_together(self) -> None:
        arrivals = self.arrivals
        if (self.clients is not None) != (arrivals == "closed"):
            if self.clients is None:
                raise TraceError("arrivals 'closed' needs clients, their number")
            raise TraceError(f"clients go with arrivals 'closed', got {shown(self.clients)} and {arrivals!r}")
        if self.think_s and arrivals != "closed" and not self.has_sessions:
            raise TraceError(_THINKS.format(arrivals=arrivals))
        for name in ("ramp", "hourly"):
            value = getattr(self, name)
            if value is None and arrivals == name:
                raise TraceError(f"arrivals {name!r} needs {name}, the rates per second")
            if (value is not None) != (arrivals == name):
                raise TraceError(f"{name} goes with arrivals {name!r}, got {shown(value)} and {arrivals!r}")
        if self.hourly is not None and self.has_sessions:
            raise TraceError("hourly is of requests: give sessions a rate or a ramp")
        if arrivals == "closed" and self.rate is not None:
            raise TraceError("a closed loop has clients and no rate: give one of them")
        if self.burstiness != 1.0 and arrivals not in ("gamma", "ramp", "hourly"):
            raise TraceError(f"burstiness goes with arrivals 'gamma', 'ramp' or 'hourly', got {arrivals!r}")

    def _set_hourly(self) -> None:
        """Set rates by the hour, and the requests that come at them."""
        hourly = checked_hourly(self.hourly)
        mean = math.fsum(hourly) / len(hourly) if self.rate is None else self.rate
        requests = max(round(mean * len(hourly) * SECONDS_PER_HOUR), 1)
        if self.requests not in (None, DEFAULT_REQUESTS, requests):
            raise TraceError(
                f"hourly gives {requests:,} requests, got requests {shown(self.requests)}; rate scales them"
            )
        self._set(hourly=hourly, requests=requests)

    @property
    def has_one_rate(self) -> bool:
        """Whether the mean rate is the same over the whole run."""
        return self.ramp is None and self.hourly is None

    @property
    def hours(self) -> tuple[float, ...]:
        """Requests/s in each hour, at the workload's rate; none without ``hourly``."""
        if not isinstance(self.hourly, tuple):
            return ()
        mean = math.fsum(self.hourly) / len(self.hourly)
        return tuple(rate * (1.0 if self.rate is None else self.rate / mean) for rate in self.hourly)

    @property
    def is_closed(self) -> bool:
        """Whether this is a closed loop of clients, each sending after its last answer."""
        return self.arrivals == "closed"

    @property
    def requests_per_s(self) -> float | None:
        """The given mean rate, or that of the ramp or the hours, 1/s; None without one."""
        if self.rate is not None or self.has_one_rate:
            return self.rate
        return math.fsum(self.hours) / len(self.hours) if self.ramp is None else mean_of_ramp(self.ramp)

    def trace(self, rate: float | None = None, seed: int | None = None) -> Trace:
        """Draw the requests.

        Parameters
        ----------
        rate : float, optional
            Mean requests/s, instead of the workload's.
        seed : int, optional
            Seed, instead of the workload's.

        Returns
        -------
        Trace
            The first request at 0; in a closed loop all at 0, with ``clients`` and ``think_s``. Lengths are
            the same arrays for every rate.

        Raises
        ------
        TraceError
            If the rate is missing or not a number above 0, or given for a closed loop.

        Examples
        --------
        >>> Workload(rate=2, arrivals="constant", requests=3).trace().arrival_s.tolist()
        [0.0, 0.5, 1.0]
        """
        seed = self.seed if seed is None else _checked_seed(seed)
        drawn = self._drawn.get("trace")
        if drawn is None or drawn[0] != seed:
            drawn = self._drawn["trace"] = (seed, self._at_unit_rate(seed))
        unit: Trace = drawn[1]
        if self.is_closed:
            if rate is not None:
                raise TraceError("a closed loop takes no rate: its clients decide when they send")
            return unit
        per_s = self.requests_per_s if rate is None else rate
        if per_s is None:
            raise TraceError("a workload needs a rate: Workload(rate=..) or trace(rate=..)")
        return unit.rate_scaled(_checked_rate(per_s))

    def _at_unit_rate(self, seed: int) -> Trace:
        """Draw the requests at a mean rate of 1/s."""
        if self.has_sessions:
            return self._sessions_at_unit_rate(seed)
        arrival_s = np.zeros(self.requests) if self.is_closed else self._unit_arrivals(seed, self.requests)
        sizes = self._drawn_sizes(seed)
        sizes["cached_tokens"] = np.minimum(sizes["cached_tokens"], sizes["input_tokens"] - 1)
        think_s = self.think_s if isinstance(self.think_s, float) else 0.0
        return Trace(arrival_s, **sizes, name=self.name, clients=self.clients, think_s=think_s)

    def _unit_arrivals(self, seed: int, count: int) -> Floats:
        """Draw arrivals at a mean rate of 1/s."""
        check_stopped()
        arrival_s = unit_arrivals(self.arrivals, self.burstiness, count, _generator(seed, _ARRIVALS))
        if self.hours:
            mean = math.fsum(self.hours) / len(self.hours)
            return by_hours(arrival_s, tuple(rate / mean for rate in self.hours))
        if self.ramp is None:
            return arrival_s
        mean = mean_of_ramp(self.ramp)
        return ramped(arrival_s, tuple(rate / mean for rate in self.ramp))

    def _sessions_at_unit_rate(self, seed: int) -> Trace:
        """Draw sessions at a mean rate of 1/s; each length and delay has a stream of its own."""
        sizes = self._drawn_sizes(seed)
        drawn: dict[int, Any] = {
            stream: length.drawn(self._draws(seed, stream))  # type: ignore[union-attr]
            for stream, length in ((_TURNS, self.turns), (_CALLS, self.calls))
        }
        for stream, delay in ((_THINK, self.think_s), (_TOOL, self.tool_s)):
            assert isinstance(delay, Delay)
            drawn[stream] = delay.drawn(_generator(seed, stream), self.requests)
        check_stopped()
        turns = Turns.of(drawn[_TURNS], drawn[_CALLS], self.requests)
        new, growth = sizes["input_tokens"], self.growth_tokens
        if growth is not None:
            later: Any = growth
            new = np.where(turns.is_first, new, later.drawn(self._draws(seed, _GROWTH)))
        prompts, history = turns.grown(new, sizes["output_tokens"], self.system_tokens)
        cached = history if self.keeps_history else np.minimum(sizes["cached_tokens"], prompts - 1)
        return Trace(
            session_starts(lambda count: self._unit_arrivals(seed, count), turns),
            prompts,
            sizes["output_tokens"],
            cached,
            name=self.name,
            history_tokens=history,
            **turns.links(drawn[_THINK], drawn[_TOOL]),
        )

    def _drawn_sizes(self, seed: int) -> dict[str, Any]:
        """Draw the tokens of all requests."""
        sizes: dict[str, Any] = {}
        streams: dict[object, int] = {}
        for name, (given, stream) in _STREAMS.items():
            check_stopped()
            length: Any = getattr(self, given)
            if name == "cached_tokens" and self.keeps_history:
                continue
            if isinstance(length, CachedShare):
                sizes[name] = length.of(sizes["input_tokens"])
            elif isinstance(length, RecordedLength):
                # the same draws pick the same rows
                stream = streams.setdefault(length.source, stream)
                sizes[name] = length.drawn(self._draws(seed, stream), name)
            else:
                sizes[name] = length.drawn(self._draws(seed, stream))
        return sizes

    def _draws(self, seed: int, stream: int) -> Draws:
        return Draws(self.requests, lambda: _generator(seed, stream))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cached draws out; they are drawn again."""
        state = copy.copy(self.__dict__)
        state["_drawn"] = {}
        return state


def _are_seconds(value: Any) -> bool:
    return is_number(value) and 0 <= float(value) <= MOST_SECONDS


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream,))))


def _checked_rate(rate: Any) -> float:
    if not is_number(rate) or rate <= 0:
        raise TraceError(f"rate must be requests/s above 0, got {shown(rate)}")
    return float(rate)


def _checked_seed(seed: Any) -> int:
    return whole_number("seed", seed, 0, 2**63 - 1, TraceError)
