"""Steps of decodes alone, one after the other, until something else happens: most steps of most traces.

The same steps as one by one, to the last bit: between two events nothing changes but the sum of kv, so what
an engine remembers is kept in registers. Predicted 15 ns a step instead of 35.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.grids import FORM_LATENCY, axis_cell, line_at
from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.llvm import table_load
from fastroof.compiled.simulation.records import BinPart, Record, add_interval, add_part, bin_of, gap_bin
from fastroof.compiled.simulation.state import (
    BELOW,
    BUSY_US,
    DECODE_TOKENS,
    DECODES,
    END,
    FILLED,
    FIRST_SLOT,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_STEP,
    FLIGHT_TOKENS,
    FLIGHT_US,
    FREE,
    FRESH,
    IN_FLIGHT,
    KV_SUM,
    LAST_DECODE_END,
    LEAST_FREE,
    NONE,
    NOW,
    NUM_BLOCKS,
    OLDEST,
    PARTIAL,
    RUNNING,
    STEP,
    STEPS,
    WAITING,
    WINDOW_SUM,
    EngineOptions,
    EngineState,
    in_block,
)
from fastroof.compiled.steps import (
    PlanParts,
    WindowParts,
    decode_rows_us,
    open_window,
    windowed_decode_step_us,
)

__all__ = ["run_decodes"]


@jit_stateful_inline
def _is_steady(state: EngineState, options: EngineOptions, plan: PlanParts) -> bool:
    """Whether all that runs decodes, nothing that waits can start, and the step in flight is alike."""
    scalars = state.scalars
    if scalars[DECODES] == 0 or scalars[PARTIAL] != NONE or scalars[FRESH] > 0:
        return False
    if plan.decode.form != FORM_LATENCY:
        return False
    if scalars[WAITING] > 0 and scalars[RUNNING] < options.max_seqs:
        return False
    if options.depth == 1:
        return True
    flight = scalars[OLDEST]
    return bool(
        scalars[IN_FLIGHT] == 1
        and scalars[FLIGHT_STEP + flight] == scalars[STEP] - 1
        and scalars[FLIGHT_FIRSTS + flight] == 0
        and scalars[FLIGHT_TOKENS + flight] == scalars[DECODES]
        and scalars[FLIGHT_DECODES + flight] == scalars[DECODES]
        and state.calendar[FIRST_SLOT, (scalars[STEP] - 1) & (state.calendar.shape[1] - 1)] == NONE
    )


@jit_stateful_inline
def run_decodes(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    state: EngineState,
    record: Record,
    horizon_us: float,
) -> None:
    """Run decode steps that end before ``horizon_us`` while nothing arrives."""
    if not _is_steady(state, options, plan):
        return
    scalars, clock = state.scalars, state.clock
    decodes, kv_sum = scalars[DECODES], scalars[KV_SUM]
    step, free = scalars[STEP], scalars[FREE]
    now_us, last_us, busy_us = clock[NOW], clock[LAST_DECODE_END], clock[BUSY_US]
    is_async = options.depth > 1
    end_us, flight_us = clock[END], clock[FLIGHT_US + scalars[OLDEST]]
    first_step = step
    mask = state.calendar.shape[1] - 1
    phase = in_block(step, options)
    takes_blocks = options.reserves_output == 0
    rows_us, batch = decode_rows_us(arena, plan, decodes), float(decodes)
    row = axis_cell(arena, plan.decode.y, batch)
    above = batch - table_load(arena, plan.decode.y.nodes_at + row)
    running, waiting, num_blocks = scalars[RUNNING], scalars[WAITING], scalars[NUM_BLOCKS]
    # the straight line that the mean kv is on, up to the next node; what a bin of gaps and of series will get
    at_zero_us, slope_us, line_end = 0.0, 0.0, 0.0
    gap_key, gaps = 0, 0
    window, window_sum, below = plan.window, scalars[WINDOW_SUM], scalars[BELOW]
    within = WindowParts(0, 0.0, 0.0, plan.decode, plan.prefill, 0, False, 0.0)
    if window > 0:
        within = open_window(arena, 0)
    bin_at, bin_end_us = bin_of(record, now_us)
    part = BinPart(0.0, 0.0, 0)
    while state.calendar[FIRST_SLOT, step & mask] == NONE:
        need = state.due[phase] if takes_blocks else 0
        if need > free:
            break
        mean_kv = float(kv_sum) / batch
        if window > 0:
            step_us = windowed_decode_step_us(arena, plan, within, rows_us, decodes, mean_kv, window_sum)
        else:
            if mean_kv >= line_end:
                column = axis_cell(arena, plan.decode.x, mean_kv)
                at_zero_us, slope_us = line_at(arena, plan.decode, row, above, column)
                line_end = math.inf
                if column < plan.decode.x.last_cell:
                    line_end = table_load(arena, plan.decode.x.nodes_at + column + 1)
            step_us = (rows_us + at_zero_us) + slope_us * mean_kv
        step_us *= options.time_scale
        if not is_async:
            end_us = now_us + step_us
            flight_us = step_us
        if end_us >= horizon_us:
            break
        free -= need
        length_us = end_us - now_us
        blocks_us = length_us * float(num_blocks - free)
        if end_us < bin_end_us:
            part = BinPart(part.length_us + length_us, part.blocks_us + blocks_us, part.steps + 1)
        else:
            add_part(record, bin_at, part, running, waiting, decodes)
            part = BinPart(0.0, 0.0, 0)
            add_interval(record, now_us, end_us, running, waiting, num_blocks - free, (decodes, decodes))
            bin_at, bin_end_us = bin_of(record, end_us)
        key = gap_bin(end_us - last_us)
        if key != gap_key:
            record.gaps[gap_key] += gaps
            gap_key, gaps = key, 0
        gaps += decodes
        busy_us += flight_us
        last_us = end_us
        now_us = end_us
        if is_async:
            end_us = now_us + step_us
            flight_us = step_us
        kv_sum += decodes
        step += 1
        if window > 0:
            window_sum += below
            below -= state.calendar[FILLED, step & mask]
            state.calendar[FILLED, step & mask] = 0
        phase = phase + 1 if phase + 1 < options.block_size else 0
    record.gaps[gap_key] += gaps
    add_part(record, bin_at, part, running, waiting, decodes)
    if step == first_step:
        return
    scalars[KV_SUM], scalars[STEP], scalars[FREE] = kv_sum, step, free
    scalars[WINDOW_SUM], scalars[BELOW] = window_sum, below
    clock[NOW], clock[LAST_DECODE_END], clock[BUSY_US] = now_us, last_us, busy_us
    scalars[STEPS] += step - first_step
    scalars[DECODE_TOKENS] += (step - first_step) * decodes
    scalars[LEAST_FREE] = min(scalars[LEAST_FREE], free)
    if is_async:
        clock[END] = end_us
        clock[FLIGHT_US + scalars[OLDEST]] = flight_us
        scalars[FLIGHT_STEP + scalars[OLDEST]] = step - 1
