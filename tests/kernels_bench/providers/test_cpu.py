"""The cpu provider against references of its own, and the whole way into tables that load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import MeasureError
from kernels_bench.grid.grid import load_grid
from kernels_bench.protocol import Point
from kernels_bench.providers.cpu import MAX_BYTES, CpuProvider
from kernels_bench.providers.cpu_kernels import round_bf16, round_e4m3
from kernels_bench.run.check import check_result
from tests.kernels_bench.fakes import gemm

BIG = 2**30
HEADS = {"kv_dtype": "bf16", "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "window": 0}
CPU_POINTS = load_grid("cpu").points()


@pytest.mark.parametrize("point", CPU_POINTS, ids=lambda p: p.key.replace('"', ""))
def test_every_point_of_the_cpu_grid_passes_its_check(point: Point) -> None:
    provider = CpuProvider()
    assert provider.refuses(point) is None
    prepared = provider.prepare(point, 1, BIG)
    if point.values.get("kind") != "launch":
        check = check_result(point, prepared)
        assert check.passed, check
        assert (check.error > 0) == (point.values.get("kind") not in ("copy", "kv_write"))
    prepared.close()


def test_inputs_follow_from_the_seed() -> None:
    def outcome(seed: int) -> np.ndarray:
        prepared = CpuProvider().prepare(gemm(3), seed, BIG)
        prepared.run(0)
        return prepared.result(0)

    assert (outcome(5) == outcome(5)).all()
    assert (outcome(5) != outcome(6)).any()


def test_the_sets_differ_so_that_rotating_means_something() -> None:
    prepared = CpuProvider().prepare(gemm(3), 0, BIG)
    assert prepared.num_sets >= 2
    assert (prepared.reference(0) != prepared.reference(1)).any()


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_prefill_is_causal_attention_written_out(batch: int, q_len: int, prefix: int, window: int) -> None:
    values = {**HEADS, "window": window, "batch_size": batch, "q_len": q_len, "kv_len": q_len + prefix}
    prepared = CpuProvider().prepare(Point("attention_prefill", values), 0, BIG)
    inputs = prepared._sets[0]
    expected = []
    for q, k, v in zip(inputs["q"], inputs["k"], inputs["v"], strict=True):
        out = np.zeros((2, 2, q_len, 8))
        for head in np.ndindex(2, 2):
            for i in range(q_len):
                end = prefix + i + 1
                seen = range(max(0, end - window) if window else 0, end)
                logits = [float(q[*head, i] @ k[head[0], 0, j]) / 8**0.5 for j in seen]
                weights = np.exp(np.array(logits) - max(logits))
                out[*head, i] = weights / weights.sum() @ v[head[0], 0, list(seen)].astype(np.float64)
        expected.append(out.ravel())
    np.testing.assert_allclose(prepared.reference(0), np.concatenate(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moe_ep", [1, 2])
@pytest.mark.parametrize("distribution", ["balanced", "power_law_1.2"])
def test_moe_is_the_sum_of_its_experts_written_out(moe_ep: int, distribution: str) -> None:
    values = {
        "dtype": "bf16", "hidden": 8, "intermediate": 6, "topk": 2, "num_experts": 4, "moe_tp": 2,
        "moe_ep": moe_ep, "distribution": distribution, "num_tokens": 5,
    }  # fmt: skip
    prepared = CpuProvider().prepare(Point("moe", values), 0, BIG)
    a = {name: np.asarray(value, np.float64) for name, value in prepared._sets[0].items()}
    expected = np.zeros((5, 8))
    for token, slot in np.ndindex(5, 2):
        expert = int(a["chosen"][token, slot])
        if expert < 4 // moe_ep:
            hidden = a["gate_up"][expert] @ a["x"][token]
            gate, up = hidden[:3], hidden[3:]
            made = a["down"][expert] @ (gate / (1 + np.exp(-gate)) * up)
            expected[token] += a["shares"][token, slot] * made
    assert expected.any()
    np.testing.assert_allclose(prepared.reference(0), expected, rtol=1e-9)


def test_e4m3_holds_what_its_bits_do() -> None:
    """All 8-bit patterns but NaN: 4 bits of exponent of bias 7, 3 of mantissa."""
    numbers = [
        sign * (2.0 ** (e - 7) * (1 + m / 8) if e else 2.0**-6 * m / 8)
        for sign in (1, -1) for e in range(16) for m in range(8) if (e, m) != (15, 7)
    ]  # fmt: skip
    assert round_e4m3(numbers).tolist() == numbers
    assert max(numbers) == 448
    held = np.unique(numbers)
    values = np.random.default_rng(0).normal(0, 100, 2000)
    nearest = np.abs(held[:, None] - np.clip(values, -448, 448)).min(axis=0)
    np.testing.assert_allclose(np.abs(round_e4m3(values) - np.clip(values, -448, 448)), nearest, atol=1e-12)
    assert round_e4m3([17.0, 19.0]).tolist() == [16.0, 20.0], "ties go to the even mantissa"


def test_block_scaled_inputs_have_blocks_whose_largest_is_e4m3s() -> None:
    prepared = CpuProvider().prepare(gemm(4, 256, 256, dtype="fp8_block"), 0, BIG)
    x, w = prepared._sets[0]["x"], prepared._sets[0]["w"]
    for row, left in np.ndindex(4, 2):
        block = x[row, 128 * left : 128 * (left + 1)]
        scaled = block / np.abs(block).max() * 448
        np.testing.assert_allclose(round_e4m3(scaled), scaled, rtol=1e-6)
    block = w[128:, :128]
    scaled = block / np.abs(block).max() * 448
    np.testing.assert_allclose(round_e4m3(scaled), scaled, rtol=1e-6)


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        (gemm(4096, 4096, 4096), "too large for a CPU"),
        (gemm(1, 8192, 8192), "too large for a CPU"),
        (gemm(1, dtype="fp8"), "fp8 of gemm is not emulated"),
        (
            Point("allreduce", {"dtype": "bf16", "num_gpus": 2, "mode": "graph", "message_bytes": 8}),
            "no allreduce",
        ),
        (
            Point("elementwise", {"kind": "fp8_quantise", "m": 1, "width": 8, "io_bytes": 24}),
            "no fp8_quantise",
        ),
    ],
)
def test_what_it_refuses_and_why(point: Point, reason: str) -> None:
    assert reason in str(CpuProvider().refuses(point))
    with pytest.raises(MeasureError, match=reason):
        CpuProvider().prepare(point, 0, BIG)


def test_too_little_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        CpuProvider().prepare(gemm(64, 512, 512), 0, 1000)


def test_the_default_grid_is_refused_but_for_its_smallest_points() -> None:
    provider = CpuProvider()
    points = load_grid("h100").points()
    taken = [p for p in points if provider.refuses(p) is None]
    assert len(taken) < len(points) / 2
    assert MAX_BYTES < 2**27


def test_a_result_before_a_run_is_an_error() -> None:
    with pytest.raises(MeasureError, match="was not run"):
        CpuProvider().prepare(gemm(1), 0, BIG).result(0)


def test_bf16_ties_go_to_the_even_neighbour() -> None:
    step = 2.0**-7
    ties = [1 + 0.5 * step, 1 + 1.5 * step, 1 + 2.5 * step]
    assert round_bf16(ties).tolist() == [1.0, 1 + 2 * step, 1 + 2 * step]


@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_bf16_is_the_nearest_of_its_neighbours(value: float) -> None:
    (rounded,) = round_bf16([value])
    bits = np.float32(rounded).view(np.uint32)
    assert bits & np.uint32(0xFFFF) == 0
    for step in (-(1 << 16), 1 << 16):
        neighbour = np.uint32((int(bits) + step) % 2**32).view(np.float32)
        if np.isfinite(neighbour) and np.sign(neighbour) == np.sign(rounded):
            assert abs(float(rounded) - value) <= abs(float(neighbour) - value)
    assert np.isnan(round_bf16([np.nan])).all()
