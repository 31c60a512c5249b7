"""The next steps of an engine: of all its ranks together, and of its batches in pipeline stages.

Ranks step together. A step of all ranks takes as long as the longest rank's. Its experts compute the tokens
of all ranks, or more, depending on the engine's rules (fastroof.compiled.expert_rows); a rank without
requests waits. A request is assigned to a rank when the engine sees it. Prompts may wait for those of other
ranks.

With pipeline stages, as many batches are on their way through them. Chunks of a prompt that is cut go to one
batch after the other and follow each other through the stages (vLLM 0.33, vllm/v1/core/sched/scheduler.py;
SGLang 0.5.23, chunked_req of srt/managers/scheduler.py); the batch of the last chunk keeps the request. When
a batch leaves the last stage, its tokens are seen, its next step is scheduled, and then those of batches
without requests; all share the waiting requests and the blocks. Every stage takes an equal part of a step's
time:

    end[batch, stage] = max(end[batch - 1, stage], end[batch, stage - 1]) + time[batch] / stages

A batch that lacks blocks preempts its own last request, maybe its only one. If that one started again with
room for a chunk alone, batches could take each other's blocks forever. So nothing starts ahead of preempted
requests, and these only with room for all of their tokens: until a token comes, few preemptions remain.
"""

from __future__ import annotations

from fastroof.arrays import Floats
from fastroof.compiled.expert_rows import RankRules, seen_tokens, wait_for_others_us
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.lanes import take_cut_prompt
from fastroof.compiled.simulation.records import HOLD_NEW, HOLD_PROMPTS, RUN_ALL, Fleet, Parts, Row, Rows
from fastroof.compiled.simulation.scheduler import (
    decodes_run,
    has_prompt,
    held_prompts,
    make_step,
    slots_hold,
)
from fastroof.compiled.simulation.series import Record, add_interval
from fastroof.compiled.steps import EXPERT_AT, PlanParts


@jit_stateful_inline
def ranks_in(fleet: Fleet, pool: Row) -> int:
    """Number of ranks of an engine."""
    return int(pool.ranks) if fleet.has.ranks > 0 else 1


@jit_stateful_inline
def _flight_of(fleet: Fleet, engine: Row, rank: int, batch: int) -> int:
    """Return the place of a lane's newest step in flight."""
    lane = fleet.lanes[fleet.ranks[engine.first_rank + rank].first_lane + batch]
    return int(lane.flights_at + ((lane.oldest + lane.in_flight - 1) & 1))


@jit_stateful_inline
def _together_us(
    fleet: Fleet, arena: Floats, plan: PlanParts, pool: Row, engine: Row, batch: int, parts: Rows
) -> float:
    """Time a step of all ranks, us: the longest rank's, with experts that compute the tokens of all ranks."""
    rules = RankRules(
        pool.ranks,
        pool.in_lockstep,
        pool.prompt_padding,
        pool.decode_padding,
        pool.graph_tokens,
        pool.idle_tokens,
        pool.assignment,
        pool.balance_steps,
    )
    total, fullest, new = 0, 0, 0
    for r in range(pool.ranks):
        if parts[r] > 0:
            flight = fleet.flights[_flight_of(fleet, engine, r, batch)]
            total += flight.tokens
            fullest = max(fullest, flight.tokens)
            new += flight.new
        else:
            total += pool.idle_tokens
    is_decode = new == 0
    seen = seen_tokens(rules, float(total), float(fullest), is_decode)
    has_experts = arena[plan.header_at + EXPERT_AT] > 0.0
    longest_us = 0.0
    for r in range(pool.ranks):
        if parts[r] > 0:
            flight = fleet.flights[_flight_of(fleet, engine, r, batch)]
            if has_experts:
                tokens = float(flight.tokens)
                waits_us = wait_for_others_us(arena, plan, tokens, flight.new == 0, seen, is_decode)
                flight.us = max(flight.us + waits_us * pool.time_scale, flight.host_us)
            longest_us = max(longest_us, flight.us)
    return float(longest_us)


@jit_stateful
def _prompts_begin(
    fleet: Fleet, pool: Row, engine: Row, on: Parts, batch: int, requests: Rows, now_us: float
) -> bool:
    """Whether waiting prompts may start now, if they wait for those of other ranks (``balance_steps``)."""
    all_have, all_decode = True, True
    for r in range(pool.ranks):
        rank = fleet.ranks[engine.first_rank + r]
        lane = fleet.lanes[rank.first_lane + batch]
        all_have &= has_prompt(on, lane, rank, pool, requests, now_us)
        all_decode &= lane.decodes > 0
    if not all_have:
        engine.held_steps += 1
        if all_decode and engine.held_steps < pool.balance_steps:
            return False
    engine.held_steps = 0
    return True


@jit_stateful_inline
def _held_by(pool: Row, engine: Row, lane: Row, rank: Row) -> int:
    """Return which prompts one of several ranks, which pause together, holds back from the next step."""
    if pool.prefill_first > 0:
        if engine.in_a_row < engine.held_until:
            return HOLD_PROMPTS
    elif engine.in_a_row % (pool.pause_steps + 1) > 0 and lane.is_backlogged == 0 and decodes_run(lane, rank):
        return HOLD_PROMPTS
    return slots_hold(lane, rank, pool)


@jit_stateful_inline
def _note_pause(fleet: Fleet, pool: Row, engine: Row, parts: Rows) -> None:
    """Count a step, and let prompts of engines that run them first pause after one with prompts."""
    engine.in_a_row += 1
    for r in range(pool.ranks):
        flight = fleet.flights[_flight_of(fleet, engine, r, 0)]
        if parts[r] > 0 and flight.tokens > flight.decodes * pool.verified:
            engine.held_until = engine.in_a_row + pool.pause_steps


