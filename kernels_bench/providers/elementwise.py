"""Elementwise points: inputs and references for every provider's small kernels, copies and launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kernels_bench.protocol import Point
from kernels_bench.providers import references
from kernels_bench.providers.device import FP8_MAX, Device, take
from kernels_bench.providers.paging import PAGE_SIZE
from kernels_bench.providers.random_inputs import InputMaker
from kernels_bench.providers.rotating import RotatingCalls, count_sets, sample
from kernels_bench.providers.small_ops import KINDS, RMS_EPSILON, ROPE_THETA, SmallOps

HEAD_DIM: Final = 128
"""Width of a head in rope and kv_write points, whose columns name only the sum of all heads."""
CHECKED_ROWS: Final = 64
CHECKED_COPY_BYTES: Final = 2**22
BF16_BYTES: Final = 2
MAX_POSITION: Final = 8192


def split_rope_heads(width: int) -> tuple[int, int]:
    """Split the heads of a rope point into query and KV heads.

    >>> split_rope_heads(40 * 128)
    (32, 8)
    """
    heads = width // HEAD_DIM
    kv_heads = max(1, heads // 5)
    return heads - kv_heads, kv_heads


def rope_table(make: InputMaker, positions: int, head_dim: int, theta: float, dtype: str) -> Any:
    """Return cosines, then sines, of each position."""
    import torch

    from kernels_bench.providers.device import torch_dtype

    name = make.device.name
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=name) / head_dim
    angle = torch.arange(positions, dtype=torch.float64, device=name)[:, None] * theta**-exponent
    return torch.cat((angle.cos(), angle.sin()), dim=1).to(torch_dtype(dtype))


def refuses_small_op(point: Point) -> str | None:
    """Return why an elementwise point's sizes make no kernel; None where they do."""
    kind, width = point.values["kind"], int(point.values["width"])
    if kind == "rope" and width % HEAD_DIM:
        return f"rope has heads of {HEAD_DIM}, and width {width} is not a multiple of it"
    if kind == "rope" and width < 2 * HEAD_DIM:
        return f"rope has a query and a key head at least: width {2 * HEAD_DIM}, not {width}"
    if kind == "kv_write" and width % (2 * HEAD_DIM):
        return f"K and V have heads of {HEAD_DIM}, and width {width} is not a multiple of {2 * HEAD_DIM}"
    return None


