"""Experts of shapes that were not measured: who are the donors, at equal work, and how answers name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastroof import Tables, compile_plan, load_gpu, load_model, load_tables
from fastroof.errors import MissingTableError
from fastroof.models.experts import RoutedExperts
from fastroof.operators.borrowing import (
    DISTANCE_EDGES,
    EXPERTS,
    BorrowingErrors,
    Donor,
    borrowed_points,
    borrowing_errors,
    nearest,
    nearest_routing,
)
from fastroof.operators.calls import Experts
from fastroof.operators.moe import GATED, MOE, MOE_NONGATED
from fastroof.operators.moe_work import ExpertShape
from fastroof.tables.kernel_order import KernelOrder
from fastroof.uncertainty.leave_one_out import relative_variance
from tests.reference import experts as naive
from tests.reference.handmade import handmade_tables
from tests.reference.kinds import step_us

NAMES = ("dtype", "hidden", "intermediate", "topk", "num_experts", "moe_tp", "moe_ep", "distribution")
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
VLLM = "aiconfigurator-vllm-0.25.0"
TRTLLM = "aiconfigurator-trtllm-1.3.0rc20"
ROUTED = ("bf16", "power_law_1.2")


@pytest.fixture(scope="module")
def h100() -> Tables:
    return load_tables("h100", source={"moe": VLLM, "moe_nongated": VLLM})


@pytest.fixture(scope="module")
def every_source() -> Tables:
    return load_tables("h100")


def values_of(key: tuple) -> dict:
    return dict(zip(NAMES, key, strict=True))


def kernel(
    hidden: int, intermediate: int, topk: int, experts: int, tp: int = 1, ep: int = 1,
    dtype: str = "bf16", routing: str = "balanced",
) -> tuple:  # fmt: skip
    return (dtype, hidden, intermediate, topk, experts, tp, ep, routing)


def rows(key: tuple, us: float = 10.0) -> list[tuple]:
    """Rows of a made-up kernel, whose latency is no multiple of its roofline."""
    return [
        (*key, m, us + 0.37 * m ** (0.8 + 0.01 * (m % 3)) * key[2] / key[5] / key[6] / 99) for m in TOKENS
    ]


SPLITS = [kernel(2048, 768, 8, 128, tp, ep) for tp, ep in ((1, 1), (2, 1), (4, 1), (1, 4), (1, 8))]
OTHERS = [kernel(4096, 1536, 8, 128), kernel(4096, 1024, 10, 512), kernel(5120, 8192, 1, 16, 2)]
MADE = [row for key in (*SPLITS, *OTHERS) for row in rows(key)]


sizes = st.tuples(
    st.sampled_from([1024, 2048, 3000, 4096, 7168]), st.sampled_from([512, 768, 2048, 8192]),
    st.integers(1, 16), st.sampled_from([16, 60, 128, 512]), st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 4, 16]),
)  # fmt: skip


@given(
    sizes=sizes,
    dtype=st.sampled_from(["bf16", "fp8_block"]),
    routing=st.sampled_from(["balanced", "power_law_1.2"]),
    place=st.integers(0, 20),
)
def test_a_shape_that_was_not_measured_is_the_naive_sum_of_its_donors(h100, sizes, dtype, routing, place):
    wanted = (dtype, *sizes, routing)
    is_measured = wanted in h100.groups("moe")
    assume(not is_measured)
    key, _ = naive.donors(wanted, list(h100.groups("moe")))[0]
    node = h100.rows(MOE, key)["num_tokens"].tolist()[place]
    tokens = node * (key[3] / key[4]) / (wanted[3] / wanted[4])
    packed = MOE.packed(h100, wanted)
    at = float(packed.sizes[np.argmin(np.abs(packed.sizes - tokens))])
    assert at == pytest.approx(tokens, rel=1e-12)
    values = dict(zip(packed.sizes.tolist(), packed.curve.value[1:-1].tolist(), strict=True))
    assert values[at] == pytest.approx(naive.borrowed_us(h100, wanted, at), rel=1e-9)


@pytest.mark.slow
@given(data=st.data())
def test_another_split_of_a_measured_layer_is_borrowed_from_that_layer(h100, data):
    measured = data.draw(st.sampled_from(sorted(h100.groups("moe"))))
    wanted = (*measured[:5], 8, 4, measured[-1])  # vLLM splits experts one way or the other
    borrowed = MOE.donors(h100, wanted)
    assert 1 <= len(borrowed) <= 2
    assert {one.kernel.layer for one in borrowed} == {measured[1:5]}
    assert sum(one.weight for one in borrowed) == pytest.approx(1.0)
    answer = h100.lookup("moe", num_tokens=[1, 100, 100_000], **values_of(wanted), with_error=True)
    assert answer.origin.tolist() == [3, 3, 3]
    assert (answer.latency_us > 0).all()
    for method in ("linear_mfu", "nearest", "floor"):
        assert h100.lookup("moe", num_tokens=7, method=method, **values_of(wanted)).origin == 3


def test_equal_work_takes_over_latency_over_roofline():
    """One donor with as many tokens an expert, half as wide: the latency of B, times its own latency / B."""
    donor = kernel(2048, 768, 8, 128)
    tables = handmade_tables(moe=rows(donor))
    wanted = kernel(2048, 1536, 16, 256)
    launch_us = min(us for *_, us in rows(donor))
    ours, theirs = (naive.bound(tables.gpu, key, launch_us) for key in (wanted, donor))
    answer = tables.lookup("moe", num_tokens=TOKENS, **values_of(wanted))
    expected = [us * ours(m) / theirs(m) for (*_, m, us) in rows(donor)]
    np.testing.assert_allclose(answer.latency_us, expected, rtol=1e-12)
    assert set(answer.origin.tolist()) == {3}
    # half the share of the experts: as many tokens an expert at twice the tokens
    sparser = kernel(2048, 768, 4, 128)
    ours = naive.bound(tables.gpu, sparser, launch_us)
    answer = tables.lookup("moe", num_tokens=[2 * m for m in TOKENS], **values_of(sparser))
    expected = [us * ours(2 * m) / theirs(m) for (*_, m, us) in rows(donor)]
    np.testing.assert_allclose(answer.latency_us, expected, rtol=1e-12)


@given(order=st.permutations(range(len(MADE))))
def test_the_order_of_rows_changes_no_bit(order):
    wanted = (kernel(2048, 768, 8, 128, 2, 4), kernel(3000, 900, 6, 100, 2))
    answers = [
        handmade_tables(moe=[MADE[i] for i in places]).lookup(
            "moe", num_tokens=[1, 5, 3000], **values_of(key)
        )
        for places in (range(len(MADE)), order)
        for key in wanted
    ]
    assert answers[0].latency_us.tolist() == answers[2].latency_us.tolist()
    assert answers[1].latency_us.tolist() == answers[3].latency_us.tolist()


def test_a_measured_shape_comes_back_and_is_donor_to_others_alone():
    tables = handmade_tables(moe=MADE)
    for key in (*SPLITS, *OTHERS):
        answer = tables.lookup("moe", num_tokens=TOKENS, **values_of(key))
        assert answer.latency_us.tolist() == [us for *_, us in rows(key)]
        assert not answer.origin.any()
        assert MOE.donors(tables, key) == ()


def test_the_nearest_counts_most_and_no_other_layer_is_donor_where_the_layer_was_split():
    shapes = [ExpertShape(*key) for key in (*SPLITS, *OTHERS)]
    wanted = ExpertShape(*kernel(2048, 768, 8, 128, 1, 2))
    borrowed = nearest(wanted, shapes, EXPERTS)
    assert [one.kernel[5:7] for one in borrowed] == [(1, 1), (1, 4)]
    assert borrowed[0].weight >= borrowed[1].weight
    elsewhere = nearest(ExpertShape(*kernel(4096, 1600, 8, 128)), shapes, EXPERTS)
    assert elsewhere[0].kernel[:5] == OTHERS[0][:5]
    assert elsewhere[0].octaves < elsewhere[1].octaves


def test_a_dtype_that_was_not_measured_is_not_borrowed_from_another():
    tables = handmade_tables(moe=MADE)
    with pytest.raises(
        MissingTableError, match=r"dtype=fp8_block, and dtypes are not borrowed; measured: bf16"
    ):
        tables.lookup("moe", num_tokens=1, **values_of(kernel(2048, 768, 8, 128, dtype="fp8_block")))


def test_another_distribution_is_borrowed_where_the_requested_one_is_missing():
    tables = handmade_tables(moe=MADE)
    wanted = kernel(2048, 768, 8, 128, routing="power_law_1.2")
    answer, same = (
        tables.lookup("moe", num_tokens=64, with_error=True, **values_of(key)) for key in (wanted, SPLITS[0])
    )
    assert (int(answer.origin), int(same.origin)) == (3, 0)
    assert float(answer.relative_error) >= 0.23
    assert MOE.donors(tables, wanted)[0].kernel == SPLITS[0]
    assert nearest_routing("power_law_1.2", ["balanced", "power_law_1.01"]) == "power_law_1.01"
    assert nearest_routing("uniform", ["power_law_1.2", "balanced"]) == "balanced"
    # even routing has no skew at all: 1.01 is further from it than from 1.9
    assert nearest_routing("power_law_1.01", ["balanced", "power_law_1.9"]) == "power_law_1.9"
    assert nearest_routing("balanced", []) == ""


def test_experts_without_a_gate_are_donors_to_each_other_alone(h100):
    wanted = kernel(2688, 1856, 6, 128, 4, 2)
    assert {one.kernel.layer for one in MOE_NONGATED.donors(h100, wanted)} == {(2688, 1856, 6, 128)}
    assert (2688, 1856, 6, 128) not in {one.kernel.layer for one in MOE.donors(h100, wanted)}


def test_experts_with_a_gate_are_donors_where_no_others_were_measured(h100):
    """As on the A100, whose tables have Nemotron's shape with a gate alone."""

    def without(*names: str) -> Tables:
        kept = {name: table for name, table in h100.measured.tables.items() if name not in names}
        return Tables(replace(h100.measured, tables=kept), h100.gpu)

    gated = without("moe_nongated")
    shape = kernel(2048, 768, 8, 128)
    (borrowed,) = MOE_NONGATED.donors(gated, shape)
    assert (tuple(borrowed.kernel), borrowed.weight) == (shape, 1.0)
    packed, theirs = MOE_NONGATED.packed(gated, shape), MOE.packed(gated, shape)
    launch_us = float(theirs.curve.value[1:-1].min())
    two, three = (one.roofline(shape, gated.gpu, launch_us) for one in (MOE_NONGATED, MOE))
    at = theirs.sizes
    expected = theirs.curve.value[1:-1] * two(at) / three(at)
    assert packed.curve.value[1:-1] == pytest.approx(expected)
    assert set(packed.curve.flag) == {3}
    assert (expected < theirs.curve.value[1:-1]).all()
    model = load_model("qwen3-30b-a3b")
    kind = replace(model.only_kind, mlp=RoutedExperts(128, 8, 768, is_gated=False))
    model = replace(model, layers=(replace(model.layers[0], kind=kind),))
    plan = compile_plan(model, "h100", gated, engine="kernels")
    explained = plan.explain([(1, 1023)] * 16, with_error=True)
    (part,) = (one for one in explained.operators if one.role == "experts")
    assert (part.origin, part.source) == (3, VLLM)
    assert explained.relative_error > 0.05
    # neither kind
    nothing = without("moe", "moe_nongated")
    with pytest.raises(MissingTableError, match="no moe_nongated table"):
        MOE_NONGATED.donors(nothing, shape)


