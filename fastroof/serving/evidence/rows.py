"""Rows that were measured end to end: what was served how, and the TTFT and TPOT that clients saw."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fastroof.atomic_files import whole_file
from fastroof.columns import Column, guarded, unguarded
from fastroof.config.paths import bench_data_root
from fastroof.engines import recipe_for, serving_engines
from fastroof.errors import TableError
from fastroof.load.own import SERVING_FOLDER
from fastroof.load.steps_file import STEPS_FILE
from fastroof.serving.evidence.record_files import read_number, read_records
from fastroof.serving.evidence.served_as import ServedAs, check_served

__all__ = [
    "LARGEST_STEP",
    "ROW_COLUMNS",
    "LeftOut",
    "ServingRow",
    "dataset_names",
    "read_rows",
    "shipped_rows",
    "write_rows",
]


LARGEST_STEP: Final = 16384
"""Tokens of a step that plans of rows time, where no row says more."""


@dataclass(frozen=True)
class ServingRow(ServedAs):
    """One measured run: clients that each had one request in flight, and the means that they saw.

    Attributes
    ----------
    dataset, row : str
        Which rows it is judged with, and its name among them.
    gpu, engine, engine_version : str
        What it was measured on; the version is empty where the source has none.
    checkpoint, model : str
        The weights, and what :func:`fastroof.load_model` makes of them.
    dtype, kv_dtype, kv_dtype_from : str
        Of linear layers and KV cache, and how the latter is known.
    tp : int
        GPUs.
    isl, osl : float
        Nominal tokens of a prompt (a cached prefix included), and of an output.
    concurrency : float
        Clients.
    length_factor : float
        Mean length of prompts and outputs over the nominal one.
    prefix_tokens : float
        Tokens of each prompt that were in the prefix cache.
    requests_per_client : float
        Requests after a start of all clients at once; nan for a steady state.
    frontend : str
        Test bench whose front end (HTTP, tokenizer, router) adds to TTFT; empty where it adds nothing.
    ttft_ms, tpot_ms : float
        Mean time to first token, and mean time per output token after it, ms; ttft_ms may be nan.
    aic_ttft_ms, aic_tpot_ms : float
        What aiconfigurator-core predicts for the row; nan where it was not asked.
    left_out : str
        Why the row is not judged; empty where it is.
    pp, dp, ep : int
        Pipeline stages, ranks of attention data parallelism (replicas of a dense model) and groups of experts
        of the engine, or of each decode worker where prefill is apart.
    architecture : str
        What is left out together where a model is: labels and formats of one model; empty: ``model`` itself.
    bench : str
        Whose protocol the run followed: inferencemax, dynamo; empty where it is not known.
    length_spread : float
        Range of the lengths, uniform, over the nominal one; 0 where all are equal.
    measured_on : str
        Date of the run, as the source has it.
    also_as : str
        Other labels that the source gives the same run, by commas.
    decode_workers : int
        Engines that decode alone; 0 where one engine does all.
    prefill_workers, prefill_tp, prefill_dp, prefill_ep : int
        Engines that prefill alone, and the layout of each.
    max_num_batched_tokens, max_num_seqs : int
        Tokens and requests that a step of it held at most, where known; 0 for the engine's own default.
    exchange : str
        How tokens reach experts on other GPUs in decodes, as a plan takes it; empty: the engine's own choice.
    """

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
    isl: float
    osl: float
    concurrency: float
    length_factor: float
    prefix_tokens: float
    requests_per_client: float
    frontend: str
    ttft_ms: float
    tpot_ms: float
    aic_ttft_ms: float
    aic_tpot_ms: float
    left_out: str
    pp: int = 1
    dp: int = 1
    ep: int = 1
    architecture: str = ""
    bench: str = ""
    length_spread: float = 0.0
    measured_on: str = ""
    also_as: str = ""
    decode_workers: int = 0
    prefill_workers: int = 0
    prefill_tp: int = 0
    prefill_dp: int = 0
    prefill_ep: int = 0
    exchange: str = ""
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0

    @property
    def is_disaggregated(self) -> bool:
        """Whether some engines prefill and others decode."""
        return self.decode_workers > 0

    @property
    def whole_model(self) -> str:
        """The model that its rows are left out with, whatever its format."""
        return self.architecture or self.model

    @property
    def schedule(self) -> dict[str, Any]:
        """How its engine schedules, as :func:`fastroof.serving.estimate` takes it."""
        engine = self.engine_profile
        return {
            "max_batched_tokens": self.max_num_batched_tokens or engine.scheduling.max_num_batched_tokens,
            "chunked_prefill": engine.scheduling.chunked_prefill,
            "kv_reservation": engine.memory.kv_reservation,
            "max_seqs": self.max_seqs,
            "order": engine.scheduling.order,
            "length_spread": self.length_spread,
            "wait_steps": self.wait_steps,
        }

    @property
    def wait_steps(self) -> int:
        """Steps that prompts wait for others, as the public benchmark's scripts launched the engine."""
        if self.bench != "inferencemax":
            return 0
        recipe = recipe_for(
            self.engine, self.engine_version, self.gpu, self.whole_model, self.dtype,
            layout=(self.tp, self.dp, self.ep), measured_on=self.measured_on,
        )  # fmt: skip
        return 0 if recipe is None else recipe.steps_to_wait(self.isl, self.osl, self.tp, self.concurrency)

    @property
    def plan_tokens(self) -> int:
        """The largest step that a plan of it has to time."""
        return max(LARGEST_STEP, 2 * self.max_num_batched_tokens)

    @property
    def max_seqs(self) -> int:
        """Requests that its engine runs at most, for which vLLM reserves memory.

        InferenceMAX starts vLLM with ``--max-num-seqs=$CONC`` (its benchmarks/*_docker.sh on H100, H200 and
        B200, Apache-2.0); others leave the engine's default.
        """
        if self.max_num_seqs:
            return self.max_num_seqs
        own = self.engine_profile.scheduling.max_num_seqs
        # rows of a source without versions and benches are InferenceMAX's where their lengths are
        is_told = self.bench == "inferencemax" or not (self.bench or self.frontend or self.length_factor == 1)
        return min(own, max(round(self.concurrency), 1)) if is_told and self.engine == "vllm" else own

    @property
    def is_single(self) -> bool:
        """Whether one request was in flight: its TPOT is the decode step of batch 1."""
        return self.concurrency == 1

    @property
    def mean_isl(self) -> float:
        """Mean tokens of a prompt."""
        return self.isl * self.length_factor

    @property
    def mean_osl(self) -> float:
        """Mean tokens of an output."""
        return self.osl * self.length_factor


