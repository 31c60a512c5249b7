"""The columns of traces: names by format, and a user's own names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fastroof.checks import one_of, shown
from fastroof.errors import TraceError
from fastroof.traces.trace import HASH_IDS
from fastroof.units import MS_PER_S, NS_PER_S, US_PER_S


@dataclass(frozen=True)
class TraceFormat:
    """Column names of a trace format by role, in the form of :func:`column_key`."""

    name: str
    arrivals: Mapping[str, float | None]
    """Columns of arrivals, and how many of their unit are a second; None if they must be dates."""
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    cached_tokens: tuple[str, ...] = ()
    hash_ids: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    """Columns that mark failed requests: HTTP status codes, whether it succeeded, or words."""
    history_tokens: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    parent: tuple[str, ...] = ()
    request_id: tuple[str, ...] = ()
    """Columns of names that parents are given by; without one parents are rows of the file."""
    delays: Mapping[str, float] = field(default_factory=dict)
    """Columns of delays after the end of parents, and how many of their unit are a second."""
    has_orphans: bool = False
    """Whether requests may follow ones that are not in the file."""
    grows: bool = False
    """Whether prompts of sessions hold the new tokens of a turn alone."""
    marks: tuple[str, ...] = ()
    """Columns without a role that distinguish the format from others."""
    hash_block_size: int = 512
    leaves_out_empty: bool = True
    """Whether rows without a prompt are failed requests, too; those without an output are."""

    def has(self, keys: Iterable[str]) -> bool:
        """Whether columns have every required role of the format."""
        known = set(keys)
        roles = [self.arrivals, self.input_tokens, self.output_tokens]
        if self.grows and known.intersection(self.session):
            # turns may come after delays alone
            roles[0] = (*self.arrivals, *self.delays)
        return known.issuperset(self.marks) and all(any(name in known for name in role) for role in roles)


AZURE: Final = TraceFormat("azure", {"timestamp": None}, ("contexttokens",), ("generatedtokens",))
"""Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset)."""

BAILIAN: Final = TraceFormat(
    "bailian", {"timestamp": 1.0}, ("input_length",), ("output_length",),
    hash_ids=(HASH_IDS,),
    parent=("parent_chat_id",), request_id=("chat_id",), has_orphans=True,
    marks=("chat_id", "turn"), hash_block_size=16,
)  # fmt: skip
"""Qwen-Bailian (github.com/alibaba-edu/qwen-bailian-usagetraces-anon): seconds, blocks of 16 tokens."""

MOONCAKE: Final = TraceFormat(
    "mooncake", {"timestamp": MS_PER_S}, ("input_length",), ("output_length",),
    hash_ids=(HASH_IDS,),
    session=("session_id",), delays={"delay": MS_PER_S}, grows=True,
)  # fmt: skip
"""Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces): milliseconds, blocks of 512 tokens.