@pytest.mark.parametrize("engine", [VLLM, TRTLLM])
def test_the_error_of_borrowing_across_the_gate(engine):
    """bf16 kernels of the H200 without a gate, by the nearest of the same engine that have one."""
    tables = load_tables("h200", source={"moe": engine, "moe_nongated": engine})
    gated = [ExpertShape(*key) for key in tables.groups("moe") if (key[0], key[-1]) == ROUTED]
    off = []
    for key in tables.groups("moe_nongated"):
        if (key[0], key[-1]) != ROUTED:
            continue
        wanted = ExpertShape(*key)
        made = borrowed_points(
            wanted,
            nearest(wanted, gated, EXPERTS),
            lambda shape: MOE.packed(tables, shape),
            lambda shape, launch_us: MOE_NONGATED.roofline(shape, tables.gpu, launch_us),
            lambda shape, launch_us: MOE.roofline(shape, tables.gpu, launch_us),
        )
        rows_of = tables.rows(MOE_NONGATED, key)
        off.append(made.log_errors(np.asarray(rows_of["num_tokens"], float), rows_of["latency_us"]))
    assert len(off) > 5
    assert np.quantile(np.abs(np.concatenate(off)), 0.8) < 1.2816 * GATED * 1.1


def test_unsound_rows_neither_serve_nor_are_donors_where_others_are_sound(every_source):
    measured = kernel(2048, 768, 8, 128, dtype="fp8", routing="power_law_1.2")
    assert every_source.source_of("moe", measured) == TRTLLM
    assert MOE.donors(every_source, measured) == ()
    wanted = kernel(2048, 1100, 8, 128, dtype="fp8", routing="power_law_1.2")
    for tables in (every_source, every_source.in_order(KernelOrder(("vllm", "trtllm", "sglang")))):
        for one in MOE.donors(tables, wanted):
            assert tables.source_of("moe", one.kernel) == TRTLLM


