"""How good a step's time is: the errors of its operators, put together.

An operator's error is the same in every layer, so it grows with the operator's total time, also over
layers of several kinds that run the same call; different operators err independently, but for streaming
kernels, which all share two constants: ``error = sqrt(sum (time error)^2) / step``, and in squares what a
engine's profile leaves unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.compiled import steps
from fastroof.errors import PlanError
from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.attention_errors import AttentionErrors, attention_variance
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import RowOperator
from fastroof.operators.rows import PerRowOperator
from fastroof.plan.attention import attention_times, heads_of
from fastroof.plan.curves import CurveSource, per_row, row_values
from fastroof.plan.datasheet import DatasheetCurves
from fastroof.plan.rows import rows_of
from fastroof.plan.table_curves import TableCurves
from fastroof.tables import Tables
from fastroof.uncertainty.variance import PREFIX

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan
    from fastroof.run import StepBatch, StepTimes

__all__ = ["DATASHEET", "ErrorSource", "StepErrors", "batch_error", "decode_error", "step_errors"]


DATASHEET: Final = 0.22
"""Relative standard error of the kernels of the datasheet model, all of them together: against plans from the
H100 tables, three models, bf16 and fp8, tp 1 and 4, 80 % of 756 decode steps are within 28 %."""


@dataclass(frozen=True, eq=False)
class ErrorSource:
    """What a plan's errors are made from when they are first asked for; it does not travel with the plan.

    Attributes
    ----------
    tables : Tables or None
        The tables that the plan was compiled from.
    is_datasheet : bool
        Whether it was compiled from the datasheet model.
    """

    tables: Tables | None
    is_datasheet: bool

    @classmethod
    def of(cls, curves: CurveSource) -> ErrorSource:
        """Where the errors of such curves come from."""
        tables = curves.tables if isinstance(curves, TableCurves) else None
        return cls(tables, isinstance(curves, DatasheetCurves))

    def __getstate__(self) -> dict[str, Any]:
        return {"tables": None, "is_datasheet": self.is_datasheet}


class StepErrors(NamedTuple):
    """Errors of a plan's operators.

    Attributes
    ----------
    tokens_us2, decode_tokens_us2, logits_us2 : ndarray of float64
        Variance of the operators over tokens, by tokens: in steps with prefill and in steps of decodes
        alone; and of those over sequences, us^2.
    decode, prefill : tuple of AttentionErrors
        Of attention, one for each kind of layers.
    """

    tokens_us2: Floats
    decode_tokens_us2: Floats
    logits_us2: Floats
    decode: tuple[AttentionErrors, ...]
    prefill: tuple[AttentionErrors, ...]


def step_errors(plan: StepPlan) -> StepErrors | None:
    """Work out a plan's errors; None for the datasheet model.

    Raises
    ------
    PlanError
        If the plan's tables are not at hand, or not looked up in roofline coordinates.
    """
    source = plan.error_source
    if source.is_datasheet:
        return None
    if plan.method != "roofline":
        raise PlanError(f"errors are known of plans with method='roofline', this one has {plan.method!r}")
    tables = source.tables
    if tables is None:
        raise PlanError(
            "this plan has no tables to tell its errors from: it was unpickled. Ask for an error before "
            "pickling it, and it takes them along, or compile it again"
        )
    tokens_us2 = _rows_us2(plan, tables, "tokens", "decode_only", plan.max_tokens)
    same = all(curve.operator.steps == "all" for curve in plan.row_curves)
    return StepErrors(
        tokens_us2,
        tokens_us2 if same else _rows_us2(plan, tables, "tokens", "with_prefill", plan.max_tokens),
        _rows_us2(plan, tables, "sequences", "", plan.max_seqs),
        *(
            tuple(operator.local_errors(tables, heads_of(part.call)) for part in plan.attention)
            for operator in (ATTENTION_DECODE, ATTENTION_PREFILL)
        ),
    )


def _rows_us2(plan: StepPlan, tables: Tables, rows: str, left_out: str, limit: int) -> Floats:
    """Variance of all operators over tokens or sequences at every number of them, us^2.

    Of steps that do not run the calls of those that are ``left_out``.
    """
    total_us2 = np.zeros(limit + 1)
    of_call: dict[RowOperator, Floats] = {}
    for curve in plan.row_curves:
        call = curve.operator
        if (call.rows == "sequences") != (rows == "sequences") or call.steps == left_out:
            continue
        ranks = rows_of(plan.layout, 1, 1)[call.rows]
        time_us = call.times * row_values(curve, limit * ranks)[0][::ranks]
        # layers of several kinds may run one call
        one = replace(call, name="", times=1)
        of_call[one] = of_call[one] + time_us if one in of_call else time_us
    together_us: dict[PerRowOperator, Floats] = {}
    for call, time_us in of_call.items():
        operator = per_row(call)
        call_rows = np.arange(1.0, limit + 1.0) * rows_of(plan.layout, 1, 1)[call.rows]
        variance = operator.row_variance(call, tables, call_rows)
        if variance is None:
            together_us[operator] = together_us.get(operator, np.zeros(limit + 1)) + time_us
        else:
            total_us2[1:] += time_us[1:] ** 2 * variance
    for operator, time_us in together_us.items():
        total_us2 += (time_us * (operator.shared_error(tables) or DATASHEET)) ** 2
    return total_us2


def batch_error(plan: StepPlan, batch: StepBatch, times: StepTimes) -> Floats:
    """Relative standard error of each step of a batch; 0 for a step without requests."""
    components = times.components
    if plan.errors is None:
        kernels_us = times.latency_us - components.runtime_us
        return _relative(plan, (kernels_us * DATASHEET) ** 2, times.latency_us)
    new, context = batch.new_tokens.astype(np.int64), batch.context_len.astype(np.int64)
    decode = (new == 1) & (context > 0)
    prefill = ~decode

    def summed(values: Any) -> Longs:
        running = np.r_[0, np.cumsum(values)]
        return np.asarray(running[batch.offsets[1:]] - running[batch.offsets[:-1]])

    tokens_us2 = np.where(
        summed(prefill) > 0, plan.errors.tokens_us2[summed(new)], plan.errors.decode_tokens_us2[summed(new)]
    )
    us2 = tokens_us2 + plan.errors.logits_us2[np.diff(batch.offsets)]
    decodes, kv_sum = summed(decode), summed(decode * (context + 1))
    some = decodes > 0
    bs, mean_kv = decodes[some].astype(np.float64), kv_sum[some] / decodes[some]
    attention_us = components.decode_attention_us[some]
    us2[some] += _attention_us2(plan, True, bs, mean_kv, attention_us)
    new_sum = summed(prefill * new)
    some = new_sum > 0
    tokens = new_sum[some].astype(np.float64)
    q_len = 2.0 * summed(prefill * (new * (new + 1) // 2))[some] / tokens - 1.0
    prefix_us = plan.arena[steps.PREFIX_PAIR_US] * summed(prefill * new * context)[some]
    prefix_us += plan.arena[steps.PREFIX_TOKEN_US] * summed(prefill * context)[some]
    own_us = components.prefill_attention_us[some] - prefix_us
    us2[some] += _attention_us2(plan, False, tokens / q_len, q_len, own_us)
    us2[some] += (PREFIX * prefix_us) ** 2
    return _relative(plan, us2, times.latency_us)


def _attention_us2(plan: StepPlan, is_decode: bool, batch: Floats, x: Floats, own_us: Floats) -> Floats:
    """Variance of attention, us^2: kinds of layers err independently, but for those of one head shape."""
    assert plan.errors is not None
    errors = plan.errors.decode if is_decode else plan.errors.prefill
    if len(errors) == 1:
        return np.asarray(own_us**2 * attention_variance(errors[0], batch, x))
    of_heads: dict[HeadShape, Floats] = {}
    for number, part in enumerate(plan.attention):
        heads = heads_of(part.call)
        of_heads[heads] = of_heads.get(heads, 0.0) + attention_times(plan, number, is_decode, batch, x).own_us
    error_of = {heads_of(part.call): error for part, error in zip(plan.attention, errors, strict=True)}
    parts = [us**2 * attention_variance(error_of[heads], batch, x) for heads, us in of_heads.items()]
    return np.asarray(np.sum(parts, axis=0))


def decode_error(plan: StepPlan, batch_size: Any, kv_len: Any) -> float | Floats:
    """Answer ``plan.decode_error``."""
    step_us = plan.decode_us(batch_size, kv_len)
    batch, kv = (np.ravel(a) for a in np.broadcast_arrays(batch_size, kv_len))
    flat_us = np.reshape(step_us, -1)
    arena = plan.arena
    tokens_at, logits_at = int(arena[steps.DECODE_TOKENS_AT]), int(arena[steps.LOGITS_AT])
    runtime_us = arena[steps.STEP_US] + arena[steps.SEQUENCE_US] * batch
    if plan.errors is None:
        error = _relative(plan, ((flat_us - runtime_us) * DATASHEET) ** 2, flat_us)
    else:
        attention_us = flat_us - arena[tokens_at + batch] - arena[logits_at + batch] - runtime_us
        us2 = plan.errors.decode_tokens_us2[batch] + plan.errors.logits_us2[batch]
        us2 += _attention_us2(plan, True, batch.astype(np.float64), kv.astype(np.float64), attention_us)
        error = _relative(plan, us2, flat_us)
    return error.reshape(np.shape(step_us)) if np.ndim(step_us) else float(error[0])


def _relative(plan: StepPlan, us2: Floats, step_us: Floats) -> Floats:
    """Relative standard error of steps, with what the engine's profile leaves; 0 where there is no step."""
    there = step_us > 0.0
    share = np.where(there, us2 / np.where(there, step_us, 1.0) ** 2 + plan.engine.costs.residual**2, 0.0)
    return np.asarray(np.sqrt(share))
