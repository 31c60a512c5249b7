"""Grids over plans in arrays: every point the plan's own to the last bit, every best batch the naive one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import BatchError, PlanRangeError, SweepError, compile_plan
from fastroof.compiled import grids, layout, steps
from fastroof.sweep import LIMITS, best_batches, decode_times_us
from fastroof.sweep.steps import plan_batches
from fastroof.units import US_PER_MS
from tests.reference.handmade import step_tables
from tests.reference.sweep import best_steps

MAX_BATCH = 64


def made_of(kv_lens: tuple[int, ...], **options: Any) -> Any:
    grid = {(b, x): 9.0 + b * x / 4096 for b in (1, 8, 64) for x in kv_lens if b * x < 64 * 4096}
    tables = step_tables(grid)
    return compile_plan(
        "llama-3.1-8b",
        "h100",
        tables,
        max_num_batched_tokens=MAX_BATCH,
        max_num_seqs=MAX_BATCH,
        **{"engine": "kernels", **options},
    )


class Plans(list[Any]):
    """Plans that hypothesis prints as briefly as it should: it spells out what a list holds."""

    def __repr__(self) -> str:
        return f"{len(self)} plans"


@pytest.fixture(scope="module")
def plans() -> list[Any]:
    """Two plans with a table of lines, one without, one whose steps are not straight lines."""
    made = Plans(
        [
            made_of((64, 512, 4096)),
            made_of((64, 1536, 4096)),
            made_of((64, 1000, 4096)),
            made_of((64, 512, 4096), method="linear_mfu"),
        ]
    )
    assert [plan.decode_lines is not None for plan in made] == [True, True, False, False]
    forms = [plan.arena[int(plan.arena[steps.DECODE_AT]) + grids.FORM] for plan in made]
    assert forms == [layout.FORM_LATENCY] * 3 + [layout.FORM_DECODE_RATE]
    return made


def with_rows_us(plan: Any, rows_us: list[float]) -> Any:
    """The plan with a time of its own for each batch size, and attention that costs nothing."""
    arena = plan.arena.copy()
    block = arena[int(arena[steps.DECODE_AT]) :]
    block[grids.cells_of(block)] = 0.0
    tokens_at, logits_at = int(arena[steps.TOKENS_AT]), int(arena[steps.LOGITS_AT])
    arena[logits_at : logits_at + plan.max_num_seqs + 1] = 0.0
    arena[steps.STEP_US] = arena[steps.SEQUENCE_US] = 0.0
    arena[tokens_at + 1 : tokens_at + 1 + len(rows_us)] = rows_us
    return replace(plan, arena=arena)


SIZES = st.integers(1, MAX_BATCH)
LENGTHS = st.integers(1, 10_000) | st.sampled_from([63, 64, 512, 4096, 2**28])


@pytest.mark.loops
@settings(max_examples=30)
@given(batch_size=st.lists(SIZES, max_size=20), kv_len=st.lists(LENGTHS, max_size=12))
def test_every_point_of_a_grid_is_the_plans_own(
    plans: list[Any], batch_size: list[int], kv_len: list[int]
) -> None:
    grid = decode_times_us(plans, batch_size, kv_len)
    assert grid.shape == (4, len(kv_len), len(batch_size))
    singles = [[[plan.decode_us(b, kv) for b in batch_size] for kv in kv_len] for plan in plans]
    np.testing.assert_array_equal(grid, np.array(singles).reshape(grid.shape))


@pytest.mark.loops
@settings(max_examples=30)
@given(
    batch_size=st.sets(SIZES, min_size=1, max_size=20),
    kv_len=st.lists(LENGTHS, max_size=8),
    limit=st.none() | st.floats(1.0, 1e5),
    room=st.integers(0, 100_000),
)
def test_best_batches_are_the_naive_ones(
    plans: list[Any], batch_size: set[int], kv_len: list[int], limit: float | None, room: int
) -> None:
    batches = sorted(batch_size)
    with pytest.MonkeyPatch.context() as patch:
        memory = plans[0].memory._replace(max_kv_tokens=room, parts=room)
        patch.setattr(type(plans[0]), "memory", memory)
        limit_ms, limit = limits(limit)
        best = best_batches(plans, batches, kv_len, tpot_ms=limit_ms)
        for p, plan in enumerate(plans):
            assert_naive(plan, batches, kv_len, limit, [answer[p] for answer in best])


def limits(limit_us: float | None) -> tuple[float | None, float | None]:
    """A limit in ms, and what it is in us to the last bit."""
    limit_ms = None if limit_us is None else limit_us / US_PER_MS
    return limit_ms, None if limit_ms is None else limit_ms * US_PER_MS


def assert_naive(
    plan: Any, batches: list[int], kv_len: list[int], limit: float | None, answers: list[Any]
) -> None:
    expected, infeasible = best_steps(plan, batches, kv_len, limit)
    batch_size, step_us, limited_by, over_memory, over_tpot = (answer.tolist() for answer in answers)
    assert batch_size == [row.batch_size for row in expected]
    assert [None if np.isnan(us) else us for us in step_us] == [row.step_us for row in expected]
    assert [LIMITS[code] for code in limited_by] == [row.limited_by for row in expected]
    assert {"memory": sum(over_memory), "tpot": sum(over_tpot)} == infeasible


@pytest.mark.slow
@pytest.mark.loops
@settings(max_examples=200)
@given(
    rows_us=st.lists(
        st.floats(1e-3, 1e9) | st.integers(1, 8).map(float), min_size=MAX_BATCH, max_size=MAX_BATCH
    ),
    wobble=st.lists(st.integers(-3, 3), min_size=MAX_BATCH, max_size=MAX_BATCH),
    is_even=st.booleans(),
    batch_size=st.sets(SIZES, min_size=1),
    limit=st.none() | st.floats(1e-3, 1e9) | st.integers(1, 8).map(float),
)
def test_jagged_times_and_near_ties_are_exact(
    plans: list[Any],
    rows_us: list[float],
    wobble: list[int],
    is_even: bool,
    batch_size: set[int],
    limit: float | None,
) -> None:
    if is_even:
        # rates that are equal but for the last bits of the time
        even = np.arange(1, MAX_BATCH + 1) * (1.0 + 1.0 / 3.0)
        rows_us = [float(us * (1.0 + bits * 2.0**-52)) for us, bits in zip(even, wobble, strict=True)]
    plan = with_rows_us(plans[0], rows_us)
    assert [plan.decode_us(b, 7) for b in range(1, MAX_BATCH + 1)] == rows_us
    batches = sorted(batch_size)
    limit_ms, limit = limits(limit)
    best = best_batches([plan], batches, [7, 70], tpot_ms=limit_ms)
    assert_naive(plan, batches, [7, 70], limit, [answer[0] for answer in best])


@pytest.mark.loops
def test_all_ways_to_be_limited_are_met(plans: list[Any]) -> None:
    plan = with_rows_us(plans[0], [1.0, 1.0, 9.0, 2.0])
    best = best_batches(plan, [1, 2, 3, 4], [1], tpot_ms=8e-3)
    assert (best.batch_size[0, 0], LIMITS[best.limited_by[0, 0]]) == (2, "tpot")
    assert best.over_tpot.tolist() == [[1]]
    # however short the limit
    best = best_batches(plan, [1, 2], [1], tpot_ms=5e-4)
    assert (best.batch_size[0, 0], LIMITS[best.limited_by[0, 0]]) == (0, "tpot")
    best = best_batches(plan, [1, 2, 4, 5], [1])
    assert (best.batch_size[0, 0], LIMITS[best.limited_by[0, 0]]) == (2, "throughput")
    best = best_batches(plan, [1, 2], [1])
    assert (best.batch_size[0, 0], LIMITS[best.limited_by[0, 0]]) == (2, "batch grid")
    room = plan.memory.max_kv_tokens
    best = best_batches(plan, [1, 2], [room, room + 1, room // 2])
    assert best.batch_size.tolist() == [[1, 0, 2]]
    assert [LIMITS[code] for code in best.limited_by[0]] == ["memory", "memory", "batch grid"]
    assert best.over_memory.tolist() == [[1, 2, 0]]
    assert np.isnan(best.step_us[0]).tolist() == [False, True, False]


@pytest.mark.loops
def test_any_number_of_threads_gives_the_same_bits(plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # so that few rows are shared over threads
    monkeypatch.setattr(plan_batches, "STEPS_A_PART", 1)
    batches, lengths = np.arange(1, 65), np.array([5000, 3, 64, 700, 65, 2**20, 4096])
    for chosen in (plans, plans[:1], plans[2:]):
        grid = decode_times_us(chosen, batches, lengths)
        best = best_batches(chosen, batches, lengths, tpot_ms=0.5)
        for threads in (2, 3, 4, 100):
            out = np.full(grid.shape, np.nan)
            assert decode_times_us(chosen, batches, lengths, out=out, threads=threads) is out
            np.testing.assert_array_equal(out, grid)
            again = best_batches(chosen, batches, lengths, tpot_ms=0.5, threads=threads)
            for one, other in zip(best, again, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.loops
def test_sizes_of_any_integer_type_and_layout(plans: list[Any]) -> None:
    batches, lengths = np.arange(1, 41), np.arange(1, 2000, 100)
    grid = decode_times_us(plans, batches, lengths)
    frozen = np.arange(1, 2000, 100)
    frozen.flags.writeable = False
    for kind in (np.int32, np.uint8, np.uint64):
        np.testing.assert_array_equal(decode_times_us(plans, batches.astype(kind), frozen), grid)
    np.testing.assert_array_equal(decode_times_us(plans, batches[::-2], lengths), grid[:, :, ::-2])
    np.testing.assert_array_equal(decode_times_us(iter(plans), range(1, 41), 101), grid[:, 1:2])
    assert decode_times_us([], [1], [1]).shape == (0, 1, 1)
    assert best_batches([], [1], [1]).batch_size.shape == (0, 1)
    assert best_batches(plans, [1, 2], []).step_us.shape == (4, 0)


@pytest.mark.loops
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (([1, 65], [4]), PlanRangeError, "largest batch, 65: .* max_num_seqs=65"),
        (([0], [4]), BatchError, "batch_size must be at least 1, got 0 at position 0"),
        (([1], [4, 0]), BatchError, "kv_len must be at least 1, got 0 at position 1"),
        (([1], [2**28 + 1]), BatchError, "kv_len must be at most 268435456, got 268435457"),
    ],
)
def test_sizes_that_cannot_be_timed_are_named(
    plans: list[Any], sizes: Any, error: type[Exception], message: str
) -> None:
    for call, chosen in itertools.product((decode_times_us, best_batches), (plans, plans[3:])):
        with pytest.raises(error, match=message):
            call(chosen, *sizes)
    with pytest.raises(BatchError, match="kv_len must be at least 1, got 0 at position 0"):
        decode_times_us(plans, [], [0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (([1.5], [4]), "batch_size must hold integers"),
        (([1], [[4]]), r"kv_len must be one-dimensional.*\(1, 1\)"),
    ],
)
def test_invalid_axes_are_refused(plans: list[Any], sizes: Any, message: str) -> None:
    for call in (decode_times_us, best_batches):
        with pytest.raises(BatchError, match=message):
            call(plans, *sizes)


def test_wrong_options_are_refused(plans: list[Any]) -> None:
    for batches in ([2, 1], [1, 1], []):
        with pytest.raises(BatchError, match="batch_size must be ascending and not empty"):
            best_batches(plans, batches, [1])
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(SweepError, match="tpot_ms must be above 0, got"):
            best_batches(plans, [1], [1], tpot_ms=limit)
    for out in (np.empty((4, 2, 1)), np.empty((4, 1, 2), np.float32), [0.0]):
        with pytest.raises(BatchError, match=r"out must be a float64 array of shape \(4, 1, 2\)"):
            decode_times_us(plans, [1, 2], [1], out=out)  # type: ignore[arg-type]
    frozen = np.empty((4, 2, 2))
    frozen.flags.writeable = False
    for out in (frozen, np.empty((4, 2, 4))[:, :, ::2]):
        with pytest.raises(BatchError, match="out must be C-contiguous and writeable"):
            decode_times_us(plans, [1, 2], [1, 2], out=out)
    for threads in (0, True, 1.5):
        with pytest.raises(SweepError, match="threads must be a whole number of at least 1"):
            decode_times_us(plans, [1], [1], threads=threads)  # type: ignore[arg-type]
    with pytest.raises(SweepError, match="plans must be StepPlans from compile_plan, got str"):
        best_batches(["llama-3.1-8b"], [1], [1])  # type: ignore[list-item]


def test_importing_sweeps_needs_no_numba() -> None:
    import subprocess
    import sys
    from pathlib import Path

    code = "import sys, fastroof.sweep; fastroof.sweep.best_batches; print('numba' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=Path(__file__).resolve().parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == ("False", "")
