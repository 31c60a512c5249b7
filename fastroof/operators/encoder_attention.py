"""Attention of an encoder: every token of a sequence attends to all of them, and nothing is cached.

Vision encoders run it over the patches of an image. A grid of (batch, tokens), as decoders' attention is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import Column
from fastroof.config.gpu import GpuSpec
from fastroof.operators.attention_errors import attention_variance
from fastroof.operators.attention_grids import AttentionOperator
from fastroof.operators.attention_work import BATCH, HeadShape, attention_bytes, decode_attention_flops
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
)
from fastroof.operators.operator import Answers, Columns, DatasheetClass, HoldoutGrid, Key
from fastroof.operators.work import as_floats
from fastroof.roofline import BatchBound
from fastroof.units import DTYPE_BYTES, US_PER_S

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = ["ENCODER_ATTENTION", "OPERATORS", "EncoderAttention"]


def _package_rows(raw: Raw) -> ForeignRows:
    dtype = dtype_names(raw["attn_dtype"])
    columns = {
        "kv_dtype": dtype,
        "num_q_heads": raw["num_heads"],
        "num_kv_heads": raw["num_heads"],
        "head_dim": raw["head_dim"],
        "window": np.zeros_like(raw["num_heads"]),
        "batch_size": raw["batch_size"],
        "kv_len": raw["isl"],
        **measured_us(raw),
    }
    return ForeignRows(columns, {f"computes in {d}": dtype == d for d in sorted(set(dtype)) if d != "bf16"})


class EncoderAttention(AttentionOperator):
    """Attention without a mask: B grows with the square of a sequence's tokens."""

    name = "encoder_attention"
    rank = 36
    summary = "Attention of an encoder: no mask, no cache."
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens of each sequence, new ones all of them"))
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, "kv_dtype": "bf16"}
    constants: ClassVar[Mapping[str, Any]] = {"window": 0}
    is_additive = False
    length_axis = "kv_len"
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"encoder_attention": DatasheetClass(7.7, 0.47)}
    holdouts = (HoldoutGrid("encoder_attention", "every second", {}, {"window": 0}),)
    coverages = (HoldoutGrid("encoder_attention", "all", {}, {"window": 0}),)
    package_files = (
        PackageFile(
            "encoder_attention",
            "encoder_attention_perf",
            (
                *size_columns("batch_size", "isl", "num_heads", "head_dim"),
                *text_columns("attn_dtype"),
                *MEASURED,
            ),
            _package_rows,
            RUN,
        ),
    )

    @property
    def datasheet(self) -> DatasheetClass:
        """What the datasheet model assumes of it."""
        return self.datasheets[self.name]

    def flops(self, columns: Columns) -> Floats:
        """``4 nh dh S^2`` a sequence: no triangle is left out."""
        tokens, batch = as_floats(columns["kv_len"]), columns["batch_size"]
        return decode_attention_flops(columns["num_q_heads"], columns["head_dim"], tokens, tokens * batch)

    def moved_bytes(self, columns: Columns) -> Floats:
        """Queries, keys, values and outputs of every token once."""
        heads = (columns["num_q_heads"], columns["num_kv_heads"], columns["head_dim"])
        tokens = columns["kv_len"]
        return attention_bytes(*heads, tokens, tokens, columns["batch_size"])

    def bound(self, shape: HeadShape, gpu: GpuSpec, launch_us: float) -> BatchBound:
        """B against (batch, tokens)."""
        square = float(decode_attention_flops(shape.num_q_heads, shape.head_dim, 1, 1)) / gpu.peak("bf16")
        heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
        a_token = float(attention_bytes(*heads, 1, 1, 1, DTYPE_BYTES[shape.kv_dtype]))
        return BatchBound(launch_us, square * US_PER_S, a_token / gpu.hbm_bytes_per_s * US_PER_S, 0.0)

    def mfu_work(self, batch: Any, length: Any, window: float = math.inf) -> Any:
        """A whole square."""
        return batch * (length * length)

    def look_up(self, tables: Tables, method: str, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look (batch, tokens) up."""
        from fastroof.compiled.points import gemm_mfu

        batch, tokens = sizes
        out, mfu, origin = answers
        table = self.ready(tables, key)
        self.own_us(table, method, (batch, tokens), out, origin)
        gemm_mfu(batch, tokens, tokens, table.unit_us, out, mfu)

    def relative_error(self, tables: Tables, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """One standard error over the latency."""
        batch, tokens = sizes
        return np.sqrt(attention_variance(self.local_errors(tables, HeadShape(*key)), batch, tokens))


ENCODER_ATTENTION: Final = EncoderAttention()
OPERATORS: Final = (ENCODER_ATTENTION,)
