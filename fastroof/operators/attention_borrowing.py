"""Attention grids by head shape: measured, or borrowed from other head shapes.

The unit of work of attention is (sequence x KV head), so head shapes of one group size replace each other at
equal batch x KV heads, and an unmeasured group size lies between its neighbours. Borrowing makes a packed
grid of the target shape once, which loops read like any other.

A window that was not measured is borrowed from full attention at equal work: decode at min(kv_len, window),
prompts longer than the window as chunks of as many tokens and pairs. Against the measured windows of H100 and
B200, prefill is off by 4 to 8 % and 4 to 17 %, decode beyond its window by 8 to 30 % and 5 to 24 %, mostly
too low: kernels read more than the window.

A head_dim that nothing measured is modelled (origin 4) from the nearest one within an octave: latency / B at
equal heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED, ORIGIN_MODELLED
from fastroof.errors import MissingTableError
from fastroof.operators.attention_work import HeadShape
from fastroof.pack import PackedGrid, grid_cells
from fastroof.pack.grids import BatchBound
from fastroof.pack.keys import key_start_above

GridOf = Callable[[HeadShape], PackedGrid]
RooflineOf = Callable[[HeadShape, float], BatchBound]
EqualWork = Callable[[Floats, Floats, float], tuple[Floats, Floats]]


FARTHEST_OCTAVES: Final = 1.0
"""Between a head_dim and one that it is modelled from: 64 or 256 from 128, as far as was judged."""


@dataclass(frozen=True, eq=False)
class AttentionGrid:
    """Packed grid of one head shape, and its donors (the shape itself if it was measured).

    ``longest_ratio`` is latency / B of the longest measured sequence, at least 1; it scales a prefix's price.
    """

    grid: PackedGrid
    longest_ratio: float
    donors: tuple[HeadShape, ...]
    borrowed: bool


def choose_donors(target: HeadShape, measured: Iterable[HeadShape]) -> tuple[HeadShape, ...]:
    """Choose the donors of a shape: itself, one of its group size, or two around it."""
    shapes = list(measured)
    if target in shapes:
        return (target,)
    alike = [s for s in shapes if s.kind == target.kind]
    if not alike:
        listed = ", ".join(_kind_text(*kind) for kind in sorted({s.kind for s in shapes})) or "none"
        raise MissingTableError(f"no attention table has {_kind_text(*target.kind)}; measured: {listed}")

    def closest(group_size: float) -> HeadShape:
        same = [s for s in alike if s.group_size == group_size]
        ratio = [abs(math.log2(s.num_kv_heads / target.num_kv_heads)) for s in same]
        return min(zip(ratio, same, strict=True))[1]

    groups = sorted({s.group_size for s in alike})
    if target.group_size in groups:
        return (closest(target.group_size),)
    below = [g for g in groups if g < target.group_size]
    above = [g for g in groups if g > target.group_size]
    return tuple(closest(g) for g in (*below[-1:], *above[:1]))


def octaves(width: int, other: int) -> float:
    """Return how far two head_dims are apart."""
    return abs(math.log2(width / other))


def nearest_width(target: HeadShape, measured: Iterable[HeadShape]) -> int:
    """Return the measured head_dim of full attention that is nearest to a shape's; 0 without one near it."""
    alike = {s.head_dim for s in measured if s.kv_dtype == target.kv_dtype and not s.window}
    near = [width for width in alike if octaves(width, target.head_dim) <= FARTHEST_OCTAVES]
    return min(near, key=lambda width: (octaves(width, target.head_dim), width), default=0)


def _kind_text(head_dim: int, kv_dtype: str, window: int) -> str:
    return f"head_dim {head_dim} with {kv_dtype} KV" + (f" and window {window}" if window else "")


