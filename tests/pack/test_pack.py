"""What lies outside the measured points: small tables whose answers can be worked out on paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof import load_tables
from fastroof.pack import SIZE_LIMIT, pack_curve
from fastroof.pack.curves import LAUNCH_US
from tests.reference import lookups as naive
from tests.reference.handmade import HEADS, attention_rows, gemm_rows, handmade_tables

# hypothesis prints the tables that a failing test was given, and warns of their length instead of failing
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

NAMES = dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), HEADS, strict=True))
KEY = ("bf16", *HEADS)


def decode(tables, batch_size, kv_len, **options):
    return tables.lookup("attention_decode", **NAMES, batch_size=batch_size, kv_len=kv_len, **options)


def prefill(tables, batch_size, q_len, **options):
    sizes = {"batch_size": batch_size, "q_len": q_len, "kv_len": q_len}
    return tables.lookup("attention_prefill", **NAMES, **sizes, **options)


def naive_attention(tables, points, *, is_decode):
    work = (naive.decode_work if is_decode else naive.prefill_work)(tables.gpu, KEY)
    floats = {tuple(map(float, point)): us for point, us in points.items()}
    return naive.Attention(floats, work, is_decode)


STAIRCASE = {
    (1, 64): 10.0, (1, 512): 11.0, (1, 4096): 16.0, (1, 65536): 90.0,
    (8, 64): 11.0, (8, 512): 14.0, (8, 4096): 60.0,
    (64, 64): 15.0, (64, 512): 70.0,
    (512, 64): 60.0,
}  # fmt: skip
"""As published: no large batch with a long sequence."""
MIDDLE_HOLE = {(b, x): 9.0 + b * x / 4096 for b in (1, 8, 64) for x in (64, 512, 4096) if (b, x) != (8, 512)}
ONE_BATCH = {(4, 64): 10.0, (4, 512): 12.0, (4, 4096): 40.0}
ONE_ROW = {(4, 512): 12.0}
OPEN_CORNER = {(2, 512): 12.0, (2, 4096): 20.0, (16, 128): 11.0, (16, 512): 30.0, (16, 4096): 150.0}
GRIDS = {
    "staircase": STAIRCASE,
    "middle": MIDDLE_HOLE,
    "batch": ONE_BATCH,
    "row": ONE_ROW,
    "corner": OPEN_CORNER,
}


@pytest.mark.loops
@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("name", GRIDS)
def test_small_grids_are_looked_up_as_the_naive_ones(name, is_decode):
    points = GRIDS[name]
    operator = "attention_decode" if is_decode else "attention_prefill"
    tables = handmade_tables(**{operator: attention_rows(points, is_decode=is_decode)})
    table = naive_attention(tables, points, is_decode=is_decode)
    call = decode if is_decode else prefill
    nodes = [1, 2, 3, 4, 8, 11, 64, 100, 512, 4000], [1, 30, 64, 100, 512, 2000, 4096, 9000, 65536, 10**6]
    batch, length = (a.ravel() for a in np.meshgrid(*nodes))
    got = call(tables, batch, length)
    for i, (b, x) in enumerate(zip(batch.tolist(), length.tolist(), strict=True)):
        expected, origin = table.latency(float(b), float(x))
        assert got.latency_us[i] == pytest.approx(expected, rel=1e-12), (b, x)
        assert got.origin[i] == origin, (b, x)
    for method in ("linear_mfu", "nearest", "floor"):
        b, x = np.array(list(points)).T
        back = call(tables, b, x, method=method)
        assert back.latency_us.tolist() == list(points.values())
        assert not back.origin.any()
        assert np.isfinite(call(tables, batch, length, method=method).latency_us).all()


SEQUENCE_US = (2 * 2 * 32 * 128 / 3.35e12) * 1e6
"""Query and output of one sequence of the hand-made tables."""
TOKEN_US = (4 * 32 * 128 / 989.5e12 + 2 * 2 * 8 * 128 / 3.35e12) * 1e6


@pytest.mark.loops
def test_decode_beyond_the_last_batch_costs_what_a_sequence_cost_on_the_way_there():
    """Short sequences: 0.5 us each, of which the roofline knows a hundredth."""
    points = {(1, 64): 10.0, (32, 64): 14.0, (101, 64): 60.0}
    got = decode(handmade_tables(attention_decode=attention_rows(points)), np.array([101, 201, 1001]), 64)
    np.testing.assert_allclose(got.latency_us, [60.0, 110.0, 510.0], rtol=1e-9)
    assert got.origin.tolist() == [0, 2, 2]


@pytest.mark.loops
def test_decode_beyond_the_last_length_goes_half_way_between_its_line_and_the_roofline():
    """The line rose by 1.5 roofline a token: 1.25 from there on, as latency / B is 1.4."""
    added = 4096 * 4 * TOKEN_US
    points = {(4, 1): 10.0, (4, 4097): 10.0 + 1.5 * added}
    bound = 10.0 + 4 * (SEQUENCE_US + 4097 * TOKEN_US)
    assert points[4, 4097] / bound > 1.25
    got = decode(handmade_tables(attention_decode=attention_rows(points)), 4, np.array([4097, 8193]))
    np.testing.assert_allclose(got.latency_us, [points[4, 4097], points[4, 4097] + 1.25 * added], rtol=1e-9)


@pytest.mark.loops
def test_decode_beyond_the_last_length_never_leaves_the_roofline_further_behind():
    """A line that is still near its launch rose by 3 rooflines a token, of which 1.08 are held."""
    added = 16 * 4 * TOKEN_US
    points = {(4, 1): 10.0, (4, 17): 10.0 + 3.0 * added}
    bound = naive_attention(
        tables := handmade_tables(attention_decode=attention_rows(points)), points, is_decode=True
    ).bound
    got = decode(tables, 4, np.array([17, 1000, 100_000]))
    held = [points[4, 17] * bound(4.0, float(x)) / bound(4.0, 17.0) for x in (17, 1000, 100_000)]
    np.testing.assert_allclose(got.latency_us, held, rtol=1e-9)


@pytest.mark.loops
def test_decode_that_rose_less_than_the_roofline_goes_on_by_the_roofline():
    points = {(1, 4096): 40.0, (4, 64): 39.9, (4, 4096): 40.1}
    tables = handmade_tables(attention_decode=attention_rows(points))
    got = decode(tables, np.array([4, 4, 10]), np.array([4097, 14096, 4096]))
    a_sequence = SEQUENCE_US + 4096 * TOKEN_US
    np.testing.assert_allclose(
        got.latency_us - 40.1, [4 * TOKEN_US, 40_000 * TOKEN_US, 6 * a_sequence], rtol=1e-9
    )


@pytest.mark.loops
@pytest.mark.parametrize("short_us", [24.0, 200.0])
def test_a_hole_beyond_both_lines_takes_their_mean_and_no_less_than_either_edge(short_us):
    """Either line has one point, and goes on by the roofline."""
    tables = handmade_tables(
        attention_decode=attention_rows({(1, 64): 10.0, (1, 4160): 20.0, (8, 64): short_us})
    )
    bound = naive_attention(tables, {(1, 64): 10.0}, is_decode=True).bound
    along_batch = 20.0 + bound(8.0, 4160.0) - bound(1.0, 4160.0)
    along_length = short_us + bound(8.0, 4160.0) - bound(8.0, 64.0)
    mean = (along_batch + along_length) / 2
    assert (mean > short_us) == (short_us == 24.0)
    hole = decode(tables, 8, 4160)
    assert float(hole.latency_us) == pytest.approx(max(short_us, mean), rel=1e-9)
    assert int(hole.origin) == 2


@given(
    points=st.dictionaries(
        st.tuples(st.sampled_from([1, 4, 16, 64]), st.sampled_from([2, 64, 512, 4096])),
        st.floats(1.0, 1e3),
        min_size=1,
        max_size=10,
    )
)
def test_beyond_its_ends_decode_grows_at_least_as_the_roofline(points):
    tables = handmade_tables(attention_decode=attention_rows(points))
    bound = naive_attention(tables, points, is_decode=True).bound
    largest, longest = max(b for b, _ in points), max(x for _, x in points)
    for batch, length in [(largest * 8, longest), (largest, longest * 8), (largest * 8, longest * 8)]:
        sizes = np.array([[largest, longest], [batch, length]]).T
        near_us, far_us = decode(tables, *sizes).latency_us
        added = bound(float(batch), float(length)) - bound(float(largest), float(longest))
        assert far_us - near_us >= added * (1.0 - 1e-9) - 1e-9
        if batch == largest:
            held = near_us / bound(float(largest), float(longest))
            assert far_us <= max(near_us + added, held * bound(float(batch), float(length))) * (1.0 + 1e-9)


@pytest.mark.loops
def test_prefill_beyond_the_table_keeps_its_distance_to_the_roofline():
    tables = handmade_tables(attention_prefill=attention_rows(ONE_BATCH, is_decode=False))
    bound = naive_attention(tables, ONE_BATCH, is_decode=False).bound
    got = prefill(tables, np.array([4, 8]), np.array([8192, 4096]))
    edges, wanted = [(4, 4096), (4, 4096)], [(4, 8192), (8, 4096)]
    expected = [ONE_BATCH[e] * bound(*a) / bound(*e) for e, a in zip(edges, wanted, strict=True)]
    np.testing.assert_allclose(got.latency_us, expected, rtol=1e-12)
    assert got.origin.tolist() == [2, 2]


@pytest.mark.loops
def test_a_prefix_is_priced_at_its_roofline_at_least():
    """The one row took less than B, which counts its launch twice: latency / B is below 1."""
    tables = handmade_tables(attention_prefill=attention_rows(ONE_ROW, is_decode=False))
    assert ONE_ROW[4, 512] < naive_attention(tables, ONE_ROW, is_decode=False).bound(4.0, 512.0)
    got = tables.lookup("attention_prefill", **NAMES, batch_size=4, q_len=512, kv_len=512 + 1000)
    price = naive.prefix_us(tables.gpu, KEY, 1.0, 4 * 512 * 1000, 4 * 1000)
    assert float(got.latency_us) == pytest.approx(12.0 + price, rel=1e-12)
    assert int(got.origin) == 4


@pytest.mark.loops
def test_a_hole_with_measured_neighbours_lies_between_them():
    tables = handmade_tables(attention_decode=attention_rows(MIDDLE_HOLE))
    got = decode(tables, 8, 512)
    assert MIDDLE_HOLE[8, 64] < float(got.latency_us) < MIDDLE_HOLE[8, 4096]
    assert int(got.origin) == 2


@pytest.mark.loops
def test_below_the_table_decode_falls_along_its_lines_to_the_launch():
    def truth_us(batch, kv_len):
        return 4.5 + 1.25 * batch * (SEQUENCE_US + TOKEN_US * kv_len)

    points = {(b, x): truth_us(b, x) for b in (64, 128, 256) for x in (2048, 4096, 8192)}
    batch, kv_len = np.meshgrid([1, 2, 8, 63], [1, 16, 512, 2047])
    got = decode(handmade_tables(attention_decode=attention_rows(points)), batch, kv_len)
    np.testing.assert_allclose(got.latency_us, truth_us(batch, kv_len), rtol=1e-9)
    assert (got.origin == 2).all()


@pytest.mark.loops
@given(us=st.lists(st.floats(2.0, 1e5), min_size=1, max_size=5), start=st.integers(3, 4096))
def test_below_its_rows_a_curve_is_not_below_a_launch_nor_above_the_first_row(us, start):
    axis = float(start) * 2.0 ** np.arange(len(us))
    curve = pack_curve(axis, np.array(us), lambda x: min(us) + x / 100.0)
    assert LAUNCH_US - 1e-9 <= curve.value[0] <= us[0]
    assert curve.value[1:-1].tolist() == us


@pytest.mark.loops
def test_of_duplicates_the_median_counts():
    rows = attention_rows({(1, 64): 10.0, (1, 128): 20.0})
    odd = handmade_tables(attention_decode=[*rows, (*rows[1][:-1], 90.0), (*rows[1][:-1], 30.0)])
    assert float(decode(odd, 1, 128).latency_us) == 30.0
    even = handmade_tables(attention_decode=[(*rows[1][:-1], 30.0), *rows])
    assert float(decode(even, 1, 128).latency_us) == 25.0
    points = gemm_rows({(1, 64, 64): 3.0, (8, 64, 64): 5.0})
    gemm = handmade_tables(gemm=[*points, (*points[1][:-1], 8.0)])
    got = gemm.lookup("gemm", m=8, n=64, k=64)
    assert (float(got.latency_us), int(got.origin)) == (6.5, 0)
    message = [("int8", 2, "nccl", size, us) for size, us in [(256, 5.0), (256, 9.0), (256, 6.0), (512, 7.0)]]
    nccl = handmade_tables(allreduce=message).lookup(
        "allreduce", dtype="int8", num_gpus=2, mode="nccl", message_bytes=256
    )
    assert (float(nccl.latency_us), int(nccl.origin)) == (6.0, 0)


@pytest.mark.loops
def test_a_table_of_one_gemm_serves_every_size():
    tables = handmade_tables(gemm=gemm_rows({(16, 128, 512): 6.0}))
    bound = naive.gemm_bound(tables.gpu, "bf16", 6.0)
    wanted = [(16, 128, 512), (1, 128, 512), (16, 1, 512), (16, 128, 1), (9999, 9999, 9999), (1, 1, 1)]
    m, n, k = np.array(wanted).T
    got = tables.lookup("gemm", m=m, n=n, k=k)
    expected = [6.0 * bound(*a) / bound(*wanted[0]) for a in wanted]
    np.testing.assert_allclose(got.latency_us, expected, rtol=1e-12)
    assert got.origin.tolist() == [0, 2, 2, 2, 2, 2]


@pytest.mark.loops
@given(
    points=st.dictionaries(st.integers(1, 2**30), st.floats(0.5, 1e6), min_size=1, max_size=8),
    order=st.randoms(),
)
def test_a_curve_does_not_depend_on_the_order_of_its_rows(points, order):
    rows = list(points.items())
    order.shuffle(rows)
    x, us = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    curve = pack_curve(x, us, lambda a: 1.0 + a)
    assert curve.axis.tolist() == [0.0, *sorted(points), SIZE_LIMIT]
    assert curve.value[1:-1].tolist() == [points[int(a)] for a in curve.axis[1:-1]]
    assert curve.flag.tolist() == [2, *[0] * len(points), 2]


# Facts of the H100 tables


@pytest.mark.parametrize("source", ["aiconfigurator-sglang-0.5.14", "aiconfigurator-trtllm-1.3.0rc20"])
def test_the_one_missing_gemm_is_a_hole(source):
    """vLLM's tables have 183 holes: widths that some models alone have were measured with few k."""
    tables = load_tables("h100", source=source)
    points = naive.points_of(tables, "gemm", ("bf16",))
    n_nodes, k_nodes = (sorted({p[i] for p in points}) for i in (1, 2))
    pairs = {p[1:] for p in points}
    assert {(n, k) for n in n_nodes for k in k_nodes} - pairs == {(65536.0, 65536.0)}
    before = int(n_nodes[-2])
    smaller = tables.lookup("gemm", m=64, n=before, k=65536)
    assert int(smaller.origin) == 0
    hole = tables.lookup("gemm", m=64, n=65536, k=65536)
    assert int(hole.origin) == 2
    bound = naive.gemm_bound(tables.gpu, "bf16", min(points.values()))
    held = float(smaller.latency_us) * bound(64, 65536, 65536) / bound(64, before, 65536)
    assert float(hole.latency_us) == pytest.approx(held, rel=1e-12)


