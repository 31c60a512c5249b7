"""Cells by guide, tables restated as full grids, and what a lookup takes at its edge."""

from __future__ import annotations

import bisect
import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.compiled import gemms, grids, points
from fastroof.compiled import grids as grid_points
from fastroof.compiled import guides as search
from fastroof.compiled.guides import guide_of, guided_cell, guided_node
from fastroof.compiled.layout import GuidedGrid
from fastroof.config import load_gpu
from fastroof.errors import LookupInputError
from fastroof.operators.attention import ATTENTION, ATTENTION_DECODE
from fastroof.operators.gemm import GEMM
from fastroof.pack import SIZE_LIMIT, curves, pack_curve, pack_gemm
from fastroof.pack.curves import cell_origins, joined_axes
from fastroof.pack.keys import MANTISSA_BITS, axis_guide, key_columns, nearest_key_starts
from fastroof.tables import lookup as sizes
from tests.reference import lookups as naive
from tests.reference.handmade import HEADS, attention_rows, gemm_rows, handmade_tables

NODES = st.lists(
    st.integers(1, 4096) | st.integers(0, 30).map(lambda e: 2**e), min_size=1, max_size=30, unique=True
)
AXES = st.lists(NODES.map(lambda nodes: np.array([0.0, *sorted(nodes), SIZE_LIMIT])), min_size=1, max_size=3)
REAL = st.floats(-1e30, 1e30) | st.sampled_from([np.inf, -np.inf, np.nan, -0.0, 0.5, 5e-324, SIZE_LIMIT])


# Guides


@pytest.mark.loops
@given(own=AXES, data=st.data())
def test_a_guide_finds_the_cell_that_bisection_finds(own, data):
    axes, guides = joined_axes(own)
    first = 0
    for which, axis in enumerate(own):
        near = st.sampled_from(axis.tolist()).flatmap(
            lambda node: st.sampled_from([node, np.nextafter(node, 0), np.nextafter(node, np.inf), node + 1])
        )
        x = data.draw(near | st.floats(0, SIZE_LIMIT) | st.integers(1, 5000).map(float))
        guide = guide_of(guides, which)
        node = bisect.bisect_right(axis.tolist(), x) - 1
        if x < SIZE_LIMIT:
            assert guided_node(axes, guides, guide, x) - first == node
        assert guided_cell(axes, guides, guide, x) - first == min(node, len(axis) - 2)
        first += len(axis)


def test_a_guide_of_steps_has_sixteen_keys_an_octave_at_most():
    """64 to 67 share the first of them: finer keys would only grow, and a loop takes the last steps."""
    for nodes in ((64, 66, 68), (64, 65, 66, 67)):
        guide = axis_guide(np.array([0.0, *nodes, SIZE_LIMIT]))
        assert MANTISSA_BITS - guide.shift == 4
        # everything below 1, six octaves of 16 keys, those of 64 to 67 and of 68
        assert len(guide.cells) == 1 + 6 * 16 + (2 if 68 in nodes else 1)


@pytest.mark.loops
@given(own=AXES, x=REAL)
def test_a_guide_stays_on_its_axis(own, x):
    axes, guides = joined_axes(own)
    first = 0
    for which, axis in enumerate(own):
        guide = guide_of(guides, which)
        assert first <= guided_cell(axes, guides, guide, x) <= first + len(axis) - 2
        assert first <= guided_node(axes, guides, guide, x) <= first + len(axis) - 1
        first += len(axis)


@pytest.mark.loops
def test_nodes_too_close_for_a_guide_are_searched():
    close = np.array([2.0**20, 2.0**20 + 1, 2.0**20 + 2])
    assert len(joined_axes([np.r_[0.0, close, SIZE_LIMIT]])[1]) == 0
    curve = pack_curve(close, np.array([3.0, 5.0, 4.0]), lambda x: 1.0 + x)
    out, origin = np.empty(3), np.empty(3, np.uint8)
    search.curve_latency_us(curve, close, out, origin)
    assert out.tolist() == [3.0, 5.0, 4.0]
    assert not origin.any()


# Curves and grids


