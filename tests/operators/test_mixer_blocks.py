"""Laws sampled at a grid's nodes: what lies between them goes as B does where that bends, else straight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fastroof.arrays import Flags, Floats
from fastroof.columns import ORIGIN_EXTRAPOLATED, ORIGIN_INTERPOLATED, ORIGIN_MEASURED
from fastroof.compiled.grids import grid_latency_us
from fastroof.operators.ragged import constant_block, sampled_block

NODES = np.array([1.0, 4.0]), np.array([100.0, 1100.0])
"""Batches, and lengths a thousand apart."""


def law(batch: Floats, length: Floats) -> tuple[Floats, Flags]:
    """50 us more from one length to the other, of each sequence."""
    return 10.0 + batch * np.where(length >= 1000.0, 50.0, 0.0), np.zeros(len(batch), np.uint8)


def looked_up(block: Floats, batch: list[float], length: list[float]) -> tuple[Floats, Flags]:
    out, origin = np.empty(len(batch)), np.empty(len(batch), np.uint8)
    grid_latency_us(block, np.array(batch), np.array(length), out, origin)
    return out, origin


@pytest.mark.parametrize(
    ("work", "share"),
    [
        # a quarter of the way along: a line, a square, and two of both
        (lambda x: 3.0 * x, 0.25),
        (lambda x: (x - 100.0) ** 2, 0.0625),
        (lambda x: (x - 100.0) ** 2 + 1000.0 * (x - 100.0), 0.15625),
        (lambda x: 2000.0 * (x - 100.0) - (x - 100.0) ** 2, 0.4375),
        # a kink early or late, and work that falls, rises within the cell or stays
        (lambda x: np.maximum(x, 900.0), 0.25),
        (lambda x: np.minimum(x, 300.0), 0.25),
        (lambda x: -x, 0.25),
        (lambda x: np.abs(x - 600.0), 0.25),
        (lambda x: 0.0 * x, 0.25),
    ],
)
def test_between_lengths_latency_rises_as_the_work_does_unless_that_has_a_kink(
    work: Callable[[Floats], Floats], share: float
):
    block = sampled_block(law, lambda batch, length: batch * work(length), *NODES)
    us, origin = looked_up(block, [1.0, 1.0, 1.0, 4.0, 2.5], [100.0, 350.0, 1100.0, 350.0, 350.0])
    assert us == pytest.approx([10.0, 10.0 + 50.0 * share, 60.0, 10.0 + 200.0 * share, 10.0 + 125.0 * share])
    at_node, between = ORIGIN_MEASURED, ORIGIN_INTERPOLATED
    assert origin.tolist() == [at_node, between, at_node, between, between]


def test_beyond_the_nodes_nothing_was_measured():
    block = sampled_block(law, lambda batch, length: batch * length, *NODES)
    _, origin = looked_up(block, [1.0, 1.0, 9.0], [50.0, 2000.0, 100.0])
    assert origin.tolist() == [ORIGIN_EXTRAPOLATED] * 3


def test_a_constant_is_the_same_everywhere():
    us, _ = looked_up(constant_block(7.5), [1.0, 3.0, 1000.0], [1.0, 500.0, 10.0**6])
    assert us.tolist() == [7.5] * 3