def test_allreduce_is_the_graphs_by_default(h100):
    sizes = {"num_gpus": 2, "message_bytes": 256}
    default = h100.lookup("allreduce", **sizes)
    graph, eager = (h100.lookup("allreduce", **sizes, mode=mode) for mode in ("graph", "eager"))
    assert default.latency_us == graph.latency_us
    assert 4.0 < float(graph.latency_us) < 5.0
    assert 18.0 < float(eager.latency_us) < 25.0


def test_nccl_looks_up_the_median_of_its_two_rows(h100):
    columns = h100.table("allreduce").columns
    for (dtype, gpus, mode), rows in h100.groups("allreduce").items():
        if mode != "nccl":
            continue
        message = columns["message_bytes"][rows]
        got = h100.lookup("allreduce", dtype=dtype, num_gpus=gpus, mode=mode, message_bytes=message)
        for size, us in zip(message.tolist(), got.latency_us.tolist(), strict=True):
            pair = sorted(columns["latency_us"][rows][message == size].tolist())
            assert len(pair) == 2
            assert pair[0] <= us <= pair[1]
            assert us == (pair[0] + pair[1]) / 2


def log_sizes(limit: int) -> st.SearchStrategy[int]:
    return st.floats(0.0, float(limit)).map(lambda e: max(1, int(2**e)))


