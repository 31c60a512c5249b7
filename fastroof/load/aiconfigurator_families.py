"""What each file of aiconfigurator-core holds, and which rows of fastroof's operators it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastroof.columns import OPERATORS, Column
from fastroof.config.gpu import GpuSpec
from fastroof.load.row_work import row_work
from fastroof.load.write import sort_rows
from fastroof.units import DTYPE_BYTES, US_PER_MS, US_PER_S

__all__ = ["FAMILIES", "Family", "Part", "Rows", "joined", "point_codes", "select"]

Array = npt.NDArray[Any]
Raw = Mapping[str, Array]

_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_FEW: Final = 1e-3


@dataclass(frozen=True)
class Rows:
    """Rows of one operator, and by reason those of them to leave out."""

    columns: dict[str, Array]
    out: dict[str, npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class Part:
    """The rows that one file gave one operator."""

    path: Path
    name: str
    raw: Raw
    columns: dict[str, Array]
    left_out: dict[str, int]


@dataclass(frozen=True)
class Family:
    """One file of the package: where it lies, its columns and what becomes of them.

    ``backend`` is the folder of a family that all serving frameworks share.
    """

    folder: str
    file: str
    columns: tuple[Column, ...]
    convert: Callable[[Raw], list[tuple[str, Rows]]]
    optional: tuple[Column, ...] = ()
    backend: str | None = None


def _sizes(*names: str, minimum: int = 1) -> tuple[Column, ...]:
    return tuple(Column(name, "int", "", "a size", minimum) for name in names)


def _texts(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, "text", "", "a name") for name in names)


_LATENCY = Column("latency", "float", "ms", "measured latency")
_MEASURED = (*_texts("kernel_source"), _LATENCY)
_DIFFERENCE = Column("latency", "float", "ms", "difference of two measured latencies", 0)
_RUN = _texts("device", "framework", "version")


def _timed(raw: Raw) -> dict[str, Array]:
    return {"latency_us": raw["latency"] * US_PER_MS, "kernel": raw["kernel_source"]}


def _dtype_names(words: Array) -> Array:
    distinct, index = np.unique(words, return_inverse=True)
    renamed: Array = np.array([_DTYPES.get(word, word) for word in distinct], object)[index]
    return renamed


def _unknown_dtypes(dtypes: Array) -> dict[str, npt.NDArray[np.bool_]]:
    return {f"dtype {d}": dtypes == d for d in sorted(set(dtypes)) if d not in DTYPE_BYTES}


def _gemm(raw: Raw) -> list[tuple[str, Rows]]:
    dtype = _dtype_names(raw["gemm_dtype"])
    columns = {"dtype": dtype, "m": raw["m"], "n": raw["n"], "k": raw["k"], **_timed(raw)}
    return [("gemm", Rows(columns, _unknown_dtypes(dtype)))]


def _attention(raw: Raw) -> Rows:
    dtype = _dtype_names(raw["kv_cache_dtype"])
    zeros = np.zeros_like(raw["batch_size"])
    window = raw.get("window_size", zeros)
    attn_dtype = _dtype_names(raw["attn_dtype"])
    columns = {
        "kv_dtype": dtype,
        "num_q_heads": raw["num_heads"],
        "num_kv_heads": raw["num_key_value_heads"],
        "head_dim": raw["head_dim"],
        "window": window,
        "batch_size": raw["batch_size"],
        "kv_len": raw["isl"] + raw["step"],
        **_timed(raw),
    }
    out = _unknown_dtypes(dtype)
    out |= {f"window {int(w)}": window == w for w in np.unique(window) if w > 0}
    # The schema's attention computes in bf16 whatever the cache holds.
    out |= {f"computes in {d}": attn_dtype == d for d in sorted(set(attn_dtype)) if d != "bf16"}
    out |= {"beam search": raw["beam_width"] > 1}
    return Rows(columns, out)


def _attention_prefill(raw: Raw) -> list[tuple[str, Rows]]:
    rows = _attention(raw)
    rows.columns["q_len"] = raw["isl"]
    return [("attention_prefill", rows)]


def _attention_decode(raw: Raw) -> list[tuple[str, Rows]]:
    rows = _attention(raw)
    rows.out["more than one new token"] = raw["isl"] > 1
    return [("attention_decode", rows)]


def _moe(raw: Raw) -> list[tuple[str, Rows]]:
    dtype = _dtype_names(raw["moe_dtype"])
    same = ("num_tokens", "topk", "num_experts", "distribution")
    other = {"hidden": "hidden_size", "intermediate": "inter_size"}
    other |= {"moe_tp": "moe_tp_size", "moe_ep": "moe_ep_size"}
    columns = {"dtype": dtype, **{n: raw[n] for n in same}, **{n: raw[o] for n, o in other.items()}}
    out = _unknown_dtypes(dtype)
    # Two GEMMs an expert, not three; by its sizes alone such a layer looks like one with a gate.
    out["experts without a gate"] = np.char.endswith(raw["kernel_source"].astype(str), "_nongated")
    return [("moe", Rows({**columns, **_timed(raw)}, out))]


def _message_bytes(raw: Raw, dtype: Array) -> Array:
    """Sizes in the package count elements: of one all-reduce, half takes twice int8's time."""
    size = np.array([DTYPE_BYTES.get(d, 0) for d in dtype])
    return np.asarray(raw["message_size"] * size, np.int64)


