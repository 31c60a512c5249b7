"""A plan's data: what compiling makes and timing reads, without the methods of StepPlan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from fastroof._version import __version__
from fastroof.arrays import Floats
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution
from fastroof.operators.attention_work import PrefixUs, prefix_within
from fastroof.operators.calls import AttentionCall, MixerCall
from fastroof.plan.attention import StepAttention, step_attention
from fastroof.plan.curves import CurveSource, DatasheetCurves, RowCurve, TableCurves
from fastroof.tables import Tables


class PlanAttention(NamedTuple):
    """Attention of one kind's layers: ``call.times`` of them, before row curve ``before``.

    Blocks are None in a plan of one kind: the arena has them.
    """

    call: AttentionCall | MixerCall
    before: int
    decode_block: Any
    prefill_block: Any
    prefix_us: PrefixUs
    sources: tuple[str, str]

    def phase(self, is_decode: bool) -> StepAttention:
        """Return decode or prefill as a lookup."""
        return step_attention(self.call, is_decode)

    def prefixes_us(self, new_tokens: Any, context_len: Any) -> Any:
        """Time of each chunk's prefix in all of the layers, us."""
        price, window = self.prefix_us, self.call.window
        total = price.pair * (new_tokens * context_len) + price.token * context_len
        if window:
            pairs, tokens = prefix_within(new_tokens, new_tokens + context_len, window)
            total = total + (price.window_pair * pairs + price.window_token * tokens)
        return total

    def without_blocks(self) -> PlanAttention:
        """Return it as the only kind of a plan."""
        return self._replace(decode_block=None, prefill_block=None)


@dataclass(frozen=True, eq=False)
class ErrorSource:
    """What a plan's errors are computed from on first use; not pickled."""

    tables: Tables | None
    is_datasheet: bool
    curves: CurveSource | None = None

    @classmethod
    def of(cls, curves: CurveSource) -> ErrorSource:
        """Return where the errors of curves come from."""
        tables = curves.tables if isinstance(curves, TableCurves) else None
        return cls(tables, isinstance(curves, DatasheetCurves), curves)

    def __getstate__(self) -> dict[str, Any]:
        return {"tables": None, "is_datasheet": self.is_datasheet, "curves": None}


@dataclass(frozen=True, eq=False, repr=False)
class PlanData:
    """A compiled plan, as compiling made it and as everything that times steps reads it."""

    model: ModelSpec
    gpu: GpuSpec
    layout: Layout
    dtype: str
    kv_dtype: str
    execution: Execution
    profile: EngineProfile
    method: str
    max_tokens: int
    max_seqs: int
    tables_hash: str
    arena: Floats
    row_curves: tuple[RowCurve, ...]
    attention: tuple[PlanAttention, ...]
    error_source: ErrorSource
    version: str = field(default=__version__)
    stage: int | None = None
    stage_plans: tuple[Self, ...] = ()
