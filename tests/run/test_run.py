"""Batches and the arguments of steps: what is refused, and valid values in the message."""

from __future__ import annotations

import numpy as np
import pytest

from fastroof import StepBatch, compile_plan
from fastroof.errors import BatchError, FastroofError, PlanError, PlanRangeError

# impossible sizes wrap around in a loop; with the JIT off NumPy's integers do so with a warning
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(scope="module")
def plan(h100):
    return compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=512, max_num_seqs=64, engine="kernels"
    )


NOT_SIZES = [
    0, -1, -(2**63), 1.0, 1.5, float("nan"), float("inf"), True, None, "8", b"8", 1j,
    2**63 - 1, 2**64 - 1, 2**70, [1, 0], [1, None], [True, False], np.float64(4), np.array(["8"]),
]  # fmt: skip
ENTRIES = {
    ("decode_us", "batch_size"): {"kv_len": 64},
    ("decode_us", "kv_len"): {"batch_size": 4},
    ("prefill_us", "new_tokens"): {"context_len": 3, "batch_size": 2},
    ("prefill_us", "context_len"): {"new_tokens": 3, "batch_size": 2},
    ("prefill_us", "batch_size"): {"new_tokens": 3, "context_len": 2},
}


@pytest.mark.loops
@pytest.mark.parametrize(("entry", "name"), ENTRIES)
@pytest.mark.parametrize("bad", NOT_SIZES, ids=repr)
def test_invalid_sizes_are_refused(plan, entry, name, bad):
    if name == "context_len" and isinstance(bad, int | list) and np.asarray(bad).dtype.kind == "i":
        bad = {0: -5, 2**63 - 1: 2**62}.get(bad, bad) if isinstance(bad, int) else [3, -1]
    with pytest.raises((BatchError, PlanRangeError)) as error:
        getattr(plan, entry)(**ENTRIES[entry, name], **{name: bad})
    text = str(error.value)
    near = {"batch_size": "sequences", "new_tokens": "tokens", "context_len": "kv_len"}
    assert name in text or near.get(name, name) in text


@pytest.mark.loops
@pytest.mark.parametrize("context", [2**28, 2**31, 2**62])
@pytest.mark.parametrize("new", [1, 2, 512])
def test_a_context_beyond_any_model_is_refused(plan, new, context):
    with pytest.raises(BatchError, match=r"kv_len|context_len"):
        plan.prefill_us(new, context)
    with pytest.raises(BatchError, match=r"kv_len|context_len"):
        plan.run(StepBatch([new], [context], [0, 1]))


@pytest.mark.loops
@pytest.mark.parametrize(("new", "context"), [(1, 2**63 - 1), (2, 2**63 - 2), (512, 2**63 - 1)])
def test_a_context_whose_kv_len_is_beyond_int64_is_refused(plan, new, context):
    with pytest.raises(BatchError, match=r"kv_len|context_len"):
        plan.prefill_us(new, context)


@pytest.mark.loops
@pytest.mark.parametrize("new", [2**28, 2**31, 2**62, 2**63 - 1])
def test_more_new_tokens_than_any_plan_are_refused(plan, new):
    for context in (0, 7, 2**62, 2**63 - 1):
        with pytest.raises((BatchError, PlanRangeError)):
            plan.prefill_us(new, context)
        with pytest.raises((BatchError, PlanRangeError)):
            plan.step_us(StepBatch([new], [context], [0, 1]))


@pytest.mark.loops
def test_a_step_beyond_the_plan_names_what_to_pass(plan):
    cases = [
        (lambda: plan.decode_us(65, 100), r"65 sequences.*up to 64.*max_num_seqs=65"),
        (lambda: plan.decode_us([1, 2, 99], 100), r"position 2.*max_num_seqs=99"),
        (lambda: plan.prefill_us(513), r"513 tokens.*up to 512.*max_num_batched_tokens=513"),
        (
            lambda: plan.prefill_us([100, 100], 0, [5, 6]),
            r"position 1 has 600 tokens.*max_num_batched_tokens=600",
        ),
        (lambda: plan.prefill_us(1, 0, 65), r"max_num_seqs=65"),
        (
            lambda: plan.run(StepBatch.from_requests([[(1, 1)] * 65])),
            r"step 0 has 65 sequences.*max_num_seqs=65",
        ),
        (
            lambda: plan.step_us(StepBatch.from_requests([[(1, 1)], [(300, 0), (213, 5)]])),
            r"step 1 has 513 tokens.*max_num_batched_tokens=513",
        ),
        (lambda: plan.explain([(513, 0)]), r"max_num_batched_tokens=513"),
    ]
    for call, message in cases:
        with pytest.raises(PlanRangeError, match=message) as error:
            call()
        assert isinstance(error.value, PlanError)
    assert plan.decode_us(64, 100) > 0
    assert plan.prefill_us(512) > 0


