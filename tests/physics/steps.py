"""Checks of whole steps: plans of dense presets at every tp and dtype, of kernels alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof import StepPlan, Tables, compile_plans, load_model
from fastroof.errors import PlanError
from fastroof.models import TP_SIZES
from fastroof.operators.attention_work import attention_flops
from fastroof.operators.gemm import gemm_flops
from fastroof.units import DTYPE_BYTES, US_PER_S
from tests.reference.shards import shard

from .ledger import Found

__all__ = ["PRESETS", "STEP_CHECKS", "Case", "plan_cases"]

Floats = npt.NDArray[np.float64]

BATCHES: Final = np.arange(1, 257)[:, None]
KV_LENS: Final = np.array([128, 1024, 4096, 16384])
PREFILLS: Final = np.array(
    [1, 16, 100, 128, 257, 512, 1000, 1024, 2048, 3000, 4096, 6000, 8192, 12000, 16384]
)
CHUNKS: Final = np.array([64, 128, 256, 512, 1000, 1024, 2048, 4096, 8192])
MAX_TOKENS: Final = int(PREFILLS[-1])

ONE_MORE_LIMIT: Final = 0.97
CHUNKED_LIMIT: Final = 0.95
TP_LIMIT: Final = 0.90
FP8_LIMIT: Final = 1.0 / 1.05


class Case(NamedTuple):
    """One plan, and the latencies that several checks share, us."""

    plan: StepPlan
    decode_us: Floats
    """Shape (batches, kv_lens)."""
    prefill_us: Floats
    """Shape (prefills,)."""


PRESETS: Final = (
    "codellama-34b", "llama-2-13b", "llama-2-70b", "llama-2-7b", "llama-3.1-70b", "llama-3.1-8b",
    "mistral-7b", "mistral-nemo", "qwen2.5-32b", "qwen2.5-72b", "qwen2.5-7b", "qwen3-14b", "qwen3-32b",
    "qwen3-8b", "yi-34b",
)  # fmt: skip
"""Dense models with full attention, of whose plans the list of violations is."""


def plan_cases(tables: Tables, dtypes: Sequence[str] = ("bf16", "fp8")) -> list[Case]:
    """Compile every one of the presets at every tp, dtype and KV dtype that it can have, and time it."""
    requests = [
        {"model": model, "tp": tp, "dtype": dtype, "kv_dtype": kv_dtype, "max_num_batched_tokens": MAX_TOKENS}
        | {"engine": "kernels"}
        for model in PRESETS
        for tp in TP_SIZES
        if _splits(model, tp)
        for dtype in dtypes
        for kv_dtype in ("bf16", "fp8")
    ]
    plans = compile_plans(requests, tables.gpu, tables)
    return [Case(p, p.decode_us(BATCHES, KV_LENS), p.prefill_us(PREFILLS)) for p in plans]


def _splits(model: str, tp: int) -> bool:
    try:
        shard(load_model(model), tp)
    except PlanError:
        return False
    return True


def _at(plan: StepPlan, **sizes: Any) -> dict[str, Any]:
    return {
        "model": plan.model.name, "tp": plan.tp, "dtype": plan.dtype, "kv_dtype": plan.kv_dtype, **sizes,
    }  # fmt: skip


# -- floors --------------------------------------------------------------------------------------


def decode_bytes(plan: StepPlan) -> Floats:
    """Bytes that a decode step must read: the linear layers, the LM head and the KV cache, once each."""
    model, share = plan.model, shard(plan.model, plan.tp)
    layer = share.qkv_out * model.hidden + model.hidden * share.o_in + 3 * model.hidden * share.intermediate
    weights = model.num_layers * layer * DTYPE_BYTES[plan.dtype]
    head = share.vocab_rows * model.hidden * DTYPE_BYTES["bf16"]
    return weights + head + BATCHES * KV_LENS * float(plan.memory.kv_bytes_per_token)


def step_flops_us(plan: StepPlan, new_tokens: Any, kv_len: Any, batch_size: Any) -> Floats:
    """Time of a step's FLOPs at the peak of the dtype that each operator may compute in."""
    model, share, gpu = plan.model, shard(plan.model, plan.tp), plan.gpu
    rows = np.multiply(new_tokens, batch_size)
    layer = sum(
        gemm_flops(rows, n, k)
        for n, k in (
            (share.qkv_out, model.hidden),
            (model.hidden, share.o_in),
            (2 * share.intermediate, model.hidden),
            (model.hidden, share.intermediate),
        )
    )
    attention = attention_flops(share.num_q_heads, plan.heads.head_dim, new_tokens, kv_len, batch_size)
    head = gemm_flops(batch_size, share.vocab_rows, model.hidden)
    seconds = model.num_layers * layer / gpu.peak(plan.dtype) + head / gpu.peak("bf16")
    return (seconds + model.num_layers * attention / gpu.peak(plan.kv_dtype)) * US_PER_S


def at_least_its_bytes(cases: list[Case], bytes_per_s: float) -> Found:
    """Check decode steps against their bytes beyond one L2 cache."""
    return Found.joined(
        Found.under(
            "decode step: at least its bytes",
            1.0,
            decode_us * bytes_per_s / ((decode_bytes(plan) - plan.gpu.l2_bytes) * US_PER_S),
            _at(plan, batch_size=BATCHES, kv_len=KV_LENS),
        )
        for plan, decode_us, _ in cases
    )


def decode_at_least_its_flops(cases: list[Case], _: float) -> Found:
    """Check decode steps against their FLOPs at peak."""
    return Found.joined(
        Found.under(
            "decode step: at least its FLOPs",
            1.0,
            decode_us / step_flops_us(plan, 1, KV_LENS, BATCHES),
            _at(plan, batch_size=BATCHES, kv_len=KV_LENS),
        )
        for plan, decode_us, _ in cases
    )