def test_the_kernels_of_an_engine_are_donors_before_another_engines_very_shape(every_source):
    wanted = kernel(2048, 768, 8, 128, 2, 4)  # SGLang and TensorRT-LLM measured it, vLLM did not
    assert every_source.lookup("moe", num_tokens=64, **values_of(wanted)).origin == 0
    assert every_source.source_of("moe", wanted) == TRTLLM
    of_vllm = every_source.in_order(KernelOrder(("vllm", "trtllm", "sglang")))
    answer = of_vllm.lookup("moe", num_tokens=64, **values_of(wanted))
    alone = load_tables("h100", source={"moe": VLLM}).lookup("moe", num_tokens=64, **values_of(wanted))
    assert answer.origin == 3
    assert answer.latency_us == alone.latency_us


@given(sizes=sizes, dtype=st.sampled_from(["bf16", "fp8_block"]), tokens=st.integers(1, 20_000))
def test_borrowed_latencies_are_no_less_than_their_flops_and_grow_with_tokens(h100, sizes, dtype, tokens):
    wanted = (dtype, *sizes, "balanced")
    some, more = h100.lookup("moe", num_tokens=[tokens, 16 * tokens], **values_of(wanted)).latency_us
    _, hidden, wide, topk, _, tp, ep, _ = wanted
    assert some > 1e6 * 6 * tokens * topk * hidden * wide / (tp * ep) / h100.gpu.peak(dtype)
    # few experts on a GPU: launches and tiles, which measured rows fall by up to a quarter for
    assert more > 0.7 * some


