"""Blocks of DeepSeek sparse attention (DSA: DeepSeek-V3.2, GLM-5, GLM-5.3-Flash), and parts of them.

An indexer scores every token for every query in fp8, and attention covers the 2048 best. So the cost of
scores grows with kv_len without bound, that of attention up to 2048. For shorter sequences SGLang's prefill
runs dense attention without scores, by another kernel; lookups do not interpolate between the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.documents import parse_json
from fastroof.errors import TableError
from fastroof.operators import external_rows as external
from fastroof.operators import mla
from fastroof.operators.attention_work import DECODE_AXES, PrefixUs, prefix_within
from fastroof.operators.operator import Columns, DatasheetClass, Key, RowSource, by_word, element_bytes
from fastroof.operators.ragged import SEGMENT, RaggedPrefill, WorkPart
from fastroof.operators.widths import (
    COMPRESSED_SHAPES,
    ENTRY,
    INDEX_DIM,
    INDEX_HEADS,
    LATENT_SHAPES,
    WINDOW,
    LatentShape,
)
from fastroof.pack.ragged import RaggedTable, Segment
from fastroof.units import ACTIVATION_BYTES

ROUNDS: Final = 20
"""Iterations of reweighted least squares, which minimize absolute shares."""

NEGLIGIBLE: Final = 0.02
"""Share of a latency below which errors have equal weight."""


class SparsePrefill(RaggedPrefill):
    """Prompts whose queries attend to some of the tokens."""

    def prefix_us(self, tables: RowSource, key: Key, window: int) -> PrefixUs:
        """Price of a prefix: fitted if long prefixes were measured, else B times latency / B."""
        donor = self.step_kernels(tables, key)[0].key
        own, donor_prices = (self.prefix_prices(one, tables.gpu, window) for one in (key, donor))
        fitted = tables.cached(
            ("fitted prefix", self.name, donor, window),
            lambda: fitted_price(tables.packed(self, donor), donor_prices, window),
        )
        if fitted is None:
            return own.times(self.prefix_ratio(tables, key))
        return PrefixUs(
            *(us * (a / b if b > 0.0 else 1.0) for us, a, b in zip(fitted, own, donor_prices, strict=True))
        )


def fitted_price(table: RaggedTable, least: PrefixUs, window: int) -> PrefixUs | None:
    """Fit the four parts of a price to prompts after a prefix; None if no prefix exceeds the window.

    The fit minimizes the absolute error as a share of each latency; no part is below its roofline ``least``.
    """
    batch, q_len, prefix = table.points()
    if not window or prefix.max() <= window:
        return None
    fresh_us, origin = np.empty(len(batch)), np.zeros(len(batch), np.uint8)
    table.latency((batch, q_len, np.zeros_like(prefix)), fresh_us, origin)
    pairs, tokens = prefix_within(q_len, q_len + prefix, window)
    parts = batch[:, None] * np.stack([q_len * prefix, prefix, pairs, tokens], axis=1)
    some = prefix > 0.0
    shares = parts[some] / table.latency_us[some, None]
    paid = 1.0 - fresh_us[some] / table.latency_us[some]
    bound = np.array(least)
    return PrefixUs(*(bound + _least_absolute(shares, paid - shares @ bound)).tolist())


def _least_absolute(parts: Floats, target: Floats) -> Floats:
    """Non-negative weights of the parts with the least absolute error."""
    scale = np.sqrt((parts**2).mean(axis=0))
    scale[scale == 0.0] = 1.0
    parts = parts / scale
    weights, found = np.ones(len(target)), np.zeros(parts.shape[1])
    for _ in range(ROUNDS):
        weighted = parts * weights[:, None]
        found = _least_squares(weighted.T @ parts, weighted.T @ target)
        weights = 1.0 / np.maximum(np.abs(parts @ found - target), NEGLIGIBLE)
    return np.asarray(found / scale)


def _least_squares(squares: Floats, products: Floats) -> Floats:
    """Minimum of a quadratic over non-negative weights, by trying every active set."""
    count = len(products)
    best, least = np.zeros(count), 0.0
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            some = list(chosen)
            weights = np.linalg.lstsq(squares[np.ix_(some, some)], products[some], rcond=None)[0]
            value = -float(products[some] @ weights)
            if (weights >= 0.0).all() and value < least:
                best, least = np.zeros(count), value
                best[some] = weights
    return best


_COLUMNS: Final = (*mla.MODULE_COLUMNS, *external.text_columns("model", "gemm_type"), *external.MEASURED)
_NAMED: Final = (*external.text_columns("op_name"), *external.RUN)
_SHARED: Final = "-shared-index"
_INDEX_DTYPE: Final = "fp8"
_DENSE_TOKENS: Final = 131_072
"""Most tokens of a call for which SGLang runs dense attention, of sequences of at most topk tokens each.

