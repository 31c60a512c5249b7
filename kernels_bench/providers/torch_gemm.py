"""GEMMs: inputs and references for every provider, and torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastroof.columns import QUANTISES
from fastroof.operators.gemm import gemm_bytes
from fastroof.units import DTYPE_BYTES
from kernels_bench.protocol import Point
from kernels_bench.providers import references
from kernels_bench.providers.device import Device, take
from kernels_bench.providers.random_inputs import SCALE_BLOCK, InputMaker, quantise_blocks, spread_scales
from kernels_bench.providers.rotating import RotatingCalls, count_sets, sample

FP8_ALIGNMENT: Final = 16
"""fp8 kernels need n and k to be multiples of it."""
CHECKED_ROWS: Final = 64
CHECKED_COLUMNS: Final = 512

Gemm = Callable[[Any, Any, Any, Any, Any], Any]
"""Writes ``(x * x_scale) @ (weight * weight_scale).T``, called as (out, x, weight, x_scale, weight_scale).

Returns None, or the output if it made one instead of writing ``out``.

``weight`` is of shape (n, k), so that its transpose is column-major. ``weight_scale`` is of shape (1,); of
fp8_block it is (n / 128, k / 128) and ``x_scale`` is (m, k / 128). Both are None for bf16.
"""


def refuses_gemm(point: Point, device: Device) -> str | None:
    """Return why a GEMM cannot be measured on a device; None where it can."""
    dtype, n, k = point.values["dtype"], point.values["n"], point.values["k"]
    if dtype == "bf16":
        return None
    if dtype not in ("fp8", "fp8_block"):
        return f"no {dtype} GEMM here; there are bf16, fp8 and fp8_block"
    if dtype == "fp8_block" and (n % SCALE_BLOCK or k % SCALE_BLOCK):
        return f"fp8_block needs n and k in multiples of {SCALE_BLOCK}, not {n} and {k}"
    if n % FP8_ALIGNMENT or k % FP8_ALIGNMENT:
        return f"fp8 needs n and k in multiples of {FP8_ALIGNMENT}, not {n} and {k}"
    if device.name == "cuda" and not device.gfx and device.capability < (8, 9):
        return f"fp8 needs compute capability 8.9, this GPU has {device.version}"
    return None


def prepare_gemm(
    point: Point,
    device: Device,
    seed: int,
    max_bytes: int,
    kernel: str,
    gemm: Gemm,
    *,
    scales_rows: bool = False,
) -> RotatingCalls:
    """Make inputs of a GEMM and bind a kernel to them; ``scales_rows`` gives each row of fp8 its scale."""
    dtype = point.values["dtype"]
    m, n, k = (int(point.values[name]) for name in ("m", "n", "k"))
    set_bytes = int(gemm_bytes(m, n, k, DTYPE_BYTES[dtype]))
    num_sets = count_sets(set_bytes, device.rotated_bytes, max_bytes)
    make = InputMaker(device, seed)
    sets = [_one_set(make, dtype, m, n, k, scales_rows) for _ in range(num_sets)]
    written: dict[int, Any] = {}
    rows = make.indices(sample(m, CHECKED_ROWS, seed), "int64")
    columns = make.indices(sample(n, CHECKED_COLUMNS, seed + 1), "int64")

    def launch(index: int) -> None:
        written[index] = gemm(*sets[index])

    def read(index: int) -> Any:
        out = sets[index][0] if written[index] is None else written[index]
        return out[rows][:, columns]

    def expect(index: int) -> Any:
        _, x, weight, x_scale, weight_scale = sets[index]
        if dtype == "fp8_block":
            return references.linear(
                take(x, rows),
                take(weight, columns),
                spread_scales(x_scale[rows], 1, len(rows), k),
                spread_scales(weight_scale, SCALE_BLOCK, n, k)[columns],
            )
        scales = (x_scale[:1], weight_scale[:1]) if dtype == "fp8" else (None, None)
        return references.linear(take(x, rows), take(weight, columns), *scales)

    return RotatingCalls(kernel, num_sets, num_sets * set_bytes, launch, read, expect, {QUANTISES.name: 0})


def _one_set(
    make: InputMaker, dtype: str, m: int, n: int, k: int, scales_rows: bool
) -> tuple[Any, Any, Any, Any, Any]:
    out = make.poisoned(m, n)
    if dtype == "bf16":
        return out, make.normal(m, k), make.normal(n, k), None, None
    if dtype == "fp8_block":
        x, x_scale = quantise_blocks(make.normal(m, k), 1, make.device.fp8)
        weight, weight_scale = quantise_blocks(make.normal(n, k), SCALE_BLOCK, make.device.fp8)
        return out, x, weight, x_scale, weight_scale
    x, x_scale = make.quantised(m, k)
    weight, weight_scale = make.quantised(n, k)
    if scales_rows:
        x_scale, weight_scale = x_scale.repeat(m, 1), weight_scale.repeat(n, 1)
    return out, x, weight, x_scale, weight_scale


def torch_gemm(dtype: str, is_amd: bool = False) -> tuple[str, Gemm]:
    """Return torch's kernel of a dtype and what to call it."""
    import torch

    if dtype == "bf16":

        def linear(out: Any, x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> None:
            torch.mm(x, weight.t(), out=out)

        return f"F.linear (aten::mm, {'hipBLASLt' if is_amd else 'cuBLASLt'})", linear

    def scaled(out: Any, x: Any, weight: Any, x_scale: Any, weight_scale: Any) -> None:
        torch._scaled_mm(
            x,
            weight.t(),
            scale_a=x_scale,
            scale_b=weight_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=not is_amd,
            out=out,
        )

    return f"torch._scaled_mm, per tensor{'' if is_amd else ', fast accumulation'}", scaled
