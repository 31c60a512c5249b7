"""Published throughput and open-loop runs of serving engines, which nothing is fitted to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.accuracy.rows import check_served, read_records
from fastroof.columns import Column
from fastroof.config.paths import bench_data_root
from fastroof.engines import serving_engines
from fastroof.errors import TableError, TraceError
from fastroof.load.sources import SERVING_FOLDER
from fastroof.parquet import PARQUET_ERRORS, read_parquet
from fastroof.plan import StepPlan
from fastroof.serving.evidence.rows import ServedAs
from fastroof.simulation import Trace
from fastroof.simulation.settings import EngineSettings

THROUGHPUT_FOLDER: Final = "throughput"


@dataclass(frozen=True)
class ServedModel(ServedAs):
    """What was measured: a model as one engine served it."""

    dataset: str
    row: str
    gpu: str
    engine: str
    engine_version: str
    checkpoint: str
    model: str
    dtype: str
    kv_dtype: str
    kv_dtype_from: str
    tp: int
    pp: int
    dp: int
    ep: int
    left_out: str


@dataclass(frozen=True)
class ThroughputRow(ServedModel):
    """One published throughput: requests of equal lengths that are all there from the start."""

    isl: int
    osl: int
    requests: int
    max_concurrency: int
    concurrency_from: str
    output_tokens_per_s: float


def _column(name: str, kind: Any, unit: str, meaning: str, minimum: int = 1) -> Column:
    return Column(name, kind, unit, meaning, minimum)


SERVED_COLUMNS: Final = (
    _column("dataset", "text", "", "rows that are judged together"),
    _column("row", "text", "", "name of the row"),
    _column("gpu", "text", "", "GPU that it was measured on"),
    _column("engine", "text", "", f"serving engine: {', '.join(serving_engines())}"),
    _column("engine_version", "text", "", "its version"),
    _column("checkpoint", "text", "", "model that was served, as the source names it"),
    _column("model", "text", "", "fastroof's preset of it, or a config.json"),
    _column("dtype", "text", "", "dtype of the linear layers"),
    _column("kv_dtype", "text", "", "dtype of the KV cache"),
    _column("kv_dtype_from", "text", "", "how kv_dtype is known"),
    _column("tp", "int", "GPUs", "tensor-parallel size", 1),
    _column("pp", "int", "", "pipeline stages", 1),
    _column("dp", "int", "", "ranks of attention data parallelism", 1),
    _column("ep", "int", "", "groups of experts", 1),
    _column("left_out", "text", "", "why the row is not judged; empty where it is"),
)
"""Columns of every kind of file of :class:`ServedModel`."""

THROUGHPUT_COLUMNS: Final = (
    *SERVED_COLUMNS,
    _column("isl", "int", "tokens", "length of each prompt", 1),
    _column("osl", "int", "tokens", "length of each output", 1),
    _column("requests", "int", "", "requests that were all there from the start", 1),
    _column("max_concurrency", "int", "", "requests that run at once at most", 1),
    _column("concurrency_from", "text", "", "how it is known how many ran at once"),
    _column("output_tokens_per_s", "float", "tokens/s", "output tokens of all GPUs"),
)
"""The columns of a file of published throughput."""

SERVED_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"checkpoint": "", "kv_dtype_from": "", "pp": 1, "dp": 1, "ep": 1, "left_out": ""}
)
"""What a column that a file lacks, or an empty cell of it, stands for."""


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
"""What is known of each quantity: its mean over requests, or a percentile."""

STAGE_S: Final = 40.0
"""Seconds that are simulated of a stage of equal arrivals; the requests of its second half are looked at."""

BLOCK_SIZE: Final = 16


@dataclass(frozen=True)
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
        """Return its engine's settings."""
        from fastroof.simulation.settings import EngineSettings

        return EngineSettings.of_plan(
            plan,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            # an engine never gives away the first of its blocks
            num_gpu_blocks=self.kv_blocks - 1 if self.kv_blocks else None,
            block_size=BLOCK_SIZE,
            async_scheduling=self.engine_profile.scheduling.async_scheduling,
        )

    def loads(self) -> list[tuple[float, float, Trace]]:
        """Return what to simulate: requests, from when they count, and how much."""
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
        """Its stages: requests a second, and seconds."""
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
    _column("max_num_seqs", "int", "", "requests that run at once at most, of one rank"),
    _column("max_num_batched_tokens", "int", "tokens", "of a step, of one rank"),
    _column("kv_blocks", "int", "", "blocks of 16 tokens; empty: not known"),
    _column("requests", "text", "", "Parquet file of its requests beside the CSV; empty: it has stages"),
    _column("stages", "text", "", "requests a second x seconds, one after another; empty: it has requests"),
    _column("isl", "int", "tokens", "length of each prompt of a run with stages"),
    _column("osl", "int", "tokens", "length of each of their outputs"),
    _column("cached_tokens", "int", "tokens", "of each of their prompts in the prefix cache", 0),
    _column("clock", "text", "", "where times were taken: engine or client"),
    _column("chose", "text", "", "what of an engine's profile was chosen by it; empty: nothing"),
    *(
        _column(f"{quantity}_{statistic}_ms", "float", "ms", f"{statistic} of {quantity} over requests")
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
"""Columns of a file of requests; others, such as what was measured of each, are not read."""


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
