"""Why the methods differ: every known cause as data, with its condition, size and sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fastroof.compat.compare_steps import COMPONENTS, Difference, MethodTime

TOLD_FROM: Final = 0.1
"""Differences from this share of fastroof's time on are explained."""
MENTIONED_FROM: Final = 0.02
"""Causes are reported from this share of fastroof's component on."""


class Cause(NamedTuple):
    """One known cause of a difference."""

    method: str
    component: str
    name: str
    holds: str
    us: str
    sentence: str


def _v2(component: str, name: str, holds: str, us: str, sentence: str) -> Cause:
    return Cause("roofline_v2", component, name, holds, us, sentence)


def _infersim(component: str, name: str, holds: str, us: str, sentence: str) -> Cause:
    return Cause("infersim", component, name, holds, us, sentence)


ROOFLINE_V1: Final = (
    Cause("roofline_v1", "linear", "one MFU", "always", "linear_us",
        "every GEMM of a {phase} has the fitted MFU {mfu:g}, whatever its shape; tp scales it by a power"),
    Cause("roofline_v1", "attention", "vector peak", "always", "attention_us",
        "attention runs at {vector:g} of the peak; no kernel was measured"),
    Cause("roofline_v1", "communication", "no all-reduce", "split", "communication_us",
        "it has no all-reduce"),
    Cause("roofline_v1", "lm_head", "no LM head", "always", "lm_head_us", "it has no LM head"),
    Cause("roofline_v1", "elementwise", "no norms", "always", "elementwise_us",
        "it has no norms, rotary embedding, KV write or activation"),
    Cause("roofline_v1", "memory", "bytes of the step", "always", "memory_us",
        "the step takes at least its bytes at {bandwidth:g} of the peak bandwidth"),
)  # fmt: skip

ROOFLINE_V2: Final = (
    _v2("linear", "weights floor", "always", "linear_floor_us",
        "no GEMM is faster than its weights at {tb_per_s:.2f} TB/s, the peak times its bandwidth factor"),
    _v2("linear", "larger GEMM", "unmeasured_pairs", "linear_mfu_us",
        "k x n of {pairs} was not measured: the next larger measured one provides its MFU"),
    _v2("linear", "MFU between rows", "unmeasured_m", "linear_mfu_us",
        "between the measured m it interpolates MFU, not time, at m = {m}"),
    _v2("linear", "tables", "given_tree", "linear_mfu_us",
        "its tree's GEMM MFUs mean {linear_mfu:.4f}, where fastroof's times mean {linear_effective_mfu:.4f}; "
        "the published H100 tree has FP8 kernels' MFUs of 1979 TFLOP/s"),
    _v2("linear", "head_dim", "other_head_dim", "linear_head_dim_us",
        "it takes hidden / heads = {its_dim} for the head_dim, which is {own_dim}"),
    _v2("linear", "separate GEMMs", "always", "apart_us",
        "q, k, v, gate and up are separate GEMMs; an engine fuses them into two"),
    _v2("linear", "TP scaling", "split", "linear_tp_us",
        "un-split GEMMs are timed and divided by tp = {tp}, regardless of the time of a GPU's smaller GEMMs"),
    _v2("attention", "causal factor", "causal", "causal_us",
        "causal FLOPs are the square's / 1.8, and the MFUs in its files count half of the square: 11 % more"),
    _v2("attention", "bucket", "bucketed", "bucket_us",
        "{tokens} tokens take the MFU of the next power of two from 512, {bucket}"),
    _v2("attention", "head_dim", "other_head_dim", "attention_head_dim_us",
        "it takes hidden / heads = {its_dim} for the head_dim, which is {own_dim}"),
    _v2("attention", "nearest heads", "other_shape", "attention_mfu_us",
        "no table for heads {wanted}: the MFU {attention_mfu:.4f} is that of {shape}, and fastroof's time "
        "means {effective_mfu:.4f}"),
    _v2("attention", "nearest tp", "other_tp", "attention_mfu_us",
        "no decode table of {wanted} at tp {tp}: the MFU {attention_mfu:.4f} is that of tp {its_tp}, and "
        "fastroof's time means {effective_mfu:.4f}"),
    _v2("attention", "hole in the grid", "hole", "attention_mfu_us",
        "a neighbouring cell was not measured and counts as MFU 0: {attention_mfu:.4f}, where fastroof's "
        "time means {effective_mfu:.4f}"),
    _v2("attention", "MFU between cells", "between", "attention_mfu_us",
        "MFU is averaged between measured cells: {attention_mfu:.4f}, where fastroof's time means "
        "{effective_mfu:.4f}"),
    _v2("attention", "tables", "given_tree", "attention_mfu_us",
        "its tree has MFU {attention_mfu:.4f}, where fastroof's time means {effective_mfu:.4f}"),
    _v2("attention", "TP scaling", "split", "attention_tp_us",
        "attention over all heads is timed and divided by tp = {tp}"),
    _v2("communication", "no all-reduce", "split", "no_communication_us", "it has no all-reduce"),
    _v2("lm_head", "no LM head", "always", "no_lm_head_us", "it has no LM head"),
    _v2("elementwise", "no norms", "always", "no_elementwise_us",
        "it has no norms, rotary embedding, KV write or activation"),
    _v2("memory", "bytes of the step", "always", "memory_us",
        "the step takes the time of all its bytes at {tb_per_s:.2f} TB/s if that is longer than its FLOPs"),
    _v2("overhead", "overhead per layer", "always", "overhead_us",
        "it adds {layer_overhead_us:g} us x {layers} layers / tp {tp}; fastroof's `kernels` engine "
        "adds none"),
)  # fmt: skip

