"""A GPU's measured tables in the form that roofline V2 and InferSim read, in memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.compat import infersim, roofline_v2
from fastroof.compat.compare_infersim_experts import BALANCED, UP_SHARE
from fastroof.compat.compare_models import ComparedModel
from fastroof.config import GpuSpec
from fastroof.errors import MissingTableError
from fastroof.models.experts import RoutedExperts
from fastroof.models.layout import TP_SIZES
from fastroof.operators.attention_work import decode_attention_flops
from fastroof.operators.expert_work import moe_flops
from fastroof.operators.gemm import gemm_flops
from fastroof.operators.moe import MOE
from fastroof.tables import Tables
from fastroof.units import US_PER_S

__all__ = ["infersim_tree", "roofline_v2_tree"]

Heads = tuple[int, int, int]

HEADS: Final = ("num_q_heads", "num_kv_heads", "head_dim")
GROUPED_COLUMNS: Final = (
    "num_experts", "num_gpus", "num_local_experts", "topk", "hidden_size", "intermediate_size",
    "tokens_per_gpu", "tokens_per_expert", "up_proj_us", "up_mfu", "down_proj_us", "down_mfu",
)  # fmt: skip


def roofline_v2_tree(tables: Tables) -> roofline_v2.RooflineV2Tables:
    """Write measured tables as roofline V2's, bf16 rows only."""
    prefill = _prefill(tables)
    decode = {
        (_name((nh * tp, nkv * tp, width)), tp): columns
        for (nh, nkv, width), columns in _decode(tables).items()
        for tp in TP_SIZES
        if (nh * tp, nkv * tp, width) in prefill
    }
    served = {shape for shape, _ in decode}
    return roofline_v2.tables_of(
        gemm=_gemm(tables),
        prefill={_name(heads): columns for heads, columns in prefill.items() if _name(heads) in served},
        decode=decode,
    )


def infersim_tree(
    tables: Tables,
    constants: infersim.InfersimGpu,
    *,
    dtype: str = "bf16",
    model: ComparedModel | None = None,
) -> infersim.InfersimTables:
    """Write measured tables as InferSim's, GEMMs of one dtype: its GEMM file has none."""
    gpu = tables.gpu.name
    files = {f"gemm/{gpu}/data.csv": _csv(("m", "k", "n", "latency_us", "mfu"), _gemm(tables, dtype), {})}
    if model is not None and model.experts is not None:
        experts = _experts(tables, model, model.experts, dtype)
        text = _csv(tuple(experts), experts, {})
        # few tokens and many are one kernel here; InferSim takes the nearest row of one file, in decode,
        # and in prefill the row below of the other
        files |= {f"grouped_gemm/{phase}/{gpu}/data.csv": text for phase in ("decode", "prefill")}
    for heads, columns in _prefill(tables).items():
        header = ("dtype", "seq_len", "latency_us", "mfu")
        files[f"mha/prefill/{gpu}/{_name(heads)}.csv"] = _csv(header, columns, {"dtype": "bf16"})
    for heads, columns in _decode(tables).items():
        files[f"mha/decode/{gpu}/{_name(heads)}.csv"] = _csv(
            ("dtype", "kv_dtype", "batch_size", "kv_len", "latency_us", "mfu"),
            columns,
            {"dtype": "bf16", "kv_dtype": "bf16"},
        )
    return infersim.read_files(files, {gpu: constants}, root=f"the tables of {gpu}")


def _gemm(tables: Tables, dtype: str = "bf16") -> dict[str, Array]:
    _measured(tables, "gemm")
    if not tables.serves("gemm", (dtype,)):
        raise MissingTableError(f"no {dtype} GEMM was measured on {tables.gpu.name}; both methods need them")
    columns = tables.serving("gemm", (dtype,)).columns
    kept = columns["dtype"] == dtype
    k, n, m = np.unique(np.stack([columns[name][kept] for name in ("k", "n", "m")]), axis=1)
    latency_us = tables.lookup("gemm", m=m, n=n, k=k, dtype=dtype).latency_us
    return {"m": m, "k": k, "n": n} | _timed(tables.gpu, gemm_flops(m, n, k), latency_us, dtype)


