"""Attention blocks over compressed caches, measured as one: CSA and HCA of DeepSeek-V4.

Every 4 tokens (CSA) or 128 (HCA) form one entry of the cache, 512 wide, key and value of all heads; a query
also attends to the last 128 tokens. CSA has an indexer, which scores every entry in fp8 and picks 512 or 1024
of them; HCA attends to all.

SGLang measured CSA with equal scores, the worst case of one of its top-k kernels: decode of DeepSeek-V4-Flash
(16 heads, H100) takes 84 us at 2048 tokens, where all are picked, 164 at 4096 to 65536, and 93 at 131072,
where another kernel picks. A model's scores replace the top-k of flat scores by that of peaked ones: 164 - 81
+ 3. Both are rows of sparse_part. Steps use blocks so corrected (:func:`peaked_table`); lookups return the
measured rows.

Layers with a window only (two of Flash's) have no rows: they borrow from HCA, under a model name of their own
(:mod:`fastroof.operators.widths`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import ORIGIN
from fastroof.operators import external_rows as external
from fastroof.operators import mla
from fastroof.operators.attention_work import DECODE_AXES, NO_PREFIX, PrefixUs, measured_price
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    Key,
    RowSource,
    by_word,
    element_bytes,
    measured_keys,
)
from fastroof.operators.ragged import KernelDonor, RaggedOperator, RaggedPrefill, WorkPart, kernel_donor
from fastroof.operators.sparse_attention import SPARSE_PART
from fastroof.operators.widths import (
    COMPRESSED_SHAPES,
    CSA,
    ENTRY,
    HCA,
    HEADS_A_GROUP,
    INDEX_DIM,
    O_LORA_RANK,
    WINDOW,
    WINDOW_ALONE,
)
from fastroof.pack.ragged import RaggedTable, pack_ragged
from fastroof.units import ACTIVATION_BYTES


def width_of(models: Array, name: str) -> Array:
    """A width of each row's model; NaN if unknown."""

    def of(model: str) -> float:
        return getattr(COMPRESSED_SHAPES[model], name) if model in COMPRESSED_SHAPES else np.nan

    return by_word(models, of)


def _counted(models: Array, name: str, ratio: int) -> Floats:
    """Weights of a part of each row's model; NaN if unknown."""

    def of(model: str) -> float:
        return getattr(COMPRESSED_SHAPES[model], name)(ratio) if model in COMPRESSED_SHAPES else np.nan

    return by_word(models, of)


def _weights(columns: Columns, ratio: int) -> tuple[Floats, Floats]:
    """Weights of a block without its indexer, and of the indexer."""
    hidden, q_lora = (width_of(columns["model"], name) for name in ("hidden", "q_lora_rank"))
    heads = columns["num_heads"]
    compressor, indexer = (_counted(columns["model"], name, ratio) for name in ("compressor", "indexer"))
    own = hidden * (q_lora + ENTRY) + q_lora * heads * ENTRY + heads * ENTRY * O_LORA_RANK
    out = heads / HEADS_A_GROUP * O_LORA_RANK * hidden
    return np.asarray(own + out + compressor), indexer


def block_parts(columns: Columns, ratio: int, tokens: Floats, pairs: Sequence[Floats]) -> list[WorkPart]:
    """Work of a block over tokens; ``pairs`` of queries and entries that are scored, and attended to."""
    own, indexer = _weights(columns, ratio)
    scored, attended = pairs
    attention = 4.0 * columns["num_heads"] * ENTRY * attended
    return [
        WorkPart(np.asarray(2.0 * tokens * (own + indexer)), columns["dtype"]),
        WorkPart(np.asarray(2.0 * width_of(columns["model"], "index_heads") * INDEX_DIM * scored), "fp8"),
        WorkPart(np.asarray(attention), columns["attn_dtype"]),
    ]


def block_bytes(columns: Columns, ratio: int, tokens: Floats, scored: Floats, read: Floats) -> Floats:
    """Bytes: weights once, tokens in and out, the indexer's keys and the entries read."""
    weights = np.asarray(sum(_weights(columns, ratio)) * element_bytes(columns["dtype"]))
    kv = read * ENTRY * element_bytes(columns["kv_dtype"]) + scored * INDEX_DIM
    return np.asarray(weights + kv + 2.0 * ACTIVATION_BYTES * tokens * width_of(columns["model"], "hidden"))


# -- rows of the package ---------------------------------------------------------------------------


_COLUMNS: Final = (
    *mla.MODULE_COLUMNS,
    *external.text_columns("model", "gemm_type"),
    *external.size_columns("compress_ratio"),
    *external.MEASURED,
)