def test_values_named_by_a_range_error_work(h100):
    plan = compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=513, max_num_seqs=65, engine="kernels"
    )
    assert plan.prefill_us(513) > 0
    assert plan.decode_us(65, 100) > 0


def test_more_sequences_than_tokens_is_a_matter_of_tokens(h100):
    plan = compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=8, max_num_seqs=64, engine="kernels"
    )
    with pytest.raises(PlanRangeError, match="max_num_batched_tokens=9"):
        plan.decode_us(9, 100)


@pytest.mark.loops
def test_shapes_that_do_not_broadcast_are_named(plan):
    with pytest.raises(BatchError, match=r"batch_size \(2,\).*kv_len \(3,\)"):
        plan.decode_us([1, 2], [1, 2, 3])


@pytest.mark.loops
@pytest.mark.parametrize("entry", ["decode_us", "prefill_us"])
def test_empty_arguments_give_empty_answers(plan, entry):
    for empty in ([], np.zeros((0, 3), np.int64), np.zeros(0, np.int32)):
        got = getattr(plan, entry)(empty, 5)
        assert got.shape == np.shape(empty)
        assert got.dtype == np.float64


@pytest.mark.parametrize("entry", ["decode_us", "prefill_us"])
def test_nested_lists_of_unequal_lengths_are_refused(plan, entry):
    with pytest.raises(BatchError):
        getattr(plan, entry)([[1], [1, 2]], 5)


@pytest.mark.loops
def test_out_takes_the_answer(plan):
    batch, kv_len = np.array([[1], [2]]), np.array([64, 65, 66])
    out = np.empty((2, 3))
    assert plan.decode_us(batch, kv_len, out=out) is out
    np.testing.assert_array_equal(out, plan.decode_us(batch, kv_len))
    new = np.array([1, 2, 3])
    out = np.empty(3)
    assert plan.prefill_us(new, out=out) is out
    np.testing.assert_array_equal(out, plan.prefill_us(new))


def _read_only(shape):
    array = np.empty(shape)
    array.flags.writeable = False
    return array


@pytest.mark.loops
@pytest.mark.parametrize(
    "out",
    [
        np.empty(2), np.empty((3, 1)), np.empty(3, np.float32), np.empty(3, np.int64), np.empty(6)[::2],
        _read_only(3), [0.0, 0.0, 0.0], 0.0,
    ],
    ids=["short", "shape", "float32", "int64", "strided", "read-only", "list", "number"],
)  # fmt: skip
def test_out_that_cannot_take_the_answer_is_refused(plan, out):
    with pytest.raises(BatchError, match=r"out must be .*float64 array of shape \(3,\)"):
        plan.decode_us([1, 2, 3], 64, out=out)
    with pytest.raises(BatchError, match="out must be"):
        plan.prefill_us([1, 2, 3], 64, out=out)


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, None, "2"], ids=repr)
def test_threads_are_a_whole_number(plan, threads):
    batch = StepBatch.from_requests([[(1, 1)]])
    for call in (
        lambda: plan.decode_us(1, 1, threads=threads),
        lambda: plan.prefill_us(1, threads=threads),
        lambda: plan.run(batch, threads=threads),
        lambda: plan.step_us(batch, threads=threads),
    ):
        with pytest.raises(BatchError, match="threads must be a whole number"):
            call()


# StepBatch

MALFORMED = {
    "lengths": (([1, 2], [0], [0, 2]), "new_tokens has 2 requests, context_len 1"),
    "offsets fall": (
        ([1, 2, 3], [0, 0, 0], [0, 2, 1, 3]),
        "offsets must not decrease: 2 is followed by 1 at step 1",
    ),
    "offsets start": (([1, 2], [0, 0], [1, 2]), "offsets must start at 0 and end at the 2 requests"),
    "offsets end": (([1, 2], [0, 0], [0, 1]), "offsets must start at 0 and end at the 2 requests"),
    "offsets empty": (([], [], []), "offsets must start at 0"),
    "float": (([1.5], [0], [0, 1]), "new_tokens must hold integers"),
    "whole float": (([1], [0.0], [0, 1]), "context_len must hold integers"),
    "nan": (([float("nan")], [0], [0, 1]), "new_tokens must hold integers"),
    "bool": (([True], [0], [0, 1]), "new_tokens must hold integers"),
    "text": ((["1"], [0], [0, 1]), "new_tokens must hold integers"),
    "offsets float": (([1], [0], [0.0, 1.0]), "offsets must hold integers"),
    "beyond int64": (([1], [2**64 - 1], [0, 1]), "context_len"),
    "two-dimensional": (([[1]], [0], [0, 1]), "new_tokens must be one-dimensional"),
    "single": ((1, 0, [0, 1]), "new_tokens must be one-dimensional"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_batch_is_refused(case):
    arrays, message = MALFORMED[case]
    with pytest.raises(BatchError, match=message):
        StepBatch(*arrays)


@pytest.mark.parametrize(
    "steps",
    [
        [[5]], [[(5,)]], [[(5, 0, 0)]], [[(5, 0)], [(5,)]], [[(5, 0.5)]], [[(5, float("nan"))]], [[("5", 0)]],
        [[(None, 0)]], [[(2**70, 0)]], [[(5, 0), 7]], [[[(5, 0)]]], ["ab"],
        [[(5, 0), np.array(3)]], [[(5, 0), np.ones((2, 1), int)]], [[(5, 0), np.ma.array(3, mask=True)]],
    ],
    ids=repr,
)  # fmt: skip
def test_invalid_pairs_are_refused(steps):
    with pytest.raises(BatchError):
        StepBatch.from_requests(steps)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64])
