"""Lookups in random InferSim tables, unsorted and repeated rows included, against the plain reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.compat import infersim
from fastroof.compiled import compat_infersim as loops
from fastroof.errors import MissingTableError
from tests.reference import infersim as reference

pytestmark = pytest.mark.loops

SMALL = st.integers(1, 12)
MFU = st.integers(0, 1000).map(lambda milli: milli / 1000)


def _files(rows_by_path):
    return {
        path: "\n".join(["a,header", *(",".join(map(str, row)) for row in rows)])
        for path, rows in rows_by_path.items()
    }


def _both(rows_by_path):
    """Tables and the reference's tree of the same files."""
    files = _files(rows_by_path)
    tree = reference.Tree(Path("nowhere"))
    tree.split = {path: [line.split(",") for line in text.splitlines()[1:]] for path, text in files.items()}
    return infersim.read_files(files), tree


def _rows(*cells, **size):
    return st.lists(st.tuples(*cells), **size)


@given(
    rows=_rows(SMALL, SMALL, SMALL, st.just(9.9), MFU, min_size=1, max_size=30),
    other=_rows(SMALL, SMALL, SMALL, st.just(9.9), MFU, max_size=5),
    queries=st.lists(st.tuples(SMALL, SMALL, SMALL), min_size=1, max_size=20),
)
def test_gemm(rows, other, queries):
    tables, tree = _both({"gemm/h20/data.csv": rows, "gemm/h800/data.csv": other})
    m, k, n = np.array(queries).T
    for device in ("H20", "H800"):
        expected = [reference.gemm_mfu(tree, device, *query) for query in queries]
        assert infersim.gemm_mfu(tables, device, m, k, n).tolist() == expected


def test_gemm_shapes_from_31623_on_are_too_far():
    tables, tree = _both({"gemm/h20/data.csv": [(1, 40_000, 7, 9.9, 0.5)]})
    for k in (8376, 8377, 8378, 39_999):
        assert infersim.gemm_mfu(tables, "h20", 1, k, 7) == reference.gemm_mfu(tree, "H20", 1, k, 7)
    assert infersim.gemm_mfu(tables, "h20", 1, [8377, 8378], 7).tolist() == [0.6, 0.5]


@given(
    rows=_rows(
        st.just("bf16"),
        st.sampled_from(["bf16", "fp8", "int8"]),
        SMALL,
        SMALL,
        st.just(9.9),
        MFU,
        max_size=20,
    ),
    queries=st.lists(st.tuples(SMALL, SMALL, st.booleans(), st.sampled_from([1, 2, 3])), max_size=20),
    mla=st.booleans(),
)
def test_decode_attention(rows, queries, mla):
    kind = "mla" if mla else "mha"
    tables, tree = _both({f"{kind}/decode/h20/4-2-128.csv": rows})
    names = ("kv_lora_rank", "qk_rope_head_dim") if mla else ("num_kv_heads", "head_dim")
    for batch, kv_len, fp8_kv, tp in queries:
        heads = {"num_heads": 4 * tp, names[0]: 2 if mla else 2 * tp, names[1]: 128, "tp_size": tp}

        def found(batch=batch, kv_len=kv_len, fp8_kv=fp8_kv, heads=heads):
            return infersim.attn_decode_mfu(
                tables, "H20", **heads, batch_size=batch, kv_len=kv_len, fp8_kv=fp8_kv
            )

        try:
            expected = reference.attn_decode_mfu(tree, "H20", kind, (4, 2, 128), batch, kv_len, fp8_kv)
        except reference.Raised:
            with pytest.raises(MissingTableError, match="no rows of kv_dtype"):
                found()
        else:
            assert found() == expected


@given(
    rows=_rows(st.just("bf16"), SMALL, st.just(9.9), MFU, max_size=10),
    seq_len=st.lists(SMALL, min_size=1, max_size=10),
)
def test_prefill_attention(rows, seq_len):
    tables, tree = _both({"mha/prefill/h20/4-2-128.csv": rows, "gemm/h20/data.csv": []})
    heads = {"num_kv_heads": 2, "head_dim": 128}
    expected = [reference.attn_prefill_mfu(tree, "H20", "mha", (4, 2, 128), s) for s in seq_len]
    found = infersim.attn_prefill_mfu(tables, "H20", num_heads=4, **heads, seq_len=seq_len)
    if rows:
        assert found.tolist() == expected
    assert infersim.attn_prefill_mfu(tables, "H20", num_heads=8, **heads, seq_len=1) == 0.9


