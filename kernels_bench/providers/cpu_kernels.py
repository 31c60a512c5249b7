"""What the cpu provider computes: every operator in NumPy, on inputs that low precisions can hold.

bf16 is emulated: inputs hold bf16 values in float32, arithmetic is float32, results are rounded to bf16.
fp8 in blocks is emulated by inputs: quantised, and multiplied by the scale of their block again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Array
from kernels_bench.operators.attention import ATTENTION
from kernels_bench.routing import route

Singles = npt.NDArray[np.float32]
Arrays = dict[str, Any]
Compute = Callable[[Arrays, Any], Array]
"""Computes from inputs of one set in a dtype: float32 when timed, float64 as the reference."""

EPSILON: Final = 1e-6
LANES: Final = {"rmsnorm_residual": 3, "rope": 3, "silu_and_mul": 3, "kv_write": 3, "copy": 2, "launch": 1}
"""Arrays of ``m x width`` that an elementwise call holds."""
BLOCK: Final = 128
E4M3_MAX: Final = 448.0
E4M3_LEAST_EXPONENT: Final = -6
E4M3_MANTISSA_BITS: Final = 3


def round_bf16(values: npt.ArrayLike) -> Singles:
    """Round float32 numbers to the nearest bf16, ties to even; NaN stays NaN.

    >>> round_bf16([1.0, 1.00390625, 1.01171875]).tolist()
    [1.0, 1.0, 1.015625]
    """
    floats = np.ascontiguousarray(values, np.float32)
    bits = floats.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(floats), floats, rounded.view(np.float32)).astype(np.float32)


def round_e4m3(values: npt.ArrayLike) -> Singles:
    """Round to the nearest number that e4m3 holds, ties to even; beyond its largest, to that.

    >>> round_e4m3([1.06, 500.0, 0.001]).tolist()
    [1.0, 448.0, 0.001953125]
    """
    numbers = np.asarray(values, np.float64)
    exponents = np.frexp(numbers)[1] - 1
    steps = np.ldexp(1.0, np.maximum(exponents, E4M3_LEAST_EXPONENT) - E4M3_MANTISSA_BITS)
    rounded: Singles = np.clip(np.rint(numbers / steps) * steps, -E4M3_MAX, E4M3_MAX).astype(np.float32)
    return rounded


def _normal(random: np.random.Generator, *shape: int) -> Singles:
    return round_bf16(random.standard_normal(shape, np.float32))


def _block_scaled(values: Singles, block_rows: int) -> Singles:
    """What is left of a matrix after fp8 with a scale a block of 128 columns."""
    out = np.empty_like(values)
    for top in range(0, values.shape[0], block_rows):
        for left in range(0, values.shape[1], BLOCK):
            block = np.s_[top : top + block_rows, left : left + BLOCK]
            scale = np.abs(values[block]).max() / E4M3_MAX
            out[block] = round_e4m3(values[block] / scale) * scale
    return out


class _Size(NamedTuple):
    """Multiply-adds of a call, and numbers that one input set holds."""

    work: float
    numbers: float


# -- inputs and kernels, by operator ---------------------------------------------------------------


def _gemm_size(v: Mapping[str, Any]) -> _Size:
    m, n, k = (float(v[name]) for name in "mnk")
    return _Size(m * n * k, m * k + n * k + m * n)


def _gemm_inputs(v: Mapping[str, Any], random: np.random.Generator, seed: int) -> Arrays:
    x, w = _normal(random, v["m"], v["k"]), _normal(random, v["n"], v["k"])
    if v["dtype"] == "fp8_block":
        x, w = _block_scaled(x, 1), _block_scaled(w, BLOCK)
    return {"x": x, "w": w}


def _gemm(a: Arrays, dtype: Any) -> Array:
    return np.asarray(a["x"].astype(dtype, copy=False) @ a["w"].astype(dtype, copy=False).T)


def _attention_size(v: Mapping[str, Any]) -> _Size:
    batch, kv_len, head_dim = (float(v[name]) for name in ("batch_size", "kv_len", "head_dim"))
    scores = float(v["num_q_heads"]) * batch * float(v.get("q_len", 1)) * kv_len
    return _Size(2 * scores * head_dim, 2 * batch * kv_len * float(v["num_kv_heads"]) * head_dim + scores)


def _attention_inputs(v: Mapping[str, Any], random: np.random.Generator, seed: int) -> Arrays:
    batch, q_len = int(v["batch_size"]), int(v.get("q_len", 1))
    kv_len, kv_heads, head_dim = int(v["kv_len"]), int(v["num_kv_heads"]), int(v["head_dim"])
    group = int(v["num_q_heads"]) // kv_heads
    return {
        "q": [_normal(random, kv_heads, group, q_len, head_dim) for _ in range(batch)],
        "k": [_normal(random, kv_heads, 1, kv_len, head_dim) for _ in range(batch)],
        "v": [_normal(random, kv_heads, 1, kv_len, head_dim) for _ in range(batch)],
        "window": int(v.get("window", 0)),
    }


def _attention(a: Arrays, dtype: Any) -> Array:
    outputs = []
    for q, k, v in zip(a["q"], a["k"], a["v"], strict=True):
        q_len, kv_len = q.shape[2], k.shape[2]
        scores = q.astype(dtype, copy=False) @ k.astype(dtype, copy=False).swapaxes(2, 3)
        scores *= q.shape[3] ** -0.5
        # A query sees the prefix, the queries before it and itself, no more of them than the window holds.
        place, own = np.arange(kv_len), np.arange(kv_len - q_len, kv_len)[:, None]
        hidden = place > own
        if a["window"]:
            hidden |= place <= own - a["window"]
        scores[..., hidden] = -np.inf
        outputs.append((_softmax(scores) @ v.astype(dtype, copy=False)).ravel())
    return np.concatenate(outputs)


def _softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normalised: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normalised


def _mla_size(v: Mapping[str, Any]) -> _Size:
    batch, kv_len = float(v["batch_size"]), float(v["kv_len"])
    rank, rope = float(v["kv_lora_rank"]), float(v["rope_dim"])
    scores = float(v["num_q_heads"]) * batch * kv_len
    return _Size(scores * (2 * rank + rope), batch * kv_len * (rank + rope) + scores)


def _mla_inputs(v: Mapping[str, Any], random: np.random.Generator, seed: int) -> Arrays:
    width = v["kv_lora_rank"] + v["rope_dim"]
    return {
        "q": _normal(random, v["batch_size"], v["num_q_heads"], width),
        "kv": _normal(random, v["batch_size"], v["kv_len"], width),
        "rank": int(v["kv_lora_rank"]),
    }


def _mla_decode(a: Arrays, dtype: Any) -> Array:
    q, kv = a["q"].astype(dtype, copy=False), a["kv"].astype(dtype, copy=False)
    scores = (q @ kv.swapaxes(1, 2)) * q.shape[2] ** -0.5
    return np.asarray(_softmax(scores) @ kv[..., : a["rank"]])


def _moe_size(v: Mapping[str, Any]) -> _Size:
    hidden, width = float(v["hidden"]), float(v["intermediate"]) / v["moe_tp"]
    tokens = float(v["num_tokens"])
    held = 3 * v["num_experts"] / v["moe_ep"] * hidden * width + tokens * (2 * hidden + v["num_experts"])
    return _Size(3 * tokens * v["topk"] * hidden * width, held)


def _moe_inputs(v: Mapping[str, Any], random: np.random.Generator, seed: int) -> Arrays:
    experts, hidden, width = v["num_experts"] // v["moe_ep"], v["hidden"], v["intermediate"] // v["moe_tp"]
    scale = np.float32(hidden**-0.5)
    shares = random.random((v["num_tokens"], v["topk"]))
    return {
        "x": _normal(random, v["num_tokens"], hidden),
        "gate_up": round_bf16(_normal(random, experts, 2 * width, hidden) * scale),
        "down": round_bf16(_normal(random, experts, hidden, width) * scale),
        "chosen": route(v["num_tokens"], v["topk"], v["num_experts"], v["moe_ep"], v["distribution"], seed),
        "shares": shares / shares.sum(axis=1, keepdims=True),
    }


def _moe(a: Arrays, dtype: Any) -> Array:
    x, chosen = a["x"].astype(dtype, copy=False), a["chosen"]
    out = np.zeros(x.shape, dtype)
    for expert in range(len(a["down"])):  # those of other GPUs are not here
        tokens, slots = np.nonzero(chosen == expert)
        gate, up = np.split(x[tokens] @ a["gate_up"][expert].astype(dtype, copy=False).T, 2, axis=1)
        made = (_silu(gate) * up) @ a["down"][expert].astype(dtype, copy=False).T
        out[tokens] += a["shares"][tokens, slots, None].astype(dtype) * made
    return out


def _silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def _elementwise_size(v: Mapping[str, Any]) -> _Size:
    elements = float(v["m"]) * float(v["width"])
    return _Size(elements, elements * LANES[v["kind"]])


def _elementwise_inputs(v: Mapping[str, Any], random: np.random.Generator, seed: int) -> Arrays:
    kind, m, width = str(v["kind"]), int(v["m"]), int(v["width"])
    first = _normal(random, m, width)
    lanes: Arrays = {"kind": kind, "x": first}
    if kind in ("rmsnorm_residual", "silu_and_mul"):
        lanes["y"] = _normal(random, m, width)
    elif kind == "rope":
        angles = random.uniform(0, 2 * np.pi, (m, width // 2)).astype(np.float32)
        lanes |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    elif kind in ("kv_write", "copy"):
        lanes |= {"out": np.full((m, width), np.nan, np.float32), "slots": random.permutation(m)}
    return lanes


def _elementwise(a: Arrays, dtype: Any) -> Array:
    kind, x = a["kind"], a["x"]
    if kind == "launch":
        return np.zeros(1, dtype)
    if kind in ("kv_write", "copy"):
        # Moves bytes, so there is nothing to compute in another dtype.
        out: Array = a["out"] if dtype is np.float32 else np.empty_like(a["out"])
        if kind == "copy":
            np.copyto(out, x)
        else:
            out[a["slots"]] = x
        return out
    x = x.astype(dtype, copy=False)
    if kind == "rope":
        half = x.shape[1] // 2
        left, right = x[:, :half], x[:, half : 2 * half]
        cos, sin = a["cos"].astype(dtype, copy=False), a["sin"].astype(dtype, copy=False)
        return np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=1)
    y = a["y"].astype(dtype, copy=False)
    if kind == "silu_and_mul":
        return np.asarray(_silu(x) * y)
    total = x + y
    return np.asarray(total / np.sqrt((total * total).mean(axis=1, keepdims=True) + EPSILON))


class _Kernel(NamedTuple):
    """One operator in NumPy: what a call takes, its inputs and what it computes of them."""

    size: Callable[[Mapping[str, Any]], _Size]
    inputs: Callable[..., Arrays]
    compute: Compute


_ATTENTION: Final = _Kernel(_attention_size, _attention_inputs, _attention)
KERNELS: Final[dict[str, _Kernel]] = {
    "gemm": _Kernel(_gemm_size, _gemm_inputs, _gemm),
    **dict.fromkeys(ATTENTION, _ATTENTION),
    "moe": _Kernel(_moe_size, _moe_inputs, _moe),
    "mla_decode": _Kernel(_mla_size, _mla_inputs, _mla_decode),
    "elementwise": _Kernel(_elementwise_size, _elementwise_inputs, _elementwise),
}