INFERSIM: Final = (
    _infersim("linear", "weights floor", "always", "linear_floor_us",
        "the MLP takes at least its weights at {memory_gb_per_s:.0f} GiB/s, 0.8 of the datasheet's GB/s"),
    _infersim("linear", "peak", "always", "linear_peak_us",
        "its TFLOP/s has 1024 GFLOP/s: the peak is {its_gemm_peak_tflops:.1f}, not {gemm_peak_tflops:.1f}"),
    _infersim("linear", "one MFU for the MLP", "always", "one_mfu_us",
        "down has the MFU that was looked up for gate and up"),
    _infersim("linear", "larger GEMM", "unmeasured_pairs", "linear_mfu_us",
        "k x n of {pairs} was not measured: the next larger one has MFU {linear_mfu:.4f} on average "
        "where fastroof's times mean {linear_effective_mfu:.4f}"),
    _infersim("linear", "MFU of the row below", "linear_rounded", "linear_mfu_us",
        "MFU is that of the largest measured m below {m}, to 3 decimals: {linear_mfu:.4f} on average, where "
        "fastroof's times mean {linear_effective_mfu:.4f}"),
    _infersim("linear", "default MFU", "linear_default", "linear_mfu_us",
        "no measured row for {default_parts}: the default MFU {default_mfu:g} is used, where fastroof's "
        "times mean {linear_effective_mfu:.4f}"),
    _infersim("linear", "MFU of another format", "linear_other_format", "linear_mfu_us",
        "its tree has the MFUs of {its_dtype} kernels, {linear_mfu:.4f} on average, and applies them to the "
        "{dtype} peak, where fastroof's times mean {linear_effective_mfu:.4f}"),
    _infersim("linear", "tables", "linear_given_tree", "linear_mfu_us",
        "its tree has MFU {linear_mfu:.4f} on average, where fastroof's times mean "
        "{linear_effective_mfu:.4f}"),
    _infersim("experts", "weights floor", "expert_floored", "expert_floor_us",
        "the weights of all {local_experts} experts of a GPU at {memory_gb_per_s:.0f} GiB/s take "
        "{expert_load_us:,.0f} us, whichever its tokens reach, their FLOPs {expert_core_us:,.0f} us: the "
        "longer counts"),
    _infersim("experts", "peak", "always", "expert_peak_us",
        "its TFLOP/s has 1024 GFLOP/s: the peak is {its_gemm_peak_tflops:.1f}, not {gemm_peak_tflops:.1f}"),
    _infersim("experts", "one MFU for the projections", "always", "expert_one_mfu_us",
        "gate, up and down all take the larger MFU of up, {up_mfu:.3f}, and down, {down_mfu:.3f}"),
    _infersim("experts", "default MFU", "expert_default", "expert_tree_us",
        "no row of this layer and number of GPUs for {m} tokens per GPU: the default MFU {default_mfu:g}, "
        "where fastroof's time means {expert_effective_mfu:.4f}"),
    _infersim("experts", "MFU of one row", "expert_row", "expert_row_us",
        "{m} tokens per GPU take the MFU of the row of {row_tokens}, {expert_row_mfu:.4f} by its time, where "
        "fastroof's time means {expert_effective_mfu:.4f}"),
    _infersim("experts", "MFU to 3 decimals", "expert_rounded", "expert_mfu_us",
        "it reads that row's MFU to 3 decimals: {expert_mfu:.3f}, not {expert_row_mfu:.4f}"),
    _infersim("experts", "MFU of drawn tokens", "expert_drawn", "expert_mfu_us",
        "the MFU in that row's file, {expert_mfu:.3f}, is for the tokens its script drew; for those that "
        "the row names, {row_tokens} per GPU, it is {expert_row_mfu:.4f}"),
    _infersim("experts", "MFU of another format", "expert_other_format", "expert_tree_us",
        "its tree has the MFUs of {its_dtype} kernels, {expert_mfu:.3f} here, and applies them to {dtype} "
        "peaks, where fastroof's time means {expert_effective_mfu:.4f}"),
    _infersim("experts", "tables", "expert_given_tree", "expert_tree_us",
        "its tree has MFU {expert_mfu:.3f}, where fastroof's time means {expert_effective_mfu:.4f}"),
    _infersim("experts", "routing", "uneven", "routing_us",
        "its tokens spread evenly over experts; fastroof's kernels ran with {routing} routing, and take "
        "{even_us:,.0f} us with even routing"),
    _infersim("experts", "no router", "always", "no_router_us", "it has no router"),
    _infersim("experts", "no shared experts", "unread_shared", "shared_us",
        "it does not read the width of this kind of shared expert, and has none"),
    _infersim("experts", "shared experts", "read_shared", "shared_us",
        "its shared experts take {its_shared_us:,.0f} us by the MFU of their GEMMs, fastroof's "
        "{own_shared_us:,.0f} us"),
    _infersim("attention", "KV floor", "floored", "kv_floor_us",
        "the KV cache at {memory_gb_per_s:.0f} GiB/s takes {kv_load_us:,.0f} us, its FLOPs "
        "{core_us:,.0f} us: the longer counts"),
    _infersim("attention", "causal factor", "causal", "causal_us",
        "causal FLOPs are the square's / 1.8, and the MFUs in its files count half of the square: 11 % more"),
    _infersim("attention", "peak", "always", "attention_peak_us",
        "its TFLOP/s has 1024 GFLOP/s: the peak is {its_peak_tflops:.1f}, not {peak_tflops:.1f}"),
    _infersim("attention", "default MFU", "attention_default", "attention_mfu_us",
        "no row for heads {heads}: the default MFU {attention_mfu:g}, where fastroof's time means "
        "{effective_mfu:.4f}"),
    _infersim("attention", "MFU of one row", "attention_rounded", "attention_mfu_us",
        "MFU of one measured row to 3 decimals: {attention_mfu:.3f}, where fastroof's time means "
        "{effective_mfu:.4f}"),
    _infersim("attention", "tables", "attention_given_tree", "attention_mfu_us",
        "its tree has MFU {attention_mfu:.3f}, where fastroof's time means {effective_mfu:.4f}"),
    _infersim("communication", "exchange of tokens", "exchanges", "exchange_us",
        "the tokens of all {world} GPUs pass its NVLink twice as bytes at {nvlink_gb_per_s:.0f} GiB/s, "
        "{its_exchange_us:,.0f} us without a launch; fastroof's all-gather and reduce-scatter take "
        "{own_exchange_us:,.0f} us"),
    _infersim("communication", "exchange", "gathers", "exchange_us",
        "it gathers the tokens of all {tp} GPUs before and after the MLP as for experts, even if dense"),
    _infersim("communication", "all-reduce", "split", "allreduce_us",
        "one all-reduce per layer, its bytes at {nvlink_gb_per_s:.0f} GiB/s, where there are two with "
        "a launch each"),
    _infersim("lm_head", "no LM head", "always", "no_lm_head_us", "it has no LM head"),
    _infersim("elementwise", "no norms", "always", "no_elementwise_us",
        "it has no norms, rotary embedding, KV write or activation"),
    _infersim("overhead", "constant", "always", "overhead_us",
        "it adds {overhead_us:,.0f} us to every step, whatever the model; fastroof's `kernels` engine "
        "adds none"),
)  # fmt: skip

