"""Dtypes: each has bytes and a peak, and a 4-bit format's bytes include its scales."""

from __future__ import annotations

import pytest

from fastroof.units import DTYPE_BYTES, PEAK_DTYPE


def test_every_dtype_has_bytes_and_units() -> None:
    assert set(DTYPE_BYTES) == set(PEAK_DTYPE)
    assert set(PEAK_DTYPE.values()) == {"bf16", "fp8", "fp4", "int8"}


@pytest.mark.parametrize(
    ("dtype", "elements", "stored_bytes"),
    [
        ("nvfp4", 16, 8 + 1),  # 16 elements of 4 bits share one fp8 scale
        ("mxfp4", 32, 16 + 1),  # 32 share one power of two of 8 bits
        ("w4a16_mxfp4", 32, 16 + 1),
        ("w4a8_mxfp4_mxfp8", 32, 16 + 1),
        ("int4_wo", 2, 1),
        ("bf16", 1, 2),
    ],
)
def test_bytes_of_a_block_with_its_scale(dtype: str, elements: int, stored_bytes: int) -> None:
    assert elements * DTYPE_BYTES[dtype] == stored_bytes
