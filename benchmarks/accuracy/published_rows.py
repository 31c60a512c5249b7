"""Published throughput, open-loop runs and runs of other benches; nothing is fitted to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.accuracy.rows import SERVED_COLUMNS, SERVED_DEFAULTS, check_served, read_records
from fastroof.columns import Column
from fastroof.config.paths import bench_data_root
from fastroof.engines import EngineProfile, engine_of_version
from fastroof.errors import TableError, TraceError
from fastroof.evidence.rows import ENGINE_CLOCK, ServedModel
from fastroof.load.sources import SERVING_FOLDER
from fastroof.parquet import PARQUET_ERRORS, read_parquet
from fastroof.plan import StepPlan
from fastroof.simulation import Trace
from fastroof.simulation.settings import EngineSettings, running_tokens
from fastroof.traces.trace import Sizes
from fastroof.units import MS_PER_S

THROUGHPUT_FOLDER: Final = "throughput"


@dataclass(frozen=True, kw_only=True)
class ThroughputRow(ServedModel):
    """One published throughput: requests of equal lengths, all there from the start."""

    isl: int
    osl: int
    requests: int
    max_concurrency: int
    concurrency_from: str
    output_tokens_per_s: float
    # engines that were called without HTTP
    clock: str = ENGINE_CLOCK


THROUGHPUT_COLUMNS: Final = (
    *SERVED_COLUMNS,
    Column("isl", "int", "tokens", "length of each prompt", 1),
    Column("osl", "int", "tokens", "length of each output", 1),
    Column("requests", "int", "", "requests, all there from the start", 1),
    Column("max_concurrency", "int", "", "max concurrent requests", 1),
    Column("concurrency_from", "text", "", "how it is known how many ran at once"),
    Column("output_tokens_per_s", "float", "tokens/s", "output tokens of all GPUs", 0),
)
"""The columns of a file of published throughput."""


def read_throughput(path: str | Path) -> tuple[ThroughputRow, ...]:
    """Read a CSV of published throughput."""
    rows = []
    for where, values in read_records(path, THROUGHPUT_COLUMNS, SERVED_DEFAULTS, "published throughput"):
        row = ThroughputRow(**values)
        check_served(where, row)
        rows.append(row)
    return tuple(rows)


def shipped_throughput(gpu: str, root: Path | None = None) -> tuple[ThroughputRow, ...]:
    """Read the published throughput that ships with a GPU."""
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER / THROUGHPUT_FOLDER
    return tuple(row for path in sorted(folder.glob("*.csv")) for row in read_throughput(path))


OPEN_LOOP_FOLDER: Final = "open_loop"

QUANTITIES: Final = ("ttft", "tpot", "e2e")
STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")
"""Statistics over requests."""

STAGE_S: Final = 40.0
"""Simulated seconds of a stage of equal arrivals; requests of the second half count."""

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, kw_only=True)
class OpenLoopRun(ServedModel):
    """One run with open-loop arrivals."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    requests: str
    stages: str
    isl: int
    osl: int
    cached_tokens: int
    chose: str
    measured_ms: Mapping[tuple[str, str], float]

    def settings(self, plan: StepPlan) -> EngineSettings:
        """Return the engine's settings."""
        from fastroof.simulation.settings import EngineSettings

        return EngineSettings.of_plan(
            plan,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            # an engine reserves its first block
            num_gpu_blocks=self.kv_blocks - 1 if self.kv_blocks else None,
            block_size=BLOCK_SIZE,
            async_scheduling=self.engine_profile.scheduling.async_scheduling,
        )

    def loads(self) -> list[tuple[float, float, Trace]]:
        """Return the loads to simulate: weight, start of counting (s), requests."""
        if self.requests:
            return [(1.0, 0.0, read_requests(self.requests))]
        loads = []
        for rate, seconds in self.rates():
            simulated_s = min(seconds, STAGE_S)
            arrival_s = np.arange(round(rate * simulated_s)) / rate
            isl, osl, cached = (np.full(len(arrival_s), n) for n in (self.isl, self.osl, self.cached_tokens))
            loads.append((rate * seconds, simulated_s / 2, Trace(arrival_s, isl, osl, cached)))
        return loads

    def rates(self) -> list[tuple[float, float]]:
        """Return the stages: requests/s and seconds."""
        stages = []
        for stage in self.stages.split():
            try:
                rate, seconds = (float(part) for part in stage.split("x"))
            except ValueError:
                rate = seconds = 0.0
            if not (rate > 0.0 and seconds > 0.0 and math.isfinite(rate * seconds)):
                raise TableError(f"{self.row}: stages are written as 8x600 20x600, got {self.stages!r}")
            stages.append((rate, seconds))
        return stages


