"""Attention blocks of block-sparse attention, measured as one: MSA of MiniMax-M3.

Grouped heads of 128, 16 query heads a KV head. An indexer with as many heads as KV heads scores every token,
and a query attends to the 16 best blocks of 128 tokens: 2048 at most. TensorRT-LLM's rows of decodes grow
with the square of kv_len, up to 3 seconds a call, which no sparse kernel explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.errors import LookupInputError
from fastroof.operators.attention_work import BATCH, PrefixUs
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    text_columns,
)
from fastroof.operators.mla import (
    MODULE_COLUMNS,
    AttentionModule,
    attended,
    causal_pairs,
    decodes,
    module_rows,
    prompts,
)
from fastroof.operators.operator import Columns, DatasheetClass, HoldoutGrid, Key, element_bytes
from fastroof.operators.ragged import RaggedPrefill, WorkPart
from fastroof.operators.sparse import sparse_prefix_us
from fastroof.units import ACTIVATION_BYTES

if TYPE_CHECKING:
    from fastroof.tables import Tables

_MODEL: Final = "minimax-m3"
_NAMES: Final = {"MiniMaxAI/MiniMax-M3": _MODEL}
_HIDDEN: Final = 6144
_HEAD_DIM: Final = 128
_GROUP_SIZE: Final = 16
_PICKED: Final = 16 * 128
_COLUMNS: Final = (*MODULE_COLUMNS, *text_columns("model", "gemm_type"), *MEASURED)
_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "bf16", "attn_dtype": "bf16", "model": _MODEL}


def _package_rows(raw: Raw) -> ForeignRows:
    model = np.array([_NAMES.get(word, word) for word in raw["model"]], object)
    rows = module_rows(raw, model)
    others = {f"model {m}": model == m for m in sorted(set(model)) if m != _MODEL}
    return ForeignRows(rows.columns, rows.left_out | others)


def _kv_heads(columns: Columns) -> Array:
    return np.maximum(np.asarray(columns["num_heads"]) / _GROUP_SIZE, 1.0)


def _weights(columns: Columns) -> Array:
    heads, kv_heads = columns["num_heads"], _kv_heads(columns)
    # queries and outputs, keys and values, and the indexer's queries and its one key
    return np.asarray(_HIDDEN * _HEAD_DIM * (2 * heads + 2 * kv_heads + kv_heads + 1))


def _work(columns: Columns, tokens: Floats, scored: Floats, picked: Floats) -> list[WorkPart]:
    scores = 2.0 * _HEAD_DIM * _kv_heads(columns) * scored
    attention = 4.0 * _HEAD_DIM * columns["num_heads"] * picked
    return [
        WorkPart(np.asarray(2.0 * tokens * _weights(columns)), columns["dtype"]),
        WorkPart(np.asarray(scores + attention), columns["attn_dtype"]),
    ]


def _bytes(columns: Columns, tokens: Floats, scored: Floats, read: Floats) -> Floats:
    kv = (2.0 * _kv_heads(columns) * read + scored) * _HEAD_DIM * element_bytes(columns["kv_dtype"])
    in_and_out = 2.0 * ACTIVATION_BYTES * tokens * _HIDDEN
    return np.asarray(_weights(columns) * element_bytes(columns["dtype"]) + kv + in_and_out)


class _Msa(AttentionModule):
    """What prompts and decodes have in common."""

    def check_key(self, key: Key) -> None:
        """Refuse models whose widths are not known."""
        if key[3] != _MODEL:
            raise LookupInputError(f"unknown model {key[3]!r}: use {_MODEL}")


class MsaPrefill(_Msa, RaggedPrefill):
    """A block of block-sparse attention over prompts or chunks."""

    name = "msa_prefill"
    rank = 112
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"msa_prefill": DatasheetClass(21.0, 0.29)}
    summary = "An MSA block (MiniMax-M3) over prompts."
    about = "q-len counts the new tokens of a sequence, kv-len the prefix and the new tokens."
    axes = (
        BATCH,
        Column("q_len", "int", "tokens", "new tokens of each sequence"),
        Column("kv_len", "int", "tokens", "tokens scored: prefix plus q_len"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    holdouts = (HoldoutGrid("msa_prefill", "every second", {}, {}),)
    coverages = (HoldoutGrid("msa_prefill", "all", {}, {}),)
    package_files = (PackageFile("msa", "msa_context_module_perf", _COLUMNS, prompts(_package_rows), RUN),)

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, scores of all tokens, attention to the picked ones."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        scored, picked = (batch * causal_pairs(q_len, kv_len, most) for most in (np.inf, _PICKED))
        return _work(columns, batch * q_len, scored, picked)

    def prefix_us(self, tables: Tables, key: Key, window: int) -> PrefixUs:
        """Price of a prefix, fitted where long ones were measured."""
        return sparse_prefix_us(self, tables, key, window)

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, the indexer's keys, what of the cache all queries may pick."""
        return self._moved(columns, np.asarray(columns["q_len"], np.float64))

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """The same where all queries of a sequence pick the same blocks."""
        return self._moved(columns, np.asarray(1.0))

    def _moved(self, columns: Columns, picking: Floats) -> Floats:
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        return _bytes(columns, batch * q_len, batch * kv_len, batch * np.minimum(kv_len, picking * _PICKED))


class MsaDecode(_Msa):
    """A block of block-sparse attention over one new token a sequence."""

    name = "msa_decode"
    rank = 114
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"msa_decode": DatasheetClass(24.0, 0.85)}
    summary = "An MSA block, one new token a sequence."
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens scored, the new one included"))
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    holdouts = (HoldoutGrid("msa_decode", "every second", {}, {}),)
    coverages = (HoldoutGrid("msa_decode", "all", {}, {}),)
    package_files = (PackageFile("msa", "msa_generation_module_perf", _COLUMNS, decodes(_package_rows), RUN),)

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, scores of all tokens, attention to the picked ones."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        return _work(columns, batch, batch * kv_len, batch * attended(kv_len, _PICKED))

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, the indexer's keys and the picked blocks."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        return _bytes(columns, batch, batch * kv_len, batch * attended(kv_len, _PICKED))


OPERATORS: Final = (MsaPrefill(), MsaDecode())
