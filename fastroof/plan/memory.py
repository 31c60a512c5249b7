"""What a plan holds in one GPU's memory, and how many KV tokens are left room for."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastroof.config import GpuSpec
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution, weight_bytes
from fastroof.models.stages import stages_of
from fastroof.units import ACTIVATION_BYTES

__all__ = ["MEMORY_SHARE", "PlanMemory", "plan_memory", "window_kv_bytes"]

MEMORY_SHARE = 0.9
"""Share of the GPU's memory that serving engines use by default; the rest is the driver's and theirs."""


class PlanMemory(NamedTuple):
    """One GPU's memory, in bytes.

    Attributes
    ----------
    weight_bytes : int
        Linear layers and experts in their formats, with their scales; embedding, norms and biases in bf16,
        as nearly every LM head.
    kv_bytes_per_token : int
        KV cache of one token over all layers, as long as its sequence is within the window.
    activation_bytes : int
        Working set of a step of max_tokens: the widest layer's inputs and outputs, and the residual.
    reserve_bytes : int
        What is left untouched: a tenth of the GPU's memory.
    max_kv_tokens : int
        Tokens that fit beside all that, of sequences no longer than the window; 0 where the weights alone
        do not fit. Of longer sequences more tokens fit: see :meth:`max_sequences`.
    window : int
        Tokens of a sequence that windowed layers keep at most; 0 without such layers.
    window_kv_bytes_per_token : int
        Their part of ``kv_bytes_per_token``.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    reserve_bytes: int
    max_kv_tokens: int
    window: int = 0
    window_kv_bytes_per_token: int = 0

    @property
    def window_share(self) -> float:
        """Share of a token's KV cache that is kept within the window alone."""
        return self.window_kv_bytes_per_token / self.kv_bytes_per_token

    @property
    def kv_room(self) -> tuple[int, int, int, int]:
        """Room for KV cache as loops count it, see :mod:`fastroof.compiled.kv_room`."""
        window_bytes = self.window_kv_bytes_per_token
        if not window_bytes:
            return self.max_kv_tokens, 1, 0, 0
        common = math.gcd(self.kv_bytes_per_token, window_bytes)
        whole, within = self.kv_bytes_per_token // common, window_bytes // common
        return self.max_kv_tokens * whole, whole - within, within, self.window

    def kv_bytes(self, kv_len: Any) -> Any:
        """KV cache of one sequence, bytes.

        Parameters
        ----------
        kv_len : int or array_like of int
            Its tokens.

        Examples
        --------
        >>> PlanMemory(0, 3000, 0, 0, 10_000, 128, 1000).kv_bytes([100, 1000]).tolist()
        [300000, 2128000]
        """
        length = np.asarray(kv_len, np.int64)
        beyond = np.maximum(length - self.window, 0) * self.window_kv_bytes_per_token
        held = length * self.kv_bytes_per_token - beyond
        return held if held.ndim else int(held)

    def held_tokens(self, kv_len: float) -> float:
        """Tokens' worth of KV cache of one sequence, of those that ``max_kv_tokens`` counts.

        Parameters
        ----------
        kv_len : number
            Its tokens, or their mean.
        """
        return kv_len - self.window_share * max(kv_len - self.window, 0.0)

    def max_sequences(self, kv_len: Any) -> Any:
        """How many sequences of a length fit.

        Parameters
        ----------
        kv_len : int or array_like of int
            Tokens of each, at least 1.

        Examples
        --------
        >>> memory = PlanMemory(0, 3000, 0, 0, 10_000, 128, 1000)
        >>> memory.max_sequences(100), memory.max_sequences(1000), memory.max_kv_tokens // 1000
        (100, 14, 10)
        """
        parts, whole, within, window = self.kv_room
        length = np.asarray(kv_len, np.int64)
        fit = parts // (whole * length + within * np.minimum(length, window))
        return fit if fit.ndim else int(fit)


def plan_memory(
    model: ModelSpec,
    layout: Layout,
    gpu: GpuSpec,
    execution: Execution,
    max_tokens: int,
    *,
    stage: int | None = None,
) -> PlanMemory:
    """Work out :class:`PlanMemory` of one GPU's share of a model: of the pipeline stage with least room.

    Parameters
    ----------
    model, layout, gpu, execution
        Of a plan.
    max_tokens : int
        Of its largest step.
    stage : int, optional
        The stage whose layers ``model`` has; by default it has those of all.
    """
    if stage is not None or layout.pp == 1:
        return _gpu_memory(model, layout, gpu, execution, max_tokens, stage or 0)
    parts = [
        _gpu_memory(one.model(model), layout, gpu, execution, max_tokens, one.number)
        for one in stages_of(model, layout.pp)
    ]
    return min(parts, key=lambda part: (part.max_kv_tokens, -part.weight_bytes))


def _gpu_memory(
    model: ModelSpec, layout: Layout, gpu: GpuSpec, execution: Execution, max_tokens: int, stage: int
) -> PlanMemory:
    """Memory of a GPU of one stage."""
    hidden = model.hidden
    is_first, is_last = stage == 0, stage == layout.pp - 1
    vocab_rows = model.padded_vocab(layout.tp) // layout.tp
    linear_bytes = model.sum_layers(lambda kind: kind.weight_bytes(hidden, layout, execution))
    is_tied = model.tie_embeddings and execution.head_dtype == "bf16"
    other = hidden if is_last else 0
    if is_first:
        is_copied = execution.exchange.copies_embedding and layout.dp > 1
        other += (model.padded_vocab(1) if is_copied else vocab_rows) * hidden
    if is_last and not (is_tied and is_first):
        linear_bytes += weight_bytes({"lm_head": vocab_rows * hidden}, execution.of_head())
    other += int(model.sum_layers(lambda kind: kind.other_weights(hidden, layout)))
    held_bytes = int(linear_bytes) + other * ACTIVATION_BYTES
    kv_bytes = model.kv_bytes_per_token(layout, execution.kv_dtype)
    widest = max(kind.activation_width(hidden, layout) for kind in model.kinds)
    activation_bytes = max_tokens * (2 * hidden * model.residual_rows + widest) * ACTIVATION_BYTES
    usable = int(gpu.hbm_bytes * MEMORY_SHARE)
    room = max(0, usable - held_bytes - activation_bytes)
    reserve_bytes, window_bytes = gpu.hbm_bytes - usable, window_kv_bytes(model, layout, execution.kv_dtype)
    return PlanMemory(
        held_bytes,
        kv_bytes,
        activation_bytes,
        reserve_bytes,
        room // kv_bytes,
        model.window or 0,
        window_bytes,
    )


def window_kv_bytes(model: ModelSpec, layout: Layout, kv_dtype: str) -> int:
    """Bytes of ``model.kv_bytes_per_token`` that layers keep within their window alone."""
    return int(
        model.sum_layers(
            lambda kind: kind.kv_bytes_per_token(layout, kv_dtype) if kind.attention.window else 0
        )
    )
