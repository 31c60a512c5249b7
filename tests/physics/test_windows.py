"""Attention within a window against physics: not under its FLOPs and bytes, nor over full attention."""

from __future__ import annotations

import numpy as np
import pytest

import fastroof
from fastroof import StepPlan, compile_plan, load_model, model_names
from fastroof.columns import ORIGIN_EXTRAPOLATED
from fastroof.errors import ModelError
from fastroof.plan.arena import attention_times
from fastroof.units import US_PER_S
from tests.physics import kernels

WINDOWED = [name for name in model_names() if load_model(name).window]
LIMITS = {"max_num_batched_tokens": 16384, "max_num_seqs": 256, "allow_modelled": True}
STEPS = [
    *([(1, kv_len - 1)] * batch for batch in (1, 16, 256) for kv_len in (2, 100, 1024, 4096, 16384)),
    *([(new, context)] for new in (16, 500, 4096, 16384) for context in (0, 100, 5000)),
    [(1, 20), (1, 9000), (1, 300)] * 20,
    [(2000, 0), (30, 0), (100, 7000), *[(1, 4000)] * 8],
]


@pytest.fixture(scope="module")
def bandwidth(h100):
    return kernels.highest_bandwidth(h100.measured, h100.gpu).bytes_per_s


@pytest.fixture(scope="module", params=WINDOWED)
def plan(request, h100) -> StepPlan:
    return compile_plan(request.param, "h100", h100, **{"engine": "kernels", **LIMITS})


def test_attention_takes_at_least_its_work(plan, bandwidth):
    peak = max(plan.gpu.peak("bf16"), plan.gpu.peak(plan.kv_dtype))
    # Beyond the longest measured sequences the slope is halfway to the roofline's, whose bandwidth is the
    # datasheet's, 8 % above the highest measured: 256 x 16,384 tokens of olmo-3-7b take 0.9645 of that one.
    beyond_measured = (1.0 + bandwidth / plan.gpu.hbm_bytes_per_s) / 2.0
    for step in STEPS:
        for o in plan.explain(step).operators:
            if not o.role.endswith("_attention"):
                continue
            assert o.total_us >= o.flops / peak * US_PER_S
            beyond_cache = o.moved_bytes / o.calls - plan.gpu.l2_bytes
            share = beyond_measured if o.origin >= ORIGIN_EXTRAPOLATED else 1.0
            assert o.total_us / o.calls >= share * beyond_cache / bandwidth * US_PER_S


def test_a_longer_context_within_the_window_costs_and_beyond_it_hardly(plan):
    windowed = [i for i, part in enumerate(plan.attention) if part.call.window]
    for number in windowed:
        lengths = [plan.model.window, 65536]
        within, far = attention_times(plan, number, True, [64, 64], lengths).own_us
        assert far <= 2.0 * within


def test_windows_save_time_where_contexts_are_long(plan, h100):
    model = plan.model
    if model.name.startswith("deepseek-v4"):
        with pytest.raises(ModelError, match="only a window"):
            model.with_full_attention()
        return
    full = compile_plan(model.with_full_attention(), "h100", h100, **{"engine": "kernels", **LIMITS})
    for batch in (1, 64):
        assert plan.decode_us(batch, 65536) < full.decode_us(batch, 65536) * 1.02
    assert plan.prefill_us(16384) < full.prefill_us(16384) * 1.02
    many = np.array([64, 256])
    assert (plan.decode_us(many, 65536) < full.decode_us(many, 65536)).all()
    assert plan.memory.max_sequences(65536) >= full.memory.max_sequences(65536)
    assert fastroof.load_model(model.name) == model
