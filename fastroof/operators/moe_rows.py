"""MoE rows of aisimulate and of trees: shapes, experts with and without a gate, unused kernels."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastroof.arrays import Array, Bools, Longs
from fastroof.columns import Column
from fastroof.engines import ExpertRows, engine_names, load_engine
from fastroof.errors import TableError
from fastroof.operators import external_rows as external
from fastroof.operators.moe_work import EVENLY_ROUTED, moe_touched_experts

NONGATED_SHAPES: Final = ((2688, 1856), (1024, 2688), (4096, 2688), (2048, 5120), (8192, 5120))
"""Hidden and intermediate widths of models without a gate (Nemotron 3 Nano, Super and Ultra).

Few kernels have it in their name. Elsewhere the bandwidth shows it: with three GEMMs per expert the bf16
weights of all touched experts would need 1.2 to 1.45 times the bandwidth, at most 0.96 for other shapes.
``expert_rows`` of the engines' profiles lists those kernels."""


def _rule_of_rows(raw: external.Raw) -> tuple[list[ExpertRows], Longs]:
    """Rules of engine profiles, and the index of the first that applies to each row; -1 without one."""
    rules = [rule for name in engine_names() for rule in load_engine(name).kernels.expert_rows]
    kernels = raw["kernel_source"]
    versions = raw.get("version", np.full(len(kernels), "", object))
    found = np.full(len(kernels), -1)
    for kernel, version in set(zip(kernels.tolist(), versions.tolist(), strict=True)):
        rows = (kernels == kernel) & (versions == version)
        for i, rule in enumerate(rules):
            if rule.is_for(kernel, version):
                is_wide = raw["hidden_size"] == rule.hidden if rule.hidden else True
                found[rows & is_wide & (found < 0)] = i
    return rules, found


def is_nongated(raw: external.Raw) -> Bools:
    """Mark the package's rows of experts without a gate."""
    by_shape = np.zeros(len(raw["kernel_source"]), bool)
    for hidden, intermediate in NONGATED_SHAPES:
        by_shape |= (raw["hidden_size"] == hidden) & (raw["inter_size"] == intermediate)
    rules, found = _rule_of_rows(raw)
    is_since = np.isin(found, [i for i, rule in enumerate(rules) if not rule.has_gate])
    return np.asarray(np.char.endswith(raw["kernel_source"].astype(str), "_nongated") | (by_shape & is_since))


