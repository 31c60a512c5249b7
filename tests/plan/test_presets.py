"""Every preset on its GPUs: plans of them keep the fast lines, and their answers agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fastroof
from fastroof import StepBatch, compile_plan, load_model, load_tables
from fastroof.errors import PlanError
from fastroof.plan.plan_set import default_layouts

LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 64}


@pytest.fixture(scope="module")
def tables():
    return {gpu: load_tables(gpu) for gpu in ("h100", "b200")}


def plans(model, tables):
    """Plans of a model in every layout that it can have."""
    for layout in default_layouts(load_model(model)):
        sizes = {"tp": layout.tp, "dp": layout.dp, "ep": layout.ep}
        for gpu, of_gpu in tables.items():
            try:
                yield compile_plan(
                    model, gpu, of_gpu, **{"engine": "kernels", **sizes, **LIMITS}, allow_modelled=True
                )
            except PlanError:
                continue


def check_decode_lines(some):
    made = list(some)
    assert made
    batch, kv_len = np.array([1, 3, 16, 64]), np.array([1, 100, 129, 5000])
    for plan in made:
        assert plan.decode_lines is not None
        step_us = plan.decode_us(batch, kv_len)
        assert (step_us > 0).all()
        assert [plan.scalar(int(b), int(kv)) for b, kv in zip(batch, kv_len, strict=True)] == step_us.tolist()
        for b, kv, us in zip(batch[1:], kv_len[1:], step_us[1:], strict=True):
            steps = StepBatch.from_requests([[(1, int(kv) - 1)] * int(b)])
            assert plan.step_us(steps)[0] == us


@pytest.mark.parametrize("model", fastroof.model_names())
def test_a_preset_keeps_the_fast_decode_lines(tables, model):
    # in the first layout that can be; every layout before a release
    check_decode_lines(itertools.islice(plans(model, tables), 1))


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("model", fastroof.model_names())
def test_a_preset_keeps_the_fast_decode_lines_in_every_layout(tables, model):
    check_decode_lines(plans(model, tables))
