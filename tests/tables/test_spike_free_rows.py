"""Isolated spikes are served from their neighbours: the value, the origin and the error show it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof.operators.registry import OPERATORS
from fastroof.tables.holdout import taking_part
from fastroof.uncertainty.leave_one_out import SPIKE
from tests.reference.handmade import handmade_tables

SLOW = 30.0


@dataclass(frozen=True)
class Made:
    """A smooth table of several kernels, and the point of one of them to slow down.

    ``along`` is where its neighbours are lowest, so that they make its latency.
    """

    operator: str
    columns: dict[str, tuple[Any, ...]]
    us: Callable[..., float]
    slow: dict[str, Any]
    along: str
    is_first_axis: bool = True

    def tables(self, *, slow: bool = True, without: bool = False, seed: int | None = None) -> fastroof.Tables:
        """The table with the slow row, with that row as smooth as the others, or without it."""
        names = [c.name for c in (*OPERATORS[self.operator].keys, *OPERATORS[self.operator].axes)]
        rows = []
        for values in itertools.product(*self.columns.values()):
            point = dict(zip(self.columns, values, strict=True))
            is_slow = point == self.slow
            us = self.us(**{n: v for n, v in point.items() if not isinstance(v, str)})
            if not (is_slow and without):
                point |= {"kv_len": point["q_len"]} if "q_len" in point else {}
                rows.append((*(point[n] for n in names), us * SLOW if is_slow and slow else us))
        if seed is not None:
            rows = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
        return handmade_tables(**{self.operator: rows})

    def point(self, **other: Any) -> dict[str, Any]:
        """Lookup arguments of the slow point, or of one next to it."""
        sizes = self.slow | other
        sizes |= {"kv_len": sizes["q_len"]} if "q_len" in sizes else {}
        return {n: sizes[n] for n in OPERATORS[self.operator].arguments}


GROUPED = {
    "kv_dtype": ("bf16",),
    "num_q_heads": (8, 16, 32),
    "num_kv_heads": (8,),
    "head_dim": (128,),
    "window": (0,),
}
HEADS = {"kv_dtype": "bf16", "num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128, "window": 0}
LATENT = {"kv_dtype": ("bf16", "fp8"), "num_q_heads": (8, 16, 32), "kv_lora_rank": (512,), "rope_dim": (64,)}
LATENT_HEADS = {"kv_dtype": "fp8", "num_q_heads": 16, "kv_lora_rank": 512, "rope_dim": 64}
EXPERTS = {
    "dtype": ("bf16", "fp8"), "hidden": (2048,), "intermediate": (768,), "topk": (2, 4, 8),
    "num_experts": (64,), "moe_tp": (1,), "moe_ep": (1,), "distribution": ("balanced", "power_law_1.2"),
}  # fmt: skip
SIZES = (1, 2, 4, 8, 16)
LENGTHS = (128, 256, 512, 1024, 2048)
GEMM = {"dtype": ("bf16", "fp8"), "m": (32, 64, 128, 256), "n": (1024, 2048, 4096), "k": (1024, 2048, 4096)}
CASES = {
    "gemm along m": Made(
        "gemm", GEMM, lambda m, n, k: 5 + m / 400 + n * k / 1e6,
        {"dtype": "bf16", "m": 64, "n": 2048, "k": 2048}, "m",
    ),
    "gemm along n": Made(
        "gemm", GEMM, lambda m, n, k: 5 + m * k / 1e4 + n / 1e4,
        {"dtype": "bf16", "m": 64, "n": 2048, "k": 2048}, "n", is_first_axis=False,
    ),
    "gemm along k": Made(
        "gemm", GEMM, lambda m, n, k: 5 + m * n / 1e4 + k / 1e4,
        {"dtype": "bf16", "m": 64, "n": 2048, "k": 2048}, "k", is_first_axis=False,
    ),
    "decode attention along kv_len": Made(
        "attention_decode", GROUPED | {"batch_size": SIZES, "kv_len": LENGTHS},
        lambda batch_size, kv_len, **_: 5 + 2 * batch_size + kv_len / 1e3,
        HEADS | {"batch_size": 4, "kv_len": 512}, "kv_len",
    ),
    "decode attention along batch": Made(
        "attention_decode", GROUPED | {"batch_size": SIZES, "kv_len": LENGTHS},
        lambda batch_size, kv_len, **_: 5 + batch_size / 10 + kv_len / 50,
        HEADS | {"batch_size": 4, "kv_len": 512}, "batch_size", is_first_axis=False,
    ),
    "prompts": Made(
        "attention_prefill", GROUPED | {"batch_size": SIZES, "q_len": LENGTHS},
        lambda batch_size, q_len, **_: 5 + 9 * batch_size + q_len**2 / 1e6,
        HEADS | {"batch_size": 4, "q_len": 512}, "q_len",
    ),
    "latent decodes along kv_len": Made(
        "mla_decode", LATENT | {"batch_size": SIZES, "kv_len": LENGTHS},
        lambda batch_size, kv_len, **_: 5 + 2 * batch_size + kv_len / 1e3,
        LATENT_HEADS | {"batch_size": 4, "kv_len": 512},
        "kv_len",
    ),
    "latent decodes along batch": Made(
        "mla_decode", LATENT | {"batch_size": SIZES, "kv_len": LENGTHS},
        lambda batch_size, kv_len, **_: 5 + batch_size / 10 + kv_len / 50,
        LATENT_HEADS | {"batch_size": 4, "kv_len": 512},
        "batch_size", is_first_axis=False,
    ),
    "experts": Made(
        "moe", EXPERTS | {"num_tokens": SIZES}, lambda num_tokens, topk, **_: 40 + topk + num_tokens,
        {"dtype": "bf16", "hidden": 2048, "intermediate": 768, "topk": 4, "num_experts": 64, "moe_tp": 1,
         "moe_ep": 1, "distribution": "balanced", "num_tokens": 4}, "num_tokens",
    ),
    "all-reduce": Made(
        "allreduce",
        {"num_gpus": (2, 4, 8), "dtype": ("bf16", "fp8"), "mode": ("eager", "graph"),
         "message_bytes": (1024, 4096, 16384, 65536)},
        lambda num_gpus, message_bytes: 4 + num_gpus / 10 + message_bytes / 1e5,
        {"num_gpus": 4, "dtype": "bf16", "mode": "graph", "message_bytes": 4096}, "message_bytes",
    ),
}  # fmt: skip

cases = pytest.mark.parametrize("made", CASES.values(), ids=CASES)


def sides(made: Made) -> tuple[int, int]:
    """The sizes before and after the slow one along its axis."""
    nodes = made.columns[made.along]
    at = nodes.index(made.slow[made.along])
    return nodes[at - 1], nodes[at + 1]


@cases
def test_a_spike_has_the_latency_that_its_neighbours_make(made):
    tables = made.tables()
    got = tables.lookup(made.operator, with_error=True, **made.point())
    low, high = (
        float(tables.lookup(made.operator, **made.point(**{made.along: x})).latency_us) for x in sides(made)
    )
    assert low < float(got.latency_us) < high
    assert int(got.origin) == 1
    if made.is_first_axis:
        # as if the row were not there: lookups go along this axis first
        law = made.tables(without=True).lookup(made.operator, **made.point())
        assert float(got.latency_us) == pytest.approx(float(law.latency_us), rel=1e-9)
    smooth = made.tables(slow=False).lookup(made.operator, with_error=True, **made.point())
    assert int(smooth.origin) == 0
    assert float(got.relative_error) ** 2 == pytest.approx(
        float(smooth.relative_error) ** 2 + SPIKE**2, rel=0.3
    )
    assert float(got.relative_error) >= SPIKE


@cases
def test_its_cells_are_served_from_them_too_and_no_other_row_changes(made):
    tables, smooth = made.tables(), made.tables(slow=False)
    for end in sides(made):
        between = (end + made.slow[made.along]) // 2
        got = tables.lookup(made.operator, with_error=True, **made.point(**{made.along: between}))
        near = smooth.lookup(made.operator, with_error=True, **made.point(**{made.along: between}))
        assert float(got.latency_us) == pytest.approx(float(near.latency_us), rel=0.1)
        assert int(got.origin) == 1
        assert float(got.relative_error) >= SPIKE
        other = tables.lookup(made.operator, with_error=True, **made.point(**{made.along: end}))
        measured = smooth.lookup(made.operator, with_error=True, **made.point(**{made.along: end}))
        assert (float(other.latency_us), int(other.origin)) == (float(measured.latency_us), 0)
        assert float(other.relative_error) < SPIKE
    rows = tables.spike_free_rows(tables.table(made.operator))
    assert rows.origin.sum() == 1
    as_measured = rows.latency_us == tables.table(made.operator).columns["latency_us"]
    assert as_measured.sum() == len(as_measured) - 1


@cases
def test_the_order_of_rows_does_not_matter(made):
    wanted = [made.point(), *(made.point(**{made.along: x}) for x in sides(made))]
    first = [made.tables().lookup(made.operator, with_error=True, **one) for one in wanted]
    for seed in range(3):
        tables = made.tables(seed=seed)
        for one, expected in zip(wanted, first, strict=True):
            got = tables.lookup(made.operator, with_error=True, **one)
            assert float(got.latency_us) == float(expected.latency_us)
            assert int(got.origin) == int(expected.origin)
            assert float(got.relative_error) == pytest.approx(float(expected.relative_error), rel=1e-12)


@cases
def test_hold_outs_neither_keep_nor_judge_it(made):
    table = made.tables().table(made.operator)
    assert taking_part(table, {}).sum() == table.num_rows - 1


@pytest.mark.parametrize("case", ["decode attention along batch", "latent decodes along kv_len", "experts"])
def test_the_first_point_of_a_line_is_held_from_the_second(case):
    made = CASES[case]
    made = replace(made, slow=made.slow | {made.along: made.columns[made.along][0]})
    tables, smooth = made.tables(), made.tables(slow=False)
    got = tables.lookup(made.operator, with_error=True, **made.point())
    expected = float(smooth.lookup(made.operator, **made.point()).latency_us)
    assert float(got.latency_us) == pytest.approx(expected, rel=0.1)
    assert int(got.origin) == 2
    assert float(got.relative_error) >= SPIKE


@pytest.fixture(scope="module")
def trtllm() -> fastroof.Tables:
    return fastroof.load_tables("h100", source="aiconfigurator-trtllm-1.3.0rc20")


def test_a_latent_decode_of_1425_us_between_50_and_129_is_not_served(trtllm):
    """TensorRT-LLM on H100, 32 heads, 16 sequences; it was 50, 737, 1425, 777 and 129 us."""
    kv_len = np.array([8192, 12288, 16384, 24576, 32768])
    heads = {"num_q_heads": 32, "kv_lora_rank": 512, "rope_dim": 64, "kv_dtype": "fp8"}
    got = trtllm.lookup("mla_decode", batch_size=16, kv_len=kv_len, with_error=True, **heads)
    assert got.latency_us.round(1).tolist() == [50.0, 62.2, 74.5, 101.5, 128.5]
    assert got.origin.tolist() == [0, 1, 1, 1, 0]
    measured = got.relative_error[[0, 4]].max()
    assert (got.relative_error[1:4] > measured).all()
    # the row itself is still there
    table = trtllm.table("mla_decode")
    assert 1425 in table.columns["latency_us"][table.spikes.row].round().astype(int)


def test_deepseek_decodes_of_two_short_sequences_take_as_long_as_longer_ones():
    """128 heads, batch 2 at 32 tokens: 1470 us in a layer, 14 at 16 and 13 at 64."""
    tables = fastroof.load_tables("h200", source="aiconfigurator-trtllm-1.3.0rc20")
    heads = {"num_q_heads": 128, "kv_lora_rank": 512, "rope_dim": 64, "kv_dtype": "bf16"}
    got = tables.lookup("mla_decode", batch_size=2, kv_len=[16, 32, 64], **heads)
    assert got.latency_us[1] < 1.1 * got.latency_us[[0, 2]].max()
