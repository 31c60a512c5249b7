"""The requests of a spec: a trace from a file, or a workload that is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fastroof.errors import SweepError

if TYPE_CHECKING:
    from fastroof.simulation.trace import Trace
    from fastroof.simulation.workload import Workload

__all__ = ["requests_hash", "requests_of"]

_TRACE_KEYS: Final = ("trace", "format", "limit", "rate_scale")
_WORKLOAD_KEYS: Final = (
    "arrivals", "burstiness", "ramp", "requests", "input_tokens", "output_tokens", "cached_tokens", "seed",
)  # fmt: skip
_ANY_RATE: Final = 1.0
"""Requests a second of a workload whose rate is what is searched for."""


def requests_of(table: Mapping[str, Any]) -> Trace | Workload:
    """Read, or describe, the requests that a spec's ``workload`` asks for."""
    keys = _TRACE_KEYS if "trace" in table else _WORKLOAD_KEYS
    unknown = [key for key in table if key not in keys]
    if unknown:
        both = ", ".join(_WORKLOAD_KEYS) if "trace" not in table else "with a trace, " + ", ".join(keys[1:])
        or_trace = "" if "trace" in table else "; or trace, the path of a file"
        raise SweepError(f"no such key: {', '.join(map(str, unknown))}; the keys are {both}{or_trace}")
    if "trace" in table:
        from fastroof.simulation.trace_files import load_trace

        options = {key: value for key, value in table.items() if key != "trace"}
        trace: Trace = load_trace(table["trace"], **options)
        return trace
    from fastroof.simulation.workload import Workload

    given = dict(table)
    if isinstance(given.get("ramp"), list):
        given["ramp"] = tuple(given["ramp"])
    return Workload(rate=_ANY_RATE, **given)


def requests_hash(requests: Trace | Workload) -> str:
    """Hash requests as they are drawn, to tell a file from what it was before."""
    trace = requests.trace() if hasattr(requests, "trace") else requests
    arrays = trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.cached_tokens
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
