"""What an engine leaves of a GPU's memory for KV cache, by the rule of its version."""

from __future__ import annotations

from typing import Final, NamedTuple

from fastroof.config import GpuSpec
from fastroof.engines import KvMemory
from fastroof.engines.memory import ModelKind
from fastroof.engines.memory_by_card import GraphKind, first_row
from fastroof.memory.plan_memory import PlanMemory
from fastroof.models import Layout
from fastroof.units import GIB

VISIBLE_SHARE: Final = 0.99
"""Share of the datasheet's memory that CUDA reports.

79.10 to 79.33 of 80 GiB on H100 and A100, 139.81 of 141 on H200, 44.42 of 44.99 on L40S, 94.97 of 95.59 on
RTX PRO 6000 (engine logs in bench_data/kv_room.csv): 0.987 to 0.994.
"""


class Footprint(NamedTuple):
    """What the weights and the largest step of a stage take, bytes; logits are entries."""

    weight_bytes: int
    working_bytes: int
    logits: int
    kind: ModelKind = ModelKind()
    sends: bool = False
    vision: tuple[int, int] = (0, 0)
    """Layers and width of a vision encoder."""
    workspace_bytes: int = 0
    """Buffers that stay next to the weights."""
    peak_bytes: int = 0
    """Logits of an indexer next to the working set."""


def vision_share(rule: KvMemory, layers: int, hidden: int) -> float:
    """Return the factor of SGLang's default fraction with a vision encoder of some layers and width."""
    if rule.reserve is None or not layers or rule.reserve.vision_share >= 1.0:
        return 1.0
    size = layers * hidden**2 / (24 * 1024**2)
    return rule.reserve.vision_share * min(max(1.0 - 0.1 * (size - 1.0), 0.8), 1.05)


def _static_fraction(rule: KvMemory, gpu: GpuSpec, layout: Layout, held: Footprint, tokens: int) -> float:
    """Return the share of the memory free before loading that weights and KV cache may take."""
    fraction, reserve = rule.fraction, rule.reserve
    if not fraction and reserve is not None:
        if rule.ranks_share_tokens and layout.dp > 1:
            # the option is of all ranks
            tokens = max(
                tokens, min(tokens * layout.dp, rule.default_limits(gpu.name, gpu.hbm_bytes, 0, 0)[0])
            )
        reserved = reserve.bytes(
            gpu.hbm_bytes,
            tokens,
            layout.tp,
            layout.pp,
            layout.dp,
            latent=held.kind.is_latent,
            alltoall=held.sends,
        )
        fraction = max(1 - reserved / gpu.hbm_bytes, 0.0) * vision_share(rule, *held.vision)
    return fraction * (rule.other_share if gpu.name in rule.other_share_gpus else 1.0)


def left_for_kv(rule: KvMemory, gpu: GpuSpec, layout: Layout, held: Footprint, tokens: int) -> PlanMemory:
    """Return a GPU's memory by use, without its blocks; ``kv_cache_bytes`` is below 0 if it is too small."""
    gpu_bytes, working, weights = gpu.hbm_bytes, held.working_bytes, held.weight_bytes
    if rule.room == "datasheet":
        usable = int(gpu_bytes * rule.fraction)
        left, reserve = usable - weights - working, gpu_bytes - usable
        return PlanMemory(
            weights, 0, working, reserve, 0,
            total_bytes=gpu_bytes, requested_bytes=usable, forward_bytes=working, kv_cache_bytes=left,
        )  # fmt: skip
    visible = int(gpu_bytes * VISIBLE_SHARE)
    context = rule.context_bytes(
        gpu.nvlink_bytes_per_s, layout.world_size, has_experts=bool(held.kind.expert_format)
    )
    if rule.room == "static":
        budget = int((visible - context) * _static_fraction(rule, gpu, layout, held, tokens))
        left = round(rule.cache_gib * GIB) if rule.cache_gib else budget - weights
        reserve = gpu_bytes - context - weights - max(left, 0)
        return PlanMemory(
            weights, 0, 0, reserve, 0,
            context_bytes=context, total_bytes=visible, requested_bytes=budget, kv_cache_bytes=left,
        )  # fmt: skip
    is_compressed = rule.compressed_activation and "compressed" in held.kind.kinds
    activation = rule.compressed_activation if is_compressed else rule.activation
    forward = round(activation * working) + held.peak_bytes
    sampler = round(rule.sample_bytes * held.logits)
    extra = first_row(rule.run_extras, gpu, held.kind.architecture)
    run = max(forward, sampler) + round(rule.decoder_bytes * held.logits)
    run += 0 if extra is None else round(extra.gib * GIB)
    of_graphs = GraphKind() if rule.graphs is None else rule.graphs.of_model(gpu, held.kind)
    graphs = round(of_graphs.gib * GIB)
    used = weights + held.workspace_bytes + run + context + graphs
    if rule.room == "all":
        budget = int(visible * rule.fraction)
        left, reserve = budget - used, gpu_bytes - budget
    else:
        budget = int((visible - used) * rule.fraction)
        left, reserve = budget, max(0, gpu_bytes - used - max(budget, 0))
    if rule.cache_gib:
        left = round(rule.cache_gib * GIB)
        reserve = max(gpu_bytes - used - left, 0)
    high = max(of_graphs.high_gib * GIB, of_graphs.high_share * max(left, 0))
    return PlanMemory(
        weights, 0, run, reserve, 0,
        context_bytes=context, total_bytes=visible, requested_bytes=budget, forward_bytes=forward,
        sampler_bytes=sampler, graphs_bytes=graphs, graphs_low_bytes=round(of_graphs.low_gib * GIB),
        graphs_high_bytes=round(high), kv_cache_bytes=left, workspace_bytes=held.workspace_bytes,
    )  # fmt: skip
