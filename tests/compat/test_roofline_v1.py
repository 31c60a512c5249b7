"""Roofline V1, the constant-MFU model: against its formulas written out, and what must always hold."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.compat import roofline_v1 as v1
from fastroof.compat import roofline_v2 as v2
from fastroof.errors import BatchError, GpuError, ModelError, PlanError

MODEL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "bytes_per_param": 2,
}
HARDWARE = {"TFlopsPeak": 989.5, "BwPeakTBs": 3.35}
FITTED = v1.Calibration(
    mfu_prefill=0.65, mfu_decode=0.12, mfu_prefill_multiplier=1.1, mfu_decode_multiplier=0.9
)

# q and o, k and v, gate and up and down
LAYER_WEIGHTS = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
WEIGHT_BYTES = 32 * LAYER_WEIGHTS * 2
KV_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
SIZE = st.integers(0, 100_000) | st.integers(0, 64)
PREFILL = st.tuples(SIZE, st.integers(1, 9000) | st.just(1))
STEP = st.tuples(st.lists(PREFILL, max_size=4), st.lists(SIZE, max_size=6))


def phase_s(requests: list[tuple[int, int, int]], mfu: float, bandwidth: float, gpus: float) -> float:
    """Seconds of (progress, new_tokens, context) requests of one phase."""
    new_tokens = sum(new for _, new, _ in requests)
    gemm_flops = 2.0 * new_tokens * 32 * LAYER_WEIGHTS
    attention_flops = sum(4.0 * 32 * 32 * 128 * new * context for _, new, context in requests)
    moved_bytes = float(WEIGHT_BYTES)
    for progress, new, _ in requests:
        moved_bytes += 32 * 4096 * 2 * new * (0.75 if new == 1 else 0.85)
        moved_bytes += KV_TOKEN_BYTES * new + KV_TOKEN_BYTES * progress * (0.80 if new == 1 else 0.92)
    peak = 989.5e12
    compute_s = gemm_flops / (peak * mfu) + attention_flops / (0.1 * peak)
    return max(compute_s, moved_bytes / bandwidth) / gpus


def naive_us(prefill: list[tuple[int, int]], decode: list[int], tp: int) -> float:
    tokens = sum(new for _, new in prefill) + len(decode)
    total = 0.0
    if prefill:
        chunks = [(progress, new, progress + new) for progress, new in prefill]
        total += sum(new for _, new in prefill) * phase_s(chunks, 0.65 * 1.1, 3.35e12, tp**0.68)
    if decode:
        ones = [(progress, 1, progress) for progress in decode]
        total += len(decode) * phase_s(ones, 0.12 * 0.9, 3.35e12 * 0.6, tp)
    return total / tokens * 1e6 if tokens else 0.0


@given(steps=st.lists(STEP, max_size=5), tp=st.sampled_from([1, 2, 3, 8]))
def test_steps_are_the_formulas(steps: Any, tp: int) -> None:
    got = v1.step_us(MODEL, HARDWARE, FITTED, tp, steps)
    assert got == pytest.approx([naive_us(*step, tp) for step in steps], rel=1e-12)


@given(step=STEP)
def test_a_mixed_step_lies_between_its_phases(step: Any) -> None:
    prefill, decode = step
    mixed, first, second = v1.step_us(MODEL, HARDWARE, FITTED, 1, [step, (prefill, []), ([], decode)])
    if prefill and decode:
        assert min(first, second) * (1 - 1e-12) <= mixed <= max(first, second) * (1 + 1e-12)
    else:
        assert mixed == first + second


def test_tensor_parallelism_counts_less_in_prefill() -> None:
    steps = [([(0, 2048)], []), ([], [4096] * 8)]
    one = v1.step_us(MODEL, HARDWARE, FITTED, 1, steps)
    four = v1.step_us(MODEL, HARDWARE, FITTED, 4, steps)
    assert one / four == pytest.approx([4**0.68, 4.0], rel=1e-14)


def test_each_bound_answers_to_its_own_constants() -> None:
    """A long chunk is bound by compute, a few decodes by memory: the other's constants change nothing."""
    chunk, decodes = [([(0, 8192)], [])], [([], [2048] * 4)]

    def us(steps: Any, **changed: float) -> float:
        return float(v1.step_us(MODEL, HARDWARE, replace(FITTED, **changed), 1, steps)[0])

    assert us(chunk, bw_prefill_factor=0.9) == us(chunk)
    assert us(decodes, mfu_decode=0.2) == us(decodes)
    assert us(decodes, bw_decode_factor=0.3) == pytest.approx(2 * us(decodes), rel=1e-14)
    attention_us = 4.0 * 32 * 32 * 128 * 8192**2 / 98.95e12 * 1e6
    assert us(chunk, vector_peak_fraction=0.2) == pytest.approx(us(chunk) - attention_us / 2, rel=1e-12)
    assert us(chunk, mfu_prefill_multiplier=2.2) == pytest.approx(
        attention_us + (us(chunk) - attention_us) / 2, rel=1e-12
    )


