"""Attention blocks over compressed caches, measured as one: CSA and HCA of DeepSeek-V4.

Every 4 tokens (CSA) or 128 (HCA) are one entry of the cache, 512 wide, key and value of all heads; beside
them a query attends to the last 128 tokens. CSA has an indexer, which scores every entry in fp8 and picks 512
or 1024 of them; HCA attends to all.

SGLang's rows of CSA were measured with scores that are all equal, the worst case of one of its top-k kernels.
A decode of DeepSeek-V4-Flash (16 heads, H100) takes 84 us at 2048 tokens, where all are picked, 164 at 4096
to 65536, and 93 at 131072, where another kernel picks. With the scores of a model it takes the block, less
the top-k of flat scores, and the other one: 164 - 81 + 3. Both are rows of sparse_part, and steps take a
block so corrected (:mod:`fastroof.operators.ragged`); lookups have the rows as they were measured.

Layers with the window alone, two of Flash's, were measured by nobody: HCA lends its latency / B to blocks of
a model that is named for it (:mod:`fastroof.operators.widths`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError
from fastroof.operators.attention_work import BATCH, NO_PREFIX, PrefixUs, measured_price
from fastroof.operators.foreign_rows import (
    MEASURED,
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    size_columns,
    text_columns,
)
from fastroof.operators.mla import (
    MODULE_COLUMNS,
    AttentionModule,
    causal_pairs,
    decodes,
    module_rows,
    prompts,
)
from fastroof.operators.operator import (
    Answers,
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    by_word,
    element_bytes,
)
from fastroof.operators.ragged import Lent, RaggedPrefill, WorkPart, lent, peaked_table
from fastroof.operators.widths import (
    COMPRESSED_SHAPES,
    CSA,
    ENTRY,
    HCA,
    HEADS_A_GROUP,
    INDEX_DIM,
    INDEX_HEADS,
    O_LORA_RANK,
    WINDOW,
    WINDOW_ALONE,
)
from fastroof.pack.ragged import RaggedTable
from fastroof.units import ACTIVATION_BYTES

if TYPE_CHECKING:
    from fastroof.tables import Tables


def width_of(models: Array, name: str) -> Array:
    """A width of each row's model; NaN where the model is not known."""

    def of(model: str) -> float:
        return getattr(COMPRESSED_SHAPES[model], name) if model in COMPRESSED_SHAPES else np.nan

    return by_word(models, of)


def _weights(columns: Columns, ratio: int) -> tuple[Floats, Floats]:
    """Weights of a block without its indexer, and of the indexer."""
    hidden, q_lora = (width_of(columns["model"], name) for name in ("hidden", "q_lora_rank"))
    heads = columns["num_heads"]
    # entries of CSA overlap: its compressor sees every token twice
    seen = 2 if ratio == CSA else 1
    compressor = hidden * 2 * seen * ENTRY * width_of(columns["model"], "has_entries")
    own = hidden * (q_lora + ENTRY) + q_lora * heads * ENTRY + heads * ENTRY * O_LORA_RANK
    out = heads / HEADS_A_GROUP * O_LORA_RANK * hidden
    indexer = q_lora * INDEX_HEADS * INDEX_DIM + hidden * (INDEX_HEADS + 2 * seen * INDEX_DIM)
    return np.asarray(own + out + compressor), np.asarray(indexer if ratio == CSA else 0.0 * indexer)


def block_parts(columns: Columns, ratio: int, tokens: Floats, pairs: Sequence[Floats]) -> list[WorkPart]:
    """Projections of some tokens; ``pairs`` of queries and entries that are scored and attended to."""
    own, indexer = _weights(columns, ratio)
    scored, attended = pairs
    attention = 4.0 * columns["num_heads"] * ENTRY * attended
    return [
        WorkPart(np.asarray(2.0 * tokens * (own + indexer)), columns["dtype"]),
        WorkPart(np.asarray(2.0 * INDEX_HEADS * INDEX_DIM * scored), "fp8"),
        WorkPart(np.asarray(attention), columns["attn_dtype"]),
    ]


def block_bytes(columns: Columns, ratio: int, tokens: Floats, scored: Floats, read: Floats) -> Floats:
    """Weights once, tokens in and out, the indexer's keys and the entries that are read."""
    weights = np.asarray(sum(_weights(columns, ratio)) * element_bytes(columns["dtype"]))
    kv = read * ENTRY * element_bytes(columns["kv_dtype"]) + scored * INDEX_DIM
    return np.asarray(weights + kv + 2.0 * ACTIVATION_BYTES * tokens * width_of(columns["model"], "hidden"))


_PRICED: Final = 256.0
"""New tokens of the prompts that a prefix is priced at."""

_NAMES: Final = {
    "sgl-project/DeepSeek-V4-Flash-FP8": "deepseek-v4-flash",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4-flash",
    "sgl-project/DeepSeek-V4-Pro-FP8": "deepseek-v4-pro",
    "deepseek-ai/DeepSeek-V4-Pro": "deepseek-v4-pro",
}


