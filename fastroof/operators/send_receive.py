"""Point to point: what a pipeline stage sends the next one. No table has it.

Bytes over the bandwidth of the link that the boundary crosses, and one message: between nodes that of the
card's file and ``INTER_NODE_US``, within a node the fast link's at the latency of the smallest all-reduce of
the datasheet model. aiconfigurator-core 0.12.0 takes the bandwidth between nodes and 10 us at every
boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_MODELLED, Column
from fastroof.config.gpu import GpuSpec
from fastroof.operators.calls import SendReceive
from fastroof.operators.communication import ALLREDUCE
from fastroof.operators.link_groups import OVER_NODES, inter_node_us
from fastroof.operators.operator import Columns, DatasheetClass, Key
from fastroof.operators.rows import CurveOptions, PerRowOperator, RowCost, RowNodes
from fastroof.pack import SIZE_LIMIT
from fastroof.units import US_PER_S

if TYPE_CHECKING:
    from fastroof.tables import Tables

__all__ = ["OPERATORS", "SEND_RECEIVE", "SendReceiveOperator", "boundaries_between_nodes"]


def boundaries_between_nodes(stages: int, stage_gpus: int, linked_gpus: int) -> int:
    """Boundaries at which some GPU of a stage sends to another node; stages lie one after another."""

    def crosses(stage: int) -> bool:
        first = stage * stage_gpus
        senders = range(first, first + stage_gpus)
        return any(gpu // linked_gpus != (gpu + stage_gpus) // linked_gpus for gpu in senders)

    return sum(crosses(stage) for stage in range(stages - 1))


class SendReceiveOperator(PerRowOperator):
    """What a stage sends the next; the mean over all boundaries."""

    name = "send_receive"
    rank = 64
    keys = (Column("num_nodes", "int", "", "nodes that both GPUs are in"),)
    axes = (Column("message_bytes", "int", "B", "bytes that are sent"),)
    over_link = True
    datasheets: ClassVar[Mapping[str, DatasheetClass]] = {
        "send_receive": DatasheetClass(ALLREDUCE.datasheets["allreduce"].launch_us, 1.0)
    }

    def moved_bytes(self, columns: Columns) -> Floats:
        """What is sent."""
        return np.asarray(columns["message_bytes"], np.float64)

    # -- in plans ----------------------------------------------------------------------------------

    def row_cost(self, call: SendReceive) -> RowCost:
        """Bytes a row."""
        return RowCost(0.0, call.row_bytes, 0.0, "bf16")

    def row_key(self, call: SendReceive) -> Key:
        """Bytes a row, and where the boundaries lie."""
        return (call.row_bytes, call.stages, call.stage_gpus)

    def serving(self, call: SendReceive, tables: Tables) -> None:
        """Nothing was measured."""

    def row_nodes(self, call: SendReceive, tables: Tables, options: CurveOptions, max_rows: int) -> RowNodes:
        """The datasheet's: nothing was measured."""
        return self.datasheet_nodes(call, tables.gpu)

    def row_variance(self, call: SendReceive, tables: Tables, rows: Floats) -> Floats:
        """As of all that is modelled between nodes."""
        return np.full(len(rows), OVER_NODES**2)

    def row_datasheet(self, call: SendReceive) -> DatasheetClass:
        """The one class."""
        return self.datasheets[self.name]

    def datasheet_nodes(self, call: SendReceive, gpu: GpuSpec) -> RowNodes:
        """A straight line: the mean of the boundaries within nodes and between them."""
        axis = np.array([0.0, SIZE_LIMIT])
        sent = axis * call.row_bytes
        near_us = self.row_datasheet(call).launch_us + sent / gpu.nvlink_bytes_per_s * US_PER_S
        boundaries = call.stages - 1
        far = boundaries_between_nodes(call.stages, call.stage_gpus, gpu.linked_gpus)
        far_us = inter_node_us(sent, 1, gpu) if far else 0.0
        value = (near_us * (boundaries - far) + far_us * far) / boundaries
        return RowNodes(axis, value, np.full(2, ORIGIN_MODELLED, np.uint8), float(value[0]))


SEND_RECEIVE: Final = SendReceiveOperator()
OPERATORS: Final = (SEND_RECEIVE,)
