"""The calls of a dense transformer's step."""

from __future__ import annotations

from fastroof.models.layout import ShardedShape
from fastroof.models.spec import ModelSpec
from fastroof.operators.calls import AllReduce, Elementwise, Gemm, Role, RowOperator
from fastroof.units import ACTIVATION_BYTES, DTYPE_BYTES

__all__ = ["transformer_operators"]


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
    operators: list[RowOperator] = [Elementwise("embedding", "embedding", 1, 2.0 * hidden_bytes)]

    def linear(role: Role, quantise: Role, n: int, k: int) -> None:
        if quantise_inputs:
            row_bytes = k * (ACTIVATION_BYTES + DTYPE_BYTES["fp8"])
            operators.append(Elementwise(quantise, f"{role} quantise", layers, row_bytes))
        operators.append(Gemm(role, role, layers, n, k, dtype))

    operators.append(Elementwise("attention_norm", "attention rmsnorm", layers, 4.0 * hidden_bytes))
    linear("qkv", "qkv_quantise", share.qkv_out, model.hidden)
    if model.qk_norm:
        operators.append(Elementwise("qk_norm", "qk rmsnorm", layers, 2.0 * qk_bytes))
    operators.append(Elementwise("rope", "rope", layers, 2.0 * qk_bytes))
    write_bytes = kv_elements * (ACTIVATION_BYTES + DTYPE_BYTES[kv_dtype])
    operators.append(Elementwise("kv_write", "kv write", layers, write_bytes))
    linear("o", "o_quantise", model.hidden, share.o_in)
    if share.tp > 1:
        name = "attention all-reduce"
        operators.append(AllReduce("attention_allreduce", name, layers, share.tp, hidden_bytes))
    operators.append(Elementwise("mlp_norm", "mlp rmsnorm", layers, 4.0 * hidden_bytes))
    linear("gate_up", "gate_up_quantise", 2 * share.intermediate, model.hidden)
    activation_bytes = 3.0 * share.intermediate * ACTIVATION_BYTES
    operators.append(Elementwise("activation", "silu_and_mul", layers, activation_bytes))
    linear("down", "down_quantise", model.hidden, share.intermediate)
    if share.tp > 1:
        operators.append(AllReduce("mlp_allreduce", "mlp all-reduce", layers, share.tp, hidden_bytes))
    operators.append(Elementwise("final_norm", "final rmsnorm", 1, 4.0 * hidden_bytes))
    operators.append(Gemm("lm_head", "lm_head", 1, share.vocab_rows, model.hidden, "bf16", "sequences"))
    return tuple(operators)
