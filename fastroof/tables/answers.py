"""What tables answer: lookups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastroof.arrays import Flags, Floats
from fastroof.arrow import ORIGIN, RELATIVE_ERROR, ArrowResult
from fastroof.columns import Column

__all__ = ["Lookup"]


@dataclass(frozen=True, eq=False)
class Lookup(ArrowResult):
    """Answer of a lookup, arrays of the broadcast shape of its arguments.

    Attributes
    ----------
    latency_us : ndarray of float64
        Latency, us.
    mfu : ndarray of float64
        FLOPs / (latency x peak of the dtype the kernel computes in); NaN for communication.
    origin : ndarray of uint8
        0 measured, 1 interpolated, 2 extrapolated, 3 borrowed, 4 modelled.
    relative_error : ndarray of float64, or None
        One standard error over the latency; None where it was not asked for.
    made_from : mapping of str to str
        fastroof's version, the tables' hash and the GPU: metadata of its Arrow table.
    """

    latency_us: Floats
    mfu: Floats
    origin: Flags
    relative_error: Floats | None = None
    made_from: Mapping[str, str] = field(default_factory=dict, repr=False)

    arrow_columns = (
        Column("latency_us", "float", "us", "time of one call"),
        Column("mfu", "float", "", "FLOPs over latency and peak; empty for communication", 0),
        ORIGIN,
        RELATIVE_ERROR,
    )

    def columns(self) -> dict[str, Any]:
        """latency_us, mfu, origin (codes) and relative_error."""
        return {column.name: getattr(self, column.name) for column in self.arrow_columns}
