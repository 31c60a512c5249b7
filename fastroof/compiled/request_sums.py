"""Integer sums over the requests of one step: all that its time depends on, whatever their order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Ints
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.llvm import table_load

__all__ = ["MAX_KV_LEN", "StepSums", "decode_sums", "request_sums"]

MAX_KV_LEN = 2**28
"""Longest sequence that an entry point accepts, tokens."""


class StepSums(NamedTuple):
    """Sums over the requests of a step: its decodes and their KV, the new tokens of its prefill chunks.

    ``causal_pairs`` is the sum of q (q + 1) / 2 over the chunks, ``prefix_pairs`` of q times context,
    ``prefix_sum`` of their contexts.
    """

    decodes: int
    kv_sum: int
    new_sum: int
    causal_pairs: int
    prefix_pairs: int
    prefix_sum: int


@jit_inline
def request_sums(
    new_tokens: Ints, context_len: Ints, start: int, stop: int, max_tokens: int
) -> tuple[StepSums, bool]:
    """Integer sums over one step's requests, and whether all are possible: order does not matter to them.

    Sums over all requests and over the decodes, without a branch, so that LLVM vectorises: a decode adds
    1 to new and to pairs and its context to prefix pairs and prefixes, which are taken off at the end.
    """
    decodes: Any = 0
    decode_context: Any = 0
    new_sum: Any = 0
    square_sum: Any = 0
    prefix_pairs: Any = 0
    prefix_sum: Any = 0
    largest_new: Any = np.uint64(0)
    largest_context: Any = np.uint64(0)
    for r in range(start, stop):
        new: Any = np.int64(table_load(new_tokens, r))
        context: Any = np.int64(table_load(context_len, r))
        is_decode: Any = (new == 1) & (context > 0)
        decodes += np.int64(is_decode)
        decode_context += context if is_decode else 0
        new_sum += new
        square_sum += new * new
        prefix_pairs += new * context
        prefix_sum += context
        # as unsigned numbers, sizes below what is allowed are the largest
        largest_new = max(largest_new, np.uint64(new - 1))
        largest_context = max(largest_context, np.uint64(context), np.uint64(context + new))
    possible = largest_new < np.uint64(max_tokens) and largest_context <= np.uint64(MAX_KV_LEN)
    sums = StepSums(
        decodes,
        decode_context + decodes,
        new_sum - decodes,
        ((square_sum + new_sum) >> 1) - decodes,
        prefix_pairs - decode_context,
        prefix_sum - decode_context,
    )
    return sums, possible


@jit_inline
def decode_sums(new_tokens: Ints, context_len: Ints, start: int, stop: int) -> tuple[int, bool]:
    """Sum of one step's contexts, and whether its requests are decodes that any plan times."""
    other: Any = np.int64(0)
    context_sum: Any = 0
    largest: Any = np.uint64(0)
    for r in range(start, stop):
        context: Any = np.int64(table_load(context_len, r))
        other |= np.int64(table_load(new_tokens, r)) ^ 1
        context_sum += context
        largest = max(largest, np.uint64(context - 1))
    return context_sum, other == 0 and largest < np.uint64(MAX_KV_LEN - 1)
