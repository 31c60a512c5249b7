"""The default engine of served models."""

from __future__ import annotations

from typing import Final

DEFAULT_RUNTIME: Final = "vllm"
"""What commands, sweeps, servers, exports, adapters and ``least_gpus`` take, so that their answers agree.

:func:`fastroof.compile_plan` by itself sums the kernels (``runtime="kernels"``): a plan that was compiled
keeps its own runtime, whatever asks it.
"""
