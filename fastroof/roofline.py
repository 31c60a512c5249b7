"""Roofline bound of a two-dimensional table: linear in the batch, polynomial in the length."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Floats


class BatchBound(NamedTuple):
    """Roofline bound B of one table: ``launch + batch (square x^2 + slope x + fixed)``, all in us."""

    launch_us: float
    square_us: float
    slope_us: float
    fixed_us: float
    window: float = math.inf
    beyond_us: float = 0.0

    def __call__(self, batch: Any, x: Any) -> Floats:
        """Return B at (batch, x), in us."""
        b = np.asarray(batch, dtype=np.float64)
        x = np.asarray(x, dtype=np.float64)
        if self.window < math.inf:
            within = np.minimum(x, self.window)
            own = (self.square_us * within + self.slope_us) * within + self.fixed_us
            return np.asarray(self.launch_us + b * (own + self.beyond_us * (x - within)))
        return np.asarray(self.launch_us + b * ((self.square_us * x + self.slope_us) * x + self.fixed_us))

    def cell_terms(self, x_axis: Floats) -> tuple[Floats, Floats]:
        """Return the square and slope terms of B within each cell of an axis, up to a common factor."""
        within = x_axis[1:] <= self.window
        return np.where(within, self.square_us, 0.0), np.where(within, self.slope_us, 1.0)
