"""What a lookup refuses, by name, before any loop runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastroof.columns import ORIGIN_BORROWED
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.tables.lookup import checked_points

QUERIES: dict[str, dict[str, Any]] = {
    "gemm": {"m": 64, "n": 4096, "k": 4096},
    "attention_decode": {
        "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "batch_size": 4, "kv_len": 4096,
    },
    "attention_prefill": {
        "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "q_len": 512, "kv_len": 512, "batch_size": 2,
    },
    "allreduce": {"num_gpus": 2, "message_bytes": 4096},
    "moe": {
        "num_tokens": 64, "hidden": 2048, "intermediate": 512, "topk": 8, "num_experts": 256,
        "moe_tp": 1, "moe_ep": 1,
    },
}  # fmt: skip
SIZES = [(operator, name) for operator, query in QUERIES.items() for name in query]
TEXTS = [
    ("gemm", "dtype"), ("attention_decode", "kv_dtype"), ("attention_prefill", "kv_dtype"),
    ("allreduce", "dtype"), ("allreduce", "mode"), ("moe", "dtype"), ("moe", "distribution"),
]  # fmt: skip
METHODS = ("roofline", "linear_mfu", "nearest", "floor")


NO_SIZES = [
    1.5, float("nan"), float("inf"), -float("inf"), 0, -1, -(2**63), 2**41, 2**63 - 1, 2**64 - 1, 2**70,
    True, False, None, "64", b"64", 1j, [1, 0], [1, -5], [1.0, float("nan")], [True, False], ["a"],
    np.uint64(2**63), np.float32("nan"), np.datetime64(1, "s"),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "name"), SIZES)
def test_invalid_sizes_are_refused_by_name(h100, operator, name):
    for bad in NO_SIZES:
        with pytest.raises(LookupInputError, match=rf"\b{name}\b"):
            h100.lookup(operator, **{**QUERIES[operator], name: bad})


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("n", 16_777_216), ("k", 16_777_216), ("batch_size", 16_777_216), ("num_gpus", 65_536),
        ("num_q_heads", 65_536), ("num_kv_heads", 65_536), ("head_dim", 65_536),
        ("message_bytes", 1_099_511_627_775), ("m", 268_435_456), ("kv_len", 268_435_456),
    ],
)  # fmt: skip
def test_the_largest_size_is_taken_and_one_more_is_refused(name, largest):
    assert checked_points({name: largest}).whole == {name: largest}
    ((_, _, sizes),) = checked_points({name: [1, largest]}).chunks([])
    assert sizes[name].tolist() == [1.0, largest]
    with pytest.raises(LookupInputError, match=f"{name} must be at most {largest}, got {largest + 1}"):
        checked_points({name: largest + 1})
    with pytest.raises(LookupInputError, match=f"{name} must be at most {largest}, got {largest + 1}"):
        list(checked_points({name: [1, largest + 1]}).chunks([]))


@pytest.mark.parametrize("operator", QUERIES)
@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint16, np.uint64])
def test_every_integer_type_is_the_same_size(h100, operator, kind):
    small = {"gemm": {"m": 64, "n": 96, "k": 64}}.get(operator, QUERIES[operator])
    typed = {
        name: kind(size) if size <= np.iinfo(kind).max and size <= 127 else size
        for name, size in small.items()
    }
    assert h100.lookup(operator, **typed).latency_us == h100.lookup(operator, **small).latency_us


@pytest.mark.parametrize("operator", QUERIES)
@pytest.mark.parametrize("method", METHODS)
def test_empty_lookups_are_valid(h100, operator, method):
    query = QUERIES[operator]
    for name in query:
        for empty in ([], np.zeros(0, np.int32), np.zeros((3, 0), np.int64)):
            got = h100.lookup(operator, method=method, **{**query, name: empty})
            assert got.latency_us.shape == got.mfu.shape == got.origin.shape == np.shape(empty)
            assert (got.latency_us.dtype, got.mfu.dtype, got.origin.dtype) == (float, float, np.uint8)


@pytest.mark.parametrize("operator", QUERIES)
def test_shapes_that_do_not_broadcast_are_named(h100, operator):
    first, second = list(QUERIES[operator])[:2]
    with pytest.raises(LookupInputError, match=rf"{first} \(2,\).*{second} \(3,\)"):
        h100.lookup(operator, **{**QUERIES[operator], first: [8, 8], second: [8, 8, 8]})


def test_nested_lists_of_unequal_lengths_are_refused_by_name(h100):
    with pytest.raises(LookupInputError, match=r"\bm\b"):
        h100.lookup("gemm", m=[[1], [1, 2]], n=64, k=64)


@pytest.mark.parametrize(("operator", "name"), TEXTS)
@pytest.mark.parametrize("bad", [None, 16, ["bf16"], np.array(["bf16"]), b"bf16"], ids=repr)
def test_invalid_names_are_refused(h100, operator, name, bad):
    with pytest.raises(LookupInputError, match=rf"\b{name}\b"):
        h100.lookup(operator, **QUERIES[operator], **{name: bad})


@pytest.mark.parametrize(("operator", "name"), TEXTS)
def test_an_unmeasured_name_has_suggestions(h100, operator, name):
    with pytest.raises(MissingTableError, match=r"(?s)int3.*measured"):
        h100.lookup(operator, **QUERIES[operator], **{name: "int3"})


def test_an_unmeasured_key_lists_the_nearest(h100):
    with pytest.raises(MissingTableError, match=r"num_gpus=3.*closest: .*num_gpus=") as error:
        h100.lookup("allreduce", num_gpus=3, message_bytes=4096)
    assert "mode=graph" in str(error.value).split("closest:")[1].split(";")[0]
    sent = {"library": "deepep_ll", "phase": "dispatch", "num_experts": 256, "num_gpus": 8, "num_tokens": 64}
    with pytest.raises(MissingTableError, match=r"topk=7.*closest: .*hidden=7168 topk=8 num_experts=256"):
        h100.lookup("expert_dispatch", hidden=7168, topk=7, **sent)


def test_experts_of_an_unmeasured_shape_are_borrowed(h100):
    borrowed = h100.lookup("moe", **{**QUERIES["moe"], "topk": 7})
    assert set(np.ravel(borrowed.origin).tolist()) == {ORIGIN_BORROWED}


def test_an_allreduce_of_one_gpu_is_refused(h100):
    with pytest.raises(LookupInputError, match="num_gpus"):
        h100.lookup("allreduce", num_gpus=1, message_bytes=4096)


def test_an_operator_without_a_table_names_available_ones(h100):
    for operator in ("elementwise", "conv", ""):
        with pytest.raises(LookupInputError, match=r"^unknown operator .*fastroof lookup --help"):
            h100.lookup(operator, m=1)
    with pytest.raises(LookupInputError, match="roofline, linear_mfu, nearest, floor"):
        h100.lookup("gemm", **QUERIES["gemm"], method="cubic")


@pytest.mark.parametrize("operator", QUERIES)
def test_arguments_missing_or_unknown_are_named(h100, operator):
    query = dict(QUERIES[operator])
    with pytest.raises(LookupInputError, match=r"does not take colour"):
        h100.lookup(operator, **query, colour=1)
    first = next(iter(query))
    del query[first]
    with pytest.raises(LookupInputError, match=rf"needs {first}\b"):
        h100.lookup(operator, **query)


def test_kv_len_counts_the_new_tokens_too(h100):
    query = {**QUERIES["attention_prefill"], "q_len": [16, 512], "kv_len": [16, 511]}
    with pytest.raises(LookupInputError, match=r"kv_len 511 .*q_len 512"):
        h100.lookup("attention_prefill", **query)


@pytest.mark.parametrize("method", METHODS)
def test_the_largest_allowed_sizes_have_finite_answers(h100, method):
    largest = {"m": 2**28, "n": 2**24, "k": 2**24}
    assert np.isfinite(h100.lookup("gemm", method=method, **largest).latency_us)
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    at = {"batch_size": 2**24, "kv_len": 2**28}
    assert np.isfinite(h100.lookup("attention_decode", method=method, **heads, **at).latency_us)
    for q_len in (1, 2**28):
        got = h100.lookup("attention_prefill", method=method, **heads, **at, q_len=q_len)
        assert np.isfinite(got.latency_us)
        assert got.latency_us > 0
    got = h100.lookup("allreduce", method=method, num_gpus=8, message_bytes=2**40 - 1)
    assert np.isfinite(got.latency_us)
    assert np.isfinite(
        h100.lookup("moe", method=method, **{**QUERIES["moe"], "num_tokens": 2**28}).latency_us
    )


@pytest.mark.parametrize("operator", [["gemm"], {"gemm": 1}], ids=repr)
def test_an_invalid_operator_name_is_refused(h100, operator):
    with pytest.raises(LookupInputError, match="operator"):
        h100.lookup(operator, m=1, n=1, k=1)