def test_threads_of_any_integer_type(plan, kind):
    batch_size = np.full(40_000, 3)
    assert plan.decode_us(batch_size, 9, threads=kind(100)).tolist() == [plan.decode_us(3, 9)] * 40_000


@pytest.mark.parametrize("steps", [5, [5], None], ids=repr)
def test_invalid_lists_of_steps_are_refused(plan, steps):
    with pytest.raises(BatchError):
        StepBatch.from_requests(steps)
    with pytest.raises(BatchError):
        plan.explain(steps)


@pytest.mark.loops
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ((0, 5), r"new_tokens must be at least 1, got 0 in request 1 of step 2"),
        ((-3, 5), r"new_tokens must be at least 1, got -3 in request 1 of step 2"),
        ((5, -1), r"context_len must be at least 0, got -1 in request 1 of step 2"),
        ((5, 2**28), r"268435456 \+ 5 in request 1 of step 2"),
    ],
)
def test_a_bad_request_is_found(plan, request_, message):
    batch = StepBatch.from_requests([[(1, 1)] * 3, [], [(2, 2), request_], [(3, 3)]])
    for call in (plan.run, plan.step_us):
        with pytest.raises(BatchError, match=message):
            call(batch)


@pytest.mark.parametrize("what", [None, [[(1, 1)]], ([1], [1], [0, 1])], ids=repr)
def test_invalid_batches_are_refused(plan, what):
    for call in (plan.run, plan.step_us):
        with pytest.raises(BatchError, match="StepBatch"):
            call(what)


@pytest.mark.parametrize("offset", [10**9, 2**63 - 1, -5, -(2**63), 0])
def test_offsets_broken_after_the_check_are_still_refused(plan, offset):
    batch = StepBatch.from_requests([[(5, 0)], [(5, 0)], [(6, 0)]])
    batch.offsets[2 if offset == 0 else 1] = offset
    for call in (plan.run, plan.step_us):
        with pytest.raises(FastroofError):
            call(batch)


@pytest.mark.loops
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.int16, np.uint32, np.uint64])
def test_every_integer_type_gives_the_same_bits(plan, kind):
    batch, kv_len = np.array([1, 7, 64]), np.array([1, 300, 30_000])
    np.testing.assert_array_equal(
        plan.decode_us(batch.astype(kind), kv_len.astype(kind)), plan.decode_us(batch, kv_len)
    )
    arrays = [np.array(a) for a in ([5, 1, 1], [0, 7, 9], [0, 1, 3])]
    typed = StepBatch(*(a.astype(kind) for a in arrays))
    np.testing.assert_array_equal(plan.step_us(typed), plan.step_us(StepBatch(*arrays)))


@pytest.mark.loops
def test_arrays_that_are_not_contiguous_are_read_right(plan):
    wide = np.arange(1, 31)
    np.testing.assert_array_equal(
        plan.decode_us(wide[::3], wide[::-3]), plan.decode_us(list(range(1, 31, 3)), list(range(30, 0, -3)))
    )
    strided = StepBatch(np.array([5, 0, 1, 0])[::2], np.array([0, -1, 7, -1])[::2], np.array([0, 9, 2])[::2])
    assert plan.step_us(strided)[0] == plan.step_us(StepBatch.from_requests([[(5, 0), (1, 7)]]))[0]


def test_an_error_leaves_nothing_behind(plan):
    with pytest.raises(FastroofError):
        plan.decode_us([1, 0], 64)
    assert plan.decode_us(1, 64) == plan.decode_us(1, 64)