DATASHEET: Final = (
    *(
        Cause(
            "datasheet", component, "efficiency of the class", f"has_{component}", f"{component}_us",
            f"it assumes {{{component}_efficiency:.0%}} of the roofline, and {{{component}_launch_us:g}} us "
            f"for each of {{{component}_calls}} calls; the measured reach "
            f"{{{component}_reached:.0%}}, launch included",
        )
        for component in ("linear", "attention", "communication", "lm_head", "elementwise")
    ),
    Cause(
        "datasheet", "experts", "efficiency of the class", "has_experts", "experts_us",
        "it assumes {experts_efficiency:.0%} of the routed experts' roofline and {experts_launch_us:g} us "
        "for each call of them, and of the router what it assumes of any GEMM; the measured reach "
        "{experts_reached:.0%}, launch included",
    ),
)  # fmt: skip

CAUSES: Final = (*ROOFLINE_V1, *ROOFLINE_V2, *INFERSIM, *DATASHEET)
"""Known causes by method, in report order."""


def differences(own: MethodTime, other: MethodTime, facts: Mapping[str, Any]) -> list[Difference]:
    """Return why a method's components differ from fastroof's by more than 10 %."""
    found = []
    for component in COMPONENTS:
        own_us = own.components_us[component]
        apart_us = other.components_us[component] - own_us
        if abs(apart_us) <= TOLD_FROM * own_us:
            continue
        left_us = apart_us
        for cause in CAUSES:
            if (cause.method, cause.component) != (other.method, component) or not facts.get(cause.holds):
                continue
            us = float(facts[cause.us])
            left_us -= us
            if us and abs(us) >= MENTIONED_FROM * own_us:
                found.append(
                    Difference(other.method, component, cause.name, us, cause.sentence.format_map(facts))
                )
        if abs(left_us) > TOLD_FROM * own_us + 1e-9 * abs(apart_us):
            found.append(
                Difference(other.method, component, "unexplained", left_us, "no known cause: unexplained")
            )
    return found
