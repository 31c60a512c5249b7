"""Decode attention whose KV cache comes from memory: a line through calls that stream, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fastroof
from fastroof.columns import ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.compiled import grids
from fastroof.engines import load_engine
from fastroof.engines.kernel_choices import KernelChoices
from fastroof.errors import PlanError
from fastroof.operators.attention import ATTENTION_DECODE
from fastroof.operators.attention_work import HeadShape, grid_from_memory
from fastroof.pack import PackedGrid, pack_grid

SHAPE = HeadShape("bf16", 32, 8, 128, 0)
KV_LEN = np.array([256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0])
L2 = 128 * 2**20


def grid_of(calls_us: dict[float, np.ndarray], h100: fastroof.Tables) -> PackedGrid:
    batch = np.repeat(list(calls_us), len(KV_LEN))
    latency_us = np.concatenate(list(calls_us.values()))
    bound = ATTENTION_DECODE.bound(SHAPE, h100.gpu, float(latency_us.min()))
    return pack_grid(batch, np.tile(KV_LEN, len(calls_us)), latency_us, bound, is_additive=True)


def at(grid: PackedGrid, batch: float, kv_len: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out, origin = np.empty(len(kv_len)), np.empty(len(kv_len), np.uint8)
    grids.grid_latency_us(grid.arena, np.full(len(kv_len), batch), kv_len, out, origin)
    return out, origin


def test_calls_within_the_l2_are_put_on_the_line_of_those_that_stream(h100: fastroof.Tables) -> None:
    # 20 us and 2 us for each 100 tokens of a sequence; what fits the L2 takes half of that
    line_us = 20.0 + 0.02 * KV_LEN * 64
    fits = 64 * KV_LEN * 4096 < L2
    warm = grid_of({64.0: np.where(fits, 0.5 * line_us, line_us)}, h100)
    assert fits.any()
    cold = grid_from_memory(warm, SHAPE, L2)
    found_us, origin = at(cold, 64.0, KV_LEN)
    np.testing.assert_allclose(found_us, line_us, rtol=1e-3)
    assert (origin[fits] == ORIGIN_EXTRAPOLATED).all()
    # what streams is as measured, to the last bit
    streams = 64 * KV_LEN * 4096 >= 8 * L2
    assert streams.sum() >= 2
    assert (found_us[streams] == line_us[streams]).all()
    assert (origin[streams] == ORIGIN_MEASURED).all()


def test_batches_that_never_stream_are_as_measured(h100: fastroof.Tables) -> None:
    warm = grid_of({1.0: 10.0 + 0.01 * KV_LEN, 2.0: 11.0 + 0.01 * KV_LEN}, h100)
    for l2_bytes in (L2, 0):
        cold = grid_from_memory(warm, SHAPE, l2_bytes)
        assert (cold.arena == warm.arena).all()


def test_no_call_becomes_faster(h100: fastroof.Tables) -> None:
    warm = ATTENTION_DECODE.grid(h100, SHAPE).grid
    cold = grid_from_memory(warm, SHAPE, h100.gpu.l2_bytes)
    assert (cold.cells[..., 0] >= warm.cells[..., 0]).all()
    assert (cold.cells[..., 0] > warm.cells[..., 0]).any()
    assert (cold.flags >= warm.flags).all()


def test_a_profile_lists_its_gpus(h100: fastroof.Tables) -> None:
    kernels = load_engine("kernels")
    cold = replace(kernels, kernels=replace(kernels.kernels, cold_decode=("h100",)))
    elsewhere = replace(kernels, kernels=replace(kernels.kernels, cold_decode=("h200",)))

    def plan(engine: object) -> fastroof.StepPlan:
        return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine=engine)  # type: ignore[arg-type]

    slow, usual, other = plan(cold), plan(kernels), plan(elsewhere)
    assert slow.decode_us(32, 400) > usual.decode_us(32, 400)
    assert other.decode_us(32, 400) == usual.decode_us(32, 400)
    assert slow.decode_us(128, 8192) == usual.decode_us(128, 8192)
    assert slow.prefill_us(512) == usual.prefill_us(512)
    explained = slow.explain([(1, 399)] * 32)
    assert explained.total_us == pytest.approx(slow.decode_us(32, 400), rel=1e-12)
    # the table itself still answers what was measured
    measured = h100.lookup(
        "attention_decode", num_q_heads=32, num_kv_heads=8, head_dim=128, batch_size=32, kv_len=512
    )
    assert measured.origin.item() == ORIGIN_MEASURED


@pytest.mark.parametrize("given", ["h100", 5, [1], [["h100"]]])
def test_invalid_lists_of_gpus_are_refused(given: object) -> None:
    with pytest.raises(PlanError, match="cold_decode"):
        KernelChoices(cold_decode=given)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="cold_decode"):
        load_engine({"name": "mine", "kernels": {"cold_decode": given}})