@pytest.mark.loops
@given(
    nodes=st.dictionaries(st.integers(1, 2**20), st.floats(0.5, 1e6), min_size=1, max_size=8),
    x=st.lists(st.integers(1, 2**28).map(float) | st.floats(1, 2**21), max_size=8),
)
def test_a_curve_is_its_points(nodes, x):
    axis, value = (np.array(a, float) for a in zip(*nodes.items(), strict=True))
    curve = pack_curve(axis, value, lambda a: 1.0 + a)
    x = np.array([*x, *nodes], float)
    out, origin = np.empty(len(x)), np.empty(len(x), np.uint8)
    search.curve_latency_us(curve, x, out, origin)
    for p in range(len(x)):
        point = search.curve_point(*curve[:3], 0, len(curve.axis), x[p])
        assert (out[p], origin[p]) == point


@pytest.mark.loops
@given(data=st.data(), shape=st.tuples(*[st.integers(2, 4)] * 3))
def test_origins_of_a_cell_are_the_largest_of_the_nodes_it_uses(data, shape):
    flags = np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=math.prod(shape), max_size=math.prod(shape))), np.uint8
    ).reshape(shape)
    found = cell_origins(flags)
    for cell in itertools.product(*(range(n - 1) for n in shape)):
        for case in range(8):
            off = [case >> 2 & 1, case >> 1 & 1, case & 1]
            used = itertools.product(*(range(c, c + o + 1) for c, o in zip(cell, off, strict=True)))
            expected = max([min(case, 1), *(int(flags[node]) for node in used)])
            assert found[cell] >> (2 * case) & 3 == expected


SCATTERED = {
    (1, 64, 64): 3.0, (16, 64, 64): 4.0, (256, 64, 64): 9.0, (8, 256, 64): 5.0, (32, 256, 64): 7.0,
    (16, 128, 512): 6.0, (4, 96, 2048): 8.0, (64, 96, 2048): 12.0, (4, 512, 2048): 15.0,
}  # fmt: skip


@pytest.mark.loops
@given(
    at=st.lists(
        st.tuples(*[st.integers(1, 3000) | st.sampled_from([1, 4, 16, 64, 96, 256, 512, 2048])] * 3),
        min_size=1, max_size=20,
    )
)  # fmt: skip
def test_scattered_gemms_are_the_same_in_a_full_grid(at):
    m, n, k = np.array(list(SCATTERED), float).T
    gpu = load_gpu("h100")
    packed = pack_gemm(
        m, n, k, np.array(list(SCATTERED.values())), GEMM.roofline("bf16", gpu, min(SCATTERED.values()))
    )
    assert len(packed.grid) == len(packed.origins) > 0
    ragged = packed._replace(grid=np.empty(0))
    sizes = np.array([*at, *SCATTERED], float).T.copy()
    answers = []
    for table in (packed, ragged):
        out, origin = np.empty(sizes.shape[1]), np.empty(sizes.shape[1], np.uint8)
        gemms.gemm_latency_us(table, *sizes, out, origin)
        answers.append((out, origin))
    np.testing.assert_allclose(answers[0][0], answers[1][0], rtol=1e-13)
    np.testing.assert_array_equal(answers[0][1], answers[1][1])
    count = len(SCATTERED)
    assert answers[0][0][-count:].tolist() == list(SCATTERED.values())


def test_a_table_too_large_for_a_full_grid_is_searched(monkeypatch):
    monkeypatch.setattr(curves, "LARGEST_GRID", 10)
    tables = handmade_tables(gemm=gemm_rows(SCATTERED))
    assert len(GEMM.packed(tables, "bf16").grid) == 0
    m, n, k = np.array(list(SCATTERED)).T
    assert tables.lookup("gemm", m=m, n=n, k=k).latency_us.tolist() == list(SCATTERED.values())


GRID = {(b, x): 9.0 + b * x / 4096 for b in (1, 8, 64) for x in (64, 512, 4096) if b * x < 64 * 4096}