def test_gemms_beyond_the_measured_k_hold_the_distance_of_the_nearest_k():
    points = {(1, 64, 64): 3.0, (64, 64, 64): 4.0, (1, 64, 512): 10.0, (64, 64, 512): 40.0}
    tables = handmade_tables(gemm=gemm_rows(points))
    bound = naive.gemm_bound(tables.gpu, "bf16", 3.0)
    for near, far in ((512, 4096), (512, 2**24)):
        got = tables.lookup("gemm", m=[1, 64], n=64, k=far)
        held = [points[m, 64, near] * bound(m, 64, far) / bound(m, 64, near) for m in (1, 64)]
        np.testing.assert_allclose(got.latency_us, held, rtol=1e-6)
        assert got.origin.tolist() == [2, 2]


@given(
    m=log_sizes(28),
    n=log_sizes(24),
    k=log_sizes(24),
    method=st.sampled_from(["roofline", "linear_mfu", "nearest", "floor"]),
)
def test_any_gemm_has_a_finite_positive_latency(h100, m, n, k, method):
    us = float(h100.lookup("gemm", m=m, n=n, k=k, method=method).latency_us)
    assert np.isfinite(us)
    assert us > 0


@pytest.mark.parametrize("method", ["roofline", "linear_mfu", "nearest", "floor"])
@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
def test_any_attention_has_a_finite_positive_latency(h100, operator, method):
    batch, kv_len = (a.ravel() for a in np.meshgrid(2 ** np.arange(0, 25, 3), 2 ** np.arange(0, 29, 2)))
    for kv_dtype, nh, nkv, dh, _ in h100.groups(operator):
        sizes = {"num_q_heads": nh, "num_kv_heads": nkv, "head_dim": dh, "kv_dtype": kv_dtype}
        lengths = {"batch_size": batch, "kv_len": kv_len}
        if operator == "attention_prefill":
            lengths["q_len"] = np.maximum(kv_len // 4, 1)
        us = h100.lookup(operator, **sizes, **lengths, method=method).latency_us
        assert np.isfinite(us).all()
        assert (us > 0).all()
