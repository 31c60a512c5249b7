"""Attention blocks of sparse attention with an indexer (DSA), measured as one: DeepSeek-V3.2, GLM-5.

An indexer scores every token for every query, in fp8, and attention goes over the 2048 best: its cost grows
with kv_len without end, that of attention up to there. SGLang's prompts attend to all tokens of sequences
that are no longer, by another kernel and without scores: lookups do not interpolate between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.operators.attention_modules import MODULE_COLUMNS, LatentModule, decodes, module_rows, prompts
from fastroof.operators.attention_work import BATCH
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    text_columns,
)
from fastroof.operators.latent_shapes import model_names, shapes_of, unknown_models
from fastroof.operators.latent_widths import LATENT_SHAPES
from fastroof.operators.latent_work import (
    attended,
    causal_pairs,
    module_bytes,
    projections,
)
from fastroof.operators.operator import Columns, DatasheetClass, HoldoutGrid, Key, element_bytes
from fastroof.operators.prefix_price import PrefixUs
from fastroof.operators.ragged import SEGMENT, RaggedPrefill, WorkPart
from fastroof.operators.sparse_prefixes import sparse_prefix_us
from fastroof.pack.ragged import Segment

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = ["OPERATORS", "DsaDecode", "DsaPrefill"]

_COLUMNS: Final = (*MODULE_COLUMNS, *text_columns("model", "gemm_type"), *MEASURED)
_SHARED: Final = "-shared-index"
_INDEX_DTYPE: Final = "fp8"
_DENSE_TOKENS: Final = 131_072
"""SGLang attends in full to sequences of up to topk tokens, while all of them are no more than so many.

All 50,621 rows of the H100 whose kernel is named for it are such, and no other row is."""


def _shares_an_index(raw: Raw) -> Array:
    """Rows of layers that attend to what another layer's indexer picked."""
    kernel = raw["kernel_source"].astype(str)
    skips = np.char.find(kernel, "skip_indexer") >= 0
    indexes = (np.char.find(kernel, "indexer") >= 0) & ~skips
    shares = skips.copy()
    for model in set(raw["model"]):
        rows = raw["model"] == model
        if (rows & skips).sum() > (rows & indexes).sum():
            shares |= rows & ~indexes
    return shares


def _package_rows(raw: Raw) -> ForeignRows:
    model = model_names(raw["model"])
    model = np.where(_shares_an_index(raw), model + _SHARED, model)
    rows = module_rows(raw, model)
    return ForeignRows(rows.columns, rows.left_out | unknown_models(model))


def _indexer(columns: Columns, tokens: Floats, pairs: Floats) -> list[WorkPart]:
    """The indexer's projections over some tokens, and its scores of some (query, token) pairs."""
    shape = shapes_of(columns["model"])
    hidden, q_lora, heads, dim = shape.hidden, shape.q_lora_rank, shape.index_heads, shape.index_dim
    queries = np.where(pairs > 0.0, q_lora * heads * dim + hidden * heads, 0.0)
    own = queries + hidden * dim
    return [
        WorkPart(np.asarray(2.0 * tokens * own), columns["dtype"]),
        WorkPart(np.asarray(2.0 * heads * dim * pairs), _INDEX_DTYPE),
    ]


def _indexer_bytes(columns: Columns, cached: Floats) -> Floats:
    """Its weights once, and one key a cached token in fp8."""
    shape = shapes_of(columns["model"])
    hidden, q_lora, heads, dim = shape.hidden, shape.q_lora_rank, shape.index_heads, shape.index_dim
    weights = (q_lora * heads * dim + hidden * dim) * element_bytes(columns["dtype"])
    return np.asarray(weights + cached * dim)


_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "bf16", "attn_dtype": "bf16", "model": "deepseek-v3.2"}


def _latent_flops(columns: Columns, pairs: Floats) -> Floats:
    shape = shapes_of(columns["model"])
    widths = 2.0 * shape.kv_lora_rank + shape.rope_dim
    return np.asarray(2.0 * columns["num_heads"] * widths * pairs)


def _expanded_flops(columns: Columns, pairs: Floats) -> Floats:
    shape = shapes_of(columns["model"])
    widths = shape.nope_dim + shape.rope_dim + shape.v_dim
    return np.asarray(2.0 * columns["num_heads"] * widths * pairs)


def _is_dense(columns: Columns) -> Array:
    """Which rows are attended to in full: as their coordinates tell, or the kernel's name."""
    if SEGMENT in columns:
        return columns[SEGMENT]
    if "kernel" in columns:
        return np.asarray(np.char.find(columns["kernel"].astype(str), "_dense_") >= 0)
    return np.asarray(False)


