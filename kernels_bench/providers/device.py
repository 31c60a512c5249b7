"""The device that torch computes on: whether there is one, how large its caches are, when its memory ends."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fastroof.config.gpu import GpuSpec
from fastroof.errors import MeasureError
from kernels_bench.protocol import Availability
from kernels_bench.providers.rotating import L2_MULTIPLE

FP8_MAX: Final = 448.0
"""Largest value of float8_e4m3fn."""

DTYPE_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "fp32": "float32"}
"""torch's names of the dtypes that kernels read and write."""

INFINITY_CACHE_BYTES: Final = dict.fromkeys(("gfx942", "gfx950"), 256 * 2**20)
"""Cache behind the L2 of MI300X and MI325X, and of MI355X, by AMD's CDNA 3 and 4 white papers."""


class Fp8(NamedTuple):
    """An fp8 format: torch's name, and its largest value."""

    name: str = DTYPE_NAMES["fp8"]
    largest: float = FP8_MAX


E4M3: Final = Fp8()


@dataclass(frozen=True)
class Device:
    """Where inputs live."""

    # torch's name: ``"cuda"``, ``"cpu"``, ``"meta"``.
    name: str
    # The largest cache, B: the L2, or what lies behind it.
    l2_bytes: int = 0
    # CUDA compute capability: ``(9, 0)`` for Hopper; ``(0, 0)`` without CUDA. ROCm counts another way.
    capability: tuple[int, int] = (0, 0)
    # How many of these caches inputs rotate over; 0 for one set of inputs, which it finds in the L2.
    rotation: float = L2_MULTIPLE
    # Whether it is the GPU of this host; a named one runs nothing.
    is_here: bool = True
    # AMD's architecture: ``"gfx942"``; empty for NVIDIA's GPUs.
    gfx: str = ""

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
        return self.capability == (9, 0) and not self.gfx

    @property
    def fp8(self) -> Fp8:
        """Its e4m3; that of MI300X has no negative zero and half the range."""
        return Fp8("float8_e4m3fnuz", 240.0) if self.gfx == "gfx942" else E4M3


ROTATION_VARIABLE: Final = "KERNELS_BENCH_ROTATION"
"""Environment variable: :attr:`Device.rotation`, for a study of what it changes."""
CPU_DEVICE: Final = Device("cpu")


def named_device(gpu: GpuSpec) -> Device:
    """Return a card that is somewhere else, to list what would be measured on it.

    >>> from fastroof.config.gpu import load_gpu
    >>> named_device(load_gpu("h200")).capability, named_device(load_gpu("l40s")).capability
    ((9, 0), (8, 9))
    >>> named_device(load_gpu("mi300x")).gfx, named_device(load_gpu("mi355x")).gfx
    ('gfx942', 'gfx950')
    """
    if gpu.generation == "gfx9":
        gfx = "gfx950" if gpu.kernel_name.startswith("mi35") else "gfx942"
        return Device("cuda", largest_cache_bytes(gpu), is_here=False, gfx=gfx)
    major = gpu.generation.removeprefix("sm")
    if not major.isdecimal():
        raise MeasureError(f"no provider measures {gpu.title}: they are for GPUs of NVIDIA and AMD")
    name = gpu.kernel_name
    minors = {"7": 0 if name.startswith("v100") else 5, "10": 3 * ("b300" in name), "12": int(name == "gb10")}
    minors["8"] = 9 if "fp8" in gpu.peak_flops_per_s else 0 if re.match("a(100|800|30)", name) else 6
    return Device("cuda", int(gpu.l2_bytes), (int(major), minors.get(major, 0)), is_here=False)


def largest_cache_bytes(gpu: GpuSpec) -> int:
    """Return the bytes of a card's L2, or of AMD's cache behind it."""
    behind = max(INFINITY_CACHE_BYTES.values()) if gpu.generation == "gfx9" else 0
    return max(int(gpu.l2_bytes), behind)


def cuda_availability(device: Device | None = None, *, has_amd: bool = False) -> Availability:
    """Return whether torch can use a GPU here, and why not; of a named one, whether torch is there.

    ``has_amd``: whether the provider has kernels for AMD's GPUs.
    """
    try:
        import torch
    except ImportError as error:
        return Availability(False, f"torch cannot be imported ({error}): pip install 'torch>=2.11'")
    is_named = device is not None and not device.is_here
    if not has_amd and (device.gfx if device is not None and is_named else torch.version.hip):
        return Availability(False, "its kernels are for NVIDIA's GPUs")
    if is_named:
        return Availability(True, versions={"torch": str(torch.__version__)})
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        if torch.version.hip:
            return Availability(False, f"torch {torch.__version__} sees no GPU: see amd-smi list")
        return Availability(
            False, f"CUDA is not available to torch {torch.__version__} ({built}): see nvidia-smi"
        )
    if torch.version.hip:
        if (gfx := cuda_device().gfx) not in INFINITY_CACHE_BYTES:
            known = ", ".join(INFINITY_CACHE_BYTES)
            return Availability(False, f"AMD's {gfx} is not measured: its caches are unknown; {known} are")
        return Availability(True, versions={"torch": str(torch.__version__), "rocm": torch.version.hip})
    versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        versions["cudnn"] = str(cudnn.version())
    return Availability(True, versions=versions)


def cuda_device() -> Device:
    """Return the current GPU, which torch calls a CUDA device on ROCm too."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    version = int(properties.major), int(properties.minor)
    rotation = float(os.environ.get(ROTATION_VARIABLE) or L2_MULTIPLE)
    gfx = str(properties.gcnArchName).partition(":")[0] if torch.version.hip else ""
    cache_bytes = max(int(properties.L2_cache_size), INFINITY_CACHE_BYTES.get(gfx, 0))
    return Device("cuda", cache_bytes, version, rotation, gfx=gfx)


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
