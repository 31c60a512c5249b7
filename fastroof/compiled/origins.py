"""Origins as the loops write them: the codes of :data:`fastroof.columns.ORIGINS`."""

from __future__ import annotations

__all__ = ["EXTRAPOLATED", "INTERPOLATED", "MODELLED"]

INTERPOLATED = 1
EXTRAPOLATED = 2
MODELLED = 4
