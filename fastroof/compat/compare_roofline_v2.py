"""The column of roofline V2 in a comparison, and measured tables as its and InferSim's."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.compat import infersim, roofline_v2
from fastroof.compat.compare_steps import COMPONENTS, Case, ComparedModel, MethodTime, Step
from fastroof.compat.roofline_v2.steps import Hardware, ModelSizes
from fastroof.config import GpuSpec
from fastroof.errors import MissingTableError
from fastroof.models.experts import RoutedExperts
from fastroof.models.layout import TP_SIZES
from fastroof.operators.attention_work import decode_attention_flops
from fastroof.operators.gemm import gemm_flops
from fastroof.operators.moe import MOE
from fastroof.operators.moe_work import moe_flops
from fastroof.tables import Tables
from fastroof.units import US_PER_S

SAME_GEMMS: Final = (2, 2, 2, 1)
"""Number of GEMMs of each size: q and o, k and v, gate and up, down."""


def _step(step: Step) -> tuple[list[tuple[int, int]], list[int]]:
    """Return a step's requests; progress is the tokens before the step, for a decode kv_len - 1."""
    if step.phase == "decode":
        return [], [step.tokens - 1] * step.batch_size
    return [(0, step.tokens)] * step.batch_size, []


def roofline_v2_time(case: Case, step: Step) -> MethodTime:
    """Return the time of a step by component; the total is :func:`fastroof.compat.roofline_v2.step_us`'s."""
    total, seconds = roofline_v2.step_parts(
        _tree(case), case.model_config, case.hardware, case.plan.tp, [_step(step)]
    )
    linear_us = _linear_us(case, step)
    compute_s, memory_s = (float(seconds[f"{step.phase}_{kind}_s"][0]) for kind in ("compute", "memory"))
    hardware = Hardware.from_config(case.hardware)
    layers = ModelSizes.from_config(case.model_config).num_layers
    components = dict.fromkeys(COMPONENTS, 0.0) | {
        "linear": linear_us,
        "attention": compute_s * US_PER_S - linear_us,
        "memory": max(memory_s - compute_s, 0.0) * US_PER_S,
        "overhead": hardware.layer_overhead_us * layers / case.plan.tp,
    }
    return MethodTime("roofline_v2", components, float(total[0]))


def _tree(case: Case) -> roofline_v2.RooflineV2Tables:
    assert case.roofline_v2 is not None
    return case.roofline_v2


def _linear_us(case: Case, step: Step) -> float:
    sizes, gpu = ModelSizes.from_config(case.model_config), Hardware.from_config(case.hardware)
    k, n = (np.array(column, np.float64) for column in zip(*sizes.gemms, strict=True))
    m = step.new_tokens
    mfu = roofline_v2.gemm_mfu(_tree(case), m, k.astype(int), n.astype(int))
    compute_us = 2.0 * m * k * n / (gpu.peak_flops_per_s * mfu) * US_PER_S
    weights_us = k * n * sizes.bytes_per_param / gpu.bandwidth_bytes_per_s * US_PER_S
    share = np.array(SAME_GEMMS) * sizes.num_layers / case.plan.tp
    return float((np.maximum(compute_us, weights_us) * share).sum())


Heads = tuple[int, int, int]

HEADS: Final = ("num_q_heads", "num_kv_heads", "head_dim")
GROUPED_COLUMNS: Final = (
    "num_experts", "num_gpus", "num_local_experts", "topk", "hidden_size", "intermediate_size",
    "tokens_per_gpu", "tokens_per_expert", "up_proj_us", "up_mfu", "down_proj_us", "down_mfu",
)  # fmt: skip

BALANCED: Final = "balanced"
"""Routing of the rows given to InferSim, which has no routing model."""

UP_SHARE: Final = 2.0 / 3.0
"""Gate and up are two of an expert's three projections, and use the MFU of up."""


def roofline_v2_tree(tables: Tables) -> roofline_v2.RooflineV2Tables:
    """Return measured tables as roofline V2's, bf16 rows only."""
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
    """Return measured tables as InferSim's, with GEMMs of one dtype: its GEMM file has no dtype."""
    gpu = tables.gpu.name
    files = {f"gemm/{gpu}/data.csv": _csv(("m", "k", "n", "latency_us", "mfu"), _gemm(tables, dtype), {})}
    if model is not None and model.experts is not None:
        experts = _experts(tables, model, model.experts, dtype)
        text = _csv(tuple(experts), experts, {})
        # few and many tokens use one kernel here; InferSim takes the nearest row of one file in decode,
        # and the row below of the other file in prefill
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
    selected = columns["dtype"] == dtype
    k, n, m = np.unique(np.stack([columns[name][selected] for name in ("k", "n", "m")]), axis=1)
    latency_us = tables.lookup("gemm", m=m, n=n, k=k, dtype=dtype).latency_us
    return {"m": m, "k": k, "n": n} | _timed(tables.gpu, gemm_flops(m, n, k), latency_us, dtype)


def _experts(tables: Tables, model: ComparedModel, experts: RoutedExperts, dtype: str) -> dict[str, Array]:
    """Return the columns of InferSim's grouped-GEMM files; empty if no such layer was measured."""
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
        sizes = {**dict(zip(HEADS, heads, strict=True)), "batch_size": batch_size, "kv_len": kv_len}
        latency_us = tables.lookup("attention_decode", **sizes).latency_us
        work = decode_attention_flops(heads[0], heads[2], kv_len, batch_size)
        by_heads[heads] = {"batch_size": batch_size, "kv_len": kv_len} | _timed(tables.gpu, work, latency_us)
    return by_heads


def _prefill(tables: Tables) -> dict[Heads, dict[str, Array]]:
    """Return single sequences without a prefix; causal FLOPs are half the square, as in both methods."""
    by_heads = {}
    for heads, batch_size, q_len, kv_len in _shapes(
        tables, "attention_prefill", ("batch_size", "q_len", "kv_len")
    ):
        single = (batch_size == 1) & (q_len == kv_len)
        if not single.any():
            continue
        seq_len = q_len[single]
        sizes = {**dict(zip(HEADS, heads, strict=True)), "q_len": seq_len, "kv_len": seq_len}
        latency_us = tables.lookup("attention_prefill", **sizes).latency_us
        work = decode_attention_flops(heads[0], heads[2], seq_len, seq_len) / 2.0
        by_heads[heads] = {"seq_len": seq_len} | _timed(tables.gpu, work, latency_us)
    return by_heads


def _shapes(tables: Tables, operator: str, axes: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return each measured head shape with its points, sorted and without duplicates."""
    columns = _measured(tables, operator)
    selected = (columns["kv_dtype"] == "bf16") & (columns["window"] == 0)
    points = np.unique(np.stack([columns[name][selected] for name in (*HEADS, *axes)]), axis=1)
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


def _csv(header: Sequence[str], columns: Mapping[str, Array], labels: Mapping[str, str]) -> str:
    rows = len(next(iter(columns.values())))
    listed = [[labels[name]] * rows if name in labels else columns[name].tolist() for name in header]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*listed, strict=True))
    return out.getvalue()
