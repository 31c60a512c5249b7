"""Launch floor and copy bandwidth from measured streaming kernels."""

from __future__ import annotations

import pytest

from fastroof.operators.elementwise import ELEMENTWISE
from tests.reference.handmade import handmade_tables

LARGE = 2**30  # more than eight times the L2


def test_shipped_tables_stream_at_nine_tenths_of_the_datasheet(h100):
    launch_us, bytes_per_us = ELEMENTWISE.streaming(h100).rates
    assert launch_us == pytest.approx(1.886, abs=1e-3)
    assert bytes_per_us == pytest.approx(2.954e6, rel=1e-3)


def test_copies_give_the_bandwidth_and_an_empty_launch_no_floor():
    rows = [
        ("launch", 1, 1, 1, 0.9),
        ("rope", 1, 64, 256, 2.0),
        ("rope", 2**20, 256, LARGE, 500.0),
        ("copy", 1, 2**28, LARGE, 400.0),
    ]
    streaming = ELEMENTWISE.streaming(handmade_tables(elementwise=rows))
    assert streaming.launch_us == 2.0
    assert streaming.bytes_per_s == pytest.approx(LARGE / 400e-6)
    without_copies = ELEMENTWISE.streaming(handmade_tables(elementwise=rows[:3]))
    assert without_copies.bytes_per_s == pytest.approx(LARGE / 500e-6)


def test_calls_that_fit_the_l2_give_no_bandwidth():
    assert ELEMENTWISE.streaming(handmade_tables(elementwise=[("copy", 1, 64, 256, 2.0)])) is None
    assert ELEMENTWISE.streaming(handmade_tables(gemm=[("bf16", 1, 64, 64, 2.0)])) is None


def test_kernels_not_bound_by_memory_give_no_bandwidth():
    slow = [("fp8_quantise", 2**20, 256, LARGE, 5000.0), ("fp8_quantise", 1, 64, 256, 2.0)]
    assert ELEMENTWISE.streaming(handmade_tables(elementwise=slow)) is None
