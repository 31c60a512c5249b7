"""Names of the array types that the whole project hands around; NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Floats = npt.NDArray[np.float64]
"""Times, sizes that loops calculate with, and whatever else is a real number."""

Reals = npt.NDArray[np.floating[Any]]
"""float64, or what another method calculates in."""

Longs = npt.NDArray[np.int64]

Ints = npt.NDArray[np.integer[Any]]
"""int64 or int32: sizes as an entry point takes them."""

Int = int | np.integer[Any]
"""One size."""

Flags = npt.NDArray[np.uint8]
"""Origins, and codes."""

Bools = npt.NDArray[np.bool_]