@given(sizes=sizes, place=st.integers(0, 20))
def test_no_borrowed_kernel_is_nearer_to_its_roofline_than_its_donors(h100, sizes, place):
    wanted = ("bf16", *sizes, "balanced")
    borrowed = MOE.donors(h100, wanted)
    assume(bool(borrowed))
    packed = MOE.packed(h100, wanted)
    tokens = float(packed.sizes[place % len(packed.sizes)])
    scaled = []
    for one in borrowed:
        theirs = MOE.packed(h100, one.kernel)
        launch_us = float(theirs.curve.value[1:-1].min())
        ours_us, their_us = (naive.bound(h100.gpu, key, launch_us) for key in (wanted, one.kernel))
        at = tokens * (wanted[3] / wanted[4]) / (one.kernel.topk / one.kernel.num_experts)
        held = min(max(at, theirs.sizes[0]), theirs.sizes[-1])
        nodes = [their_us(m) for m in theirs.sizes]
        us = np.interp(their_us(held), nodes, theirs.curve.value[1:-1]) * their_us(at) / their_us(held)
        scaled.append(us * ours_us(tokens) / their_us(at))
    index = int(np.flatnonzero(packed.sizes == tokens)[0])
    assert min(scaled) * (1 - 1e-9) <= packed.curve.value[1 + index] <= max(scaled) * (1 + 1e-9)


