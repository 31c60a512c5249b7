"""Scenarios for `evaluate`: checked columns of equal length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrays import Array
from fastroof.checks import shown
from fastroof.columns import Column
from fastroof.compat.infersim.model import SM_RATIO
from fastroof.compat.infersim.tree import LARGEST
from fastroof.errors import BatchError
from fastroof.units import MS_PER_S

LABELS: Final = ("id", "source", "model")
"""Columns that are copied to the result."""

SCENARIO_COLUMNS: Final = (
    Column("device", "text", "", "GPU"),
    Column("world_size", "int", "GPUs", "GPUs that serve one copy of the model"),
    Column("tp_size", "int", "GPUs", "tensor-parallel size"),
    Column("num_nodes", "int", "", "machines that the GPUs are in"),
    Column("max_prefill_tokens", "int", "tokens", "tokens of one prefill step on each GPU"),
    Column("decode_bs", "int", "sequences", "decode batch on each GPU; null: derived from the targets", 0),
    Column("target_tgs", "float", "tokens/s", "output tokens/s that each GPU should reach"),
    Column("target_tpot", "float", "ms", "target time per output token"),
    Column("isl", "int", "tokens", "input length"),
    Column("osl", "int", "tokens", "output length", 0),
    Column("fp8_gemm", "int", "", "1: GEMMs are FP8", 0),
    Column("fp8_kv", "int", "", "1: the KV cache is FP8", 0),
    Column("deepep", "int", "", "1: experts exchange tokens through DeepEP", 0),
    Column("tbo", "int", "", "1: two batches overlap", 0),
    Column("sm_ratio", "float", "", "share of the SMs that compute while two batches overlap"),
)
LEAST_FLOAT, LARGEST_FLOAT = 1e-9, 1e9
FLAGS: Final = ("fp8_gemm", "fp8_kv", "deepep", "tbo")
DEFAULTS: Final[dict[str, Any]] = {"decode_bs": None, "sm_ratio": SM_RATIO}


def read_scenarios(scenarios: Mapping[str, Any] | pa.Table) -> tuple[dict[str, Array], dict[str, pa.Array]]:
    """Check scenarios and bring their columns to one length."""
    if isinstance(scenarios, pa.Table):
        scenarios = {name: scenarios[name].combine_chunks() for name in scenarios.column_names}
    if not isinstance(scenarios, Mapping):
        raise BatchError(f"scenarios must be a mapping of columns or an Arrow table, got {shown(scenarios)}")
    names = [column.name for column in SCENARIO_COLUMNS]
    unknown = [name for name in scenarios if name not in (*names, *LABELS)]
    missing = [name for name in names if name not in scenarios and name not in DEFAULTS]
    if unknown or missing:
        problems = [
            f"{word} {', '.join(which)}"
            for word, which in (("unknown", unknown), ("missing", missing))
            if which
        ]
        raise BatchError(f"scenario columns: {'; '.join(problems)}; valid are {', '.join(names)}")
    arrow = {
        name: _arrow(name, scenarios[name] if name in scenarios else DEFAULTS[name])
        for name in (*(label for label in LABELS if label in scenarios), *names)
    }
    lengths = {name: len(column) for name, column in arrow.items() if isinstance(column, pa.Array)}
    rows = next(iter(lengths.values()), 1)
    if any(length != rows for length in lengths.values()):
        raise BatchError(f"scenario columns must have one length, got {lengths}")
    given = {
        name: column if isinstance(column, pa.Array) else pa.repeat(column, rows)
        for name, column in arrow.items()
    }
    columns = {column.name: _checked(column, given[column.name]) for column in SCENARIO_COLUMNS}
    _check_batches(columns)
    for column in SCENARIO_COLUMNS:
        values = columns[column.name]
        mask = values == 0 if column.name == "decode_bs" else None
        given[column.name] = pa.array(values, mask=mask)
    return columns, given


def _check_batches(columns: Mapping[str, Array]) -> None:
    """Reject targets that need a decode batch above the maximum."""
    needed = columns["target_tgs"] * columns["target_tpot"] / MS_PER_S
    wrong = (columns["decode_bs"] == 0) & (needed >= LARGEST - 1)
    if wrong.any():
        i = int(wrong.argmax())
        raise BatchError(
            f"target_tgs and target_tpot need a decode batch of {needed[i]:g} in row {i}, above the maximum "
            f"{LARGEST - 1}; set decode_bs"
        )


def _arrow(name: str, value: Any) -> pa.Array | pa.Scalar:
    try:
        if isinstance(value, pa.Array | pa.Scalar):
            return value
        if isinstance(value, pa.ChunkedArray):
            return value.combine_chunks()
        if value is None or isinstance(value, str | bytes) or not np.ndim(value):
            return pa.scalar(value.item() if isinstance(value, np.generic) else value)
        return pa.array(value)
    except (
        pa.ArrowInvalid,
        pa.ArrowTypeError,
        pa.ArrowNotImplementedError,
        ValueError,
        OverflowError,
    ) as error:
        raise BatchError(f"{name} must be a column of one type, got {shown(value)}: {error}") from None


def _checked(column: Column, given: pa.Array) -> Array:
    """Return a column as a NumPy array if every value is valid; a null decode_bs as 0."""
    types, name = pa.types, column.name
    if types.is_dictionary(given.type):
        given = given.dictionary_decode()
    if types.is_null(given.type) and (name == "decode_bs" or not len(given)):
        given = pa.repeat({"int": 0, "float": 0.0, "text": ""}[column.kind], len(given))
    elif given.null_count and name != "decode_bs":
        raise BatchError(f"{name} must have no null, got one in row {given.is_null().index(True)}")
    if column.kind == "text":
        if not types.is_string(given.type) and not types.is_large_string(given.type):
            raise BatchError(f"{name} must hold text, got {given.type}")
        return np.asarray(given.to_pylist(), object)
    is_flag = types.is_boolean(given.type) and name in FLAGS
    if not is_flag and not types.is_integer(given.type) and not types.is_floating(given.type):
        raise BatchError(f"{name} must hold numbers, got {given.type}")
    values: Array = given.to_numpy(zero_copy_only=False)
    if given.null_count:
        values = np.nan_to_num(values, nan=0.0)
    if column.kind == "float":
        wrong = ~((values >= LEAST_FLOAT) & (values <= LARGEST_FLOAT))
        valid = f"finite and above 0, from {LEAST_FLOAT:g} to {LARGEST_FLOAT:g}"
    else:
        most = 1 if name in FLAGS else LARGEST - 1
        wrong = ~((values >= column.minimum) & (values <= most) & (values == np.floor(values)))
        valid = f"integers of {column.minimum} to {most}"
    if wrong.any():
        i = int(wrong.argmax())
        raise BatchError(f"{name} must be {valid}, got {values[i]} in row {i}")
    checked: Array = values.astype(np.float64 if column.kind == "float" else np.int64)
    return checked
