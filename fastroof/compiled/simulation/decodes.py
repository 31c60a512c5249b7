"""Runs of decode steps between two events of an engine with one lane: everything is in registers."""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.grids import axis_cell, line_at
from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.layout import FORM_LATENCY
from fastroof.compiled.llvm import table_load
from fastroof.compiled.simulation.records import NONE, Parts, Row
from fastroof.compiled.simulation.series import BinPart, Record, add_interval, add_part, bin_of, gap_bin
from fastroof.compiled.simulation.tiers import fetched_us
from fastroof.compiled.simulation.units import in_block
from fastroof.compiled.steps import (
    PlanParts,
    WindowParts,
    decode_rows_us,
    open_window,
    windowed_decode_step_us,
)


@jit_stateful_inline
def _is_steady(on: Parts, engine: Row, lane: Row, rank: Row, pool: Row, plan: PlanParts) -> bool:
    """Whether every running request decodes, no waiting one can start, and the step in flight is the same."""
    if lane.decodes == 0 or lane.partial != NONE or (on.has.order > 0 and lane.fresh > 0):
        return False
    if on.has.drafts > 0 and pool.verified > 1:
        return False
    if plan.decode.form != FORM_LATENCY:
        return False
    waits = rank.waiting > 0
    if on.has.tiers > 0 and pool.num_tiers > 0:
        waits = rank.waiting > rank.fetching
        if rank.fetching > 0:
            waits |= fetched_us(rank, on.chains) <= engine.now_us
    if waits and rank.running < pool.max_num_seqs:
        return False
    if pool.depth == 1:
        return True
    oldest = on.flights[lane.flights_at + lane.oldest]
    return bool(
        lane.in_flight == 1
        and oldest.step == lane.step - 1
        and oldest.firsts == 0
        and oldest.tokens == lane.decodes
        and oldest.decodes == lane.decodes
        and on.calendar[lane.calendar_at + ((lane.step - 1) & lane.mask)] == NONE
    )


@jit_stateful_inline
def run_decodes(
    arena: Floats,
    plan: PlanParts,
    pool: Row,
    on: Parts,
    engine: Row,
    lane: Row,
    rank: Row,
    record: Record,
    horizon_us: float,
) -> None:
    """Run decode steps that end before ``horizon_us`` while nothing arrives."""
    if not _is_steady(on, engine, lane, rank, pool, plan):
        return
    mask, calendar_at, due_at = lane.mask, lane.calendar_at, lane.due_at
    oldest = on.flights[lane.flights_at + lane.oldest]
    decodes, kv_sum, step, free = lane.decodes, lane.kv_sum, lane.step, rank.free
    now_us, last_us, busy_us = engine.now_us, lane.last_decode_us, engine.busy_us
    is_async = pool.depth > 1
    end_us, flight_us = engine.end_us, oldest.us
    first_step, phase = step, in_block(step, pool)
    takes_blocks, time_scale, block_size = pool.reserves_output == 0, pool.time_scale, pool.block_size
    rows_us, batch = decode_rows_us(arena, plan, decodes), float(decodes)
    row = axis_cell(arena, plan.decode.y, batch)
    above = batch - table_load(arena, plan.decode.y.nodes_at + row)
    running, waiting, num_blocks = rank.running, rank.waiting, rank.num_blocks
    # the line segment that the mean kv_len is on, up to the next node; pending additions to a bin of gaps and
    # series
    at_zero_us, slope_us, line_end = 0.0, 0.0, 0.0
    gap_key, gaps = 0, 0
    window = pool.window if on.has.windows > 0 else 0
    window_sum, below = lane.window_sum, lane.below
    within = WindowParts(0, 0.0, 0.0, plan.decode, plan.prefill, 0, False, 0.0)
    if on.has.windows > 0 and window > 0:
        within = open_window(arena, 0)
    bin_at, bin_end_us = bin_of(record, now_us)
    part = BinPart(0.0, 0.0, 0)
    while on.calendar[calendar_at + (step & mask)] == NONE:
        need = on.due[due_at + phase] if takes_blocks else 0
        if need > free:
            break
        mean_kv = float(kv_sum) / batch
        if on.has.windows > 0 and window > 0:
            step_us = windowed_decode_step_us(arena, plan, within, rows_us, decodes, mean_kv, window_sum)
        else:
            if mean_kv >= line_end:
                column = axis_cell(arena, plan.decode.x, mean_kv)
                at_zero_us, slope_us = line_at(arena, plan.decode, row, above, column)
                line_end = math.inf
                if column < plan.decode.x.last_cell:
                    line_end = table_load(arena, plan.decode.x.nodes_at + column + 1)
            step_us = (rows_us + at_zero_us) + slope_us * mean_kv
        step_us *= time_scale
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
        if on.has.windows > 0 and window > 0:
            window_sum += below
            below -= on.filled[calendar_at + (step & mask)]
            on.filled[calendar_at + (step & mask)] = 0
        phase = phase + 1 if phase + 1 < block_size else 0
    record.gaps[gap_key] += gaps
    add_part(record, bin_at, part, running, waiting, decodes)
    if step == first_step:
        return
    lane.kv_sum, lane.step, rank.free = kv_sum, step, free
    lane.window_sum, lane.below = window_sum, below
    engine.now_us, lane.last_decode_us, engine.busy_us = now_us, last_us, busy_us
    lane.steps += step - first_step
    was_free = lane.is_backlogged == 1 or lane.steps > lane.held_until
    if on.has.pauses > 0 and pool.pause_steps > 0 and was_free:
        # prompts were free to join the last of these steps
        lane.is_backlogged = 1 if pool.prefill_first == 0 and waiting > 0 else 0
    lane.decode_tokens += (step - first_step) * decodes
    rank.least_free = min(rank.least_free, free)
    if is_async:
        engine.end_us = end_us
        oldest.us, oldest.step = flight_us, step - 1
