"""What a simulation may cost at most, before it runs."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.trace import Trace

LOOK_STEPS: Final = 8
"""Steps that a router could take in the time in which it looks at one replica.

A look was 10 to 70 ns, 250 where 4,096 replicas are in no cache; a step 8 to 40 ns.
"""


def simulated_steps(
    trace: Trace, settings: EngineSettings, replicas: int = 1, routing: str = "round_robin", ranks: int = 1
) -> int:
    """Return how many steps a simulation may take at most, what a router looks at included."""
    chunks = -(-trace.input_tokens.astype(np.int64) // settings.max_num_batched_tokens)
    steps = int(trace.output_tokens.sum(dtype=np.int64)) + int(chunks.sum())
    return routed_steps(steps, len(trace), trace.is_closed, replicas, routing, ranks)


def routed_steps(
    steps: int, requests: int, is_closed: bool, replicas: int, routing: str = "round_robin", ranks: int = 1
) -> int:
    """Return :func:`simulated_steps` of so many requests that take so many steps on one engine."""
    if replicas == 1:
        return steps * ranks
    looks = replicas * requests
    if is_closed:
        steps *= replicas
    elif routing == "round_robin":
        return (steps + looks) * ranks
    return (steps + LOOK_STEPS * looks) * ranks