Exactly the 50,621 H100 rows whose kernel name says so are such calls."""


def _shares_an_index(raw: external.Raw) -> Array:
    """Rows of layers that reuse another layer's index; short sequences follow most rows of their model."""
    named = np.char.find(raw.get("op_name", np.array([""])).astype(str), "skip_indexer") >= 0
    if named.any():
        return named
    kernel = raw["kernel_source"].astype(str)
    skips = np.char.find(kernel, "skip_indexer") >= 0
    indexes = (np.char.find(kernel, "indexer") >= 0) & ~skips
    shares = skips.copy()
    for model in set(raw["model"]):
        rows = raw["model"] == model
        if (rows & skips).sum() > (rows & indexes).sum():
            shares |= rows & ~indexes
    return shares


def _package_rows(raw: external.Raw) -> external.ExternalRows:
    model = mla.model_names(raw["model"])
    model = np.where(_shares_an_index(raw), model + _SHARED, model)
    return mla.module_rows(raw, model).without(mla.unknown_models(model))


_GLM_5_3: Final = "glm-5.3-flash"
_GLM_5_3_COLUMNS: Final = (
    *external.text_columns("component", "geometry"),
    *external.size_columns("batch_size", "x"),
    *external.size_columns("prefix", minimum=0),
    *external.MEASURED,
)


def _glm_5_3_file(phase: str) -> external.PackageFile:
    """Blocks of GLM-5.3-Flash, whose file has both phases."""

    def convert(raw: external.Raw) -> external.ExternalRows:
        words, index = np.unique(raw["geometry"].astype(str), return_inverse=True)
        shapes = [parse_json(word, "geometry", TableError) for word in words.tolist()]
        if not all(isinstance(shape, dict) for shape in shapes):
            raise TableError("column geometry must hold JSON objects")

        def of(name: str) -> Array:
            return np.array([shape.get(name) for shape in shapes], object)[index]

        is_prompt = of("is_context").astype(bool)
        # x is new tokens after a prefix, in decode the cached ones
        kv_len = raw["prefix"] + raw["x"]
        sizes = {"q_len": raw["x"], "kv_len": kv_len} if phase == "context" else {"kv_len": kv_len + 1}
        rows = external.package_rows(
            raw,
            "batch_size",
            dtype=external.dtype_names(of("projection_quant_mode")),
            kv_dtype=external.dtype_names(of("kv_cache_dtype")),
            attn_dtype=external.constant_text("bf16", len(index)),
            model=external.constant_text(_GLM_5_3, len(index)),
            num_heads=of("num_heads").astype(np.int64),
            **sizes,
        )
        other = {
            "of the other phase": is_prompt != (phase == "context"),
            "not a block of attention": (raw["component"] != "attention")
            | (of("layer_kind") != "sparse_mla"),
        }
        return external.ExternalRows(rows.columns, other | rows.left_out)

    return external.PackageFile(
        "glm53_attention", "glm53_attention_module_perf", _GLM_5_3_COLUMNS, convert, ()
    )


def _indexer(columns: Columns, shape: LatentShape, tokens: Floats, pairs: Floats) -> list[WorkPart]:
    """Indexer: projections of tokens and scores of pairs; without scores it still fills its cache."""
    hidden, q_lora, heads, dim = shape.hidden, shape.q_lora_rank, shape.index_heads, shape.index_dim
    queries = np.where(pairs > 0.0, q_lora * heads * dim + hidden * heads, 0.0)
    own = queries + hidden * dim
    return [
        WorkPart(np.asarray(2.0 * tokens * own), columns["dtype"]),
        WorkPart(np.asarray(2.0 * heads * dim * pairs / shape.index_pool), _INDEX_DTYPE),
    ]


def _indexer_bytes(columns: Columns, cached: Floats) -> Floats:
    """Weights of the indexer once, and one fp8 key per cached token, or per pool of them."""
    shape = mla.shapes_of(columns["model"])
    hidden, q_lora, heads, dim = shape.hidden, shape.q_lora_rank, shape.index_heads, shape.index_dim
    weights = (q_lora * heads * dim + hidden * dim) * element_bytes(columns["dtype"])
    return np.asarray(weights + cached * dim / shape.index_pool)


_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "bf16", "attn_dtype": "bf16", "model": "deepseek-v3.2"}


