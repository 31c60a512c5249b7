"""Groups of GPUs in a collective: measured sizes, borrowed sizes, and groups across nodes.

A group lies in one or several *domains*: GPUs behind one fast link, such as a node or a rack with NVLink
switches. Within a domain an unmeasured size is borrowed from the nearest measured one at equal bytes on the
wire, and the latency of the smallest message grows per doubling as between the two largest measured sizes.
Across domains every GPU exchanges with its peers in the other domains: one phase of ``INTER_NODE_US`` plus
the crossing bytes over the bandwidth in the GPU's file. Engines' all-reduce kernels work within one node, so
larger groups read NCCL's. README.md ("Groups of GPUs") has the errors and comparisons with public nccl-tests
figures.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config.gpu import GpuSpec
from fastroof.errors import PlanError
from fastroof.operators.operator import Key, RowSource, SourceTable, measured_keys
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes, SizedOperator
from fastroof.pack import SIZE_LIMIT
from fastroof.uncertainty.leave_one_out import relative_variance
from fastroof.units import US_PER_S

INTER_NODE_US: Final = 10.0
"""Latency of one message to another node, us: p2p_latency in systems/*.yaml of aiconfigurator-core 0.12.0."""

BORROWED_GROUP: Final = 0.25
"""Relative standard error of a group of another size, from hiding measured sizes (README.md), rounded up."""

OVER_NODES: Final = 0.5
"""Relative standard error of a collective across nodes: assumed, nothing was measured."""


class Placement(NamedTuple):
    """Placement of a group: GPUs per domain, and domains."""

    near: int
    domains: int


class Far(NamedTuple):
    """Exchange of a GPU with other domains: sequential phases, and bytes per row."""

    phases: int
    row_bytes: float


def placed(num_gpus: int, stride: int, gpu: GpuSpec) -> Placement:
    """Return the placement of a group whose members are ``stride`` GPUs apart."""
    near = min(num_gpus, max(1, gpu.linked_gpus // stride))
    return Placement(near, -(-num_gpus // near))


def inter_node_us(sent_bytes: Any, phases: float, gpu: GpuSpec) -> Any:
    """Latency of phases across nodes in which a GPU sends ``sent_bytes``, us."""
    if not gpu.inter_node_bytes_per_s:
        raise PlanError(
            f"{gpu.name} has no bandwidth between nodes: a layout of more than {gpu.linked_gpus} GPUs needs "
            f"links.inter_node_gb_per_s in its gpu.toml (per GPU, each way)"
        )
    return phases * INTER_NODE_US + sent_bytes / gpu.inter_node_bytes_per_s * US_PER_S


class GroupOperator(SizedOperator, PerRowOperator):
    """An operator of a group of GPUs, by the bytes that each contributes."""

    @abstractmethod
    def group_key(self, call: Any, num_gpus: int) -> Key:
        """Kernel of a call in a group of ``num_gpus``."""

    def node_key(self, call: Any, num_gpus: int) -> Key:
        """Kernel of the ``num_gpus`` of a node in a group across nodes."""
        return self.group_key(call, num_gpus)

    @abstractmethod
    def wire_bytes(self, call: Any, num_gpus: int) -> float:
        """Bytes that each GPU sends per byte that it contributes."""

    @abstractmethod
    def near_row_bytes(self, call: Any, where: Placement) -> float:
        """Bytes per row that a GPU contributes within its domain."""

    @abstractmethod
    def far(self, call: Any, where: Placement) -> Far:
        """Exchange of a GPU with other domains."""

    def row_cost(self, call: Any) -> RowCost:
        """Bytes that each GPU sends per row."""
        return RowCost(0.0, call.row_bytes * self.wire_bytes(call, call.num_gpus), 0.0, "bf16")

    def row_key(self, call: Any) -> Key:
        """Kernel, stride and bytes per row."""
        return (*self.group_key(call, call.num_gpus), call.stride, call.row_bytes)

    def _sizes(self, tables: RowSource, key_of: Callable[[int], Key]) -> list[int]:
        """Measured group sizes of a kernel, sorted."""

        def sizes() -> list[int]:
            at = [column.name for column in self.keys].index("num_gpus")
            keys = measured_keys(tables, self.name) if tables.has(self.name) else []
            return sorted({key[at] for key in keys if key_of(key[at]) == key})

        return tables.cached(("group sizes", self.name, *key_of(0)), sizes)

    def _key_of(self, call: Any, tables: RowSource, where: Placement) -> Callable[[int], Key]:
        """Kernels that serve a group, by their number of GPUs."""
        over_nodes = functools.partial(self.node_key, call)
        if where.domains > 1 and self._sizes(tables, over_nodes):
            return over_nodes
        return functools.partial(self.group_key, call)

    def _donor(self, tables: RowSource, key_of: Callable[[int], Key], near: int) -> int:
        """Measured size that serves a group: its own, or the nearest (the larger of two)."""
        sizes = self._sizes(tables, key_of)
        return min(sizes, key=lambda size: (abs(np.log(size / near)), -size), default=near)

    def _growth_us(self, tables: RowSource, key_of: Callable[[int], Key], near: int, donor: int) -> float:
        """Latency that the smallest message takes in addition to the donor's, us."""
        less = [size for size in self._sizes(tables, key_of) if size < donor]
        if near <= donor or not less:
            return 0.0
        one, two = (self.packed(tables, key_of(size)).curve.value[1:-1] for size in (less[-1], donor))
        doublings = np.log2(near / donor) / np.log2(donor / less[-1])
        return max(0.0, float(two.min() - one.min())) * float(doublings)

    def _borrowed_bytes(self, call: Any, where: Placement, donor: int) -> float:
        """Bytes per row at which the donor sends as much as the group."""
        ratio = self.wire_bytes(call, where.near) / self.wire_bytes(call, donor)
        return self.near_row_bytes(call, where) * ratio

    def serving(self, call: Any, tables: RowSource) -> SourceTable | None:
        """Table of the group's size or the nearest; None if every GPU is in another node."""
        where = placed(call.num_gpus, call.stride, tables.gpu)
        if where.near == 1:
            return None
        key_of = self._key_of(call, tables, where)
        return tables.serving(self.name, key_of(self._donor(tables, key_of, where.near)))

    def row_nodes(self, call: Any, tables: RowSource, options: CurveOptions, max_rows: int) -> RowNodes:
        """Curve of the group in rows: measured, borrowed from another size, or modelled across nodes."""
        where = placed(call.num_gpus, call.stride, tables.gpu)
        if where.near == 1:
            return self._between_nodes(call, where, tables.gpu)
        key_of = self._key_of(call, tables, where)
        donor = self._donor(tables, key_of, where.near)
        key, row_bytes = key_of(donor), self._borrowed_bytes(call, where, donor)
        curve = self.packed(tables, key).curve
        launch_us = float(curve.value[1:-1].min())
        if options.method == "roofline":
            made = RowNodes(curve.axis / row_bytes, curve.value, curve.flag, launch_us)
        else:
            message_bytes = np.maximum(np.rint(np.arange(1, max_rows + 1) * row_bytes), 1.0)
            made = self.every_row_nodes(tables, options.method, key, [message_bytes], launch_us)
        if donor == where.near and where.domains == 1:
            return made
        grown_us = self._growth_us(tables, key_of, where.near, donor)
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
        """Bytes at the link's bandwidth times the efficiency, plus the part across nodes."""
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

    def table_points(self, call: Any, tables: RowSource, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """Group that is looked up and its bytes at numbers of rows; None without one."""
        where = placed(call.num_gpus, call.stride, tables.gpu)
        if where.near == 1:
            return None
        key_of = self._key_of(call, tables, where)
        donor = self._donor(tables, key_of, where.near)
        return key_of(donor), [rows * self._borrowed_bytes(call, where, donor)]

    def row_variance(self, call: Any, tables: RowSource, rows: Floats) -> Floats:
        """Variance of the curve that is read, of another size, and of other nodes."""
        where = placed(call.num_gpus, call.stride, tables.gpu)
        points = self.table_points(call, tables, rows)
        if points is None:
            return np.full(len(rows), OVER_NODES**2)
        key, sizes = points
        variance = relative_variance(self.local_errors(tables, key), sizes)
        if key != self._key_of(call, tables, where)(where.near):
            variance = variance + BORROWED_GROUP**2
        return variance if where.domains == 1 else variance + OVER_NODES**2
