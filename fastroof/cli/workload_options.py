"""The workload options of simulate and capacity, and readers of requests, sizes and steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import shown
from fastroof.cli.options import flag_of, option
from fastroof.cli.output import counted, print_line
from fastroof.command_group import Group, warn
from fastroof.errors import BackendError, BatchError, LookupInputError, TraceError

if TYPE_CHECKING:
    from fastroof import Trace, Workload


REPLAYED: Final = {
    "trace": option(
        str,
        "Requests to replay: a trace of Azure, Qwen-Bailian, Mooncake, BurstGPT, LLMServingSim or "
        "splitwise-sim, or arrival_s, input_tokens and output_tokens in CSV, JSON lines or Parquet.  "
        "[default: example, 600 requests of a service]",
        "FILE",
    ),
    "rate_scale": option(
        float, "Factor by which the trace's requests arrive faster.  [default: 1]", "FACTOR"
    ),
    "limit": option(int, "Number of requests to take from the trace.  [default: all]", "REQUESTS"),
}
READ: Final = {
    "columns": option(
        str,
        "Columns of the trace by role: arrival=started_at,input=prompt_tokens,output=completion_tokens. Also "
        "cached, hash_ids, status, session, parent, id and delay_s, and arrival_s, arrival_ms, arrival_us or "
        "arrival_ns for numbers.  "
        "[default: by the format]",
        "ROLE=COLUMN,...",
    ),
    "where": option(
        list[str],
        "Condition on the trace's rows: COLUMN=VALUE, or with !=, <, <=, > or >=; repeatable.",
        "CONDITION",
    ),
}
"""How files are read, to replay them or to draw lengths from them."""

DRAWN: Final = {
    "rate": option(
        float, "Mean rate of drawn requests, or to replay a trace at (its sessions if it has some).", "PER_S"
    ),
    "burstiness": option(
        float, "Shape of gamma-distributed gaps, as in vLLM's load generator: 1 is Poisson.", "SHAPE"
    ),
    "ramp": option(str, "Rates per second from the start to the end of the run: 2:20, 2:20:2.", "RATES"),
    "hourly": option(
        str,
        "Rates per second in each hour of the run: 2:2:8:20, or file:PATH with one a line; they give the "
        "number of requests, and --rate scales their mean.",
        "RATES",
    ),
    "clients": option(
        int,
        "Number of clients of a closed loop, each of which waits for its last answer, or has one session of "
        "a trace after the other.",
        "CLIENTS",
    ),
    "think": option(
        str,
        "Seconds from an answer to the client's next request, or to the next of --turns: a number, "
        "exponential:MEAN, lognormal:MEAN:SIGMA or uniform:MIN:MAX.  [default: 0]",
        "S",
    ),
    "turns": option(
        str, "Turns of a session, a number or as --isl; --rate is of sessions then.  [default: 1]", "TURNS"
    ),
    "calls": option(str, "Calls of an agent in each turn, as --turns.  [default: 1]", "CALLS"),
    "tool": option(str, "Seconds of tools between two calls of a turn, as --think.  [default: 0]", "S"),
    "growth": option(
        str, "New prompt tokens of a session's later requests, as --isl.  [default: as --isl]", "TOKENS"
    ),
    "system_prompt": option(int, "Tokens at the start of all sessions' prompts.  [default: 0]", "TOKENS"),
    "num_requests": option(
        int,
        "Number of requests to draw; capacity draws more (--steady).  [default: 1000, or 10 a client]",
        "REQUESTS",
    ),
    "isl": option(
        str,
        "Prompt length: 1024, lognormal:MEAN:SIGMA[:MAX], uniform:MIN:MAX, or file:TRACE to draw from a "
        "trace.  [default: 1024]",
        "TOKENS",
    ),
    "osl": option(
        str, "Output length, as --isl; lengths of one trace are drawn together.  [default: 128]", "TOKENS"
    ),
    "cached": option(
        str,
        "Prompt tokens in the prefix cache: a length as in --isl, share:0.5, or history (all before a "
        "turn's new tokens).  [default: 0; of sessions history]",
        "TOKENS",
    ),
}
WORKLOAD: Final[Group] = {
    **REPLAYED,
    **READ,
    **DRAWN,
    "seed": option(int, "Seed of drawn requests and of random routers.  [default: 0]", "SEED"),
}
"""The requests to serve: a trace to replay, or what to draw."""

AT_ONCE: Final[Group] = {
    "clients": DRAWN["clients"],
    "sessions": option(
        bool,
        "Find the most sessions, or requests, at once instead of the highest rate: clients that each have "
        "one after the other.",
        None,
        "--sessions",
        default=False,
    ),
}
"""Loads by what is open at once."""

LOADS: Final = ("rate", "clients")
"""Loads that a trace is replayed at instead of its own."""

_FIELDS: Final = {
    "think": "think_s",
    "tool": "tool_s",
    "growth": "growth_tokens",
    "system_prompt": "system_tokens",
    "num_requests": "requests",
    "cached": "cached_tokens",
}


def workload_requests(**options: Any) -> Trace | Workload:
    """Return the trace or the workload that the options of WORKLOAD describe."""
    given = {name: value for name, value in options.items() if value not in (None, [])}
    reading = {name: given.pop(name) for name in READ if name in given}
    replayed = [flag_of(name) for name in (*REPLAYED, "period") if name in given]
    load = {name: given.pop(name) for name in LOADS if "trace" in given and name in given}
    drawn = [flag_of(name) for name in DRAWN if name in given]
    if drawn and replayed:
        raise TraceError(
            f"{', '.join(replayed)} replays a trace, {', '.join(drawn)} draws requests: give one of them; "
            "--rate, --clients or --rate-scale replays a trace at another load"
        )
    if not drawn:
        from fastroof import load_trace
        from fastroof.simulation.session_runs import at_load

        trace = load_trace(
            given.get("trace", "example"),
            **reading,
            limit=given.get("limit"),
            rate_scale=given.get("rate_scale", 1.0),
            period_s=given.get("period"),
        )
        return at_load(trace, **load)
    from fastroof import Workload

    fields = {_FIELDS.get(name, name): value for name, value in given.items()}
    if "ramp" in fields:
        fields["ramp"] = _parse_rates("--ramp", fields["ramp"])
    if "hourly" in fields and not fields["hourly"].startswith("file:"):
        fields["hourly"] = _parse_rates("--hourly", fields["hourly"])
    if "clients" in fields and "think_s" in fields:
        fields["think_s"] = _parse_think(fields["think_s"])
    fields |= _read_lengths(fields, reading)
    return Workload(**fields)


def _read_lengths(fields: dict[str, Any], reading: dict[str, Any]) -> dict[str, Trace]:
    """Return the lengths that are drawn from files, each read once and as the options say."""
    from fastroof.traces.trace_files import load_lengths

    names = {
        name: fields[name].removeprefix("file:")
        for name in ("isl", "osl", "cached_tokens", "growth_tokens")
        if str(fields.get(name, "")).startswith("file:")
    }
    if reading and not names:
        flags = " and ".join(map(flag_of, reading))
        raise TraceError(f"{flags} needs a trace: give --trace FILE, --isl file:FILE or --osl file:FILE")
    traces = {path: load_lengths(path, **reading) for path in dict.fromkeys(names.values())}
    for path, trace in traces.items():
        for reason, rows in trace.left_out.items():
            warn(f"{path}: {counted(rows, 'row')} left out ({reason})")
    return {name: traces[path] for name, path in names.items()}


def workload_trace(**options: Any) -> Trace:
    """Return the requests that the options of WORKLOAD describe, drawn if they are not replayed."""
    requests = workload_requests(**options)
    from fastroof import Trace

    if isinstance(requests, Trace):
        return requests
    if not requests.is_closed and requests.requests_per_s is None:
        raise TraceError("drawn requests need --rate, --ramp, --hourly or --clients")
    return requests.trace()


def print_left_out(requests: Trace | Workload) -> None:
    """Print how many rows of a trace's file are not served, by reason."""
    for reason, rows in getattr(requests, "left_out", {}).items():
        print_line(f"left out: {counted(rows, 'row')} ({reason})")