class _Dsa(mla.PickingModule, mla.LatentModule):
    """Base of prefill and decode."""

    def is_dense(self, columns: Columns) -> Array:
        """Rows that run dense attention."""
        return np.asarray(False)

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, the indexer, and absorbed attention to the picked tokens; or dense attention."""
        batch, q_len, kv_len = self.sizes(columns)
        tokens = batch * q_len
        shape, is_dense = mla.shapes_of(columns["model"]), self.is_dense(columns)
        all_pairs = batch * self.pairs(q_len, kv_len)
        picked = batch * self.pairs(q_len, kv_len, shape.topk)
        scored = np.where(is_dense, 0.0, all_pairs)
        latent = 2.0 * columns["num_heads"] * (2.0 * shape.kv_lora_rank + shape.rope_dim) * picked
        expanded = 2.0 * columns["num_heads"] * (shape.nope_dim + shape.rope_dim + shape.v_dim) * all_pairs
        return [
            *mla.projections(columns, shape, tokens, np.where(is_dense, batch * kv_len, 0.0)),
            *_indexer(columns, shape, tokens, scored),
            WorkPart(np.where(is_dense, expanded, latent), columns["attn_dtype"]),
        ]

    def bytes_if(self, columns: Columns, picking: Floats) -> Floats:
        """Weights, tokens in and out, picked tokens, and the indexer's keys once."""
        batch, q_len, kv_len = self.sizes(columns)
        read = np.minimum(kv_len, picking * mla.shapes_of(columns["model"]).topk)
        own = mla.module_bytes(columns, batch * q_len, batch * read)
        return own + _indexer_bytes(columns, batch * kv_len)


class DsaPrefill(_Dsa, SparsePrefill):
    """A DSA block over prompts or chunks."""

    name = "dsa_prefill"
    rank = 100
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"dsa_prefill": DatasheetClass(310.0, 0.42)}
    summary = "A DSA block over prompts."
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    packed_words = ("kernel",)
    package_files = (
        external.PackageFile(
            "sparse_attention", "dsa_context_module_perf", _COLUMNS, mla.prompts(_package_rows), _NAMED
        ),
        _glm_5_3_file("context"),
    )

    def is_dense(self, columns: Columns) -> Array:
        """Rows that run dense attention, by their coordinates or kernel name."""
        if SEGMENT in columns:
            return columns[SEGMENT]
        if "kernel" in columns:
            return by_word(columns["kernel"], lambda kernel: float("_dense_" in kernel)) > 0.0
        return np.asarray(False)

    def segment(self, key: Key, rows: Columns) -> Segment | None:
        """Sequences that run dense attention, if kernel names separate them."""
        topk = LATENT_SHAPES[key[3]].topk

        def is_dense(batch: Floats, q_len: Floats, prefix: Floats) -> Array:
            kv_len = q_len + prefix
            return np.asarray((kv_len <= topk) & (batch * kv_len <= _DENSE_TOKENS))

        dense = is_dense(rows["batch_size"], rows["q_len"], rows["kv_len"] - rows["q_len"])
        kernels = rows.get("kernel", np.full(len(dense), ""))
        return None if set(kernels[dense]) & set(kernels[~dense]) else is_dense


class DsaDecode(_Dsa):
    """A DSA block over one new token per sequence."""

    name = "dsa_decode"
    rank = 102
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"dsa_decode": DatasheetClass(37.0, 0.32)}
    summary = "A DSA block, one new token per sequence."
    axes = DECODE_AXES
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    package_files = (
        external.PackageFile(
            "sparse_attention", "dsa_generation_module_perf", _COLUMNS, mla.decodes(_package_rows), _NAMED
        ),
        _glm_5_3_file("generation"),
    )


MQA_LOGITS: Final = "mqa_logits"
TOPK: Final = "topk"
ATTENTION: Final = "attention"
_NO_SCORES: Final = "none"
_SCORE_BYTES: Final = 4

_PART_COLUMNS: Final = (
    *mla.MODULE_COLUMNS,
    *external.text_columns("model", "kernel_source"),
    *external.size_columns("compress_ratio"),
    # 0 if there are no more tokens than are picked: nothing runs
    Column("latency", "float", "ms", "measured latency", 0),
)
_OPTIONAL: Final = (
    *external.text_columns("score_mode"),
    *external.size_columns("local_num_heads"),
    *external.RUN,
)


