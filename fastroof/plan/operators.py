"""Which operators a transformer step is made of, as data.

Attention aside, each operator depends on a number of rows alone: the tokens of the step, or its
sequences. An architecture is a list of them; a MoE layer would add operators over tokens, MLA another
attention table. Nothing here knows a latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastroof.config import ModelSpec
from fastroof.config.parallel import ShardedShape
from fastroof.flops import ACTIVATION_BYTES
from fastroof.units import DTYPE_BYTES

__all__ = ["AllReduce", "Elementwise", "Gemm", "RowOperator", "transformer_operators"]

Rows = Literal["tokens", "sequences"]


@dataclass(frozen=True)
class Gemm:
    """A linear layer on one GPU: rows x n x k, ``times`` a step."""

    name: str
    times: int
    n: int
    k: int
    dtype: str
    rows: Rows = "tokens"


@dataclass(frozen=True)
class Elementwise:
    """A kernel that only streams: ``row_bytes`` read and written a row, ``times`` a step."""

    name: str
    times: int
    row_bytes: float
    rows: Rows = "tokens"


@dataclass(frozen=True)
class AllReduce:
    """A sum over the GPUs of the group: ``row_bytes`` a row from each, ``times`` a step."""

    name: str
    times: int
    num_gpus: int
    row_bytes: float
    rows: Rows = "tokens"


RowOperator = Gemm | Elementwise | AllReduce


def transformer_operators(
    model: ModelSpec, share: ShardedShape, dtype: str, kv_dtype: str, *, quantise_inputs: bool
) -> tuple[RowOperator, ...]:
    """Every operator of a dense transformer step but attention, on one GPU of ``share.tp``.

    Parameters
    ----------
    model : ModelSpec
        The whole model.
    share : ShardedShape
        What one GPU holds of it.
    dtype, kv_dtype : str
        dtype of the linear layers' weights and inputs, and of the KV cache.
    quantise_inputs : bool
        Whether each fp8 GEMM is preceded by a kernel that quantises its input; False where the
        measured GEMM includes it.

    Returns
    -------
    tuple of RowOperator
        In the order in which a step's time is summed.

    Notes
    -----
    Compulsory bytes a token: the fused residual-add RMSNorm reads and writes two rows, rotary
    embedding reads and writes queries and keys, the KV write reads bf16 and writes the cache's dtype,
    silu-and-mul reads gate and up and writes one row, quantising reads bf16 and writes fp8. Biases are
    part of the GEMM's epilogue.
    """
    layers = model.num_layers
    hidden_bytes = float(model.hidden * ACTIVATION_BYTES)
    head_bytes = float(model.head_dim * ACTIVATION_BYTES)
    qk_bytes = (share.num_q_heads + share.num_kv_heads) * head_bytes
    kv_elements = 2.0 * share.num_kv_heads * model.head_dim
    operators: list[RowOperator] = [Elementwise("embedding", 1, 2.0 * hidden_bytes)]

    def linear(name: str, n: int, k: int) -> None:
        if quantise_inputs:
            operators.append(
                Elementwise(f"{name} quantise", layers, k * (ACTIVATION_BYTES + DTYPE_BYTES["fp8"]))
            )
        operators.append(Gemm(name, layers, n, k, dtype))

    operators.append(Elementwise("attention rmsnorm", layers, 4.0 * hidden_bytes))
    linear("qkv", share.qkv_out, model.hidden)
    if model.qk_norm:
        operators.append(Elementwise("qk rmsnorm", layers, 2.0 * qk_bytes))
    operators.append(Elementwise("rope", layers, 2.0 * qk_bytes))
    operators.append(
        Elementwise("kv write", layers, kv_elements * (ACTIVATION_BYTES + DTYPE_BYTES[kv_dtype]))
    )
    linear("o", model.hidden, share.o_in)
    if share.tp > 1:
        operators.append(AllReduce("attention all-reduce", layers, share.tp, hidden_bytes))
    operators.append(Elementwise("mlp rmsnorm", layers, 4.0 * hidden_bytes))
    linear("gate_up", 2 * share.intermediate, model.hidden)
    operators.append(Elementwise("silu_and_mul", layers, 3.0 * share.intermediate * ACTIVATION_BYTES))
    linear("down", model.hidden, share.intermediate)
    if share.tp > 1:
        operators.append(AllReduce("mlp all-reduce", layers, share.tp, hidden_bytes))
    operators.append(Elementwise("final rmsnorm", 1, 4.0 * hidden_bytes))
    operators.append(Gemm("lm_head", 1, share.vocab_rows, model.hidden, "bf16", "sequences"))
    return tuple(operators)