def test_its_steps_are_roofline_v2s() -> None:
    batch = v2.StepRequests([0], [512], [0, 1, 1], [100, 200], [0, 1, 2])
    listed = [([(0, 512)], [100]), ([], [200])]
    got = v1.step_us(MODEL, HARDWARE, FITTED, 1, batch)
    assert got.dtype == np.float64
    assert got.tolist() == v1.step_us(MODEL, HARDWARE, FITTED, 1, listed).tolist()
    assert v1.step_us(MODEL, HARDWARE, FITTED, 1, [([], [])]).tolist() == [0.0]
    assert v1.step_us(MODEL, HARDWARE, FITTED, 1, []).shape == (0,)
    tuned = HARDWARE | {"bwEfficiencyFactor": 0.5, "perLayerOverhead": 100}
    assert v1.step_us(MODEL, tuned, FITTED, 1, listed).tolist() == got.tolist()


def test_a_calibration_is_checked_and_frozen() -> None:
    with pytest.raises(PlanError, match=r"mfu_decode must be .* got 0; bw_decode_factor must be .* got 'x'$"):
        v1.Calibration(mfu_prefill=0.5, mfu_decode=0, bw_decode_factor="x")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="mfu_prefill must be a finite number above 0, got inf"):
        v1.Calibration(mfu_prefill=float("inf"), mfu_decode=0.5)
    with pytest.raises(FrozenInstanceError):
        FITTED.mfu_decode = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("model", "hardware", "calibration", "tp", "steps", "error", "message"),
    [
        ({}, HARDWARE, FITTED, 1, [], ModelError, "model_config: num_hidden_layers must be"),
        ({"num_local_experts": 8}, HARDWARE, FITTED, 1, [], ModelError, "num_local_experts is 8: .* no exp"),
        (MODEL, None, FITTED, 1, [], GpuError, "hardware must be a dict, got None"),
        (MODEL, HARDWARE, 0.5, 1, [], PlanError, "calibration must be a Calibration, got float"),
        (MODEL, HARDWARE, FITTED, 0, [], PlanError, "tp must be a whole number of at least 1, got 0"),
        (MODEL, HARDWARE, FITTED, 1, [([], [1, -1])], BatchError, "got -1 in decode request 1 of step 0"),
        (MODEL, HARDWARE, FITTED, 1, [([(0, 0)], [])], BatchError, "new_tokens must be .* got 0 in prefill"),
        (
            MODEL,
            HARDWARE,
            FITTED,
            1,
            [([(2**40, 1)], [])],
            BatchError,
            "progress must be .* got 1099511627776",
        ),
    ],
)
def test_bad_input(
    model: Any, hardware: Any, calibration: Any, tp: Any, steps: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        v1.step_us(model, hardware, calibration, tp, steps)
