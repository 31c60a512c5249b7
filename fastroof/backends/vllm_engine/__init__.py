"""vLLM without a GPU: its own API server, scheduler and KV cache, with steps that take a plan's time.

The command that starts the engine is unchanged; one environment variable replaces the GPU::

    FASTROOF_GPU=h100 vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2

The plan follows vLLM's model, tp, pp, ep, KV-cache dtype and limits. ``FASTROOF_PLAN`` sets the dtype of
weights if ``--quantization`` changes it. Answers are dummy tokens up to ``max_tokens``, at the predicted
times, so that a router, a gateway or an autoscaler can be load-tested.
Without ``FASTROOF_GPU`` vLLM runs unchanged.

Read and run with vLLM 0.33.0 (Apache-2.0): vllm/v1/executor/abstract.py, vllm/v1/engine/core.py,
vllm/v1/core/sched/output.py, vllm/platforms/interface.py.
"""

from __future__ import annotations

import os
from typing import Final

GPU: Final = "FASTROOF_GPU"
"""Environment variable that names the GPU to predict."""

PLAN: Final = "FASTROOF_PLAN"
"""Environment variable with more options of the plan as JSON, as ``{"engine": "vllm-0.28"}``."""


def platform() -> str | None:
    """Return the platform's class to vLLM, which asks each of its plugins; None without :data:`GPU`."""
    return f"{__name__}.platform.NoGpu" if os.environ.get(GPU) else None
