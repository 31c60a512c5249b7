"""What kernels should compute, in float64 on the inputs' own device.

Written for reading and kept apart from every kernel: matrix products and softmax of upcast inputs, one
sequence and one head at a time.
"""

from __future__ import annotations

from typing import Any


def linear(x: Any, weight: Any, x_scale: Any = None, weight_scale: Any = None) -> Any:
    """Return ``x @ weight.T``."""
    x, weight = x.double(), weight.double()
    if x_scale is not None:
        x = x * x_scale.double()
    if weight_scale is not None:
        weight = weight * weight_scale.double()
    return x @ weight.T


def attention_rows(q: Any, k: Any, v: Any, positions: Any, scale: float, window: int = 0) -> Any:
    """Return causal attention of some queries of one head of one sequence."""
    import torch

    scores = scale * (q.double() @ k.double().T)
    place = torch.arange(k.shape[0], device=k.device)
    unseen = place > positions[:, None]
    if window:
        unseen |= place <= positions[:, None] - window
    return torch.softmax(scores.masked_fill(unseen, float("-inf")), dim=1) @ v.double()


def add_rmsnorm(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """Return the normalised sum and the sum: of ``x`` and ``residual``, each of shape (rows, width)."""
    total = x.double() + residual.double()
    mean_square = (total * total).mean(dim=-1, keepdim=True)
    return total / (mean_square + eps).sqrt() * weight.double(), total


def rope(x: Any, cos_sin: Any) -> Any:
    """Rotate heads by their position."""
    import torch

    x, cos_sin = x.double(), cos_sin.double()
    half = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(x: Any) -> Any:
    """Return ``silu(gate) * up`` of rows that hold gate, then up."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1.0 + (-gate).exp()) * up


def gated_mlp(x: Any, gate_up: Any, down: Any) -> Any:
    """Return one expert's output: ``silu_and_mul(x @ gate_up.T) @ down.T``."""
    return linear(silu_and_mul(linear(x, gate_up)), down)
