"""A naive float64 step of a dense transformer, one request and one head at a time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs
from kernels_bench.providers.paging import PagedBatch
from kernels_bench.providers.small_ops import RMS_EPSILON, ROPE_THETA
from kernels_bench.steps.step_linear import LinearLayer
from kernels_bench.steps.step_weights import StepWeights

_BLOCK: Final = 128
_E4M3_MAX: Final = 448.0


def reference_logits(
    weights: StepWeights, batch: PagedBatch, tokens: Any, k_pages: list[Any], v_pages: list[Any]
) -> Floats:
    """Compute a step's logits from its inputs, in float64 on the host."""
    logits = []
    for request in range(batch.num_sequences):
        start, end = batch.token_offsets[request : request + 2]
        context = int(batch.kv_lens[request] - batch.new_tokens[request])
        pages = batch.pages_of(request).astype(np.int64)
        past = [
            tuple(_rows(cache[layer], pages)[:context] for cache in (k_pages, v_pages))
            for layer in range(weights.spec.num_layers)
        ]
        new = tokens[start:end].cpu().numpy()
        logits.append(_last_logits(weights, new, context, past))
    return np.stack(logits)


def _rows(cache: Any, pages: Longs) -> Floats:
    """Return a request's keys or values, shape (tokens, KV heads, head_dim)."""
    held = _host(cache)[pages]
    return held.reshape(-1, *held.shape[2:])


def _last_logits(weights: StepWeights, tokens: Longs, context: int, past: list[tuple[Floats, ...]]) -> Floats:
    spec = weights.spec
    x = _host(weights.embedding)[tokens]
    positions = context + np.arange(len(tokens))
    for layer, (k_past, v_past) in zip(weights.layers, past, strict=True):
        normed = _rmsnorm(x, layer.attention_norm)
        qkv = _linear(normed, layer.qkv)
        heads = qkv.reshape(len(tokens), -1, spec.head_dim)
        q, k, v = np.split(heads, [spec.num_q_heads, spec.num_q_heads + spec.num_kv_heads], axis=1)
        if spec.qk_norm:
            q, k = _rmsnorm(q, layer.q_norm), _rmsnorm(k, layer.k_norm)
        q, k = _rope(q, positions), _rope(k, positions)
        k, v = np.concatenate((k_past, k)), np.concatenate((v_past, v))
        attended = np.empty_like(q)
        for head in range(spec.num_q_heads):
            kv_head = head // spec.group_size
            for row, position in enumerate(positions):
                scores = k[: position + 1, kv_head] @ q[row, head] / np.sqrt(spec.head_dim)
                shares = np.exp(scores - scores.max())
                attended[row, head] = shares / shares.sum() @ v[: position + 1, kv_head]
        x = x + _linear(attended.reshape(len(tokens), -1), layer.o)
        gate_up = _linear(_rmsnorm(x, layer.mlp_norm), layer.gate_up)
        gate, up = np.split(gate_up, 2, axis=1)
        x = x + _linear(gate / (1.0 + np.exp(-gate)) * up, layer.down)
    last: Floats = _linear(_rmsnorm(x[-1:], weights.final_norm), weights.lm_head)[0, : spec.vocab]
    return last


def _rmsnorm(x: Floats, weight: Any) -> Floats:
    normed: Floats = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + RMS_EPSILON) * _host(weight)
    return normed


def _linear(x: Floats, layer: LinearLayer) -> Floats:
    weight = _host(layer.weight)
    if layer.scale is not None:
        scale = _host(layer.scale)
        if scale.ndim == 1:  # of the whole tensor
            x, weight = _rounded(x, _host(layer.x_scale)), weight * scale
        else:
            groups = x.reshape(len(x), -1, _BLOCK)
            x = _rounded(groups, np.abs(groups).max(axis=-1, keepdims=True) / _E4M3_MAX).reshape(x.shape)
            weight = weight * np.kron(scale, np.ones((_BLOCK, _BLOCK)))[: len(weight), : weight.shape[1]]
    product: Floats = x @ weight.T
    return product if layer.bias is None else product + _host(layer.bias)


def _rounded(x: Floats, scale: Floats) -> Floats:
    """Round to the nearest multiple of the scale that e4m3 has: 3 bits of mantissa, exponents from -6."""
    scaled = np.clip(x / scale, -_E4M3_MAX, _E4M3_MAX)
    exponent = np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    rounded: Floats = np.rint(scaled / step) * step * scale
    return rounded


def _rope(x: Floats, positions: Longs) -> Floats:
    """Turn elements i and i + half of each head by position * theta ** (-i / half)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * ROPE_THETA ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate((turned.real, turned.imag), axis=-1)


def _host(tensor: Any) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array