aiperf (github.com/ai-dynamo/aiperf) adds session_id and delay: turns of a session follow each other, and a
turn's prompt is its new tokens, unless context_mode is message_array_with_responses.
"""

BURSTGPT: Final = TraceFormat("burstgpt", {"timestamp": 1.0}, ("request_tokens",), ("response_tokens",))
"""BurstGPT (github.com/HPMLL/BurstGPT): seconds; requests that failed have 0 response tokens."""

AIPERF: Final = TraceFormat(
    "aiperf", {"request_start_ns": NS_PER_S}, ("input_sequence_length",), ("output_sequence_length",),
    status=("success",), leaves_out_empty=False,
)  # fmt: skip
"""Single requests of aiperf 0.13.0 (profile_export.jsonl, MetricRecordInfo), as they arrived."""

LLMSERVINGSIM: Final = TraceFormat(
    "llmservingsim", {"arrival_time_ns": NS_PER_S}, ("input_toks",), ("output_toks",)
)
"""Requests of LLMServingSim (github.com/casys-kaist/LLMServingSim), JSON lines: nanoseconds."""

SPLITWISE: Final = TraceFormat("splitwise", {"arrival_timestamp": 1.0}, ("prompt_size",), ("token_size",))
"""Requests of splitwise-sim (github.com/Mutinifni/splitwise-sim), CSV: seconds."""

LESS_USUAL: Final = ("started_at", "start_time", "created_at", "received_at", "request_time")
"""Names of arrivals that count if there is no other: logs have them next to the arrival, too."""

PLAIN: Final = TraceFormat(
    "plain",
    dict.fromkeys(("arrival_s", "arrival_time_s", "timestamp_s", "arrived_at"), 1.0)
    | dict.fromkeys(("arrival_ms", "arrival_time_ms", "timestamp_ms"), MS_PER_S)
    | dict.fromkeys(("arrival_us", "arrival_time_us", "timestamp_us"), US_PER_S)
    | dict.fromkeys(("arrival_ns", "timestamp_ns"), NS_PER_S)
    | dict.fromkeys(("arrival", "arrival_time", "timestamp", "datetime", "time", *LESS_USUAL)),
    (
        "input_tokens", "input_length", "input_len", "prompt_tokens", "prompt_len", "num_prompt_tokens",
        "num_prefill_tokens", "context_tokens", "isl",
    ),
    (
        "output_tokens", "output_length", "output_len", "completion_tokens", "generated_tokens",
        "num_output_tokens", "num_decode_tokens", "osl",
    ),
    ("cached_tokens", "num_cached_tokens", "cached_prompt_tokens", "cache_read_input_tokens"),
    (HASH_IDS,),
    status=("status", "status_code", "http_status", "http_status_code", "response_code", "success"),
    history_tokens=("history_tokens",),
    session=("session", "session_id"),
    parent=("parent", "parent_id", "parents"),
    request_id=("request_id", "id"),
    delays={"delay_s": 1.0, "delay_ms": MS_PER_S, "delay_us": US_PER_S},
    leaves_out_empty=False,
)  # fmt: skip
"""Any other table: the columns of :data:`TRACE_COLUMNS`, or common other names."""

FORMATS: Final = {
    one.name: one for one in (AZURE, BAILIAN, MOONCAKE, BURSTGPT, AIPERF, LLMSERVINGSIM, SPLITWISE, PLAIN)
}
"""Formats by name, in order of detection."""

SESSION_NAMES: Final = {
    name for one in FORMATS.values() for names in (one.session, one.parent, one.delays) for name in names
}
"""Columns of sessions, in any format."""

ROLES: Final = {
    "arrival": "arrival", "input": "input_tokens", "output": "output_tokens", "cached": "cached_tokens",
    "hash_ids": HASH_IDS, "status": "status", "session": "session", "parent": "parent", "id": "request_id",
    "delay": "delay", "history": "history_tokens",
}  # fmt: skip
"""Roles that columns can be named for, in short and as the fields of a format."""

UNITS: Final = {"s": 1.0, "ms": MS_PER_S, "us": US_PER_S, "ns": NS_PER_S}
"""Units of arrivals that are numbers, and how many are a second."""

ROLE_WORDS: Final = (
    "arrival (a date and time; arrival_s, arrival_ms, arrival_us or arrival_ns if it is a number), input, "
    "output, cached, hash_ids, status, session, parent, id, delay_s (delay_ms, delay_us), history"
)
EXAMPLE_COLUMNS: Final = "arrival=started_at,input=prompt_tokens,output=completion_tokens"


class OwnColumns(NamedTuple):
    """Columns that a user names for roles, and the unit of the arrivals; None if it is the format's."""

    names: Mapping[str, str] = MappingProxyType({})
    per_s: float | None = None
    delay_per_s: float = 1.0


class Reading(NamedTuple):
    """How the columns of a file are read: format and names by the user, and columns of conditions."""

    format: str | None = None
    own: OwnColumns = OwnColumns()
    others: tuple[str, ...] = ()
    needs_arrival: bool = True


class NamedColumns(NamedTuple):
    """The columns of a file by role, with the file's names; empty without such a column."""

    format: TraceFormat
    arrival: str
    per_s: float | None
    input_tokens: str
    output_tokens: str
    cached_tokens: str
    hash_ids: str
    status: str = ""
    others: tuple[str, ...] = ()
    """Columns of conditions on rows."""
    session: str = ""
    parent: str = ""
    request_id: str = ""
    delay: str = ""
    delay_per_s: float = 1.0
    context_mode: str = ""
    history_tokens: str = ""

    @property
    def has_links(self) -> bool:
        """Whether requests start after others."""
        return bool(self.session or self.parent)

    @property
    def needed(self) -> list[str]:
        """All columns to read."""
        names = (name for name in (*self, *self.others) if isinstance(name, str) and name)
        return list(dict.fromkeys(names))


def aiperf_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request of aiperf's file as a row of columns, other rows unchanged; empty for warm-up."""
    metadata, metrics = row.get("metadata"), row.get("metrics")
    if not isinstance(metadata, dict) or not isinstance(metrics, dict):
        return row
    if metadata.get("benchmark_phase") == "warmup":
        return {}
    lengths = {name: metrics.get(name) for name in (*AIPERF.input_tokens, *AIPERF.output_tokens)}
    return {
        "request_start_ns": metadata.get("request_start_ns"),
        "success": not (row.get("error") or metadata.get("was_cancelled")),
        **{name: one.get("value") if isinstance(one, dict) else one for name, one in lengths.items()},
    }