def _package_rows(raw: external.Raw, ratio: int) -> external.ExternalRows:
    model = mla.model_names(raw["model"])
    out = external.others("model", model, COMPRESSED_SHAPES)
    out |= {f"not compressed {ratio} to 1": raw["compress_ratio"] != ratio}
    return mla.module_rows(raw, model).without(out)


def _file(
    name: str, with_lengths: Callable[[mla.Convert], mla.Convert], ratio: int
) -> tuple[external.PackageFile]:
    convert = with_lengths(partial(_package_rows, ratio=ratio))
    return (external.PackageFile("sparse_attention", name, _COLUMNS, convert),)


FLAT: Final = "flat"
PEAKED: Final = "top_last"
"""Scores with peaks at the last entries, like a model's: few bits separate them."""


def peaked_table(
    tables: RowSource, block: RaggedOperator, key: Key, part: str, model: str, ratio: int, topk: float
) -> RaggedTable:
    """Rows of a block with a model's scores; as measured if its source has no separate top-k.

    ``ratio`` is the number of tokens per score; nothing is picked from at most ``topk`` scores.
    """

    def made() -> RaggedTable:
        packed: RaggedTable = tables.packed(block, key)
        over = [_topk_table(tables, block, key, (part, model, scores, ratio)) for scores in (FLAT, PEAKED)]
        flat, peaked = over
        if flat is None or peaked is None:
            return packed
        rows = tables.rows(block, key)
        batch, kv_len = (np.asarray(rows[name], np.float64) for name in ("batch_size", "kv_len"))
        q_len = np.asarray(rows.get("q_len", np.ones_like(batch)), np.float64)
        at = (batch, q_len, kv_len - q_len)
        picks = kv_len // ratio > topk
        less_us = np.where(picks, _latency_us(flat, at) - _latency_us(peaked, at), 0.0)
        points = tuple(np.asarray(c, np.float64) for c in block.coordinates(rows))
        latency_us = rows["latency_us"] - less_us
        return pack_ragged(points, latency_us, packed.work_us, packed.segment, rows[ORIGIN])

    return tables.cached(("peaked scores", block.name, key), made)


def _topk_table(
    tables: RowSource, block: RaggedOperator, key: Key, target: tuple[str, str, str, int]
) -> RaggedTable | None:
    """Top-k kernel that the source of a block measured separately; None if it did not."""
    if not tables.has(SPARSE_PART.name):
        return None
    source = tables.serving(block.name, key).source
    for one in measured_keys(tables, SPARSE_PART.name):
        if one[:4] == target and tables.serving(SPARSE_PART.name, one).source == source:
            return tables.packed(SPARSE_PART, one)
    return None


def _latency_us(kernel: RaggedTable, at: tuple[Floats, ...]) -> Floats:
    latency_us, origin = np.empty(len(at[0])), np.zeros(len(at[0]), np.uint8)
    kernel.latency(at, latency_us, origin)
    return latency_us


