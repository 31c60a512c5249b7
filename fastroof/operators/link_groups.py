"""Groups of GPUs that exchange something: measured ones, those of another size, and those over several nodes.

A group of GPUs lies in one or several *domains*: GPUs that the fast link joins, a node or a rack behind one
NVLink switch. Within a domain a size that was not measured is borrowed from the nearest measured size, at
equal bytes on the wire: ``(n - 1) / n`` of a message; what the smallest message takes grows with each
doubling as it does between the two largest measured sizes. Hiding the measured groups of eight GPUs and
predicting them from two and four, over the NVLink systems of aiconfigurator-core 0.12.0 with nodes of eight,
that leaves an error (rms of the logarithm) of 0.24 for all-reduces of engines (0.25 without the growth), 0.21
for NCCL's (0.40), 0.19 and 0.18 for all-gathers and reduce-scatters (0.31), 0.16 for all-to-all (0.18); over
PCIe 0.4 to 0.9. The GB300's all-reduces of eight, from two and four of one tray, are off by 0.3 to 1.0, those
of sixteen, from four and eight, by 0.2 to 0.5: other kernels run there.

Over several domains each exchange is done within them and, by every GPU with its peers in the other ones,
between them: one phase of ``INTER_NODE_US`` and the bytes that cross, over the bandwidth that the card's file
gives. Engines' own all-reduces are of one node: within the nodes of a larger group NCCL's are read. No table
has a collective over several nodes. Against what people report of nccl-tests in public threads, by which no
constant was chosen, only that NCCL's curve is read within the nodes: all-reduces of a few bytes take 46 us on
two nodes of H20 and 62 on 16 of H100 (NVIDIA/nccl 1244, 1469), here 36; 8 GiB on two nodes of H100 go at 330
to 430 GB/s of bus bandwidth and on four at 320 (NVIDIA/nccl 1221), here at 293 and 253; 16 MiB between two
single GPUs take 420 us (NVIDIA/nccl-tests 232), here 356.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config.gpu import GpuSpec
from fastroof.errors import PlanError
from fastroof.operators.operator import Key
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes, SizedOperator
from fastroof.pack import SIZE_LIMIT
from fastroof.uncertainty.leave_one_out import relative_variance
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables

INTER_NODE_US: Final = 10.0
"""Of one message to another node, us: p2p_latency in systems/*.yaml of aiconfigurator-core 0.12.0."""

BORROWED_GROUP: Final = 0.25
"""Relative standard error of a group of another size: of the hidden sizes above, rounded up."""

OVER_NODES: Final = 0.5
"""Relative standard error of a collective over several nodes: assumed, nothing was measured."""


class Placement(NamedTuple):
    """Where the GPUs of a group are: how many in a domain, and in how many domains."""

    near: int
    domains: int


class Far(NamedTuple):
    """What a GPU of a group exchanges with other domains: phases one after another, bytes a row."""

    phases: int
    row_bytes: float


def placed(num_gpus: int, stride: int, gpu: GpuSpec) -> Placement:
    """Say where a group lies whose members are ``stride`` GPUs apart."""
    near = min(num_gpus, max(1, gpu.linked_gpus // stride))
    return Placement(near, -(-num_gpus // near))


def inter_node_us(sent_bytes: Any, phases: float, gpu: GpuSpec) -> Any:
    """Latency of phases between nodes in which a GPU sends so many bytes, us."""
    if not gpu.inter_node_bytes_per_s:
        raise PlanError(
            f"{gpu.name} has no bandwidth between nodes: a layout of more than {gpu.linked_gpus} GPUs needs "
            f"links.inter_node_gb_per_s in its gpu.toml (a GPU's share, each way)"
        )
    return phases * INTER_NODE_US + sent_bytes / gpu.inter_node_bytes_per_s * US_PER_S


class GroupOperator(SizedOperator, PerRowOperator):
    """An operator that a group of GPUs runs together, by the bytes that each contributes."""

    @abstractmethod
    def group_key(self, call: Any, num_gpus: int) -> Key:
        """The kernel of a call in a group of so many GPUs."""

    def node_key(self, call: Any, num_gpus: int) -> Key:
        """The kernel of so many GPUs of a node in a group that spans several."""
        return self.group_key(call, num_gpus)

    @abstractmethod
    def wire_bytes(self, call: Any, num_gpus: int) -> float:
        """Bytes that each GPU of a group sends for each byte that it contributes."""

    @abstractmethod
    def near_row_bytes(self, call: Any, where: Placement) -> float:
        """Bytes a row that a GPU contributes within its domain."""

    @abstractmethod
    def far(self, call: Any, where: Placement) -> Far:
        """What a GPU exchanges with other domains."""

    def row_cost(self, call: Any) -> RowCost:
        """What each GPU sends a row."""
        return RowCost(0.0, call.row_bytes * self.wire_bytes(call, call.num_gpus), 0.0, "bf16")

    def row_key(self, call: Any) -> Key:
        """What it is, GPUs, how far apart they are, and bytes a row."""
        return (*self.group_key(call, call.num_gpus), call.stride, call.row_bytes)

    def _sizes(self, tables: Tables, key_of: Callable[[int], Key]) -> list[int]:
        """Measured sizes of such groups, sorted."""

        def sizes() -> list[int]:
            at = [column.name for column in self.keys].index("num_gpus")
            keys = tables.every_key(self.name) if self.name in tables.measured.tables else []
            return sorted({key[at] for key in keys if key_of(key[at]) == key})

        return tables.kept(("group sizes", self.name, *key_of(0)), sizes)

    def _key_of(self, call: Any, tables: Tables, where: Placement) -> Callable[[int], Key]:
        """Which kernels serve a group, by their number of GPUs."""
        over_nodes = functools.partial(self.node_key, call)
        if where.domains > 1 and self._sizes(tables, over_nodes):
            return over_nodes
        return functools.partial(self.group_key, call)

    def _lender(self, tables: Tables, key_of: Callable[[int], Key], near: int) -> int:
        """The measured size that serves a group: its own, or the nearest, of two the larger."""
        sizes = self._sizes(tables, key_of)
        return min(sizes, key=lambda size: (abs(np.log(size / near)), -size), default=near)

    def _growth_us(self, tables: Tables, key_of: Callable[[int], Key], near: int, lender: int) -> float:
        """How much more the smallest message takes than in the group that is borrowed from, us."""
        less = [size for size in self._sizes(tables, key_of) if size < lender]
        if near <= lender or not less:
            return 0.0
        one, two = (self.packed(tables, key_of(size)).curve.value[1:-1] for size in (less[-1], lender))
        doublings = np.log2(near / lender) / np.log2(lender / less[-1])
        return max(0.0, float(two.min() - one.min())) * float(doublings)

    def _borrowed_bytes(self, call: Any, where: Placement, lender: int) -> float:
        """Bytes a row at which the lender sends as much as the group does."""
        ratio = self.wire_bytes(call, where.near) / self.wire_bytes(call, lender)
        return self.near_row_bytes(call, where) * ratio

    def serving(self, call: Any, tables: Tables) -> MeasuredTable | None:
        """The table that has the group's size, or the nearest; None where every GPU is in another node."""
        where = placed(call.num_gpus, call.stride, tables.gpu)
        if where.near == 1:
            return None
        key_of = self._key_of(call, tables, where)
        return tables.serving(self.name, key_of(self._lender(tables, key_of, where.near)))

    def row_nodes(self, call: Any, tables: Tables, options: CurveOptions, max_rows: int) -> RowNodes:
        """The curve of the group, in rows: measured, borrowed from another size, or modelled over nodes."""
        where = placed(call.num_gpus, call.stride, tables.gpu)
        if where.near == 1:
            return self._between_nodes(call, where, tables.gpu)
        key_of = self._key_of(call, tables, where)
        lender = self._lender(tables, key_of, where.near)
        key, row_bytes = key_of(lender), self._borrowed_bytes(call, where, lender)
        curve = self.packed(tables, key).curve
        launch_us = float(curve.value[1:-1].min())
        if options.method == "roofline":
            made = RowNodes(curve.axis / row_bytes, curve.value, curve.flag, launch_us)
        else:
            sizes: dict[str, Any] = dict(zip((c.name for c in self.keys), key, strict=True))
            message = np.rint(np.arange(1, max_rows + 1) * row_bytes)
            sizes["message_bytes"] = np.maximum(message, 1).astype(np.int64)
            made = self.looked_up_nodes(tables, options.method, max_rows, sizes, launch_us)
        if lender == where.near and where.domains == 1:
            return made
        grown_us = self._growth_us(tables, key_of, where.near, lender)
        flag = np.maximum(made.flag, np.uint8(ORIGIN_BORROWED))
        made = RowNodes(made.axis, made.value + grown_us, flag, made.launch_us + grown_us)
        return made if where.domains == 1 else self._over_nodes(call, where, tables.gpu, made)

    def _between_nodes(self, call: Any, where: Placement, gpu: GpuSpec) -> RowNodes:
        axis = np.array([0.0, SIZE_LIMIT])
        nothing = RowNodes(axis, np.zeros(2), np.full(2, ORIGIN_MODELLED, np.uint8), 0.0)
        return self._over_nodes(call, where, gpu, nothing)

    def _over_nodes(self, call: Any, where: Placement, gpu: GpuSpec, near: RowNodes) -> RowNodes:
        far = self.far(call, where)
        value = near.value + inter_node_us(near.axis * far.row_bytes, far.phases, gpu)
        flag = np.full(len(value), ORIGIN_MODELLED, np.uint8)
        return RowNodes(near.axis, value, flag, near.launch_us + far.phases * INTER_NODE_US)

    def datasheet_nodes(self, call: Any, gpu: GpuSpec) -> RowNodes:
        """The link's bandwidth at the datasheet's efficiency, and what crosses nodes."""
        where = placed(call.num_gpus, call.stride, gpu)
        if where.domains == 1:
            return super().datasheet_nodes(call, gpu)
        if where.near == 1:
            return self._between_nodes(call, where, gpu)
        assumed, axis = self.row_datasheet(call), np.array([0.0, SIZE_LIMIT])
        sent = self.near_row_bytes(call, where) * self.wire_bytes(call, where.near)
        bound_us = axis * sent / gpu.nvlink_bytes_per_s * US_PER_S
        flag = np.full(2, ORIGIN_MODELLED, np.uint8)
        near = RowNodes(axis, assumed.launch_us + bound_us / assumed.efficiency, flag, assumed.launch_us)
        return self._over_nodes(call, where, gpu, near)

    def table_points(self, call: Any, tables: Tables, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """The group that is looked up in these tables, and the bytes of so many rows; None without one."""
        where = placed(call.num_gpus, call.stride, tables.gpu)
        if where.near == 1:
            return None
        key_of = self._key_of(call, tables, where)
        lender = self._lender(tables, key_of, where.near)
        return key_of(lender), [rows * self._borrowed_bytes(call, where, lender)]

    def row_variance(self, call: Any, tables: Tables, rows: Floats) -> Floats:
        """Of the curve that is read, with what another size and other nodes add."""
        where = placed(call.num_gpus, call.stride, tables.gpu)
        points = self.table_points(call, tables, rows)
        if points is None:
            return np.full(len(rows), OVER_NODES**2)
        key, sizes = points
        variance = relative_variance(self.local_errors(tables, key), sizes)
        if key != self._key_of(call, tables, where)(where.near):
            variance = variance + BORROWED_GROUP**2
        return variance if where.domains == 1 else variance + OVER_NODES**2