def _on_nodes(grid: PackedGrid, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and flags of a grid at every (y, x) of two axes."""
    value, flag = _at_points(grid, *(a.ravel() for a in np.meshgrid(y, x, indexing="ij")))
    return value.reshape(len(y), len(x)), flag.reshape(len(y), len(x))


def _at_points(grid: PackedGrid, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and flags of a grid at points."""
    from fastroof.compiled.grids import grid_latency_us

    value = np.empty(y.shape)
    made = np.empty(y.shape, np.uint8)
    grid_latency_us(grid.arena, y, x, value, made)
    return value, np.where(made < ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED, made).astype(np.uint8)


def _per_kv_head(grid: PackedGrid, donor: HeadShape, target: HeadShape) -> PackedGrid:
    """Grid of a donor with its batch axis at equal batch x KV heads."""
    y_axis = grid.y_axis * (donor.num_kv_heads / target.num_kv_heads)
    cells = grid_cells(y_axis, grid.x_axis, grid.cells[..., 0], grid.roofline)
    return PackedGrid(y_axis, grid.x_axis, cells, grid.flags, grid.roofline)


def attention_grid(
    target: HeadShape,
    measured: Iterable[HeadShape],
    grid_of: GridOf,
    roofline_of: RooflineOf,
    equal_work: EqualWork,
    *,
    any_width: bool = False,
) -> AttentionGrid:
    """Return the grid of a head shape, borrowed if it was not measured.

    Same group size: the donor at equal batch x KV heads. Between two group sizes: linear in the group size.
    Beyond the measured group sizes: the latency / B of the nearest. Missing window: full attention at equal
    work. Missing head_dim, with ``any_width``: the latency / B of the nearest.
    """
    shapes = list(measured)
    whole = target._replace(window=0)
    kinds = {shape.kind for shape in shapes}
    width = nearest_width(target, shapes) if any_width and whole.kind not in kinds else 0
    if target.kind not in kinds and (width or whole.kind in kinds):
        near = whole if target.window else target._replace(head_dim=width)
        served = attention_grid(near, shapes, grid_of, roofline_of, equal_work, any_width=any_width)
        roofline = roofline_of(target, served.grid.roofline.launch_us)
        return _within_window(served, roofline, equal_work) if target.window else _of_width(served, roofline)
    donors = choose_donors(target, shapes)
    if donors == (target,):
        grid = grid_of(target)
        return AttentionGrid(grid, grid.longest_ratio, donors, borrowed=False)
    grids = [_per_kv_head(grid_of(donor), donor, target) for donor in donors]
    ratios = [grid_of(donor).longest_ratio for donor in donors]
    if len(donors) == 2:
        low, high = (donor.group_size for donor in donors)
        share = (target.group_size - low) / (high - low)
        weights = [1.0 - share, share]
    else:
        weights = [1.0]
    launch_us = sum(w * g.roofline.launch_us for w, g in zip(weights, grids, strict=True))
    roofline = roofline_of(target, launch_us)
    # the donors' outer nodes differ after scaling; the nearest one is the common edge
    y_axis = np.unique(np.concatenate([g.y_axis for g in grids]))
    y_axis = y_axis[y_axis <= min(g.y_axis[-1] for g in grids)]
    x_axis = np.unique(np.concatenate([g.x_axis for g in grids]))
    table = np.zeros((len(y_axis), len(x_axis)))
    flags = np.zeros(table.shape, np.uint8)
    for weight, donor, grid in zip(weights, donors, grids, strict=True):
        value, flag = _on_nodes(grid, y_axis, x_axis)
        if len(donors) == 1 and donor.group_size != target.group_size:
            units = y_axis[:, None] * (target.num_kv_heads / donor.num_kv_heads)
            value = value * roofline(y_axis[:, None], x_axis) / grid.roofline(units, x_axis)
            flag = np.full_like(flag, ORIGIN_EXTRAPOLATED)
        table += weight * value
        flags = np.maximum(flags, flag)
    cells = grid_cells(y_axis, x_axis, table, roofline)
    ratio = sum(w * r for w, r in zip(weights, ratios, strict=True))
    grid = PackedGrid(y_axis, x_axis, cells, flags, roofline)
    return AttentionGrid(grid, ratio, donors, borrowed=True)


def _of_width(near: AttentionGrid, roofline: BatchBound) -> AttentionGrid:
    """Turn the grid of a head shape into one of another head_dim, modelled at equal latency / B."""
    grid = near.grid
    y, x = grid.y_axis[:, None], grid.x_axis
    table = grid.cells[..., 0] * roofline(y, x) / grid.roofline(y, x)
    flags = np.full_like(grid.flags, ORIGIN_MODELLED)
    made = PackedGrid(grid.y_axis, grid.x_axis, grid_cells(grid.y_axis, x, table, roofline), flags, roofline)
    return AttentionGrid(made, near.longest_ratio, near.donors, borrowed=True)


def _within_window(full: AttentionGrid, roofline: BatchBound, equal_work: EqualWork) -> AttentionGrid:
    """Turn the grid of full attention into one with a window, which ends at the next key start."""
    grid = full.grid
    window = key_start_above(roofline.window)
    y_axis = grid.y_axis
    x_axis = np.unique(np.append(grid.x_axis, window))
    y, x = (a.ravel() for a in np.meshgrid(y_axis, x_axis, indexing="ij"))
    value, flag = _at_points(grid, *equal_work(y, x, window))
    table, flags = value.reshape(len(y_axis), -1), flag.reshape(len(y_axis), -1)
    made = PackedGrid(y_axis, x_axis, grid_cells(y_axis, x_axis, table, roofline), flags, roofline)
    # one sequence of the longest measured length
    one, last = int(np.searchsorted(y_axis, 1.0)), len(x_axis) - 2
    ratio = max(1.0, float(table[one, last] / roofline(y_axis[one], x_axis[last])))
    return AttentionGrid(made, ratio, full.donors, borrowed=True)
