"""What all attention with grouped heads has in common: rows, and lookups on a grid of batch and length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.columns import KV_DTYPE, ORIGIN_BORROWED, ORIGIN_MEASURED, ORIGIN_MODELLED, Column
from fastroof.compiled.packed import GridNodes, GuidedGrid
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError
from fastroof.operators.attention_borrowing import AttentionGrid, attention_grid
from fastroof.operators.attention_errors import AttentionErrors, attention_errors
from fastroof.operators.attention_work import (
    HeadShape,
    attention_bytes,
    attention_flops,
    decode_attention_flops,
    reads_kv_peaks,
)
from fastroof.operators.operator import Columns, DatasheetClass, Key, Operator, element_bytes, unit_us
from fastroof.pack import SIZE_LIMIT, PackedGrid, pack_grid
from fastroof.pack.curves import cell_origins
from fastroof.pack.guides import joined_axes
from fastroof.roofline import BatchBound
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = ["AttentionOperator", "AttentionRows"]

_HEADS: Final = (
    Column("num_q_heads", "int", "", "query heads on one GPU"),
    Column("num_kv_heads", "int", "", "KV heads on one GPU"),
    Column("head_dim", "int", "", "width of one head"),
    Column("window", "int", "tokens", "sliding window, 0 for full attention", 0),
)


class _Ready(NamedTuple):
    """A head shape's table, ready for points: made once and kept with the tables."""

    grid: PackedGrid
    points: GuidedGrid | None
    is_borrowed: bool
    unit_us: float
    prefix_us: tuple[float, float]


def _window(c: Columns) -> Array:
    return np.where(c["window"] > 0, c["window"], c["kv_len"])


class AttentionRows(Operator):
    """What rows of any grouped-head attention ask of the GPU."""

    keys: ClassVar[tuple[Column, ...]] = (KV_DTYPE, *_HEADS)

    def q_len(self, columns: Columns) -> Array:
        """New tokens of each sequence."""
        return np.ones_like(columns["kv_len"])

    def flops(self, columns: Columns) -> Floats:
        """Causal FLOPs: the first tokens see a growing past, those beyond the window exactly it."""
        c, q_len = columns, self.q_len(columns)
        heads, width, batch = c["num_q_heads"], c["head_dim"], c["batch_size"]
        context = c["kv_len"] - q_len
        window = _window(c)
        growing = np.clip(window - context, 0, q_len)
        within = attention_flops(heads, width, growing, context + growing, batch)
        beyond = decode_attention_flops(heads, width, window, (q_len - growing) * batch)
        return within + beyond

    def moved_bytes(self, columns: Columns) -> Floats:
        """Queries, outputs, and the KV cache within the window."""
        c, q_len = columns, self.q_len(columns)
        seen = np.minimum(c["kv_len"], _window(c) + q_len - 1)
        return attention_bytes(
            c["num_q_heads"], c["num_kv_heads"], c["head_dim"], q_len, seen, c["batch_size"],
            element_bytes(c["kv_dtype"]),
        )  # fmt: skip

    def peaks(self, columns: Columns, gpu: GpuSpec) -> tuple[Floats, Floats]:
        """bf16's; some kernels compute in the KV cache's dtype."""
        return reads_kv_peaks(columns, gpu)


