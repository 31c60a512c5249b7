"""Wide experts of a shape that was not measured, from the measured ones nearest to it.

As :mod:`fastroof.operators.expert_borrowing`, with places for experts where that has experts: a GPU of a
group whose load balancer copies the busiest experts holds ``num_slots / moe_ep`` of them. Other splits and
numbers of places of the layer lend before another layer does, and what a load balancer made even lends to
nothing else.
``README.md`` beside this file says how far off that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fastroof.errors import MissingTableError
from fastroof.operators.expert_borrowing import ExpertShape, Lender, nearest, nearest_routing
from fastroof.operators.operator import Key

if TYPE_CHECKING:
    from fastroof.load import MeasuredTable
    from fastroof.tables import Tables

__all__ = [
    "ANOTHER_LAYER",
    "ANOTHER_SPLIT",
    "ANY_PHASE",
    "BALANCED",
    "WideKey",
    "WideLoan",
    "lender_key",
    "wide_loan",
]

ANY_PHASE: Final = "any"
"""Of an engine that has one kernel for prompts and decodes."""

BALANCED: Final = "_eplb"
"""Ending of routings that a load balancer evens out."""

ANOTHER_SPLIT: Final = 0.14
ANOTHER_PLACES: Final = 0.19
ANOTHER_LAYER: Final = 0.22
"""Relative standard errors of borrowing from another split of the layer, another number of places, and
another layer: the largest of README.md's table, made from 80 % of the errors."""


class WideKey(NamedTuple):
    """Keys of a kernel of wide experts, in the order of its table."""

    dtype: str
    hidden: int
    intermediate: int
    topk: int
    num_experts: int
    num_slots: int
    moe_ep: int
    phase: str
    distribution: str

    @property
    def layer(self) -> tuple[int, int, int, int]:
        """What a model says, however it is split and placed."""
        return self[1:5]

    @property
    def routing(self) -> str:
        """How tokens spread before a load balancer."""
        return self.distribution.removesuffix(BALANCED)

    @property
    def is_balanced(self) -> bool:
        """Whether a load balancer copied the busiest experts."""
        return self.distribution.endswith(BALANCED)

    @property
    def shape(self) -> ExpertShape:
        """What one GPU sees of it."""
        return ExpertShape(*self[:4], self.num_slots, 1, self.moe_ep, self.distribution)


class WideLoan(NamedTuple):
    """What serves a kernel of wide experts."""

    table: MeasuredTable
    lenders: tuple[tuple[WideKey, Lender], ...]
    is_own: bool

    def error(self, wanted: WideKey) -> float:
        """Relative standard error of borrowing."""
        if self.is_own:
            return 0.0
        near = self.lenders[0][0]
        if near.layer != wanted.layer:
            return ANOTHER_LAYER
        return ANOTHER_SPLIT if near.num_slots == wanted.num_slots else ANOTHER_PLACES


def wide_loan(tables: Tables, operator: str, wanted: WideKey) -> WideLoan:
    """Find what serves a kernel: of the engine's own table if it has one near, else of another engine's."""
    return tables.kept(("wide loan", operator, wanted), lambda: _loan(tables, operator, wanted))


def _loan(tables: Tables, operator: str, wanted: WideKey) -> WideLoan:
    candidates = tables.candidates(operator)
    found = [loan for table in candidates if (loan := _of_table(tables, table, wanted)) is not None]
    if not found:
        what = "a load balancer" if wanted.is_balanced else "no load balancer"
        raise MissingTableError(
            f"no {operator} row of {tables.gpu.name} has dtype={wanted.dtype}, phase={wanted.phase} and "
            f"{what}; "
            f"measured: {', '.join(sorted({_words(WideKey(*k)) for k in tables.every_key(operator)}))}"
        )

    def rank(loan: WideLoan) -> tuple[bool, bool, bool]:
        (key, lender), *_ = loan.lenders
        is_near = loan.is_own or key.layer == wanted.layer or lender.is_near(wanted.shape)
        return not is_near, tables.order.is_foreign(loan.table), not loan.is_own

    # of equals the first that is asked
    return min(found, key=rank)


def _words(key: WideKey) -> str:
    return f"{key.dtype} {key.phase} {key.distribution}"


def _of_table(tables: Tables, table: MeasuredTable, wanted: WideKey) -> WideLoan | None:
    there = [
        key
        for key in map(WideKey._make, tables.keys_of(table))
        if key.dtype == wanted.dtype
        and key.phase in (wanted.phase, ANY_PHASE)
        and key.is_balanced == wanted.is_balanced
    ]
    if not there:
        return None
    routing = nearest_routing(wanted.routing, {key.routing for key in there})
    there = [key for key in there if key.routing == routing]
    for key in there:
        if key[:7] == wanted[:7] and routing == wanted.routing:
            return WideLoan(table, ((key, Lender(key.shape, 1.0, 0.0)),), True)
    pool: Sequence[WideKey] = [key for key in there if key.layer == wanted.layer] or there
    of_shape = {key.shape: key for key in pool}
    lenders = nearest(wanted.shape._replace(distribution=pool[0].distribution), list(of_shape))
    return WideLoan(table, tuple((of_shape[lender.shape], lender) for lender in lenders), False)


def lender_key(shape: ExpertShape, phase: str) -> Key:
    """The key whose roofline is that of a shape."""
    return (*shape[:4], shape.num_experts, shape.num_experts, shape.moe_ep, phase, shape.distribution)
