"""Compiled callers hand over what loops can read, or do not compile; Python's functions take any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from tests.reference.layouts import LAYOUTS, READ_IN_PLACE

numba = pytest.importorskip("numba")
compiled_only = pytest.mark.skipif(
    bool(numba.config.DISABLE_JIT), reason="types are checked where loops are compiled"
)


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=512, max_num_seqs=64, engine="kernels"
    )


REQUESTS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5000)), max_size=16)


@pytest.fixture(scope="module")
def caller(plan) -> tuple[Callable[..., float], Any]:
    """A loop of a user's own."""
    step_us, data = fastroof.numba_step(plan)

    @numba.njit
    def timed(data, new_tokens, context_len):
        return step_us(data, new_tokens, context_len)

    return timed, data


@pytest.mark.slow
@given(requests=REQUESTS, layout=st.sampled_from([*LAYOUTS]), kind=st.sampled_from([np.int64, np.int32]))
def test_every_entry_point_answers_alike_whatever_the_layout(plan, caller, requests, layout, kind):
    timed, data = caller
    new, context = np.array(requests, kind).reshape(-1, 2).T.copy()
    expected = plan.step_us(fastroof.StepBatch.from_requests([requests]))[0]
    laid_new, laid_context = LAYOUTS[layout](new), LAYOUTS[layout](context)
    assert laid_new.tolist() == new.tolist()
    steps = fastroof.StepBatch(laid_new, laid_context, np.array([0, len(requests)]))
    assert plan.step_us(steps)[0] == expected
    assert plan.step_scalar(laid_new, laid_context) == expected
    if layout == "big-endian":
        # Numba refuses these only where no array of native order that it looks up alike came before: its
        # fingerprint of an array leaves the order of bytes out
        return
    try:
        found = timed(data, laid_new, laid_context)
    except (TypeError, numba.core.errors.NumbaError):
        assert layout not in READ_IN_PLACE
    else:
        assert layout in READ_IN_PLACE or laid_new.size < 2  # one element or none is contiguous in any view
        assert found == expected


@given(pairs=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5000)), max_size=9))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_decodes_answer_alike_whatever_the_layout(plan, layout, pairs):
    batch, kv_len = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
    expected = [plan.scalar(*pair) for pair in pairs]
    assert plan.decode_us(LAYOUTS[layout](batch), LAYOUTS[layout](kv_len)).tolist() == expected


@compiled_only
def test_what_loops_cannot_read_does_not_compile(plan, caller):
    timed, data = caller
    decode_us, _ = fastroof.numba_decode(plan)
    sizes = np.array([1, 1, 1])
    array = "it must be a contiguous one-dimensional array of integers"
    square = np.ones((3, 2), int)
    for message, call in (
        (f"new_tokens of a step is array(int64, 2d, C); {array}", lambda: timed(data, square, sizes)),
        (f"context_len of a step is array(float64, 1d, C); {array}", lambda: timed(data, sizes, sizes / 1)),
        (f"context_len of a step is array(bool, 1d, C); {array}", lambda: timed(data, sizes, sizes > 0)),
        ("the data of a step is array(int64, 1d, C)", lambda: timed(sizes, sizes, sizes)),
        ("the data of a step is readonly array(float64, 1d, A)", lambda: timed(data[::2], sizes, sizes)),
        ("a size of a step is bool; it must be an integer", lambda: decode_us(data, True, 100)),
        ("a size of a step is float64; it must be an integer", lambda: decode_us(data, 1, 100.0)),
    ):  # fmt: skip
        with pytest.raises(TypeError) as error:
            call()
        assert message in str(error.value)