class LeftOut(NamedTuple):
    """Rows of a source that are not judged, and why; ``quantity`` where the others of a row are."""

    source: str
    reason: str
    rows: int
    quantity: str = ""


def _column(name: str, kind: Any, unit: str, meaning: str, minimum: int = 0) -> Column:
    return Column(name, kind, unit, meaning, minimum)


ROW_COLUMNS: Final = (
    _column("dataset", "text", "", "rows that are judged together"),
    _column("row", "text", "", "name of the row in its source"),
    _column("gpu", "text", "", "GPU that it was measured on"),
    _column("engine", "text", "", f"serving engine: {', '.join(serving_engines())}"),
    _column("engine_version", "text", "", "its version; empty where the source has none"),
    _column("checkpoint", "text", "", "Hugging Face model that was served"),
    _column("model", "text", "", "fastroof's preset of it, or a config.json"),
    _column("dtype", "text", "", "dtype of the linear layers: bf16, fp8, fp8_block, nvfp4 .."),
    _column("kv_dtype", "text", "", "dtype of the KV cache"),
    _column("kv_dtype_from", "text", "", "how kv_dtype is known"),
    _column("tp", "int", "GPUs", "tensor-parallel size", 1),
    _column("isl", "float", "tokens", "nominal length of a prompt, a cached prefix included", 1),
    _column("osl", "float", "tokens", "nominal length of an output", 1),
    _column("concurrency", "float", "", "clients, each with one request in flight", 1),
    _column("length_factor", "float", "", "mean length over the nominal one"),
    _column("prefix_tokens", "float", "tokens", "tokens of a prompt that were in the prefix cache"),
    _column("requests_per_client", "float", "", "requests after a start of all at once; empty: steady", 1),
    _column("frontend", "text", "", "test bench whose front end adds to TTFT; empty: none does"),
    _column("ttft_ms", "float", "ms", "measured mean time to first token"),
    _column("tpot_ms", "float", "ms", "measured mean time per output token after the first"),
    _column("aic_ttft_ms", "float", "ms", "prediction of aiconfigurator-core for the row"),
    _column("aic_tpot_ms", "float", "ms", "prediction of aiconfigurator-core for the row"),
    _column("left_out", "text", "", "why the row is not judged; empty where it is"),
    _column("pp", "int", "", "pipeline stages", 1),
    _column("dp", "int", "", "ranks of attention data parallelism; of a dense model replicas", 1),
    _column("ep", "int", "", "groups of experts", 1),
    _column("architecture", "text", "", "what is left out with its model; empty: the model itself"),
    _column("bench", "text", "", "whose protocol the run followed; empty: not known"),
    _column("length_spread", "float", "", "range of the lengths over the nominal one; 0: all equal"),
    _column("measured_on", "text", "", "date of the run"),
    _column("also_as", "text", "", "other labels of the same run in its source"),
    _column("decode_workers", "int", "", "engines that decode alone; empty: one engine does all", 1),
    _column("prefill_workers", "int", "", "engines that prefill alone", 1),
    _column("prefill_tp", "int", "GPUs", "tensor-parallel size of each", 1),
    _column("prefill_dp", "int", "", "their ranks of attention data parallelism", 1),
    _column("prefill_ep", "int", "", "their groups of experts", 1),
    _column("max_num_batched_tokens", "int", "tokens", "of a step at most; empty: the engine's default", 1),
    _column("max_num_seqs", "int", "", "requests of a step at most; empty: the engine's default", 1),
    _column("exchange", "text", "", "how tokens reach experts in decodes; empty: the engine's own choice"),
)
"""The columns of a file of serving rows; other columns are not read."""

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "row": "",
        "engine_version": "",
        "checkpoint": "",
        "kv_dtype_from": "",
        "length_factor": 1.0,
        "prefix_tokens": 0.0,
        "requests_per_client": math.nan,
        "frontend": "",
        "ttft_ms": math.nan,
        "aic_ttft_ms": math.nan,
        "aic_tpot_ms": math.nan,
        "left_out": "",
        "pp": 1,
        "dp": 1,
        "ep": 1,
        "architecture": "",
        "bench": "",
        "length_spread": 0.0,
        "measured_on": "",
        "also_as": "",
        "decode_workers": 0,
        "prefill_workers": 0,
        "prefill_tp": 0,
        "prefill_dp": 0,
        "prefill_ep": 0,
        "exchange": "",
        "max_num_batched_tokens": 0,
        "max_num_seqs": 0,
    }
)
"""What a column that a file lacks, or an empty cell of it, stands for."""


