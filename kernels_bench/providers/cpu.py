"""The host's CPU through NumPy: tiny sizes, to prove the harness without a GPU. Its times are no GPU's.

bf16 is emulated: inputs hold bf16 values in float32, arithmetic is float32, results are rounded to bf16.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Array, Floats
from fastroof.errors import MeasureError
from fastroof.units import MIB
from kernels_bench.operators.attention import ATTENTION
from kernels_bench.points import Point
from kernels_bench.protocol import Availability
from kernels_bench.providers.paging import spread_kv_lens

__all__ = ["CpuPrepared", "CpuProvider", "round_bf16"]

Singles = npt.NDArray[np.float32]
Arrays = dict[str, Any]
Compute = Callable[[Arrays, Any], Array]
"""Computes from inputs of one set in a dtype: float32 when timed, float64 as the reference."""

MAX_BYTES: Final = 64 * MIB
MAX_WORK: Final = 2**30
"""Multiply-adds of a call: about 0.1 s on one core."""
NUM_SETS: Final = 2
FLOAT_BYTES: Final = 4.0
EPSILON: Final = 1e-6
LANES: Final = {"rmsnorm_residual": 3, "rope": 3, "silu_and_mul": 3, "kv_write": 3, "copy": 2, "launch": 1}
"""Arrays of ``m x width`` that an elementwise call holds."""


def round_bf16(values: npt.ArrayLike) -> Singles:
    """Round float32 numbers to the nearest bf16, ties to even; NaN stays NaN.

    Parameters
    ----------
    values : array_like
        Any shape.

    Returns
    -------
    ndarray of float32
        bf16 values.

    Examples
    --------
    >>> round_bf16([1.0, 1.00390625, 1.01171875]).tolist()
    [1.0, 1.0, 1.015625]
    """
    floats = np.ascontiguousarray(values, np.float32)
    bits = floats.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(floats), floats, rounded.view(np.float32)).astype(np.float32)


class CpuProvider:
    """Measures tiny bf16 kernels on the host; asked for by name only."""

    name = "cpu"

    def availability(self) -> Availability:
        """Return that it works anywhere."""
        return Availability(works=True, versions={"numpy": np.__version__})

    def refuses(self, point: Point) -> str | None:
        """Say why a point is not for a CPU; None where it is."""
        values = point.values
        if point.operator not in _KERNELS:
            return f"no {point.operator} on a CPU; there are {', '.join(_KERNELS)}"
        for column in ("dtype", "kv_dtype"):
            if values.get(column, "bf16") != "bf16":
                return f"{column} {values[column]}: bf16 is the only dtype that is emulated"
        if values.get("kind", "copy") not in LANES:
            return f"no {values['kind']} on a CPU; there are {', '.join(LANES)}"
        if values.get("moe_ep", 1) != 1:
            return f"moe_ep {values['moe_ep']}: one CPU holds every expert"
        work, numbers = _KERNELS[point.operator].size(values)
        held_bytes = FLOAT_BYTES * numbers
        if held_bytes > MAX_BYTES or work > MAX_WORK:
            return (
                f"too large for a CPU: {work:.3g} multiply-adds and {held_bytes:.3g} B, "
                f"at most {MAX_WORK:,} and {MAX_BYTES:,} B; it proves the harness on tiny sizes"
            )
        return None

    def prepare(self, point: Point, seed: int, max_bytes: int) -> CpuPrepared:
        """Make random inputs.

        Raises
        ------
        MeasureError
            If the provider refuses the point.
        MemoryError
            If the inputs are larger than ``max_bytes``.
        """
        reason = self.refuses(point)
        if reason is not None:
            raise MeasureError(f"{point.key}: {reason}")
        _use_one_thread()
        held_bytes = FLOAT_BYTES * _KERNELS[point.operator].size(point.values).numbers * NUM_SETS
        if held_bytes > max_bytes:
            raise MemoryError(f"inputs of {held_bytes:,} B, {max_bytes:,} B are there")
        return CpuPrepared(point, seed)


@functools.cache
def _use_one_thread() -> None:
    """Keep NumPy's BLAS on one thread: on a busy host a tiny GEMM of four takes 8 ms of waiting for them."""
    libraries = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line}
    for library in libraries:
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            with contextlib.suppress(OSError, AttributeError):  # another BLAS: its threads stay
                getattr(ctypes.CDLL(library), name)(1)


