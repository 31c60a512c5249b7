"""Calls over links: kernels of groups of GPUs, at equal bytes on the wire, and groups across nodes.

A group lies in one or several *domains*: GPUs behind one fast link, such as a node or a rack with NVLink
switches. Within a domain the nearest measured kernel serves a call at equal bytes on the wire
(:mod:`fastroof.operators.borrowing`). Across domains every GPU exchanges with its peers in the other domains:
phases of ``INTER_NODE_US`` plus the crossing bytes over the bandwidth in the GPU's file. README.md ("Groups
of GPUs", "Dispatch across nodes") has the errors and comparisons with public figures.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MODELLED
from fastroof.config.gpu import GpuSpec
from fastroof.errors import PlanError
from fastroof.operators.operator import Key, RowSource, SourceTable
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowNodes, SizedOperator
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


NO_EXCHANGE: Final = Far(0, 0.0)


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


class LinkDonor(NamedTuple):
    """Kernel that serves a call, its size (bytes or tokens) per row of the call, and what the call adds.

    ``error`` is the relative standard error of what crosses domains; ``others`` are another GPU's tables that
    have the kernel, if these do not.
    """

    key: Key
    row_size: float
    is_own: bool
    added_us: float = 0.0
    far: Far = NO_EXCHANGE
    error: float = 0.0
    others: RowSource | None = None


class LinkOperator(SizedOperator, PerRowOperator):
    """An operator whose calls exchange rows between GPUs."""

    over_link = True
    is_linear = True

    @abstractmethod
    def donor(self, call: Any, tables: RowSource) -> LinkDonor | None:
        """Kernel that serves a call; None if every GPU is in another domain."""

    @abstractmethod
    def near_call(self, call: Any, where: Placement) -> Any | None:
        """Part of a call within one domain; None if every GPU is in another one."""

    @abstractmethod
    def far(self, call: Any, where: Placement) -> Far:
        """Exchange of a GPU with other domains."""

    def placed(self, call: Any, gpu: GpuSpec) -> Placement:
        """Placement of a call's GPUs."""
        return placed(call.num_gpus, 1, gpu)

    def serving(self, call: Any, tables: RowSource) -> SourceTable | None:
        """Table of the donor; None if every GPU is in another domain."""
        found = self.donor(call, tables)
        if found is None:
            return None
        if found.others is None:
            return tables.serving(self.name, found.key)
        table = found.others.serving(self.name, found.key)
        return table.renamed(f"{found.others.gpu.name} {table.source}")

    def row_nodes(self, call: Any, tables: RowSource, options: CurveOptions, max_rows: int) -> RowNodes:
        """Curve of the donor in rows at equal bytes, with what the call adds."""
        found = self.donor(call, tables)
        if found is None:
            return self._over_domains(call, None, tables.gpu)
        there = found.others or tables
        packed = self.packed(there, found.key)
        curve, launch_us = packed.curve, packed.launch_us
        if options.method == "roofline":
            made = RowNodes(curve.axis / found.row_size, curve.value, curve.flag, launch_us)
        else:
            sizes = np.maximum(np.rint(np.arange(1, max_rows + 1) * found.row_size), 1.0)
            made = self.every_row_nodes(there, options.method, found.key, [sizes], launch_us)
        if not found.is_own:
            flag = np.maximum(made.flag, np.uint8(ORIGIN_BORROWED))
            made = RowNodes(made.axis, made.value + found.added_us, flag, made.launch_us + found.added_us)
        return _exchanged(made, found.far, tables.gpu)

    def datasheet_nodes(self, call: Any, gpu: GpuSpec) -> RowNodes:
        """Bytes at the link's bandwidth times the efficiency, plus the part across nodes."""
        where = self.placed(call, gpu)
        if where.domains == 1:
            return super().datasheet_nodes(call, gpu)
        near = self.near_call(call, where)
        return self._over_domains(call, None if near is None else super().datasheet_nodes(near, gpu), gpu)

    def _over_domains(self, call: Any, near: RowNodes | None, gpu: GpuSpec) -> RowNodes:
        nothing = RowNodes(np.array([0.0, SIZE_LIMIT]), np.zeros(2), np.zeros(2, np.uint8), 0.0)
        return _exchanged(near or nothing, self.far(call, self.placed(call, gpu)), gpu)

    def table_points(self, call: Any, tables: RowSource, rows: Floats) -> tuple[Key, list[Floats]] | None:
        """Kernel that is read and its sizes at numbers of rows; None without one in these tables."""
        found = self.donor(call, tables)
        if found is None or found.others is not None:
            return None
        return found.key, [rows * found.row_size]

    def row_variance(self, call: Any, tables: RowSource, rows: Floats) -> Floats:
        """Variance of the curve that is read, of borrowing, and of other nodes."""
        found = self.donor(call, tables)
        if found is None:
            return np.full(len(rows), OVER_NODES**2)
        errors = self.local_errors(found.others or tables, found.key)
        local = relative_variance(errors, [rows * found.row_size])
        return local + BORROWED_GROUP**2 * (not found.is_own) + found.error**2


def _exchanged(near: RowNodes, far: Far, gpu: GpuSpec) -> RowNodes:
    """Add an exchange with other domains."""
    if not far.phases:
        return near
    value = near.value + inter_node_us(near.axis * far.row_bytes, far.phases, gpu)
    flag = np.full(len(value), ORIGIN_MODELLED, np.uint8)
    return RowNodes(near.axis, value, flag, near.launch_us + far.phases * INTER_NODE_US)
