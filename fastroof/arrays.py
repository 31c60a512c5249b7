"""Names of the NumPy array types used throughout the project."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Floats = npt.NDArray[np.float64]
"""Real numbers: times, and sizes that loops calculate with."""

Reals = npt.NDArray[np.floating[Any]]
"""float64, or the precision that another method calculates in."""

Longs = npt.NDArray[np.int64]

Ints = npt.NDArray[np.integer[Any]]
"""int64 or int32: sizes as an entry point accepts them."""

Int = int | np.integer[Any]
"""One size."""

Flags = npt.NDArray[np.uint8]
"""Origins and status codes."""

Bools = npt.NDArray[np.bool_]
