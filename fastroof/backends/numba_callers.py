"""Plans for callers that Numba compiles: a function to call from their loops, and the data it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastroof.arrays import Floats
from fastroof.compiled.callers import equal_decodes_us, requests_step_us
from fastroof.errors import PlanError
from fastroof.plan.compile import check_plan

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


def numba_step(plan: StepPlan) -> tuple[Callable[..., float], Floats]:
    """Return a compiled function that times one step of any requests, and its data.

    ``step_us(data, new_tokens, context_len)`` takes two one-dimensional contiguous integer arrays, a request
    each, as :class:`fastroof.StepBatch` does, and returns what ``plan.step_us`` would, to the last bit. A
    step that the plan cannot time is NaN, since compiled loops raise nothing; a caller that hands over
    something else, a column of a two-dimensional array or a reversed view, does not compile (``TypeError``).
    Give no compiled function integers of the other byte order: Numba may take them for native ones, which
    nothing behind it can tell.

    Parameters
    ----------
    plan : StepPlan
        The plan.

    Returns
    -------
    step_us : function
        Compiled by ``numba.njit`` when first called; it releases the GIL. One for all plans: a caller that
        was compiled with it runs any.
    data : ndarray of float64
        The plan, to be passed on.

    Raises
    ------
    PlanError
        If it is no plan.

    Notes
    -----
    A caller that Numba keeps on disk (``cache=True``) keeps these loops with it: remove that cache when
    fastroof is upgraded.

    Examples
    --------
    >>> import fastroof, numba, numpy as np
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> step_us, data = fastroof.numba_step(plan)
    >>> @numba.njit
    ... def generated_us(data, context_len, steps):          # your own loop
    ...     new_tokens, total_us = np.ones_like(context_len), 0.0
    ...     for _ in range(steps):
    ...         total_us += step_us(data, new_tokens, context_len)
    ...         context_len += 1
    ...     return total_us
    >>> generated_us(data, np.array([100, 2000]), 1) == plan.step_scalar([1, 1], [100, 2000])
    True
    """
    check_plan("plan", plan, PlanError)
    return requests_step_us, plan.arena


def numba_decode(plan: StepPlan) -> tuple[Callable[..., float], Floats]:
    """Return a compiled function that times one step of equal decodes, and its data.

    ``decode_us(data, batch_size, kv_len)`` takes two integers, and nothing else compiles; it returns what
    ``plan.decode_us`` would. All else is as in :func:`numba_step`.

    Examples
    --------
    >>> import fastroof
    >>> plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    >>> decode_us, data = fastroof.numba_decode(plan)
    >>> decode_us(data, 64, 4096) == plan.decode_us(64, 4096)
    True
    """
    check_plan("plan", plan, PlanError)
    return equal_decodes_us, plan.arena
