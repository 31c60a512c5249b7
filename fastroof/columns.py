"""Names, units and dtypes of every table and result column, in one place.

A measured table is tidy: one row per measured point. ``keys`` name the kernel (rows with the same key are
packed together), ``axes`` are the sizes to interpolate along, ``latency_us`` is the measurement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    import pyarrow as pa


Kind = Literal["int", "float", "text"]


@dataclass(frozen=True)
class Column:
    """A column: its name, storage type, unit and meaning."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    minimum: int = 1
    """Minimum of an int column; a float column must be above zero, or at least zero if this is 0."""
    within: tuple[float, float] | None = None
    """Minimum and maximum of a float column, if it is limited."""


MEASURED_US: Final = (1e-3, 1e9)
"""Plausible range of a measured time in us: from 1 ns, shorter than any launch, to a quarter of an hour.

All shipped and imported tables are between 1.06e-3 (a difference of two kernels) and 5.2e7.
"""

LATENCY: Final = Column("latency_us", "float", "us", "measured latency of one call", within=MEASURED_US)
GPU: Final = Column("gpu", "text", "", "GPU that the row was measured on")
KERNEL: Final = Column("kernel", "text", "", "kernel or library that was measured")
PROVIDER: Final = Column("provider", "text", "", "library that launched the kernel")

SPREAD_COLUMNS: Final = (
    Column("p25_us", "float", "us", "first quartile of the replays", within=MEASURED_US),
    Column("p75_us", "float", "us", "third quartile of the replays", within=MEASURED_US),
    Column("min_us", "float", "us", "fastest replay", within=MEASURED_US),
    Column("num_replays", "int", "", "number of timed replays behind the latency"),
)
RUN_COLUMNS: Final = (
    Column("num_runs", "int", "", "number of runs; the latency is their median"),
    Column("run_spread", "float", "", "slowest minus fastest run, divided by the median", 0),
)
QUANTISES: Final = Column(
    "quantises_input", "int", "", "1 if the latency of a GEMM includes quantising its bf16 input, else 0", 0
)
OPTIONAL_COLUMNS: Final = (GPU, KERNEL, PROVIDER, QUANTISES, *SPREAD_COLUMNS, *RUN_COLUMNS)

DTYPE: Final = Column("dtype", "text", "", "dtype of weights and activations: bf16, fp8, fp8_block")
KV_DTYPE: Final = Column("kv_dtype", "text", "", "dtype of the KV cache; attention computes in bf16")

ORIGIN_MEASURED: Final = 0
ORIGIN_INTERPOLATED: Final = 1
ORIGIN_EXTRAPOLATED: Final = 2
ORIGIN_BORROWED: Final = 3
ORIGIN_MODELLED: Final = 4
ORIGIN: Final = "origin"
"""Column with the origin code of each row as served; all but isolated spikes are measured."""
ORIGINS: Final = ("measured", "interpolated", "extrapolated", "borrowed", "modelled")
"""Meaning of the origin codes 0 to 4; a result of several parts has the largest of theirs."""

MODELLED_FROM: Final = "modelled"
"""Word in the source of a kernel that is modelled from a measured one."""

MEASURED_STEP_COLUMNS: Final = (
    Column("model", "text", "", "preset or config.json that was run, with random weights"),
    Column("gpu", "text", "", "GPU that the step ran on"),
    Column("tp", "int", "GPUs", "tensor-parallel size"),
    Column("dtype", "text", "", "dtype of weights and activations"),
    Column("kv_dtype", "text", "", "dtype of the KV cache"),
    Column("phase", "text", "", "decode, prefill, mixed or unequal"),
    Column("new_tokens", "text", "tokens", "new tokens of each request, as runs: 1x32;2048"),
    Column("context_len", "text", "tokens", "tokens of each request in the cache before the step, as runs"),
    Column("num_requests", "int", "", "requests of the step"),
    Column("num_tokens", "int", "tokens", "new tokens of all requests"),
    Column(
        "latency_us", "float", "us", "median time of the step, replayed as one CUDA graph", within=MEASURED_US
    ),
    *SPREAD_COLUMNS,
    Column("provider", "text", "", "attention and small kernels; GEMMs are torch's"),
)
"""Columns of a steps.csv, one row per measured step; batches are text, see
:mod:`fastroof.load.steps_file`."""


# leading apostrophes match too, so that text guarded twice is restored
_FORMULA: Final = r"^('*[=+\-@\t\r\n])"


def guarded(cell: str) -> str:
    """Prefix text that a spreadsheet would read as a formula with an apostrophe."""
    return f"'{cell}" if re.match(_FORMULA, cell) else cell


def unguarded(cell: str) -> str:
    """Remove the apostrophe that :func:`guarded` put before a cell."""
    return cell[1:] if cell.startswith("'") and re.match(_FORMULA, cell) else cell


def guarded_columns(table: pa.Table) -> pa.Table:
    """Guard the text columns of a table; numbers stay unchanged."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            safe = pc.replace_substring_regex(table.column(at), pattern=_FORMULA, replacement=r"'\1")
            table = table.set_column(at, field, safe)
    return table
