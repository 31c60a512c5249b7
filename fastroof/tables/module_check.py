"""Check of measured MLA blocks against the sum of their parts.

A block (:mod:`fastroof.operators.mla_modules`) consists of projections, two batched products with absorbed
weights, and attention. If it takes far longer than these, its kernels were launched eagerly by the host.
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
