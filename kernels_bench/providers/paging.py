"""Batches of sequences in a paged KV cache: lengths, page tables and slots, in plain NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Longs
from fastroof.errors import MeasureError

PAGE_SIZE: Final = 16
"""Tokens a page: vLLM's default block."""


def ragged_offsets(lengths: Longs) -> npt.NDArray[np.int32]:
    """Return where each sequence begins, and where the last one ends.

    >>> ragged_offsets(np.array([3, 1])).tolist()
    [0, 3, 4]
    """
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


@dataclass(frozen=True)
class PagedBatch:
    """Sequences of a step and where their KV lies."""

    # New tokens of each sequence, and tokens attended to, the new ones included; shape (sequences,).
    new_tokens: Longs
    kv_lens: Longs
    page_size: int
    # Pages of all sequences, one sequence after the other; each page of the pool exactly once, but for the
    # one that stands for all that lie outside the window.
    pages: npt.NDArray[np.int32]

    @classmethod
    def make(
        cls, new_tokens: Longs, kv_lens: Longs, seed: int | None, page_size: int = PAGE_SIZE, window: int = 0
    ) -> PagedBatch:
        """Give sequences their pages."""
        new_tokens, kv_lens = np.asarray(new_tokens, np.int64), np.asarray(kv_lens, np.int64)
        if new_tokens.shape != kv_lens.shape or new_tokens.ndim != 1 or new_tokens.size == 0:
            raise MeasureError(
                f"need as many new_tokens as kv_lens, and some: {new_tokens.shape}, {kv_lens.shape}"
            )
        if (new_tokens < 1).any() or (new_tokens > kv_lens).any():
            raise MeasureError("every sequence needs 1 <= new_tokens <= kv_len")
        counts = -(-kv_lens // page_size)
        # The first query of a sequence reaches back furthest.
        hidden = np.maximum(kv_lens - new_tokens + 1 - window, 0) // page_size if window else 0 * counts
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        is_held = place >= np.repeat(hidden, counts)
        total = int(is_held.sum()) + int(hidden.any())
        pool = np.arange(total) if seed is None else np.random.default_rng(seed).permutation(total)
        pages = np.full(len(place), pool[-1])
        pages[is_held] = pool[: is_held.sum()]
        return cls(new_tokens, kv_lens, page_size, pages.astype(np.int32))

    @property
    def num_sequences(self) -> int:
        """Sequences of the step."""
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return int(self.new_tokens.sum())

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return int(self.pages.max()) + 1

    @property
    def page_counts(self) -> Longs:
        """Pages of each sequence."""
        return -(-self.kv_lens // self.page_size)

    @property
    def page_offsets(self) -> npt.NDArray[np.int32]:
        """Where each sequence's pages begin within ``pages``."""
        return ragged_offsets(self.page_counts)

    @property
    def token_offsets(self) -> npt.NDArray[np.int32]:
        """Where each sequence's new tokens begin."""
        return ragged_offsets(self.new_tokens)

    @property
    def last_page_lens(self) -> npt.NDArray[np.int32]:
        """Tokens on each sequence's last page, 1 to ``page_size``."""
        return ((self.kv_lens - 1) % self.page_size + 1).astype(np.int32)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Pages by sequence, shape (sequences, most pages); padded with page 0, which is never read."""
        counts, offsets = self.page_counts, self.page_offsets
        table = np.zeros((self.num_sequences, int(counts.max())), np.int32)
        # Row-major order of the mask is the order of ``pages``.
        table[np.arange(table.shape[1]) < counts[:, None]] = self.pages[: offsets[-1]]
        return table

    def pages_of(self, sequence: int) -> npt.NDArray[np.int32]:
        """Pages of one sequence, in order."""
        offsets = self.page_offsets
        return self.pages[offsets[sequence] : offsets[sequence + 1]]