@pytest.mark.loops
@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
def test_points_of_a_grid_are_the_steps_own_polynomials(operator):
    tables = handmade_tables(**{operator: attention_rows(GRID, is_decode=operator == "attention_decode")})
    ((key, _),) = tables.groups(operator).items()
    grid = ATTENTION[operator].grid(tables, naive_shape(key)).grid
    axes, guides = joined_axes([grid.y_axis, grid.x_axis])
    y, x = (a.ravel().astype(float) for a in np.meshgrid([1, 3, 8, 64, 500], [1, 64, 70, 512, 4096, 2**28]))
    found, expected = ((np.empty(len(y)), np.empty(len(y), np.uint8)) for _ in range(2))
    origins = cell_origins(grid.flags.astype(np.uint8)).ravel()
    grid_points.grid_points_us(GuidedGrid(axes, guides, grid.cells.ravel(), origins), y, x, *found)
    grids.grid_latency_us(grid.arena, y, x, *expected)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def naive_shape(key):
    from fastroof.operators.attention_work import HeadShape

    return HeadShape(*key[:4])


@pytest.mark.loops
@given(values=st.lists(st.tuples(REAL, REAL, REAL), max_size=4))
def test_loops_over_points_survive_any_coordinates(values):
    a, b, c = np.array(values).reshape(-1, 3).T.copy()
    out, mfu, origin = np.zeros(len(a)), np.empty(len(a)), np.zeros(len(a), np.uint8)
    with np.errstate(all="ignore"):
        tables = handmade_tables(attention_decode=attention_rows(GRID))
        grid = ATTENTION_DECODE.grid(tables, naive_shape(("bf16", *HEADS))).grid
        axes, guides = joined_axes([grid.y_axis, grid.x_axis])
        origins = cell_origins(grid.flags.astype(np.uint8)).ravel()
        grid_points.grid_points_us(GuidedGrid(axes, guides, grid.cells.ravel(), origins), a, b, out, origin)
        whole = [1 <= x <= 2**28 and x == int(x) for x in a.tolist()]
        assert points.copied_sizes(a, 1.0, 2.0**28, out) == all(whole)
        fits = [bool(kv - q >= 0) for q, kv in zip(b, c, strict=True)]
        assert points.prefill_us_and_mfu(a, b, c, (1.0, 1.0, 1.0), out, mfu, origin) == all(fits)
        points.gemm_mfu(a, b, c, 1.0, out, mfu)
        points.decode_mfu(a, b, 1.0, out, mfu)
        points.curve_mfu(a, 1.0, out, mfu)
    assert origin.max(initial=0) <= 4


# The edge


@pytest.fixture(scope="module")
def small():
    return handmade_tables(gemm=gemm_rows(SCATTERED))


def variants(m):
    """The same sizes in every form that a caller may hold them in."""
    read_only = m.copy()
    read_only.flags.writeable = False
    wide = np.repeat(m, 3)
    unaligned = np.frombuffer(b"x" + m.tobytes(), np.uint8)[1:].view(m.dtype)
    kinds = [
        np.int32,
        np.uint16,
        np.uint32,
        np.uint64,
        np.float32,
        np.float64,
        np.dtype(">i4"),
        np.longdouble,
    ]
    return [
        m, read_only, wide[::3], m[::-1].copy()[::-1], unaligned, m.tolist(), pa.array(m),
        np.frombuffer(m.tobytes(), m.dtype), *(m.astype(kind) for kind in kinds),
    ]  # fmt: skip


@pytest.mark.loops
def test_every_stride_type_and_flag_gives_the_same_bits(small):
    m = np.arange(1, 300)
    expected = small.lookup("gemm", m=m, n=100, k=70)
    for given_m in variants(m):
        for n in (100, np.full(len(m), 100, np.int32)):
            got = small.lookup("gemm", m=given_m, n=n, k=70)
            for name in ("latency_us", "mfu", "origin"):
                np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


def test_no_form_of_the_sizes_compiles_a_loop_again(small):
    m = np.arange(1, 300)
    loops = [gemms.gemm_latency_us, points.gemm_mfu, points.copied_sizes]
    for given_m in (m, m.astype(np.int32), m.astype(float)):
        small.lookup("gemm", m=given_m, n=100, k=70)
    before = [len(loop.signatures) for loop in loops]
    for given_m in variants(m):
        small.lookup("gemm", m=given_m, n=100, k=70)
        small.lookup("gemm", m=given_m, n=np.array([[100], [200]], np.int32), k=np.array([[70.0], [80.0]]))
    assert [len(loop.signatures) for loop in loops] == before


