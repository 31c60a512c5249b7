"""Attention tables by head shape: measured where there are rows, borrowed where there are none.

The unit of work of attention is (sequence x KV head), so tables of one group size stand in for each
other at equal batch x KV heads, and an unmeasured group size lies between its neighbours. What is
borrowed is settled here once, as a packed grid of the wanted shape that loops read like any other.

A window that was not measured is borrowed from full attention of that head shape at equal work: decodes at
min(kv_len, window), prompts longer than the window as chunks of as many tokens and as many pairs. Against
the windows that the H100 and B200 tables have, prompts so borrowed are off by 4 to 8 % and 4 to 17 %,
decodes beyond their window by 8 to 30 % and 5 to 24 %, mostly too low: kernels read more than the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.errors import MissingTableError
from fastroof.operators.attention_work import HeadShape
from fastroof.pack import PackedGrid, grid_cells
from fastroof.pack.keys import key_start_above
from fastroof.roofline import BatchBound

GridOf = Callable[[HeadShape], PackedGrid]
RooflineOf = Callable[[HeadShape, float], BatchBound]
EqualWork = Callable[[Floats, Floats, float], tuple[Floats, Floats]]


@dataclass(frozen=True, eq=False)
class AttentionGrid:
    """A packed attention table of one head shape, and whose rows it was made from."""

    grid: PackedGrid
    longest_ratio: float
    lenders: tuple[HeadShape, ...]
    borrowed: bool


def donors(wanted: HeadShape, measured: Iterable[HeadShape]) -> tuple[HeadShape, ...]:
    """Pick the measured shapes that stand in for one: itself, one of its group size, or two around it."""
    shapes = list(measured)
    if wanted in shapes:
        return (wanted,)
    alike = [s for s in shapes if s.kind == wanted.kind]
    if not alike:
        listed = ", ".join(_kind_words(*kind) for kind in sorted({s.kind for s in shapes})) or "none"
        raise MissingTableError(f"no attention table has {_kind_words(*wanted.kind)}; measured: {listed}")

    def closest(group_size: float) -> HeadShape:
        same = [s for s in alike if s.group_size == group_size]
        ratio = [abs(math.log2(s.num_kv_heads / wanted.num_kv_heads)) for s in same]
        return min(zip(ratio, same, strict=True))[1]

    groups = sorted({s.group_size for s in alike})
    if wanted.group_size in groups:
        return (closest(wanted.group_size),)
    below = [g for g in groups if g < wanted.group_size]
    above = [g for g in groups if g > wanted.group_size]
    return tuple(closest(g) for g in (*below[-1:], *above[:1]))


def _kind_words(head_dim: int, kv_dtype: str, window: int) -> str:
    return f"head_dim {head_dim} with {kv_dtype} KV" + (f" and window {window}" if window else "")


def _on_nodes(grid: PackedGrid, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A grid's values and flags at every (y, x) of two axes."""
    value, flag = _at_points(grid, *(a.ravel() for a in np.meshgrid(y, x, indexing="ij")))
    return value.reshape(len(y), len(x)), flag.reshape(len(y), len(x))


def _at_points(grid: PackedGrid, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A grid's values and flags at as many points."""
    from fastroof.compiled.grids import grid_latency_us

    value = np.empty(y.shape)
    made = np.empty(y.shape, np.uint8)
    grid_latency_us(grid.arena, y, x, value, made)
    return value, np.where(made < ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED, made).astype(np.uint8)


def _per_kv_head(grid: PackedGrid, lender: HeadShape, wanted: HeadShape) -> PackedGrid:
    """A lender's grid with its batch axis restated at equal batch x KV heads."""
    y_axis = grid.y_axis * (lender.num_kv_heads / wanted.num_kv_heads)
    cells = grid_cells(y_axis, grid.x_axis, grid.cells[..., 0], grid.roofline)
    return PackedGrid(y_axis, grid.x_axis, cells, grid.flags, grid.roofline)


def attention_grid(
    wanted: HeadShape,
    measured: Iterable[HeadShape],
    grid_of: GridOf,
    roofline_of: RooflineOf,
    equal_work: EqualWork,
) -> AttentionGrid:
    """Return the grid of a head shape, borrowed where it was not measured."""
    shapes = list(measured)
    whole = wanted._replace(window=0)
    kinds = {shape.kind for shape in shapes}
    if wanted.window and wanted.kind not in kinds and whole.kind in kinds:
        full = attention_grid(whole, shapes, grid_of, roofline_of, equal_work)
        return _within_window(full, roofline_of(wanted, full.grid.roofline.launch_us), equal_work)
    lenders = donors(wanted, shapes)
    if lenders == (wanted,):
        grid = grid_of(wanted)
        return AttentionGrid(grid, grid.longest_ratio, lenders, borrowed=False)
    grids = [_per_kv_head(grid_of(lender), lender, wanted) for lender in lenders]
    ratios = [grid_of(lender).longest_ratio for lender in lenders]
    if len(lenders) == 2:
        low, high = (lender.group_size for lender in lenders)
        share = (wanted.group_size - low) / (high - low)
        weights = [1.0 - share, share]
    else:
        weights = [1.0]
    launch_us = sum(w * g.roofline.launch_us for w, g in zip(weights, grids, strict=True))
    roofline = roofline_of(wanted, launch_us)
    # the lenders' outer nodes differ after scaling: the nearest of them is the common edge
    y_axis = np.unique(np.concatenate([g.y_axis for g in grids]))
    y_axis = y_axis[y_axis <= min(g.y_axis[-1] for g in grids)]
    x_axis = np.unique(np.concatenate([g.x_axis for g in grids]))
    table = np.zeros((len(y_axis), len(x_axis)))
    flags = np.zeros(table.shape, np.uint8)
    for weight, lender, grid in zip(weights, lenders, grids, strict=True):
        value, flag = _on_nodes(grid, y_axis, x_axis)
        if len(lenders) == 1 and lender.group_size != wanted.group_size:
            units = y_axis[:, None] * (wanted.num_kv_heads / lender.num_kv_heads)
            value = value * roofline(y_axis[:, None], x_axis) / grid.roofline(units, x_axis)
            flag = np.full_like(flag, ORIGIN_EXTRAPOLATED)
        table += weight * value
        flags = np.maximum(flags, flag)
    cells = grid_cells(y_axis, x_axis, table, roofline)
    ratio = sum(w * r for w, r in zip(weights, ratios, strict=True))
    grid = PackedGrid(y_axis, x_axis, cells, flags, roofline)
    return AttentionGrid(grid, ratio, lenders, borrowed=True)


def _within_window(full: AttentionGrid, roofline: BatchBound, equal_work: EqualWork) -> AttentionGrid:
    """Make full attention's grid one within a window."""
    grid = full.grid
    window = key_start_above(roofline.window)
    y_axis = grid.y_axis
    x_axis = np.unique(np.append(grid.x_axis, window))
    y, x = (a.ravel() for a in np.meshgrid(y_axis, x_axis, indexing="ij"))
    value, flag = _at_points(grid, *equal_work(y, x, window))
    table, flags = value.reshape(len(y_axis), -1), flag.reshape(len(y_axis), -1)
    made = PackedGrid(y_axis, x_axis, grid_cells(y_axis, x_axis, table, roofline), flags, roofline)
    # a sequence by itself, as long as any was measured
    one, last = int(np.searchsorted(y_axis, 1.0)), len(x_axis) - 2
    ratio = max(1.0, float(table[one, last] / roofline(y_axis[one], x_axis[last])))
    return AttentionGrid(made, ratio, full.lenders, borrowed=True)
