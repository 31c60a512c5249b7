"""Parts of sparse attention blocks, measured one by one: scores, their top-k, attention to what it picked.

They are inside the blocks (dsa, csa, hca), and correct them: blocks were measured with scores that are all
equal, which a top-k takes far longer over than over a model's (81 us, not 2.7, of a decode on an H100). A
block less its top-k of flat scores, with that of peaked ones (top_last), is what a model's takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.operators.attention_modules import MODULE_COLUMNS
from fastroof.operators.attention_work import BATCH
from fastroof.operators.compressed_attention import compressed_model_names
from fastroof.operators.compressed_widths import COMPRESSED_SHAPES, ENTRY, INDEX_DIM, INDEX_HEADS, WINDOW
from fastroof.operators.foreign_rows import (
    RUN,
    ForeignRows,
    PackageFile,
    Raw,
    measured_us,
    size_columns,
    text_columns,
)
from fastroof.operators.latent_shapes import model_names
from fastroof.operators.latent_widths import LATENT_SHAPES
from fastroof.operators.latent_work import NUM_HEADS, causal_pairs
from fastroof.operators.operator import Columns, HoldoutGrid, by_word
from fastroof.operators.ragged import RaggedPrefill, WorkPart
from fastroof.units import ACTIVATION_BYTES

__all__ = ["OPERATORS", "SparsePart"]

MQA_LOGITS: Final = "mqa_logits"
TOPK: Final = "topk"
ATTENTION: Final = "attention"
_NO_SCORES: Final = "none"
_SCORE_BYTES: Final = 4

_COLUMNS: Final = (
    *MODULE_COLUMNS,
    *text_columns("model", "kernel_source"),
    *size_columns("compress_ratio"),
    # 0 where there are no more tokens than are picked: nothing runs
    Column("latency", "float", "ms", "measured latency", 0),
)
_OPTIONAL: Final = (*text_columns("score_mode"), *size_columns("local_num_heads"), *RUN)


def _convert(part: str) -> Any:
    def convert(raw: Raw) -> ForeignRows:
        model = compressed_model_names(model_names(raw["model"]))
        rows = len(model)
        # v1_flat: the kernel's version and the scores; flat, top_last: the scores
        modes = raw.get("score_mode", np.full(rows, _NO_SCORES, object)).astype(str)
        version, _, scores = np.char.rpartition(np.char.replace(modes, "top_last", "top-last"), "_").T
        named = np.where(version == "", part, np.char.add(f"{part}_", version))
        columns = {
            "part": named.astype(object),
            "model": model,
            "scores": np.char.replace(scores, "top-last", "top_last").astype(object),
            "compress_ratio": raw["compress_ratio"],
            "num_heads": raw.get("local_num_heads", raw["num_heads"]),
            "batch_size": raw["batch_size"],
            "q_len": raw["isl"],
            "kv_len": raw["isl"] + raw["step"],
            **measured_us(raw),
        }
        known = {*COMPRESSED_SHAPES, *LATENT_SHAPES}
        out = {f"model {m}": model == m for m in sorted(set(model)) if m not in known}
        return ForeignRows(columns, out | {"nothing to pick, so nothing ran": raw["latency"] <= 0.0})

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
    """One part of a block, over new tokens after a prefix."""

    name = "sparse_part"
    rank = 116
    summary = "Scores, top-k or attention of a sparse block."
    about = (
        "Part is mqa_logits, topk (topk_v1, topk_v2: two kernels) or attention. Scores are flat or top_last "
        "of a top-k, none of the others. kv-len counts the prefix and the new tokens."
    )
    keys = (
        Column("part", "text", "", "mqa_logits, topk, topk_v1, topk_v2 or attention"),
        Column("model", "text", "", "model whose widths the part has: glm-5, deepseek-v4-flash"),
        Column("scores", "text", "", "what a top-k picks from: flat, top_last; none of other parts"),
        Column("compress_ratio", "int", "", "tokens an entry of the cache: 1, 4 or 128"),
        NUM_HEADS,
    )
    axes = (
        BATCH,
        Column("q_len", "int", "tokens", "new tokens of each sequence"),
        Column("kv_len", "int", "tokens", "tokens scored: prefix plus q_len"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, "scores": _NO_SCORES}
    holdouts = (HoldoutGrid("sparse_part", "every second", {}, {}),)
    coverages = (HoldoutGrid("sparse_part", "all", {}, {}),)
    package_files = tuple(
        PackageFile("sparse_attention", file, _COLUMNS, _convert(part), _OPTIONAL)
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
        """Scores in fp8; comparisons of a top-k, one a score; attention to what is picked."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        model, part, ratio = columns["model"], columns["part"].astype(str), columns["compress_ratio"]
        scored = batch * causal_pairs(q_len, kv_len) / ratio
        logits = 2.0 * by_word(model, _index_width) * scored
        is_logits, is_attention = part == MQA_LOGITS, part == ATTENTION
        attention = 4.0 * columns["num_heads"] * ENTRY * self._attended(columns)
        return [
            WorkPart(np.where(is_logits, logits, 0.0), "fp8"),
            WorkPart(np.where(is_attention, attention, np.where(is_logits, 0.0, scored)), "bf16"),
        ]

    def _attended(self, columns: Columns) -> Array:
        """(query, entry) pairs: the picked ones, of a heavily compressed cache all; with the window's."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        ratio = np.asarray(columns["compress_ratio"], np.float64)
        most = np.where(ratio > INDEX_HEADS, np.inf, by_word(columns["model"], _topk))
        near = np.where(ratio > 1, causal_pairs(q_len, kv_len, WINDOW), 0.0)
        return np.asarray(batch * (causal_pairs(q_len, kv_len, ratio * most) / ratio + near))

    def moved_bytes(self, columns: Columns) -> Floats:
        """Keys once and scores, or scores alone, or queries, outputs and the cache."""
        batch, q_len, kv_len = (np.asarray(columns[n], np.float64) for n in self.axis_names)
        part, ratio = columns["part"].astype(str), columns["compress_ratio"]
        scores = _SCORE_BYTES * batch * causal_pairs(q_len, kv_len) / ratio
        keys = batch * kv_len / ratio * INDEX_DIM
        queries = 2.0 * ACTIVATION_BYTES * batch * q_len * columns["num_heads"] * ENTRY
        picked = np.minimum(kv_len / ratio, by_word(columns["model"], _topk))
        attention = queries + batch * picked * ENTRY
        return np.asarray(
            np.where(part == MQA_LOGITS, keys + scores, np.where(part == ATTENTION, attention, scores))
        )


OPERATORS: Final = (SparsePart(),)
