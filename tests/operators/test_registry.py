"""Operators: found by their files, light to load, and complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastroof import load_gpu
from fastroof.operators.operator import Operator
from fastroof.operators.registry import OPERATORS

CHECKOUT = Path(__file__).resolve().parents[2]
H100 = load_gpu("h100")


def test_operators_packing_and_loading_do_not_load_numba():
    code = (
        "import sys, fastroof.operators.registry, fastroof.load, fastroof.pack\n"
        "import fastroof.uncertainty.leave_one_out\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()).isdisjoint({"numba", "llvmlite", "torch", "pydantic"})


def test_names_and_ranks_are_distinguishable():
    assert all(name == operator.name for name, operator in OPERATORS.items())
    ranks = [operator.rank for operator in OPERATORS.values()]
    assert ranks == sorted(set(ranks))


def test_a_decode_is_listed_right_after_its_prompts():
    names = list(OPERATORS)
    prompts = [name for name in names if name.endswith("_prefill")]
    assert "dsa_prefill" in prompts
    for name in prompts:
        assert names[names.index(name) + 1] == name.replace("_prefill", "_decode")


def ones(operator: Operator) -> dict[str, np.ndarray]:
    """Two rows of every column: the smallest sizes, bf16 and balanced words."""
    words = {"dtype": "bf16", "kv_dtype": "bf16", "distribution": "balanced", "collective": "all_gather"}
    words |= {"attn_dtype": "bf16"}
    models = {"csa": "deepseek-v4-flash", "hca": "deepseek-v4-flash", "msa": "minimax-m3"}
    words |= {"model": models.get(operator.name[:3], "deepseek-v3.2")}
    rows = {}
    for column in operator.required:
        if column.kind == "text":
            rows[column.name] = np.array([words.get(column.name, "x")] * 2, object)
        else:
            rows[column.name] = np.array([2, 2] if column.kind == "int" else [1.0, 1.0])
    return rows | {name: np.array([value, value]) for name, value in operator.constants.items()}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda o: o.name)
def test_every_operator_has_the_work_of_its_rows(operator: Operator):
    rows = ones(operator)
    work = operator.work(rows, H100)
    assert (work.moved_bytes > 0).all()
    assert (work.least_bytes <= work.moved_bytes).all()
    computes = ~np.isnan(work.flops)
    assert (work.flops[computes] > 0).all()
    assert (work.peak_flops_per_s[computes] > 0).all()
    assert work.over_link == operator.over_link
    for conventions in operator.flops_conventions(rows).values():
        assert conventions.shape == (2,)
    assert operator.plain_rows(rows).all() or operator.equal_axes
    assert set(operator.free_axes()) <= set(operator.axis_names)
    assert set(operator.equal_axes) | set(operator.free_axes()) == set(operator.axis_names)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda o: o.name)
def test_what_is_looked_up_is_judged(operator: Operator):
    assert bool(operator.holdouts) == bool(operator.coverages) == operator.answers_lookups
    for grid in (*operator.holdouts, *operator.coverages):
        assert grid.operator == operator.name
        names = {column.name for column in operator.required}
        assert set(grid.kept) <= set(operator.axis_names)
        assert set(grid.only) <= names
    assert set(operator.defaults) <= set(operator.arguments)
    assert not set(operator.constants) & set(operator.arguments)
