"""Experts in Triton, for where vLLM is not at hand: grouped GEMMs over rows by expert, in bf16 and fp8.

Block sizes follow the rows an expert takes and nothing is tuned, so that these are slower than an engine's
tuned kernels. Imported only where they run; in tests they run in Triton's interpreter on the CPU.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import triton
import triton.language as tl

from kernels_bench.protocol import Point
from kernels_bench.providers.device import FP8_MAX, Device, torch_dtype
from kernels_bench.providers.experts import ExpertLayer, ExpertSets, ExpertWeights
from kernels_bench.providers.random_inputs import SCALE_BLOCK
from kernels_bench.providers.rotating import RotatingCalls
from kernels_bench.providers.triton_elementwise import TritonSmallOps

BLOCK_ROWS: Final = (16, 32, 64, 128)
BLOCK_N: Final = 128
BLOCK_K: Final = 128
"""A block of scales, so that one scale serves each step."""
UNSCALED, BY_EXPERT, BY_BLOCK = 0, 1, 2
_MAX = tl.constexpr(FP8_MAX)
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


def _gemm_kernel(
    out: Any, a: Any, b: Any, a_scale: Any, b_scale: Any, shares: Any,
    source: Any, target: Any, expert_of: Any, n: Any, k: Any,
    SCALING: tl.constexpr, HAS_SHARES: tl.constexpr,
    ROWS: tl.constexpr, SIZE_N: tl.constexpr, SIZE_K: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    places = block * ROWS + tl.arange(0, ROWS)
    rows = tl.load(source + places).to(tl.int64)
    inside = rows >= 0
    rows = tl.where(inside, rows, 0)
    expert = tl.load(expert_of + block).to(tl.int64)
    columns = tl.program_id(1) * SIZE_N + tl.arange(0, SIZE_N)
    steps = tl.arange(0, SIZE_K)
    weight = b + expert * n * k + columns.to(tl.int64)[None, :] * k
    total = tl.zeros((ROWS, SIZE_N), tl.float32)
    for first in range(0, k, SIZE_K):
        within = first + steps < k
        left = tl.load(a + rows[:, None] * k + (first + steps)[None, :],
                       mask=inside[:, None] & within[None, :], other=0.0)  # fmt: skip
        right = tl.load(weight + (first + steps)[:, None],
                        mask=within[:, None] & (columns < n)[None, :], other=0.0)  # fmt: skip
        if SCALING == 2:
            groups = tl.cdiv(k, _SCALE_BLOCK)
            group = first // _SCALE_BLOCK
            of_rows = tl.load(a_scale + rows * groups + group)
            tall = tl.cdiv(n, _SCALE_BLOCK)
            of_columns = tl.load(
                b_scale + (expert * tall + columns // _SCALE_BLOCK) * groups + group,
                mask=columns < n, other=0.0,
            )  # fmt: skip
            total += tl.dot(left, right) * of_rows[:, None] * of_columns[None, :]
        else:
            total = tl.dot(left, right, total)
    if SCALING == 1:
        total *= tl.load(a_scale) * tl.load(b_scale + expert)
    left_at = tl.load(target + places).to(tl.int64)
    if HAS_SHARES:
        total *= tl.load(shares + left_at, mask=inside, other=0.0)[:, None]
    tl.store(out + left_at[:, None] * n + columns[None, :], total.to(out.dtype.element_ty),
             mask=inside[:, None] & (columns < n)[None, :])  # fmt: skip


def _quantise_kernel(out: Any, scales: Any, x: Any, width: Any, SIZE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = group * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + row * width + column).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-10) / _MAX
    tl.store(scales + row * (width // SIZE) + group, scale)
    scaled = tl.minimum(tl.maximum(value / scale, -_MAX), _MAX)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty))


_gemm, _quantise = triton.jit(_gemm_kernel), triton.jit(_quantise_kernel)


def prepare_triton_experts(point: Point, device: Device, seed: int, max_bytes: int) -> RotatingCalls:
    """Make tokens and experts, and the order of rows by expert."""
    layer = ExpertLayer.of(point)
    between_bytes = 2 * layer.num_tokens * layer.topk * (3 * layer.width + layer.hidden)
    sets = ExpertSets.make(point, device, seed, max_bytes - between_bytes)
    plans = [_Blocks(sets, index) for index in range(sets.num_sets)]
    rows = max(plan.num_rows for plan in plans)
    activations = _Activations(sets, rows)
    kernel = f"triton grouped GEMMs, {layer.dtype}, untuned; router and sort not inside"
    return sets.calls(kernel, lambda index: activations.compute(index, plans[index]), seed)


class _Blocks:
    """Rows of a call in blocks of one expert each, the last of an expert filled with -1."""

    def __init__(self, sets: ExpertSets, index: int) -> None:
        import torch

        local, topk = sets.layer.num_local, sets.layer.topk
        experts = sets.experts[index].cpu().numpy().ravel()
        order = np.argsort(experts, kind="stable")
        order = order[: int((experts < local).sum())]
        counts = np.bincount(experts[order], minlength=local)
        self.num_rows = len(order)
        mean = self.num_rows / max(int((counts > 0).sum()), 1)
        self.block = next((size for size in BLOCK_ROWS if mean <= size), BLOCK_ROWS[-1])
        blocks = -(-counts // self.block)
        within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat((np.cumsum(blocks) - blocks) * self.block, counts) + within

        def placed(values: Any) -> Any:
            padded = np.full(int(blocks.sum()) * self.block, -1, np.int32)
            padded[places] = values
            return torch.as_tensor(padded, device=sets.x.device)

        self.token, self.row, self.assignment = (
            placed(order // topk), placed(np.arange(len(order))), placed(order),
        )  # fmt: skip
        expert_of = np.repeat(np.arange(local, dtype=np.int32), blocks)
        self.expert_of = torch.as_tensor(expert_of, device=sets.x.device)


class _Activations:
    """What lies between the kernels of a call; one is enough, as calls run one after the other."""

    def __init__(self, sets: ExpertSets, rows: int) -> None:
        import torch

        layer, x = sets.layer, sets.x
        self.sets, self.ops = sets, TritonSmallOps()
        self.scaling = {"bf16": UNSCALED, "fp8": BY_EXPERT, "fp8_block": BY_BLOCK}[layer.dtype]

        def empty(*shape: int, dtype: str = "bf16") -> Any:
            return torch.empty(shape, dtype=torch_dtype(dtype), device=x.device)

        self.gated, self.middle = empty(rows, 2 * layer.width), empty(rows, layer.width)
        # Of experts elsewhere nothing is written, so what is zero stays so.
        self.parts = torch.zeros(
            (layer.num_tokens * layer.topk, layer.hidden), dtype=x.dtype, device=x.device
        )
        self.shares = sets.expert_weights.flatten(1)
        if self.scaling != UNSCALED:
            self.x_fp8, self.middle_fp8 = (
                empty(layer.num_tokens, layer.hidden, dtype="fp8"), empty(rows, layer.width, dtype="fp8"),
            )  # fmt: skip
        if self.scaling == BY_BLOCK:
            self.x_scale = empty(layer.num_tokens, layer.hidden // SCALE_BLOCK, dtype="fp32")
            self.middle_scale = empty(rows, layer.width // SCALE_BLOCK, dtype="fp32")
        else:
            self.x_scale, self.middle_scale = sets.x_scale, sets.gated_scale

    def compute(self, index: int, plan: _Blocks) -> Any:
        """Run one call."""
        sets, rows, weights = self.sets, plan.num_rows, self.sets.weights_of(index)
        x = self._quantised(sets.x[index], "x")
        self._multiply(self.gated, x, self.x_scale, weights, "gate_up", plan, plan.token, plan.row, None)
        self.ops.silu_and_mul(self.middle[:rows], self.gated[:rows])
        middle = self._quantised(self.middle[:rows], "middle")
        shares = self.shares[index]
        self._multiply(
            self.parts, middle, self.middle_scale, weights, "down", plan, plan.row, plan.assignment, shares
        )
        return self.parts.view(sets.layer.num_tokens, sets.layer.topk, -1).sum(dim=1)

    def _quantised(self, values: Any, name: str) -> Any:
        if self.scaling == UNSCALED:
            return values
        out = getattr(self, f"{name}_fp8")[: len(values)]
        scale = getattr(self, f"{name}_scale")
        if self.scaling == BY_EXPERT:
            self.ops.fp8_quantise(out, values, scale)
        else:
            rows, width = values.shape
            _quantise[(rows, width // SCALE_BLOCK)](out, scale, values, width, SIZE=SCALE_BLOCK)
        return out

    def _multiply(
        self,
        out: Any,
        a: Any,
        a_scale: Any,
        weights: ExpertWeights,
        name: str,
        plan: _Blocks,
        source: Any,
        target: Any,
        shares: Any,
    ) -> None:
        b, b_scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        _, n, k = b.shape
        unused = out  # an argument that no branch of the kernel reads
        _gemm[(len(plan.expert_of), triton.cdiv(n, BLOCK_N))](
            out, a, b,
            unused if a_scale is None else a_scale,
            unused if b_scale is None else b_scale,
            unused if shares is None else shares,
            source, target, plan.expert_of, n, k,
            SCALING=self.scaling, HAS_SHARES=shares is not None,
            ROWS=plan.block, SIZE_N=BLOCK_N, SIZE_K=BLOCK_K,
            num_warps=8 if plan.block >= 64 else 4, num_stages=3,
        )  # fmt: skip
