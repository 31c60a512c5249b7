"""The device that torch computes on: whether there is one, how large its L2 is, when its memory ends."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fastroof.config.gpu import GpuSpec
from fastroof.errors import MeasureError
from kernels_bench.protocol import Availability
from kernels_bench.providers.rotating import L2_MULTIPLE

FP8_MAX: Final = 448.0
"""Largest value of float8_e4m3fn."""

DTYPE_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "fp32": "float32"}
"""torch's names of the dtypes that kernels read and write."""


@dataclass(frozen=True)
class Device:
    """Where inputs live."""

    # torch's name: ``"cuda"``, ``"cpu"``, ``"meta"``.
    name: str
    # L2 cache, B.
    l2_bytes: int = 0
    # CUDA compute capability: ``(9, 0)`` for Hopper; ``(0, 0)`` without CUDA.
    capability: tuple[int, int] = (0, 0)
    # How many L2 caches inputs rotate over; 0 for one set of inputs, which it finds in the L2.
    rotation: float = L2_MULTIPLE
    # Whether it is the GPU of this host; a named one runs nothing.
    is_here: bool = True

    @property
    def rotated_bytes(self) -> int:
        """Bytes that rotating inputs must exceed."""
        return int(self.rotation * self.l2_bytes)

    @property
    def version(self) -> str:
        """Its compute capability in words: 9.0."""
        return ".".join(map(str, self.capability))

    @property
    def is_hopper(self) -> bool:
        """Whether it runs kernels built for sm_90a, which FA3 is."""
        return self.capability == (9, 0)


ROTATION_VARIABLE: Final = "KERNELS_BENCH_ROTATION"
"""Environment variable: :attr:`Device.rotation`, for a study of what it changes."""
CPU_DEVICE: Final = Device("cpu")


def named_device(gpu: GpuSpec) -> Device:
    """Return a card that is somewhere else, to list what would be measured on it.

    >>> from fastroof.config.gpu import load_gpu
    >>> named_device(load_gpu("h200")).capability, named_device(load_gpu("l40s")).capability
    ((9, 0), (8, 9))
    """
    major = gpu.generation.removeprefix("sm")
    if not major.isdecimal():
        raise MeasureError(f"no provider measures {gpu.title}: they are for NVIDIA's GPUs")
    name = gpu.kernel_name
    minors = {"7": 0 if name.startswith("v100") else 5, "10": 3 * ("b300" in name), "12": int(name == "gb10")}
    minors["8"] = 9 if "fp8" in gpu.peak_flops_per_s else 0 if re.match("a(100|800|30)", name) else 6
    return Device("cuda", int(gpu.l2_bytes), (int(major), minors.get(major, 0)), is_here=False)


def cuda_availability(device: Device | None = None) -> Availability:
    """Return whether torch can use a CUDA GPU here, and why not; of a named one, whether torch is there."""
    try:
        import torch
    except ImportError as error:
        return Availability(False, f"torch cannot be imported ({error}): pip install 'torch>=2.11'")
    if device is not None and not device.is_here:
        return Availability(True, versions={"torch": str(torch.__version__)})
    if torch.version.hip:
        return Availability(False, "AMD's GPUs are not measured: inputs would lie in the Infinity Cache")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        return Availability(
            False, f"CUDA is not available to torch {torch.__version__} ({built}): see nvidia-smi"
        )
    versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        versions["cudnn"] = str(cudnn.version())
    return Availability(True, versions=versions)


def cuda_device() -> Device:
    """Return the current CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    version = int(properties.major), int(properties.minor)
    rotation = float(os.environ.get(ROTATION_VARIABLE) or L2_MULTIPLE)
    return Device("cuda", int(properties.L2_cache_size), version, rotation)


def torch_dtype(name: str) -> Any:
    """Return torch's dtype of a table's dtype name."""
    import torch

    return getattr(torch, DTYPE_NAMES[name])


def take(tensor: Any, index: Any) -> Any:
    """Return ``tensor[index]``, which torch lacks for fp8 on some devices."""
    import torch

    if tensor.element_size() != 1:
        return tensor[index]
    return tensor.view(torch.uint8)[index].view(tensor.dtype)


@contextlib.contextmanager
def oom_as_memory_error() -> Iterator[None]:
    """Turn torch's out-of-memory error into MemoryError, after freeing cached memory."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise MemoryError(str(error).split(". ")[0]) from error
