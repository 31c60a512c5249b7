"""Names, units and dtypes of every table and result column, in one place.

A measured table is tidy: one row a measured point. ``keys`` name the kernel (a table of one key is
packed together), ``axes`` are the sizes that are interpolated along, ``latency_us`` is the truth.
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
    """One column: its name, how it is stored, its unit and what it means."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    minimum: int = 1
    """Least value of an int column; a float column must be above zero, or at least this if it is 0."""
    within: tuple[float, float] | None = None
    """Least and most value of a float column that has such limits."""


MEASURED_US: Final = (1e-3, 1e9)
"""What a measured time may be, us: from a nanosecond, which no launch takes, to a quarter of an hour.

All tables that ship or are imported are within 1.06e-3 (a difference of two kernels) and 5.2e7.
"""

LATENCY: Final = Column("latency_us", "float", "us", "measured latency of one call", within=MEASURED_US)
GPU: Final = Column("gpu", "text", "", "GPU that the row was measured on")
KERNEL: Final = Column("kernel", "text", "", "kernel or library that was measured")
PROVIDER: Final = Column("provider", "text", "", "what launched the kernel")

SPREAD_COLUMNS: Final = (
    Column("p25_us", "float", "us", "first quartile of the replays", within=MEASURED_US),
    Column("p75_us", "float", "us", "third quartile of the replays", within=MEASURED_US),
    Column("min_us", "float", "us", "fastest replay", within=MEASURED_US),
    Column("num_replays", "int", "", "timed replays behind the latency"),
)
RUN_COLUMNS: Final = (
    Column("num_runs", "int", "", "runs whose median the latency is"),
    Column("run_spread", "float", "", "slowest less fastest run, over the median", 0),
)
OPTIONAL_COLUMNS: Final = (GPU, KERNEL, PROVIDER, *SPREAD_COLUMNS, *RUN_COLUMNS)

DTYPE: Final = Column("dtype", "text", "", "dtype of weights and activations: bf16, fp8, fp8_block")
KV_DTYPE: Final = Column("kv_dtype", "text", "", "dtype of the KV cache; attention computes in bf16")

ORIGIN_MEASURED: Final = 0
ORIGIN_INTERPOLATED: Final = 1
ORIGIN_EXTRAPOLATED: Final = 2
ORIGIN_BORROWED: Final = 3
ORIGIN_MODELLED: Final = 4
ORIGIN: Final = "origin"
"""Of rows as they are served: what each is, by these codes; all but isolated spikes are measured."""
ORIGINS: Final = ("measured", "interpolated", "extrapolated", "borrowed", "modelled")
"""Meaning of the origin codes 0 to 4; of several parts a result carries the largest."""

MEASURED_STEP_COLUMNS: Final = (
    Column("model", "text", "", "preset or config.json that was run, with random weights"),
    Column("gpu", "text", "", "GPU that it ran on"),
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
"""Columns of a steps.csv, a row a measured step; its batches are text, see
:mod:`fastroof.load.steps_file`."""


# apostrophes in front count too, so that what is guarded twice comes back
_FORMULA: Final = r"^('*[=+\-@\t\r\n])"


def guarded(cell: str) -> str:
    """Prefix text that a spreadsheet would read as a formula with an apostrophe."""
    return f"'{cell}" if re.match(_FORMULA, cell) else cell


def unguarded(cell: str) -> str:
    """Take off what :func:`guarded` put before a cell."""
    return cell[1:] if cell.startswith("'") and re.match(_FORMULA, cell) else cell


def guarded_columns(table: pa.Table) -> pa.Table:
    """Guard the text columns of a table; numbers stay as they are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            safe = pc.replace_substring_regex(table.column(at), pattern=_FORMULA, replacement=r"'\1")
            table = table.set_column(at, field, safe)
    return table
