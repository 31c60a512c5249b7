"""Arrays of every kind at the edge: the same answers, and no new compilation of a loop."""

from __future__ import annotations

import array
import ctypes
import itertools

import numpy as np
import pyarrow as pa
import pytest

from fastroof import StepBatch, compile_plan
from fastroof.compiled import decode_lines, ragged_steps, steps
from fastroof.errors import BatchError, FastroofError
from fastroof.run import evaluate
from fastroof.run.batch import CHUNK, as_loops_read, chunks, loop_array

COUNT = 1000


@pytest.fixture(scope="module")
def plan(h100):
    return compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=2048, engine="kernels")


@pytest.fixture(scope="module")
def sizes():
    rng = np.random.default_rng(0)
    return rng.integers(1, 500, COUNT), rng.integers(1, 30_000, COUNT)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def strided(array):
    return np.repeat(array, 3)[::3]


def backwards(array):
    return array[::-1].copy()[::-1]


def misaligned(array):
    raw = np.empty(array.nbytes + 1, np.uint8)[1:]
    view = raw.view(array.dtype)
    view[:] = array
    assert not view.flags.aligned
    return view


def arrow(array):
    return pa.array(array)


FORMS = [
    *((lambda a, t=t: a.astype(t)) for t in ("i4", "i8", "u4", "u8", "u2", "i2", ">i4", ">i8")),
    read_only, strided, backwards, misaligned, arrow, list,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_any_kind_of_array_gives_the_same_times_from_the_loops_that_there_are(plan, sizes, form):
    batch, kv_len = sizes
    expected = plan.decode_us(batch, kv_len)
    plan.decode_us(batch.astype("i4"), kv_len.astype("i4"))
    loops = (decode_lines.decode_steps_us, steps.prefill_steps_us, ragged_steps.ragged_steps_us)
    plan.prefill_us(batch, kv_len)
    plan.prefill_us(batch.astype("i4"), kv_len.astype("i4"), batch.astype("i4") * 0 + 1)
    offsets = np.arange(COUNT + 1)
    plan.step_us(StepBatch(batch, kv_len, offsets))
    plan.step_us(StepBatch(batch.astype("i4"), kv_len.astype("i4"), offsets))
    compiled = [len(getattr(loop, "signatures", ())) for loop in loops]

    assert plan.decode_us(form(batch), form(kv_len)).tolist() == expected.tolist()
    assert plan.decode_us(form(batch), kv_len).tolist() == expected.tolist()
    prefill = plan.prefill_us(form(batch), form(kv_len))
    assert prefill.tolist() == plan.prefill_us(batch, kv_len).tolist()
    step = plan.step_us(StepBatch(form(batch), form(kv_len), form(offsets)))
    assert step.tolist() == prefill.tolist()
    assert [len(getattr(loop, "signatures", ())) for loop in loops] == compiled


def test_a_large_output_is_stored_past_the_caches_wherever_it_begins(plan, sizes, monkeypatch):
    expected = plan.decode_us(*sizes)
    loop, called = decode_lines.decode_steps_us, []

    def noted(*given):
        called.append((given[-1], len(given[-2])))
        return loop(*given)

    monkeypatch.setattr(decode_lines, "decode_steps_us", noted)
    monkeypatch.setattr(evaluate, "IS_STREAMED", True)
    monkeypatch.setattr(evaluate, "STREAMED_BYTES", COUNT * 8 - 1)
    raw = np.empty(COUNT + 16)
    first = -raw.ctypes.data // 8 % 8
    for lead in range(8):
        raw[:] = -1.0
        at = first + (8 - lead) % 8
        out = raw[at : at + COUNT]
        assert plan.decode_us(*sizes, out=out).tolist() == expected.tolist()
        assert called == [(None, lead), (True, COUNT - lead)]
        assert (raw[:at] == -1.0).all()
        assert (raw[at + COUNT :] == -1.0).all()
        called.clear()
    out = misaligned(np.zeros(COUNT))
    plan.decode_us(*sizes, out=out)
    assert out.tolist() == expected.tolist()
    for place in (0, 7, COUNT - 1):
        wrong = sizes[0].copy()
        wrong[place] = 0
        with pytest.raises(BatchError, match=f"batch_size must be at least 1, got 0 at position {place}"):
            plan.decode_us(wrong, sizes[1], out=raw[1 : 1 + COUNT])
    called.clear()
    monkeypatch.setattr(evaluate, "STREAMED_BYTES", COUNT * 8)
    plan.decode_us(*sizes)
    assert called == [(None, COUNT)]


def test_a_memory_mapped_file_is_read_in_place(plan, sizes, tmp_path):
    batch, kv_len = sizes
    np.save(tmp_path / "kv.npy", kv_len)
    mapped = np.load(tmp_path / "kv.npy", mmap_mode="r")
    assert plan.decode_us(batch, mapped).tolist() == plan.decode_us(batch, kv_len).tolist()
    view = loop_array(np.asarray(mapped))
    assert view.flags.writeable
    assert view.ctypes.data == mapped.ctypes.data


def test_broadcast_shapes_of_more_than_a_chunk(plan):
    batch, kv_len = np.arange(1, 301)[:, None], np.arange(1, 601, dtype=np.int32)
    assert batch.size * kv_len.size > 2 * CHUNK
    got = plan.decode_us(batch, kv_len)
    np.testing.assert_array_equal(got[7], plan.decode_us(8, kv_len))
    np.testing.assert_array_equal(got[:, 599], plan.decode_us(batch[:, 0], 600))
    np.testing.assert_array_equal(got, plan.decode_us(batch, kv_len, threads=3))
    with pytest.raises(BatchError, match=r"batch_size must be at least 1, got 0 at position 179400"):
        plan.decode_us(np.r_[batch[:-1, 0], 0][:, None], kv_len)


def test_chunks_cover_a_part_in_order():
    a, b = np.arange(10)[:, None], np.arange(3, dtype=np.uint8)
    seen = [(where, [c.copy() for c in columns]) for where, columns in chunks([a, b], slice(4, 29))]
    assert seen[0][0].start == 4
    assert seen[-1][0].stop == 29
    whole = np.concatenate([columns[0] * 3 + columns[1] for _, columns in seen])
    assert whole.tolist() == list(range(4, 29))
    assert list(chunks([a, b], slice(3, 3))) == []


def test_what_loops_read_in_place():
    a = np.arange(6)
    assert as_loops_read([a, a], (6,)) is not None
    for other in (a.astype("i4"), a[::2], a.reshape(2, 3).T, a.astype("u4")):
        assert as_loops_read([a, other], (6,)) is None
    assert as_loops_read([a.astype(">i8")] * 2, (6,)) is None


def test_out_must_be_apart_from_the_sizes(plan):
    kv_len = np.full(8, 100)
    with pytest.raises(BatchError, match="out must not share memory"):
        plan.decode_us(4, kv_len, out=kv_len.view(np.float64))


def test_the_scalar_function_is_the_array_function(plan, sizes):
    batch, kv_len = sizes
    times = plan.decode_us(batch, kv_len)
    assert [
        plan.scalar(b, kv) for b, kv in zip(batch.tolist(), kv_len.tolist(), strict=True)
    ] == times.tolist()
    assert [plan.scalar(b, kv) for b, kv in zip(batch, kv_len, strict=True)] == times.tolist()
    assert plan.decode_us(64, 4096) == plan.scalar(64, 4096) == plan.decode_us([64], [4096])[0]
    for wrong in ((0, 5), (5, 0), (-1, -1), (2**70, 1), (1, 2**62), (1.0, 5), ("1", 5), (None, 5), (2049, 5)):
        with pytest.raises(FastroofError) as by_array:
            plan.decode_us(np.array(wrong[0]), wrong[1])
        with pytest.raises(type(by_array.value)):
            plan.scalar(*wrong)
    with pytest.raises(TypeError):
        plan.scalar(5)
    assert plan.scalar([1, 2], 5).tolist() == plan.decode_us([1, 2], 5).tolist()


def test_the_scalar_function_outlives_its_plan(h100):
    import gc
    import weakref

    plan = compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=64, engine="kernels")
    scalar, expected = plan.scalar, plan.decode_us(8, 100)
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert scalar(8, 100) == expected
    del scalar
    gc.collect()
    assert gone() is None


