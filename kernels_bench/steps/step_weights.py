"""Random weights of a dense transformer on a device: what a step multiplies by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastroof.models import DenseModel
from fastroof.models.dense import split
from kernels_bench.providers.device import Device, oom_as_memory_error
from kernels_bench.providers.random_inputs import InputMaker
from kernels_bench.steps.step_linear import LinearLayer, random_linear


@dataclass(frozen=True)
class LayerWeights:
    """One layer: linear layers, norms of shape (hidden,), and norms of heads, shape (head_dim,), or None."""

    attention_norm: Any
    qkv: LinearLayer
    q_norm: Any
    k_norm: Any
    o: LinearLayer
    mlp_norm: Any
    gate_up: LinearLayer
    down: LinearLayer


@dataclass(frozen=True)
class StepWeights:
    """A whole model's weights."""

    spec: DenseModel
    # Shape (vocab, hidden).
    embedding: Any
    layers: tuple[LayerWeights, ...]
    # Shape (hidden,).
    final_norm: Any
    # Weight of shape (padded vocab, hidden), never in fp8. Padded rows are computed, as in a serving engine,
    # and hold random numbers like the others.
    lm_head: LinearLayer


def random_weights(
    spec: DenseModel, device: Device, dtype: str, seed: int, weights: str = "bf16"
) -> StepWeights:
    """Make a model's weights."""
    make = InputMaker(device, seed)

    def linear(outputs: int, inputs: int, has_bias: bool, *, gated: bool = False) -> LinearLayer:
        bias = make.normal(outputs, dtype=dtype) if has_bias else None
        return random_linear(make, outputs, inputs, dtype, weights, bias, gated=gated)

    def norm(width: int) -> Any:
        return 1.0 + 0.1 * make.normal(width, dtype=dtype)

    share = split(spec, 1)
    with oom_as_memory_error():
        return StepWeights(
            spec,
            embedding=make.normal(spec.vocab, spec.hidden, dtype=dtype),
            layers=tuple(
                LayerWeights(
                    attention_norm=norm(spec.hidden),
                    qkv=linear(share.qkv_out, spec.hidden, spec.qkv_bias),
                    q_norm=norm(spec.head_dim) if spec.qk_norm else None,
                    k_norm=norm(spec.head_dim) if spec.qk_norm else None,
                    o=linear(spec.hidden, share.o_in, spec.o_bias),
                    mlp_norm=norm(spec.hidden),
                    gate_up=linear(2 * share.intermediate, spec.hidden, spec.mlp_bias),
                    down=linear(spec.hidden, share.intermediate, spec.mlp_bias, gated=True),
                )
                for _ in range(spec.num_layers)
            ),
            final_norm=norm(spec.hidden),
            lm_head=random_linear(make, share.vocab_rows, spec.hidden, dtype, "bf16", None),
        )