def _parse_think(text: str) -> float:
    """Read the seconds that clients of a closed loop think."""
    try:
        return float(text)
    except ValueError:
        raise TraceError(f"--think with --clients needs seconds such as 0.5, got {shown(text)}") from None


def _parse_rates(name: str, text: str) -> tuple[float, ...]:
    """Read requests a second with colons between."""
    try:
        return tuple(float(part) for part in text.split(":"))
    except ValueError:
        raise TraceError(f"{name} needs requests a second such as 2:20, got {shown(text)}") from None


MOST_REQUESTS: Final = 2**22
_NUMBER: Final = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?")
_DECODE: Final = re.compile(r"([0-9]+)x([0-9]+)")
_IMAGE: Final = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")
_PREFILL: Final = re.compile(r"(?:([0-9]+)x)?([0-9]+)@([0-9]+)")


def parse_sizes(name: str, text: str) -> int | list[int]:
    """Read one whole number or a comma-separated list of them."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if re.fullmatch(r"[+-]?[0-9]{1,18}", part) is None]
    if wrong:
        raise LookupInputError(f"{name} needs a whole number or a list such as 64,128, got {wrong[0]!r}")
    sizes = [int(part) for part in parts]
    return sizes if len(sizes) > 1 else sizes[0]


@dataclass(frozen=True)
class Requests:
    """``count`` requests of a step, all with the same new tokens and context."""

    count: int
    new_tokens: int
    context_len: int

    @property
    def is_decode(self) -> bool:
        """Whether the requests are decodes."""
        return self.new_tokens == 1 and self.context_len > 0

    @property
    def words(self) -> str:
        """Return the requests in words."""
        if self.is_decode:
            return f"{counted(self.count, 'decode')} at kv_len {self.context_len + 1}"
        after = f" after {self.context_len}" if self.context_len else ""
        return f"{counted(self.count, 'prefill')} of {counted(self.new_tokens, 'token')}{after}"


def parse_requests(decode: Sequence[str], prefill: Sequence[str]) -> list[Requests]:
    """Read ``64x4096`` (64 decodes at kv_len 4096) and ``2048@1024`` (2048 new tokens after 1024)."""
    parsed = []
    for text in decode:
        match = _DECODE.fullmatch(text)
        if match is None:
            raise BatchError(
                f"--decode {text} is not BATCHxKV_LEN: 64x4096 is 64 decodes that attend to 4096 tokens each"
            )
        batch_size, kv_len = map(int, match.groups())
        if kv_len < 2:
            raise BatchError(
                f"--decode {text}: a decode attends to itself and a context, so kv_len is at least 2; "
                f"--prefill {batch_size}x1@0 is one token without a context"
            )
        parsed.append(Requests(batch_size, 1, kv_len - 1))
    for text in prefill:
        match = _PREFILL.fullmatch(text)
        if match is None:
            raise BatchError(
                f"--prefill {text} is not [COUNTx]NEW@CONTEXT: 2048@1024 is 2048 new tokens after 1024, "
                "4x2048@0 is four prompts of 2048"
            )
        parsed.append(Requests(int(match[1] or 1), int(match[2]), int(match[3])))
    if not parsed:
        raise BatchError("nothing to time: give --decode 64x4096, --prefill 2048@0, or both")
    for requests, text in zip(parsed, (*decode, *prefill), strict=True):
        if requests.count < 1 or requests.new_tokens < 1:
            raise BatchError(f"{text}: a step needs at least 1 request of at least 1 new token")
    total = sum(requests.count for requests in parsed)
    if total > MOST_REQUESTS:
        raise BatchError(f"{total} requests in one step are more than the {MOST_REQUESTS} it can hold")
    return parsed


def parse_beside(text: str) -> tuple[int, int]:
    """Read ``32x2000``: the decodes of a step, and what each attends to."""
    match = _DECODE.fullmatch(text)
    if match is None:
        raise BackendError(f"--beside {text} is not DECODESxKV_LEN: 32x2000 is")
    return int(match[1]), int(match[2])


def parse_images(name: str, texts: Sequence[str]) -> list[tuple[int, int]]:
    """Read images as ``1024x768``: width and height in pixels."""
    images = []
    for text in texts:
        match = _IMAGE.fullmatch(text)
        if match is None:
            raise BatchError(f"{name} {text} is not WIDTHxHEIGHT in pixels: 1024x768")
        images.append((int(match[1]), int(match[2])))
    return images


def with_image_tokens(requests: Sequence[Requests], tokens: int) -> list[Requests]:
    """Add the tokens of images to the new ones of every prompt."""
    if all(one.is_decode for one in requests):
        raise BatchError("images are part of a prompt: give --prefill 50@0 too, say, with their text")
    return [
        one if one.is_decode else Requests(one.count, one.new_tokens + tokens, one.context_len)
        for one in requests
    ]


def parse_steps(decode: Sequence[str], prefill: Sequence[str]) -> tuple[list[tuple[int, int]], list[int]]:
    """Read lists of ``32x4096`` and of ``2048``."""
    decodes, prefills = [], []
    for text in (part.strip() for given in decode for part in given.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text)
        if match is None:
            raise BatchError(f"--decode {text!r} is not BATCHxKV_LEN, such as 32x4096 or 1x1024,32x4096")
        decodes.append((int(match[1]), int(match[2])))
    for text in (part.strip() for given in prefill for part in given.split(",")):
        if re.fullmatch(r"[0-9]{1,9}", text) is None:
            raise BatchError(f"--prefill {text!r} is not a number of tokens, such as 2048 or 2048,8192")
        prefills.append(int(text))
    if not decodes and not prefills:
        raise BatchError("nothing to compare: give --decode 32x4096, --prefill 2048, or both")
    return decodes, prefills
