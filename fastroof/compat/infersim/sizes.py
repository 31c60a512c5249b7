"""Memory and FLOPs that InferSim prints for a model on its GPUs."""

from __future__ import annotations

import numpy as np

from fastroof.arrays import Array, Reals
from fastroof.compat.infersim.hardware import ACTIVATIONS_GIB, GFLOP, RUNTIME_GIB
from fastroof.compat.infersim.layers import Placed, decode_flops, expert_bytes
from fastroof.compat.infersim.model import GatedDeltaNet
from fastroof.units import GIB, MS_PER_S

__all__ = ["model_sizes", "state_bytes"]


CONV_STATE_BYTES = 2
SSM_STATE_BYTES = 4


def model_sizes(p: Placed, scenarios: dict[str, Array]) -> dict[str, Array]:
    """Columns of sizes and FLOPs, by the names that the result has."""
    model, gdn = p.model, p.model.gdn
    isl, osl = scenarios["isl"], scenarios["osl"]
    from_targets = np.ceil(scenarios["target_tgs"] * scenarios["target_tpot"] / MS_PER_S).astype(np.int64)
    batch = np.where(scenarios["decode_bs"] > 0, scenarios["decode_bs"], from_targets)
    kv_len = isl + osl // 2
    params_gib = _params_gib(p)
    kv_gib = p.memory_gib - params_gib - RUNTIME_GIB - ACTIVATIONS_GIB
    kv_token_bytes = _kv_bytes_per_token(p)
    a_request = kv_gib * GIB / batch
    if gdn:
        fits = ~(kv_token_bytes * (isl + osl) + state_bytes(gdn) > a_request)
    else:
        fits = ~(kv_token_bytes > a_request / (isl + osl))
    active = model.num_shared_experts + model.topk
    return {
        "params_per_gpu_gib": params_gib,
        "kvcache_mem_gib": kv_gib,
        "kvcache_bytes_per_token": kv_token_bytes,
        "target_bs": batch,
        "avg_context_len": kv_len,
        "kv_fits": fits.astype(np.int64),
        "flops_attn_core_g": decode_flops(p, model.mla, p.heads, kv_len) / GFLOP,
        "flops_moe_g": active * 3.0 * 2 * model.hidden * p.intermediate / GFLOP,
        "flops_others_g": _projection_flops(p) / GFLOP,
    }


def state_bytes(gdn: GatedDeltaNet) -> int:
    """Bytes of one request's recurrent states, in all linear layers."""
    conv = (gdn.value_width + 2 * gdn.key_width) * (gdn.conv_kernel - 1) * CONV_STATE_BYTES
    recurrent = gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim * SSM_STATE_BYTES
    return gdn.num_layers * (conv + recurrent)


def _params_gib(p: Placed) -> Reals:
    """Weights on one GPU, GiB: no embeddings, LM head, leading dense layers or rotary part of MLA's KV."""
    model, mla, gdn = p.model, p.model.mla, p.model.gdn
    hidden = float(model.hidden)
    if mla is None:
        attention = p.weight_bytes * hidden * model.head_dim * (2 * p.heads + 2 * p.kv_heads)
    else:
        attention = p.weight_bytes * (
            hidden * mla.q_lora_rank
            + mla.q_lora_rank * p.heads * (mla.nope_dim + mla.rope_dim)
            + hidden * mla.kv_lora_rank
            + mla.kv_lora_rank * p.heads * (mla.nope_dim + mla.v_head_dim)
            + hidden * p.heads * mla.v_head_dim
        )
    spread = np.where(p.tp == 1, model.num_experts / p.world, model.num_experts)
    experts: Reals = expert_bytes(p) * (model.num_shared_experts + spread)
    if gdn is None:
        total: Reals = attention + experts
        return total / GIB * model.num_layers
    projections = (
        p.weight_bytes * hidden * (2 * gdn.key_width + 2 * gdn.value_width + 2 * gdn.num_value_heads)
    )
    linear = projections + gdn.conv_kernel * (2 * gdn.key_width + gdn.value_width)
    total = experts * model.num_layers + model.full_layers * attention + gdn.num_layers * linear
    return total / GIB


def _kv_bytes_per_token(p: Placed) -> Reals:
    """Bytes of one token's KV in all layers; MLA's is not divided by tp."""
    model, mla = p.model, p.model.mla
    if mla is None:
        total = 2.0 * model.num_layers * p.kv_heads * model.head_dim * p.kv_bytes
    else:
        total = float(model.num_layers) * (mla.kv_lora_rank + mla.rope_dim) * p.kv_bytes
    return total / model.num_layers * model.full_layers if model.gdn else total


def _projection_flops(p: Placed) -> Reals:
    """FLOPs of one token in the GEMMs around full attention."""
    model, mla = p.model, p.model.mla
    hidden = float(model.hidden)
    if mla is None:
        return 2 * (hidden * (p.heads + 2 * p.kv_heads) * model.head_dim + p.heads * model.head_dim * hidden)
    return 2 * (
        hidden * mla.q_lora_rank
        + mla.q_lora_rank * p.heads * (mla.nope_dim + mla.rope_dim)
        + hidden * (mla.kv_lora_rank + mla.rope_dim)
        + p.heads * mla.nope_dim * mla.kv_lora_rank
        + p.heads * mla.kv_lora_rank * mla.v_head_dim
        + p.heads * mla.v_head_dim * hidden
    )
