"""Defaults shared by the command line and Python, so that their answers agree."""

from __future__ import annotations

from typing import Final

DEFAULT_ENGINE: Final = "vllm"
"""Serving engine if none is given."""

DEFAULT_GPU: Final = "h100"

MEASURED: Final = "measured"
"""Value of ``tables``: the GPU's measured tables, or the datasheet model if it has none."""

DATASHEET: Final = "datasheet"
"""Value of ``tables``: the datasheet model."""

REQUESTS_PER_CLIENT: Final = 10
"""Requests of each client of a closed loop, in estimates and drawn workloads."""
