"""Traces hold requests sorted, find the way back to the order of the file, refuse what is no request."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import Trace, TraceError

GOOD: dict[str, Any] = {
    "arrival_s": [2.0, 0.0, 1.0, 0.0],
    "input_tokens": [10, 1025, 30, 512],
    "output_tokens": [1, 2, 3, 4],
}
HASHES: dict[str, Any] = {
    "hash_ids": [7, 1, 2, 3, 8, 1],
    "hash_offsets": [0, 1, 4, 5, 6],
    "hash_block_size": 512,
}


def test_requests_are_sorted_and_those_of_one_time_stay() -> None:
    trace = Trace(**GOOD)
    assert trace.order.tolist() == [1, 3, 2, 0]
    assert trace.arrival_s.tolist() == [0, 0, 1, 2]
    assert trace.input_tokens.tolist() == [1025, 512, 30, 10]
    assert trace.in_file_order(trace.output_tokens).tolist() == GOOD["output_tokens"]
    assert trace.input_tokens.dtype == trace.cached_tokens.dtype == np.int32


def test_blocks_go_with_their_requests() -> None:
    trace = Trace(**GOOD, **HASHES)
    assert trace.hash_offsets is not None
    assert trace.hash_ids is not None
    blocks = [ids.tolist() for ids in np.split(trace.hash_ids, trace.hash_offsets[1:-1])]
    assert blocks == [[1, 2, 3], [1], [8], [7]]
    assert trace.limited(2).hash_ids.tolist() == [1, 2, 3, 1]  # type: ignore[union-attr]
    table = trace.table()
    assert table["hash_ids"].to_pylist() == [[7], [1, 2, 3], [8], [1]]


def test_a_limit_is_a_prefix_and_keeps_the_files_order() -> None:
    few = Trace(**GOOD).limited(3)
    assert few.output_tokens.tolist() == [2, 4, 3]
    assert few.table()["output_tokens"].to_pylist() == [2, 3, 4]


def test_arrivals_scale_exactly() -> None:
    trace = Trace(**GOOD)
    assert (trace.rate_scaled(3).arrival_s == trace.arrival_s / 3).all()


def test_a_table_comes_back() -> None:
    trace = Trace(**GOOD, cached_tokens=[9, 0, 1, 2], name="four")
    back = fastroof.load_trace(trace.table())
    for name in ("arrival_s", "input_tokens", "output_tokens", "cached_tokens", "order"):
        assert (getattr(back, name) == getattr(trace, name)).all()
    assert back.name == "four"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival_s": [0, np.nan, 1, 2]}, "row 1: arrival_s must be seconds from 0 to 1e+10, got nan"),
        ({"arrival_s": [0, 0, -1.0, 2]}, "row 2: arrival_s"),
        ({"arrival_s": [0, np.inf, 1, 2]}, "row 1: arrival_s"),
        ({"arrival_s": []}, "has no requests"),
        ({"arrival_s": ["0", "1", "2", "3"]}, "arrival_s must hold numbers"),
        ({"input_tokens": [1, 2, 0, 4]}, "row 2: input_tokens must be tokens from 1 to 16,777,216, got 0"),
        ({"input_tokens": [1, 2, 3]}, "arrival_s has 4 requests, input_tokens 3"),
        ({"input_tokens": [1.5, 2, 3, 4]}, "input_tokens must hold whole numbers, got float64"),
        ({"input_tokens": [[1], [2], [3], [4]]}, "input_tokens must be one-dimensional"),
        ({"output_tokens": [1, 2, 3, 2**24 + 1]}, "row 3: output_tokens"),
        ({"output_tokens": [0, -2, 3, 0]}, "row 0: output_tokens"),
        ({"cached_tokens": [9, 1024, 30, 0]}, "row 2: cached_tokens must be less than the prompt's tokens"),
        ({"cached_tokens": [-1, 0, 0, 0]}, "row 0: cached_tokens"),
        ({"clients": 0}, "clients must be a whole number"),
        ({"think_s": -1.0}, "think_s must be seconds"),
        ({"name": np.array([3])}, "name must be a string"),
        ({"left_out": 3}, "left_out must map reasons to numbers of rows"),
        ({"left_out": {"empty": -1}}, "left_out must map reasons to numbers of rows"),
        ({"left_out": [1, 2]}, "left_out must map reasons to numbers of rows"),
        ({"order": [0, 1, 2, 3]}, "order goes with sorted arrivals"),
        ({"order": [0, 1, 1, 3]}, "order must hold 0 to 3 once each"),
        ({"hash_ids": [1, 2]}, "or none of them"),
        ({**HASHES, "hash_offsets": [0, 1, 3, 5, 6]}, "row 1: a prompt of 1025 tokens has 3 blocks"),
        ({**HASHES, "hash_offsets": [0, 1, 4, 5]}, "hash_offsets must be 5 numbers"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused_by_row(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        Trace(**{**GOOD, **changes})


def test_a_time_without_requests_is_refused() -> None:
    trace = Trace(**GOOD)
    assert trace.sliced(1).arrival_s.tolist() == [0, 1]
    for start_s, stop_s in ((3, 4), (1, 1)):
        with pytest.raises(TraceError, match="has no requests from"):
            trace.sliced(start_s, stop_s)
    for start_s, stop_s in ((float("nan"), 4), (-1, 4), (0, float("nan")), ("0", 1), (0, None), (0, [1])):
        with pytest.raises(TraceError, match="must be seconds of at least 0"):
            trace.sliced(start_s, stop_s)  # type: ignore[arg-type]


def test_a_rate_that_cannot_be_is_refused() -> None:
    for factor in (0, -1, float("nan"), float("inf"), "2", 1e-300):
        with pytest.raises(TraceError):
            Trace(**GOOD).rate_scaled(factor)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="closed loop"):
        Trace(**GOOD, clients=2).rate_scaled(2)
