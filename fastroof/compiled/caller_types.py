"""Types that a compiled caller may pass to a step: others are refused at compile time.

Loops read arrays by their first element's address, one element after another (``table_load``): of a column of
a two-dimensional array they would read its neighbours, of a reversed view what lies beyond its buffer. Bounds
checks do not see that, for they count elements. A step costs nothing for being checked.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from fastroof.arrays import Floats, Ints

_types: Any = types  # numba's types have few types


def _is_array(kind: Any) -> bool:
    """Whether a type is an array with contiguous elements."""
    return isinstance(kind, _types.Array) and kind.ndim == 1 and kind.layout == "C"


def only_a_plan(arena: Floats) -> None:
    """Refuse anything but a plan's data."""


def only_requests(new_tokens: Ints, context_len: Ints) -> None:
    """Refuse anything but contiguous one-dimensional integer arrays."""


def only_integers(first: int, second: int) -> None:
    """Refuse anything but integers."""


@overload(only_a_plan, strict=False)
def _plan_typed(arena: Any) -> Any:
    if not _is_array(arena) or arena.dtype != _types.float64:
        raise TypeError(
            f"the data of a step is {arena}; pass the data that numba_step or numba_decode returned"
        )
    return lambda arena: None


@overload(only_requests, strict=False)
def _requests_typed(new_tokens: Any, context_len: Any) -> Any:
    for name, kind in (("new_tokens", new_tokens), ("context_len", context_len)):
        if not _is_array(kind) or not isinstance(kind.dtype, _types.Integer):
            raise TypeError(
                f"{name} of a step is {kind}; it must be a contiguous one-dimensional array of integers; "
                "np.ascontiguousarray(x) makes one of a column or a reversed view"
            )
    return lambda new_tokens, context_len: None


@overload(only_integers, strict=False)
def _integers_typed(first: Any, second: Any) -> Any:
    for kind in (first, second):
        if not isinstance(kind, _types.Integer):
            raise TypeError(f"a size of a step is {kind}; it must be an integer")
    return lambda first, second: None