def compressed_model_names(words: Array) -> Array:
    """The package's models by fastroof's names; others stay as they are."""
    distinct, index = np.unique(words.astype(str), return_inverse=True)
    renamed: Array = np.array([_NAMES.get(word, word) for word in distinct], object)[index]
    return renamed


# -- rows of the package ---------------------------------------------------------------------------


_COLUMNS: Final = (
    *MODULE_COLUMNS,
    *text_columns("model", "gemm_type"),
    *size_columns("compress_ratio"),
    *MEASURED,
)


def _package_rows(raw: Raw, ratio: int) -> ForeignRows:
    model = compressed_model_names(raw["model"])
    rows = module_rows(raw, model)
    out = dict(rows.left_out)
    out |= {f"model {m}": model == m for m in sorted(set(model)) if m not in COMPRESSED_SHAPES}
    out |= {f"not compressed {ratio} to 1": raw["compress_ratio"] != ratio}
    return ForeignRows(rows.columns, out)


class _Compressed(AttentionModule):
    """What blocks over a compressed cache have in common."""

    ratio: ClassVar[int]
    picks_by: ClassVar[str]
    """The top-k that SGLang's rows have in them, as sparse_part calls it."""

    def check_key(self, key: Key) -> None:
        """Refuse models whose widths are not known."""
        if key[3] not in COMPRESSED_SHAPES:
            known = ", ".join(COMPRESSED_SHAPES)
            raise LookupInputError(f"unknown model {key[3]!r}: use one of {known}")

    def most(self, columns: Columns) -> Any:
        """Entries that a query attends to at most."""
        if self.ratio == CSA:
            return width_of(columns["model"], "topk")
        return np.where(width_of(columns["model"], "has_entries") > 0.0, np.inf, 0.0)

    # -- in steps ------------------------------------------------------------------------------------

    def step_kernels(self, tables: Tables, key: Key) -> list[Lent]:
        """The block; for the window alone that of its model with entries, which is another."""
        model = key[3].removesuffix(WINDOW_ALONE)
        found = lent(tables, self, (*key[:3], model, *key[4:]))
        return [found if model == key[3] else found._replace(is_borrowed=True)]

    def step_look_up(self, tables: Tables, key: Key, sizes: list[Floats], answers: Answers) -> None:
        """Look a measured block up; of one that picks, over a model's scores."""
        at = self.coordinates(dict(zip(self.axis_names, sizes, strict=True)))
        self.step_table(tables, key).latency(at, answers[0], answers[2])

    def step_table(self, tables: Tables, key: Key) -> RaggedTable:
        """Rows of a measured block as steps run it."""
        if self.ratio != CSA:
            return tables.packed(self, key)
        model = key[3]
        return peaked_table(tables, self, key, self.picks_by, model, CSA, COMPRESSED_SHAPES[model].topk)


class _CompressedPrefill(_Compressed, RaggedPrefill):
    picks_by = "topk_v1"
    axes = (
        BATCH,
        Column("q_len", "int", "tokens", "new tokens of each sequence"),
        Column("kv_len", "int", "tokens", "tokens attended to: prefix plus q_len"),
    )
    about = "q-len counts the new tokens of a sequence, kv-len the prefix and the new tokens."

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, the indexer of CSA, attention to entries and to the window."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        entries = batch * causal_pairs(q_len, kv_len, self.ratio * self.most(columns)) / self.ratio
        near = batch * causal_pairs(q_len, kv_len, WINDOW)
        scored = batch * causal_pairs(q_len, kv_len) / self.ratio if self.ratio == CSA else 0.0 * batch
        return block_parts(columns, self.ratio, batch * q_len, (np.asarray(scored), entries + near))

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, what of the cache all queries may pick."""
        return self._moved(columns, np.asarray(columns["q_len"], np.float64))

    def prefix_prices(self, key: Key, gpu: GpuSpec, window: int) -> PrefixUs:
        """What B grows by with a prefix that is longer than the short window, which every prompt fills."""
        work_us = self.work_us(key, gpu)

        def prices(prefix: float) -> tuple[float, float]:
            """A pair and a token more, from prompts of two lengths."""
            q_len, before = _PRICED * np.array([1.0, 1.0, 2.0, 2.0]), np.array([0.0, 1.0, 0.0, 1.0]) + prefix
            us = work_us(np.ones(4), q_len, before)
            one, two = float(us[1] - us[0]), float(us[3] - us[2])
            return max(two - one, 0.0) / _PRICED, max(2.0 * one - two, 0.0)

        near = prices(float(WINDOW))
        if not window:
            return PrefixUs(*near)
        far = prices(4.0 * window)
        return PrefixUs(*far, max(near[0] - far[0], 0.0), max(near[1] - far[1], 0.0))

    def prefix_us(self, tables: Tables, key: Key, window: int) -> PrefixUs:
        """What B says of a prefix, times what measured prompts with one pay of it."""
        prices = self.prefix_prices(key, tables.gpu, window)
        if prices == NO_PREFIX:
            return prices

        def ratios() -> tuple[float, float]:
            one = self.step_kernels(tables, key)[0].key
            theirs = self.prefix_prices(one, tables.gpu, window)
            return measured_price(self.step_table(tables, one), theirs, window)

        return prices.times(*tables.kept(("prefix ratios", self.name, key, window), ratios))

    def least_bytes(self, columns: Columns, moved_bytes: Floats) -> Floats:
        """The same where all queries of a sequence pick the same entries."""
        return self._moved(columns, np.asarray(1.0))

    def _moved(self, columns: Columns, picking: Floats) -> Floats:
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        # nothing picks any number of entries where there are no new tokens
        most = np.maximum(picking, 1.0) * self.most(columns)
        read = np.minimum(kv_len / self.ratio, most) + np.minimum(kv_len, WINDOW)
        scored = kv_len / self.ratio if self.ratio == CSA else 0.0
        return block_bytes(columns, self.ratio, batch * q_len, batch * scored, batch * read)


class _CompressedDecode(_Compressed):
    picks_by = "topk_v2"
    axes = (BATCH, Column("kv_len", "int", "tokens", "tokens of each sequence, the new one included"))

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, the indexer of CSA, attention to entries and to the window."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        entries = np.minimum(kv_len / self.ratio, self.most(columns)) + np.minimum(kv_len, WINDOW)
        scored = kv_len / self.ratio if self.ratio == CSA else 0.0 * kv_len
        return block_parts(columns, self.ratio, batch, (batch * scored, batch * entries))

    def moved_bytes(self, columns: Columns) -> Floats:
        """Weights, tokens in and out, the entries read and the indexer's keys."""
        batch, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        read = np.minimum(kv_len / self.ratio, self.most(columns)) + np.minimum(kv_len, WINDOW)
        scored = kv_len / self.ratio if self.ratio == CSA else 0.0
        return block_bytes(columns, self.ratio, batch, batch * scored, batch * read)


