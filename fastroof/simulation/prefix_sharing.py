"""What a trace's prompts share: their blocks by number, and how many a cache of any size would find."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from fastroof.arrays import Bools, Floats, Ints
from fastroof.checks import shown, whole_number
from fastroof.compiled.simulation.block_pool import Prompts
from fastroof.errors import TraceError
from fastroof.simulation.trace import MOST_TOKENS, Trace

__all__ = ["hit_rate", "prompt_blocks"]


def prompt_blocks(trace: Trace, block_size: int, served: Bools | None = None) -> tuple[Prompts, int]:
    """Number the blocks of a trace's prompts so that equal ones have one number."""
    count = len(trace) if served is None else int(served.sum())
    found = np.full(count, -1, np.int32)
    if trace.hash_ids is None or trace.hash_offsets is None:
        return Prompts(np.zeros(0, np.int32), np.zeros(count, np.int64), 0, found), 0
    if trace.hash_block_size % block_size:
        raise TraceError(
            f"trace {shown(trace.name)} has an id for every {trace.hash_block_size} tokens of a prompt: "
            f"block_size must divide that, got {block_size}"
        )
    per_id = trace.hash_block_size // block_size
    known, numbers = np.unique(trace.hash_ids, return_inverse=True)
    starts = trace.hash_offsets[:-1] if served is None else trace.hash_offsets[:-1][served]
    return Prompts(numbers.astype(np.int32), starts, per_id, found), len(known) * per_id


@overload
def hit_rate(trace: Trace, num_blocks: int | None = None, *, block_size: int | None = None) -> float: ...
@overload
def hit_rate(trace: Trace, num_blocks: Ints, *, block_size: int | None = None) -> Floats: ...
def hit_rate(trace: Trace, num_blocks: Any = None, *, block_size: int | None = None) -> float | Floats:
    """Find the share of a trace's prompt tokens that a prefix cache has, at best, by its size.

    Parameters
    ----------
    trace : Trace
        With hash_ids, which tell whose prompts are equal.
    num_blocks : int or array of int, optional
        Blocks that the cache has room for, at least 1. Left out, room for everything.
    block_size : int, optional
        Tokens of a block, a divisor of the trace's ``hash_block_size``, which is the default. Smaller blocks
        find more of the ends of prompts.

    Returns
    -------
    float or ndarray of float64
        Tokens found over tokens of all prompts, for each number of blocks.

    Raises
    ------
    TraceError
        If the trace has no hash_ids, or a size is none.

    Notes
    -----
    The requests are served one after the other in order of arrival, and blocks go by the least recent use, a
    prompt's tail before its head; only whole blocks are found, and never a prompt's last token. So this is
    what the cache is good for, apart from any engine: one whose requests run together finds less of a small
    one, for those that run hold blocks, and answers take some. Sizes of all are found in one pass
    (``fastroof.compiled.simulation.stack_distances``).

    Examples
    --------
    Two prompts that share their first block of two:

    >>> import numpy as np
    >>> from fastroof.simulation import Trace, hit_rate
    >>> trace = Trace([0.0, 1.0], [1024, 1024], [1, 1], hash_ids=[7, 8, 7, 9], hash_offsets=[0, 2, 4],
    ...               hash_block_size=512)
    >>> hit_rate(trace), hit_rate(trace, np.array([1, 2])).tolist()
    (0.25, [0.25, 0.25])
    """
    from fastroof.compiled.simulation.stack_distances import stack_distances

    if trace.hash_ids is None:
        raise TraceError(
            f"trace {shown(trace.name)} has no hash_ids, so nothing says which of its prompts are equal"
        )
    size = trace.hash_block_size
    if block_size is not None:
        size = whole_number("block_size", block_size, 1, MOST_TOKENS, TraceError)
    prompts, num_keys = prompt_blocks(trace, size)
    sizes = np.asarray(num_keys if num_blocks is None else num_blocks)
    if sizes.dtype.kind not in "iu" or (sizes < 1).any():
        raise TraceError(f"num_blocks must be whole numbers of at least 1, got {shown(num_blocks)}")
    all_blocks = int((trace.input_tokens.astype(np.int64) // size).sum())
    hits = np.zeros(num_keys, np.int64)
    used = np.zeros(num_keys, np.int64)
    stack_distances(prompts, trace.input_tokens, size, used, np.zeros(all_blocks + 1, np.int32), hits)
    found = np.concatenate([[0], np.cumsum(hits)])[np.minimum(sizes, num_keys)]
    rates = found * size / trace.input_tokens.sum(dtype=np.int64)
    return float(rates) if np.ndim(rates) == 0 else np.asarray(rates, np.float64)
