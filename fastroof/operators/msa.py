"""Blocks of block-sparse attention, measured as one: MSA of MiniMax-M3.

Grouped heads of 128, 16 query heads per KV head. An indexer with as many heads as KV heads scores every
token, and a query attends to the 16 best blocks of 128 tokens. TensorRT-LLM's decode rows grow with the
square of kv_len, up to 3 seconds per call, which no sparse kernel explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.operators.attention_work import DECODE_AXES
from fastroof.operators.external_rows import MEASURED, ExternalRows, PackageFile, Raw, others, text_columns
from fastroof.operators.mla import MODULE_COLUMNS, PickingModule, check_model, decodes, module_rows, prompts
from fastroof.operators.operator import Columns, DatasheetClass, Key, element_bytes
from fastroof.operators.ragged import WorkPart
from fastroof.operators.sparse_attention import SparsePrefill
from fastroof.units import ACTIVATION_BYTES

_MODEL: Final = "minimax-m3"
_NAMES: Final = {"MiniMaxAI/MiniMax-M3": _MODEL}
_HIDDEN: Final = 6144
_HEAD_DIM: Final = 128
_GROUP_SIZE: Final = 16
_PICKED: Final = 16 * 128
_COLUMNS: Final = (*MODULE_COLUMNS, *text_columns("model", "gemm_type"), *MEASURED)
_DEFAULTS: Final = {"dtype": "bf16", "kv_dtype": "bf16", "attn_dtype": "bf16", "model": _MODEL}


def _package_rows(raw: Raw) -> ExternalRows:
    model = np.array([_NAMES.get(word, word) for word in raw["model"]], object)
    return module_rows(raw, model).without(others("model", model, (_MODEL,)))


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


class _Msa(PickingModule):
    """Base of prefill and decode."""

    def check_key(self, key: Key) -> None:
        """Reject models with unknown widths."""
        check_model(key[3], [_MODEL])

    def parts(self, columns: Columns) -> Sequence[WorkPart]:
        """Projections, scores of all tokens, and attention to the picked ones."""
        batch, q_len, kv_len = self.sizes(columns)
        scored, picked = (batch * self.pairs(q_len, kv_len, most) for most in (np.inf, _PICKED))
        return _work(columns, batch * q_len, scored, picked)

    def bytes_if(self, columns: Columns, picking: Floats) -> Floats:
        """Weights, tokens in and out, the indexer's keys, and picked tokens."""
        batch, q_len, kv_len = self.sizes(columns)
        return _bytes(columns, batch * q_len, batch * kv_len, batch * np.minimum(kv_len, picking * _PICKED))


class MsaPrefill(_Msa, SparsePrefill):
    """An MSA block over prompts or chunks."""

    name = "msa_prefill"
    rank = 112
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"msa_prefill": DatasheetClass(21.0, 0.29)}
    summary = "An MSA block (MiniMax-M3) over prompts."
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 1, **_DEFAULTS}
    package_files = (PackageFile("msa", "msa_context_module_perf", _COLUMNS, prompts(_package_rows)),)


class MsaDecode(_Msa):
    """An MSA block over one new token per sequence."""

    name = "msa_decode"
    rank = 114
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"msa_decode": DatasheetClass(24.0, 0.85)}
    summary = "An MSA block, one new token per sequence."
    axes = DECODE_AXES
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    package_files = (PackageFile("msa", "msa_generation_module_perf", _COLUMNS, decodes(_package_rows)),)


OPERATORS: Final = (MsaPrefill(), MsaDecode())
