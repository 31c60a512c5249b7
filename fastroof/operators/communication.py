"""Collectives of a group of GPUs by the bytes that each contributes, and sends between pipeline stages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from fastroof.arrays import Array, Bools, Floats
from fastroof.columns import DTYPE, ORIGIN_MODELLED, Column
from fastroof.config.gpu import GpuSpec
from fastroof.errors import LookupInputError
from fastroof.operators import external_rows as external
from fastroof.operators.borrowing import GPUS, nearest
from fastroof.operators.calls import AllReduce, Collective, SendReceive
from fastroof.operators.links import (
    OVER_NODES,
    Far,
    LinkDonor,
    LinkOperator,
    Placement,
    inter_node_us,
    placed,
)
from fastroof.operators.operator import (
    Columns,
    DatasheetClass,
    HoldoutGrid,
    Key,
    Real,
    RowSource,
    as_floats,
    every_second,
    measured_keys,
)
from fastroof.operators.row_operator import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.pack import SIZE_LIMIT
from fastroof.units import DTYPE_BYTES, US_PER_S

_NUM_GPUS: Final = Column("num_gpus", "int", "", "GPUs in the group", 2)
_MESSAGE: Final = Column("message_bytes", "int", "B", "bytes each GPU contributes")
_PACKAGE_COLUMNS: Final = (*external.size_columns("num_gpus", "message_size"), *external.MEASURED)

IN_SWITCH_REDUCTION: Final = 2.0
"""NVLink switches that reduce in-network halve an all-reduce's traffic, so its ring figure can double."""


def allreduce_wire_bytes(message_bytes: Real, num_gpus: Real) -> Floats:
    """Bytes each GPU sends in a ring all-reduce: ``2 (g - 1) / g`` of the message."""
    g = as_floats(num_gpus)
    return 2.0 * (g - 1.0) / g * as_floats(message_bytes)


def _message_bytes(raw: external.Raw, dtype: str) -> Array:
    """Bytes of the package's messages, whose sizes count elements of a column's dtypes."""
    size = np.array([DTYPE_BYTES.get(d, 0) for d in external.dtype_names(raw[dtype])])
    return np.asarray(raw["message_size"] * size, np.int64)


def _rows(
    raw: external.Raw, dtype: str, message_bytes: Array, left_out: Mapping[str, Bools], **kind: Array
) -> external.ExternalRows:
    return external.package_rows(raw, "num_gpus", dtype=dtype, message_bytes=message_bytes, **kind).without(
        left_out
    )


def _custom_allreduce(raw: external.Raw) -> external.ExternalRows:
    # TensorRT-LLM's rows have no mode; they start at 2.6 to 5 us over NVLink, where eager launches take 20
    launch = raw.get("backend", np.full(len(raw["num_gpus"]), "trtllm_graph", object))
    mode = np.array([word.rpartition("_")[2] for word in launch], object)
    out = external.others("launched as", mode, ("graph", "eager"))
    return _rows(raw, "allreduce_dtype", _message_bytes(raw, "allreduce_dtype"), out, mode=mode)


def _library_allreduce(raw: external.Raw, mode: str) -> external.ExternalRows:
    out = {"other collectives": raw["op_name"] != "all_reduce"}
    modes = external.constant_text(mode, len(raw["num_gpus"]))
    return _rows(raw, "nccl_dtype", _message_bytes(raw, "nccl_dtype"), out, mode=modes)


