"""What a cache of any size would find of a trace: against one that is simulated for each size."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace
from fastroof.errors import TraceError
from fastroof.simulation import hit_rate
from tests.reference.block_pool import leading_hits
from tests.reference.made_prefixes import made_prefixes


@pytest.mark.loops
@given(seed=st.integers(0, 2**32))
def test_all_sizes_at_once_are_each_size_by_itself(seed):
    work = made_prefixes(Random(seed), most=30)
    trace, size = work.trace, work.settings.block_size
    if trace.hash_ids is None:
        return
    blocks = np.array([1, 2, 3, 5, 8, 13, 40, 100, 1000])
    rates = hit_rate(trace, blocks, block_size=size)
    for num_blocks, rate in zip(blocks.tolist(), rates.tolist(), strict=True):
        found, wanted = leading_hits(trace, num_blocks, size)
        assert rate == found / wanted
    assert hit_rate(trace, block_size=size) == rates[-1]
    assert (np.diff(rates) >= 0).all()


def test_a_real_trace_finds_what_its_prefixes_share(shared):
    trace = fastroof.load_trace(shared / "reference" / "traces" / "mooncake_conversation.jsonl")
    seen, found = set(), 0
    for i, prompt in enumerate(trace.input_tokens.tolist()):
        ids = trace.hash_ids[trace.hash_offsets[i] : trace.hash_offsets[i + 1]].tolist()
        for block in ids[: (prompt - 1) // 512]:
            if block not in seen:
                break
            found += 512
        # the last in part is not kept
        seen.update(ids[: prompt // 512])
    share = found / int(trace.input_tokens.sum())
    assert hit_rate(trace) == share
    assert 0.37 < share < 0.38
    sizes = np.array([1000, 3000, 10_000, 30_000, 100_000])
    assert (np.diff(hit_rate(trace, sizes)) > 0).all()


@pytest.mark.parametrize(
    ("num_blocks", "more", "message"),
    [
        (0, {}, "num_blocks must be whole numbers of at least 1, got 0"),
        (2.5, {}, "num_blocks must be whole numbers"),
        (1, {"block_size": 3}, "block_size must divide that, got 3"),
        (1, {"block_size": 0}, "block_size"),
    ],
)
def test_invalid_sizes_are_refused(num_blocks, more, message):
    trace = Trace([0.0], [8], [1], hash_ids=[1, 2], hash_offsets=[0, 2], hash_block_size=4)
    with pytest.raises(TraceError, match=re.escape(message)):
        hit_rate(trace, num_blocks, **more)


def test_a_trace_without_ids_has_no_rate():
    with pytest.raises(TraceError, match="has no hash_ids"):
        hit_rate(Trace([0.0], [8], [1]))