class AttentionOperator(AttentionRows):
    """Attention that is looked up on a grid of batch and length.

    Attributes
    ----------
    is_additive : bool
        Whether a table is continued by what the roofline adds, not by holding latency / B.
    length_axis : str
        Which axis the length is.
    rate_form : int
        Form of a block whose cells hold work / latency, see :mod:`fastroof.compiled.layout`.
    """

    constants: ClassVar[Mapping[str, Any]] = {"window": 0}
    is_additive: ClassVar[bool]
    length_axis: ClassVar[str]
    rate_form: ClassVar[int]

    @property
    def datasheet(self) -> DatasheetClass:
        """What the datasheet model assumes of it."""
        return self.datasheets[self.name]

    @abstractmethod
    def bound(self, shape: HeadShape, gpu: GpuSpec, launch_us: float) -> BatchBound:
        """B against (batch, length), us."""

    @abstractmethod
    def sequence_bytes(self, shape: HeadShape) -> tuple[float, float]:
        """Compulsory bytes of a sequence of no length, and of length 1."""

    @abstractmethod
    def mfu_work(self, batch: Any, length: Any) -> Any:
        """Work without a prefix, in units of one query that attends to one token of one head's width."""

    def shapes(self, tables: Tables) -> list[HeadShape]:
        """Measured head shapes with full attention."""
        return [HeadShape(*key[:4]) for key in tables.groups(self.name) if key[4] == 0]

    def pack(self, key: Key, rows: Columns, gpu: GpuSpec, variant: str = "") -> PackedGrid:
        """One head shape's grid: holes filled, edges padded."""
        keep = self.plain_rows(rows)
        batch, length = (rows[name][keep].astype(np.float64) for name in ("batch_size", "kv_len"))
        latency_us = rows["latency_us"][keep]
        bound = self.bound(HeadShape(*key[:4]), gpu, float(latency_us.min()))
        return pack_grid(batch, length, latency_us, bound, is_additive=self.is_additive)

    def grid(self, tables: Tables, shape: HeadShape) -> AttentionGrid:
        """Packed grid of a head shape, borrowed where it was not measured.

        Raises
        ------
        MissingTableError
            If nothing with this head_dim and kv_dtype was measured.
        """

        def grid_of(lender: HeadShape) -> PackedGrid:
            return tables.packed(self, (*lender, 0))

        def bound_of(wanted: HeadShape, launch_us: float) -> BatchBound:
            return self.bound(wanted, tables.gpu, launch_us)

        def grid() -> AttentionGrid:
            return attention_grid(shape, self.shapes(tables), grid_of, bound_of)

        return tables.once(("attention grids", self.name, shape), grid)

    def prefix_us(self, tables: Tables, shape: HeadShape) -> tuple[float, float]:
        """Price of a prefix: us per (query, prefix token) pair, us per prefix token."""
        return 0.0, 0.0

    def check_key(self, key: Key) -> None:
        """Refuse query heads that are no multiple of the KV heads."""
        _, num_q_heads, num_kv_heads, _, _ = key
        if num_q_heads % num_kv_heads:
            raise LookupInputError(
                f"num_q_heads {num_q_heads} is not a multiple of num_kv_heads {num_kv_heads}"
            )

    def ready(self, tables: Tables, key: Key) -> _Ready:
        """A head shape's table with what its points need."""
        return tables.once(("ready", self.name, key), lambda: self._made_ready(tables, HeadShape(*key[:4])))

    def _made_ready(self, tables: Tables, shape: HeadShape) -> _Ready:
        served = self.grid(tables, shape)
        grid = served.grid
        axes, guides = joined_axes([grid.y_axis, grid.x_axis])
        flags = np.maximum(
            grid.flags.astype(np.uint8), ORIGIN_BORROWED if served.borrowed else ORIGIN_MEASURED
        )
        one = float(attention_flops(1, 1, 1, 1)) * shape.num_q_heads * shape.head_dim
        guided = GuidedGrid(axes, guides, grid.cells.ravel(), cell_origins(flags).ravel())
        return _Ready(
            grid,
            guided if len(guides) else None,
            served.borrowed,
            unit_us(tables.gpu, "bf16", one),
            self.prefix_us(tables, shape),
        )

    def own_us(self, table: _Ready, method: str, at: tuple[Floats, Floats], out: Floats, origin: Any) -> None:
        """Look (batch, length) up without a prefix."""
        from fastroof.compiled.grid_points import grid_points_us

        if method == "roofline" and table.points is not None:
            grid_points_us(table.points, *at, out, origin)
            return
        self.grid_latency_us(table.grid, method, at, out, origin)
        if table.is_borrowed:
            np.maximum(origin, ORIGIN_BORROWED, out=origin)

    def grid_latency_us(
        self, grid: PackedGrid, method: str, at: tuple[Floats, Floats], out: Floats, origin: Any
    ) -> None:
        """Look (batch, length) up in a packed grid by any method."""
        from fastroof.compiled import grids

        y, x = at
        if method == "roofline":
            grids.grid_latency_us(grid.arena, y, x, out, origin)
            return
        work = np.asarray(self.mfu_work(y, x))
        node_work = np.asarray(self.mfu_work(grid.y_axis[:, None], grid.x_axis[None, :]))
        nodes = GridNodes(grid.y_axis, grid.x_axis, grid.cells, grid.flags, node_work)
        if method == "linear_mfu":
            grids.grid_linear_mfu_us(grid.arena, nodes, y, x, work, out, origin)
        elif method == "floor":
            grids.grid_floor_us(nodes, y, x, work, out, origin)
        else:
            with np.errstate(divide="ignore"):
                log2 = grids.GridLog2(*(np.log2(a) for a in (grid.y_axis, grid.x_axis, y, x)))
            grids.grid_nearest_us(nodes, log2, y, x, work, out, origin)

    def block(self, tables: Tables, method: str, shape: HeadShape) -> Floats:
        """Grid block of a head shape for a plan's arena; borrowed nodes say so.

        Raises
        ------
        MissingTableError
            As :meth:`grid`.
        """
        from fastroof.compiled.grids import cells_of

        served = self.grid(tables, shape)
        block = served.grid.arena if method == "roofline" else self._rate_block(served.grid, method)
        if served.borrowed:
            block = block.copy()
            flags = block[cells_of(block).stop :]
            np.maximum(flags, ORIGIN_BORROWED, out=flags)
        return block

    def _rate_block(self, grid: PackedGrid, method: str) -> Floats:
        """Grid block whose cells hold work / latency, for the methods that keep MFU instead of latency.

        linear_mfu is bilinear between the measured nodes; floor is constant above a node; nearest is
        constant around a node, between the geometric means of its neighbours. A hole takes the MFU of the
        node that the method picks at the hole itself.
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

        A sequence costs the larger of two polynomials of its length, the FLOPs' and the bytes', so the
        axis has a node where they cross.
        """
        whole = self.bound(shape, gpu, 0.0)
        bytes_us = US_PER_S / gpu.hbm_bytes_per_s
        fixed, one = (moved * bytes_us for moved in self.sequence_bytes(shape))
        a_token = one - fixed
        # work = square x^2 + slope x against moved = fixed + a_token x
        square, slope = whole.square_us, whole.slope_us - a_token
        line = (-fixed, slope - a_token)
        roots = np.roots([square, line[1], line[0]]) if square or line[1] else np.array([])
        kinks = sorted(float(r.real) for r in roots if abs(r.imag) < 1e-9 and 0.0 < r.real < SIZE_LIMIT)
        x_axis = np.array([0.0, *kinks, SIZE_LIMIT])
        y_axis = np.array([0.0, SIZE_LIMIT])
        cells = np.zeros((2, len(x_axis), 6))
        cells[0, :, 0] = self.datasheet.launch_us
        for j, x0 in enumerate(x_axis):
            middle = x0 + 1.0 if j == len(x_axis) - 1 else (x0 + min(x_axis[j + 1], 2.0 * x0 + 2.0)) / 2.0
            compute_bound = (square * middle + slope) * middle > fixed + a_token * middle
            a, b, c = (square, slope, 0.0) if compute_bound else (0.0, a_token, fixed)
            terms = np.array([(a * x0 + b) * x0 + c, 2.0 * a * x0 + b, a])
            cells[0, j, 3:] = terms / self.datasheet.efficiency
        cells[1, :, 0] = self.datasheet.launch_us + cells[0, :, 3] * SIZE_LIMIT
        flags = np.full((2, len(x_axis)), ORIGIN_MODELLED)
        return PackedGrid(y_axis, x_axis, cells, flags, whole).arena

    def local_errors(self, tables: Tables, shape: HeadShape) -> AttentionErrors:
        """Local errors of the tables behind a head shape, over (batch, length)."""
        return attention_errors(self, tables, shape)
