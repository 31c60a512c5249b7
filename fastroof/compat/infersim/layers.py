"""Times of one layer's parts on one GPU, as InferSim estimates them, for a column of scenarios."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastroof.arrays import Bools, Longs, Reals
from fastroof.compat.infersim import rows
from fastroof.compat.infersim.hardware import GFLOP, GFLOPS_PER_TFLOPS
from fastroof.compat.infersim.model import GatedDeltaNet, InfersimModel, LatentAttention
from fastroof.compat.infersim.tree import InfersimTables
from fastroof.units import GIB

__all__ = ["Placed", "Projected", "place"]


@dataclass(frozen=True, eq=False)
class Placed:
    """A model on the GPUs of a column of scenarios: arrays have an entry a scenario."""

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
    """Time of some GEMMs, and whether one had no measured row, or an MFU of 0."""

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
    """Time of one GEMM, s."""
    k_of_each, n_of_each = np.broadcast_to(k, m.shape), np.broadcast_to(n, m.shape)
    row = rows.gemm_rows(p.tables, p.device, m, k_of_each, n_of_each)
    mfu = rows.mfu_of(p.tables.blocks["gemm"], row, p.default_mfu)
    flops = 2.0 * m * k_of_each * n_of_each
    return Projected(flops / GFLOP / (p.gemm_gflops_per_s * mfu), row < 0, mfu == 0)


def attention_projections_s(p: Placed, m: Longs) -> Projected:
    """GEMMs around full attention, s; MLA's are the absorbed ones in both phases."""
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
    """GEMMs around a gated delta net, s; its two gates cost their share of the first."""
    width = 2 * gdn.key_width + 2 * gdn.value_width
    first = gemm_s(p, m, p.model.hidden, width)
    with_gates = first.seconds * (width + 2 * gdn.num_value_heads) / width
    return Projected(with_gates, first.fallback, first.zero_mfu) + gemm_s(
        p, m, gdn.value_width, p.model.hidden
    )


def prefill_flops(p: Placed, mla: LatentAttention | None, isl: Longs) -> Reals:
    """FLOPs of one query token of prefill attention before the causal divisor; MLA's over all heads."""
    if mla is None:
        return 4.0 * p.heads * p.model.head_dim * isl
    return 2.0 * p.model.num_heads * isl * (mla.nope_dim + mla.rope_dim + mla.v_head_dim)


def decode_flops(p: Placed, mla: LatentAttention | None, heads: Longs | int, kv_len: Longs) -> Reals:
    """FLOPs of one query token of decode attention; MLA attends in the latent space."""
    if mla is None:
        return 4.0 * p.heads * p.model.head_dim * kv_len
    return 2.0 * heads * kv_len * (2 * mla.kv_lora_rank + mla.rope_dim)


def experts_mfu(p: Placed, phase: str, m: Longs, local_gpus: Longs) -> tuple[Reals, Longs]:
    """MFU of the routed experts, or of the dense layer's GEMM, and the row it is from."""
    model, blocks = p.model, p.tables.blocks
    if not model.moe:
        n = 2 * model.intermediate // p.world
        row = rows.gemm_rows(p.tables, p.device, m, np.broadcast_to(model.hidden, m.shape), n)
        return rows.mfu_of(blocks["gemm"], row, p.default_mfu), row
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
    row = rows.grouped_gemm_rows(p.tables, kind, p.device, of_each, m)
    up, down = (rows.mfu_of(blocks[kind], row, p.default_mfu, projection) for projection in (0, 1))
    return np.maximum(up, down), row


def experts_flops(p: Placed, phase: str, m: Longs) -> Reals:
    """FLOPs of the routed experts, in units of 1e9."""
    one_gemm = 2.0 * p.model.hidden * p.intermediate
    if phase == "prefill":
        return one_gemm * m * p.model.topk * 3 / GFLOP
    return m * p.model.topk * 3 / GFLOP * one_gemm


def expert_bytes(p: Placed) -> Reals:
    """Weights of one expert on one GPU, bytes."""
    return p.weight_bytes * 3.0 * p.model.hidden * p.intermediate


def exchange_s(p: Placed, tokens: Longs, decode: bool) -> tuple[Reals, Reals]:
    """Communication before and after the experts, s."""
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
    """All-reduce of a tensor-parallel layer, s."""
    sent_bytes = tokens * float(p.model.hidden) * 2 * 2 * (p.tp - 1) / p.tp
    return sent_bytes / GIB / p.nvlink_gb_per_s
