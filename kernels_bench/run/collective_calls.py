"""What each collective sends and leaves: the calls of torch.distributed, and how their results are checked.

A message is what every GPU contributes. Of g GPUs an all-gather leaves g messages on each, a reduce-scatter
the sum of one in g parts, an all-to-all one part in g of every GPU's message.

vLLM's layers call an all-reduce of their own, whose group chooses a kernel by the message's size: custom
all-reduce, FlashInfer, symmetric memory, then NCCL. Those calls are of vLLM 0.26.0 and 0.33.0.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple
from unittest import mock

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


COLLECTIVE_CALLS: Final = {
    "all_reduce": CollectiveCall(
        lambda dist, message, _: dist.all_reduce(message), lambda n, g: 0,
        is_shared=False, adds=True, scale=SMALL,
    ),
    "all_gather": CollectiveCall(
        lambda dist, message, output: dist.all_gather_into_tensor(output, message), lambda n, g: n * g,
        is_shared=False, adds=False,
    ),
    "reduce_scatter": CollectiveCall(
        lambda dist, message, output: dist.reduce_scatter_tensor(output, message), lambda n, g: n // g,
        is_shared=True, adds=True,
    ),
    "alltoall": CollectiveCall(
        lambda dist, message, output: dist.all_to_all_single(output, message), lambda n, g: n,
        is_shared=True, adds=False,
    ),
}  # fmt: skip
"""By the names that tables have; all-reduce has its own table."""


def received(call: CollectiveCall, message: Any, rank: int, num_gpus: int) -> Any:
    """Return the part of a GPU's message that is for ``rank``."""
    return message.chunk(num_gpus)[rank] if call.is_shared else message


_REDUCES: Final = ("custom_all_reduce", "quick_all_reduce", "all_reduce")
"""What vLLM calls of the communicator that it chose."""


class VllmAllreduce:
    """A rank of vLLM's tensor-parallel group, made of the processes that torch.distributed has."""

    def __init__(self, rank: int, num_gpus: int, backend: str) -> None:
        config: Any = importlib.import_module("vllm.config")
        vllm: Any = importlib.import_module("vllm.distributed")
        with config.set_current_vllm_config(config.VllmConfig()):
            vllm.init_distributed_environment(num_gpus, rank, local_rank=rank, backend=backend)
            vllm.initialize_model_parallel(num_gpus)
        self._state: Any = importlib.import_module("vllm.distributed.parallel_state")
        self.reduce = vllm.tensor_model_parallel_all_reduce
        """Return the sum of a message over all ranks; not in place on a GPU."""

    def kernel(self, message: Any) -> str:
        """Reduce a message once; return the class of the communicator that did."""
        ran: list[str] = []
        with contextlib.ExitStack() as stack:
            for one in vars(self._state.get_tp_group().device_communicator).values():
                for name in _REDUCES:
                    if callable(getattr(one, name, None)):
                        real, word = getattr(one, name), getattr(one, "__name__", type(one).__name__)

                        def spied(*given: Any, real: Any = real, word: str = word, **more: Any) -> Any:
                            ran.append(word)
                            return real(*given, **more)

                        stack.enter_context(mock.patch.object(one, name, spied))
            self.reduce(message.clone())
        return ran[0] if ran else type(self._state.get_tp_group().device_communicator).__name__

    @contextlib.contextmanager
    def capture(self, stream: Any) -> Iterator[None]:
        """Surround a capture: its buffers are known to all ranks afterwards."""
        with self._state.get_tp_group().graph_capture(self._state.GraphCaptureContext(stream)):
            yield