def _part_rows(part: str) -> Any:
    def convert(raw: external.Raw) -> external.ExternalRows:
        model = mla.model_names(raw["model"])
        rows = len(model)
        # score_mode is <kernel version>_<scores>, or only the scores: flat, top_last
        modes = raw.get("score_mode", np.full(rows, _NO_SCORES, object)).astype(str)
        version, _, scores = np.char.rpartition(np.char.replace(modes, "top_last", "top-last"), "_").T
        named = np.where(version == "", part, np.char.add(f"{part}_", version))
        out = external.others("model", model, {*COMPRESSED_SHAPES, *LATENT_SHAPES})
        return external.package_rows(
            raw,
            "compress_ratio",
            "batch_size",
            part=named.astype(object),
            model=model,
            scores=np.char.replace(scores, "top-last", "top_last").astype(object),
            num_heads=raw.get("local_num_heads", raw["num_heads"]),
            q_len="isl",
            kv_len=raw["isl"] + raw["step"],
        ).without(out | {"nothing to pick, so nothing ran": raw["latency"] <= 0.0})

    return convert


def _topk(model: str) -> float:
    shape: Any = COMPRESSED_SHAPES.get(model) or LATENT_SHAPES.get(model)
    return float(shape.topk) if shape else np.nan


def _index_width(model: str) -> float:
    if model in COMPRESSED_SHAPES:
        return float(INDEX_HEADS * INDEX_DIM)
    shape = LATENT_SHAPES.get(model)
    return float(shape.index_heads * shape.index_dim) if shape else np.nan


class SparsePart(RaggedPrefill):
    """One part of a sparse block, over new tokens after a prefix."""

    name = "sparse_part"
    rank = 116
    summary = "Scores, top-k or attention of a sparse block."
    about = (
        "Part is mqa_logits, topk (topk_v1, topk_v2: two kernels) or attention. Scores of a top-k are flat "
        "or top_last, otherwise none. kv-len counts the prefix and the new tokens."
    )
    keys = (
        Column("part", "text", "", "mqa_logits, topk, topk_v1, topk_v2 or attention"),
        Column("model", "text", "", "model whose widths the part has: glm-5, deepseek-v4-flash"),
        Column("scores", "text", "", "scores of a top-k: flat, top_last; none for other parts"),
        Column("compress_ratio", "int", "", "tokens per entry of the cache: 1, 4 or 128"),
        mla.NUM_HEADS,
    )
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, "scores": _NO_SCORES}
    package_files = tuple(
        external.PackageFile("sparse_attention", file, _PART_COLUMNS, _part_rows(part), _OPTIONAL)
        for file, part in (
            ("dsv4_paged_mqa_logits_module_perf", MQA_LOGITS),
            ("glm5_mqa_logits_module_perf", MQA_LOGITS),
            ("dsv4_csa_topk_calib_perf", TOPK),
            ("glm5_topk_module_perf", TOPK),
            ("dsv4_hca_attn_module_perf", ATTENTION),
            ("glm5_dsa_attn_module_perf", ATTENTION),
        )
    )

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """fp8 scores; one comparison per score of a top-k; attention to the picked entries."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        model, part, ratio = columns["model"], columns["part"].astype(str), columns["compress_ratio"]
        scored = batch * mla.causal_pairs(q_len, kv_len) / ratio
        logits = 2.0 * by_word(model, _index_width) * scored
        is_logits, is_attention = part == MQA_LOGITS, part == ATTENTION
        attention = 4.0 * columns["num_heads"] * ENTRY * self._attended(columns)
        return [
            WorkPart(np.where(is_logits, logits, 0.0), "fp8"),
            WorkPart(np.where(is_attention, attention, np.where(is_logits, 0.0, scored)), "bf16"),
        ]

    def _attended(self, columns: Columns) -> Array:
        """(query, entry) pairs: picked ones (all of a heavily compressed cache) and those of the window."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        ratio = np.asarray(columns["compress_ratio"], np.float64)
        most = np.where(ratio > INDEX_HEADS, np.inf, by_word(columns["model"], _topk))
        near = np.where(ratio > 1, mla.causal_pairs(q_len, kv_len, WINDOW), 0.0)
        return np.asarray(batch * (mla.causal_pairs(q_len, kv_len, ratio * most) / ratio + near))

    def moved_bytes(self, columns: Columns) -> Floats:
        """Keys and scores; scores only; or queries, outputs and cache."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        part, ratio = columns["part"].astype(str), columns["compress_ratio"]
        scores = _SCORE_BYTES * batch * mla.causal_pairs(q_len, kv_len) / ratio
        keys = batch * kv_len / ratio * INDEX_DIM
        queries = 2.0 * ACTIVATION_BYTES * batch * q_len * columns["num_heads"] * ENTRY
        picked = np.minimum(kv_len / ratio, by_word(columns["model"], _topk))
        attention = queries + batch * picked * ENTRY
        return np.asarray(
            np.where(part == MQA_LOGITS, keys + scores, np.where(part == ATTENTION, attention, scores))
        )


SPARSE_PART: Final = SparsePart()
OPERATORS: Final = (
    DsaPrefill(),
    DsaDecode(),
    SPARSE_PART,
)