class _Compressed(mla.PickingModule):
    """Base of blocks over a compressed cache."""

    ratio: ClassVar[int]
    picks_by: ClassVar[str]
    """Part name in sparse_part of the top-k within SGLang's rows."""

    def check_key(self, key: Key) -> None:
        """Reject models with unknown widths."""
        mla.check_model(key[3], COMPRESSED_SHAPES)

    def most(self, columns: Columns) -> Any:
        """Maximum number of entries that a query attends to."""
        has, ratio = (width_of(columns["model"], name) for name in ("has_entries", "ratio"))
        most = np.where(ratio > 0.0, width_of(columns["model"], "topk"), np.inf)
        return width_of(columns["model"], "topk") if self.ratio == CSA else np.where(has > 0.0, most, 0.0)

    def tokens_an_entry(self, columns: Columns) -> Floats:
        """Tokens of each entry of the cache."""
        ratio = width_of(columns["model"], "ratio")
        return np.where(ratio > 0.0, ratio, float(self.ratio))

    def sizes(self, columns: Columns) -> tuple[Floats, Floats, Floats]:
        """Batch, new tokens that the layer runs on, and tokens of each row's sequences."""
        batch, q_len, kv_len = super().sizes(columns)
        return batch, np.minimum(q_len, width_of(columns["model"], "most_new")), kv_len

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, CSA's indexer, attention to entries and to the window."""
        batch, q_len, kv_len = self.sizes(columns)
        ratio = self.tokens_an_entry(columns)
        entries = batch * self.pairs(q_len, kv_len, ratio * self.most(columns)) / ratio
        near = batch * self.pairs(q_len, kv_len, WINDOW)
        most = ratio * width_of(columns["model"], "scored")
        scored = batch * self.pairs(q_len, kv_len, most) / ratio if self.ratio == CSA else 0.0 * batch
        return block_parts(columns, self.ratio, batch * q_len, (np.asarray(scored), entries + near))

    def bytes_if(self, columns: Columns, picking: Floats) -> Floats:
        """Weights, tokens in and out, and picked entries of the cache."""
        batch, q_len, kv_len = self.sizes(columns)
        # picking is 0 without new tokens
        most = np.maximum(picking, 1.0) * self.most(columns)
        entries = kv_len / self.tokens_an_entry(columns)
        read = np.minimum(entries, most) + np.minimum(kv_len, WINDOW)
        scored = np.minimum(entries, width_of(columns["model"], "scored")) if self.ratio == CSA else 0.0
        return block_bytes(columns, self.ratio, batch * q_len, batch * scored, batch * read)

    # -- in steps ------------------------------------------------------------------------------------

    def step_kernels(self, tables: RowSource, key: Key) -> list[KernelDonor]:
        """The block; with a window only, the block of the model with entries as its donor."""
        model = key[3].removesuffix(WINDOW_ALONE)
        found = kernel_donor(tables, self, (*key[:3], model, *key[4:]))
        return [found if model == key[3] else found._replace(is_borrowed=True)]

    def step_look_up(self, tables: RowSource, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look up a measured block, with a model's scores if it picks."""
        at = self.coordinates(dict(zip(self.axis_names, sizes, strict=True)))
        self.step_table(tables, key).latency(at, answers[0], answers[2])

    def step_table(self, tables: RowSource, key: Key) -> RaggedTable:
        """Rows of a measured block as steps run it."""
        if self.ratio != CSA:
            return tables.packed(self, key)
        model = key[3]
        return peaked_table(tables, self, key, self.picks_by, model, CSA, COMPRESSED_SHAPES[model].topk)


class _CompressedPrefill(_Compressed, RaggedPrefill):
    picks_by = "topk_v1"
    # every prompt fills the window
    priced_at = (256.0, float(WINDOW))

    def prefix_us(self, tables: RowSource, key: Key, window: int) -> PrefixUs:
        """Roofline of a prefix, times latency / B of measured prompts with a prefix."""
        prices = self.prefix_prices(key, tables.gpu, window)
        if prices == NO_PREFIX:
            return prices

        def ratios() -> tuple[float, float]:
            one = self.step_kernels(tables, key)[0].key
            theirs = self.prefix_prices(one, tables.gpu, window)
            return measured_price(self.step_table(tables, one), theirs, window)

        return prices.times(*tables.cached(("prefix ratios", self.name, key, window), ratios))


class _CompressedDecode(_Compressed):
    picks_by = "topk_v2"
    axes = DECODE_AXES


_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "fp8", "attn_dtype": "bf16", "model": "deepseek-v4-flash"}


class CsaPrefill(_CompressedPrefill):
    """A CSA block (compressed sparse attention) over prompts or chunks."""

    name = "csa_prefill"
    rank = 104
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"csa_prefill": DatasheetClass(67.0, 0.3)}
    ratio = CSA
    summary = "A CSA block (DeepSeek-V4) over prompts."
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    package_files = _file("dsv4_csa_context_module_perf", mla.prompts, CSA)


class CsaDecode(_CompressedDecode):
    """A CSA block over one new token per sequence."""

    name = "csa_decode"
    rank = 106
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"csa_decode": DatasheetClass(67.0, 0.54)}
    ratio = CSA
    summary = "A CSA block, one new token per sequence."
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    package_files = _file("dsv4_csa_generation_module_perf", mla.decodes, CSA)


class HcaPrefill(_CompressedPrefill):
    """An HCA block (heavily compressed attention) over prompts or chunks."""

    name = "hca_prefill"
    rank = 108
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"hca_prefill": DatasheetClass(43.0, 0.3)}
    ratio = HCA
    summary = "An HCA block (DeepSeek-V4) over prompts."
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    package_files = _file("dsv4_hca_context_module_perf", mla.prompts, HCA)


class HcaDecode(_CompressedDecode):
    """An HCA block over one new token per sequence."""

    name = "hca_decode"
    rank = 110
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"hca_decode": DatasheetClass(43.0, 0.49)}
    ratio = HCA
    summary = "An HCA block, one new token per sequence."
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    package_files = _file("dsv4_hca_generation_module_perf", mla.decodes, HCA)


OPERATORS: Final = (CsaPrefill(), CsaDecode(), HcaPrefill(), HcaDecode())
