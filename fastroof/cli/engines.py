"""``fastroof engines``: the engines known by name, how they schedule, and what they add to their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from fastroof.cli.options import Json
from fastroof.cli.output import percent, print_json, print_line, print_records, print_table

if TYPE_CHECKING:
    from fastroof.engines import EngineProfile, KvMemory, MixedAttention, OperatorKernel

_COSTS: Final = {
    "step_us": "step",
    "sequence_us": "sequence",
    "logit_ps": "logit, ps",
    "prefill_us": "step with prefill",
    "prefill_floor_layer_us": "layer at least with prefill",
    "allreduce_us": "all-reduce",
    "layer_us": "layer",
    "prefill_layer_us": "layer with prefill",
    "kernel_us": "kernel",
    "prefill_floor_kernel_us": "kernel at least with prefill without graphs",
}

_ORDERS: Final = {"mixed": "", "prefill_first": ", first"}
_KV_CACHE: Final = {"mean": "as it grows", "full": "whole output"}

EPILOG: Final = """\b
JSON: a list with one object per profile: name, engine, versions, validated (newest version of measured
runs), version, rules (of a narrowed profile; empty here), costs [step_us, sequence_us, logit_ps,
prefill_us, prefill_floor_layer_us, allreduce_us, layer_us, prefill_layer_us, kernel_us,
prefill_floor_kernel_us, residual, layers: architecture, layer_us, versions, evidence], scheduling
[order, chunked_prefill, max_num_batched_tokens, max_num_seqs, async_scheduling,
prefill_schedule_interval, prefill_decode_interval, min_free_slots_delay, pauses: option, versions,
alone; by_card], memory [kv_reservation, room, fraction, context_gib, group_gib, graphs, activation,
sample_bytes, block_tokens, kv_cache, reserve, by_version, ...: how a GPU's memory is divided], kernels
[gemm_smoothing, fp8_scales, shared_experts, latent_attention, marlin, fp8_weight_only, engines,
operators: operator, gpu, format, layout, source, engine, reason, version, dtype, kernel, versions,
architecture, required, shared_experts; mixed_attention: ns, interval_ns, gpu, head_dim, kv_dtype,
reason, evidence; cold_decode, one_attention_call: GPUs; prefill_graphs: multiples, versions, reason,
eager, eager_on, encoders, latent_tokens, sparse_tokens, not_with, is_optional; expert_rows: kernel,
versions, hidden, has_gate, most_tokens], data_parallel [source, lockstep, prompt_tokens, decode_tokens,
graph_tokens, graphs: gpus, tokens, versions, idle_tokens, assignment, balance_steps], layout [ep,
attention, alltoall, ...], lora [ranks, max_loras, fills, gates, embeddings, refused, splits_head, source],
front_end [request_ms, token_us, server_ms, residual, source, evidence: time outside steps], errors [tpot,
ttft, layer_us], cost_share (of the fitted costs, for later versions), fit [costs, given, chosen_on, layers,
left_out: reason, model, gpu, format, versions] or null, evidence.
"""


def engines(as_json: Json = False) -> None:
    """List the engines known by name, and what they add to kernels."""
    from fastroof.engines import engine_names, load_engine

    profiles = [load_engine(name) for name in engine_names()]
    if as_json:
        print_json([asdict(profile) for profile in profiles])
        return
    columns: dict[str, Callable[[EngineProfile], str]] = {
        "engine": lambda one: one.name,
        "versions": lambda one: one.versions if one.engine else "",
        "newest rules": lambda one: one.rule_versions,
        "validated": lambda one: f"to {one.validated}" if one.validated else "",
        "unexplained": lambda one: percent(one.costs.residual or None),
        "prompts": lambda one: (
            ("in chunks" if one.scheduling.chunked_prefill else "whole") + _ORDERS[one.scheduling.order]
        ),
        "tokens a step": lambda one: f"{one.scheduling.max_num_batched_tokens:,}",
        "requests": lambda one: f"{one.scheduling.max_num_seqs:,}",
        "KV cache": lambda one: _KV_CACHE[one.memory.kv_reservation],
        "of memory": lambda one: _room_words(one.memory),
    }
    print_records(
        profiles,
        columns,
        left=("engine", "versions", "newest rules", "validated"),
        least=("KV cache", "requests", "of memory"),
    )
    print_line()
    adds = [(profile.name, us, per) for profile in profiles for us, per in _costs(profile)]
    print_table(("engine", "adds us", "per"), adds, left=("engine", "per"))
    kernels = [(profile.name, kernel) for profile in profiles for kernel in profile.kernels.operators]
    if kernels:
        print_line()
        parts: dict[str, Callable[[tuple[str, OperatorKernel]], str]] = {
            "engine": lambda one: one[0],
            "operator": lambda one: one[1].operator,
            "where": lambda one: _where_words(one[1]),
            "source": lambda one: _source_words(one[1]),
            "version": lambda one: one[1].version,
            "dtype": lambda one: one[1].dtype,
            "kernel": lambda one: one[1].kernel,
        }
        print_records(kernels, parts, left=tuple(parts))
    figures = [(profile.name, one) for profile in profiles for one in profile.kernels.mixed_attention]
    if figures:
        print_line()
        named = ("engine", "decode attention with prefill", "ns per query head and KV token", "within")
        print_table(named, [_mixed_cells(name, one) for name, one in figures], left=named[:2])


def _costs(profile: EngineProfile) -> list[tuple[str, str]]:
    """Return what is added to the kernels, and to what."""
    costs = asdict(profile.costs)
    adds = [(f"{costs[name]:,g}", words) for name, words in _COSTS.items() if costs[name]]
    adds += [(f"{one.layer_us:g}", f"layer of {one.architecture}") for one in profile.costs.layers]
    request_us, token_us, server_us = profile.front_end.times_us
    outside = (
        (request_us, "request, outside steps"),
        (server_us, "request on the API server, outside steps"),
        (token_us, "prompt token, outside steps"),
    )
    adds += [(f"{us:,g}", words) for us, words in outside if us]
    return adds or [("nothing", "")]


def _mixed_cells(name: str, figure: MixedAttention) -> tuple[str, ...]:
    heads = f"heads of {figure.head_dim}" if figure.head_dim else ""
    where = ", ".join(filter(None, (figure.gpu, heads, figure.kv_dtype))) or "everywhere"
    return name, where, f"{figure.ns:g}", " to ".join(f"{end:g}" for end in figure.interval_ns)


def _room_words(memory: KvMemory) -> str:
    """Return the share of a GPU's memory for weights and KV cache."""
    of = {"datasheet": "", "all": " of all", "free": " of free", "static": " before loading"}[memory.room]
    return f"{memory.fraction:g}{of}" if memory.fraction else f"a formula{of}"


def _where_words(kernel: OperatorKernel) -> str:
    layout = [f"{size} {value}" for size, value in kernel.layout]
    parts = (kernel.versions, kernel.gpu, kernel.architecture, kernel.format, *layout)
    return ", ".join(filter(None, parts)) or "everywhere"


def _source_words(kernel: OperatorKernel) -> str:
    return kernel.source or kernel.engine or (f"{kernel.faster} where faster" if kernel.faster else "")
