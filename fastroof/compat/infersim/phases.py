"""A prefill and a decode step of a column of scenarios: the parts of a layer, then their sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools, Longs, Reals
from fastroof.compat.infersim import hardware, layers, rows
from fastroof.compat.infersim.layers import Placed
from fastroof.compat.infersim.sizes import state_bytes
from fastroof.compat.infersim.tree import file_path
from fastroof.compiled.compat_infersim import EMPTY_BLOCK, NO_KEY
from fastroof.units import GIB, MS_PER_S, US_PER_S

__all__ = ["Phase", "decode", "prefill"]


ZERO_MFU: Final = "ZeroDivisionError: float division by zero"
NO_KV_DTYPE: Final = "ValueError: min() arg is an empty sequence"
NO_EXPERT_GPUS: Final = "ZeroDivisionError: world_size // tp_size is 0"


@dataclass
class Phase:
    """What one phase has come to so far: a scenario that fails keeps the columns made before."""

    prefix: str
    heads: tuple[Longs, Longs, Longs]
    alive: Bools
    columns: dict[str, tuple[Array, Bools]] = field(default_factory=dict)
    errors: Array = field(init=False)
    fallbacks: dict[str, Bools] = field(default_factory=dict)
    missing_file: Bools = field(init=False)
    missing_experts: Bools = field(init=False)

    def __post_init__(self) -> None:
        self.errors = np.full(len(self.alive), None, object)
        self.missing_file = np.zeros_like(self.alive)
        self.missing_experts = np.zeros_like(self.alive)

    def put(self, **values: Array) -> None:
        """Add columns for the scenarios that are alive."""
        for name, column in values.items():
            self.columns[f"{self.prefix}_{name}"] = column, self.alive.copy()

    def fell_back(self, part: str, where: Bools) -> None:
        """Note a part that no measured row answered for."""
        self.fallbacks[part] = self.fallbacks.get(part, False) | (where & self.alive)

    def fail(self, where: Bools, reason: str | Array) -> None:
        """Give up scenarios that are alive."""
        where = where & self.alive
        self.errors[where] = reason if isinstance(reason, str) else reason[where]
        self.alive = self.alive & ~where


def prefill(p: Placed, scenarios: dict[str, Array], kv_token_bytes: Reals) -> Phase:
    """Time to first token of a step of ``max_prefill_tokens`` on each GPU."""
    phase = Phase("p", _file_heads(p, decode=False), np.ones(len(p.tp), np.bool_))
    model, gdn = p.model, p.model.gdn
    isl, tokens = scenarios["isl"], scenarios["max_prefill_tokens"]
    kind = "mla/prefill" if model.mla else "mha/prefill"
    row = rows.attn_prefill_rows(p.tables, kind, p.device, phase.heads, isl)
    mfu = rows.prefill_mfu_of(p.tables.blocks[kind], row, p.default_mfu)
    # the order of InferSim's operations, here and below: another one differs in the last bit
    core_s = (
        isl
        * (layers.prefill_flops(p, model.mla, isl) / hardware.GFLOP)
        / hardware.CAUSAL_DIVISOR
        / (p.attention_gflops_per_s * mfu)
    )
    load_s = kv_token_bytes * isl / model.num_layers / GIB / p.memory_gb_per_s
    attention_s = _put_attention(phase, row, mfu, core_s, load_s)
    projections_s = _projections(phase, p, tokens)
    if gdn:
        linear_s, linear_projections_s = _linear(phase, p, "prefill", isl, tokens, np.ones_like(isl))
    experts_s = _experts(phase, p, "prefill", tokens)
    before_s, after_s, tp_s = _communication(phase, p, tokens)
    counted: Array = tokens
    if gdn:
        chunks = tokens / isl
        step_s = (
            (attention_s * chunks + projections_s) * model.full_layers
            + (linear_s * chunks + linear_projections_s) * gdn.num_layers
            + experts_s * model.num_layers
            + np.where(p.tp > 1, 2 * tp_s, before_s + after_s) * model.num_layers
        )
    else:
        attention_s = attention_s * np.ceil(tokens / isl)
        overlap = scenarios["tbo"] == 1
        mixed_s, moe_s = ((part / scenarios["sm_ratio"]) for part in (attention_s + projections_s, experts_s))
        two_batches_s = np.maximum(mixed_s, before_s) + np.maximum(mixed_s, after_s)
        two_batches_s = two_batches_s + np.maximum(moe_s, before_s) + np.maximum(moe_s, after_s)
        one_batch_s = attention_s + experts_s + projections_s + (before_s + after_s) + tp_s
        step_s = np.where(overlap, two_batches_s, one_batch_s) * model.num_layers
        counted = np.where(overlap, 2 * tokens, tokens)
    ttft_ms = step_s * MS_PER_S + hardware.PREFILL_OVERHEAD_MS
    _finish(phase, p, "ttft_ms", ttft_ms, "prefill_tgs", counted)
    return phase


def decode(
    p: Placed, scenarios: dict[str, Array], batch: Longs, kv_len: Longs, kv_token_bytes: Reals
) -> Phase:
    """Time per output token of a decode step of ``batch`` requests on each GPU."""
    phase = Phase("d", _file_heads(p, decode=True), np.ones(len(p.tp), np.bool_))
    model, gdn = p.model, p.model.gdn
    kind = "mla/decode" if model.mla else "mha/decode"
    row = rows.attn_decode_rows(p.tables, kind, p.device, phase.heads, scenarios["fp8_kv"], batch, kv_len)
    phase.fail(row == EMPTY_BLOCK, NO_KV_DTYPE)
    mfu = rows.mfu_of(p.tables.blocks[kind], row, p.default_mfu)
    core_s = (
        batch
        * (layers.decode_flops(p, model.mla, model.num_heads, kv_len) / hardware.GFLOP)
        / (p.attention_gflops_per_s * mfu)
    )
    load_s = kv_token_bytes * kv_len * batch / model.num_layers / GIB / p.memory_gb_per_s
    attention_s = _put_attention(phase, row, mfu, core_s, load_s)
    projections_s = _projections(phase, p, batch)
    if gdn:
        linear_s, linear_projections_s = _linear(phase, p, "decode", batch, batch, batch)
    experts_s = _experts(phase, p, "decode", batch)
    before_s, after_s, tp_s = _communication(phase, p, batch)
    counted: Array = batch
    if gdn:
        step_s = (
            (attention_s + projections_s) * model.full_layers
            + (linear_s + linear_projections_s) * gdn.num_layers
            + experts_s * model.num_layers
            + np.where(p.tp > 1, 2 * tp_s, before_s + after_s) * model.num_layers
        )
        tpot_ms = step_s * MS_PER_S + hardware.HYBRID_DECODE_OVERHEAD_MS
    else:
        overlap = scenarios["tbo"] == 1
        mixed_s = attention_s + projections_s
        two_batches_s = 2 * np.maximum(mixed_s, experts_s + before_s + after_s)
        one_batch_s = mixed_s + experts_s + (before_s + after_s) + tp_s
        step_s = np.where(overlap, two_batches_s, one_batch_s) * model.num_layers
        counted = np.where(overlap, 2 * batch, batch)
        tpot_ms = step_s * MS_PER_S + hardware.DECODE_OVERHEAD_MS
    _finish(phase, p, "tpot_ms", tpot_ms, "decode_tgs", counted)
    return phase


def _file_heads(p: Placed, decode: bool) -> tuple[Longs, Longs, Longs]:
    """Numbers in the name of the attention file."""
    mla, shape = p.model.mla, p.tp.shape
    if mla is None:
        return p.heads, p.kv_heads, np.broadcast_to(p.model.head_dim, shape)
    latent = mla.kv_lora_rank if decode else mla.nope_dim
    return p.heads, np.broadcast_to(latent, shape), np.broadcast_to(mla.rope_dim, shape)


def _put_attention(phase: Phase, row: Longs, mfu: Reals, core_s: Reals, load_s: Reals) -> Reals:
    phase.missing_file = phase.alive & (row == NO_KEY)
    phase.fell_back("attention", row < 0)
    phase.fail(mfu == 0, ZERO_MFU)
    attention_s = np.maximum(core_s, load_s)
    phase.put(attn_mfu=mfu, attn_core_s=core_s, kv_load_s=load_s, attn_core_max_s=attention_s)
    return attention_s


def _projections(phase: Phase, p: Placed, tokens: Longs) -> Reals:
    projections = layers.attention_projections_s(p, tokens)
    phase.fell_back("projections", projections.fallback)
    phase.fail(projections.zero_mfu, ZERO_MFU)
    phase.put(attn_others_s=projections.seconds)
    return projections.seconds


def _linear(
    phase: Phase, p: Placed, word: str, queried: Longs, tokens: Longs, requests: Longs
) -> tuple[Reals, Reals]:
    """Core and projections of a gated delta net: its states are read once a request."""
    gdn = p.model.gdn
    assert gdn is not None
    layer = (gdn.conv_kernel, gdn.num_key_heads, gdn.key_head_dim, gdn.num_value_heads, gdn.value_head_dim)
    kind = f"gdn/{word}"
    of_each = tuple(np.broadcast_to(size, queried.shape) for size in layer)
    row = rows.gdn_rows(p.tables, kind, p.device, of_each, queried)
    paths = [
        f"AssertionError: Error: bench_data/{file_path(kind, d, layer)} not exist." for d in p.tables.devices
    ]
    phase.fail(row < 0, np.array(paths, object)[p.device])
    core_us = rows.gdn_us_of(p.tables.blocks[kind], row, queried)
    states_s = state_bytes(gdn) * requests / gdn.num_layers / GIB / p.memory_gb_per_s
    core_s = np.maximum(core_us / US_PER_S, states_s)
    projections = layers.linear_projections_s(p, gdn, tokens)
    phase.put(lin_core_us=core_us, lin_states_s=states_s, lin_core_max_s=core_s)
    phase.fell_back("linear projections", projections.fallback)
    phase.fail(projections.zero_mfu, ZERO_MFU)
    phase.put(lin_others_s=projections.seconds)
    return core_s, projections.seconds


def _experts(phase: Phase, p: Placed, word: str, tokens: Longs) -> Reals:
    model = p.model
    phase.fail(p.world < p.tp, NO_EXPERT_GPUS)
    local_gpus = np.maximum(p.world // p.tp, 1)
    mfu, row = layers.experts_mfu(p, word, tokens, local_gpus)
    if model.moe:
        phase.missing_experts = phase.alive & (row == NO_KEY)
    phase.fell_back("experts" if model.moe else "MLP", row < 0)
    phase.fail(mfu == 0, ZERO_MFU)
    routed_s = layers.experts_flops(p, word, tokens) / (p.gemm_gflops_per_s * mfu)
    load_s = layers.expert_bytes(p) * model.num_experts / local_gpus / GIB / p.memory_gb_per_s
    experts_s: Reals = np.maximum(routed_s, load_s)
    phase.put(moe_mfu=mfu, routed_s=routed_s, moe_load_s=load_s)
    if model.num_shared_experts:
        width = p.intermediate * model.num_shared_experts
        up = layers.gemm_s(p, tokens, model.hidden, 2 * width)
        down = layers.gemm_s(p, tokens, width, model.hidden)
        both = up + down
        phase.fell_back("shared experts", both.fallback)
        phase.fail(both.zero_mfu, ZERO_MFU)
        phase.put(shared_up_s=up.seconds, shared_down_s=down.seconds)
        experts_s = experts_s + both.seconds
    phase.put(moe_s=experts_s)
    return experts_s


def _communication(phase: Phase, p: Placed, tokens: Longs) -> tuple[Reals, Reals, Reals]:
    before_s, after_s = layers.exchange_s(p, tokens, decode=phase.prefix == "d")
    tp_s = layers.tp_allreduce_s(p, tokens)
    phase.put(comm1_s=before_s, comm2_s=after_s, tp_comm_s=tp_s)
    return before_s, after_s, tp_s


def _finish(phase: Phase, p: Placed, time: str, step_ms: Reals, rate: str, tokens: Array) -> None:
    """Time of the step, and its tokens a second and GPU; neither has the phase's prefix."""
    phase.columns[time] = step_ms, phase.alive
    phase.columns[rate] = tokens / p.tp / (step_ms / MS_PER_S), phase.alive
