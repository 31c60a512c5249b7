"""Base classes of grouped-query attention: work of rows, and lookups on a grid of batch and length.

The unit of work is (sequence x KV head), so head shapes of one group size replace each other at equal batch x
KV heads, and an unmeasured group size lies between its neighbours. A window that was not measured is borrowed
from full attention at equal work: decode at min(kv_len, window), prompts longer than the window as chunks of
as many tokens and pairs. A head_dim or a cache format that nothing measured is modelled (origin 4) from the
nearest one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Flags, Floats
from fastroof.columns import (
    KV_DTYPE,
    ORIGIN,
    ORIGIN_BORROWED,
    ORIGIN_EXTRAPOLATED,
    ORIGIN_MEASURED,
    ORIGIN_MODELLED,
    Column,
)
from fastroof.compiled.layout import GridNodes, GuidedGrid
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.attention_work import (
    NEAREST_KV,
    HeadShape,
    attention_bytes_within,
    attention_flops,
    attention_flops_within,
    reads_kv_peaks,
)
from fastroof.operators.borrowing import HEADS, SIZE, nearest
from fastroof.operators.operator import (
    Columns,
    Key,
    Operator,
    RowSource,
    element_bytes,
    is_measured,
    measured_keys,
    shared_errors,
    unit_us,
)
from fastroof.pack import PackedGrid, grid_cells, pack_grid
from fastroof.pack.curves import cell_origins, joined_axes
from fastroof.pack.grids import BatchBound
from fastroof.pack.keys import key_start_above
from fastroof.uncertainty.leave_one_out import (
    MAPE_TO_ERROR,
    LocalErrors,
    MeasuredGrid,
    is_replaced,
    measured_grid,
    relative_variance,
)

BORROWED: Final = (MAPE_TO_ERROR * 0.038, MAPE_TO_ERROR * 0.081)
"""Relative standard error of borrowing at equal batch x KV heads, for a factor of 2 and of 8 between the KV
heads: (32, 8) from (16, 4) is off by 3.8 %, (64, 8) from (8, 1) by 8.1 %. Hiding each head shape of head_dim
128 in turn, 80 % intervals cover 78 to 81 % at a factor of 2 and 86 to 87 % at 4. Other group sizes (1.2 to
3.2 % off) take the smaller error."""


WITHIN_WINDOW: Final = MAPE_TO_ERROR * 0.15
"""Relative standard error beyond a window borrowed from full attention. Against measured windows of 128, 1024
and 8192 tokens (H100 and B200) decode is off by 0.08 to 0.30 and 0.05 to 0.24, prefill by 0.04 to 0.08 and
0.04 to 0.17."""


WIDTH: Final = 0.22
"""Relative standard error of attention of another head_dim per octave: 64 from 128 is off by 0.05 to 0.21
(median of |ln|; 80 % within 0.14 to 0.58, median 0.28) in decode, and by 0.07 to 0.44 (0.14 to 0.57, 0.28) in
prefill, for vLLM on H100, B200, L40S and RTX PRO 6000, SGLang and TensorRT-LLM on H100 and L40S."""


FORMAT: Final = {"attention_decode": 0.3, "attention_prefill": 0.55}
"""Relative standard error of a cache format that nothing measured, assumed. TPOT with int8_per_token_head was
4 % above and 11 % below that with fp8 (vLLM's pull requests 40633 and 38378); with nvfp4, decodes took 0.78
and prompts 1.74 times those with fp8 on an RTX PRO 5000 (FlashInfer's issue 4269)."""


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


def head_donors(target: HeadShape, shapes: Sequence[HeadShape]) -> tuple[HeadShape, ...]:
    """Choose the donors of a head shape: itself, one of its group size, or one on either side of it."""
    if target in shapes:
        return (target,)
    alike = [shape for shape in shapes if shape.kind == target.kind]
    if not alike:
        listed = ", ".join(_kind_text(*kind) for kind in sorted({s.kind for s in shapes})) or "none"
        raise MissingTableError(f"no attention table has {_kind_text(*target.kind)}; measured: {listed}")
    below, same, above = (
        [s for s in alike if np.sign(s.group_size - target.group_size) == side] for side in (-1, 0, 1)
    )
    sides = (same,) if same else (below, above)
    return tuple(donor.kernel for side in sides for donor in nearest(target, side, HEADS))


def nearest_width(target: HeadShape, measured: Sequence[HeadShape]) -> int:
    """Return the measured head_dim of full attention that is nearest to a shape's; 0 without one near it."""
    alike = {s.head_dim for s in measured if s.kv_dtype == target.kv_dtype and not s.window}
    found = nearest(target.head_dim, list(alike), SIZE)
    return next((donor.kernel for donor in found if donor.octaves <= FARTHEST_OCTAVES), 0)


def nearest_format(target: HeadShape, measured: Sequence[HeadShape]) -> HeadShape:
    """Return a head shape in the measured cache format that its own is modelled from; itself if measured."""
    if any(s.kv_dtype == target.kv_dtype for s in measured):
        return target
    formats = {s.kv_dtype for s in measured}
    nearest = next((one for one in NEAREST_KV.get(target.kv_dtype, ()) if one in formats), target.kv_dtype)
    return target._replace(kv_dtype=nearest)


def _kind_text(head_dim: int, kv_dtype: str, window: int) -> str:
    return f"head_dim {head_dim} with {kv_dtype} KV" + (f" and window {window}" if window else "")


def _latency_us(grid: PackedGrid, y: Floats, x: Floats) -> tuple[Floats, Flags]:
    """Values and flags of a grid at points of any shape."""
    from fastroof.compiled.grids import grid_latency_us

    value, made = np.empty(y.size), np.empty(y.size, np.uint8)
    grid_latency_us(grid.arena, y.ravel(), x.ravel(), value, made)
    flag = np.where(made < ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED, made).astype(np.uint8)
    return value.reshape(y.shape), flag.reshape(y.shape)


def _grid_of(y_axis: Floats, x_axis: Floats, table: Floats, flags: Flags, roofline: BatchBound) -> PackedGrid:
    return PackedGrid(y_axis, x_axis, grid_cells(y_axis, x_axis, table, roofline), flags, roofline)


class AttentionErrors(NamedTuple):
    """Errors of one head shape: batch scale and local errors of each donor, squared error of borrowing.

    Beyond ``window`` tokens ``beyond`` is added, the squared error of a borrowed window.
    """

    donors: tuple[tuple[float, LocalErrors], ...]
    borrowed: float
    window: float = math.inf
    beyond: float = 0.0


def attention_variance(errors: AttentionErrors, batch: Floats, length: Floats) -> Floats:
    """Squared relative standard error without a prefix at (batch, length)."""
    within = np.minimum(length, errors.window)
    by_donor = [relative_variance(local, (batch * scale, within)) for scale, local in errors.donors]
    beyond = np.where(length > errors.window, errors.beyond, 0.0)
    largest = np.max(by_donor, axis=0) if by_donor else np.zeros(np.shape(length))
    return np.asarray(largest + errors.borrowed + beyond)


def attention_errors(operator: AttentionOperator, tables: RowSource, shape: HeadShape) -> AttentionErrors:
    """Errors of a head shape over (batch size, length)."""
    served = operator.grid(tables, shape)
    donors = []
    borrowed = 0.0
    for donor in served.donors:
        donors.append((shape.num_kv_heads / donor.num_kv_heads, _donor_errors(operator, tables, donor)))
        is_only_window = donor.window != shape.window and donor._replace(window=shape.window) == shape
        if served.borrowed and not is_only_window:
            borrowed = max(borrowed, _borrowing_error(operator.name, shape, donor) ** 2)
    if served.donors[0].window == shape.window:
        return AttentionErrors(tuple(donors), borrowed)
    return AttentionErrors(tuple(donors), borrowed, float(shape.window), WITHIN_WINDOW**2)


def _donor_errors(operator: AttentionOperator, tables: RowSource, donor: HeadShape) -> LocalErrors:
    """Local errors of one table, calibrated over shapes of its KV dtype, with or without a window."""
    kind = (donor.kv_dtype, donor.window > 0)

    def shapes() -> list[HeadShape]:
        alike = [s for s in operator.shapes(tables) if (s.kv_dtype, s.window > 0) == kind] or [donor]
        # a shape that was only measured after prefixes has no grid
        return [s for s in alike if operator.plain_rows(tables.rows(operator, s)).any()]

    grid_of = partial(_measured_grid, operator, tables)
    return shared_errors(tables, operator.name, donor, kind, shapes, grid_of)


def _borrowing_error(operator: str, target: HeadShape, donor: HeadShape) -> float:
    near, far = BORROWED
    width = modelled_error(operator, target, donor)
    if target.group_size != donor.group_size:
        return math.hypot(near, width)
    doublings = abs(math.log2(target.num_kv_heads / donor.num_kv_heads))
    return math.hypot(near + (far - near) * (max(doublings, 1.0) - 1.0) / 2.0, width)


def is_modelled(target: HeadShape, donor: HeadShape) -> bool:
    """Return whether a donor has another head_dim or cache format."""
    return (target.head_dim, target.kv_dtype) != (donor.head_dim, donor.kv_dtype)


def modelled_error(operator: str, target: HeadShape, donor: HeadShape) -> float:
    """Relative standard error of modelling a head_dim and a cache format from a donor's."""
    width = WIDTH * abs(math.log2(target.head_dim / donor.head_dim))
    return math.hypot(width, FORMAT[operator] if target.kv_dtype != donor.kv_dtype else 0.0)


def _measured_grid(operator: AttentionOperator, tables: RowSource, key: Key) -> MeasuredGrid:
    shape = HeadShape(*key)
    rows = tables.rows(operator, shape)
    keep = operator.plain_rows(rows)
    latency_us = rows["latency_us"][keep]
    bound = operator.bound(shape, tables.gpu, float(latency_us.min()))
    points = tuple(rows[name][keep].astype(np.float64) for name in ("batch_size", "kv_len"))
    is_spike = is_replaced(rows[ORIGIN][keep])
    return measured_grid(
        points, latency_us, bound.__call__, is_spike=is_spike, is_additive=operator.is_additive
    )


_HEADS: Final = (
    Column("num_q_heads", "int", "", "query heads on one GPU"),
    Column("num_kv_heads", "int", "", "KV heads on one GPU"),
    Column("head_dim", "int", "", "width of one head"),
    Column("window", "int", "tokens", "sliding window, 0 for full attention", 0),
)


class _Ready(NamedTuple):
    """A head shape's grid with everything its lookups need; cached."""

    grid: PackedGrid
    points: GuidedGrid | None
    least_origin: int
    unit_us: float
    prefix_us: tuple[float, float]


class AttentionOperator(Operator):
    """Attention looked up on a grid of batch and length.

    ``is_additive`` if the grid is extrapolated along its lines instead of at constant latency / B;
    ``any_width`` if a head_dim that nothing measured is modelled from another.
    """

    keys: ClassVar[tuple[Column, ...]] = (KV_DTYPE, *_HEADS)
    is_additive: ClassVar[bool]
    length_axis: ClassVar[str]
    any_width: ClassVar[bool] = False

    def q_len(self, columns: Columns) -> Array:
        """New tokens of each sequence."""
        return np.ones_like(columns["kv_len"])

    def flops(self, columns: Columns) -> Floats:
        """Causal FLOPs within the window."""
        return attention_flops_within(
            columns["num_q_heads"], columns["head_dim"], self.q_len(columns), columns["kv_len"],
            columns["batch_size"], columns["window"],
        )  # fmt: skip

    def moved_bytes(self, columns: Columns) -> Floats:
        """Queries, outputs, and the KV cache within the window."""
        return attention_bytes_within(
            columns["num_q_heads"], columns["num_kv_heads"], columns["head_dim"], self.q_len(columns),
            columns["kv_len"], columns["batch_size"], columns["window"], element_bytes(columns["kv_dtype"]),
        )  # fmt: skip

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """Peak of bf16; some kernels compute in the KV dtype."""
        return reads_kv_peaks(columns, gpu)

    @abstractmethod
    def bound(self, shape: HeadShape, gpu: GpuSpec, launch_us: float) -> BatchBound:
        """B against (batch, length), us."""

    @abstractmethod
    def mfu_work(self, batch: Any, length: Any, window: float = math.inf) -> Any:
        """Work without a prefix, in units of one query that attends to one token of one head's width."""

    def equal_work(self, batch: Floats, length: Floats, window: float) -> tuple[Floats, Floats]:
        """(batch, length) at which full attention does the work of calls with a window."""
        return batch, np.minimum(length, window)

    def relative_error(self, tables: RowSource, key: Key, sizes: list[Floats], latency_us: Floats) -> Floats:
        """Relative standard error of lookups of one head shape."""
        return np.sqrt(attention_variance(self.local_errors(tables, HeadShape(*key)), *sizes))

    def shapes(self, tables: RowSource) -> list[HeadShape]:
        """Head shapes of the first source, and those that only other versions of its engine measured."""
        first, *others = tables.candidates(self.name)
        own = [one for one in others if one.engine and one.engine == first.engine]
        return [
            HeadShape(*key) for key in dict.fromkeys(key for one in (first, *own) for key in one.groups())
        ]

    def possible_donors(self, tables: RowSource, target: HeadShape) -> list[HeadShape]:
        """Measured shapes that may serve a target: the first source's, else the target itself, else all.

        The engine's own kernel of another head shape (3.8 % off) precedes another engine's kernel of the
        target (7 to 9 %). Without the target's window, full attention serves; without its head_dim, another.
        """
        first = self.shapes(tables)
        if any(s.kind == target.kind for s in first):
            return first
        if is_measured(tables, self.name, tuple(target)):
            return [target]
        every = [HeadShape(*key) for key in measured_keys(tables, self.name)]
        if target.window and not any(s.kind == target.kind for s in every):
            return self.possible_donors(tables, target._replace(window=0))
        is_other = self.any_width and not any(s.kind == target.kind for s in every)
        if is_other and nearest_width(target, first):
            return first
        return every

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> PackedGrid:
        """Pack one head shape's grid."""
        keep = self.plain_rows(rows)
        if not keep.any():
            raise MissingTableError(
                f"{self.name} of {HeadShape(*key[:4])} has no rows without a prefix; lookups need some"
            )
        batch, length = (rows[name][keep].astype(np.float64) for name in ("batch_size", "kv_len"))
        latency_us = rows["latency_us"][keep]
        bound = self.bound(HeadShape(*key), gpu, float(latency_us.min()))
        origin = rows[ORIGIN][keep] if ORIGIN in rows else None
        return pack_grid(batch, length, latency_us, bound, is_additive=self.is_additive, origin=origin)

    def grid(self, tables: RowSource, shape: HeadShape) -> AttentionGrid:
        """Packed grid of a head shape, borrowed if it was not measured."""

        def grid() -> AttentionGrid:
            shapes = self.possible_donors(tables, shape)
            near = nearest_format(shape, shapes) if self.any_width else shape
            if near != shape:
                served = self.grid(tables, near)
                bound = self.bound(shape, tables.gpu, served.grid.roofline.launch_us)
                return self._of_bound(served, bound)
            made = self._made_grid(tables, shape, shapes)
            is_foreign = any(tables.is_foreign(tables.serving(self.name, tuple(one))) for one in made.donors)
            return replace(made, borrowed=True) if is_foreign and not made.borrowed else made

        return tables.cached(("attention grids", self.name, shape), grid)

    def _made_grid(self, tables: RowSource, target: HeadShape, shapes: Sequence[HeadShape]) -> AttentionGrid:
        """Make a grid from measured ones: of full attention, of another head_dim, or of other heads."""
        kinds, whole = {shape.kind for shape in shapes}, target._replace(window=0)
        width = nearest_width(target, shapes) if self.any_width and whole.kind not in kinds else 0
        if target.kind not in kinds and (width or whole.kind in kinds):
            near = self._made_grid(
                tables, whole if target.window else target._replace(head_dim=width), shapes
            )
            bound = self.bound(target, tables.gpu, near.grid.roofline.launch_us)
            return self._within_window(near, bound) if target.window else self._of_bound(near, bound)
        donors = head_donors(target, shapes)
        if donors == (target,):
            grid: PackedGrid = tables.packed(self, tuple(target))
            return AttentionGrid(grid, grid.longest_ratio, donors, borrowed=False)
        return self._of_heads(tables, target, donors)

    def _of_heads(self, tables: RowSource, target: HeadShape, donors: tuple[HeadShape, ...]) -> AttentionGrid:
        """Make a grid at equal batch x KV heads: linear between group sizes, equal latency / B beyond."""
        measured: list[PackedGrid] = [tables.packed(self, tuple(donor)) for donor in donors]
        scales = [donor.num_kv_heads / target.num_kv_heads for donor in donors]
        grids = [
            _grid_of(grid.y_axis * scale, grid.x_axis, grid.cells[..., 0], grid.flags, grid.roofline)
            for grid, scale in zip(measured, scales, strict=True)
        ]
        weights = [1.0]
        if len(donors) == 2:
            low, high = (donor.group_size for donor in donors)
            share = (target.group_size - low) / (high - low)
            weights = [1.0 - share, share]
        launch_us = sum(w * grid.roofline.launch_us for w, grid in zip(weights, grids, strict=True))
        bound = self.bound(target, tables.gpu, launch_us)
        # the donors' outer nodes differ after scaling; the nearest one is the common edge
        y_axis = np.unique(np.concatenate([grid.y_axis for grid in grids]))
        y_axis = y_axis[y_axis <= min(grid.y_axis[-1] for grid in grids)]
        x_axis = np.unique(np.concatenate([grid.x_axis for grid in grids]))
        y, x = np.meshgrid(y_axis, x_axis, indexing="ij")
        table, flags = np.zeros(y.shape), np.zeros(y.shape, np.uint8)
        for weight, donor, grid in zip(weights, donors, grids, strict=True):
            value, flag = _latency_us(grid, y, x)
            if len(donors) == 1 and donor.group_size != target.group_size:
                units = y * (target.num_kv_heads / donor.num_kv_heads)
                value = value * bound(y, x) / grid.roofline(units, x)
                flag = np.full_like(flag, ORIGIN_EXTRAPOLATED)
            table += weight * value
            flags = np.maximum(flags, flag)
        ratio = sum(w * grid.longest_ratio for w, grid in zip(weights, measured, strict=True))
        return AttentionGrid(_grid_of(y_axis, x_axis, table, flags, bound), ratio, donors, borrowed=True)

    def _of_bound(self, near: AttentionGrid, bound: BatchBound) -> AttentionGrid:
        """Turn a grid into one of another head_dim or cache format, modelled at equal latency / B."""
        grid = near.grid
        y, x = grid.y_axis[:, None], grid.x_axis
        table = grid.cells[..., 0] * bound(y, x) / grid.roofline(y, x)
        flags = np.full_like(grid.flags, ORIGIN_MODELLED)
        return replace(near, grid=_grid_of(grid.y_axis, grid.x_axis, table, flags, bound), borrowed=True)

    def _within_window(self, full: AttentionGrid, bound: BatchBound) -> AttentionGrid:
        """Turn the grid of full attention into one with a window, which ends at the next key start."""
        y_axis, window = full.grid.y_axis, key_start_above(bound.window)
        x_axis = np.unique(np.append(full.grid.x_axis, window))
        y, x = np.meshgrid(y_axis, x_axis, indexing="ij")
        table, flags = _latency_us(full.grid, *self.equal_work(y, x, window))
        # one sequence of the longest measured length
        one, last = int(np.searchsorted(y_axis, 1.0)), len(x_axis) - 2
        ratio = max(1.0, float(table[one, last] / bound(y_axis[one], x_axis[last])))
        made = _grid_of(y_axis, x_axis, table, flags, bound)
        return AttentionGrid(made, ratio, full.donors, borrowed=True)

    def prefix_us(self, tables: RowSource, shape: HeadShape) -> tuple[float, float]:
        """Price of a prefix: us per (query, prefix token) pair, and us per prefix token."""
        return 0.0, 0.0

    def check_key(self, key: Key) -> None:
        """Reject query heads that are not a multiple of the KV heads."""
        _, num_q_heads, num_kv_heads, _, _ = key
        if num_q_heads % num_kv_heads:
            raise LookupInputError(
                f"num_q_heads {num_q_heads} is not a multiple of num_kv_heads {num_kv_heads}"
            )

    def ready(self, tables: RowSource, key: Key) -> _Ready:
        """A head shape's grid with everything its lookups need."""
        return tables.cached(("ready", self.name, key), lambda: self._made_ready(tables, HeadShape(*key)))

    def _made_ready(self, tables: RowSource, shape: HeadShape) -> _Ready:
        served = self.grid(tables, shape)
        grid = served.grid
        axes, guides = joined_axes([grid.y_axis, grid.x_axis])
        least = ORIGIN_BORROWED if served.borrowed else ORIGIN_MEASURED
        if is_modelled(shape, served.donors[0]):
            least = ORIGIN_MODELLED
        flags = np.maximum(grid.flags.astype(np.uint8), least)
        one = float(attention_flops(1, 1, 1, 1)) * shape.num_q_heads * shape.head_dim
        origins = cell_origins(np.minimum(flags, ORIGIN_BORROWED)).ravel()
        guided = GuidedGrid(axes, guides, grid.cells.ravel(), origins)
        return _Ready(
            grid,
            # cells hold origins of two bits, none of which is modelled
            guided if len(guides) and least < ORIGIN_MODELLED else None,
            least,
            unit_us(tables.gpu, "bf16", one),
            self.prefix_us(tables, shape),
        )

    def own_us(self, table: _Ready, method: str, at: tuple[Floats, Floats], out: Floats, origin: Any) -> None:
        """Look up (batch, length) without a prefix."""
        from fastroof.compiled.grids import grid_points_us

        if method == "roofline" and table.points is not None:
            grid_points_us(table.points, *at, out, origin)
            return
        self.grid_latency_us(table.grid, method, at, out, origin)
        np.maximum(origin, table.least_origin, out=origin)

    def grid_latency_us(
        self, grid: PackedGrid, method: str, at: tuple[Floats, Floats], out: Floats, origin: Any
    ) -> None:
        """Look up (batch, length) in a packed grid by any method."""
        from fastroof.compiled import grids

        y, x = at
        if method == "roofline":
            grids.grid_latency_us(grid.arena, y, x, out, origin)
            return
        window = grid.roofline.window
        work = np.asarray(self.mfu_work(y, x, window))
        node_work = np.asarray(self.mfu_work(grid.y_axis[:, None], grid.x_axis[None, :], window))
        nodes = GridNodes(grid.y_axis, grid.x_axis, grid.cells, grid.flags, node_work)
        if method == "linear_mfu":
            grids.grid_linear_mfu_us(grid.arena, nodes, y, x, work, out, origin)
        elif method == "floor":
            grids.grid_floor_us(nodes, y, x, work, out, origin)
        else:
            with np.errstate(divide="ignore"):
                log2 = grids.GridLog2(*(np.log2(a) for a in (grid.y_axis, grid.x_axis, y, x)))
            grids.grid_nearest_us(nodes, log2, y, x, work, out, origin)

    def local_errors(self, tables: RowSource, shape: HeadShape) -> AttentionErrors:
        """Errors of a head shape over (batch, length)."""
        return attention_errors(self, tables, shape)