def prepare_small_op(point: Point, ops: SmallOps, device: Device, seed: int, max_bytes: int) -> RotatingCalls:
    """Make inputs of a small kernel and bind a provider's to them."""
    values = point.values
    kind, m, width = str(values["kind"]), int(values["m"]), int(values["width"])
    kernel = ops.kernels.get(kind, kind)
    set_bytes = _set_bytes(kind, m, width)
    # In-place kinds hold their inputs twice.
    sets = count_sets(set_bytes, device.rotated_bytes, max_bytes // 2)
    make = InputMaker(device, seed)
    rows = make.indices(sample(m, CHECKED_ROWS, seed), "int64")
    call, arguments, read, expect = _BINDERS[kind](ops, make, sets, m, width, rows)
    # Sliced once: the host's time for a launch bounds how fast a graph is captured.
    calls, written = list(zip(*(one.unbind() for one in arguments), strict=True)), dict[int, Any]()

    def launch(index: int) -> None:
        written[index] = call(*calls[index])

    def read_set(index: int) -> Any:
        return read(index, written[index] or calls[index])

    return RotatingCalls(kernel, sets, sets * set_bytes, launch, read_set, expect)


def _set_bytes(kind: str, m: int, width: int) -> int:
    elements = {"rmsnorm_residual": 2, "rope": 1, "silu_and_mul": 3, "kv_write": 2, "fp8_quantise": 1.5}[kind]
    return math.ceil(elements * BF16_BYTES * m * width)


Bound = tuple[Callable[..., Any], tuple[Any, ...], Callable[[int, Any], Any], Callable[[int], Any]]
"""What is called, with which tensors of each set; what is checked of a set, in what the call returned or else
was given; and what should be there."""


def _bind_rmsnorm(ops: SmallOps, make: InputMaker, sets: int, m: int, width: int, rows: Any) -> Bound:
    import torch

    x, residual = make.normal(sets, m, width), make.normal(sets, m, width)
    weight = make.normal(width)
    x_before, residual_before = x[:, rows].clone(), residual[:, rows].clone()

    def call(x: Any, residual: Any) -> Any:
        return ops.rmsnorm_residual(x, residual, weight)

    def read(index: int, written: Any) -> Any:
        return torch.stack([part[rows].double() for part in written])

    def expect(index: int) -> Any:
        return torch.stack(
            references.add_rmsnorm(x_before[index], residual_before[index], weight, RMS_EPSILON)
        )

    return call, (x, residual), read, expect


def _bind_rope(ops: SmallOps, make: InputMaker, sets: int, m: int, width: int, rows: Any) -> Bound:
    import torch

    q_heads, _ = split_rope_heads(width)
    qk = make.normal(sets, m, width)
    before = qk[:, rows].clone()
    # Queries and keys are columns of one row, as the QKV projection leaves them.
    q, k = qk.split((q_heads * HEAD_DIM, width - q_heads * HEAD_DIM), dim=-1)
    random = np.random.default_rng(m)
    positions = make.indices(random.integers(0, MAX_POSITION, m), "int64")
    cos_sin = rope_table(make, MAX_POSITION, HEAD_DIM, ROPE_THETA, ops.cos_sin_dtype)

    def call(q: Any, k: Any) -> Any:
        return ops.rope(positions, q, k, HEAD_DIM, cos_sin)

    def read(index: int, written: Any) -> Any:
        return torch.cat([part[rows] for part in written], dim=-1)

    def expect(index: int) -> Any:
        heads = before[index].unflatten(-1, (-1, HEAD_DIM))
        return references.rope(heads, cos_sin[positions[rows]]).flatten(1)

    return call, (q, k), read, expect


def _bind_silu(ops: SmallOps, make: InputMaker, sets: int, m: int, width: int, rows: Any) -> Bound:
    x, out = make.normal(sets, m, 2 * width), make.poisoned(sets, m, width)

    def read(index: int, written: Any) -> Any:
        return written[0][rows]

    return ops.silu_and_mul, (out, x), read, lambda index: references.silu_and_mul(x[index, rows])


def _bind_kv_write(ops: SmallOps, make: InputMaker, sets: int, m: int, width: int, rows: Any) -> Bound:
    import torch

    heads = width // (2 * HEAD_DIM)
    pages = -(-m // PAGE_SIZE)
    kv = make.normal(sets, m, 2, heads, HEAD_DIM)
    # K and V of a token side by side in the cache, as vLLM has them.
    cache = make.poisoned(sets, pages, PAGE_SIZE, heads, 2 * HEAD_DIM)
    k_pages, v_pages = cache.split(HEAD_DIM, dim=-1)
    slots = make.indices(np.random.default_rng(m).permutation(pages * PAGE_SIZE)[:m], "int64")

    def call(k: Any, v: Any, k_pages: Any, v_pages: Any) -> None:
        ops.kv_write(k, v, k_pages, v_pages, slots)

    def read(index: int, written: Any) -> Any:
        return cache[index].flatten(0, 1)[slots[rows]].unflatten(-1, (2, HEAD_DIM)).transpose(1, 2)

    parts = (kv[:, :, 0], kv[:, :, 1], k_pages, v_pages)
    return call, parts, read, lambda index: torch.as_tensor(kv[index, rows])


def _bind_fp8(ops: SmallOps, make: InputMaker, sets: int, m: int, width: int, rows: Any) -> Bound:
    import torch

    x = make.normal(sets, m, width)
    out = make.poisoned(sets, m, width, dtype="fp8")
    # Above 5 sigma values saturate, as they do with a scale from calibration.
    scale = torch.full((1,), 5.0 / FP8_MAX, dtype=torch.float32, device=make.device.name)

    def call(out: Any, x: Any) -> Any:
        return ops.fp8_quantise(out, x, scale)

    def read(index: int, written: Any) -> Any:
        return take(written[0], rows).double() * scale.double()

    return call, (out, x), read, lambda index: x[index, rows].double().clamp(-5.0, 5.0)


_BINDERS: Final = {
    "rmsnorm_residual": _bind_rmsnorm,
    "rope": _bind_rope,
    "silu_and_mul": _bind_silu,
    "kv_write": _bind_kv_write,
    "fp8_quantise": _bind_fp8,
}
assert set(_BINDERS) == set(KINDS)


COPY_KERNEL: Final = "tensor.copy_, device to device"
EMPTY_KERNEL: Final = "torch.cuda._sleep of no cycles"


def prepare_copy(point: Point, device: Device, seed: int, max_bytes: int) -> RotatingCalls:
    """Make source and target of a copy on the device."""
    import torch

    elements = int(point.values["m"]) * int(point.values["width"])
    set_bytes = 2 * BF16_BYTES * elements
    sets = count_sets(set_bytes, device.rotated_bytes, max_bytes)
    make = InputMaker(device, seed)
    source, target = make.normal(sets, elements), make.poisoned(sets, elements)
    checked = CHECKED_COPY_BYTES // (2 * BF16_BYTES)

    def ends(tensor: Any) -> Any:
        return tensor if elements <= 2 * checked else torch.cat((tensor[:checked], tensor[-checked:]))

    calls = list(zip(target.unbind(), source.unbind(), strict=True))

    def launch(index: int) -> None:
        to, of = calls[index]
        to.copy_(of)

    checked_ends = (lambda index: ends(target[index]), lambda index: ends(source[index]))
    return RotatingCalls(COPY_KERNEL, sets, sets * set_bytes, launch, *checked_ends)


def prepare_launch(device: Device) -> RotatingCalls:
    """Bind a kernel that does nothing; it has no result to check."""
    import torch

    nothing = torch.zeros(0, dtype=torch.float64, device=device.name)

    def launch(index: int) -> None:
        if device.name == "cuda":
            torch.cuda._sleep(0)

    return RotatingCalls(EMPTY_KERNEL, 1, 0, launch, lambda index: nothing, lambda index: nothing)
