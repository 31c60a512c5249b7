"""Attention in plans: grid blocks of their arenas, from measured tables or the datasheet."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config.gpu import GpuSpec
from fastroof.operators.attention_grids import AttentionOperator
from fastroof.operators.attention_work import HeadShape, grid_from_memory
from fastroof.operators.operator import RowSource
from fastroof.pack import SIZE_LIMIT, PackedGrid
from fastroof.pack.keys import key_start_above
from fastroof.units import US_PER_S


class PlannedAttention(AttentionOperator):
    """Attention that plans call; ``rate_form`` is the form of blocks that hold work / latency."""

    rate_form: ClassVar[int]
    any_width = True
    completed_within = ("kv_dtype", "head_dim", "window")

    @abstractmethod
    def sequence_bytes(self, shape: HeadShape) -> tuple[float, float]:
        """Compulsory bytes of a sequence of length 0, and of length 1."""

    def block(self, tables: RowSource, method: str, shape: HeadShape) -> Floats:
        """Grid block of a head shape for a plan's arena; borrowed nodes are marked."""
        served = self.grid(tables, shape)
        block = served.grid.arena if method == "roofline" else self._rate_block(served.grid, method)
        return _borrowed(block) if served.borrowed else block

    def block_from_memory(self, tables: RowSource, shape: HeadShape) -> Floats:
        """Grid block of a head shape whose KV cache is never in L2."""
        served = self.grid(tables, shape)
        block = grid_from_memory(served.grid, shape, tables.gpu.l2_bytes).arena
        return _borrowed(block) if served.borrowed else block

    def _rate_block(self, grid: PackedGrid, method: str) -> Floats:
        """Grid block of work / latency, for methods that interpolate MFU.

        linear_mfu is bilinear between measured nodes, floor constant above a node, nearest constant around a
        node.
        """
        y_axis, x_axis = grid.y_axis[1:-1], grid.x_axis[1:-1]
        yy, xx = np.meshgrid(y_axis, x_axis, indexing="ij")
        latency_us = np.empty(yy.size)
        at = (yy.ravel(), xx.ravel())
        self.grid_latency_us(grid, method, at, latency_us, np.empty(yy.size, np.uint8))
        work = self.mfu_work(yy, xx)
        rate = work / latency_us.reshape(work.shape)
        flags = np.pad(grid.flags[1:-1, 1:-1], 1, constant_values=grid.flags[0, 0])
        axes = [y_axis, x_axis]
        if method == "nearest":
            # one step above the mean, so that a tie goes to the smaller node
            axes = [np.r_[a[:1], np.nextafter(np.sqrt(a[:-1] * a[1:]), np.inf)] for a in axes]
        y_padded, x_padded = (np.r_[0.0, a, SIZE_LIMIT] for a in axes)
        cells = np.zeros((*flags.shape, 6))
        cells[..., 0] = np.pad(rate, 1, mode="edge")
        if method == "linear_mfu":
            cells[:, :-1, 1] = np.diff(cells[..., 0], axis=1) / np.diff(x_padded)
            cells[:-1, :, 3:] = np.diff(cells[..., :3], axis=0) / np.diff(y_padded)[:, None, None]
        return PackedGrid(y_padded, x_padded, cells, flags, grid.roofline, self.rate_form).arena

    def datasheet_block(self, shape: HeadShape, gpu: GpuSpec) -> Floats:
        """Grid block of the datasheet model: one row of cells, exact in batch and length.

        A sequence takes the larger of two polynomials of its length (FLOPs, bytes), with a node where they
        cross and where a window ends.
        """
        whole = self.bound(shape, gpu, 0.0)
        bytes_us = US_PER_S / gpu.hbm_bytes_per_s
        fixed, one = (moved * bytes_us for moved in self.sequence_bytes(shape))
        a_token = one - fixed
        # work = square x^2 + slope x against moved = fixed + a_token x
        square, slope = whole.square_us, whole.slope_us - a_token
        parts = [(0.0, (square, slope, 0.0), (0.0, a_token, fixed))]
        if whole.window < SIZE_LIMIT:
            # decode reads no more tokens, prefill does; a decode window ends at the next key start, as
            # borrowed ones do, so that steps of equal decodes keep their table
            end = whole.window if whole.beyond_us else key_start_above(whole.window)
            rising = a_token if whole.beyond_us else 0.0
            work, moved = (square * end + slope) * end, fixed + a_token * end
            beyond = whole.beyond_us - rising
            parts.append((end, (0.0, beyond, work - beyond * end), (0.0, rising, moved - rising * end)))
        kinks = _crossings(parts)
        x_axis = np.array([0.0, *kinks, SIZE_LIMIT])
        y_axis = np.array([0.0, SIZE_LIMIT])
        cells = np.zeros((2, len(x_axis), 6))
        cells[0, :, 0] = self.datasheet.launch_us
        for j, x0 in enumerate(x_axis):
            middle = x0 + 1.0 if j == len(x_axis) - 1 else (x0 + min(x_axis[j + 1], 2.0 * x0 + 2.0)) / 2.0
            _, work_of, moved_of = [part for part in parts if part[0] <= x0][-1]
            a, b, c = work_of if _at(work_of, middle) > _at(moved_of, middle) else moved_of
            terms = np.array([(a * x0 + b) * x0 + c, 2.0 * a * x0 + b, a])
            cells[0, j, 3:] = terms / self.datasheet.efficiency
        cells[1, :, 0] = self.datasheet.launch_us + cells[0, :, 3] * SIZE_LIMIT
        flags = np.full((2, len(x_axis)), ORIGIN_MODELLED)
        return PackedGrid(y_axis, x_axis, cells, flags, whole).arena


def _borrowed(block: Floats) -> Floats:
    """Return a copy of a grid block whose nodes are marked as borrowed."""
    from fastroof.compiled.grids import cells_of

    marked = block.copy()
    flags = marked[cells_of(marked).stop :]
    np.maximum(flags, ORIGIN_BORROWED, out=flags)
    return marked


_Polynomial = tuple[float, float, float]


def _at(terms: _Polynomial, x: float) -> float:
    a, b, c = terms
    return (a * x + b) * x + c


def _crossings(parts: Sequence[tuple[float, _Polynomial, _Polynomial]]) -> list[float]:
    """Sorted crossings of two piecewise polynomials, and their breaks."""
    found = [start for start, _, _ in parts[1:]]
    stops = [*found, SIZE_LIMIT]
    for (start, one, other), stop in zip(parts, stops, strict=True):
        square, slope, fixed = (a - b for a, b in zip(one, other, strict=True))
        roots = np.roots([square, slope, fixed]) if square or slope else np.array([])
        found += [float(r.real) for r in roots if abs(r.imag) < 1e-9 and start < r.real < stop]
    return sorted(found)
