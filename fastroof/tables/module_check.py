"""Check of measured MLA blocks against their parts, and of prompts' attention against the blocks around it.

A block (:mod:`fastroof.operators.mla_modules`) consists of projections, two batched products with absorbed
weights, and attention. If it takes far longer than these, its kernels were launched eagerly by the host.
If a prompt's attention alone takes longer than its engine's block, it is another kernel than the block runs:
one that absorbs the weights (576 and 512 values a head and pair), where engines unfold keys and values (192
and 128).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.load import MeasuredTable
from fastroof.load.unsound import UnsoundFamily
from fastroof.tables.kernel_order import KernelOrder
from fastroof.tables.table_set import Tables

MODULE: Final = "mla_module_decode"

MODULE_OVER_PARTS: Final = 1.35
"""Ratio of a block of one sequence to its parts from which it is unsound; sound ones take 0.7 to 1.2."""

PARTS_OF: Final = ("sglang", "trtllm", "vllm")
"""Engines whose parts are used, in order of preference: SGLang measured them one by one."""

HIDDEN: Final = 7168
Q_LORA: Final = 1536
KV_LORA: Final = 512
NOPE: Final = 128
ROPE: Final = 64
V_HEAD: Final = 128
"""Widths of DeepSeek-V3, whose blocks were measured."""

MODEL: Final = "deepseek-v3"

KERNEL: Final = "mla_prefill"
BLOCK: Final = "mla_module_prefill"

LEAST_TOKENS: Final = 4096
"""Tokens of a call from which attention is a large part of a block."""

MOST_LONGER: Final = 0.2
"""Share of the points at which attention alone may take longer than its block: 0 to 0.05 of sound tables."""

WORDS: Final = ("dtype", "kv_dtype", "attn_dtype", "model")


def module_families(tables: Tables) -> dict[str, list[UnsoundFamily]]:
    """Find blocks that take far longer than their parts, by source."""
    if MODULE not in tables.measured.tables:
        return {}
    parts = tables.in_order(KernelOrder(PARTS_OF))
    found: dict[str, list[UnsoundFamily]] = {}
    for table in tables.candidates(MODULE):
        families = _families(table, parts)
        if families:
            found[table.source] = families
    return found


def _families(table: MeasuredTable, parts: Tables) -> list[UnsoundFamily]:
    columns = table.columns
    words = list(zip(*(columns[name] for name in WORDS), strict=True))
    found = []
    for one in sorted(set(words)):
        if one[3] != MODEL:
            continue
        of_family = np.array([other == one for other in words])
        single = of_family & (columns["batch_size"] == 1)
        if not single.any():
            continue
        ratios, excess_us = [], []
        for heads in np.unique(columns["num_heads"][single]):
            rows = np.flatnonzero(single & (columns["num_heads"] == heads))
            sum_us = parts_us(parts, int(heads), columns["kv_len"][rows], dtype=one[0], kv_dtype=one[1])
            if sum_us is not None:
                ratios.append(columns["latency_us"][rows] / sum_us)
                excess_us.append(columns["latency_us"][rows] - sum_us)
        if not ratios:
            continue
        median = float(np.median(np.concatenate(ratios)))
        if median < MODULE_OVER_PARTS:
            continue
        excess = float(np.median(np.concatenate(excess_us)))
        reason = (
            f"one sequence takes {median:.3g} times the sum of its parts at the median of "
            f"{sum(map(len, ratios))} points, {excess:.3g} us more"
        )
        keys = {name: (word,) for name, word in zip(WORDS, one, strict=True)}
        count = int(of_family.sum())
        found.append(UnsoundFamily(keys, "module", reason, excess_us=float(f"{excess:.4g}"), rows=count))
    return found


def kernel_families(tables: Tables) -> dict[str, list[UnsoundFamily]]:
    """Find attention of prompts that takes longer than its own engine's whole blocks, by source."""
    if not (tables.has(KERNEL) and tables.has(BLOCK)):
        return {}
    found: dict[str, list[UnsoundFamily]] = {}
    for table in tables.candidates(KERNEL):
        blocks_us = _blocks_us([one for one in tables.candidates(BLOCK) if one.engine == table.engine])
        columns = table.columns
        sizes = [columns[name].tolist() for name in ("num_q_heads", "batch_size", "q_len", "kv_len")]
        block_us = np.array([blocks_us.get(point, np.nan) for point in zip(*sizes, strict=True)])
        is_large = columns["batch_size"] * columns["q_len"] >= LEAST_TOKENS
        for kv_dtype in sorted(set(columns["kv_dtype"])):
            of_family = columns["kv_dtype"] == kv_dtype
            rows = of_family & is_large & (columns["nope_dim"] == NOPE) & ~np.isnan(block_us)
            over = columns["latency_us"][rows] / block_us[rows]
            if not rows.any() or (over > 1.0).mean() < MOST_LONGER:
                continue
            ratio = float(np.median(over[over > 1.0]))
            reason = (
                f"attention alone takes longer than the engine's whole block at {(over > 1.0).mean():.0%} of "
                f"{len(over)} points of {LEAST_TOKENS} tokens or more, there {ratio:.3g} times at the median"
            )
            family = UnsoundFamily(
                {"kv_dtype": (kv_dtype,)}, "module", reason, float(f"{ratio:.4g}"), rows=int(of_family.sum())
            )
            found.setdefault(table.source, []).append(family)
    return found


def _blocks_us(tables: list[MeasuredTable]) -> dict[tuple[int, int, int, int], float]:
    """Least latency of whole blocks by heads, batch size, new tokens and length."""
    least_us: dict[tuple[int, int, int, int], float] = {}
    for table in tables:
        columns = table.columns
        names = ("num_heads", "batch_size", "q_len", "kv_len", "model", "latency_us")
        for *point, model, latency_us in zip(*(columns[name].tolist() for name in names), strict=True):
            if model == MODEL:
                least_us[tuple(point)] = min(latency_us, least_us.get(tuple(point), latency_us))
    return least_us


def parts_us(
    tables: Tables, heads: int, kv_len: Any, dtype: str = "bf16", kv_dtype: str = "bf16"
) -> Floats | None:
    """Sum of a block's parts for decode of one sequence, us; None if a part is missing."""
    gemms = ((Q_LORA + KV_LORA + ROPE, HIDDEN), (heads * (NOPE + ROPE), Q_LORA), (HIDDEN, heads * V_HEAD))
    try:
        total = sum(_us(tables, "gemm", m=1, n=n, k=k, dtype=dtype) for n, k in gemms)
        for part in ("pre", "post"):
            total = total + _us(tables, "mla_bmm", part=part, num_heads=heads, num_tokens=1, dtype="bf16")
        attention = {
            "num_q_heads": heads,
            "batch_size": 1,
            "kv_len": np.asarray(kv_len),
            "kv_dtype": kv_dtype,
        }
        return np.asarray(total + _us(tables, "mla_decode", **attention), np.float64)
    except (MissingTableError, LookupInputError):
        return None


def _us(tables: Tables, operator: str, **sizes: Any) -> Any:
    return tables.lookup(operator, **sizes).latency_us