def _custom_allreduce(raw: Raw) -> list[tuple[str, Rows]]:
    dtype = _dtype_names(raw["allreduce_dtype"])
    # TensorRT-LLM's rows name no mode; they start at 2.6 to 5 us over NVLink, where eager launches take 20.
    launch = raw.get("backend", np.full(len(dtype), "trtllm_graph", object))
    mode = np.array([word.rpartition("_")[2] for word in launch], object)
    out = _unknown_dtypes(dtype)
    out |= {f"launched as {m}": mode == m for m in sorted(set(mode)) if m not in ("graph", "eager")}
    columns = {"dtype": dtype, "num_gpus": raw["num_gpus"], "mode": mode}
    columns |= {"message_bytes": _message_bytes(raw, dtype), **_timed(raw)}
    return [("allreduce", Rows(columns, out))]


def _nccl(raw: Raw) -> list[tuple[str, Rows]]:
    dtype, name = _dtype_names(raw["nccl_dtype"]), raw["op_name"]
    size = _message_bytes(raw, dtype)
    # NCCL's size of an all-gather is what all GPUs hold at its end; each contributes its share.
    share = np.where(name == "all_gather", size // raw["num_gpus"], size)
    columns = {"dtype": dtype, "num_gpus": raw["num_gpus"], **_timed(raw)}
    reduce = name == "all_reduce"
    nccl = {"mode": np.full(len(name), "nccl", object), "message_bytes": size}
    other = {"collective": name, "message_bytes": share}
    out = _unknown_dtypes(dtype)
    uneven = {"message that the GPUs cannot share": share * raw["num_gpus"] < size}
    return [
        ("allreduce", Rows(columns | nccl, out | {"other collectives": ~reduce})),
        ("collective", Rows(columns | other, out | uneven | {"all_reduce": reduce})),
    ]


def _scale_matrix(raw: Raw) -> list[tuple[str, Rows]]:
    dtype, m, k = raw["quant_dtype"], raw["m"], raw["k"]
    columns = {"kind": np.full(len(m), "fp8_quantise", object), "m": m, "width": k}
    # bf16 in, fp8 out.
    columns |= {"io_bytes": 3 * m * k, **_timed(raw)}
    out = {f"quantises to {d}": dtype == d for d in sorted(set(dtype)) if d != "fp8"}
    return [("elementwise", Rows(columns, out))]


def _compute_scale(raw: Raw) -> list[tuple[str, Rows]]:
    dtype, m, k = raw["quant_dtype"], raw["m"], raw["k"]
    columns = {"kind": np.full(len(m), "fp8_scale", object), "m": m, "width": k}
    # what finding the scales adds to quantising with known ones: a float32 a row
    columns |= {"io_bytes": 4 * m, **_timed(raw)}
    out = {f"scales of {d}": dtype == d for d in sorted(set(dtype)) if d != "fp8"}
    # one of the two kernels was as fast as the other
    out |= {"no difference": raw["latency"] == 0.0}
    return [("elementwise", Rows(columns, out))]


_ATTENTION = (
    *_sizes("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "beam_width"),
    *_sizes("step", minimum=0),
    *_texts("attn_dtype", "kv_cache_dtype"),
    *_MEASURED,
)
_ATTENTION_OPTIONAL = (*_sizes("window_size", minimum=0), *_RUN)
_MOE = (
    *_sizes("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
    *_texts("moe_dtype", "distribution"),
    *_MEASURED,
)
_COMM = (*_sizes("num_gpus", "message_size"), *_MEASURED)
FAMILIES: Final = (
    Family("gemm", "gemm_perf", (*_texts("gemm_dtype"), *_sizes("m", "n", "k"), *_MEASURED), _gemm, _RUN),
    Family("attention", "context_attention_perf", _ATTENTION, _attention_prefill, _ATTENTION_OPTIONAL),
    Family("attention", "generation_attention_perf", _ATTENTION, _attention_decode, _ATTENTION_OPTIONAL),
    Family("moe", "moe_perf", _MOE, _moe, _RUN),
    Family(
        "comm", "custom_allreduce_perf", (*_COMM, *_texts("allreduce_dtype")), _custom_allreduce,
        (*_texts("backend"), *_RUN),
    ),
    Family("comm", "nccl_perf", (*_COMM, *_texts("nccl_dtype", "op_name")), _nccl, _RUN, backend="nccl"),
    Family("quantize", "scale_matrix_perf", (*_texts("quant_dtype"), *_sizes("m", "k"), *_MEASURED),
            _scale_matrix, _RUN),
    Family("quantize", "computescale_perf", (*_texts("quant_dtype", "kernel_source"), *_sizes("m", "k"),
            _DIFFERENCE), _compute_scale, _RUN),
)  # fmt: skip


# -- rows of one operator ------------------------------------------------------------------------


def select(operator: str, rows: Rows, gpu: GpuSpec) -> tuple[dict[str, Array], dict[str, int]]:
    """Return the rows to keep and, by the first reason that holds, how many are left out."""
    keep = np.ones(len(rows.columns["latency_us"]), bool)
    left_out = {}
    for reason, mask in rows.out.items():
        count = int((keep & mask).sum())
        if count:
            left_out[reason] = count
        keep &= ~mask
    columns = {name: values[keep] for name, values in rows.columns.items()}
    slower = _slower_kernels(operator, columns)
    if slower.any():
        left_out["slower of two kernels for the same sizes"] = int(slower.sum())
        columns = {name: values[~slower] for name, values in columns.items()}
    work = row_work(operator, columns, gpu)
    too_fast = work.flops > columns["latency_us"] / US_PER_S * work.peak_flops_per_s
    # A few are broken measurements; more would mean a wrong peak or wrong sizes, which loading refuses.
    if 0 < too_fast.sum() <= _FEW * len(too_fast):
        left_out[f"faster than the peak of {gpu.name}"] = int(too_fast.sum())
        columns = {name: values[~too_fast] for name, values in columns.items()}
    return columns, left_out


def _slower_kernels(operator: str, columns: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
    """Mark rows of every kernel but the fastest of its sizes: a framework that has several picks one."""
    point = point_codes(operator, columns)
    _, kernel = np.unique(columns["kernel"], return_inverse=True)
    order = np.lexsort((columns["latency_us"], point))
    first = order[np.unique(point[order], return_index=True)[1]]
    return np.asarray(kernel != kernel[first][point])


def point_codes(operator: str, columns: Mapping[str, Array]) -> npt.NDArray[np.int64]:
    """Return a code for each row: equal for equal keys and axes."""
    schema = OPERATORS[operator]
    codes = np.zeros(len(columns["latency_us"]), np.int64)
    for column in (*schema.keys, *schema.axes):
        _, code = np.unique(columns[column.name], return_inverse=True)
        # Renumbered at each step, so that the product of two counts of rows cannot overflow.
        _, codes = np.unique(codes * (int(code.max(initial=0)) + 1) + code, return_inverse=True)
    return codes


def joined(operator: str, parts: list[Part]) -> dict[str, Array]:
    """Return the rows of all files that gave an operator some, sorted."""
    names = parts[0].columns
    return sort_rows(operator, {name: np.concatenate([p.columns[name] for p in parts]) for name in names})
