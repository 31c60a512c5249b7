"""Which engine steps are measured, and in which order: the most useful first, since a deadline may end it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastroof.load.steps_file import format_runs

TIMED_STEPS: Final = 24
WARM_STEPS: Final = 5
PREFILL_REPEATS: Final = 6
MIXED_REPEATS: Final = 5
"""The first prefill and the first mixed step are not counted."""
STEPS_BETWEEN: Final = 3
"""Steps from one mixed step to the next: the step itself and two decode steps."""

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """The requests of one step: new tokens of each, and tokens that it has in the cache."""

    new_tokens: tuple[int, ...]
    context_len: tuple[int, ...]

    @property
    def cells(self) -> dict[str, str | int]:
        """The cells of steps.csv that describe the batch."""
        return {
            "new_tokens": format_runs(self.new_tokens),
            "context_len": format_runs(self.context_len),
            "num_requests": len(self.new_tokens),
            "num_tokens": sum(self.new_tokens),
        }


@dataclass(frozen=True)
class EnginePoint:
    """One step to time.

    Its sizes are (batch, kv_len) of ``decode``, (new tokens, cached tokens) of ``prefill``, and (new tokens
    of one request, batch and kv_len of the decodes next to it) of ``mixed``.
    """

    phase: str
    sizes: Sizes

    @property
    def batch(self) -> Batch:
        """The batch as steps.csv describes it; a decode step reads ``kv_len`` tokens with its own."""
        if self.phase == "prefill":
            new, cached = self.sizes
            return Batch((new,), (cached,))
        if self.phase == "decode":
            count, kv_len = self.sizes
            return Batch((1,) * count, (kv_len - 1,) * count)
        new, count, kv_len = self.sizes
        return Batch((*(1,) * count, new), (*(kv_len - 1,) * count, 0))

    @property
    def start_len(self) -> int:
        """Prompt tokens of the decodes, so that ``kv_len`` is reached in the middle of the timed steps."""
        if self.phase == "decode":
            return self.sizes[1] - WARM_STEPS - TIMED_STEPS // 2
        return self.sizes[2] - WARM_STEPS - STEPS_BETWEEN * (MIXED_REPEATS // 2 + 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest request by the end of the measurement."""
        if self.phase == "prefill":
            return sum(self.sizes) + 2
        return max(self.sizes[-1] + TIMED_STEPS + 16, self.sizes[0] if self.phase == "mixed" else 0)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache by the end of the measurement."""
        if self.phase == "prefill":
            return self.longest
        count = self.sizes[0] if self.phase == "decode" else self.sizes[1]
        return count * (self.sizes[-1] + TIMED_STEPS + 16) + (self.sizes[0] if self.phase == "mixed" else 0)

    def __str__(self) -> str:
        """The point as printed: ``decode 64x4096``."""
        return f"{self.phase} {'x'.join(map(str, self.sizes))}"


DECODE_BATCHES: Final = (1, 4, 16, 64, 128, 256)
DECODE_KV_LENS: Final = (1024, 4096, 16384)
FIRST_DECODES: Final = ((64, 4096), (1, 1024))
MORE_DECODES: Final = (
    (8, 4096), (32, 4096), (32, 1024), (1, 128), (64, 128), (256, 128), (512, 1024), (1, 65536), (8, 32768),
)  # fmt: skip
PREFILLS: Final = (
    (512, 0), (2048, 0), (8192, 0), (128, 0), (4096, 0), (2048, 4096), (2048, 16384), (512, 16384), (1024, 0),
)  # fmt: skip
MIXED: Final = ((2048, 32, 4096), (512, 32, 4096), (2048, 64, 1024), (512, 128, 1024))
LOOP_CLIENTS: Final = (64, 16)
TINY: Final = (
    EnginePoint("decode", (1, 64)), EnginePoint("decode", (3, 64)), EnginePoint("prefill", (32, 0)),
    EnginePoint("prefill", (16, 32)), EnginePoint("mixed", (16, 2, 64)),
)  # fmt: skip
"""For a CPU: they test the path; their times say nothing about a GPU."""
TINY_LOOP_CLIENTS: Final = (2,)


def default_points() -> list[EnginePoint]:
    """Return the points in the order in which they are measured.

    >>> points = default_points()
    >>> len(points), str(points[0])
    (40, 'decode 64x4096')
    """
    grid = [(batch, kv_len) for kv_len in DECODE_KV_LENS for batch in DECODE_BATCHES]
    grid = [sizes for sizes in grid if sizes not in FIRST_DECODES]
    random.Random(1).shuffle(grid)

    def points(phase: str, sizes: Sequence[Sizes]) -> list[EnginePoint]:
        return [EnginePoint(phase, one) for one in sizes]

    return [
        *points("decode", (*FIRST_DECODES, *grid[:8])),
        *points("prefill", PREFILLS[:3]),
        *points("decode", grid[8:]),
        *points("prefill", PREFILLS[3:]),
        *points("mixed", MIXED),
        *points("decode", MORE_DECODES),
    ]
