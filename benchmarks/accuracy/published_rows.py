"""Published throughput and open-loop runs of serving engines; nothing is fitted to them."""

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
from fastroof.errors import TableError, TraceError
from fastroof.load.sources import SERVING_FOLDER
from fastroof.parquet import PARQUET_ERRORS, read_parquet
from fastroof.plan import StepPlan
from fastroof.serving.evidence.rows import ServedModel
from fastroof.simulation import Trace
from fastroof.simulation.settings import EngineSettings

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
    clock: str
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