def _experts(tables: Tables, model: ComparedModel, experts: RoutedExperts, dtype: str) -> dict[str, Array]:
    """Columns of InferSim's files of grouped GEMMs, in their order; none where no such layer was measured."""
    layer = (model.hidden, experts.intermediate, experts.topk, experts.num_experts)
    keys = tables.every_key("moe") if "moe" in tables.measured.tables else []
    parts = [np.empty((7, 0))]
    for key in keys:
        moe_tp, moe_ep, distribution = key[5:]
        if key[:5] != (dtype, *layer) or distribution != BALANCED or experts.intermediate % moe_tp:
            continue
        tokens = np.unique(tables.rows(MOE, key)["num_tokens"])
        tokens = tokens[tokens % moe_ep == 0]
        sizes = dict(zip((column.name for column in MOE.keys), key, strict=True))
        latency_us = tables.lookup("moe", num_tokens=tokens, **sizes).latency_us
        work = moe_flops(tokens, *layer[:3], moe_tp, moe_ep)
        mfu = _timed(tables.gpu, work, latency_us, dtype)["mfu"]
        local, width = experts.num_experts // moe_ep, experts.intermediate // moe_tp
        fixed = [np.full(len(tokens), size) for size in (moe_tp * moe_ep, local, width)]
        parts.append(np.stack([*fixed, tokens // moe_ep, tokens * experts.topk // local, latency_us, mfu]))
    num_gpus, local, width, m, per_expert, latency_us, mfu = np.concatenate(parts, axis=1)
    names = ("num_gpus", "num_local_experts", "intermediate_size", "tokens_per_gpu", "tokens_per_expert")
    sized = zip(names, (num_gpus, local, width, m, per_expert), strict=True)
    columns = {name: column.astype(np.int64) for name, column in sized}
    model_sizes = {
        "num_experts": experts.num_experts, "topk": experts.topk, "hidden_size": model.hidden
    }  # fmt: skip
    columns |= {name: np.full(len(m), size) for name, size in model_sizes.items()}
    columns |= {"up_proj_us": latency_us * UP_SHARE, "down_proj_us": latency_us * (1.0 - UP_SHARE)}
    columns |= {"up_mfu": mfu, "down_mfu": mfu}
    return {name: columns[name] for name in GROUPED_COLUMNS}


def _decode(tables: Tables) -> dict[Heads, dict[str, Array]]:
    by_heads = {}
    for heads, batch_size, kv_len in _shapes(tables, "attention_decode", ("batch_size", "kv_len")):
        nh, nkv, width = heads
        latency_us = tables.lookup(
            "attention_decode",
            num_q_heads=nh,
            num_kv_heads=nkv,
            head_dim=width,
            batch_size=batch_size,
            kv_len=kv_len,
        ).latency_us
        work = decode_attention_flops(nh, width, kv_len, batch_size)
        by_heads[heads] = {"batch_size": batch_size, "kv_len": kv_len} | _timed(tables.gpu, work, latency_us)
    return by_heads


def _prefill(tables: Tables) -> dict[Heads, dict[str, Array]]:
    """One sequence without a prefix; causal FLOPs are half of the square, as both methods' files have it."""
    by_heads = {}
    for heads, batch_size, q_len, kv_len in _shapes(
        tables, "attention_prefill", ("batch_size", "q_len", "kv_len")
    ):
        alone = (batch_size == 1) & (q_len == kv_len)
        if not alone.any():
            continue
        seq_len = q_len[alone]
        nh, nkv, width = heads
        latency_us = tables.lookup(
            "attention_prefill",
            num_q_heads=nh,
            num_kv_heads=nkv,
            head_dim=width,
            q_len=seq_len,
            kv_len=seq_len,
        ).latency_us
        work = decode_attention_flops(nh, width, seq_len, seq_len) / 2.0
        by_heads[heads] = {"seq_len": seq_len} | _timed(tables.gpu, work, latency_us)
    return by_heads


def _shapes(tables: Tables, operator: str, axes: Sequence[str]) -> list[tuple[Any, ...]]:
    """Each measured head shape with its points, sorted and without repeats."""
    columns = _measured(tables, operator)
    kept = (columns["kv_dtype"] == "bf16") & (columns["window"] == 0)
    points = np.unique(np.stack([columns[name][kept] for name in (*HEADS, *axes)]), axis=1)
    heads, first = np.unique(points[: len(HEADS)], axis=1, return_index=True)
    parts = np.split(points[len(HEADS) :], first[1:], axis=1)
    return [(tuple(map(int, shape)), *part) for shape, part in zip(heads.T, parts, strict=True)]


def _measured(tables: Tables, operator: str) -> Mapping[str, Array]:
    if operator not in tables.measured.tables:
        raise MissingTableError(f"{operator} was not measured on {tables.gpu.name}; both methods need it")
    columns = dict(tables.measured.tables[operator].columns)
    if operator != "gemm" and "window" not in columns:
        columns["window"] = np.zeros(len(columns["latency_us"]), np.int64)
    return columns


def _timed(gpu: GpuSpec, work: Any, latency_us: Array, dtype: str = "bf16") -> dict[str, Array]:
    mfu = np.asarray(work, np.float64) * US_PER_S / (latency_us * gpu.peak(dtype))
    return {"latency_us": latency_us, "mfu": mfu}


def _name(heads: Heads) -> str:
    return "-".join(map(str, heads))


def _csv(header: Sequence[str], columns: Mapping[str, Array], words: Mapping[str, str]) -> str:
    rows = len(next(iter(columns.values())))
    listed = [[words[name]] * rows if name in words else columns[name].tolist() for name in header]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*listed, strict=True))
    return out.getvalue()
