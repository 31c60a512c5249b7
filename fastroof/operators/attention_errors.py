"""How good attention lookups are: local errors of the tables behind a head shape, and of borrowing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN, ORIGIN_MEASURED
from fastroof.operators.attention_work import HeadShape
from fastroof.uncertainty.leave_one_out import LocalErrors, MeasuredGrid, measured_grid
from fastroof.uncertainty.variance import (
    MAPE_TO_ERROR,
    calibrated_errors,
    calibration_factor,
    relative_variance,
)

if TYPE_CHECKING:
    from fastroof.operators.attention_grids import AttentionOperator
    from fastroof.tables import Tables

__all__ = ["AttentionErrors", "attention_errors", "attention_variance"]

BORROWED: Final = (MAPE_TO_ERROR * 0.038, MAPE_TO_ERROR * 0.081)
"""Of a table borrowed at equal batch x KV heads, for a factor of 2 and of 8 between the KV heads: (32, 8)
from (16, 4) is off by 3.8 %, (64, 8) from (8, 1) by 8.1 %. With each head shape of head_dim 128 hidden in
turn, 80 % intervals cover 78 to 81 % of what its double or half says of it, 86 to 87 % at a factor of 4, and
more of what is borrowed from other group sizes (1.2 to 3.2 % off), for which the smaller one is taken."""


WITHIN_WINDOW: Final = MAPE_TO_ERROR * 0.15
"""Beyond a window that was borrowed from full attention. Against the windows of 128, 1024 and 8192 tokens of
the H100 and B200 tables such decodes are off by 0.08 to 0.30 and 0.05 to 0.24, prompts by 0.04 to 0.08 and
0.04 to 0.17."""


class AttentionErrors(NamedTuple):
    """Local errors of the tables behind one head shape."""

    lenders: tuple[tuple[float, LocalErrors], ...]
    borrowed: float
    window: float = math.inf
    beyond: float = 0.0


def attention_variance(errors: AttentionErrors, batch: Floats, length: Floats) -> Floats:
    """Squared relative standard error of attention without a prefix at (batch, length)."""
    within = np.minimum(length, errors.window)
    by_lender = [relative_variance(local, (batch * scale, within)) for scale, local in errors.lenders]
    beyond = np.where(length > errors.window, errors.beyond, 0.0)
    largest = np.max(by_lender, axis=0) if by_lender else np.zeros(np.shape(length))
    return np.asarray(largest + errors.borrowed + beyond)


def attention_errors(operator: AttentionOperator, tables: Tables, shape: HeadShape) -> AttentionErrors:
    """Local errors of the tables behind a head shape, over (batch size, length)."""
    served = operator.grid(tables, shape)
    lenders = []
    borrowed = 0.0
    for lender in served.lenders:
        lenders.append((shape.num_kv_heads / lender.num_kv_heads, _lender_errors(operator, tables, lender)))
        is_only_window = lender.window != shape.window and lender._replace(window=shape.window) == shape
        if served.borrowed and not is_only_window:
            borrowed = max(borrowed, _borrowing_error(shape, lender) ** 2)
    if served.lenders[0].window == shape.window:
        return AttentionErrors(tuple(lenders), borrowed)
    return AttentionErrors(tuple(lenders), borrowed, float(shape.window), WITHIN_WINDOW**2)


def _lender_errors(operator: AttentionOperator, tables: Tables, lender: HeadShape) -> LocalErrors:
    """Local errors of one measured table."""

    def errors() -> LocalErrors:
        factor = _factor(operator, tables, lender)
        return calibrated_errors(_measured_grid(operator, tables, lender), factor)

    return tables.kept(("local errors", operator.name, lender), errors)


def _borrowing_error(wanted: HeadShape, lender: HeadShape) -> float:
    near, far = BORROWED
    if wanted.group_size != lender.group_size:
        return near
    doublings = abs(math.log2(wanted.num_kv_heads / lender.num_kv_heads))
    return near + (far - near) * (max(doublings, 1.0) - 1.0) / 2.0


def _measured_grid(operator: AttentionOperator, tables: Tables, shape: HeadShape) -> MeasuredGrid:
    rows = tables.rows(operator, shape)
    keep = operator.plain_rows(rows)
    latency_us = rows["latency_us"][keep]
    bound = operator.bound(shape, tables.gpu, float(latency_us.min()))
    points = tuple(rows[name][keep].astype(np.float64) for name in ("batch_size", "kv_len"))
    is_spike = rows[ORIGIN][keep] != ORIGIN_MEASURED
    return measured_grid(
        points, latency_us, bound.__call__, is_spike=is_spike, is_additive=operator.is_additive
    )


def _factor(operator: AttentionOperator, tables: Tables, lender: HeadShape) -> float:
    """Calibration over head shapes of one KV dtype, with windows or without, of the first source."""
    kind = (lender.kv_dtype, lender.window > 0)

    def factor() -> float:
        alike = [s for s in operator.shapes(tables) if (s.kv_dtype, s.window > 0) == kind] or [lender]
        # one that was measured after prefixes alone has no grid, so nothing to tell of one
        alike = [s for s in alike if operator.plain_rows(tables.rows(operator, s)).any()]
        return calibration_factor(_measured_grid(operator, tables, shape) for shape in alike)

    return tables.kept(("calibration", operator.name, *kind), factor)
