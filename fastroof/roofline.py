"""The roofline of a two-dimensional table: linear in the batch, a polynomial in the length."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Floats

__all__ = ["BatchBound"]


class BatchBound(NamedTuple):
    """B of one table: ``launch + batch (square x^2 + slope x + fixed)``, all in us.

    x is kv_len for decode attention (square is 0) and q_len for prefill attention. launch_us is the
    smallest latency of the table.
    """

    launch_us: float
    square_us: float
    slope_us: float
    fixed_us: float

    def __call__(self, batch: Any, x: Any) -> Floats:
        """B at (batch, x), us."""
        b = np.asarray(batch, dtype=np.float64)
        x = np.asarray(x, dtype=np.float64)
        return np.asarray(self.launch_us + b * ((self.square_us * x + self.slope_us) * x + self.fixed_us))