def _library_collective(raw: external.Raw) -> external.ExternalRows:
    collective, size = raw["op_name"], _message_bytes(raw, "nccl_dtype")
    # the library's size of an all-gather is the result's; each GPU contributes its share
    share = np.where(collective == "all_gather", size // raw["num_gpus"], size)
    out = {"message that the GPUs cannot share": share * raw["num_gpus"] < size}
    out |= {"all_reduce": collective == "all_reduce"}
    return _rows(raw, "nccl_dtype", share, out, collective=collective)


def _library_files(
    converts: Mapping[str, Callable[[external.Raw], external.ExternalRows]],
) -> tuple[external.PackageFile, ...]:
    columns = (*_PACKAGE_COLUMNS, *external.text_columns("nccl_dtype", "op_name"))
    return tuple(
        external.PackageFile("comm", f"{library}_perf", columns, convert, backend=library)
        for library, convert in converts.items()
    )


class GroupOperator(LinkOperator):
    """A collective of a group of GPUs, by the bytes that each contributes."""

    @abstractmethod
    def group_key(self, call: Any, num_gpus: int) -> Key:
        """Kernel of a call in a group of ``num_gpus``."""

    def node_key(self, call: Any, num_gpus: int) -> Key:
        """Kernel of the ``num_gpus`` of a node in a group across nodes."""
        return self.group_key(call, num_gpus)

    @abstractmethod
    def wire_bytes(self, call: Any, num_gpus: int) -> float:
        """Bytes that each GPU sends per byte that it contributes."""

    def near_row_bytes(self, call: Any, where: Placement) -> float:
        """Bytes per row that a GPU contributes within its domain: the whole message, reduced there first."""
        return float(call.row_bytes)

    def near_call(self, call: Any, where: Placement) -> Any | None:
        """The group of one domain."""
        if where.near == 1:
            return None
        return replace(call, num_gpus=where.near, row_bytes=self.near_row_bytes(call, where))

    def placed(self, call: Any, gpu: GpuSpec) -> Placement:
        """Placement of GPUs that are a stride apart."""
        return placed(call.num_gpus, call.stride, gpu)

    def row_cost(self, call: Any) -> RowCost:
        """Bytes that each GPU sends per row."""
        return RowCost(0.0, call.row_bytes * self.wire_bytes(call, call.num_gpus), 0.0, "bf16")

    def row_key(self, call: Any) -> Key:
        """Kernel, stride and bytes per row."""
        return (*self.group_key(call, call.num_gpus), call.stride, call.row_bytes)

    def donor(self, call: Any, tables: RowSource) -> LinkDonor | None:
        """The group of the nearest size.

        The latency of the smallest message grows per doubling as between the two largest measured sizes.
        """
        where = self.placed(call, tables.gpu)
        near = self.near_call(call, where)
        if near is None:
            return None
        is_over_nodes = where.domains > 1
        key_of, sizes = self.node_key, self._sizes(call, tables, self.node_key) if is_over_nodes else []
        if not sizes:
            key_of, sizes = self.group_key, self._sizes(call, tables, self.group_key)
        size = next((donor.kernel for donor in nearest(where.near, sizes, GPUS)), where.near)
        added_us = 0.0
        if where.near > size and size > sizes[0]:
            less = sizes[sizes.index(size) - 1]
            least, most = (self.packed(tables, key_of(call, n)).curve.value[1:-1].min() for n in (less, size))
            added_us = max(0.0, float(most - least)) * float(
                np.log2(where.near / size) / np.log2(size / less)
            )
        row_size = near.row_bytes * (self.wire_bytes(call, where.near) / self.wire_bytes(call, size))
        found = LinkDonor(key_of(call, size), row_size, size == where.near, added_us)
        return found._replace(far=self.far(call, where), error=OVER_NODES) if is_over_nodes else found

    def _sizes(self, call: Any, tables: RowSource, key_of: Callable[[Any, int], Key]) -> list[int]:
        """Measured group sizes of a kernel, sorted."""

        def sizes() -> list[int]:
            at = [column.name for column in self.keys].index("num_gpus")
            keys = measured_keys(tables, self.name) if tables.has(self.name) else []
            return sorted({key[at] for key in keys if key_of(call, key[at]) == key})

        return tables.cached(("group sizes", self.name, *key_of(call, 0)), sizes)


class AllReduceOperator(GroupOperator):
    """A sum over GPUs; the default mode is a CUDA graph."""

    name = "allreduce"
    rank = 40
    summary = "Sum over GPUs, message-bytes from each."
    keys = (
        DTYPE,
        _NUM_GPUS,
        Column("mode", "text", "", "graph (CUDA graph replay), eager, nccl or oneccl"),
    )
    axes = (_MESSAGE,)
    defaults: ClassVar[Mapping[str, Any]] = {"dtype": "bf16", "mode": "graph"}
    bandwidth_slack = IN_SWITCH_REDUCTION
    faster_than_ring = True
    holdouts = every_second("allreduce", "mode", "graph", "eager")
    # Over vLLM 0.24.0's H100 all-reduces of 16 MiB and more over 4 GPUs.
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {"allreduce": DatasheetClass(4.5, 0.72)}
    package_files = (
        external.PackageFile(
            "comm",
            "custom_allreduce_perf",
            (*_PACKAGE_COLUMNS, *external.text_columns("allreduce_dtype")),
            _custom_allreduce,
            (*external.text_columns("backend"), *external.RUN),
        ),
        *_library_files({name: partial(_library_allreduce, mode=name) for name in ("nccl", "oneccl")}),
    )

    def as_keyed(self, columns: Columns) -> Columns:
        """NCCL in a graph is not an engine's own kernel, as kernels-bench once keyed it."""
        kernel = columns.get("kernel", columns["mode"]).astype(str)
        is_nccl = (columns["mode"] == "graph") & np.char.startswith(kernel, "nccl ")
        return {**columns, "mode": np.where(is_nccl, "nccl", columns["mode"])}

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes each GPU sends in a ring."""
        return allreduce_wire_bytes(columns["message_bytes"], columns["num_gpus"])

    def check_key(self, key: Key) -> None:
        """Reject a group of one GPU."""
        if key[1] == 1:
            raise LookupInputError("allreduce needs num_gpus of at least 2, got 1")

    # -- in plans ----------------------------------------------------------------------------------

    def group_key(self, call: AllReduce, num_gpus: int) -> Key:
        """bf16, in CUDA graphs."""
        return ("bf16", num_gpus, "graph")

    def node_key(self, call: AllReduce, num_gpus: int) -> Key:
        """NCCL with two bytes per element; engines' own kernels work within one node."""
        return ("fp16", num_gpus, "nccl")

    def wire_bytes(self, call: AllReduce, num_gpus: int) -> float:
        """Bytes of a ring."""
        return float(allreduce_wire_bytes(1.0, num_gpus))

    def far(self, call: AllReduce, where: Placement) -> Far:
        """Reduce-scatter and all-gather of each GPU's share across domains."""
        share = call.row_bytes / where.near
        return Far(2, float(allreduce_wire_bytes(share, where.domains)))


def collective_wire_bytes(collective: str, message_bytes: Real, num_gpus: Real) -> Floats:
    """Bytes each GPU sends: half an all-reduce's; an all-gather forwards g shards."""
    half = allreduce_wire_bytes(message_bytes, num_gpus) / 2.0
    return half * as_floats(num_gpus) if collective == "all_gather" else half


class CollectiveOperator(GroupOperator):
    """All-gathers, reduce-scatters and all-to-all exchanges."""

    name = "collective"
    rank = 60
    summary = "All-gather, reduce-scatter or all-to-all."
    about = "message-bytes is what each GPU contributes; for an all-gather its share of the result."
    keys = (
        DTYPE,
        Column("collective", "text", "", "all_gather, reduce_scatter or alltoall"),
        _NUM_GPUS,
    )
    axes = (_MESSAGE,)
    # the package has none in bf16; sums and copies of 2 bytes per element take the same time
    defaults: ClassVar[Mapping[str, Any]] = {"dtype": "fp16"}
    holdouts = (HoldoutGrid("collective", "every second", {}, {"dtype": "fp16"}),)
    package_files = _library_files(dict.fromkeys(("nccl", "oneccl"), _library_collective))

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes each GPU sends."""
        gather, other = (
            collective_wire_bytes(name, columns["message_bytes"], columns["num_gpus"])
            for name in ("all_gather", "")
        )
        return np.where(columns["collective"].astype(str) == "all_gather", gather, other)

    def check_key(self, key: Key) -> None:
        """Reject a group of one GPU."""
        if key[2] == 1:
            raise LookupInputError(f"collective {key[1]} needs num_gpus of at least 2, got 1")

    # -- in plans ----------------------------------------------------------------------------------

    def group_key(self, call: Collective, num_gpus: int) -> Key:
        """Two bytes per element."""
        return (self.defaults["dtype"], call.collective, num_gpus)

    def wire_bytes(self, call: Collective, num_gpus: int) -> float:
        """Bytes of :func:`collective_wire_bytes`."""
        return float(collective_wire_bytes(call.collective, 1.0, num_gpus))

    def near_row_bytes(self, call: Collective, where: Placement) -> float:
        """An all-gather forwards other domains' rows, an all-to-all sends only the domain's part."""
        if call.collective == "all_gather":
            return call.row_bytes * where.domains
        if call.collective == "alltoall":
            return call.row_bytes * where.near / call.num_gpus
        return call.row_bytes

    def far(self, call: Collective, where: Placement) -> Far:
        """A GPU's rows to its peers (all-gather), its share of the sums, or the rows of other domains."""
        if call.collective == "all_gather":
            return Far(1, call.row_bytes * (where.domains - 1))
        if call.collective == "alltoall":
            return Far(1, call.row_bytes * (call.num_gpus - where.near) / call.num_gpus)
        return Far(1, call.row_bytes / where.near * (where.domains - 1) / where.domains)

    @property
    def datasheet(self) -> DatasheetClass:
        """Class of all-reduces, which use the same link."""
        return ALLREDUCE.datasheet


ALLREDUCE: Final = AllReduceOperator()
COLLECTIVE: Final = CollectiveOperator()


def boundaries_between_nodes(stages: int, stage_gpus: int, linked_gpus: int) -> int:
    """Count stage boundaries at which some GPU sends to another node."""

    def crosses(stage: int) -> bool:
        first = stage * stage_gpus
        senders = range(first, first + stage_gpus)
        return any(gpu // linked_gpus != (gpu + stage_gpus) // linked_gpus for gpu in senders)

    return sum(crosses(stage) for stage in range(stages - 1))


class SendReceiveOperator(PerRowOperator):
    """Sends between pipeline stages; the mean over all boundaries."""

    name = "send_receive"
    rank = 64
    keys = (Column("num_nodes", "int", "", "nodes of the two GPUs"),)
    axes = (Column("message_bytes", "int", "B", "bytes sent"),)
    over_link = True
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {
        "send_receive": DatasheetClass(ALLREDUCE.datasheet.launch_us, 1.0)
    }

    def moved_bytes(self, columns: Columns) -> Floats:
        """Bytes sent."""
        return np.asarray(columns["message_bytes"], np.float64)

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: SendReceive) -> RowCost:
        """Bytes per row."""
        return RowCost(0.0, call.row_bytes, 0.0, "bf16")

    def row_key(self, call: SendReceive) -> Key:
        """Bytes per row, and the stages."""
        return (call.row_bytes, call.stages, call.stage_gpus)

    def serving(self, call: SendReceive, tables: RowSource) -> None:
        """None: nothing was measured."""

    def row_nodes(
        self, call: SendReceive, tables: RowSource, options: CurveOptions, max_rows: int
    ) -> RowNodes:
        """Nodes of the datasheet."""
        return self.datasheet_nodes(call, tables.gpu)

    def row_variance(self, call: SendReceive, tables: RowSource, rows: Floats) -> Floats:
        """Variance of everything modelled across nodes."""
        return np.full(len(rows), OVER_NODES**2)

    def datasheet_nodes(self, call: SendReceive, gpu: GpuSpec) -> RowNodes:
        """A straight line: the mean over boundaries within nodes and across them."""
        axis = np.array([0.0, SIZE_LIMIT])
        sent = axis * call.row_bytes
        near_us = self.datasheet.launch_us + sent / gpu.nvlink_bytes_per_s * US_PER_S
        boundaries = call.stages - 1
        far = boundaries_between_nodes(call.stages, call.stage_gpus, gpu.linked_gpus)
        far_us = inter_node_us(sent, 1, gpu) if far else 0.0
        value = (near_us * (boundaries - far) + far_us * far) / boundaries
        return RowNodes(axis, value, np.full(2, ORIGIN_MODELLED, np.uint8), float(value[0]))


SEND_RECEIVE: Final = SendReceiveOperator()

OPERATORS: Final = (
    ALLREDUCE,
    COLLECTIVE,
    SEND_RECEIVE,
)