def read_rows(path: str | Path) -> tuple[ServingRow, ...]:
    """Read a CSV of serving rows.

    Parameters
    ----------
    path : str or Path
        A file with the columns of :data:`ROW_COLUMNS`. Required are dataset, gpu, engine, model, dtype,
        kv_dtype, tp, isl, osl, concurrency and tpot_ms.

    Returns
    -------
    tuple of ServingRow
        In the order of the file.

    Raises
    ------
    TableError
        If it is no such file, or a cell is not what its column holds; names line and column.
    """
    records = read_records(path, ROW_COLUMNS, _DEFAULTS, "serving rows", value=_value, one="measured run")
    return tuple(_row(where, values) for where, values in records)


def _row(where: str, values: Mapping[str, Any]) -> ServingRow:
    row = ServingRow(**values)
    check_served(where, row)
    if row.prefix_tokens >= row.isl:
        raise TableError(
            f"{where}: a prompt of {row.isl:g} tokens has fewer than that in the prefix cache, "
            f"got prefix_tokens {row.prefix_tokens:g}"
        )
    return row


def _value(where: str, column: Column, text: str) -> Any:
    if column.kind == "text":
        return unguarded(text)
    value = read_number(where, column, text)
    optional_zero = column.name in ("prefix_tokens", "length_spread")
    good = math.isfinite(value) and value >= column.minimum and (value > 0 or optional_zero)
    if not good:
        least = column.minimum or (0 if optional_zero else None)
        need = "above 0" if least is None else f"of at least {least}"
        raise TableError(f"{where}: found {text}, need a number {need}")
    return value


def write_rows(path: str | Path, rows: Sequence[ServingRow]) -> Path:
    """Write serving rows as a CSV that :func:`read_rows` reads back.

    Parameters
    ----------
    path : str or Path
        The file.
    rows : sequence of ServingRow
        Each number in the fewest digits that keep it; nan as an empty cell.

    Returns
    -------
    Path
        The file.
    """
    path = Path(path)
    with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in fields(ServingRow)])
        writer.writerows([_text(value) for value in asdict(row).values()] for row in rows)
    return path


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(int(value) if value.is_integer() else value)
    return "" if value == 0 else guarded(str(value))


def shipped_rows(gpu: str, root: Path | None = None) -> tuple[ServingRow, ...]:
    """Read the serving rows that ship with a GPU's tables.

    Parameters
    ----------
    gpu : str
        Name of the GPU.
    root : Path, optional
        Folder that holds one folder a GPU, instead of the shipped one.

    Returns
    -------
    tuple of ServingRow
        Of all files of ``<gpu>/serving`` by name; none where there is no such folder.

    Examples
    --------
    >>> len(shipped_rows("h100"))
    815
    """
    folder = (bench_data_root() if root is None else root) / gpu / SERVING_FOLDER
    files = sorted(path for path in folder.glob("*.csv") if path.name != STEPS_FILE)
    return tuple(row for path in files for row in read_rows(path))


def dataset_names(rows: Iterable[ServingRow]) -> tuple[str, ...]:
    """Return the data sets of rows, in the order in which they first come."""
    return tuple(dict.fromkeys(row.dataset for row in rows))
