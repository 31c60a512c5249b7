"""Inputs that calls rotate over, so that no call finds its own inputs in the L2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats, Longs

L2_MULTIPLE: Final = 5.0
"""Inputs rotate over sets that together exceed this many L2 caches, as in flashinfer 0.7.4's harness."""
MAX_SETS: Final = 256
"""A replay runs over every set, so more of them would make replays of small kernels many times too long.

Sets below 5 x L2 / 256 (1 MB on an H100) stay partly within the L2. Those bytes take 0.4 us from memory,
where a launch takes 2 us; they are activations of a few tokens, which a real step finds in the L2 too.
"""

Launch = Callable[[int], None]
Read = Callable[[int], Any]


def count_sets(set_bytes: int, rotated_bytes: int, max_bytes: int) -> int:
    """Count the input sets that together exceed the bytes that inputs rotate over.

    >>> count_sets(30_000_000, 100_000_000, 10**9)
    4
    """
    if set_bytes > max_bytes:
        raise MemoryError(f"one set of inputs and outputs takes {set_bytes:,} B, of {max_bytes:,} B allowed")
    wanted = rotated_bytes // max(set_bytes, 1) + 1
    return max(1, min(wanted, MAX_SETS, max_bytes // max(set_bytes, 1)))


def sample(size: int, count: int, seed: int) -> Longs:
    """Choose positions to check: the first, the last and random ones between, ascending.

    >>> sample(3, 8, seed=0).tolist()
    [0, 1, 2]
    """
    if size <= count:
        return np.arange(size, dtype=np.int64)
    inner = np.random.default_rng(seed).choice(size - 2, count - 2, replace=False) + 1
    return np.sort(np.concatenate(([0, size - 1], inner))).astype(np.int64)


@dataclass
class RotatingCalls:
    """A prepared point: a launch over several input sets."""

    kernel: str
    num_sets: int
    rotated_bytes: int
    launch: Launch
    # The sampled part of what a launch wrote on that set, a tensor.
    read: Read
    # The same part of what it should have written, a float64 tensor. Where a kernel works in place, what one
    # launch since the preparation should have written.
    expect: Read
    columns: Mapping[str, int] = field(default_factory=dict)

    def run(self, index: int) -> None:
        """Launch on input set ``index`` without waiting."""
        self.launch(index)

    def result(self, index: int) -> Floats:
        """What the last launch on that set wrote, where it is checked."""
        return _host(self.read(index))

    def reference(self, index: int) -> Floats:
        """What it should have written there, in float64."""
        return _host(self.expect(index))

    def close(self) -> None:
        """Drop the tensors that the three callables hold."""
        self.launch = self.read = self.expect = _closed


def _closed(index: int) -> None:
    raise RuntimeError(f"input set {index} is freed: the prepared point is closed")


def _host(tensor: Any) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array