def test_one_step_of_lists_is_the_step_of_the_batch(plan):
    rng = np.random.default_rng(3)
    for seqs in (0, 1, 5, 64):
        new = np.where(rng.random(seqs) < 0.2, rng.integers(1, 20, seqs), 1)
        context = rng.integers(0, 9000, seqs)
        expected = plan.step_us(StepBatch(new, context, [0, seqs]))[0]
        kinds = [
            np.ndarray.tolist,
            np.asarray,
            lambda a: tuple(a.tolist()),
            lambda a: a.astype("i4"),
            lambda a: a.astype(">i8"),
            lambda a: a.astype("u2"),
            lambda a: np.repeat(a, 2)[::2],
            lambda a: array.array("q", a.tolist()),
            lambda a: array.array("i", a.tolist()),
            lambda a: memoryview(array.array("q", a.tolist())),
            lambda a: (ctypes.c_int64 * len(a))(*a.tolist()),
        ]
        for kind, other in itertools.product(kinds, kinds):
            assert plan.step_scalar(kind(new), other(context)) == expected


def test_buffers_of_one_step_are_let_go(plan):
    new, context = array.array("q", [1, 1]), array.array("q", [5, 9])
    for _ in range(3):
        plan.step_scalar(new, context)
        for real in "df":
            with pytest.raises(FastroofError):
                plan.step_scalar(new, array.array(real, [1.0, 2.0]))
    # as wide as integers, and its zeros have the bits of theirs
    for whole, real in ("if", "qd"):
        with pytest.raises(FastroofError):
            plan.step_scalar(array.array(whole, [5, 7]), array.array(real, [0.0, 0.0]))
    new.append(1)  # an array whose buffer is held cannot grow
    context.append(7)
    assert plan.step_scalar(new, context) == plan.step_scalar([1] * 3, [5, 9, 7])


@pytest.mark.parametrize(
    ("new", "context"),
    [
        ([0], [1]),
        ([1], [-1]),
        ([1], [2**28]),
        ([1, 1], [5]),
        ([1.5], [1]),
        (5, 6),
        ([5000], [0]),
        ([2**70], [0]),
        (np.array([0]), np.array([1])),
        (np.array([1, 1]), np.array([5])),
        (np.array([[1]]), np.array([[5]])),
        (np.array([1.5]), np.array([1])),
        (np.int64(5), np.int64(6)),
        (b"ab", b"cd"),
        (np.array([1, 1]), [1, "x"]),
    ],
)
def test_one_invalid_step_is_refused_as_in_a_batch(plan, new, context):
    with pytest.raises(FastroofError):
        plan.step_scalar(new, context)


def test_one_step_takes_what_its_runtime_adds(h100):
    plan = compile_plan(
        "llama-3.1-8b", "h100", h100, engine="trtllm", max_num_batched_tokens=512, max_num_seqs=64
    )
    for step in ([(1, 500)] * 3, [(100, 0), (1, 7)]):
        new, context = ([part[i] for part in step] for i in (0, 1))
        assert plan.step_scalar(new, context) == plan.run(StepBatch.from_requests([step])).latency_us[0]
