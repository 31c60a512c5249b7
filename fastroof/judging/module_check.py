"""Check of measured MLA blocks against their parts, and of attention against the blocks around it.

A block (:mod:`fastroof.operators.mla_modules`) consists of projections, two batched products with absorbed
weights, and attention. If it takes far longer than these, its kernels were launched eagerly by the host.
If attention alone takes longer than its engine's block, it is another kernel than the block runs: for prompts
one that absorbs the weights (576 and 512 values a head and pair), where engines unfold keys and values (192
and 128).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fastroof.arrays import Bools, Floats
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.load import MeasuredTable
from fastroof.load.unsound import UnsoundFamily
from fastroof.operators.operator import Columns
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

KERNELS: Final = {"mla_prefill": ("mla_module_prefill", 4096), "mla_decode": (MODULE, 65_536)}
"""Attention alone, the blocks around it, and the tokens (new, or of the KV cache) of a call from which
attention is a large part of a block."""

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


def kernel_families(tables: Tables, kernel: str) -> dict[str, list[UnsoundFamily]]:
    """Find attention that takes longer than its own engine's whole blocks, by source."""
    block, least_tokens = KERNELS[kernel]
    if not (tables.has(kernel) and tables.has(block)):
        return {}
    found: dict[str, list[UnsoundFamily]] = {}
    for table in tables.candidates(kernel):
        columns = table.columns
        lengths = ("q_len", "kv_len") if "q_len" in columns else ("kv_len",)
        blocks = [one for one in tables.candidates(block) if one.engine == table.engine]
        for kv_dtype in sorted(set(columns["kv_dtype"])):
            # prompts attend to what they computed, whatever the cache stores
            blocks_us = _blocks_us(blocks, lengths, "" if "q_len" in columns else kv_dtype)
            sizes = [columns[name].tolist() for name in ("num_q_heads", "batch_size", *lengths)]
            block_us = np.array([blocks_us.get(point, np.nan) for point in zip(*sizes, strict=True)])
            of_family = columns["kv_dtype"] == kv_dtype
            rows = of_family & (columns["batch_size"] * columns[lengths[0]] >= least_tokens)
            rows &= _is_of_model(columns) & ~np.isnan(block_us)
            over = columns["latency_us"][rows] / block_us[rows]
            if not rows.any() or (over > 1.0).mean() < MOST_LONGER:
                continue
            ratio = float(np.median(over[over > 1.0]))
            reason = (
                f"attention alone takes longer than the engine's whole block at {(over > 1.0).mean():.0%} of "
                f"{len(over)} points of {least_tokens} tokens or more, there {ratio:.3g} times at the median"
            )
            family = UnsoundFamily(
                {"kv_dtype": (kv_dtype,)}, "module", reason, float(f"{ratio:.4g}"), rows=int(of_family.sum())
            )
            found.setdefault(table.source, []).append(family)
    return found


def _is_of_model(columns: Columns) -> Bools:
    """Rows with the widths of DeepSeek-V3."""
    name, width = ("nope_dim", NOPE) if "nope_dim" in columns else ("kv_lora_rank", KV_LORA)
    return np.asarray(columns[name] == width)


def _blocks_us(
    tables: list[MeasuredTable], lengths: tuple[str, ...], kv_dtype: str
) -> dict[tuple[int, ...], float]:
    """Least latency of whole blocks by heads, batch size and lengths, with a cache of a format or of any."""
    least_us: dict[tuple[int, ...], float] = {}
    for table in tables:
        columns = table.columns
        rows = columns["model"] == MODEL
        if kv_dtype:
            rows = rows & (columns["kv_dtype"] == kv_dtype)
        names = ("num_heads", "batch_size", *lengths, "latency_us")
        for *sizes, latency_us in zip(*(columns[name][rows].tolist() for name in names), strict=True):
            point = tuple(sizes)
            least_us[point] = min(latency_us, least_us.get(point, latency_us))
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
