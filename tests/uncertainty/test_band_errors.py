"""Stated interpolation errors of tables with bands along m."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fastroof
from fastroof.operators.gemm import GEMM
from fastroof.pack.bands import Bands
from fastroof.uncertainty.leave_one_out import (
    CLIP,
    SHAPE,
    band_errors,
    calibrated_errors,
    measured_grid,
    with_unmeasured_bands,
)
from tests.reference import bands as naive

BANDS = Bands(256, (64, 128, 256))
ROWS = (16, 64, 65, 128, 129, 192, 256, 257, 512, 513, 768, 769, 1024, 1025, 4096)


@pytest.fixture
def curves() -> dict[tuple[int, int], dict[float, float]]:
    """Latencies with steps, of three (n, k), one of them without some rows."""
    rng = np.random.default_rng(3)
    found: dict[tuple[int, int], dict[float, float]] = {}
    for n, k in ((64, 64), (128, 64), (64, 128)):
        found[n, k] = {float(m): (20.0 + 0.1 * m) * float(rng.uniform(0.8, 1.2)) for m in ROWS}
    del found[64, 128][257.0], found[64, 128][768.0]
    return found


def grid_of(curves):
    points = [(m, n, k, us) for (n, k), curve in curves.items() for m, us in curve.items()]
    m, n, k, us = np.array(points, float).T
    return measured_grid((m, n, k), us, lambda m, n, k: 1.0 + m + 0.0 * n * k)


def test_a_left_out_row_is_predicted_by_the_bands_of_the_others(curves):
    grid = grid_of(curves)
    errors = band_errors(grid, BANDS)
    in_words = naive.Bands([64, 128], 256)
    for (n, k), curve in curves.items():
        place = (list(grid.axes[1]).index(n), list(grid.axes[2]).index(k))
        for i, m in enumerate(grid.axes[0].tolist()):
            if m in curve and min(curve) < m < max(curve):
                others = {x: us for x, us in curve.items() if x != m}
                error = math.log(naive.latency_us(others, in_words, m) / curve[m])
                assert errors[i, *place] == pytest.approx(max(-CLIP, min(CLIP, error)), abs=1e-12)
            else:
                assert np.isnan(errors[i, *place])


def test_bands_without_an_inner_row_claim_what_their_shape_is_off(curves):
    grid = grid_of(curves)
    plain = calibrated_errors(grid, first=band_errors(grid, BANDS))
    wide = with_unmeasured_bands(plain, grid, BANDS)
    m = grid.axes[0]
    curve = curves[64, 64]
    apart = abs(math.log(curve[257.0] / curve[512.0]))
    i = int(np.searchsorted(m, 257))
    assert wide.inside[0][i, 0, 0] == max(plain.inside[0][i, 0, 0], min(apart, SHAPE) ** 2)
    step = abs(math.log(curve[1025.0] / curve[1024.0]))
    i = int(np.searchsorted(m, 1025))
    assert wide.inside[0][i, 0, 0] == max(plain.inside[0][i, 0, 0], min(step, SHAPE) ** 2)
    for first in (65, 129, 192, 256, 512):
        i = int(np.searchsorted(m, first))
        if first != 65:
            np.testing.assert_array_equal(wide.inside[0][i], plain.inside[0][i])
    for axis in (1, 2):
        np.testing.assert_array_equal(wide.inside[axis], plain.inside[axis])


def test_an_fp8_gemm_between_257_and_512_claims_at_least_its_shape():
    tables = fastroof.load_tables("h100")
    sizes = {"n": np.array([4096, 8192, 28672]), "k": 8192, "dtype": "fp8"}
    found = tables.lookup("gemm", m=384, **sizes, with_error=True)
    assert (found.relative_error >= SHAPE).all()
    first, last = (tables.lookup("gemm", m=m, **sizes).latency_us for m in (257, 512))
    assert (np.log(first / last) > SHAPE).all()


def test_eighty_percent_intervals_hold_hidden_rows_of_bands():
    tables = fastroof.load_tables("h100")
    columns = tables.table("gemm").columns
    m, is_fp8 = columns["m"], columns["dtype"] == "fp8"
    out = is_fp8 & (m >= 2560) & (m <= 3841)
    thin = tables.some_rows("gemm", is_fp8 & ~out)
    sizes = [columns[name][out].astype(float) for name in ("m", "n", "k")]
    found = thin.lookup("gemm", dtype="fp8", **{name: columns[name][out] for name in ("m", "n", "k")})
    error = np.abs(found.latency_us / columns["latency_us"][out] - 1.0)
    claimed = GEMM.relative_error(thin, ("fp8",), sizes, found.latency_us)
    assert 0.75 < np.mean(error < 1.2816 * claimed) < 0.975