class CpuPrepared:
    """Inputs of one point on the host."""

    def __init__(self, point: Point, seed: int) -> None:
        kernel = _KERNELS[point.operator]
        self._compute = kernel.compute
        random = np.random.default_rng(seed % 2**63)
        self.kernel = f"numpy {point.values.get('kind', point.operator)}"
        self.num_sets = NUM_SETS
        self._values = dict(point.values)
        self._sets: list[Arrays] = [kernel.inputs(self._values, random, seed) for _ in range(NUM_SETS)]
        self._outputs: list[Array | None] = [None] * NUM_SETS

    def run(self, index: int) -> None:
        """Compute on input set ``index``."""
        self._outputs[index] = self._compute(self._sets[index], np.float32)

    def result(self, index: int) -> Floats:
        """Return what the last run on that set computed, rounded as a GPU stores it."""
        output = self._outputs[index]
        if output is None:
            raise MeasureError(f"{self.kernel}: input set {index} was not run")
        return round_bf16(output).astype(np.float64)

    def reference(self, index: int) -> Floats:
        """Return the same in float64."""
        return self._compute(self._sets[index], np.float64).astype(np.float64)

    def close(self) -> None:
        """Drop the inputs."""
        self._sets, self._outputs = [], []


def _normal(random: np.random.Generator, *shape: int) -> Singles:
    return round_bf16(random.standard_normal(shape, np.float32))


class _Size(NamedTuple):
    """Multiply-adds of a call, and numbers that one input set holds."""

    work: float
    numbers: float


# -- inputs and kernels, by operator ---------------------------------------------------------------


def _gemm_size(v: Mapping[str, Any]) -> _Size:
    m, n, k = (float(v[name]) for name in "mnk")
    return _Size(m * n * k, m * k + n * k + m * n)


def _gemm_inputs(v: Mapping[str, Any], random: np.random.Generator, seed: int) -> Arrays:
    return {"x": _normal(random, v["m"], v["k"]), "w": _normal(random, v["n"], v["k"])}


def _gemm(a: Arrays, dtype: Any) -> Array:
    return np.asarray(a["x"].astype(dtype, copy=False) @ a["w"].astype(dtype, copy=False).T)


def _attention_size(v: Mapping[str, Any]) -> _Size:
    batch, kv_len, head_dim = (float(v[name]) for name in ("batch_size", "kv_len", "head_dim"))
    scores = float(v["num_q_heads"]) * batch * float(v.get("q_len", 1)) * kv_len
    return _Size(2 * scores * head_dim, 2 * batch * kv_len * float(v["num_kv_heads"]) * head_dim + scores)


def _attention_inputs(v: Mapping[str, Any], random: np.random.Generator, seed: int) -> Arrays:
    batch, q_len = int(v["batch_size"]), int(v.get("q_len", 1))
    kv_lens = np.full(batch, v["kv_len"], np.int64)
    if "spread" in v:
        kv_lens = spread_kv_lens(v["spread"], batch, int(v["kv_len"]), seed)
    kv_heads, head_dim = int(v["num_kv_heads"]), int(v["head_dim"])
    group = int(v["num_q_heads"]) // kv_heads
    return {
        "q": [_normal(random, kv_heads, group, q_len, head_dim) for _ in kv_lens],
        "k": [_normal(random, kv_heads, 1, int(n), head_dim) for n in kv_lens],
        "v": [_normal(random, kv_heads, 1, int(n), head_dim) for n in kv_lens],
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
    held = 3 * v["num_experts"] * hidden * width + tokens * (2 * hidden + v["num_experts"])
    return _Size(3 * tokens * v["topk"] * hidden * width, held)


def _moe_inputs(v: Mapping[str, Any], random: np.random.Generator, seed: int) -> Arrays:
    experts, hidden, width = v["num_experts"], v["hidden"], v["intermediate"] // v["moe_tp"]
    scale = np.float32(hidden**-0.5)
    return {
        "x": _normal(random, v["num_tokens"], hidden),
        "gate_up": round_bf16(_normal(random, experts, 2 * width, hidden) * scale),
        "down": round_bf16(_normal(random, experts, hidden, width) * scale),
        # Balanced: tokens take experts in turn.
        "chosen": np.arange(v["num_tokens"] * v["topk"]).reshape(-1, v["topk"]) % experts,
    }


def _moe(a: Arrays, dtype: Any) -> Array:
    x, chosen = a["x"].astype(dtype, copy=False), a["chosen"]
    out = np.zeros(x.shape, dtype)
    for expert in np.unique(chosen):
        tokens = np.flatnonzero((chosen == expert).any(axis=1))
        gate, up = np.split(x[tokens] @ a["gate_up"][expert].astype(dtype, copy=False).T, 2, axis=1)
        out[tokens] += (_silu(gate) * up) @ a["down"][expert].astype(dtype, copy=False).T
    return np.asarray(out / chosen.shape[1])


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
_KERNELS: Final[dict[str, _Kernel]] = {
    "gemm": _Kernel(_gemm_size, _gemm_inputs, _gemm),
    **dict.fromkeys(ATTENTION, _ATTENTION),
    "moe": _Kernel(_moe_size, _moe_inputs, _moe),
    "mla_decode": _Kernel(_mla_size, _mla_inputs, _mla_decode),
    "elementwise": _Kernel(_elementwise_size, _elementwise_inputs, _elementwise),
}