MEASURED: Final = tuple((quantity, statistic) for quantity in QUANTITIES for statistic in STATISTICS)

OPEN_LOOP_COLUMNS: Final = (
    *SERVED_COLUMNS,
    Column("max_num_seqs", "int", "", "max concurrent requests, of one rank"),
    Column("max_num_batched_tokens", "int", "tokens", "of a step, of one rank"),
    Column("kv_blocks", "int", "", "blocks of 16 tokens; empty: not known"),
    Column("requests", "text", "", "Parquet file of its requests next to the CSV; empty: it has stages"),
    Column("stages", "text", "", "requests a second x seconds, one after another; empty: it has requests"),
    Column("isl", "int", "tokens", "length of each prompt of a run with stages"),
    Column("osl", "int", "tokens", "length of each of their outputs"),
    Column("cached_tokens", "int", "tokens", "of each of their prompts in the prefix cache", 0),
    Column("clock", "text", "", "where times were taken: engine or client"),
    Column("chose", "text", "", "what of an engine's profile was chosen by it; empty: nothing"),
    *(
        Column(f"{quantity}_{statistic}_ms", "float", "ms", f"{statistic} of {quantity} over requests", 0)
        for quantity, statistic in MEASURED
    ),
)
"""The columns of a file of open-loop runs."""

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **SERVED_DEFAULTS,
        "kv_blocks": 0,
        "requests": "",
        "stages": "",
        "isl": 0,
        "osl": 0,
        "cached_tokens": 0,
        "chose": "",
        **{f"{quantity}_{statistic}_ms": math.nan for quantity, statistic in MEASURED},
    }
)

