"""What an engine stores and reserves for attention with an indexer, by kernel and longest context."""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.engines import KvMemory
from fastroof.engines.memory_by_card import Card, SparseCache, SparseWorkspace, first_row
from fastroof.models import Layout, ModelSpec
from fastroof.models.attention import Attention
from fastroof.models.compressed import CompressedAttention
from fastroof.models.execution import Execution, weight_bytes
from fastroof.models.experts import RoutedExperts
from fastroof.models.latent import LatentAttention
from fastroof.models.sparse import SparseLatentAttention
from fastroof.operators.widths import CSA
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES, MIB

LOGIT_BYTES = 4
"""An indexer's score of a token."""
GATHERED = 4
"""Prompts of DeepSeek-V4 that are gathered at once."""


class CacheFormat(NamedTuple):
    """How a model's KV cache is stored: its format, and the layout of sparse latent attention."""

    kv_dtype: str
    row: SparseCache | None = None

    def token_bytes(self, attention: Attention | CompressedAttention, layout: Layout) -> float:
        """Return the bytes of a token in a layer on one GPU."""
        stored = attention.kv_bytes_per_token(layout, self.kv_dtype)
        if self.row is None or not isinstance(attention, SparseLatentAttention):
            return stored
        if self.row.row_bytes:
            stored += self.row.row_bytes - latent_bytes(attention, self.kv_dtype)
        if self.row.all_layers and attention.shares_index:
            stored += attention.index_bytes / attention.index_pool
        return stored


def latent_bytes(attention: SparseLatentAttention | LatentAttention, kv_dtype: str) -> float:
    """Return the bytes of a latent vector in a format, without an indexer's key."""
    return (attention.kv_lora_rank + attention.rope_dim) * DTYPE_BYTES[kv_dtype]


def cache_format(rule: KvMemory, card: Card, architecture: str, kv_dtype: str) -> CacheFormat:
    """Return how an engine stores the KV cache of a model on a card, in a requested format."""
    rows = (one for one in rule.sparse_caches if not one.kv_dtypes or kv_dtype in one.kv_dtypes)
    return CacheFormat(kv_dtype, first_row(rows, card, architecture))


def model_kv_bytes(model: ModelSpec, layout: Layout, stored: CacheFormat, *, windowed: bool = False) -> int:
    """Return the KV cache bytes of a token on one GPU over all layers, or over those with a window."""
    return int(
        sum(
            group.count * stored.token_bytes(group.kind.attention, layout)
            for group in model.layers
            if not windowed or group.kind.attention.window
        )
    )


class Workspace(NamedTuple):
    """Bytes on one GPU: of the buffer that stays, and of logits in the peak of the profiling run."""

    buffer_bytes: int = 0
    peak_bytes: int = 0


def workspace(
    rule: KvMemory,
    card: Card,
    model: ModelSpec,
    layout: Layout,
    stored: CacheFormat,
    *,
    tokens: int,
    requests: int,
    length: int,
) -> Workspace:
    """Return the workspaces of attention with an indexer.

    Users of the buffer ask for their parts one after the other, and it has the size of the largest.

    Parameters
    ----------
    tokens, requests : int
        Of a step, with draft tokens as requests of their own.
    length : int
        Longest context.
    """
    row = first_row(rule.workspaces, card, model.architecture)
    kinds = [kind.attention for kind in model.kinds]
    if row is None:
        return Workspace()
    sparse = [one for one in kinds if isinstance(one, SparseLatentAttention) and not one.shares_index]
    if sparse:
        return _of_sparse(row, sparse[0], layout, stored, tokens, requests, length)
    compressed = [one for one in kinds if isinstance(one, CompressedAttention) and one.ratio == CSA]
    if not compressed:
        return Workspace()
    widths = compressed[0].widths
    entries = -(-length // CSA)
    gathered = GATHERED * (entries + widths.window + tokens) * widths.head_dim * ACTIVATION_BYTES
    keys = _gathered_keys(row, length, entries * compressed[0].index_bytes("fp8"))
    return Workspace(round(max(gathered, keys)), round(row.logits_mib * MIB))


def _of_sparse(
    row: SparseWorkspace,
    attention: SparseLatentAttention,
    layout: Layout,
    stored: CacheFormat,
    tokens: int,
    requests: int,
    length: int,
) -> Workspace:
    pool = attention.index_pool if row.pools_keys else 1
    users = [_gathered_keys(row, length, length / pool * attention.index_bytes)]
    if stored.row is not None and stored.row.gathers:
        heads = -(-attention.num_heads // layout.tp)
        heads = round(-(-heads // row.head_multiple) * row.head_multiple)
        width = attention.kv_lora_rank + attention.rope_dim
        users.append((row.contexts(length) * length + tokens * heads) * width * ACTIVATION_BYTES)
    scored = min(requests, tokens)
    if row.decode_rows:
        users.append((tokens if row.decode_rows == "tokens" else scored) * length * LOGIT_BYTES)
    logits = row.logits_mib * MIB
    if attention.index_pool > 1 and row.pooled_logits:
        logits += max(logits, scored * length * LOGIT_BYTES / row.pooled_logits)
    return Workspace(round(max(users)), round(logits))


def _gathered_keys(row: SparseWorkspace, length: int, keys_bytes: float) -> float:
    return row.keys_per_factor * row.contexts(length) * keys_bytes + MIB


def padded_bytes(rule: KvMemory, card: Card, model: ModelSpec, layout: Layout, execution: Execution) -> int:
    """Return what the kernel of a card adds to the weights of experts by rounding their sizes up."""
    added = 0.0
    for group in model.layers:
        experts, own = group.kind.mlp, group.kind.run_as(execution)
        if not isinstance(experts, RoutedExperts):
            continue
        dtype = own.stored("experts")
        padding = first_row(
            (one for one in rule.expert_padding if dtype in one.formats), card, model.architecture
        )
        if padding is None:
            continue
        width, inner = experts.width(model.hidden), experts.intermediate // layout.moe_tp
        rows, columns = _up(inner, padding.intermediate), _up(width, padding.hidden)
        count = group.count * (own.num_slots or experts.num_experts) // layout.ep * experts.gemms
        added += weight_bytes({"experts": count * (rows * columns - inner * width)}, own)
        # values without their scales
        added += count * rows * (_up(columns, padding.values_hidden) - columns) / 2
    return round(added)


def _up(size: float, multiple: float) -> int:
    return math.ceil(size / multiple) * int(multiple)


def copied_bytes(model: ModelSpec, layout: Layout) -> int:
    """Return the bytes of absorbed projections of latent attention that are copied in bf16."""
    copied = 0
    for group in model.layers:
        one = group.kind.attention
        if isinstance(one, LatentAttention | SparseLatentAttention):
            width = one.num_heads // layout.tp * (one.nope_dim + one.v_dim)
            copied += group.count * one.kv_lora_rank * width * ACTIVATION_BYTES
    return copied
