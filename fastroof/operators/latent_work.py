"""What latent attention costs: projections, absorbed and plain attention, the indexer, and their bytes.

A multiply-add counts two FLOPs, a causal triangle its exact half. Prompts of full attention expand keys and
values for every head; decodes and sparse attention keep the latent vectors, and absorb that expansion into
queries and outputs. Kernels may do otherwise: SGLang's for prompts on Hopper absorbs, and its MFU by these
FLOPs is no more than 0.20. As coordinates of an interpolation they serve all the same.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import Column
from fastroof.operators.foreign_rows import Raw
from fastroof.operators.latent_shapes import shapes_of
from fastroof.operators.operator import Columns, element_bytes
from fastroof.operators.ragged import WorkPart
from fastroof.operators.work import Real, as_floats
from fastroof.units import ACTIVATION_BYTES

__all__ = [
    "NUM_HEADS",
    "attended",
    "causal_pairs",
    "generation_kv_len",
    "module_bytes",
    "projections",
]

NUM_HEADS: Final = Column("num_heads", "int", "", "query heads on one GPU")


def causal_pairs(q_len: Real, kv_len: Real, most: Real = np.inf) -> Floats:
    """(query, token) pairs of one sequence whose last ``q_len`` tokens are new; at most ``most`` a query."""
    q, context = as_floats(q_len), as_floats(kv_len) - as_floats(q_len)
    growing = np.clip(most - context, 0.0, q)
    beyond = np.where(q > growing, q - growing, 0.0)
    some = np.where(beyond > 0.0, most, 0.0)
    return np.asarray(growing * context + growing * (growing + 1.0) / 2.0 + beyond * some)


def attended(kv_len: Real, most: Real) -> Floats:
    """Tokens that one query attends to."""
    return np.minimum(as_floats(kv_len), most)


def generation_kv_len(raw: Raw) -> Array:
    """Tokens attended to in the package's files of decodes."""
    steps = np.unique(raw["step"])
    counts_new = steps[0] > 1 and not (steps & (steps - 1)).any() and bool((raw["isl"] == 1).all())
    return raw["step"] if counts_new else raw["isl"] + raw["step"]


def projections(columns: Columns, tokens: Floats, expanded: Real = 0.0) -> list[WorkPart]:
    """The projections of a module over some tokens."""
    heads = columns["num_heads"]
    hidden, q_lora, kv_lora, nope, rope, v_dim = shapes_of(columns["model"])[:6]
    down = hidden * (q_lora + kv_lora + rope)
    own = down + q_lora * heads * (nope + rope) + heads * v_dim * hidden
    expansion = kv_lora * heads * (nope + v_dim)
    return [
        WorkPart(np.asarray(2.0 * tokens * own + 2.0 * expanded * expansion), columns["dtype"]),
        WorkPart(np.asarray(np.where(expanded > 0.0, 0.0, 2.0 * tokens * expansion)), "bf16"),
    ]


def module_bytes(columns: Columns, tokens: Floats, cached: Floats) -> Floats:
    """Weights once, tokens in and out, and the latent vectors of ``cached`` tokens."""
    heads = columns["num_heads"]
    hidden, q_lora, kv_lora, nope, rope, v_dim = shapes_of(columns["model"])[:6]
    weights = (
        hidden * (q_lora + kv_lora + rope)
        + heads * (q_lora * (nope + rope) + v_dim * hidden + kv_lora * (nope + v_dim))
    ) * element_bytes(columns["dtype"])
    kv = cached * (kv_lora + rope) * element_bytes(columns["kv_dtype"])
    return np.asarray(weights + kv + 2.0 * ACTIVATION_BYTES * tokens * hidden)