def test_a_nearer_table_is_a_donor_before_one_of_far_kernels():
    far, near = kernel(7168, 8192, 1, 16), kernel(2048, 1024, 8, 128)
    wanted = kernel(2048, 1100, 8, 128)
    tables = two_engines(rows(far), rows(near))
    assert [one.kernel for one in MOE.donors(tables, wanted)] == [near]
    # nor before another engine's very shape
    tables = two_engines(rows(far), [*rows(near), *rows(wanted)])
    of_vllm = tables.in_order(KernelOrder(("vllm", "trtllm")))
    assert MOE.donors(of_vllm, wanted) == ()
    assert of_vllm.lookup("moe", num_tokens=64, **values_of(wanted)).origin == 3
    assert tables.lookup("moe", num_tokens=64, **values_of(wanted)).origin == 0


def two_engines(vllm: list[tuple], trtllm: list[tuple]) -> Tables:
    """Experts as two engines run them, the first ranked first."""
    of_engine = []
    for engine, listed in (("vllm", vllm), ("trtllm", trtllm)):
        (table,) = handmade_tables(moe=listed).measured.tables.values()
        named = {**table.provenance, "framework": engine}
        of_engine.append(replace(table, source=engine, provenance=named))
    first, second = of_engine
    measured = replace(handmade_tables(moe=vllm).measured, tables={"moe": first}, others={"moe": (second,)})
    return Tables(measured, load_gpu("h100"))


def test_errors_of_borrowing_are_those_of_leaving_kernels_out(h100):
    split = MOE.borrowing_errors(h100, ExpertShape(*kernel(4096, 1536, 8, 128)))
    assert 0.02 < split.of_split < 0.2
    assert len(split.of_layer) == len(DISTANCE_EDGES) + 1
    assert split.of_split < min(split.of_layer)
    wanted = (kernel(4096, 1536, 8, 128), kernel(4096, 1536, 8, 128, 2, 4), kernel(4096, 1700, 8, 128))
    measured, of_split, of_layer = (
        float(np.sqrt(MOE.row_variance(call, h100, np.array([64.0]))[0])) for call in map(_call, wanted)
    )
    assert measured < of_split < of_layer


def test_of_equally_near_kernels_the_same_are_donors_in_any_order_of_rows():
    """Ten layers an octave away from the first, each way along five sizes, and farther from each other."""
    one = ExpertShape("bf16", 4096, 2048, 8, 128, 2, 2, "balanced")
    changes = [
        {"hidden": 8192}, {"hidden": 2048}, {"intermediate": 4096}, {"intermediate": 1024}, {"topk": 16},
        {"topk": 4}, {"num_experts": 256, "topk": 16, "moe_ep": 4},
        {"num_experts": 64, "topk": 4, "moe_ep": 1},
        {"intermediate": 8192, "moe_tp": 4}, {"intermediate": 512, "moe_tp": 1},
    ]  # fmt: skip
    shapes = [one, *(one._replace(**change) for change in changes)]
    assert {donor.octaves for donor in nearest(one, shapes[1:], EXPERTS)} == {1.0}

    def chosen(measured: list[ExpertShape]) -> dict[ExpertShape, tuple[Donor, ...]]:
        found: dict[ExpertShape, tuple[Donor, ...]] = {}

        def log_errors(shape: ExpertShape, donors: Sequence[Donor]) -> np.ndarray:
            found[shape] = tuple(donors)
            return np.array([0.1])

        borrowing_errors(measured, log_errors)
        return found

    expected = {
        shape: nearest(shape, [other for other in shapes if other != shape], EXPERTS) for shape in shapes
    }
    for order in (shapes, shapes[::-1], shapes[5:] + shapes[:5]):
        assert chosen(order) == expected


