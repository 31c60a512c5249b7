"""What the columns of a trace are called, by whom, and in which unit their time is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from fastroof.checks import shown
from fastroof.errors import TraceError
from fastroof.simulation.trace import HASH_IDS
from fastroof.units import MS_PER_S, US_PER_S

__all__ = ["FORMATS", "NamedColumns", "TraceFormat", "column_key", "named_columns", "trace_format"]


@dataclass(frozen=True)
class TraceFormat:
    """Names of a trace's columns, of which each role has one; they are compared as :func:`column_key`."""

    name: str
    arrivals: Mapping[str, float | None]
    """Columns of arrivals, and how many of their unit are a second; None where only dates will do."""
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    cached_tokens: tuple[str, ...] = ()
    hash_ids: tuple[str, ...] = ()
    leaves_out_empty: bool = True
    """Whether rows without a prompt or an answer are requests that failed, which are counted and left out."""

    def has(self, keys: Iterable[str]) -> bool:
        """Whether these are its columns."""
        known = set(keys)
        roles = (self.arrivals, self.input_tokens, self.output_tokens)
        return all(any(name in known for name in role) for role in roles)


AZURE: Final = TraceFormat("azure", {"timestamp": None}, ("contexttokens",), ("generatedtokens",))
"""Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset)."""

MOONCAKE: Final = TraceFormat(
    "mooncake",
    {"timestamp": MS_PER_S},
    ("input_length",),
    ("output_length",),
    hash_ids=(HASH_IDS,),
)
"""Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces): milliseconds, and ids of blocks."""

BURSTGPT: Final = TraceFormat("burstgpt", {"timestamp": 1.0}, ("request_tokens",), ("response_tokens",))
"""BurstGPT (github.com/HPMLL/BurstGPT): seconds; requests that failed have 0 response tokens."""

PLAIN: Final = TraceFormat(
    "plain",
    {
        "arrival_s": 1.0,
        "arrival_time_s": 1.0,
        "timestamp_s": 1.0,
        "arrived_at": 1.0,
        "arrival_ms": MS_PER_S,
        "arrival_time_ms": MS_PER_S,
        "timestamp_ms": MS_PER_S,
        "arrival_us": US_PER_S,
        "arrival_time_us": US_PER_S,
        "timestamp_us": US_PER_S,
        "arrival": None,
        "arrival_time": None,
        "timestamp": None,
        "datetime": None,
        "time": None,
    },
    (
        "input_tokens",
        "input_length",
        "input_len",
        "prompt_tokens",
        "prompt_len",
        "num_prompt_tokens",
        "num_prefill_tokens",
        "context_tokens",
        "isl",
    ),
    (
        "output_tokens",
        "output_length",
        "output_len",
        "completion_tokens",
        "generated_tokens",
        "num_output_tokens",
        "num_decode_tokens",
        "osl",
    ),
    ("cached_tokens", "num_cached_tokens"),
    (HASH_IDS,),
    leaves_out_empty=False,
)
"""Anybody's own table: the columns of :data:`TRACE_COLUMNS`, or what is often said instead."""

FORMATS: Final = {one.name: one for one in (AZURE, MOONCAKE, BURSTGPT, PLAIN)}
"""Formats by name; the first whose columns are there is meant."""


class NamedColumns(NamedTuple):
    """Which column of a file has which role, by the names in the file; empty where there is none."""

    format: TraceFormat
    arrival: str
    per_s: float | None
    input_tokens: str
    output_tokens: str
    cached_tokens: str
    hash_ids: str

    @property
    def needed(self) -> list[str]:
        """Every column that is read."""
        roles = (self.arrival, self.input_tokens, self.output_tokens, self.cached_tokens, self.hash_ids)
        return [name for name in roles if name]


def column_key(name: str) -> str:
    """Return a column's name as formats are told by: small letters, digits, and one _ for all else."""
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def trace_format(name: str | None, columns: Iterable[str], what: str) -> TraceFormat:
    """Return the format of a name, or the one that columns tell."""
    if name is None:
        keys = [column_key(column) for column in columns]
        return next((one for one in FORMATS.values() if one.has(keys)), PLAIN)
    if not isinstance(name, str) or name not in FORMATS:
        raise TraceError(f"{what}: format must be one of {', '.join(FORMATS)}, got {shown(name)}")
    return FORMATS[name]


def named_columns(
    columns: list[str], what: str, format: str | None = None, *, needs_arrival: bool = True
) -> NamedColumns:
    """Find which column has which role."""
    meant = trace_format(format, columns, what)

    def found(role: str, names: Iterable[str], is_needed: bool) -> str:
        names = list(names)
        there = [column for column in columns if column_key(column) in names]
        # fastroof's own name goes before what others say
        own = [column for column in there if column_key(column) == names[0]]
        there = own if own else there
        if len(there) > 1:
            raise TraceError(f"{what}: columns {' and '.join(map(repr, there))} all say {role}: keep one")
        if not there and is_needed:
            listed = ", ".join(repr(column)[:40] for column in columns[:12]) or "none"
            raise TraceError(
                f"{what} has no column of {role}: a {meant.name} trace calls it {' or '.join(names[:9])}; "
                f"its columns are {listed}"
            )
        return there[0] if there else ""

    arrival = found("arrivals", meant.arrivals, needs_arrival)
    return NamedColumns(
        meant,
        arrival,
        meant.arrivals[column_key(arrival)] if arrival else None,
        found("prompts' tokens", meant.input_tokens, True),
        found("answers' tokens", meant.output_tokens, True),
        found("cached tokens", meant.cached_tokens, False) if meant.cached_tokens else "",
        found("ids of blocks", meant.hash_ids, False) if meant.hash_ids else "",
    )