REQUEST_SCHEMA: Final = pa.schema(
    [
        ("arrival_s", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
    ]
)
"""Columns of a file of requests; others are not read."""


def read_requests(path: str | Path) -> Trace:
    """Read a Parquet file of requests."""
    try:
        table = read_parquet(path, REQUEST_SCHEMA.names).cast(REQUEST_SCHEMA)
        arrival_s, prompt, output, cached = (table[name].to_numpy() for name in REQUEST_SCHEMA.names)
        return Trace(arrival_s, prompt, output, cached, name=Path(path).stem)
    except (*PARQUET_ERRORS, TraceError) as error:
        raise TableError(f"{path}: cannot be read as requests: {error}") from None


def read_open_loop(path: str | Path) -> tuple[OpenLoopRun, ...]:
    """Read a CSV of open-loop runs."""
    runs = []
    for where, values in read_records(path, OPEN_LOOP_COLUMNS, _DEFAULTS, "open-loop runs"):
        measured = {
            (quantity, statistic): values.pop(f"{quantity}_{statistic}_ms")
            for quantity, statistic in MEASURED
        }
        known = {key: ms for key, ms in measured.items() if not math.isnan(ms)}
        if bool(values["requests"]) == bool(values["stages"]):
            raise TableError(f"{where}: a run has either requests or stages")
        if values["stages"] and not values["cached_tokens"] < values["isl"] * bool(values["osl"]):
            raise TableError(f"{where}: a run with stages needs isl and osl, and cached_tokens below isl")
        if values["requests"]:
            values["requests"] = str(Path(path).with_name(values["requests"]))
        run = OpenLoopRun(**values, measured_ms=MappingProxyType(known))
        check_served(where, run)
        run.rates()
        runs.append(run)
    return tuple(runs)


def shipped_open_loop(gpu: str, root: Path | None = None) -> tuple[OpenLoopRun, ...]:
    """Read the open-loop runs that ship with a GPU."""
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER / OPEN_LOOP_FOLDER
    return tuple(run for path in sorted(folder.glob("*.csv")) for run in read_open_loop(path))


BENCH_RUNS_FILE: Final = "public_serving.csv"

BURST, CLOSED_UNIFORM, CLOSED_EQUAL = "burst", "closed-uniform", "closed-equal"
PROTOCOLS: Final = (BURST, CLOSED_UNIFORM, CLOSED_EQUAL)
"""All requests at once; clients with one request in flight each, of uniform lengths or of equal ones."""

BENCH_SEED: Final = 1
"""Seed of sglang.bench_serving, which draws all prompts and then all outputs."""


@dataclass(frozen=True, kw_only=True)
class BenchRun(ServedModel):
    """One run of another bench, with its protocol: its requests are replayed."""

    protocol: str
    isl: float
    osl: float
    requests: int
    concurrency: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_fraction: float
    chunked_prefill: int
    is_host_bound: int
    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float
    source: str

    @property
    def engine_profile(self) -> EngineProfile:
        """The packaged profile of its engine and version, with the limits of the card."""
        return engine_of_version(self.engine, self.engine_version)

    @property
    def mean_osl(self) -> float:
        """Mean tokens of an output."""
        return (self.osl + 1.0) / 2.0 if self.protocol == CLOSED_UNIFORM else self.osl

    @property
    def running(self) -> float:
        """Mean requests that decode, as measured: by Little's law, requests a second times seconds each."""
        requests_per_s = self.output_tokens_per_s / self.mean_osl
        return requests_per_s * self.tpot_ms * (self.mean_osl - 1.0) / MS_PER_S

    def settings(self, plan: StepPlan, trace: Trace) -> EngineSettings:
        """Return the engine's settings."""
        return EngineSettings.of_plan(
            plan,
            kv_len=running_tokens(trace, plan),
            max_num_batched_tokens=self.max_num_batched_tokens or None,
            max_num_seqs=self.max_num_seqs or None,
            chunked_prefill=True if self.chunked_prefill else None,
        )

    def trace(self) -> Trace:
        """Return its requests as its protocol sends them."""
        if self.protocol == CLOSED_UNIFORM:
            drawn = np.random.RandomState(BENCH_SEED)
            prompts, outputs = (
                drawn.randint(1, int(most) + 1, self.requests).astype(np.int32)
                for most in (self.isl, self.osl)
            )
        else:
            prompts, outputs = (_whole_lengths(mean, self.requests) for mean in (self.isl, self.osl))
        clients = None if self.protocol == BURST else self.concurrency
        return Trace(np.zeros(self.requests), prompts, outputs, name=self.row, clients=clients)


def _whole_lengths(mean: float, count: int) -> Sizes:
    """Return whole lengths that differ by one token at most, with a given mean."""
    lengths: Sizes = np.diff(np.floor(np.arange(count + 1) * mean + 0.5)).astype(np.int32)
    return lengths


BENCH_COLUMNS: Final = (
    *SERVED_COLUMNS,
    Column("protocol", "text", "", f"how requests are sent: {', '.join(PROTOCOLS)}"),
    Column("isl", "float", "tokens", "length of each prompt; of uniform lengths the longest", 1),
    Column("osl", "float", "tokens", "length of each output; of uniform lengths the longest", 1),
    Column("requests", "int", "", "requests of the run", 1),
    Column("concurrency", "int", "", "clients with one request in flight each; empty: a burst", 1),
    Column("max_num_seqs", "int", "", "max requests per step; empty: the engine's default", 1),
    Column("max_num_batched_tokens", "int", "tokens", "max tokens per step; empty: the engine's default", 1),
    Column("memory_fraction", "float", "", "share of memory; empty: the engine's default", 0),
    Column("chunked_prefill", "int", "", "1 if it was switched on; empty: the engine's default", 1),
    Column("is_host_bound", "int", "", "1 if the API server takes most of its time; empty: no", 1),
    Column("ttft_ms", "float", "ms", "measured mean time to first token", 0),
    Column("tpot_ms", "float", "ms", "measured mean time per output token after the first", 0),
    Column("output_tokens_per_s", "float", "tokens/s", "output tokens of all GPUs", 0),
    Column("source", "text", "", "address of the page, with its commit"),
)
"""The columns of a file of runs of other benches; others are not read."""

_BENCH_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **SERVED_DEFAULTS,
        **dict.fromkeys(("concurrency", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill"), 0),
        "is_host_bound": 0,
        "memory_fraction": math.nan,
    }
)


def read_bench_runs(path: str | Path) -> tuple[BenchRun, ...]:
    """Read a CSV of runs of other benches."""
    runs = []
    for where, values in read_records(path, BENCH_COLUMNS, _BENCH_DEFAULTS, "runs of a bench"):
        run = BenchRun(**values)
        check_served(where, run)
        if run.protocol not in PROTOCOLS:
            raise TableError(f"{where}: protocol is one of {', '.join(PROTOCOLS)}, got {run.protocol!r}")
        if (run.protocol == BURST) == bool(run.concurrency):
            raise TableError(f"{where}: closed loops have a concurrency and bursts none")
        if run.protocol == CLOSED_UNIFORM and not (run.isl.is_integer() and run.osl.is_integer()):
            raise TableError(f"{where}: uniform lengths are drawn up to whole isl and osl")
        runs.append(run)
    return tuple(runs)


def shipped_bench_runs(gpu: str, root: Path | None = None) -> tuple[BenchRun, ...]:
    """Read the runs of other benches on a GPU in bench_data."""
    path = (bench_data_root() if root is None else root) / BENCH_RUNS_FILE
    return tuple(run for run in read_bench_runs(path) if run.gpu == gpu) if path.is_file() else ()
