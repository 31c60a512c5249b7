"""Units of a sweep: independent pieces of work, each one plan and a slice of its candidates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.columns import DTYPE, KV_DTYPE, Column
from fastroof.models.execution import AUTO

if TYPE_CHECKING:
    import pyarrow as pa


class Split(NamedTuple):
    """Sizes of a layout other than tensor parallelism, and how tokens are routed to experts."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    routing: str = AUTO


class PlanKey(NamedTuple):
    """Inputs of a plan, as named in the spec."""

    model: str
    gpu: str
    tp: int
    dtype: str
    kv_dtype: str
    engine: str
    pp: int = 1
    dp: int = 1
    ep: int = 1
    routing: str = AUTO

    @property
    def layout_options(self) -> dict[str, Any]:
        """Return the ``compile_plan`` arguments of the layout and the routing."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "routing": self.routing}

    @property
    def words(self) -> str:
        """Return the layout and the formats as text for messages."""
        sizes = [f"{name}={getattr(self, name)}" for name in ("pp", "dp", "ep") if getattr(self, name) > 1]
        return " ".join([f"tp={self.tp}", *sizes, self.dtype, f"kv {self.kv_dtype}"])


class WorkUnit(NamedTuple):
    """An independent piece of work, small and picklable.

    Attributes
    ----------
    number : int
        Index of the unit, from 0; rows are written in this order.
    plan : PlanKey
        Plan to evaluate.
    mode : str
        ``steps``, ``aggregated``, ``disaggregated`` or ``capacity``.
    start, stop : int
        Slice of the plan's candidates, or for steps of the spec's kv_len.
    size : int
        Number of evaluations: the amount of work, counted by progress.
    is_last : bool
        Whether this is the plan's last unit.
    block : int
        Index of the part of the sweep that it belongs to: groups of rows are in one block each, and follow
        one another in the results.
    """

    number: int
    plan: PlanKey
    mode: str
    start: int
    stop: int
    size: int
    is_last: bool
    block: int = 0


class UnitResult(NamedTuple):
    """Rows, counts and skipped plans of an evaluated unit."""

    rows: pa.RecordBatch
    counts: dict[str, int]
    skipped: tuple[tuple[str, str], ...] = ()
    for_summary: tuple[dict[str, Any], ...] = ()
    evaluate_s: float = 0.0


def numbered_units(units: Iterable[WorkUnit]) -> list[WorkUnit]:
    """Number the units of a sweep in order."""
    return [unit._replace(number=number) for number, unit in enumerate(units)]


def plan_units(
    key: PlanKey, mode: str, length: int, most: int, *, each: int = 1, lost: int = 0
) -> Iterator[WorkUnit]:
    """Cut a plan's candidates into units of at most ``most``, without numbers; the first counts ``lost``."""
    for start, stop in slices(length, most):
        size = (stop - start) * each + (lost if start == 0 else 0)
        yield WorkUnit(0, key, mode, start, stop, size, stop == length)


def slices(length: int, most: int) -> list[tuple[int, int]]:
    """Cut a length into slices of at most ``most``; a length of 0 gives one empty slice."""
    most = max(1, most)
    return [(start, min(start + most, length)) for start in range(0, length, most)] or [(0, 0)]


NO_ROUTING: Final = "none"
"""Value of ``routing`` for a model without experts: an empty text would be read back from CSV as null."""

MODEL: Final = Column("model", "text", "", "model")
GPU: Final = Column("gpu", "text", "", "GPU that the model runs on")
SPLIT: Final = (
    Column("pp", "int", "", "pipeline stages"),
    Column("dp", "int", "", "ranks of attention data parallelism"),
    Column("ep", "int", "", "expert-parallel groups"),
    Column("routing", "text", "", "how tokens spread over experts; none for models without experts"),
)
"""Columns of a layout other than its tensor-parallel size."""
EXECUTION: Final = (
    DTYPE,
    KV_DTYPE,
    Column("engine", "text", "", "engine whose overheads are added to the kernels"),
    Column("kernels", "text", "", "measured tables of the kernels"),
)
"""Columns of the formats, the engine and the kernels."""
WEIGHT_BYTES: Final = Column("weight_bytes", "int", "B", "bytes of weights on one GPU")