_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "fp8", "attn_dtype": "bf16", "model": "deepseek-v4-flash"}


class CsaPrefill(_CompressedPrefill):
    """A block of compressed sparse attention over prompts or chunks."""

    name = "csa_prefill"
    rank = 104
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"csa_prefill": DatasheetClass(67.0, 0.3)}
    ratio = CSA
    summary = "A CSA block (DeepSeek-V4) over prompts."
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    holdouts = (HoldoutGrid("csa_prefill", "every second", {}, {}),)
    coverages = (HoldoutGrid("csa_prefill", "all", {}, {}),)
    package_files = (
        PackageFile(
            "sparse_attention",
            "dsv4_csa_context_module_perf",
            _COLUMNS,
            prompts(partial(_package_rows, ratio=CSA)),
            RUN,
        ),
    )


class CsaDecode(_CompressedDecode):
    """A block of compressed sparse attention over one new token a sequence."""

    name = "csa_decode"
    rank = 106
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"csa_decode": DatasheetClass(67.0, 0.54)}
    ratio = CSA
    summary = "A CSA block, one new token a sequence."
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    holdouts = (HoldoutGrid("csa_decode", "every second", {}, {}),)
    coverages = (HoldoutGrid("csa_decode", "all", {}, {}),)
    package_files = (
        PackageFile(
            "sparse_attention",
            "dsv4_csa_generation_module_perf",
            _COLUMNS,
            decodes(partial(_package_rows, ratio=CSA)),
            RUN,
        ),
    )


class HcaPrefill(_CompressedPrefill):
    """A block of heavily compressed attention over prompts or chunks."""

    name = "hca_prefill"
    rank = 108
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"hca_prefill": DatasheetClass(43.0, 0.3)}
    ratio = HCA
    summary = "An HCA block (DeepSeek-V4) over prompts."
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    holdouts = (HoldoutGrid("hca_prefill", "every second", {}, {}),)
    coverages = (HoldoutGrid("hca_prefill", "all", {}, {}),)
    package_files = (
        PackageFile(
            "sparse_attention",
            "dsv4_hca_context_module_perf",
            _COLUMNS,
            prompts(partial(_package_rows, ratio=HCA)),
            RUN,
        ),
    )


class HcaDecode(_CompressedDecode):
    """A block of heavily compressed attention over one new token a sequence."""

    name = "hca_decode"
    rank = 110
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"hca_decode": DatasheetClass(43.0, 0.49)}
    ratio = HCA
    summary = "An HCA block, one new token a sequence."
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    holdouts = (HoldoutGrid("hca_decode", "every second", {}, {}),)
    coverages = (HoldoutGrid("hca_decode", "all", {}, {}),)
    package_files = (
        PackageFile(
            "sparse_attention",
            "dsv4_hca_generation_module_perf",
            _COLUMNS,
            decodes(partial(_package_rows, ratio=HCA)),
            RUN,
        ),
    )


OPERATORS: Final = (CsaPrefill(), CsaDecode(), HcaPrefill(), HcaDecode())