class DsaPrefill(LatentModule, RaggedPrefill):
    """A block of sparse attention over prompts or chunks."""

    name = "dsa_prefill"
    rank = 100
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"dsa_prefill": DatasheetClass(310.0, 0.42)}
    summary = "A sparse attention block (DSA) over prompts."
    about = "q-len counts the new tokens of a sequence, kv-len the prefix and the new tokens."
    axes = (
        BATCH,
        Column("q_len", "int", "tokens", "new tokens of each sequence"),
        Column("kv_len", "int", "tokens", "tokens scored: prefix plus q_len"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    packed_words = ("kernel",)
    holdouts = (HoldoutGrid("dsa_prefill", "every second", {}, {}),)
    coverages = (HoldoutGrid("dsa_prefill", "all", {}, {}),)
    package_files = (
        PackageFile("sparse_attention", "dsa_context_module_perf", _COLUMNS, prompts(_package_rows), RUN),
    )

    def segment(self, key: Key, rows: Columns) -> Segment | None:
        """Sequences that another kernel attends to in full, where the rows name one."""
        topk = LATENT_SHAPES[key[3]].topk

        def is_dense(batch: Floats, q_len: Floats, prefix: Floats) -> Array:
            kv_len = q_len + prefix
            return np.asarray((kv_len <= topk) & (batch * kv_len <= _DENSE_TOKENS))

        dense = is_dense(rows["batch_size"], rows["q_len"], rows["kv_len"] - rows["q_len"])
        kernels = rows.get("kernel", np.full(len(dense), ""))
        return None if set(kernels[dense]) & set(kernels[~dense]) else is_dense

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, the indexer, and absorbed attention to what it picks; or expanded attention to all."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        tokens = batch * q_len
        is_dense = _is_dense(columns)
        all_pairs = batch * causal_pairs(q_len, kv_len)
        picked = batch * causal_pairs(q_len, kv_len, shapes_of(columns["model"]).topk)
        scored = np.where(is_dense, 0.0, all_pairs)
        latent, expanded = _latent_flops(columns, picked), _expanded_flops(columns, all_pairs)
        return [
            *projections(columns, tokens, np.where(is_dense, batch * kv_len, 0.0)),
            *_indexer(columns, tokens, scored),
            WorkPart(np.where(is_dense, expanded, latent), columns["attn_dtype"]),
        ]

    def prefix_us(self, tables: Tables, key: Key, window: int) -> PrefixUs:
        """Price of a prefix, fitted where long ones were measured."""
        return sparse_prefix_us(self, tables, key, window)

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, what of the cache all queries may pick and the indexer's keys once."""
        return self._bytes(columns, np.asarray(columns["q_len"], np.float64))

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """The same where all queries of a sequence pick the same tokens."""
        return self._bytes(columns, np.asarray(1.0))

    def _bytes(self, columns: Columns, picking: Floats) -> Floats:
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        read = np.minimum(kv_len, picking * shapes_of(columns["model"]).topk)
        own = module_bytes(columns, batch * q_len, batch * read)
        return own + _indexer_bytes(columns, batch * kv_len)


class DsaDecode(LatentModule):
    """A block of sparse attention over one new token a sequence."""

    name = "dsa_decode"
    rank = 102
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"dsa_decode": DatasheetClass(37.0, 0.32)}
    summary = "A DSA block, one new token a sequence."
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens scored, the new one included"))
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    holdouts = (HoldoutGrid("dsa_decode", "every second", {}, {}),)
    coverages = (HoldoutGrid("dsa_decode", "all", {}, {}),)
    package_files = (
        PackageFile("sparse_attention", "dsa_generation_module_perf", _COLUMNS, decodes(_package_rows), RUN),
    )

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, the indexer, and absorbed attention to what it picks."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        picked = batch * attended(kv_len, shapes_of(columns["model"]).topk)
        return [
            *projections(columns, batch),
            *_indexer(columns, batch, batch * kv_len),
            WorkPart(_latent_flops(columns, picked), columns["attn_dtype"]),
        ]

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, the picked tokens of the cache and the indexer's keys."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        own = module_bytes(columns, batch, batch * attended(kv_len, shapes_of(columns["model"]).topk))
        return own + _indexer_bytes(columns, batch * kv_len)


OPERATORS: Final = (DsaPrefill(), DsaDecode())
