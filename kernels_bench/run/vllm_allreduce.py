"""The all-reduce that vLLM's layers call: its tensor-parallel group chooses a kernel by the message's size.

The calls are those of vLLM 0.26.0 and 0.33.0: custom all-reduce, FlashInfer, symmetric memory, then NCCL.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

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
