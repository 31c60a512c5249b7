"""The sweep loops: time every step of many plans' grids, and store the times or reduce them in the loop.

A grid is batch sizes x lengths, and within a cell of a plan's decode table a step is linear in kv_len (see
fastroof.compiled.decode_lines). For each cell that the lengths enter, the lines of all batch sizes are laid
side by side, so a row of steps is one multiplication and one addition each, without a gather. Lengths and
batch sizes may be in any order; if they rise, each cell is entered once.

One call times the rows of many plans, since a call from Python takes a third as long as a plan's grid. Plans
are passed as addresses of their arenas, rows as the plans' lengths one after another.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core import config

from fastroof.arrays import Flags, Floats, Longs
from fastroof.compiled.decode_lines import cell_at, cell_line, line_cell
from fastroof.compiled.intrinsics import pointer_at
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.layout import FORM_LATENCY
from fastroof.compiled.llvm import float_bits, output_store, table_load
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.serving_options import held_parts
from fastroof.compiled.steps import CODE_SIZES, PlanParts, decode_rows_us, decode_step_us, open_plan

LIMITED_BY_BATCH_GRID = 0
LIMITED_BY_MEMORY = 1
LIMITED_BY_TPOT = 2
LIMITED_BY_THROUGHPUT = 3

NO_RATE = -1


class PlanRows(NamedTuple):
    """Plans and the lengths of each: plan p has the rows ``offsets[p]`` to ``offsets[p + 1]``."""

    arena_at: Longs
    arena_size: Longs
    kv_room: Longs
    offsets: Longs
    kv_len: Longs


class Scratch(NamedTuple):
    """Scratch arrays of one thread, an element per batch size."""

    requests: Floats
    rows_us: Floats
    at_zero_us: Floats
    slope_us: Floats
    rate: Longs
    run_cell: Longs
    run_stop: Longs


class BestRows(NamedTuple):
    """Answers of the reducing loop, one per row."""

    batch_size: Longs
    step_us: Floats
    limited_by: Flags
    over_memory: Longs
    over_limit: Longs


@jit
def arena_address(arena: Floats) -> int:
    """Return the address of an arena's first element: 0.2 us, a third of NumPy's time."""
    return int(arena.ctypes.data)


def _plain_pointer(address: int) -> Any:
    return ctypes.c_void_p(int(address))


_pointer: Any = _plain_pointer if getattr(config, "DISABLE_JIT") else pointer_at  # noqa: B009


@jit_inline
def _arena(plans: PlanRows, p: int) -> Floats:
    """Return plan p's arena, which the caller keeps alive."""
    return carray(_pointer(plans.arena_at[p]), (plans.arena_size[p],), np.float64)


@jit_inline
def _read_batches(arena: Floats, plan: PlanParts, batch_size: Longs, scratch: Scratch) -> int:
    """Time the rows of each batch size; return the number of runs in one cell, -1 if too large."""
    most = min(plan.max_num_batched_tokens, plan.max_num_seqs)
    for j in range(len(batch_size)):
        batch = batch_size[j]
        if batch < 1 or batch > most:
            return -1
        scratch.requests[j] = float(batch)
        scratch.rows_us[j] = decode_rows_us(arena, plan, batch)
    runs = 0
    stop = 0
    while stop < len(batch_size):
        cell = cell_at(arena, plan.decode.y, scratch.requests[stop])
        low = arena[plan.decode.y.nodes_at + cell]
        high = arena[plan.decode.y.nodes_at + cell + 1]
        stop += 1
        while stop < len(batch_size) and low <= scratch.requests[stop] < high:
            stop += 1
        scratch.run_cell[runs] = cell
        scratch.run_stop[runs] = stop
        runs += 1
    return runs


@jit_inline
def _fill_lines(
    arena: Floats, plan: PlanParts, batch_size: Longs, runs: int, kv: float, scratch: Scratch
) -> tuple[float, float]:
    """Lay the lines of all batch sizes side by side. Returns the range of lengths for which they hold."""
    if plan.decode.form != FORM_LATENCY:
        # not linear: the step itself, for this length only
        for j in range(len(batch_size)):
            rows_us = scratch.rows_us[j]
            scratch.at_zero_us[j] = decode_step_us(arena, plan, rows_us, batch_size[j], kv)
            scratch.slope_us[j] = 0.0
        return kv, kv
    column = cell_at(arena, plan.decode.x, kv)
    first = 0
    for run in range(runs):
        cell = line_cell(arena, plan.decode, scratch.run_cell[run], column)
        stop = scratch.run_stop[run]
        for j in range(first, stop):
            rows_us = table_load(scratch.rows_us, j)
            at_zero_us, slope_us = cell_line(cell, rows_us, table_load(scratch.requests, j))
            output_store(scratch.at_zero_us, j, at_zero_us)
            output_store(scratch.slope_us, j, slope_us)
        first = stop
    at = plan.decode.x.nodes_at + column
    return arena[at], arena[at + 1]


