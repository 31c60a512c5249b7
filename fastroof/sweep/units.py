"""Units of a sweep: independent pieces, each one plan and a slice of its questions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastroof.columns import Column
from fastroof.models.execution import ROUTING

if TYPE_CHECKING:
    import pyarrow as pa


class Split(NamedTuple):
    """How a model is split beside its tensor-parallel size, and how its tokens are routed."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    routing: str = ROUTING


class PlanKey(NamedTuple):
    """What a plan is compiled from, as the spec names it."""

    model: str
    gpu: str
    tp: int
    dtype: str
    kv_dtype: str
    runtime: str
    pp: int = 1
    dp: int = 1
    ep: int = 1
    routing: str = ROUTING

    @property
    def layout_options(self) -> dict[str, Any]:
        """Arguments of ``compile_plan`` that say how the model is split and its tokens are routed."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "routing": self.routing}

    @property
    def words(self) -> str:
        """How it is split and stored, as messages name it."""
        sizes = [f"{name}={getattr(self, name)}" for name in ("pp", "dp", "ep") if getattr(self, name) > 1]
        return " ".join([f"tp={self.tp}", *sizes, self.dtype, f"kv {self.kv_dtype}"])


class UnitPiece(NamedTuple):
    """A unit before it has its number; the attributes of :class:`WorkUnit`."""

    plan: PlanKey
    mode: str
    start: int
    stop: int
    size: int
    is_last: bool


class WorkUnit(NamedTuple):
    """A piece of work that depends on no other, small and picklable.

    Attributes
    ----------
    number : int
        Place in the list, from 0; rows are written in this order.
    plan : PlanKey
        What to evaluate.
    mode : str
        ``steps``, ``aggregated``, ``disaggregated`` or ``capacity``.
    start, stop : int
        Which of the plan's candidates, or for steps which of the spec's kv_len.
    size : int
        Evaluations: how much work it is, and what progress counts.
    is_last : bool
        Whether it is the plan's last.
    """

    number: int
    plan: PlanKey
    mode: str
    start: int
    stop: int
    size: int
    is_last: bool


class UnitResult(NamedTuple):
    """What a unit comes to."""

    rows: pa.RecordBatch
    counts: dict[str, int]
    skipped: tuple[tuple[str, str], ...] = ()
    for_summary: tuple[dict[str, Any], ...] = ()
    evaluate_s: float = 0.0


def numbered_units(pieces: Iterable[UnitPiece]) -> list[WorkUnit]:
    """Number the pieces of a sweep in their order."""
    return [WorkUnit(number, *piece) for number, piece in enumerate(pieces)]


def slices(length: int, most: int) -> list[tuple[int, int]]:
    """Cut a length into slices; one that is empty where there is nothing."""
    most = max(1, most)
    return [(start, min(start + most, length)) for start in range(0, length, most)] or [(0, 0)]


NO_ROUTING: Final = "none"
"""Of a model without experts; what is empty would come back from a CSV as nothing."""

MODEL: Final = Column("model", "text", "", "model")
GPU: Final = Column("gpu", "text", "", "GPU it runs on")
SPLIT: Final = (
    Column("pp", "int", "", "pipeline stages"),
    Column("dp", "int", "", "ranks of attention data parallelism"),
    Column("ep", "int", "", "expert-parallel groups"),
    Column("routing", "text", "", "how tokens spread over experts; none without any"),
)
"""How a model is split, beside its tensor-parallel size."""
RUNTIME: Final = Column("runtime", "text", "", "what an engine adds to the sum of its kernels")
KERNELS: Final = Column("kernels", "text", "", "measured tables that its kernels come from")
WEIGHT_BYTES: Final = Column("weight_bytes", "int", "B", "weights on one GPU")