def prefill_at_least_its_flops(cases: list[Case], _: float) -> Found:
    """Check prefill in one piece against its FLOPs at peak."""
    return Found.joined(
        Found.under(
            "prefill: at least its FLOPs",
            1.0,
            prefill_us / step_flops_us(plan, PREFILLS, PREFILLS, 1),
            _at(plan, new_tokens=PREFILLS),
        )
        for plan, _, prefill_us in cases
    )


# -- one plan against itself -----------------------------------------------------------------------


def one_more_sequence(cases: list[Case], _: float) -> Found:
    """Check that a decode step with one more sequence is no faster."""
    return Found.joined(
        Found.under(
            "decode step: no faster with one more sequence",
            ONE_MORE_LIMIT,
            decode_us[1:] / decode_us[:-1],
            _at(plan, batch_size=BATCHES[:-1], kv_len=KV_LENS),
        )
        for plan, decode_us, _ in cases
    )


def chunkings() -> Iterator[tuple[int, int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield (place in PREFILLS, chunk, new_tokens, context_len) of every prefill in chunks."""
    for place, tokens in enumerate(PREFILLS.tolist()):
        for chunk in CHUNKS[tokens > CHUNKS].tolist():
            context_len = np.arange(0, tokens, chunk)
            yield place, chunk, np.minimum(chunk, tokens - context_len), context_len


def chunks_no_cheaper(cases: list[Case], _: float) -> tuple[Found, Found]:
    """Check prefill in chunks against one piece, and each chunk against its own FLOPs."""
    layout = list(chunkings())
    place, chunk = (np.array([part[i] for part in layout]) for i in (0, 1))
    new_tokens, context_len = (np.concatenate([part[i] for part in layout]) for i in (2, 3))
    starts = np.cumsum([0, *(len(part[2]) for part in layout[:-1])])
    whole, pieces = [], []
    for plan, _, prefill_us in cases:
        chunk_us = plan.prefill_us(new_tokens, context_len)
        floor_us = step_flops_us(plan, new_tokens, context_len + new_tokens, 1)
        at = _at(plan, new_tokens=PREFILLS[place], chunk=chunk)
        ratio = np.add.reduceat(chunk_us, starts) / prefill_us[place]
        whole.append(Found.under("prefill: chunks no cheaper than one piece", CHUNKED_LIMIT, ratio, at))
        at = _at(plan, new_tokens=new_tokens, context_len=context_len)
        pieces.append(Found.under("prefill: chunks at least their FLOPs", 1.0, chunk_us / floor_us, at))
    return Found.joined(whole), Found.joined(pieces)


def chunks_against_one_piece(cases: list[Case], bytes_per_s: float) -> Found:
    """Check that chunks are together no cheaper than one piece."""
    return chunks_no_cheaper(cases, bytes_per_s)[0]


def chunks_at_least_their_flops(cases: list[Case], bytes_per_s: float) -> Found:
    """Check each chunk against its FLOPs at peak."""
    return chunks_no_cheaper(cases, bytes_per_s)[1]


# -- one plan against another ----------------------------------------------------------------------


def tp_no_better_than_its_gpus(cases: list[Case], _: float) -> Found:
    """Check that tp GPUs are not more than tp times as fast as one."""
    return _pairs(cases, "tp", 1, "no faster than its GPUs", TP_LIMIT, lambda us, base, tp: us * tp / base)


def fp8_weights_no_slower(cases: list[Case], _: float) -> Found:
    return _pairs(cases, "dtype", "bf16", "fp8 weights no slower", FP8_LIMIT, lambda us, base, _: base / us)


def fp8_kv_no_slower(cases: list[Case], _: float) -> Found:
    return _pairs(cases, "kv_dtype", "bf16", "fp8 KV no slower", FP8_LIMIT, lambda us, base, _: base / us)


def _pairs(
    cases: list[Case],
    option: str,
    base_value: Any,
    check: str,
    limit: float,
    ratio: Callable[[Floats, Floats, Any], Floats],
) -> Found:
    """Compare each plan with the one that differs in one option, decode steps and prefills alike."""

    def key(plan: StepPlan, **other: Any) -> tuple[Any, ...]:
        options = {"tp": plan.tp, "dtype": plan.dtype, "kv_dtype": plan.kv_dtype, **other}
        return (plan.model.name, *options.values())

    by_key = {key(case.plan): case for case in cases}
    parts = []
    for plan, decode_us, prefill_us in cases:
        value = getattr(plan, option)
        base = by_key.get(key(plan, **{option: base_value}))
        if value == base_value or base is None:
            continue
        at = _at(plan, step="decode", batch_size=BATCHES, kv_len=KV_LENS, new_tokens=BATCHES)
        parts.append(Found.under(check, limit, ratio(decode_us, base.decode_us, value), at))
        at = _at(plan, step="prefill", batch_size=1, kv_len=PREFILLS, new_tokens=PREFILLS)
        parts.append(Found.under(check, limit, ratio(prefill_us, base.prefill_us, value), at))
    return Found.joined(parts)


STEP_CHECKS: Final = (
    at_least_its_bytes,
    decode_at_least_its_flops,
    prefill_at_least_its_flops,
    one_more_sequence,
    chunks_against_one_piece,
    chunks_at_least_their_flops,
    tp_no_better_than_its_gpus,
    fp8_weights_no_slower,
    fp8_kv_no_slower,
)
"""Each takes the cases and the highest measured bandwidth, B/s, and returns its violations."""
