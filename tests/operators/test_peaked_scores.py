"""Blocks over a model's scores: rows less the top-k of equal scores, with that of a model's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastroof.operators.compressed_attention import peaked_table
from fastroof.operators.registry import OPERATORS
from tests.reference.handmade import handmade_tables

KEY = ("fp8_block", "fp8", "bf16", "deepseek-v4-flash", 16)
BLOCK: Any = OPERATORS["csa_decode"]


def table(rows: list[Any], parts: list[Any]) -> Any:
    tables = handmade_tables(csa_decode=rows, sparse_part=parts)
    return peaked_table(tables, BLOCK, KEY, "topk_v2", "deepseek-v4-flash", 4, 512)


def top_k(scores: str, batch: int, kv_len: int, us: float, heads: int = 64, part: str = "topk_v2") -> Any:
    return (part, "deepseek-v4-flash", scores, 4, heads, batch, 1, kv_len, us)


def latency(packed: Any, batch: Any, kv_len: Any) -> Any:
    out, origin = np.empty(len(batch)), np.zeros(len(batch), np.uint8)
    packed.latency((np.asarray(batch, float), np.asarray(kv_len, float)), out, origin)
    return out


def test_rows_that_pick_lose_the_difference_of_both_top_ks():
    """The H100's own: 164 us at 4096 tokens are 85 with a model's scores; at 2048 all are picked."""
    rows = [(*KEY, 1, kv, us) for kv, us in ((2048, 84.0), (2051, 84.5), (4096, 164.0), (131072, 93.0))]
    parts = [top_k("flat", 1, kv, us) for kv, us in ((4096, 81.4), (131072, 9.9))]
    parts += [top_k("top_last", 1, kv, us) for kv, us in ((4096, 2.7), (131072, 9.5))]
    found = latency(table(rows, parts), [1] * 4, [2048, 2051, 4096, 131072])
    assert found.tolist() == pytest.approx([84.0, 84.5, 164.0 - 81.4 + 2.7, 93.0 - 9.9 + 9.5])


def test_beyond_a_row_the_corrected_block_is_held():
    """No row of batch 512 picks: no correction is extrapolated from it."""
    rows = [(*KEY, 256, 2048, 211.0), (*KEY, 256, 4096, 380.0), (*KEY, 512, 2048, 379.0)]
    parts = [top_k("flat", 256, 4096, 160.0), top_k("top_last", 256, 4096, 3.8)]
    packed = table(rows, parts)
    assert latency(packed, [256], [4096]).tolist() == pytest.approx([223.8])
    (beyond,) = latency(packed, [512], [4096])
    assert 379.0 < beyond < 500.0


def test_another_kernels_top_k_corrects_nothing():
    rows = [(*KEY, 1, 4096, 164.0)]
    both = [top_k("flat", 1, 4096, 81.0, part="topk_v1"), top_k("top_last", 1, 4096, 3.0, part="topk_v1")]
    assert latency(table(rows, both), [1], [4096]).tolist() == [164.0]
    assert latency(table(rows, [top_k("flat", 1, 4096, 81.0)]), [1], [4096]).tolist() == [164.0]
    tables = handmade_tables(csa_decode=rows)
    packed = peaked_table(tables, BLOCK, KEY, "topk_v2", "deepseek-v4-flash", 4, 512)
    assert packed is tables.packed(BLOCK, KEY)
