"""Random weights of a dense transformer on a device: what a step multiplies by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastroof.models import DenseModel
from fastroof.models.dense import split
from kernels_bench.providers.device import Device, oom_as_memory_error
from kernels_bench.providers.random_inputs import InputMaker

__all__ = ["LayerWeights", "StepWeights", "random_weights"]


@dataclass(frozen=True)
class LayerWeights:
    """One layer: projections of shape (outputs, inputs), their biases or None, norms of shape (hidden,)."""

    attention_norm: Any
    qkv: Any
    qkv_bias: Any
    o: Any
    o_bias: Any
    mlp_norm: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any


@dataclass(frozen=True)
class StepWeights:
    """A whole model's weights.

    Attributes
    ----------
    spec : DenseModel
        Its sizes.
    embedding : tensor
        Shape (vocab, hidden).
    layers : tuple of LayerWeights
        In order.
    final_norm : tensor
        Shape (hidden,).
    lm_head : tensor
        Shape (padded vocab, hidden). Padded rows are computed, as in a serving engine, and hold random
        numbers like the others.
    """

    spec: DenseModel
    embedding: Any
    layers: tuple[LayerWeights, ...]
    final_norm: Any
    lm_head: Any


def random_weights(spec: DenseModel, device: Device, dtype: str, seed: int) -> StepWeights:
    """Make a model's weights.

    Parameters
    ----------
    spec : DenseModel
        The model.
    device : Device
        Where they live.
    dtype : str
        Their dtype.
    seed : int
        Seed of the numbers.

    Returns
    -------
    StepWeights
        Linear layers keep activations of the order of one through any number of layers.

    Raises
    ------
    MemoryError
        If the device cannot hold them.
    """
    make = InputMaker(device, seed)

    def linear(outputs: int, inputs: int) -> Any:
        weight = make.normal(outputs, inputs, dtype=dtype)
        weight *= inputs**-0.5
        return weight

    def norm() -> Any:
        return 1.0 + 0.1 * make.normal(spec.hidden, dtype=dtype)

    def bias(width: int, has_bias: bool) -> Any:
        return make.normal(width, dtype=dtype) if has_bias else None

    share = split(spec, 1)
    with oom_as_memory_error():
        return StepWeights(
            spec,
            embedding=make.normal(spec.vocab, spec.hidden, dtype=dtype),
            layers=tuple(
                LayerWeights(
                    attention_norm=norm(),
                    qkv=linear(share.qkv_out, spec.hidden),
                    qkv_bias=bias(share.qkv_out, spec.qkv_bias),
                    o=linear(spec.hidden, share.o_in),
                    o_bias=bias(spec.hidden, spec.o_bias),
                    mlp_norm=norm(),
                    gate_up=linear(2 * share.intermediate, spec.hidden),
                    gate_up_bias=bias(2 * share.intermediate, spec.mlp_bias),
                    down=linear(spec.hidden, share.intermediate),
                    down_bias=bias(spec.hidden, spec.mlp_bias),
                )
                for _ in range(spec.num_layers)
            ),
            final_norm=norm(),
            lm_head=linear(share.vocab_rows, spec.hidden),
        )
