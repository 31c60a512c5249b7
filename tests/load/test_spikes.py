"""Isolated spikes: what is one and what is not, against the naive search."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.load.measured import MeasuredTable
from fastroof.load.spikes import find_spikes
from fastroof.operators.registry import OPERATORS
from tests.reference.spikes import spikes as naive_spikes

KINDS = {"int": np.int64, "float": np.float64, "text": object}
SIZES = (1, 2, 4, 7, 16)
KV_LENS = (64, 128, 256, 512, 1024)
HEADS = (4, 8, 16)


def table(operator: str, rows: list[tuple[Any, ...]]) -> MeasuredTable:
    """A table of rows (*keys, *axes, latency_us)."""
    columns = zip(OPERATORS[operator].required, zip(*rows, strict=True), strict=True)
    return MeasuredTable(operator, {c.name: np.array(v, KINDS[c.kind]) for c, v in columns}, "made")


def decode_rows(points: dict[tuple[Any, ...], float]) -> list[tuple[Any, ...]]:
    """Decode attention of points (num_q_heads, batch_size, kv_len)."""
    return [("bf16", heads, 2, 128, 0, batch, kv, us) for (heads, batch, kv), us in points.items()]


def smooth_decodes() -> dict[tuple[Any, ...], float]:
    return {(h, b, kv): 5.0 + h * b * kv / 1e4 for h in HEADS for b in SIZES for kv in KV_LENS}


def found_points(made: MeasuredTable, names: tuple[str, ...]) -> set[tuple[Any, ...]]:
    return {tuple(made.columns[name][row].item() for name in names) for row in made.spikes.row}


def found_decodes(points: dict[tuple[Any, ...], float]) -> set[tuple[Any, ...]]:
    return found_points(
        table("attention_decode", decode_rows(points)), ("num_q_heads", "batch_size", "kv_len")
    )


def jagged_rows(seed: int, missing: float, twice: float) -> list[tuple[Any, ...]]:
    """GEMMs with points missing and points measured twice, of which some are slow alone and some together."""
    rng = np.random.default_rng(seed)
    points = [*itertools.product(("bf16", "fp8", "fp8_block"), (1, 2, 3, 5, 9), (1, 2, 4), (1, 3, 4))]
    slow_m = rng.choice((1, 2, 3, 5, 9))
    rows = []
    for point in points:
        if rng.random() < missing:
            continue
        us = rng.uniform(4.0, 5.0) * (rng.uniform(2.0, 20.0) if rng.random() < 0.05 else 1.0)
        us *= rng.uniform(2.0, 6.0) if point[0] == "fp8" and point[1] == slow_m else 1.0
        rows += [(*point, us)] * (1 + (rng.random() < twice))
        if rng.random() < twice:
            rows.append((*point, us * rng.uniform(0.5, 9.0)))
    return [rows[i] for i in rng.permutation(len(rows))]


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), missing=st.floats(0.0, 0.5), twice=st.floats(0.0, 0.3))
def test_spikes_are_those_of_the_naive_search_in_any_order_of_rows(seed, missing, twice):
    rows = jagged_rows(seed, missing, twice)
    times: dict[tuple[Any, ...], list[float]] = {}
    for *point, us in rows:
        times.setdefault(tuple(point), []).append(us)
    points = {point: statistics.median(us) for point, us in times.items()}
    expected = naive_spikes(points, keys=1)
    order = np.random.default_rng(seed).permutation(len(rows))
    for some in (rows, [rows[i] for i in order]) if rows else ():
        made = table("gemm", some)
        found, names = made.spikes, ("dtype", "m", "n", "k")

        def point_of(row: int, made: MeasuredTable = made) -> tuple[Any, ...] | None:
            return None if row < 0 else tuple(made.columns[n][row] for n in ("dtype", "m", "n", "k"))

        assert {
            point_of(row): (axis, point_of(before), point_of(after))
            for row, axis, before, after in zip(found.row, found.axis, found.before, found.after, strict=True)
        } == expected
        for i, row in enumerate(found.row):
            assert found.latency_us[i] == points[point_of(row)]
            assert found.after_us[i] == points[point_of(found.after[i])]
        is_spike = [tuple(made.columns[n][i] for n in names) in expected for i in range(len(some))]
        assert found.every_row.tolist() == is_spike


@st.composite
def grids(draw):
    """Full grids (m, n, k) with cells to fill."""
    return tuple(sorted(draw(st.sets(st.integers(1, 4096), min_size=1, max_size=6))) for _ in range(3))


@given(axes=grids(), seed=st.integers(0, 99))
def test_no_row_of_a_table_that_grows_is_a_spike(axes, seed):
    """Steps of any height along any axis, as of tiles and of other kernels."""
    rng = np.random.default_rng(seed)
    grid = 10.0 ** rng.uniform(0.0, 4.0, [len(axis) for axis in axes])
    for axis in range(3):
        grid = np.maximum.accumulate(grid, axis=axis)
    rows = [("fp8", *map(int, at), us) for at, us in zip(itertools.product(*axes), grid.ravel(), strict=True)]
    assert not len(table("gemm", rows).spikes.row)


def test_first_rows_of_padded_tiles_are_not_spikes():
    """1.9 times the row before, which is the last of a full tile, and slower than the last of its own."""
    m = [128, 129, 256, 257, 512, 513, 768]
    us = [10.0, 15.0, 15.0, 28.5, 22.8, 35.0, 33.0]
    rows = [
        ("fp8_block", a, n, k, u * n * k / 2**22)
        for a, u in zip(m, us, strict=True)
        for n in (1024, 2048)
        for k in (1024, 2048)
    ]
    assert not len(table("gemm", rows).spikes.row)


@pytest.mark.parametrize("at", [(8, 4, 256), (4, 2, 128), (16, 7, 512), (8, 1, 256), (8, 4, 64), (8, 1, 64)])
def test_one_slow_row_is_found_inside_and_at_the_start_of_a_line(at):
    points = smooth_decodes()
    points[at] *= 20.0
    assert found_decodes(points) == {at}


def test_a_slow_row_at_the_end_of_all_its_lines_may_be_real():
    points = smooth_decodes()
    points[16, 16, 1024] *= 20.0
    assert found_decodes(points) == set()


@pytest.mark.parametrize("shared_by", [(4, 4, 256), (16, 4, 256), (8, 2, 256), (8, 7, 256)])
def test_what_a_sibling_shares_is_kept(shared_by):
    points = smooth_decodes()
    for at in ((8, 4, 256), shared_by):
        points[at] = 20.0 * smooth_decodes()[at]
    along_kv = {p for p in found_decodes(points) if p[2] == 256}
    # along batch a sibling of other heads shares it as well; one of another batch is itself the neighbour
    assert along_kv <= ({(8, 4, 256), shared_by} if shared_by[0] == 8 else set())


def test_a_row_without_three_siblings_is_kept():
    us = dict(zip(KV_LENS, (5.0, 5.5, 120.0, 7.0, 9.0), strict=True))
    one_line = {(8, 4, kv): us[kv] for kv in KV_LENS}
    assert found_decodes(one_line) == set()
    plain = {kv: 5.0 + kv / 400 for kv in KV_LENS}
    two_more = {(heads, 4, kv): plain[kv] for heads in (4, 16) for kv in KV_LENS}
    assert found_decodes(one_line | two_more) == set()
    assert found_decodes(one_line | two_more | {(8, 2, kv): plain[kv] for kv in KV_LENS}) == {(8, 4, 256)}


def test_of_rows_of_one_point_the_median_counts():
    rows = decode_rows(smooth_decodes())
    own = next(row for row in rows if row[1] == 8 and row[5:7] == (4, 256))
    once_slow = [*rows, own, (*own[:-1], 500.0)]
    assert not len(table("attention_decode", once_slow).spikes.row)
    made = table("attention_decode", [*rows, (*own[:-1], 500.0), (*own[:-1], 400.0)])
    assert made.spikes.latency_us.tolist() == [400.0]
    assert made.spikes.every_row.sum() == 3


def test_codes_of_very_many_values_do_not_overflow():
    """Each row is a kernel of its own, at sizes of its own: products of these counts are beyond 64 bits."""
    rng = np.random.default_rng(0)
    sizes = rng.permuted(np.tile(np.arange(1, 100_001), (5, 1)), axis=1)
    columns = dict(zip(("m", "n", "k"), sizes[:3], strict=True))
    columns |= {"dtype": np.full(100_000, "bf16", object), "latency_us": np.full(100_000, 5.0)}
    made = MeasuredTable("gemm", columns, "made")
    assert not len(find_spikes(made.schema, columns, {(i,): np.array([i]) for i in range(100_000)}).row)


def test_an_empty_table_has_no_spikes():
    made = MeasuredTable(
        "allreduce", {c.name: np.empty(0, KINDS[c.kind]) for c in OPERATORS["allreduce"].required}, "made"
    )
    assert not len(made.spikes.row)