def not_run_by_the_engine(raw: external.Raw) -> dict[str, Bools]:
    """Mark rows of a kernel that its engine does not run at that number of tokens, by reason."""
    rules, found = _rule_of_rows(raw)
    most_tokens = np.array([*(rule.most_tokens for rule in rules), 0])[found]
    quick = most_tokens > 0
    if not quick.any():
        return {}
    names = ("moe_dtype", "distribution", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    code = np.zeros(len(quick), np.int64)
    for name in (*names, "moe_tp_size", "moe_ep_size"):
        _, index = np.unique(raw[name], return_inverse=True)
        _, code = np.unique(code * (int(index.max()) + 1) + index, return_inverse=True)
    has_quick, has_other = (np.bincount(code[rows], minlength=code.max() + 1) > 0 for rows in (quick, ~quick))
    most = int(most_tokens.max())
    small = raw["num_tokens"] <= most
    few = f"up to {most} tokens, where the engine runs its min-latency kernel instead"
    many = f"min-latency kernel, which the engine does not run beyond {most} tokens"
    return {few: ~quick & small & has_quick[code], many: quick & ~small & has_other[code]}


REMOTE_SLOTS: Final = (
    "tokens of rows with ep are multiplied by ep times the share of tokens with an expert on a GPU: it was "
    "measured with all slots of those, also of other GPUs' experts. Not where so few tokens leave a tenth of "
    "the experts out: their weights take the time, not the slots"
)
REACHED: Final = 0.9
"""Share of the experts from which more slots reach no more weights."""


def _tokens_of_all(raw: external.Raw) -> tuple[Array, Bools, str]:
    """Tokens by which each GPU has the slots that it was measured with, rows to leave out, and a note."""
    rules, found = _rule_of_rows(raw)
    most_ep = np.array([*(rule.remote_slots_to_ep for rule in rules), 0])[found]
    tokens, ep, topk, experts = (raw[key] for key in ("num_tokens", "moe_ep_size", "topk", "num_experts"))
    is_remote = (most_ep > 0) & (ep > 1)
    # even routing gives a token an expert in each of topk equal groups, others any of them
    none_here = np.ones(len(tokens))
    for slot in range(int(topk[is_remote].max(initial=0))):
        left = np.maximum(experts - slot, 1)
        none_here *= np.where(slot < topk, np.maximum(left - experts // ep, 0) / left, 1.0)
    is_even = np.isin(raw["distribution"].astype(str), EVENLY_ROUTED)
    share = np.where(is_even, np.minimum(topk / ep, 1.0), 1.0 - none_here)
    reached = moe_touched_experts(tokens, topk, experts) >= REACHED * experts
    counted = np.where(is_remote & reached, np.rint(tokens * ep * share), tokens).astype(np.int64)
    return counted, is_remote & (ep > most_ep), REMOTE_SLOTS if is_remote.any() else ""


def moe_rows(raw: external.Raw, has_gate: bool) -> external.ExternalRows:
    """Rows of experts with a gate (three GEMMs) or without; sizes are those of the model, not of a shard."""
    nongated = is_nongated(raw)
    out = {"experts without a gate": nongated} if has_gate else {"experts with a gate": ~nongated}
    tokens, is_beyond, note = _tokens_of_all(raw)
    out["ep beyond 8 of a GPU that was measured with other GPUs' slots"] = is_beyond
    rows = external.package_rows(
        raw,
        *("topk", "num_experts", "distribution"),
        num_tokens=tokens,
        dtype="moe_dtype",
        hidden="hidden_size",
        intermediate="inter_size",
        moe_tp="moe_tp_size",
        moe_ep="moe_ep_size",
    )
    return external.ExternalRows(rows.columns, out | rows.left_out | not_run_by_the_engine(raw), note)


PACKAGE_COLUMNS: Final = (
    *external.size_columns(
        "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"
    ),
    *external.text_columns("moe_dtype", "distribution"),
    *external.MEASURED,
)


_LAYER: Final = ("num_experts", "num_gpus", "num_local_experts", "topk", "hidden_size", "intermediate_size")


def _tree_rows(read: external.Raw, tokens: str) -> dict[str, Array]:
    """Rows by the tokens of all GPUs that share the experts; the latency is that of both projections.

    The files have no dtype; the scripts that wrote them (kernel_benchmark/deepgemm_grouped_gemm_*.py of
    InferSim f2293da) only run DeepGEMM's fp8 kernels.
    """
    experts, num_gpus, local = (read[name] for name in _LAYER[:3])
    moe_tp = num_gpus * local // experts
    wrong = (experts % local != 0) | (moe_tp * experts != num_gpus * local)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise TableError(
            f"row {row + 1}: {experts[row]} experts cannot be spread evenly over {num_gpus[row]} GPUs with "
            f"{local[row]} experts each"
        )
    moe_ep = experts // local
    rows = len(experts)
    return {
        "dtype": np.array(["fp8"] * rows, object),
        "hidden": read["hidden_size"],
        "intermediate": read["intermediate_size"] * moe_tp,
        "topk": read["topk"],
        "num_experts": experts,
        "moe_tp": moe_tp,
        "moe_ep": moe_ep,
        "distribution": np.array(["balanced"] * rows, object),
        "num_tokens": read[tokens] * moe_ep,
        "latency_us": read["up_proj_us"] + read["down_proj_us"],
    }


_TIMES: Final = ("up_proj_us", "up_mfu", "down_proj_us", "down_mfu")
_TIMED: Final = tuple(
    Column(name, "float", "us" if name.endswith("us") else "", "of one projection", 0) for name in _TIMES
)


def _file(phase: str, tokens: str) -> external.TreeFile:
    return external.TreeFile(
        "grouped_gemm",
        phase,
        (*external.size_columns(*_LAYER, tokens), *_TIMED[::2]),
        _TIMED[1::2],
        (*_LAYER, tokens, "tokens_per_expert", *_TIMES),
        lambda read, _: _tree_rows(read, tokens),
        computes_in_any_dtype=True,
        named_by_heads=False,
        draws_tokens=True,
    )


GROUPED_GEMM_FILES: Final = (_file("decode", "batch_size_per_gpu"), _file("prefill", "seq_len_per_gpu"))
"""Masked kernels (few tokens per GPU) and contiguous ones (many): together one curve per layer."""