@jit_stateful_inline
def _make_steps(
    fleet: Fleet,
    arena: Floats,
    plan: PlanParts,
    pool: Row,
    engine: Row,
    on: Parts,
    batch: int,
    parts: Rows,
    requests: Rows,
    now_us: float,
    begins_us: float,
) -> float:
    """Schedule a batch's next step on all ranks. Returns its time, us; 0 without requests."""
    if fleet.has.stages > 0 and pool.stages > 1:
        for r in range(ranks_in(fleet, pool)):
            rank = fleet.ranks[engine.first_rank + r]
            for other in range(pool.stages):
                take_cut_prompt(on, fleet.lanes, rank, pool, requests, batch, other)
    holds_all = RUN_ALL
    if fleet.has.ranks > 0 and pool.balance_steps > 0:
        begin = _prompts_begin(fleet, pool, engine, on, batch, requests, now_us)
        holds_all = RUN_ALL if begin else HOLD_NEW
    step_us = 0.0
    for r in range(ranks_in(fleet, pool)):
        rank = fleet.ranks[engine.first_rank + r]
        lane = fleet.lanes[rank.first_lane + batch]
        holds = holds_all
        if fleet.has.pauses > 0 and (pool.pause_steps > 0 or pool.min_free_slots > 0):
            holds = _held_by(pool, engine, lane, rank) if pool.ranks > 1 else held_prompts(lane, rank, pool)
        own_us = make_step(
            arena, plan, pool, on, lane, rank, requests, now_us, engine.end_us, begins_us, holds
        )
        if fleet.has.ranks > 0 or fleet.has.stages > 0:
            parts[r] = 1 if own_us > 0.0 else 0
        step_us = max(step_us, own_us)
    if fleet.has.ranks > 0 and pool.ranks > 1 and step_us > 0.0:
        step_us = _together_us(fleet, arena, plan, pool, engine, batch, parts)
    return float(step_us)


@jit_stateful_inline
def _is_busy(fleet: Fleet, pool: Row, engine: Row, batch: int) -> bool:
    """Whether a batch has a step in flight."""
    for r in range(ranks_in(fleet, pool)):
        if fleet.lanes[fleet.ranks[engine.first_rank + r].first_lane + batch].in_flight > 0:
            return True
    return False


@jit_stateful_inline
def schedule(
    fleet: Fleet,
    arena: Floats,
    plan: PlanParts,
    pool: Row,
    index: int,
    engine: Row,
    on: Parts,
    requests: Rows,
    first: int,
    now_us: float,
) -> None:
    """Give idle lanes their next steps, from batch ``first`` on."""
    has_stages = fleet.has.stages > 0 and pool.stages > 1
    most = pool.stages if has_stages else pool.depth
    ring = fleet.batches.shape[1]
    i = 0
    while i < most and engine.in_flight < most:
        batch = (first + i) % pool.stages if has_stages else 0
        i += 1
        if has_stages and _is_busy(fleet, pool, engine, batch):
            continue
        at = engine.oldest + engine.in_flight
        if at >= ring:
            at -= ring
        parts = fleet.parts[index, at if fleet.has.ranks > 0 or fleet.has.stages > 0 else 0]
        begins_us = max(now_us, engine.end_us)
        if has_stages:
            begins_us = max(now_us, fleet.stage_free_us[index, 0])
        step_us = _make_steps(fleet, arena, plan, pool, engine, on, batch, parts, requests, now_us, begins_us)
        if step_us == 0.0:
            if has_stages:
                continue
            if fleet.has.pauses > 0 and pool.ranks > 1 and engine.in_flight == 0:
                # without a request that decodes, prompts are free at once
                is_over = engine.in_a_row < engine.held_until
                engine.in_a_row, engine.held_until = 0, 0
                if is_over:
                    i -= 1
                    continue
            break
        if fleet.has.pauses > 0 and pool.ranks > 1:
            _note_pause(fleet, pool, engine, parts)
        row = fleet.batches[index, at]
        row.lane, row.us, row.end_us = batch, step_us, now_us + step_us
        if has_stages:
            at_us = now_us
            for stage in range(pool.stages):
                at_us = max(at_us, fleet.stage_free_us[index, stage]) + step_us / pool.stages
                fleet.stage_free_us[index, stage] = at_us
            row.end_us = at_us
        if engine.in_flight == 0:
            engine.end_us = row.end_us
        engine.in_flight += 1


@jit_stateful_inline
def note_step(fleet: Fleet, pool: Row, index: int, engine: Row, record: Record, now_us: float) -> None:
    """Add the time until the oldest batch ends to the series."""
    running, waiting, blocks, new_tokens, tokens = 0, 0, 0, 0, 0
    has_parts = fleet.has.ranks > 0 or fleet.has.stages > 0
    row = fleet.batches[index, engine.oldest]
    for r in range(ranks_in(fleet, pool)):
        rank = fleet.ranks[engine.first_rank + r]
        lane = fleet.lanes[rank.first_lane + (row.lane if fleet.has.stages > 0 else 0)]
        running += rank.running
        waiting += rank.waiting
        blocks += rank.num_blocks - rank.free
        if not has_parts or fleet.parts[index, engine.oldest, r] > 0:
            flight = fleet.flights[lane.flights_at + lane.oldest]
            new_tokens += flight.tokens
            tokens += flight.decodes + flight.firsts
            if fleet.has.drafts > 0:
                tokens += flight.more
    add_interval(record, now_us, engine.end_us, running, waiting, blocks, (new_tokens, tokens))