@pytest.mark.loops
def test_shapes_of_any_order_broadcast_across_chunks(small, monkeypatch):
    monkeypatch.setattr(sizes, "CHUNK", 7)
    m, n, k = np.arange(1, 6).reshape(5, 1, 1), np.array([[64], [90], [300]]), np.array([64, 70, 100, 2000])
    got = small.lookup("gemm", m=m, n=n, k=k)
    assert got.latency_us.shape == (5, 3, 4)
    wide = [a.copy() for a in np.broadcast_arrays(m, n, k)]
    columns = [np.asfortranarray(a) for a in wide]
    floats = [a.astype(float) for a in (m, n, k)]
    for other in (wide, columns, floats, [wide[0], columns[1], k], [m, floats[1], wide[2]]):
        again = small.lookup("gemm", **dict(zip("mnk", other, strict=True)))
        np.testing.assert_array_equal(again.latency_us, got.latency_us)
    flat = small.lookup("gemm", **dict(zip("mnk", (a.ravel() for a in wide), strict=True)))
    np.testing.assert_array_equal(flat.latency_us, got.latency_us.ravel())
    with pytest.raises(LookupInputError, match=r"\bk\b.*at least 1, got -3"):
        small.lookup("gemm", m=m, n=n, k=np.array([64, -3, 5, -7]))


def test_a_wrong_size_beyond_the_first_chunk_is_found(small):
    m = np.ones(3 * sizes.CHUNK, np.int64)
    for wrong, message in ((0, "at least 1, got 0"), (2**28 + 1, "at most"), (2**62, "at most")):
        m[-1] = wrong
        with pytest.raises(LookupInputError, match=rf"\bm\b.*{message}"):
            small.lookup("gemm", m=m, n=64, k=64)
    halves = np.ones(2 * sizes.CHUNK)
    for wrong in (1.5, np.nan, np.inf):
        halves[-1] = wrong
        with pytest.raises(LookupInputError, match=r"\bm\b.*whole number"):
            small.lookup("gemm", m=halves, n=64, k=64)


def test_a_lookup_needs_little_memory_beyond_its_answer(small):
    import tracemalloc

    m, n = np.full((4, 500_000), 20, np.int32), np.full(500_000, 70, np.int16)
    small.lookup("gemm", m=m[0], n=n, k=64)
    tracemalloc.start()
    got = small.lookup("gemm", m=m, n=n, k=64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < got.latency_us.nbytes + got.mfu.nbytes + got.origin.nbytes + 8 * 2**20


@pytest.mark.loops
def test_the_naive_lookup_agrees_where_a_curve_was_restated(small):
    points_of = {tuple(map(float, p)): us for p, us in SCATTERED.items()}
    bound = naive.gemm_bound(small.gpu, "bf16", 3.0)
    for at in itertools.product((1, 4, 8, 20, 64), (64, 96, 128, 200), (64, 512, 1000)):
        expected, origin = naive.gemm(points_of, bound, *map(float, at))
        got = small.lookup("gemm", **dict(zip("mnk", at, strict=True)))
        assert abs(float(got.latency_us) - expected) <= 1e-13 * expected
        assert int(got.origin) == origin


@pytest.mark.parametrize("key_bits", [0, 1, 2, 4])
def test_sizes_move_to_the_nearest_start_of_a_key(key_bits: int) -> None:
    rng = np.random.default_rng(key_bits)
    sizes = np.sort(np.exp(rng.uniform(0.0, 14.0, 300)).round())
    moved = nearest_key_starts(sizes, key_bits)
    # every number of so many bits after the first one, by itself
    starts = [2.0**e * (1.0 + part / 2**key_bits) for e in range(22) for part in range(2**key_bits)]
    assert set(moved.tolist()) <= set(starts)
    for size in sizes:
        assert np.abs(moved - size).min() == min(abs(start - size) for start in starts)
    assert key_columns(np.r_[0.0, moved, SIZE_LIMIT]) is not None
    assert nearest_key_starts(moved, key_bits).tolist() == moved.tolist()