def test_a_table_of_one_layer_answers_as_others_do():
    tables = handmade_tables(moe=rows(SPLITS[0]))
    answer = tables.lookup("moe", num_tokens=64, with_error=True, **values_of(OTHERS[0]))
    assert float(answer.relative_error) == pytest.approx(0.29, abs=0.01)
    errors = BorrowingErrors(0.1, (0.2, 0.3, 0.4))
    (far,) = nearest(ExpertShape(*OTHERS[2]), [ExpertShape(*SPLITS[0])], EXPERTS)
    assert errors.of(OTHERS[2][-1], far) == 0.4


def _call(key: tuple) -> Experts:
    dtype, *shape, routing = key
    return Experts("experts", "experts", 1, *shape, dtype, routing)


# in plans


def mixture(experts: RoutedExperts, hidden: int):
    base = load_model("qwen3-8b")
    (group,) = base.layers
    kind = replace(group.kind, mlp=experts)
    return replace(base, name="a mixture", hidden=hidden, layers=(replace(group, kind=kind, count=3),))


LAYOUTS = ({"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}, {"tp": 1, "dp": 4, "ep": 4})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "experts", [(128, 8, 768, True), (100, 7, 900, True), (128, 6, 1856, False)], ids=str
)
def test_plans_read_the_same_curve_as_lookups(h100, layout, experts):
    num_experts, topk, intermediate, is_gated = experts
    hidden = 2048 if is_gated else 2688
    model = mixture(RoutedExperts(num_experts, topk, intermediate, is_gated=is_gated), hidden)
    options = {"dtype": "bf16", "routing": "balanced", "engine": "kernels", **layout}
    # a plan of few tokens leaves no shorter curve in the cache
    for few in ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, {}):
        plan = compile_plan(model, "h100", h100, **few, **options)
    key = kernel(hidden, intermediate, topk, num_experts, plan.layout.moe_tp, plan.layout.ep)
    operator = "moe" if is_gated else "moe_nongated"
    tokens = (1, 3, 64, 100, 1000, 8000)
    parts = [
        next(part for part in plan.explain([(1, 100)] * m if m <= 64 else [(m, 0)]).operators
             if part.role == "experts")
        for m in tokens
    ]  # fmt: skip
    ranks = plan.layout.dp
    found = h100.lookup(operator, num_tokens=[m * ranks for m in tokens], **values_of(key))
    np.testing.assert_allclose([part.total_us / part.calls for part in parts], found.latency_us, rtol=1e-12)
    assert [part.origin for part in parts] == found.origin.tolist()
    assert {part.source for part in parts} == {VLLM}


@pytest.mark.parametrize("requests", [[(1, 500)] * 5, [(700, 0)], [(1, 99), (1, 99), (64, 0)]], ids=len)
def test_a_step_is_the_naive_sum_of_its_lookups(h100, requests):
    experts = RoutedExperts(100, 7, 900, shared_intermediate=1024, router_bias=True)
    model = mixture(experts, 2048)
    plan = compile_plan(
        model,
        "h100",
        h100,
        tp=2,
        dtype="bf16",
        kv_dtype="bf16",
        max_num_batched_tokens=1024,
        engine="kernels",
    )
    expected = step_us(plan, h100, requests)
    assert float(plan.explain(requests).total_us) == pytest.approx(expected, rel=1e-11)


