"""The host's CPU through NumPy: tiny sizes, to test the harness; its times do not predict a GPU.

What it computes is in :mod:`kernels_bench.providers.cpu_kernels`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping
from typing import Final

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.errors import MeasureError
from fastroof.units import MIB
from kernels_bench.protocol import Availability, Point
from kernels_bench.providers.cpu_kernels import KERNELS, LANES, Arrays, round_bf16

MAX_BYTES: Final = 64 * MIB
MAX_WORK: Final = 2**30
"""Multiply-adds of a call: about 0.1 s on one core."""
NUM_SETS: Final = 2
FLOAT_BYTES: Final = 4.0
EMULATED: Final = (("gemm", "fp8_block"),)
"""Operators and dtypes besides bf16."""


class CpuProvider:
    """Measures tiny kernels on the host; used only if named."""

    name = "cpu"

    def availability(self) -> Availability:
        """Return that it works anywhere."""
        return Availability(works=True, versions={"numpy": np.__version__})

    def refuses(self, point: Point) -> str | None:
        """Return why a point is not for a CPU, or None."""
        values = point.values
        if point.operator not in KERNELS:
            return f"no {point.operator} on a CPU; there are {', '.join(KERNELS)}"
        for column in ("dtype", "kv_dtype"):
            dtype = values.get(column, "bf16")
            if dtype != "bf16" and (point.operator, dtype) not in EMULATED:
                return (
                    f"{column} {dtype} of {point.operator} is not emulated; bf16 is, and fp8_block of GEMMs"
                )
        if values.get("kind", "copy") not in LANES:
            return f"no {values['kind']} on a CPU; there are {', '.join(LANES)}"
        work, numbers = KERNELS[point.operator].size(values)
        held_bytes = FLOAT_BYTES * numbers
        if held_bytes > MAX_BYTES or work > MAX_WORK:
            return (
                f"too large for a CPU: {work:.3g} multiply-adds and {held_bytes:.3g} B, "
                f"at most {MAX_WORK:,} and {MAX_BYTES:,} B; it proves the harness on tiny sizes"
            )
        return None

    def prepare(self, point: Point, seed: int, max_bytes: int) -> CpuPrepared:
        """Make random inputs."""
        reason = self.refuses(point)
        if reason is not None:
            raise MeasureError(f"{point.key}: {reason}")
        _use_one_thread()
        held_bytes = FLOAT_BYTES * KERNELS[point.operator].size(point.values).numbers * NUM_SETS
        if held_bytes > max_bytes:
            raise MemoryError(f"inputs of {held_bytes:,} B, {max_bytes:,} B are there")
        return CpuPrepared(point, seed)


@functools.cache
def _use_one_thread() -> None:
    """Keep NumPy's BLAS on one thread: on a busy host a tiny GEMM of four takes 8 ms of waiting for them."""
    libraries = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line}
    for library in libraries:
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            with contextlib.suppress(OSError, AttributeError):  # another BLAS: its threads stay
                getattr(ctypes.CDLL(library), name)(1)


class CpuPrepared:
    """Inputs of one point on the host."""

    def __init__(self, point: Point, seed: int) -> None:
        kernel = KERNELS[point.operator]
        self._compute = kernel.compute
        random = np.random.default_rng(seed % 2**63)
        self.kernel = f"numpy {point.values.get('kind', point.operator)}"
        self.num_sets = NUM_SETS
        self.columns: Mapping[str, int] = {}
        self._values = dict(point.values)
        self._sets: list[Arrays] = [kernel.inputs(self._values, random, seed) for _ in range(NUM_SETS)]
        self._outputs: list[Array | None] = [None] * NUM_SETS

    def run(self, index: int) -> None:
        """Compute on input set ``index``."""
        self._outputs[index] = self._compute(self._sets[index], np.float32)

    def result(self, index: int) -> Floats:
        """Return what the last run on that set computed, rounded as a GPU stores it."""
        output = self._outputs[index]
        if output is None:
            raise MeasureError(f"{self.kernel}: input set {index} was not run")
        return round_bf16(output).astype(np.float64)

    def reference(self, index: int) -> Floats:
        """Return the same in float64."""
        return self._compute(self._sets[index], np.float64).astype(np.float64)

    def close(self) -> None:
        """Drop the inputs."""
        self._sets, self._outputs = [], []
