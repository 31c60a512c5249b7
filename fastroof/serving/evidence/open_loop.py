"""Runs whose requests came when they came, by a log or at given rates, and what their clients saw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrow import PARQUET_ERRORS, read_parquet
from fastroof.columns import Column
from fastroof.config.paths import bench_data_root
from fastroof.errors import TableError, TraceError
from fastroof.load.own import SERVING_FOLDER
from fastroof.serving.evidence.record_files import read_records
from fastroof.serving.evidence.served_as import check_served
from fastroof.serving.evidence.throughput_rows import (
    SERVED_COLUMNS,
    SERVED_DEFAULTS,
    ServedModel,
)
from fastroof.simulation import Trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan
    from fastroof.simulation.settings import EngineSettings

__all__ = [
    "OPEN_LOOP_COLUMNS",
    "QUANTITIES",
    "STATISTICS",
    "OpenLoopRun",
    "read_open_loop",
    "shipped_open_loop",
]

OPEN_LOOP_FOLDER: Final = "open_loop"

QUANTITIES: Final = ("ttft", "tpot", "e2e")
STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")
"""What is known of each quantity: its mean over requests, or a percentile."""

STAGE_S: Final = 40.0
"""Seconds that are simulated of a stage of equal arrivals; the requests of its second half are looked at."""

BLOCK_SIZE: Final = 16


@dataclass(frozen=True)
class OpenLoopRun(ServedModel):
    """One run with open-loop arrivals.

    Attributes
    ----------
    max_num_seqs, max_num_batched_tokens : int
        The engine's arguments, for one rank.
    kv_blocks : int
        Blocks of 16 tokens that the engine said it had; 0 where that is not known.
    requests : str
        Path of the Parquet file of its requests, as text; empty where it has stages.
    stages : str
        ``8x600 20x600``: requests a second x seconds, evenly spaced; empty where it has requests.
    isl, osl, cached_tokens : int
        Of each request of a run with stages; 0 otherwise.
    clock : str
        Where times were taken: engine, or client, with its front end and the network.
    chose : str
        What of an engine's profile was chosen by this run, so that it is no judge of it; empty: nothing.
    measured_ms : mapping of (str, str) to float
        What was measured, by quantity and statistic, ms.
    """

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
        """Return its engine's settings.

        Parameters
        ----------
        plan : StepPlan
            Its plan, whose memory has the blocks of runs that do not say how many there were.

        Raises
        ------
        SimulationError
            If there is no such engine, or no room for KV cache.
        """
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
        """Return what is to be simulated: requests, from when they count, and how much.

        Returns
        -------
        list of (float, float, Trace)
            Each load's weight in the mean, the arrival from which its requests count, s, and its requests.

        Raises
        ------
        TableError
            If its requests cannot be read.
        """
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
        """Its stages: requests a second, and seconds.

        Raises
        ------
        TableError
            If they are not written as ``8x600 20x600``.
        """
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


def _column(name: str, kind: Any, unit: str, meaning: str, minimum: int = 1) -> Column:
    return Column(name, kind, unit, meaning, minimum)


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
    """Read a Parquet file of requests.

    Raises
    ------
    TableError
        If it is no such file.
    """
    try:
        table = read_parquet(path, REQUEST_SCHEMA.names).cast(REQUEST_SCHEMA)
        arrival_s, prompt, output, cached = (table[name].to_numpy() for name in REQUEST_SCHEMA.names)
        return Trace(arrival_s, prompt, output, cached, name=Path(path).stem)
    except (*PARQUET_ERRORS, TraceError) as error:
        raise TableError(f"{path}: cannot be read as requests: {error}") from None


def read_open_loop(path: str | Path) -> tuple[OpenLoopRun, ...]:
    """Read a CSV of open-loop runs.

    Parameters
    ----------
    path : str or Path
        A file with the columns of :data:`OPEN_LOOP_COLUMNS`.

    Returns
    -------
    tuple of OpenLoopRun
        In the order of the file.

    Raises
    ------
    TableError
        If it is no such file, a cell is not what its column holds, or a run has no requests and no stages.
    """
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
    """Read the open-loop runs that ship with a GPU.

    Parameters
    ----------
    gpu : str
        Name of the GPU.
    root : Path, optional
        Folder that holds one folder a GPU, instead of the shipped one.

    Returns
    -------
    tuple of OpenLoopRun
        Of all files of ``<gpu>/serving/open_loop`` by name.

    Examples
    --------
    >>> [run.row for run in shipped_open_loop("rtx_pro_6000")][:2]
    ['llama-3.1-8b', 'qwen3-30b-a3b']
    """
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER / OPEN_LOOP_FOLDER
    return tuple(run for path in sorted(folder.glob("*.csv")) for run in read_open_loop(path))