def test_a_plan_of_few_tokens_reads_no_more_experts_than_they_reach(h100):
    model = mixture(RoutedExperts(128, 8, 768), 2048)
    plan = compile_plan(model, "h100", h100, dtype="bf16", engine="kernels")
    expert_bytes = 3 * 2048 * 768 * 2
    one, many = (
        next(part for part in plan.explain(step).operators if part.role == "experts")
        for step in ([(1, 9)], [(8000, 0)])
    )
    assert one.moved_bytes == pytest.approx(3 * (8 * expert_bytes + 2 * 2 * 2048), rel=1e-12)
    assert many.moved_bytes == pytest.approx(3 * (128 * expert_bytes + 2 * 2 * 2048 * 8000), rel=1e-12)
    assert one.flops == 3 * 2 * 3 * 8 * 2048 * 768
    assert (one.bound, many.bound) == ("launch", "compute") or one.bound in ("launch", "memory")


def test_the_datasheet_knows_how_many_experts_tokens_reach(h100):
    call = _call(kernel(2048, 768, 8, 128))
    nodes = MOE.datasheet_nodes(call, h100.gpu)
    assert (np.diff(nodes.value) > 0).all()
    assert (np.diff(nodes.axis) > 0).all()
    bound = naive.bound(h100.gpu, MOE.row_key(call), 0.0)
    for m in (1, 2, 16, 100, 3000):
        us = float(np.interp(m, nodes.axis, nodes.value))
        # the larger of computing and moving is at least half of their sum
        assert 30.0 + bound(m) / 2 < us < 30.0 + bound(m) / 0.2
    few = float(np.interp(1, nodes.axis, nodes.value)) - nodes.launch_us
    all_experts = float(np.interp(1000, nodes.axis, nodes.value)) - nodes.launch_us
    assert few * 15 < all_experts


def test_what_has_no_rows_is_modelled_where_that_is_allowed(h100):
    tables = handmade_tables(moe=MADE)
    call = _call(kernel(2048, 768, 8, 128, dtype="fp8_block"))
    with pytest.raises(MissingTableError, match="fp8_block"):
        MOE.serving(call, tables)
    assert set(MOE.datasheet_nodes(call, tables.gpu).flag.tolist()) == {4}


def test_modelled_experts_claim_an_error_of_their_own(h100):
    model = mixture(RoutedExperts(128, 8, 768), 2048)
    plan = compile_plan(model, "h100", h100, tp=2, dtype="int8", allow_modelled=True, engine="kernels")
    step = plan.explain([(1, 999)] * 8, with_error=True)
    (experts,) = (part for part in step.operators if part.role == "experts")
    assert (experts.origin, experts.source) == (4, "datasheet")
    share = experts.total_us / step.total_us
    assert MOE.datasheet_error * share <= step.relative_error < MOE.datasheet_error


def test_the_error_of_a_donor_is_that_of_as_many_rows_an_expert(h100: Tables) -> None:
    """A token of 3 of 128 experts loads each as 3 / 8 of a token of 8 of 128 do."""
    wanted = kernel(4096, 1536, 3, 128, dtype="bf16", routing="power_law_1.2")
    donors = MOE.donors(h100, wanted)
    near = donors[0].kernel
    tokens = np.array([1.0, 3.0, 40.0, 700.0])
    theirs = tokens * (3 / 128) / (near.topk / near.num_experts)
    assert (theirs != tokens).all()
    own = relative_variance(MOE.local_errors(h100, near), [theirs])
    borrowed = MOE.borrowing_errors(h100, near).of(wanted[-1], donors[0]) ** 2
    found = MOE.relative_error(h100, wanted, [tokens], tokens)
    assert found.tolist() == pytest.approx(np.sqrt(own + borrowed).tolist(), rel=1e-12)
    assert (own != relative_variance(MOE.local_errors(h100, near), [tokens])).any()
