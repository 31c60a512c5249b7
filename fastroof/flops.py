"""FLOPs and compulsory bytes of each operator: the only place with these formulas.

Every function takes numbers or arrays (broadcast) and works in float64, so that products of sizes
do not overflow. A multiply-add counts two FLOPs. Causal attention counts the exact half
(:func:`attention_flops`), not an approximation of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastroof.units import ACTIVATION_BYTES

__all__ = [
    "allreduce_wire_bytes",
    "attention_bytes",
    "attention_flops",
    "decode_attention_bytes",
    "decode_attention_flops",
    "gemm_bytes",
    "gemm_flops",
    "moe_bytes",
    "moe_flops",
    "moe_touched_experts",
]

Real = Any
Result = npt.NDArray[np.float64]


def _f(x: Real) -> Result:
    return np.array(x, np.float64, copy=None)


def gemm_flops(m: Real, n: Real, k: Real) -> Result:
    """FLOPs of an m x n x k GEMM: ``2 m n k``."""
    return 2.0 * _f(m) * _f(n) * _f(k)


def gemm_bytes(m: Real, n: Real, k: Real, element_bytes: float) -> Result:
    """Bytes of a GEMM: both inputs at ``element_bytes``, the output in bf16."""
    outputs = _f(m) * _f(n)
    return element_bytes * (_f(m) * _f(k) + _f(n) * _f(k)) + ACTIVATION_BYTES * outputs


def attention_flops(
    num_q_heads: Real, head_dim: Real, q_len: Real, kv_len: Real, batch_size: Real = 1
) -> Result:
    """FLOPs of causal attention of ``q_len`` new tokens, each seeing the prefix and its past.

    ``4 nh dh (q ctx + q (q + 1) / 2)`` a sequence, with ``ctx = kv_len - q_len``.
    """
    q = _f(q_len)
    pairs = q * (_f(kv_len) - q) + q * (q + 1.0) / 2.0
    return 4.0 * _f(num_q_heads) * _f(head_dim) * pairs * _f(batch_size)


def attention_bytes(
    num_q_heads: Real,
    num_kv_heads: Real,
    head_dim: Real,
    q_len: Real,
    kv_len: Real,
    batch_size: Real = 1,
    kv_bytes: float = 2,
) -> Result:
    """Bytes of attention: queries and outputs in bf16, keys and values once."""
    q_and_o = 2.0 * ACTIVATION_BYTES * _f(q_len) * _f(num_q_heads)
    kv = 2.0 * kv_bytes * _f(kv_len) * _f(num_kv_heads)
    return (q_and_o + kv) * _f(head_dim) * _f(batch_size)


def decode_attention_flops(num_q_heads: Real, head_dim: Real, kv_len: Real, batch_size: Real) -> Result:
    """FLOPs of decode attention, one query a sequence: ``4 nh dh kv_len`` a sequence."""
    return attention_flops(num_q_heads, head_dim, 1, kv_len, batch_size)


def decode_attention_bytes(
    num_q_heads: Real,
    num_kv_heads: Real,
    head_dim: Real,
    kv_len: Real,
    batch_size: Real,
    kv_bytes: float = 2,
) -> Result:
    """Bytes of decode attention: the KV cache once, one query and output a sequence."""
    return attention_bytes(num_q_heads, num_kv_heads, head_dim, 1, kv_len, batch_size, kv_bytes)


def moe_touched_experts(num_tokens: Real, topk: Real, num_experts: Real, moe_ep: Real = 1) -> Result:
    """Experts of one GPU that at least one token reaches, for uniform routing.

    ``E/ep (1 - (1 - topk/E)^tokens)``: the expectation over independent tokens.
    """
    experts = _f(num_experts)
    return experts / _f(moe_ep) * (1.0 - (1.0 - _f(topk) / experts) ** _f(num_tokens))


def moe_flops(
    num_tokens: Real, hidden: Real, intermediate: Real, topk: Real, moe_tp: Real = 1, moe_ep: Real = 1
) -> Result:
    """FLOPs of the three expert GEMMs on one GPU: ``6 tokens topk hidden intermediate / (tp ep)``."""
    per_token = 6.0 * _f(topk) * _f(hidden) * _f(intermediate)
    return _f(num_tokens) * per_token / (_f(moe_tp) * _f(moe_ep))


def moe_bytes(
    num_tokens: Real,
    hidden: Real,
    intermediate: Real,
    topk: Real,
    num_experts: Real,
    moe_tp: Real = 1,
    moe_ep: Real = 1,
    element_bytes: float = 2,
) -> Result:
    """Bytes of the routed experts on one GPU: weights of the touched experts, tokens in and out."""
    expert = 3.0 * _f(hidden) * _f(intermediate) / _f(moe_tp) * element_bytes
    tokens = 2.0 * ACTIVATION_BYTES * _f(num_tokens) * _f(hidden)
    return moe_touched_experts(num_tokens, topk, num_experts, moe_ep) * expert + tokens


def allreduce_wire_bytes(message_bytes: Real, num_gpus: Real) -> Result:
    """Bytes each GPU sends in a ring all-reduce: ``2 (g - 1) / g`` of the message."""
    g = _f(num_gpus)
    return 2.0 * (g - 1.0) / g * _f(message_bytes)
