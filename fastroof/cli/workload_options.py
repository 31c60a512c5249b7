"""Options of commands that take requests: a trace to replay, or what to draw; and what they mean together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.checks import shown
from fastroof.errors import TraceError

if TYPE_CHECKING:
    from fastroof import Trace, Workload

__all__ = [
    "Arrivals",
    "Burstiness",
    "Cached",
    "Clients",
    "Input",
    "Limit",
    "NumRequests",
    "Output",
    "Ramp",
    "Rate",
    "RateScale",
    "Seed",
    "Think",
    "TraceFile",
    "TraceFormat",
    "asked_requests",
    "asked_trace",
]

TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Requests to replay: of Azure, Mooncake, BurstGPT, or arrival_s, input_tokens, output_tokens in "
        "CSV, JSON lines or Parquet.  [default: example, 600 requests of a service]",
    ),
]
TraceFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="What the trace's columns are: azure, mooncake, burstgpt or plain.  [default: the columns tell]",
    ),
]
RateScale = Annotated[
    float | None, typer.Option(metavar="TIMES", help="How many times as fast the trace's requests arrive.")
]
Limit = Annotated[
    int | None, typer.Option(metavar="REQUESTS", help="Only the trace's first so many requests.")
]
Rate = Annotated[
    float | None, typer.Option(metavar="PER_S", help="Requests a second in the mean, drawn and not replayed.")
]
Arrivals = Annotated[
    str | None,
    typer.Option(
        help="How drawn requests arrive: poisson, gamma, constant, ramp or closed.  [default: what goes with "
        "--burstiness, --ramp or --clients, else poisson]"
    ),
]
Burstiness = Annotated[
    float | None,
    typer.Option(
        metavar="SHAPE",
        help="Shape of gamma-distributed gaps, as in vLLM's load generator: 1 is Poisson, less is burstier.",
    ),
]
Ramp = Annotated[
    str | None,
    typer.Option(
        metavar="RATES",
        help="Requests a second at the start, perhaps between, and at the end of the run: 2:20, 2:20:2.",
    ),
]
Clients = Annotated[
    int | None, typer.Option(help="Clients of a closed loop: each sends its next when it has had its last.")
]
Think = Annotated[
    float | None,
    typer.Option(metavar="S", help="With --clients: seconds from an answer to the client's next request."),
]
NumRequests = Annotated[int | None, typer.Option(help="How many requests are drawn.  [default: 1000]")]
Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="TOKENS",
        help="Tokens of drawn prompts: 1024, lognormal:1024:0.5 (mean, and sigma of the logarithm; "
        "lognormal:1024:0.5:8192 cuts longer ones), uniform:512:2048, or file:TRACE to draw from a trace.  "
        "[default: 1024]",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="TOKENS",
        help="Tokens of drawn answers, as --input; of one trace both are of one request.  [default: 128]",
    ),
]
Cached = Annotated[
    str | None,
    typer.Option(
        "--cached",
        metavar="TOKENS",
        help="Tokens of drawn prompts that the prefix cache has: as --input, or share:0.5.  [default: 0]",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Of random numbers: of drawn requests, and of a router that draws.  [default: 0]"),
]

_DRAWN: Final = {
    "rate": "--rate",
    "arrivals": "--arrivals",
    "burstiness": "--burstiness",
    "ramp": "--ramp",
    "clients": "--clients",
    "think": "--think",
    "num_requests": "--num-requests",
    "input": "--input",
    "output": "--output",
    "cached": "--cached",
}
_REPLAYED: Final = {
    "trace": "--trace",
    "trace_format": "--trace-format",
    "rate_scale": "--rate-scale",
    "limit": "--limit",
}
_FIELDS: Final = {
    "think": "think_s",
    "num_requests": "requests",
    "input": "input_tokens",
    "output": "output_tokens",
    "cached": "cached_tokens",
}


def asked_requests(**options: Any) -> Trace | Workload:
    """Return the trace or the workload that a command's options ask for."""
    unknown = set(options) - set(_DRAWN) - set(_REPLAYED) - {"seed"}
    if unknown:
        raise TypeError(f"no options {', '.join(sorted(unknown))}")
    given = {name: value for name, value in options.items() if value is not None}
    drawn = [flag for name, flag in _DRAWN.items() if name in given]
    replayed = [flag for name, flag in _REPLAYED.items() if name in given]
    if drawn and replayed:
        raise TraceError(
            f"requests are replayed ({', '.join(replayed)}) or drawn ({', '.join(drawn)}): give one of "
            "these; a trace comes faster by --rate-scale"
        )
    if not drawn:
        from fastroof import load_trace

        return load_trace(
            given.get("trace", "example"),
            format=given.get("trace_format"),
            limit=given.get("limit"),
            rate_scale=given.get("rate_scale", 1.0),
        )
    from fastroof import Workload

    fields = {_FIELDS.get(name, name): value for name, value in given.items()}
    if "ramp" in fields:
        fields["ramp"] = _parse_ramp(fields["ramp"])
    return Workload(**fields)


def asked_trace(**options: Any) -> Trace:
    """Return the requests that a command's options ask for, drawn where they are to be."""
    asked = asked_requests(**options)
    from fastroof import Trace

    if isinstance(asked, Trace):
        return asked
    if not asked.is_closed and asked.requests_per_s is None:
        raise TraceError("drawn requests need --rate (or --ramp, or --clients): how many come a second")
    return asked.trace()


def _parse_ramp(text: str) -> tuple[float, ...]:
    """Read requests a second with colons between."""
    try:
        return tuple(float(part) for part in text.split(":"))
    except ValueError:
        raise TraceError(f"--ramp needs requests a second such as 2:20, got {shown(text)}") from None
