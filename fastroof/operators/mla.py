"""Latent attention (MLA): measured rows by head count; no lookup yet, since no plan asks for one."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import DTYPE, KV_DTYPE, LATENCY, Column
from fastroof.config.gpu import GpuSpec
from fastroof.operators.attention_work import (
    BATCH,
    SEQ_LEN,
    attention_bytes,
    attention_flops,
    decode_attention_bytes,
    decode_attention_flops,
    prefill_flops_conventions,
    reads_kv_peaks,
)
from fastroof.operators.foreign_rows import MFU, Heads, Raw, TreeFile
from fastroof.operators.operator import Columns, Operator, dtype_peaks, element_bytes

__all__ = ["MLA_DECODE", "MLA_PREFILL", "OPERATORS", "MlaDecode", "MlaPrefill"]

_Q_HEADS: Final = Column("num_q_heads", "int", "", "query heads on one GPU")
_ROPE_DIM: Final = Column("rope_dim", "int", "", "rotary head width")


def _sizes(names: tuple[str, ...], heads: Heads, rows: int) -> dict[str, Array]:
    return {name: np.full(rows, size, np.int64) for name, size in zip(names, heads, strict=True)}


def _prefill_from_tree(read: Raw, heads: Heads) -> dict[str, Array]:
    sizes = _sizes(("num_q_heads", "nope_dim", "rope_dim"), heads, len(read["latency_us"]))
    return sizes | {"q_len": read["seq_len"], "dtype": read["dtype"]}


def _decode_from_tree(read: Raw, heads: Heads) -> dict[str, Array]:
    sizes = _sizes(("num_q_heads", "kv_lora_rank", "rope_dim"), heads, len(read["latency_us"]))
    return sizes | {name: read[name] for name in ("kv_dtype", "batch_size", "kv_len")}


class MlaPrefill(Operator):
    """Causal MLA of whole prompts, before absorption."""

    name = "mla_prefill"
    rank = 80
    keys = (DTYPE, _Q_HEADS, Column("nope_dim", "int", "", "head width without rotary part"), _ROPE_DIM)
    axes = (Column("q_len", "int", "tokens", "new tokens of the sequence"),)
    tree_file = TreeFile(
        "mla",
        "prefill",
        (DTYPE, SEQ_LEN, LATENCY),
        (MFU,),
        ("dtype", "seq_len", "latency_us", "mfu"),
        _prefill_from_tree,
        computes_in_any_dtype=True,
    )

    @staticmethod
    def _head_dim(c: Columns) -> Array:
        """Head width that gives MLA the cost of plain attention: the mean of its key and value widths.

        Keys are nope + rope wide, values nope (as in all published MLA models).
        """
        return np.asarray(c["nope_dim"] + c["rope_dim"] / 2.0)

    def flops(self, columns: Columns) -> Floats:
        """Exact causal FLOPs."""
        q_len = columns["q_len"]
        return attention_flops(columns["num_q_heads"], self._head_dim(columns), q_len, q_len)

    def moved_bytes(self, columns: Columns) -> Floats:
        """Every query head has keys and values of its own."""
        heads, q_len = columns["num_q_heads"], columns["q_len"]
        return attention_bytes(heads, heads, self._head_dim(columns), q_len, q_len)

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of the row's dtype."""
        peak = dtype_peaks(columns["dtype"], gpu)
        return peak, peak

    def flops_conventions(self, columns: Columns) -> dict[str, Floats]:
        """By how published files count a causal triangle."""
        return prefill_flops_conventions(columns, self._head_dim(columns), self.flops(columns))


class MlaDecode(Operator):
    """Absorbed MLA of one new token a sequence: one latent vector a token is key and value."""

    name = "mla_decode"
    rank = 90
    keys = (KV_DTYPE, _Q_HEADS, Column("kv_lora_rank", "int", "", "width of the compressed KV"), _ROPE_DIM)
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens attended to"))
    tree_file = TreeFile(
        "mla",
        "decode",
        (DTYPE, KV_DTYPE, *axes, LATENCY),
        (MFU,),
        ("dtype", "kv_dtype", "batch_size", "kv_len", "latency_us", "mfu"),
        _decode_from_tree,
    )

    @staticmethod
    def _head_dim(c: Columns) -> Array:
        """As :meth:`MlaPrefill._head_dim`; after absorption keys are kv_lora + rope wide, values kv_lora."""
        return np.asarray(c["kv_lora_rank"] + c["rope_dim"] / 2.0)

    def flops(self, columns: Columns) -> Floats:
        """One query a sequence."""
        width = self._head_dim(columns)
        return decode_attention_flops(columns["num_q_heads"], width, columns["kv_len"], columns["batch_size"])

    def moved_bytes(self, columns: Columns) -> Floats:
        """One latent vector is key and value: so many KV heads of the mean width weigh as much."""
        width = self._head_dim(columns)
        latent_heads = (columns["kv_lora_rank"] + columns["rope_dim"]) / (2.0 * width)
        return decode_attention_bytes(
            columns["num_q_heads"], latent_heads, width, columns["kv_len"], columns["batch_size"],
            element_bytes(columns["kv_dtype"]),
        )  # fmt: skip

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """bf16's; some kernels compute in the KV cache's dtype."""
        return reads_kv_peaks(columns, gpu)


MLA_PREFILL: Final = MlaPrefill()
MLA_DECODE: Final = MlaDecode()
OPERATORS: Final = (MLA_PREFILL, MLA_DECODE)
