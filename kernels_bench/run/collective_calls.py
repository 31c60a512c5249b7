"""What each collective sends and leaves: the calls of torch.distributed, and how their results are checked.

A message is what every GPU contributes. Of g GPUs an all-gather leaves g messages on each, a reduce-scatter
the sum of one in g parts, an all-to-all one part in g of every GPU's message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

SMALL: Final = 2.0**-100
"""Of an all-reduce's random inputs, exact in bf16. The sum is in place and so grows by the number of GPUs
each call: from here 8 GPUs can call 75 times on one buffer before bf16 ends, and 42 is the most that is
timed."""


class CollectiveCall(NamedTuple):
    """One collective."""

    # ``launch(dist, message, output)``, where dist is torch.distributed; returns nothing.
    launch: Callable[[Any, Any, Any], None]
    # ``output_elements(elements, num_gpus)`` of a message; 0 where the result is left in the message.
    output_elements: Callable[[int, int], int]
    # Whether a message has a part for each GPU, and so must divide by their number.
    is_shared: bool
    # Whether what comes from each GPU is added up; else it lies side by side, in their order.
    adds: bool
    # Of the random inputs.
    scale: float = 1.0


def _all_reduce(dist: Any, message: Any, output: Any) -> None:
    dist.all_reduce(message)


def _all_gather(dist: Any, message: Any, output: Any) -> None:
    dist.all_gather_into_tensor(output, message)


def _reduce_scatter(dist: Any, message: Any, output: Any) -> None:
    dist.reduce_scatter_tensor(output, message)


def _all_to_all(dist: Any, message: Any, output: Any) -> None:
    dist.all_to_all_single(output, message)


COLLECTIVE_CALLS: Final = {
    "all_reduce": CollectiveCall(_all_reduce, lambda n, g: 0, is_shared=False, adds=True, scale=SMALL),
    "all_gather": CollectiveCall(_all_gather, lambda n, g: n * g, is_shared=False, adds=False),
    "reduce_scatter": CollectiveCall(_reduce_scatter, lambda n, g: n // g, is_shared=True, adds=True),
    "alltoall": CollectiveCall(_all_to_all, lambda n, g: n, is_shared=True, adds=False),
}
"""By the names that tables have; all-reduce has its own table."""


def received(call: CollectiveCall, message: Any, rank: int, num_gpus: int) -> Any:
    """Return the part of a GPU's message that is for ``rank``."""
    return message.chunk(num_gpus)[rank] if call.is_shared else message
