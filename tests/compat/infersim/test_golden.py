"""Every recorded answer of InferSim's, to the last bit: all where they are, a sample of them always."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastroof.compat import infersim
from fastroof.compat.infersim.scenarios import SCENARIO_COLUMNS
from fastroof.errors import MissingTableError
from tests.reference import infersim as reference

SAMPLE = Path(__file__).resolve().parents[2] / "golden_sample" / "infersim"
MODELS = (
    "deepseek_v3", "deepseek_v3.2", "qwen3-235B-A22B", "qwen3-30B-A3B", "qwen3-8B", "qwen3-next-80B-A3B",
    "qwen3.5-122B-A10B", "qwen3.5-35B-A3B",
)  # fmt: skip


class Golden(NamedTuple):
    answers: Path
    tree: Path
    tables: infersim.InfersimTables

    def rows(self, name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((self.answers / f"{name}.csv").read_text("utf-8").splitlines()))

    def config(self, model: str) -> dict[str, Any]:
        if self.answers == SAMPLE:
            return json.loads((SAMPLE / "configs.json").read_text("utf-8"))[model]
        folder = self.answers.parents[1] / "reference" / "hf_configs"
        return json.loads((folder / f"{model}_config.json").read_text("utf-8"))


@pytest.fixture(scope="module", params=["sample", "all"])
def golden(request):
    if request.param == "sample":
        answers, tree = SAMPLE, SAMPLE / "bench_data"
    else:
        shared = request.getfixturevalue("shared")
        answers, tree = shared / "golden" / "infersim", shared / "reference" / "infersim_bench_data"
    return Golden(answers, tree, infersim.load(tree))


def _column(rows, name):
    return np.array([int(row[name]) for row in rows])


def _attn_decode(tables, rows, heads):
    return infersim.attn_decode_mfu(
        tables,
        [row["device"] for row in rows],
        num_heads=_column(rows, "num_heads"),
        tp_size=_column(rows, "tp_size"),
        batch_size=_column(rows, "batch"),
        kv_len=_column(rows, "kv_len"),
        fp8_kv=_column(rows, "fp8_kv"),
        **{name: _column(rows, name) for name in heads},
    )


def _attn_prefill(tables, rows, heads):
    return infersim.attn_prefill_mfu(
        tables,
        [row["device"] for row in rows],
        num_heads=_column(rows, "num_heads"),
        tp_size=_column(rows, "tp_size"),
        seq_len=_column(rows, "seq_len"),
        **{name: _column(rows, name) for name in heads},
    )


def _gemm(tables, rows):
    m, k, n = (_column(rows, name) for name in "mkn")
    return infersim.gemm_mfu(tables, [row["device"] for row in rows], m, k, n)


def _grouped(tables, rows, phase):
    sizes = ("num_experts", "topk", "hidden", "intermediate", "num_gpus", "tp_size", "tokens_per_gpu")
    given = {name: _column(rows, name) for name in sizes}
    return infersim.grouped_gemm_mfu(tables, [row["device"] for row in rows], phase, **given)


def _gdn(tables, rows, phase):
    return infersim.gdn_latency_us(
        tables,
        [row["device"] for row in rows],
        phase,
        conv_kernel=4,
        num_key_heads=16,
        key_head_dim=128,
        num_value_heads=_column(rows, "num_value_heads"),
        value_head_dim=128,
        tokens=_column(rows, "tokens_or_batch"),
    )


LOOKUPS = {
    "mha_decode": lambda t, r: _attn_decode(t, r, heads=("num_kv_heads", "head_dim")),
    "mla_decode": lambda t, r: _attn_decode(t, r, heads=("kv_lora_rank", "qk_rope_head_dim")),
    "mha_prefill": lambda t, r: _attn_prefill(t, r, heads=("num_kv_heads", "head_dim")),
    "mla_prefill": lambda t, r: _attn_prefill(t, r, heads=("qk_nope_head_dim", "qk_rope_head_dim")),
    "gemm": _gemm,
    "grouped_gemm_decode": lambda t, r: _grouped(t, r, "decode"),
    "grouped_gemm_prefill": lambda t, r: _grouped(t, r, "prefill"),
    "gdn_latency": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(golden, name):
    rows = golden.rows(name)
    answered = [row for row in rows if not row["error"]]
    assert len(answered) > 10
    if name == "gdn_latency":
        groups = [
            ([row for row in answered if row["phase"] == phase], lambda t, r, phase=phase: _gdn(t, r, phase))
            for phase in ("prefill", "decode")
        ]
    else:
        groups = [(answered, LOOKUPS[name])]
    for of_group, lookup in groups:
        found = np.atleast_2d(lookup(golden.tables, of_group))
        columns = [c for c in ("mfu", "mfu_up", "mfu_down", "latency_us") if c in of_group[0]]
        np.testing.assert_array_equal(found, [[float(row[c]) for row in of_group] for c in columns])
    for row in rows:
        if row["error"]:
            lookup = LOOKUPS[name] or (lambda t, r: _gdn(t, r, r[0]["phase"]))
            with pytest.raises(MissingTableError, match=r"no rows of kv_dtype fp8|no file .*gdn/"):
                lookup(golden.tables, [row])


def _scenarios(rows):
    kinds = {"text": str, "int": int, "float": float}
    columns = {
        column.name: [kinds[column.kind](row[column.name]) if row[column.name] else None for row in rows]
        for column in SCENARIO_COLUMNS
    }
    return {**columns, **{label: [row[label] for row in rows] for label in ("id", "source", "model")}}


def _assert_row(expected, found, names):
    """Every recorded cell: the same number, the same text, or as empty."""
    for name in names:
        cell, value = expected[name], found.get(name)
        wanted = cell if isinstance(value, str) else float(cell) if cell else None
        assert value == wanted, (expected["id"], name)


@pytest.mark.parametrize("model", MODELS)
def test_scenarios(golden, model):
    rows = [row for row in golden.rows("e2e") if row["model"] == model]
    if golden.answers == SAMPLE and not rows:
        pytest.skip(f"the sample has no scenario of {model}")
    result = infersim.evaluate(golden.tables, golden.config(model), _scenarios(rows))
    assert set(rows[0]) <= set(result.column_names)
    for expected, found in zip(rows, result.to_pylist(), strict=True):
        _assert_row(expected, found, expected)


@pytest.mark.slow
def test_the_reference_gives_the_recorded_answers(golden):
    """What the loops are held against is itself held against the recorded answers."""
    tree = reference.Tree(golden.tree)
    rows = golden.rows("e2e")
    by_row = _scenarios(rows)
    for i, expected in enumerate(rows):
        scenario = {name: column[i] for name, column in by_row.items()}
        found = reference.evaluate(tree, golden.config(expected["model"]), scenario)
        _assert_row(expected, found, list(expected)[18:])
