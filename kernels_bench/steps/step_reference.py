"""A naive float64 step of a dense transformer, one request and one head at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernels_bench.providers.small_ops import RMS_EPSILON

if TYPE_CHECKING:
    from kernels_bench.steps.step_model import PreparedStep, StepModel

__all__ = ["reference_logits"]

Floats = npt.NDArray[np.float64]


def reference_logits(model: StepModel, step: PreparedStep) -> Floats:
    """Compute a step's logits from its inputs, in float64 on the host.

    Parameters
    ----------
    model : StepModel
        A small model.
    step : PreparedStep
        Its tokens, pages and the keys and values before the step are read; nothing it computed is.

    Returns
    -------
    ndarray of float64
        Shape (requests, vocabulary).
    """
    batch = step.batch
    logits = []
    for request in range(batch.num_sequences):
        start, end = batch.token_offsets[request : request + 2]
        context = int(batch.kv_lens[request] - batch.new_tokens[request])
        pages = batch.pages_of(request).astype(np.int64)
        past = [
            tuple(_rows(cache[layer], pages)[:context] for cache in (step.k_pages, step.v_pages))
            for layer in range(model.spec.num_layers)
        ]
        tokens = step.tokens[start:end].cpu().numpy()
        logits.append(_last_logits(model, tokens, context, past))
    return np.stack(logits)


def _rows(cache: Any, pages: npt.NDArray[np.int64]) -> Floats:
    """Return a request's keys or values, shape (tokens, KV heads, head_dim)."""
    held = _host(cache)[pages]
    return held.reshape(-1, *held.shape[2:])


def _last_logits(
    model: StepModel, tokens: npt.NDArray[np.int64], context: int, past: list[tuple[Floats, ...]]
) -> Floats:
    spec = model.spec
    x = _host(model.embedding)[tokens]
    positions = context + np.arange(len(tokens))
    for layer, (k_past, v_past) in zip(model.layers, past, strict=True):
        normed = _rmsnorm(x, layer.attention_norm)
        qkv = _linear(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.reshape(len(tokens), -1, spec.head_dim)
        q, k, v = np.split(heads, [spec.num_q_heads, spec.num_q_heads + spec.num_kv_heads], axis=1)
        q, k = _rope(q, positions), _rope(k, positions)
        k, v = np.concatenate((k_past, k)), np.concatenate((v_past, v))
        attended = np.empty_like(q)
        for head in range(spec.num_q_heads):
            kv_head = head // spec.group_size
            for row, position in enumerate(positions):
                scores = k[: position + 1, kv_head] @ q[row, head] / np.sqrt(spec.head_dim)
                weights = np.exp(scores - scores.max())
                attended[row, head] = weights / weights.sum() @ v[: position + 1, kv_head]
        x = x + _linear(attended.reshape(len(tokens), -1), layer.o, layer.o_bias)
        gate_up = _linear(_rmsnorm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = np.split(gate_up, 2, axis=1)
        x = x + _linear(gate / (1.0 + np.exp(-gate)) * up, layer.down, layer.down_bias)
    last: Floats = _linear(_rmsnorm(x[-1:], model.final_norm), model.lm_head, None)[0, : spec.vocab]
    return last


def _rmsnorm(x: Floats, weight: Any) -> Floats:
    normed: Floats = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + RMS_EPSILON) * _host(weight)
    return normed


def _linear(x: Floats, weight: Any, bias: Any) -> Floats:
    product: Floats = x @ _host(weight).T
    return product if bias is None else product + _host(bias)


def _rope(x: Floats, positions: npt.NDArray[np.int64]) -> Floats:
    """Turn elements i and i + half of each head by position * theta ** (-i / half)."""
    from kernels_bench.steps.step_model import ROPE_THETA

    half = x.shape[-1] // 2
    angle = positions[:, None] * ROPE_THETA ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate((turned.real, turned.imag), axis=-1)


def _host(tensor: Any) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array
