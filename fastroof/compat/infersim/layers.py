"""Times of one layer's parts on one GPU, as InferSim estimates them, for a column of scenarios."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastroof.arrays import Array, Bools, Longs, Reals
from fastroof.compat.infersim.model import (
    ACTIVATIONS_GIB,
    GFLOP,
    GFLOPS_PER_TFLOPS,
    RUNTIME_GIB,
    GatedDeltaNet,
    InfersimModel,
    LatentAttention,
)
from fastroof.compat.infersim.tree import InfersimTables
from fastroof.units import GIB, MS_PER_S


@dataclass(frozen=True, eq=False)
class Placed:
    """A model on the GPUs of a column of scenarios; arrays have one entry per scenario."""

    tables: InfersimTables
    model: InfersimModel
    device: Longs
    world: Longs
    nodes: Longs
    tp: Longs
    deepep: Bools
    heads: Longs
    kv_heads: Longs
    intermediate: Longs
    weight_bytes: Longs
    kv_bytes: Longs
    gemm_gflops_per_s: Reals
    attention_gflops_per_s: Reals
    default_mfu: Reals
    memory_gib: Reals
    memory_gb_per_s: Reals
    nvlink_gb_per_s: Reals
    rdma_gb_per_s: Reals


@dataclass(frozen=True, eq=False)
class Projected:
    """Time of some GEMMs, and whether any had no measured row or an MFU of 0."""

    seconds: Reals
    fallback: Bools
    zero_mfu: Bools

    def __add__(self, other: Projected) -> Projected:
        return Projected(
            self.seconds + other.seconds, self.fallback | other.fallback, self.zero_mfu | other.zero_mfu
        )


def place(tables: InfersimTables, model: InfersimModel, device: Longs, scenarios: dict[str, Longs]) -> Placed:
    """Split a model over the GPUs of each scenario."""
    tp = scenarios["tp_size"]
    fp8_gemm = scenarios["fp8_gemm"] == 1
    fp16_peak, fp8_peak = (tables.hardware(name)[device] for name in ("fp16_tflops", "fp8_tflops"))
    return Placed(
        tables,
        model,
        device,
        world=scenarios["world_size"],
        nodes=scenarios["num_nodes"],
        tp=tp,
        deepep=scenarios["deepep"] == 1,
        heads=model.num_heads // tp,
        kv_heads=model.num_kv_heads // tp,
        intermediate=model.intermediate // tp,
        weight_bytes=np.where(fp8_gemm, 1, 2),
        kv_bytes=np.where(scenarios["fp8_kv"] == 1, 1, 2),
        gemm_gflops_per_s=np.where(fp8_gemm, fp8_peak, fp16_peak) * GFLOPS_PER_TFLOPS,
        attention_gflops_per_s=fp16_peak * GFLOPS_PER_TFLOPS,
        **{
            name: tables.hardware(name)[device]
            for name in (
                "default_mfu", "memory_gib", "memory_gb_per_s", "nvlink_gb_per_s", "rdma_gb_per_s",
            )
        },
    )  # fmt: skip


def gemm_s(p: Placed, m: Longs, k: Longs | int, n: Longs | int) -> Projected:
    """Return the time of one GEMM, s."""
    k_of_each, n_of_each = np.broadcast_to(k, m.shape), np.broadcast_to(n, m.shape)
    row = p.tables.rows("gemm", (p.device, k_of_each, n_of_each), (m,))
    mfu = p.tables.mfu("gemm", row, p.default_mfu)
    flops = 2.0 * m * k_of_each * n_of_each
    return Projected(flops / GFLOP / (p.gemm_gflops_per_s * mfu), row < 0, mfu == 0)


def attention_projections_s(p: Placed, m: Longs) -> Projected:
    """Return the time of the GEMMs around full attention, s; MLA's are the absorbed ones in both phases."""
    hidden, mla = p.model.hidden, p.model.mla
    if mla is None:
        width = p.model.head_dim
        return gemm_s(p, m, hidden, (p.heads + 2 * p.kv_heads) * width) + gemm_s(
            p, m, p.heads * width, hidden
        )
    return (
        gemm_s(p, m, hidden, mla.q_lora_rank)
        + gemm_s(p, m, mla.q_lora_rank, p.heads * (mla.nope_dim + mla.rope_dim))
        + gemm_s(p, m, hidden, mla.kv_lora_rank + mla.rope_dim)
        + gemm_s(p, m, p.heads * mla.nope_dim, mla.kv_lora_rank)
        + gemm_s(p, m, p.heads * mla.kv_lora_rank, mla.v_head_dim)
        + gemm_s(p, m, p.heads * mla.v_head_dim, hidden)
    )


def linear_projections_s(p: Placed, gdn: GatedDeltaNet, m: Longs) -> Projected:
    """Return the time of the GEMMs around a gated delta net, s; its two gates cost a share of the first."""
    width = 2 * gdn.key_width + 2 * gdn.value_width
    first = gemm_s(p, m, p.model.hidden, width)
    with_gates = first.seconds * (width + 2 * gdn.num_value_heads) / width
    return Projected(with_gates, first.fallback, first.zero_mfu) + gemm_s(
        p, m, gdn.value_width, p.model.hidden
    )


