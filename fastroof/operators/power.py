"""Power that kernels draw: shares of the range from a GPU's idle power to its limit, by operator.

    watts = idle + (limit - idle) min(1, floor + busy (1 - launch / time) + compute u + memory v)

with ``u`` the kernel's FLOPs and ``v`` its compulsory bytes, each over its time and the GPU's peak. Both
terms are joules of a FLOP and of a byte; ``busy`` is what SMs draw beyond the launch.
``python -m benchmarks.accuracy energy`` fits and judges the shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.config.gpu import GpuSpec


class Draw(NamedTuple):
    """Shares of the range from idle to the power limit that one operator's kernels draw."""

    floor: float
    busy: float
    compute: float
    memory: float

    def watts(self, gpu: GpuSpec, time_us: Any, launch_us: float, compute_us: Any, memory_us: Any) -> Floats:
        """Power of calls, by their time, launch floor and both terms of their roofline, us."""
        us = np.asarray(time_us, np.float64)
        us = np.where(us > 0.0, us, np.inf)
        work = self.compute * np.asarray(compute_us) + self.memory * np.asarray(memory_us)
        share = self.floor + self.busy * np.maximum(1.0 - launch_us / us, 0.0) + work / us
        return np.asarray(gpu.idle_w + (gpu.tdp_w - gpu.idle_w) * np.minimum(share, 1.0))


DRAWS: Final[Mapping[str, Draw]] = {
    "gemm": Draw(0.201, 0.361, 0.334, 0.075),
    "attention_prefill": Draw(0.551, 0.098, 0.363, 0.224),
    "attention_decode": Draw(0.234, 0.156, 0.0, 0.049),
    "encoder_attention": Draw(0.405, 0.121, 1.234, 0.0),
    "allreduce": Draw(0.027, 0.153, 0.0, 0.0),
    "moe": Draw(0.322, 0.343, 0.412, 0.257),
    "moe_nongated": Draw(0.28, 0.147, 0.816, 0.518),
    "elementwise": Draw(0.13, 0.521, 0.0, 0.196),
    "mla_decode": Draw(0.0, 0.213, 0.128, 0.362),
    "mla_module_prefill": Draw(0.293, 0.206, 0.165, 0.0),
    "mla_module_decode": Draw(0.092, 0.255, 0.235, 0.0),
    "dsa_prefill": Draw(0.095, 0.254, 0.283, 0.006),
    "dsa_decode": Draw(0.059, 0.098, 0.444, 0.114),
}
"""Fitted to the power columns of aisimulate 0.13.0 (Apache-2.0), kernels of TensorRT-LLM and vLLM on B200."""

OTHER: Final = Draw(0.154, 0.366, 0.33, 0.13)
"""Of operators with fewer than 1,000 rows: fitted to all rows."""

GAP: Final = 0.677
"""Share of the range that a GPU draws in the time of a step outside its measured kernels: an engine's small
kernels, and what lies between two. Runs of every second model of the ML.ENERGY leaderboard choose it."""

MEASURED_ON: Final = "b200"
"""The GPU of the rows; on all others the shares are modelled."""


def draw_of(operator: str, over_link: bool) -> Draw:
    """Return what an operator's kernels draw; those of links draw as all-reduces do."""
    return DRAWS.get(operator, DRAWS["allreduce"] if over_link else OTHER)
