"""Options of commands that simulate an engine: how it schedules, and the limits that requests should keep."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import typer

from fastroof.checks import shown
from fastroof.errors import BatchError, SimulationError

__all__ = [
    "ENGINE",
    "AsyncScheduling",
    "BlockSize",
    "ChunkedPrefill",
    "MaxNumBatchedTokens",
    "MaxNumSeqs",
    "NumGpuBlocks",
    "Order",
    "PrefixCache",
    "Replicas",
    "ReserveOutput",
    "Router",
    "Timeout",
    "TooLong",
    "number_or_engine",
    "parse_limits",
]

ENGINE: Final = "engine"
"""What stands for the default of the engine's own profile."""

MaxNumBatchedTokens = Annotated[
    str, typer.Option(metavar="TOKENS", help="New tokens of a step at most; engine: the runtime's own.")
]
MaxNumSeqs = Annotated[
    str,
    typer.Option(metavar="REQUESTS", help="Requests that run at once at most; engine: the runtime's own."),
]
NumGpuBlocks = Annotated[
    int | None,
    typer.Option(min=1, help="Blocks of KV cache.  [default: what memory has room for beside the weights]"),
]
BlockSize = Annotated[
    str, typer.Option(metavar="TOKENS", help="Tokens of a block; engine: the runtime's own.")
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Schedule a step while the one before runs.  [default: the runtime's]",
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        help="Prompts beside decodes (mixed) or in steps of their own ahead of them (prefill_first).  "
        "[default: the runtime's]"
    ),
]
ChunkedPrefill = Annotated[
    bool | None,
    typer.Option(
        "--chunked-prefill/--no-chunked-prefill",
        help="Cut prompts where a step has no room for the whole.  [default: the runtime's]",
    ),
]
ReserveOutput = Annotated[
    bool | None,
    typer.Option(
        "--reserve-output/--no-reserve-output",
        help="Start a request only where its whole output has room.  [default: the runtime's]",
    ),
]
Replicas = Annotated[
    int, typer.Option(min=1, help="Engines that share the requests, each on GPUs of its own.")
]
Router = Annotated[
    str,
    typer.Option(
        help="Which replica a request goes to: round_robin, least_outstanding, least_load, least_kv, "
        "power_of_two, or with --prefix-cache lru prefix_aware."
    ),
]
PrefixCache = Annotated[
    str,
    typer.Option(
        metavar="given|lru",
        help="What requests find of their prompts: what the trace gives, or what a pool of blocks holds, by "
        "its hash_ids; preempted ones find their own.",
    ),
]
Timeout = Annotated[
    float | None, typer.Option(metavar="S", help="Seconds after which a client gives up.  [default: never]")
]
TooLong = Annotated[
    str,
    typer.Option(
        metavar="error|reject", help="What becomes of requests that the KV cache can never hold whole."
    ),
]

_WHOLE: Final = re.compile(r"[0-9]{1,9}")
_LIMIT: Final = re.compile(r"([a-z0-9_]+)[=:]([0-9]*\.?[0-9]+)")
_LIMIT_NAMES: Final = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "e2e": "e2e_ms",
    "e2el": "e2e_ms",
    "ttft_ms": "ttft_ms",
    "tpot_ms": "tpot_ms",
    "e2e_ms": "e2e_ms",
}
"""Limits by what they are called: e2el as in vLLM's ``bench serve --goodput``."""


def number_or_engine(option: str, text: str) -> int | None:
    """Read a whole number, or ``engine``: None, the engine's own."""
    word = text.strip()
    if word == ENGINE:
        return None
    if _WHOLE.fullmatch(word) is None or int(word) < 1:
        raise SimulationError(f"{option} needs a whole number of at least 1, or {ENGINE}, got {shown(text)}")
    return int(word)


def parse_limits(text: str | None) -> dict[str, Any]:
    """Read limits of a request as ``ttft=500,tpot=50``, ms."""
    limits: dict[str, Any] = {}
    for part in text.split(",") if text is not None else ():
        match = _LIMIT.fullmatch(part.strip())
        name = _LIMIT_NAMES.get(match[1]) if match else None
        if match is None or name is None or name in limits or float(match[2]) <= 0.0:
            raise BatchError(
                "--slo needs milliseconds above 0 as ttft=500,tpot=50,e2e=10000, each at most once; "
                f"got {shown(part)}"
            )
        limits[name] = float(match[2])
    return limits