LAYERS = [(8, 2, 4, 2, 64, 32), (8, 4, 2, 2, 64, 32), (16, 2, 8, 2, 64, 32)]


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(LAYERS[:2]), SMALL, MFU, MFU).map(
            lambda r: (*r[0], r[1], 9, 9.9, r[2], 9.9, r[3])
        ),
        min_size=1,
        max_size=20,
    ),
    queries=st.lists(st.tuples(st.sampled_from(LAYERS), SMALL), min_size=1, max_size=20),
    phase=st.sampled_from(["prefill", "decode"]),
)
def test_grouped_gemm(rows, queries, phase):
    tables, tree = _both({f"grouped_gemm/{phase}/h20/data.csv": rows})
    experts, gpus, _, topk, hidden, intermediate = np.array([layer for layer, _ in queries]).T
    up, down = infersim.grouped_gemm_mfu(
        tables, "H20", phase, num_experts=experts, num_gpus=gpus, topk=topk, hidden=hidden,
        intermediate=intermediate, tokens_per_gpu=[tokens for _, tokens in queries],
    )  # fmt: skip
    expected = [reference.grouped_gemm_mfu(tree, "H20", phase, *query) for query in queries]
    assert list(zip(up.tolist(), down.tolist(), strict=True)) == expected


@given(
    rows=_rows(SMALL, st.integers(1, 999), st.integers(1, 999), min_size=1, max_size=10),
    tokens=st.lists(st.integers(1, 99), min_size=1, max_size=10),
)
def test_gated_delta_net(rows, tokens):
    tables, tree = _both({"gdn/decode/h20/4-1-2-3-5.csv": rows})
    layer = {
        "conv_kernel": 4,
        "num_key_heads": 1,
        "key_head_dim": 2,
        "num_value_heads": 3,
        "value_head_dim": 5,
    }
    found = infersim.gdn_latency_us(tables, "H20", "decode", **layer, tokens=tokens)
    expected = [reference.gdn_latency_us(tree, "H20", "decode", (4, 1, 2, 3, 5), t) for t in tokens]
    assert found.tolist() == expected


INT = st.integers(-(2**62), 2**62)


@given(
    starts=st.lists(INT, min_size=4, max_size=4),
    key=st.lists(st.integers(0, 2), min_size=9, max_size=9),
    query=st.lists(INT | st.integers(0, 2), min_size=3, max_size=3),
    at=st.integers(0, 9),
)
def test_the_loops_answer_with_a_row_of_the_table_or_a_code(starts, key, query, at):
    """Whatever the blocks hold, no row outside the table is read or answered."""
    axes = np.array([[4, 2, 9]])
    arguments = (np.array(key).reshape(3, 3), np.array(starts), axes, np.array([query]).T, np.array([[at]]))
    for loop in (loops.nearest_row, loops.floor_row, loops.ceiling_shape_row):
        row = np.full(1, 99)
        loop(*arguments, row)
        assert row[0] in (loops.NO_KEY, loops.EMPTY_BLOCK, loops.UNDER_FIRST_ROW, 0, 1, 2)


def test_equal_neighbours_share_their_search():
    """A query with its neighbour's key gets what it gets alone."""
    tables, _ = _both({"gemm/h20/data.csv": [(m, k, 4, 9.9, m * k / 100) for k in (4, 8) for m in (1, 2)]})
    m, k = [2, 1, 2, 2], [4, 4, 4, 5]
    singles = [infersim.gemm_mfu(tables, "h20", *query, 4) for query in zip(m, k, strict=True)]
    assert infersim.gemm_mfu(tables, "h20", m, k, 4).tolist() == singles == [0.08, 0.04, 0.08, 0.16]


def test_a_key_is_searched_again_if_its_first_number_differs():
    """Even if that number of the query before equals the others."""
    keys = np.array([[4, 4, 4], [7, 4, 4]])
    row = np.full(3, 99)
    query = np.array([[4, 7, 4], [4, 4, 4], [4, 4, 4]])
    loops.ceiling_shape_row(keys, np.array([0, 1, 2]), np.array([[1, 1]]), query, np.array([[1, 1, 1]]), row)
    assert row.tolist() == [0, 1, 0]