def column_key(name: str) -> str:
    """Normalize a column's name: lower-case letters and digits, with _ for everything else."""
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def own_columns(columns: Any) -> OwnColumns:
    """Read the columns that a user names: ``arrival=started_at,input=..``, or a mapping."""
    if columns is None:
        return OwnColumns()
    if isinstance(columns, str):
        pairs = [tuple(part.split("=", 1)) for part in columns.split(",")]
    else:
        pairs = list(columns.items()) if isinstance(columns, Mapping) else [(shown(columns),)]
    names: dict[str, str] = {}
    per_s, delay_per_s = None, 1.0
    for pair in pairs:
        role = str(pair[0]).strip()
        unit = role.removeprefix("arrival_")
        field = "arrival" if unit in UNITS else ROLES.get(role, role)
        if role.startswith("delay_") and role.removeprefix("delay_") in UNITS:
            field, delay_per_s = "delay", UNITS[role.removeprefix("delay_")]
        name = pair[1].strip() if len(pair) > 1 and isinstance(pair[1], str) else ""
        if field not in ROLES.values() or not name:
            raise TraceError(
                f"columns must be ROLE=COLUMN such as {EXAMPLE_COLUMNS}, got "
                f"{shown('='.join(map(str, pair)))}; roles are {ROLE_WORDS}"
            )
        if field in names:
            raise TraceError(f"columns name {field} twice: {names[field]} and {name}")
        names[field] = name
        per_s = UNITS.get(unit, per_s)
    return OwnColumns(names, per_s, delay_per_s)


def trace_format(name: str | None, columns: Iterable[str], what: str) -> TraceFormat:
    """Return the format by name or, by default, by its columns."""
    if name is None:
        keys = [column_key(column) for column in columns]
        return next((one for one in FORMATS.values() if one.has(keys)), PLAIN)
    return FORMATS[one_of(f"{what}: format", name, FORMATS, TraceError)]


def find_column(name: str, columns: list[str], what: str) -> str:
    """Return the column that a user names: of this name, or of this spelling."""
    matches = [column for column in columns if column == name]
    matches = matches or [column for column in columns if column_key(column) == column_key(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise TraceError(f"{what}: columns {' and '.join(map(repr, matches))} are both {name}: keep one")
    close = difflib.get_close_matches(column_key(name), map(column_key, columns), n=1)
    hint = [f"did you mean {column!r}? " for column in columns if column_key(column) in close][:1]
    raise TraceError(f"{what} has no column {shown(name)}; {''.join(hint)}its columns are {_listed(columns)}")


def _listed(columns: list[str]) -> str:
    return ", ".join(repr(column)[:40] for column in columns[:12]) or "none"


def named_columns(columns: list[str], what: str, reading: Reading) -> NamedColumns:
    """Assign roles to columns."""
    own_names = reading.own
    meant = trace_format(reading.format, columns, what)
    # a wrong name is reported before a missing column
    by_field = {field: find_column(name, columns, what) for field, name in own_names.names.items()}
    others = tuple(find_column(name, columns, what) for name in reading.others)

    def found(role: str, field: str, is_needed: bool) -> str:
        if field in by_field:
            return by_field[field]
        times: dict[str, Any] = {"arrival": meant.arrivals, "delay": meant.delays}
        names = list(times[field] if field in times else getattr(meant, field))
        matches = [column for column in columns if names and column_key(column) in names]
        # fastroof's own name takes precedence, and others over what gateways call further times
        first = [column for column in matches if column_key(column) == names[0]]
        matches = first or [column for column in matches if column_key(column) not in LESS_USUAL] or matches
        if len(matches) > 1 and (field != "status" or matches.count(matches[0]) > 1):
            raise TraceError(
                f"{what}: columns {' and '.join(map(repr, matches))} all have {role}: keep one, or name it "
                f"(columns or --columns, such as {EXAMPLE_COLUMNS})"
            )
        if not matches and is_needed:
            short = next(short for short, one in ROLES.items() if one == field)
            raise TraceError(
                f"{what} has no column of {role}: in {meant.name} traces it is {' or '.join(names)}; its "
                f"columns are {_listed(columns)}: name one (columns or --columns {short}=COLUMN)"
            )
        return matches[0] if matches else ""

    session, parent = found("sessions", "session", False), found("parents", "parent", False)
    delay = found("delays", "delay", False)
    if meant is PLAIN and not (parent or delay or "session" in by_field):
        # sessions of a log do not state what its requests waited for
        session = ""
    is_linked = bool(session or parent)
    arrival = found("arrivals", "arrival", reading.needs_arrival and not (is_linked and delay))
    key = column_key(arrival)
    per_s = own_names.per_s or meant.arrivals.get(key)
    if per_s is None and "arrival" in own_names.names:
        per_s = PLAIN.arrivals.get(key) or UNITS.get(key.rpartition("_")[2])
    return NamedColumns(
        meant,
        arrival,
        per_s,
        found("prompts' tokens", "input_tokens", True),
        found("answers' tokens", "output_tokens", True),
        found("cached tokens", "cached_tokens", False),
        found("ids of blocks", HASH_IDS, False),
        found("failures", "status", False),
        others,
        session,
        parent,
        found("names", "request_id", False) if parent else "",
        delay if is_linked else "",
        own_names.delay_per_s if "delay" in by_field else meant.delays.get(column_key(delay), 1.0),
        next((name for name in columns if is_linked and column_key(name) == "context_mode"), ""),
        found("tokens before a prompt's new ones", "history_tokens", False),
    )
