"""What is taken for numbers, and what is not: one rule wherever sizes come in."""

import warnings
from array import array
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest

import fastroof
from fastroof.backends.serve.answers import ServedPlans, answer_text
from fastroof.given_arrays import number_array

TABLES = fastroof.load_tables("h100")
PLAN = fastroof.compile_plan(
    "llama-3.1-8b", "h100", TABLES, max_num_batched_tokens=8192, max_num_seqs=1024, engine="kernels"
)
WINDOWED = fastroof.compile_plan(
    "gemma-3-12b", "h100", TABLES, max_num_batched_tokens=8192, max_num_seqs=1024, engine="kernels"
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    DATASHEET = fastroof.compile_plan(
        "llama-3.1-8b", "h100", None, max_num_batched_tokens=8192, max_num_seqs=1024, engine="kernels"
    )

NO_NUMBERS = {
    "a bool": True,
    "false": False,
    "a list of bools": [True, True],
    "a bool among numbers": [4, True],
    "a bool deep among numbers": [[4, 5], [4, True]],
    "NumPy's bool": np.True_,
    "NumPy's bool among numbers": [4, np.True_],
    "an array of bools": np.array([True, True]),
    "bytes": b"\x04\x05",
    "a bytearray": bytearray(b"\x04\x05"),
    "memory of bytes": memoryview(b"\x04\x05"),
    "bytes in a list": [b"4", b"5"],
    "text": "4",
    "texts": ["4", "5"],
    "a masked array": np.ma.array([4, 5], mask=[False, True]),
    "a masked array without a mask": np.ma.array([4, 5]),
    "masked arrays in a list": [np.ma.array([4, 5], mask=[False, True])],
    "what is masked": np.ma.masked,
    "a masked array without axes": np.ma.array(4, mask=True),
    "a duration": np.timedelta64(4),
    "nothing": None,
    "nothing among numbers": [4, None],
    "objects": np.array([4, 5], object),
    "an integer of 5,001 digits": 10**5000,
    "an integer of 5,001 digits in a list": [4, 10**5000],
    "fractions": Fraction(4),
    "times": np.array([4, 5], "m8[s]"),
    "dates": np.array([4, 5], "M8[s]"),
    "records": np.zeros(2, [("a", np.int64)]),
    "complex numbers": np.array([4, 5], complex),
    "ragged lists": [[4], [4, 5]],
    "nan": float("nan"),
}

ENTRIES = {
    "decode_us batch_size": lambda v: PLAN.decode_us(v, 9),
    "decode_us kv_len": lambda v: PLAN.decode_us(1, v),
    "prefill_us new_tokens": lambda v: PLAN.prefill_us(v),
    "prefill_us context_len": lambda v: PLAN.prefill_us(5, v),
    "prefill_us batch_size": lambda v: PLAN.prefill_us(5, 0, v),
    "verify_us": lambda v: PLAN.verify_us(v, 99, 2),
    "verify_us tokens": lambda v: PLAN.verify_us(2, 99, v),
    "decode_error batch_size": lambda v: PLAN.decode_error(v, 9),
    "decode_error kv_len": lambda v: PLAN.decode_error(1, v),
    "scalar batch_size": lambda v: PLAN.scalar(v, 9),
    "scalar kv_len": lambda v: PLAN.scalar(1, v),
    "step_scalar new_tokens": lambda v: PLAN.step_scalar(v, [1, 2]),
    "step_scalar context_len": lambda v: PLAN.step_scalar([1, 2], v),
    "step_scalar context_len of an array": lambda v: PLAN.step_scalar(np.array([1, 2]), v),
    "step_scalar new_tokens in a list": lambda v: PLAN.step_scalar([1, v], [1, 2]),
    "step_scalar context_len in a list": lambda v: PLAN.step_scalar([1, 2], [1, v]),
    "step_scalar in a window": lambda v: WINDOWED.step_scalar([1, 2], [1, v]),
    "StepBatch new_tokens": lambda v: fastroof.StepBatch(v, [1, 2], [0, 2]),
    "StepBatch context_len": lambda v: fastroof.StepBatch([1, 2], v, [0, 2]),
    "StepBatch offsets": lambda v: fastroof.StepBatch([1, 2], [1, 2], v),
    "from_requests new_tokens": lambda v: fastroof.StepBatch.from_requests([[(1, 5)], [(v, 9)]]),
    "from_requests context_len": lambda v: fastroof.StepBatch.from_requests([[(1, 5), (1, v)]]),
    "explain": lambda v: PLAN.explain([(v, 9)]),
    "explain_verification": lambda v: PLAN.explain_verification(v, 9, 2),
    "lookup": lambda v: TABLES.lookup("gemm", m=v, n=6144, k=4096),
    "lookup of a kernel": lambda v: TABLES.lookup(
        "attention_decode", num_q_heads=v, num_kv_heads=8, head_dim=128, batch_size=8, kv_len=99
    ),
    "kv_bytes": lambda v: PLAN.memory.kv_bytes(v),
    "max_sequences": lambda v: PLAN.memory.max_sequences(v),
    "threads": lambda v: PLAN.decode_us(np.array([1, 2]), 9, threads=v),
    "max_num_batched_tokens": lambda v: fastroof.compile_plan(
        "llama-3.1-8b", "h100", TABLES, max_num_batched_tokens=v, engine="kernels"
    ),
    "a trace's tokens": lambda v: fastroof.load_trace(
        {"arrival_s": [0, 1], "input_tokens": v, "output_tokens": [4, 5]}
    ),
    "a trace's arrivals": lambda v: fastroof.load_trace(
        {"arrival_s": v, "input_tokens": [4, 5], "output_tokens": [4, 5]}
    ),
}

TAKEN = {("a trace's tokens", "objects"), ("a trace's arrivals", "objects"), ("a trace's arrivals", "dates")}
"""Arrow has types of its own for columns of Python's integers and dates; text of arrivals is a trace's."""
TAKEN |= {("a trace's arrivals", "texts"), ("threads", "an integer of 5,001 digits")}
# max_num_batched_tokens=None is as many as the engine takes by default
TAKEN |= {("max_num_batched_tokens", "nothing")}


@pytest.mark.parametrize("entry", ENTRIES)
def test_everything_but_numbers_is_refused_as_input(entry):
    taken = set()
    for what, given in NO_NUMBERS.items():
        with suppress(fastroof.FastroofError):
            ENTRIES[entry](given)
            taken.add((entry, what))
    assert taken == {one for one in TAKEN if one[0] == entry}


MESSAGES = (
    b'{"batch_size": true, "kv_len": 9}',
    b'{"batch_size": [4, true], "kv_len": 9}',
    b'{"batch_size": 4, "kv_len": [9, false]}',
    b'{"new_tokens": [4, true], "context_len": [0, 0], "offsets": [0, 2]}',
    b'{"new_tokens": [4, 4], "context_len": [0, false], "offsets": [0, 2]}',
    b'{"new_tokens": [4, 4], "context_len": [0, 0], "offsets": [false, 2]}',
    b'{"requests": [[[4, 0], [true, 9]]]}',
    b'{"requests": [[[4, false]]]}',
    b'{"explain": [[true, 9]]}',
    b'{"batch_size": [4, true], "kv_len": 9, "tokens": 2}',
    b'{"batch_size": [4, true], "kv_len": 9, "errors": true}',
    b'{"batch_size": "4", "kv_len": 9}',
    b'{"batch_size": ' + b"9" * 4000 + b', "kv_len": 9}',
    b'{"batch_size": ' + b"9" * 5000 + b', "kv_len": 9}',
    b'{"batch_size": [' + b"9" * 4000 + b'], "kv_len": 9}',
)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_json_keep_the_rule(message):
    _, reply, error = answer_text(ServedPlans({"small": PLAN}), message)
    assert reply["error"] in ("BatchError", "BackendError"), reply
    assert isinstance(error, fastroof.FastroofError)


# The caller's type changes no answer

KINDS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i8", "<u8")

ANSWERS = {
    "decode_us": lambda p, v: p.decode_us(v, v + v),
    "prefill_us": lambda p, v: p.prefill_us(v, v, v),
    "verify_us": lambda p, v: p.verify_us(v, v + v, v),
    "decode_error": lambda p, v: p.decode_error(v, v + v),
    "decode_error of one": lambda p, v: p.decode_error(v[-1], v[-1]),
    "step_error": lambda p, v: p.step_error(_batch(v)),
    "run": lambda p, v: p.run(_batch(v), with_error=True).relative_error,
    "step_us": lambda p, v: p.step_us(_batch(v)),
    "step_scalar": lambda p, v: p.step_scalar(v, v),
    "step_scalar of lists": lambda p, v: p.step_scalar(list(v), list(v)),
    "scalar": lambda p, v: p.scalar(v[-1], v[-1]),
    "pipeline_us": lambda p, v: p.pipeline_us(_batch(v)),
    "cycle_us": lambda p, v: p.cycle_us(_batch(v)),
    "stage_times_us": lambda p, v: p.stage_times_us(_batch(v)),
    "explain": lambda p, v: p.explain([(n, n) for n in v]).total_us,
    "explain_verification": lambda p, v: p.explain_verification(v[-1], v[-1], v[1]).total_us,
    "kv_bytes": lambda p, v: p.memory.kv_bytes(v),
    "max_sequences": lambda p, v: p.memory.max_sequences(v),
    "lookup": lambda p, v: TABLES.lookup("gemm", m=v, n=v, k=v[-1], with_error=True).relative_error,
    "lookup of kernels": lambda p, v: (
        TABLES.lookup(
            "attention_decode", num_q_heads=32, num_kv_heads=8, head_dim=128, batch_size=v, kv_len=v
        ).latency_us
    ),
}


def _batch(sizes):
    return fastroof.StepBatch(sizes, sizes, np.array([0, 1, 3], sizes.dtype))


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("plan", [PLAN, WINDOWED, DATASHEET], ids=["tables", "windows", "datasheet"])
def test_the_caller_s_type_changes_no_answer(plan, answer):
    sizes = np.array([1, 2, 60])
    expected = ANSWERS[answer](plan, sizes)
    for kind in KINDS:
        assert np.array_equal(ANSWERS[answer](plan, sizes.astype(kind)), expected), kind


@pytest.mark.parametrize("sizes", [(64, 127), (1000, 8000)])
def test_sizes_near_the_end_of_a_narrow_type_have_errors_too(sizes):
    kind = np.int8 if max(sizes) < 128 else np.int16
    narrow = np.array(sizes, kind)
    batch = np.minimum(narrow, kind(100))
    assert np.array_equal(
        PLAN.decode_error(batch, narrow), PLAN.decode_error(batch.astype(int), narrow.astype(int))
    )


def test_numbers_of_every_kind_are_taken_as_they_are():
    for given in (
        4,
        [4, 5],
        (4, 5),
        [[4], [5]],
        np.int8(4),
        np.array(4),
        array("q", [4, 5]),
        range(3),
        [4, np.int8(5)],
    ):
        assert np.array_equal(number_array(given), np.asarray(given))
    given = np.arange(6, dtype=">i2")[::2]
    assert number_array(given) is given
    assert number_array(memoryview(given)).tolist() == given.tolist()
    assert number_array(memoryview(bytes(16)).cast("q")).tolist() == [0, 0]  # they were declared as integers
    assert number_array([]).shape == (0,)
    assert number_array([4, 0.5]).dtype == np.float64
    endless: list = []
    endless.append(endless)
    assert number_array(endless) is None


def test_a_list_that_shrinks_while_it_is_read_does_no_harm():
    sizes: list = []

    class Shrinking:
        def __index__(self) -> int:
            sizes.clear()
            return 4

    sizes += [Shrinking(), *range(1, 600)]
    with pytest.raises(fastroof.FastroofError):
        PLAN.step_scalar(sizes, list(range(600)))


@pytest.mark.parametrize("entry", ["decode_us batch_size", "StepBatch new_tokens", "lookup", "kv_bytes"])
@pytest.mark.parametrize("what", ["a masked array", "a masked array without a mask"])
def test_a_masked_array_is_refused_for_its_mask(entry, what):
    with pytest.raises(fastroof.FastroofError, match="and masked entries are not numbers, got masked_array"):
        ENTRIES[entry](NO_NUMBERS[what])