@jit
def decode_grid_us(plans: PlanRows, batch_size: Longs, scratch: Scratch, out: Floats) -> int:
    """Time every batch size of each row, row after row. Returns a code."""
    count = len(batch_size)
    for p in range(len(plans.arena_at)):
        arena = _arena(plans, p)
        plan = open_plan(arena)
        runs = _read_batches(arena, plan, batch_size, scratch)
        if runs < 0:
            return CODE_SIZES
        start_kv = 0.0
        stop_kv = 0.0
        for i in range(plans.offsets[p], plans.offsets[p + 1]):
            if plans.kv_len[i] < 1 or plans.kv_len[i] > MAX_KV_LEN:
                return CODE_SIZES
            kv = float(plans.kv_len[i])
            if not start_kv <= kv < stop_kv:
                start_kv, stop_kv = _fill_lines(arena, plan, batch_size, runs, kv, scratch)
            at = i * count
            for j in range(count):
                output_store(out, at + j, scratch.at_zero_us[j] + scratch.slope_us[j] * kv)
    return 0


@jit_inline
def _highest_rate(scratch: Scratch, kv: float, limit_us: float, count: int) -> tuple[int, int]:
    """Return the highest rate of ``count`` batch sizes within a time, and how many are beyond it."""
    most: Any = np.int64(NO_RATE)
    over: Any = np.int64(0)
    for j in range(count):
        step_us = scratch.at_zero_us[j] + scratch.slope_us[j] * kv
        fits = step_us <= limit_us
        over += np.int64(not fits)
        rate = float_bits(scratch.requests[j] / step_us) if fits else np.int64(NO_RATE)
        scratch.rate[j] = rate
        most = max(most, rate)
    return most, over


@jit_inline
def _first_with(scratch: Scratch, rate: int, count: int) -> int:
    """Return the first batch size with a rate that one has; no early exit, so that LLVM vectorises."""
    first: Any = np.int64(count)
    for j in range(count):
        first = min(first, np.int64(j) if scratch.rate[j] == rate else np.int64(count))
    return int(first)


@jit
def best_decode_batches(
    plans: PlanRows, batch_size: Longs, limit_us: float, scratch: Scratch, best: BestRows
) -> int:
    """Keep for each row the batch size with the most tokens a second. Returns a code."""
    count = len(batch_size)
    for p in range(len(plans.arena_at)):
        arena = _arena(plans, p)
        plan = open_plan(arena)
        runs = _read_batches(arena, plan, batch_size, scratch)
        if runs < 0:
            return CODE_SIZES
        # element by element: taking a row of the array would count a reference for each length
        of_plan = plans.kv_room
        room_of = (
            of_plan[p, 0], of_plan[p, 1], of_plan[p, 2], of_plan[p, 3], of_plan[p, 4], of_plan[p, 5],
            of_plan[p, 6], of_plan[p, 7],
        )  # fmt: skip
        parts, most_running = room_of[0], room_of[7]
        start_kv = 0.0
        stop_kv = 0.0
        room = 0
        for i in range(plans.offsets[p], plans.offsets[p + 1]):
            kv_len = plans.kv_len[i]
            if kv_len < 1 or kv_len > MAX_KV_LEN:
                return CODE_SIZES
            kv = float(kv_len)
            if not start_kv <= kv < stop_kv:
                start_kv, stop_kv = _fill_lines(arena, plan, batch_size, runs, kv, scratch)
            # memory has room for the first batch sizes; their number changes little from one length to the
            # next
            held = held_parts(room_of, kv_len)
            fit = min(parts // max(held, 1), most_running)
            while room < count and batch_size[room] <= fit:
                room += 1
            while room > 0 and batch_size[room - 1] > fit:
                room -= 1
            most, best.over_limit[i] = _highest_rate(scratch, kv, limit_us, room)
            best.over_memory[i] = count - room
            place = -1 if most == NO_RATE else _first_with(scratch, most, room)
            if place < 0:
                best.batch_size[i] = 0
                best.step_us[i] = np.nan
            else:
                best.batch_size[i] = batch_size[place]
                best.step_us[i] = scratch.at_zero_us[place] + scratch.slope_us[place] * kv
            if place == count - 1:
                best.limited_by[i] = LIMITED_BY_BATCH_GRID
            elif place + 1 == room:
                best.limited_by[i] = LIMITED_BY_MEMORY
            elif scratch.rate[place + 1] == NO_RATE:
                best.limited_by[i] = LIMITED_BY_TPOT
            else:
                best.limited_by[i] = LIMITED_BY_THROUGHPUT
    return 0