def prefill_flops(p: Placed, mla: LatentAttention | None, isl: Longs) -> Reals:
    """Return the FLOPs per query token of prefill attention before the causal divisor; MLA over all heads."""
    if mla is None:
        return 4.0 * p.heads * p.model.head_dim * isl
    return 2.0 * p.model.num_heads * isl * (mla.nope_dim + mla.rope_dim + mla.v_head_dim)


def decode_flops(p: Placed, mla: LatentAttention | None, heads: Longs | int, kv_len: Longs) -> Reals:
    """Return the FLOPs per query token of decode attention; MLA attends in the latent space."""
    if mla is None:
        return 4.0 * p.heads * p.model.head_dim * kv_len
    return 2.0 * heads * kv_len * (2 * mla.kv_lora_rank + mla.rope_dim)


def experts_mfu(p: Placed, phase: str, m: Longs, local_gpus: Longs) -> tuple[Reals, Longs]:
    """Return the MFU of the routed experts, or of the dense layer's GEMM, and its row."""
    model = p.model
    if not model.moe:
        key = p.device, np.broadcast_to(model.hidden, m.shape), 2 * model.intermediate // p.world
        row = p.tables.rows("gemm", key, (m,))
        return p.tables.mfu("gemm", row, p.default_mfu), row
    kind = f"grouped_gemm/{phase}"
    layer = (
        model.num_experts,
        p.world,
        model.num_experts // local_gpus,
        model.topk,
        model.hidden,
        p.intermediate,
    )
    of_each = tuple(np.broadcast_to(size, m.shape) for size in layer)
    row = p.tables.rows(kind, (p.device, *of_each), (m,))
    up, down = (p.tables.mfu(kind, row, p.default_mfu, projection) for projection in (0, 1))
    return np.maximum(up, down), row


def experts_flops(p: Placed, phase: str, m: Longs) -> Reals:
    """Return the FLOPs of the routed experts, in units of 1e9."""
    one_gemm = 2.0 * p.model.hidden * p.intermediate
    if phase == "prefill":
        return one_gemm * m * p.model.topk * 3 / GFLOP
    return m * p.model.topk * 3 / GFLOP * one_gemm


def expert_bytes(p: Placed) -> Reals:
    """Return the weights of one expert on one GPU, bytes."""
    return p.weight_bytes * 3.0 * p.model.hidden * p.intermediate


def exchange_s(p: Placed, tokens: Longs, decode: bool) -> tuple[Reals, Reals]:
    """Return the communication time before and after the experts, s."""
    network = np.where(p.nodes > 1, p.rdma_gb_per_s, p.nvlink_gb_per_s)

    def sent(count: Reals | Longs, element_bytes: int, gb_per_s: Reals) -> Reals:
        return count * float(p.model.hidden) * element_bytes / GIB / gb_per_s

    times = []
    for element_bytes in (1, 2):
        if decode:
            through_deepep = sent(tokens * p.model.topk, element_bytes, network)
        else:
            across = sent(tokens * (p.nodes - 1), element_bytes, p.rdma_gb_per_s)
            through_deepep = across + sent(tokens, element_bytes, p.nvlink_gb_per_s)
        gathered = sent(tokens * p.world, 2, network)
        times.append(np.where(p.world > 1, np.where(p.deepep, through_deepep, gathered), 0.0))
    return times[0], times[1]


def tp_allreduce_s(p: Placed, tokens: Longs) -> Reals:
    """Return the all-reduce time of a tensor-parallel layer, s."""
    sent_bytes = tokens * float(p.model.hidden) * 2 * 2 * (p.tp - 1) / p.tp
    return sent_bytes / GIB / p.nvlink_gb_per_s


CONV_STATE_BYTES = 2
SSM_STATE_BYTES = 4


def model_sizes(p: Placed, scenarios: dict[str, Array]) -> dict[str, Array]:
    """Return columns of sizes and FLOPs, by their names in the result."""
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
    """Return the bytes of one request's recurrent states, in all linear layers."""
    conv = (gdn.value_width + 2 * gdn.key_width) * (gdn.conv_kernel - 1) * CONV_STATE_BYTES
    recurrent = gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim * SSM_STATE_BYTES
    return gdn.num_layers * (conv + recurrent)


def _params_gib(p: Placed) -> Reals:
    """Return the weights on one GPU, GiB: no embeddings, LM head, leading dense layers or rotary MLA KV."""
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
    """Return the bytes of one token's KV in all layers; MLA's is not divided by tp."""
    model, mla = p.model, p.model.mla
    if mla is None:
        total = 2.0 * model.num_layers * p.kv_heads * model.head_dim * p.kv_bytes
    else:
        total = float(model.num_layers) * (mla.kv_lora_rank + mla.rope_dim) * p.kv_bytes
    return total / model.num_layers * model.full_layers if model.gdn else total


def _projection_flops(p: Placed) -> Reals:
    """Return the FLOPs of one token in the GEMMs around full attention."""
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
