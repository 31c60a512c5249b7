"""Times of requests and their percentiles, gaps between tokens, and the tables of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from fastroof.arrays import Bools, Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.atomic_files import check_file_place, whole_file, write_errors
from fastroof.checks import is_number, shown
from fastroof.columns import Column
from fastroof.compiled.simulation.records import FINISHED
from fastroof.errors import BatchError, FastroofError
from fastroof.simulation.engine import SERIES, STATUS_NAMES
from fastroof.units import US_PER_MS, US_PER_S

if TYPE_CHECKING:
    from fastroof.simulation.engine import Outcomes
    from fastroof.simulation.settings import EngineSettings
    from fastroof.traces.trace import Trace


PERCENTILES: Final = (50, 90, 95, 99)
"""Percentiles of every result, in addition to the mean."""
STATISTICS: Final = ("mean", *(f"p{percent}" for percent in PERCENTILES))

MANTISSA_BITS: Final = 7
GAP_ERROR: Final = 2.0 ** -(MANTISSA_BITS + 1)
"""Maximum relative error of a percentile of gaps: half a bin's width over its lower end."""


MANY: Final = 50_000
"""Of more values, a high percentile is looked for among those above a lower percentile of a few."""

FEW_EACH: Final = 64


def percentile(values: Floats, percent: float) -> float:
    """Return one percentile of values."""
    if not len(values):
        return math.nan
    place = (len(values) - 1) * (percent / 100.0)
    below = math.floor(place)
    share = place - below
    above = min(below + 1, len(values) - 1)
    if percent > 90.0 and len(values) > MANY:
        # 1.4 ms for a million; a partition of all takes 7
        above_few = values[~(values < percentile(values[::FEW_EACH], 2.0 * percent - 100.0))]
        left_out = len(values) - len(above_few)
        if left_out <= below:
            values, below, above = above_few, below - left_out, above - left_out
    low, high = np.partition(values, (below, above))[[below, above]].tolist()
    # numpy's sum, to the last bit; inf - inf would be nan
    if share == 0.0 or low == high:
        return float(low)
    return float(high - (high - low) * (1.0 - share) if share >= 0.5 else low + (high - low) * share)


def spread(values: Floats) -> dict[str, float]:
    """Return the mean and percentiles of values by name."""
    if not len(values):
        return dict.fromkeys(STATISTICS, math.nan)
    found: Any = np.percentile(values, PERCENTILES).tolist()
    return dict(zip(STATISTICS, (float(values.mean()), *found), strict=True))


def gap_values_us(num_bins: int, first_exponent: int) -> Floats:
    """Return the middle of each bin of a histogram of gaps, us."""
    per_power = 1 << MANTISSA_BITS
    power, step = np.divmod(np.arange(num_bins), per_power)
    return np.asarray(np.ldexp(1.0 + (step + 0.5) / per_power, power + first_exponent))


def gap_percentile(counts: Longs, values: Floats, percent: float | None) -> float:
    """Return a percentile of a histogram, or its mean; nan if it is empty."""
    upto = np.cumsum(counts)
    total = int(upto[-1]) if len(upto) else 0
    if not total:
        return math.nan
    if percent is None:
        return float(counts @ values) / total
    place = (total - 1) * (percent / 100.0)
    below = math.floor(place)
    # rank r is in the first bin whose cumulative count is above r
    low, high = values[np.searchsorted(upto, (below, min(below + 1, total - 1)), side="right")].tolist()
    return float(low + (high - low) * (place - below))


def gap_spread(counts: Longs, values: Floats) -> dict[str, float]:
    """Return the mean and percentiles of a histogram."""
    found = (gap_percentile(counts, values, percent) for percent in (None, *PERCENTILES))
    return dict(zip(STATISTICS, found, strict=True))


LIMITS: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
"""Times that may be limited."""


class RequestTimes(NamedTuple):
    """Times of requests, an element each, in the order of the outcomes."""

    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    is_finished: Bools
    has_gaps: Bools

    @classmethod
    def of(cls, trace: Trace, outcomes: Outcomes) -> RequestTimes:
        """Compute the times of an engine's outcomes."""
        finished = np.asarray(outcomes.status) == FINISHED
        first_us, arrival_us = outcomes.first_us, outcomes.arrival_us
        last_us = np.where(finished, outcomes.last_us, np.nan)
        gaps = trace.output_tokens - 1.0
        gaps[gaps == 0.0] = np.nan
        return cls(
            (first_us - arrival_us) / US_PER_MS,
            (last_us - first_us) / gaps / US_PER_MS,
            (last_us - arrival_us) / US_PER_MS,
            finished,
            trace.output_tokens > 1,
        )

    def of_places(self, places: slice | Longs) -> RequestTimes:
        """Return the times of some requests."""
        return RequestTimes._make(column[places] for column in self)

    def of_finished(self, name: str) -> Floats:
        """Return the times that percentiles are over: of finished requests that have such a time."""
        values: Floats = getattr(self, name)
        counts = self.is_finished & self.has_gaps if name == "tpot_ms" else self.is_finished
        return values if counts.all() else values[counts]

    def percentile(self, name: str, percent: float | None) -> float:
        """Return a percentile over all requests, or their mean; unfinished ones count as inf."""
        values: Floats = getattr(self, name)
        if not self.is_finished.all():
            values = np.where(self.is_finished, values, math.inf)
        if name == "tpot_ms" and not self.has_gaps.all():
            values = values[self.has_gaps]
        if percent is None:
            return float(values.mean()) if len(values) else math.nan
        return percentile(values, percent)

    def within(self, limits: Mapping[str, float]) -> Bools:
        """Whether each request finished within all limits; an output of one token is within any TPOT."""
        counts = self.is_finished.copy()
        for name, limit_ms in limits.items():
            values: Floats = getattr(self, name)
            within = values <= limit_ms
            counts &= within | ~self.has_gaps if name == "tpot_ms" else within
        return counts

    def goodput(self, limits: Mapping[str, float], duration_us: float) -> dict[str, Any]:
        """Return how many requests finished within all limits, and their rate."""
        within_limits = int(self.within(limits).sum())
        return {
            "limits": dict(limits),
            "requests": within_limits,
            "share": within_limits / len(self.ttft_ms),
            "requests_per_s": within_limits / duration_us * US_PER_S if duration_us > 0.0 else math.nan,
        }


