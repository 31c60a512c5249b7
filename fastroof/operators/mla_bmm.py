"""The two batched GEMMs that decodes of latent attention absorb: one before attention, one after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import DTYPE, Column
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    dtype_names,
    measured_us,
    size_columns,
    text_columns,
    unknown_dtypes,
)
from fastroof.operators.latent_work import NUM_HEADS
from fastroof.operators.operator import Columns, HoldoutGrid, element_bytes
from fastroof.operators.ragged import RaggedOperator, WorkPart
from fastroof.units import ACTIVATION_BYTES

__all__ = ["OPERATORS", "MlaBmm"]

_PARTS: Final = {"mla_gen_pre": "pre", "mla_gen_post": "post"}
_KV_LORA_RANK: Final = 512
_HEAD_DIM: Final = 128
"""Of one head without its rotary part, and of its values: both 128 in DeepSeek-V3, as measured."""


def _package_rows(raw: Raw) -> ForeignRows:
    dtype, op_name = dtype_names(raw["bmm_dtype"]), raw["op_name"]
    columns = {
        "dtype": dtype,
        # parts, not alternatives: a decode runs one of each
        "part": np.array([_PARTS.get(word, word) for word in op_name], object),
        "num_heads": raw["num_heads"],
        "num_tokens": raw["num_tokens"],
        **measured_us(raw),
    }
    other = {f"op_name {o}": op_name == o for o in sorted(set(op_name)) if o not in _PARTS}
    return ForeignRows(columns, unknown_dtypes(dtype) | other)


class MlaBmm(RaggedOperator):
    """One GEMM a head: tokens x 128 x 512 before attention, tokens x 512 x 128 after it."""

    name = "mla_bmm"
    rank = 96
    summary = "A batched GEMM before or after absorbed MLA."
    about = (
        "Part pre turns queries into latent ones, part post latent outputs into values; a decode runs both."
    )
    keys = (DTYPE, Column("part", "text", "", "before or after attention: pre, post"), NUM_HEADS)
    axes = (Column("num_tokens", "int", "tokens", "tokens of the call"),)
    defaults: ClassVar[Mapping[str, Any]] = {"dtype": "bf16"}
    holdouts = (HoldoutGrid("mla_bmm", "every second", {}, {}),)
    coverages = (HoldoutGrid("mla_bmm", "all", {}, {}),)
    package_files = (
        PackageFile(
            "mla_bmm",
            "mla_bmm_perf",
            (*size_columns("num_tokens", "num_heads"), *text_columns("bmm_dtype", "op_name"), *MEASURED),
            _package_rows,
            RUN,
        ),
    )

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """``2 tokens heads 128 512``."""
        tokens = np.asarray(columns["num_tokens"], np.float64)
        return [WorkPart(2.0 * tokens * columns["num_heads"] * _HEAD_DIM * _KV_LORA_RANK, columns["dtype"])]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights once, rows in and out."""
        tokens, heads = np.asarray(columns["num_tokens"], np.float64), columns["num_heads"]
        weights = heads * (_HEAD_DIM * _KV_LORA_RANK) * element_bytes(columns["dtype"])
        return np.asarray(weights + ACTIVATION_BYTES * tokens * heads * (_HEAD_DIM + _KV_LORA_RANK))


OPERATORS: Final = (MlaBmm(),)