def checked_limits(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the given limits as floats by name."""
    limits = {}
    for name, value in given.items():
        if value is None:
            continue
        limits[name] = checked_ms(name, value, BatchError)
    return limits


def checked_ms(name: str, value: Any, error: type[FastroofError]) -> float:
    """Return a limit in milliseconds above 0."""
    if not is_number(value) or value <= 0:
        raise error(f"{name} must be milliseconds above 0, got {shown(value)}")
    return float(value)


SERIES_COLUMNS: Final = (
    Column("time_s", "float", "s", "start of the interval", 0),
    Column("running", "float", "", "mean number of running requests", 0),
    Column("waiting", "float", "", "mean number of waiting requests", 0),
    Column("kv_use", "float", "", "mean share of the KV cache in use", 0),
    Column("busy", "float", "", "share of time in which steps run", 0),
    Column("computed_tokens_per_s", "float", "tokens/s", "prompt and output tokens computed", 0),
    Column("output_tokens_per_s", "float", "tokens/s", "output tokens", 0),
)
"""Columns of :meth:`Simulation.series`."""


# columns of the outcomes' series
RUNNING_US, WAITING_US, BLOCKS_US, BUSY_US, NEW_TOKENS, OUTPUT_TOKENS = range(len(SERIES))


def series_table(outcomes: Outcomes, engines: int, made_from: Mapping[str, str]) -> pa.Table:
    """Return the series of ``engines`` as a table, up to the end of the last step."""
    width_us, end_us = float(outcomes.bin_us), float(outcomes.counters["end_us"])
    count = min(max(int(np.ceil(end_us / width_us)), 1), len(outcomes.series))
    series = outcomes.series[:count]
    starts_us = np.arange(count) * width_us
    # the last interval ends with the run
    length_us = np.minimum(starts_us + width_us, end_us) - starts_us
    length_us = np.where(length_us > 0.0, length_us, width_us)
    blocks = float(outcomes.counters["num_gpu_blocks"])
    values: dict[str, Any] = {
        "time_s": starts_us / US_PER_S,
        "running": series[:, RUNNING_US] / length_us,
        "waiting": series[:, WAITING_US] / length_us,
        "kv_use": series[:, BLOCKS_US] / length_us / max(blocks, 1.0),
        "busy": series[:, BUSY_US] / length_us / engines,
        "computed_tokens_per_s": series[:, NEW_TOKENS] / length_us * US_PER_S,
        "output_tokens_per_s": series[:, OUTPUT_TOKENS] / length_us * US_PER_S,
    }
    stretch = {"fastroof.stretch_s": repr(width_us / US_PER_S)}
    schema = arrow_schema(SERIES_COLUMNS, {**made_from, **stretch})
    return pa.table([pa.array(values[name], from_pandas=True) for name in schema.names], schema=schema)


def engine_use(outcomes: Outcomes, engines: int, duration_us: float) -> dict[str, Any]:
    """Return the mean and peak use of the engines."""
    totals, counters = outcomes.series.sum(axis=0), outcomes.counters
    over_us = duration_us if duration_us > 0.0 else np.nan
    # 0 if all requests were rejected
    blocks = max(float(counters["num_gpu_blocks"]), 1.0)

    def use(place: int, peak: str, capacity: float) -> dict[str, float]:
        return {"mean": float(totals[place]) / over_us / capacity, "peak": float(counters[peak]) / capacity}

    return {
        "running": use(RUNNING_US, "peak_running", 1.0),
        "waiting": use(WAITING_US, "peak_waiting", 1.0),
        "kv_use": use(BLOCKS_US, "peak_blocks", blocks),
        "busy": float(totals[BUSY_US]) / over_us / engines,
    }


def mean_step(outcomes: Outcomes, settings: EngineSettings, ranks: int = 1) -> tuple[float, float]:
    """Return a rank's mean number of running requests over busy time, and the mean tokens each holds."""
    running_us, _, blocks_us, busy_us = outcomes.series[:, : BUSY_US + 1].sum(axis=0).tolist()
    if not (running_us > 0.0 and busy_us > 0.0):
        return 1.0, 1.0
    return running_us / busy_us / ranks, blocks_us * settings.block_size / running_us


REQUEST_COLUMNS: Final = (
    Column("arrival_s", "float", "s", "arrival of the request", 0),
    Column("input_tokens", "int", "tokens", "prompt tokens"),
    Column("output_tokens", "int", "tokens", "output tokens, including the first"),
    Column("ttft_ms", "float", "ms", "time to first token; empty without one"),
    Column("tpot_ms", "float", "ms", "time per output token after the first; empty without one"),
    Column("e2e_ms", "float", "ms", "time to the last token; empty without one"),
    Column("preemptions", "int", "", "number of times its KV cache was dropped and recomputed", 0),
    Column("replica", "int", "", "replica that served it, from 0; empty if none did", 0),
    Column("status", "text", "", "finished, timed_out or rejected"),
)
"""Columns of :attr:`Simulation.requests`."""

CACHED_COLUMN: Final = Column(
    "cached_tokens",
    "int",
    "tokens",
    "prompt tokens found in the prefix cache, or given as cached; empty if unknown",
    0,
)
"""An extra column of runs with a simulated prefix cache, or of given cached tokens."""


TURN_COLUMNS: Final = (
    Column("session", "int", "", "number of the request's session", 0),
    Column("turn", "int", "", "1 more than the requests that came before it one after the other", 0),
)
"""Columns of requests in addition, if the trace has sessions."""

TRANSFER_COLUMNS: Final = (
    Column("prefill_replica", "int", "", "engine that prefilled it, from 0; empty if none did", 0),
    Column("transfer_ms", "float", "ms", "from the end of its prefill until its KV cache has arrived"),
)
"""Columns of requests in addition, with two pools."""


def request_table(
    trace: Trace, outcomes: Outcomes, times: RequestTimes, made_from: Mapping[str, str]
) -> pa.Table:
    """Return requests as a table in the order of the trace's file."""
    values: dict[str, Any] = {
        "arrival_s": outcomes.arrival_us / US_PER_S,
        "input_tokens": trace.input_tokens,
        "output_tokens": trace.output_tokens,
        "ttft_ms": times.ttft_ms,
        "tpot_ms": times.tpot_ms,
        "e2e_ms": times.e2e_ms,
        "preemptions": outcomes.preemptions,
    }
    given = trace.cached_tokens if trace.cached_tokens.any() else None
    found = given if outcomes.cached_tokens is None else outcomes.cached_tokens
    shown = REQUEST_COLUMNS if found is None else (*REQUEST_COLUMNS, CACHED_COLUMN)
    if outcomes.tiers is not None:
        for i, tier in enumerate(outcomes.tiers.tiers):
            column = f"tokens_from_{tier.name}"
            shown = (*shown, Column(column, "int", "tokens", f"those of them in KV tier {tier.name}", 0))
            values[column] = outcomes.tiers.tokens[:, i]
    if trace.has_parents:
        shown = (*shown, *TURN_COLUMNS)
        values |= {"session": trace.session, "turn": trace.turns}
    masked = {"replica": outcomes.replica}
    if found is not None:
        masked["cached_tokens"] = found
    if outcomes.transfer_us is not None and outcomes.prefill_replica is not None:
        shown = (*shown, *TRANSFER_COLUMNS)
        values["transfer_ms"] = outcomes.transfer_us / US_PER_MS
        masked["prefill_replica"] = outcomes.prefill_replica
    schema = arrow_schema(shown, made_from)
    columns = {
        name: pa.array(trace.in_file_order(value), schema.field(name).type, from_pandas=True)
        for name, value in values.items()
    }
    for name, value in masked.items():
        known = trace.in_file_order(value)
        columns[name] = pa.array(known, schema.field(name).type, mask=known < 0)
    codes = pa.array(trace.in_file_order(np.asarray(outcomes.status)).astype(np.int8))
    columns["status"] = pa.DictionaryArray.from_arrays(codes, list(STATUS_NAMES)).cast(pa.string())
    return pa.table([columns[field.name] for field in schema], schema=schema)


def checked_requests_path(path: str | Path) -> Path:
    """Return the path for a table of requests, checked before the simulation runs."""
    path = Path(path)
    if path.suffix.lower() not in (".parquet", ".csv"):
        # in other programs, an option of this name takes a number
        drawn = "; num_requests (--num-requests) is the number to draw" if str(path).isdigit() else ""
        raise FastroofError(f"requests {path} must end in .parquet or .csv{drawn}")
    check_file_place(path, f"requests {path}")
    return path


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table of requests atomically, in the format of the path's suffix."""
    with write_errors(f"requests {path}"), whole_file(path) as unfinished:
        if path.suffix.lower() == ".csv":
            from pyarrow import csv

            csv.write_csv(table, unfinished)
        else:
            from fastroof.parquet import write_parquet

            write_parquet(table, unfinished)
