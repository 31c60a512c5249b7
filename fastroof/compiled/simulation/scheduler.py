"""Scheduling: the requests of a lane's next step, and the step's time.

Running requests come first, in order of admission, then waiting ones. In engines that run prompts ahead of
decodes, a step holds only prompts while one can be computed, else only decodes. Every decode advances by one
token per step, so decodes are handled as sums; only prompts and requests that start or end are handled one by
one.
"""

from __future__ import annotations

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.request_sums import StepSums, WindowSums, no_window_sums, with_request
from fastroof.compiled.simulation.drafts import drafted_step_us, fitting_need, keep_drafts
from fastroof.compiled.simulation.lanes import enter_decodes, leave_decodes, preempt_last, take_slot
from fastroof.compiled.simulation.lookup import (
    Found,
    find_cached,
    find_fetched,
    free_reserved,
    hold_cached,
    next_fetched,
    start_fetch,
)
from fastroof.compiled.simulation.prefix_cache import publish_chunk, publish_fetched
from fastroof.compiled.simulation.records import (
    GOES_ON,
    HOLD_NEW,
    HOLD_PROMPTS,
    NONE,
    RUN_ALL,
    TIMED_OUT,
    Parts,
    Row,
    Rows,
)
from fastroof.compiled.simulation.tiers import fetch, is_waited_for, reserved_blocks, waited_us
from fastroof.compiled.simulation.units import blocks_of, in_block
from fastroof.compiled.steps import PlanParts, open_window, summed_step_us, windowed_step_us, with_floor


@jit_stateful_inline
def with_chunk(sums: StepSums, new: int, context: int) -> StepSums:
    """Add a chunk to a step's sums; one token after a context counts as a decode."""
    if new == 1 and context > 0:
        return StepSums(
            sums.decodes + 1,
            sums.kv_sum + context + 1,
            sums.new_sum,
            sums.causal_pairs,
            sums.prefix_pairs,
            sums.prefix_sum,
        )
    return StepSums(
        sums.decodes,
        sums.kv_sum,
        sums.new_sum + new,
        sums.causal_pairs + ((new * (new + 1)) >> 1),
        sums.prefix_pairs + new * context,
        sums.prefix_sum + context,
    )


@jit_stateful_inline
def first_preempted(on: Parts, rank: Row, requests: Rows) -> int:
    """Return the preempted request that is admitted first, or NONE."""
    if on.has.timeouts > 0:
        while rank.preempted != NONE and requests[rank.preempted].status == TIMED_OUT:
            rank.preempted = requests[rank.preempted].next_preempted
    return int(rank.preempted)


@jit_stateful_inline
def _next_waiting(on: Parts, rank: Row, pool: Row, requests: Rows, now_us: float) -> int:
    """Return the first waiting request, or NONE."""
    preempted = first_preempted(on, rank, requests)
    if preempted != NONE and (on.has.pools == 0 or pool.has_reserved == 0):
        return preempted
    if on.has.timeouts > 0:
        while rank.head != NONE and requests[rank.head].status == TIMED_OUT:
            rank.head = requests[rank.head].next_sent
    if rank.head != NONE and requests[rank.head].arrival_us <= now_us:
        return int(rank.head)
    # NONE, unless arrivals go first
    return preempted


@jit_stateful_inline
def _chunk_need(on: Parts, lane: Row, pool: Row, computed: int, new: int) -> int:
    """Count the blocks that the cut prompt lacks for ``new`` more tokens."""
    if on.has.drafts > 0 and pool.verified > 1:
        if new <= 0:
            return 0
        return int(blocks_of(computed + new + pool.lookahead, pool) - on.slots[lane.partial].held)
    return blocks_of(computed + new, pool) - blocks_of(computed, pool)


@jit_stateful_inline
def _first_taken(on: Parts, lane: Row, rank: Row, pool: Row, need: int) -> int:
    """Count the free blocks that decodes take before one is short; each takes all that it lacks, or none."""
    if on.has.drafts > 0 and pool.verified > 1:
        return fitting_need(on, lane, pool, need, rank.free)
    return int(min(need, rank.free))


@jit_stateful_inline
def _reserve_blocks(
    on: Parts, lane: Row, rank: Row, pool: Row, requests: Rows, end_us: float, is_held: bool
) -> bool:
    """Allocate the blocks that running requests need in this step; preempt the last admitted if short.

    A cut prompt needs none if it ``is_held``.
    """
    decode_tokens = lane.decodes
    if on.has.drafts > 0 and pool.verified > 1:
        need = int(on.due[lane.due_at])
        decode_tokens *= pool.verified
    else:
        need = int(on.due[lane.due_at + in_block(lane.step, pool)])
    partial_need = 0
    if lane.partial != NONE and not is_held:
        computed = lane.partial_computed
        new = min(lane.partial_whole - computed, pool.budget - decode_tokens)
        partial_need = _chunk_need(on, lane, pool, computed, new)
        need += partial_need
    if need <= rank.free:
        rank.free -= need
        return False
    # decodes take what is free before the next request is preempted, so that a prefix cache forgets those
    # blocks first; a cut prompt takes its blocks last, and is preempted first
    taken = _first_taken(on, lane, rank, pool, need - partial_need)
    while need > rank.free:
        rank.free -= taken
        need -= taken
        need -= preempt_last(on, lane, rank, pool, requests, end_us, partial_need)
        taken = _first_taken(on, lane, rank, pool, need)
    rank.free -= need
    return True


@jit_stateful_inline
def blocks_needed(row: Row, pool: Row, admits_whole: bool, tokens: int, whole: int) -> tuple[int, int]:
    """Count the blocks a request takes if it starts with ``tokens`` of ``whole``, and those it needs free."""
    if pool.reserves_output > 0:
        held = blocks_of(int(row.input_tokens) + int(row.output_tokens) + pool.beyond, pool)
        return held, held
    held = blocks_of(tokens, pool)
    return held, blocks_of(whole, pool) if admits_whole else held


@jit_stateful_inline
def _found(on: Parts, rank: Row, pool: Row, requests: Rows, request: int, whole: int) -> Found:
    """Find what a waiting request need not compute; reserved blocks are in use already."""
    found = find_cached(on, rank, pool, requests, request, whole)
    if on.has.pools > 0 and pool.has_reserved > 0 and request != rank.preempted:
        in_use = blocks_needed(requests[request], pool, pool.admits_whole > 0, whole, whole)[0]
        found = Found(found.context, 0, in_use, 0)
    return found


@jit_stateful_inline
def _has_slot(on: Parts, lane: Row, rank: Row, pool: Row) -> bool:
    """Whether one more request may begin in a lane."""
    if on.has.stages > 0 and pool.shares_slots == 0:
        return bool(lane.running < pool.max_num_seqs)
    return bool(rank.running < pool.max_num_seqs)


@jit_stateful_inline
def admits_whole_prompts(on: Parts, rank: Row, pool: Row, requests: Rows) -> bool:
    """Whether requests begin with room for all of their tokens alone: with stages, while one is preempted."""
    if on.has.stages > 0 and pool.stages > 1 and first_preempted(on, rank, requests) != NONE:
        return True
    return bool(pool.admits_whole > 0)


@jit_stateful_inline
def has_prompt(on: Parts, lane: Row, rank: Row, pool: Row, requests: Rows, now_us: float) -> bool:
    """Whether a lane's next step could compute a prompt: a cut one, or the first that waits."""
    if lane.partial != NONE:
        return True
    decode_tokens = lane.decodes
    if on.has.drafts > 0 and pool.verified > 1:
        decode_tokens *= pool.verified
    left = pool.budget - (decode_tokens if pool.prefill_first == 0 else 0)
    if left <= 0 or not _has_slot(on, lane, rank, pool):
        return False
    if on.has.tiers > 0 and pool.num_tiers > 0 and next_fetched(on, rank, pool, requests, now_us) != NONE:
        return True
    request = _next_waiting(on, rank, pool, requests, now_us)
    if request == NONE:
        return False
    row = requests[request]
    whole = int(row.input_tokens) + int(row.sent)
    found = _found(on, rank, pool, requests, request, whole)
    new = whole - found.context
    if new > left and pool.is_chunked == 0:
        return False
    admits_whole = admits_whole_prompts(on, rank, pool, requests)
    needed = blocks_needed(row, pool, admits_whole, found.context + min(new, left), whole)[1]
    return bool(needed - found.in_use <= rank.free)


@jit_stateful_inline
def decodes_run(lane: Row, rank: Row) -> bool:
    """Whether a request runs whose prompt is computed; its last token may be in flight."""
    return bool(rank.running > (1 if lane.partial != NONE else 0))


@jit_stateful_inline
def slots_hold(lane: Row, rank: Row, pool: Row) -> int:
    """Return HOLD_NEW while prompts wait for more free slots, else RUN_ALL; a cut prompt goes on first."""
    free = pool.max_num_seqs - rank.running
    if free >= pool.min_free_slots or lane.partial != NONE or not decodes_run(lane, rank):
        return RUN_ALL
    return HOLD_NEW


@jit_stateful_inline
def held_prompts(lane: Row, rank: Row, pool: Row) -> int:
    """Return which prompts an engine of one rank holds back from its next step."""
    if lane.steps < lane.held_until and lane.is_backlogged == 0 and decodes_run(lane, rank):
        return HOLD_PROMPTS
    return slots_hold(lane, rank, pool)


@jit_stateful_inline
def _note_chunk(
    on: Parts, lane: Row, at: int, request: int, slot: int, tokens: int, whole: int, firsts: int
) -> int:
    """Note a chunk that ends after ``tokens`` of ``whole``. Returns how many prompts the step completes."""
    if tokens < whole:
        lane.partial, lane.partial_computed, lane.partial_whole = slot, tokens, whole
        return firsts
    first = on.firsts[at, lane.slots_at + firsts]
    first.request, first.slot = request, slot
    return firsts + 1


@jit_stateful_inline
def _advance_decodes(on: Parts, lane: Row, pool: Row, flight: Row) -> None:
    """Advance all decodes by a token, or those they keep: those with their last one leave, others grow."""
    if on.has.drafts > 0 and pool.verified > 1:
        flight.more = keep_drafts(on, lane, pool)
    slot = int(on.calendar[lane.calendar_at + (lane.step & lane.mask)])
    while slot != NONE:
        leave_decodes(on, lane, pool, slot)
        slot = int(on.slots[slot].bucket_next)
    lane.kv_sum += lane.decodes
    lane.step += 1
    if on.has.windows > 0 and pool.window > 0 and (on.has.drafts == 0 or pool.verified == 1):
        filled = lane.calendar_at + (lane.step & lane.mask)
        lane.window_sum += lane.below
        lane.below -= on.filled[filled]
        on.filled[filled] = 0


@jit_stateful_inline
def _end_prompts(on: Parts, lane: Row, pool: Row, requests: Rows, at: int, firsts: int) -> None:
    """Let requests whose prompts a step completes decode from the next step on, if tokens remain."""
    for i in range(firsts):
        first = on.firsts[at, lane.slots_at + i]
        row = requests[first.request]
        remaining = int(row.output_tokens) - int(row.sent) - 1
        if remaining > 0:
            enter_decodes(on, lane, pool, first.slot, int(row.input_tokens) + int(row.sent), remaining)
            first.slot = GOES_ON - first.slot


@jit_stateful_inline
def _host_us(plan: PlanParts, on: Parts, lane: Row, pool: Row, at: int, new_tokens: int) -> float:
    """Return the minimum time of a step with prefill, us: launching its kernels, as far as the GPU waits.

    With asynchronous scheduling the host starts as the step before does, or when it has launched that.
    """
    if new_tokens == 0:
        return 0.0
    host_us = plan.prefill_floor_us * pool.time_scale
    if plan.hides_host and pool.depth > 1 and lane.in_flight > 0:
        before = on.flights[lane.flights_at + 1 - at]
        host_us -= before.us - before.host_us
    return float(max(host_us, 0.0))


@jit_stateful_inline
def make_step(
    arena: Floats,
    plan: PlanParts,
    pool: Row,
    on: Parts,
    lane: Row,
    rank: Row,
    requests: Rows,
    now_us: float,
    end_us: float,
    begins_us: float,
    holds: int,
) -> float:
    """Schedule a lane's next step, after those in flight. Returns its time, us; 0 without requests.

    ``end_us`` is when the engine's running step ends, ``begins_us`` when this one begins.
    """
    has_tiers = on.has.tiers > 0 and pool.num_tiers > 0
    window = pool.window if on.has.windows > 0 else 0
    at = (lane.oldest + lane.in_flight) & 1
    admits_whole = admits_whole_prompts(on, rank, pool, requests)
    decodes_too = on.has.order == 0 or pool.prefill_first == 0
    is_short = False
    is_held = on.has.pauses > 0 and holds == HOLD_PROMPTS
    if on.has.tiers > 0 and has_tiers:
        next_fetched(on, rank, pool, requests, now_us)
    if decodes_too and pool.reserves_output == 0:
        is_short = _reserve_blocks(on, lane, rank, pool, requests, end_us, is_held)
    verified = 1
    if on.has.drafts > 0:
        verified = pool.verified
    left = pool.budget - (lane.decodes * verified if decodes_too else 0)
    sums = StepSums(0, 0, 0, 0, 0, 0)
    in_window, in_draft = no_window_sums(), no_window_sums()
    chunks, firsts, prompt_tokens = 0, 0, 0
    slot = lane.partial
    if slot != NONE and not is_held:
        # the prompt that an earlier step cut
        context, whole = lane.partial_computed, lane.partial_whole
        new = min(whole - context, left)
        if on.has.order > 0 and not decodes_too and pool.reserves_output == 0:
            more = _chunk_need(on, lane, pool, context, new)
            if more > rank.free:
                # decode steps between its chunks took the blocks; it is the last admitted
                more = preempt_last(on, lane, rank, pool, requests, end_us, 0)
                new, is_short = 0, True
            rank.free -= more
        if new > 0:
            left -= new
            chunks, prompt_tokens = 1, new
            sums = with_chunk(sums, new, context)
            if on.has.windows > 0 and window > 0:
                in_window = with_request(in_window, new, context, window)
            if on.has.drafts > 0 and verified > 1:
                if pool.draft_window > 0:
                    in_draft = with_request(in_draft, new, context, pool.draft_window)
                if pool.reserves_output == 0:
                    on.slots[slot].held = blocks_of(context + new + pool.lookahead, pool)
            lane.partial = NONE
            publish_chunk(on, rank, pool, on.slots[slot].request, context, context + new)
            firsts = _note_chunk(on, lane, at, on.slots[slot].request, slot, context + new, whole, firsts)
    is_cut = chunks > 0
    fetched_all_us, fetched_before_us = 0.0, 0.0
    while left > 0 and not is_short and _has_slot(on, lane, rank, pool):
        if (on.has.pauses > 0 or on.has.ranks > 0) and holds == HOLD_NEW:
            break
        request = NONE
        if on.has.tiers > 0 and has_tiers:
            request = next_fetched(on, rank, pool, requests, now_us)
        is_fetched = request != NONE
        if not is_fetched:
            request = _next_waiting(on, rank, pool, requests, now_us)
        if request == NONE:
            break
        row = requests[request]
        is_preempted = request == rank.preempted
        whole = int(row.input_tokens) + int(row.sent)
        if on.has.tiers > 0 and is_fetched:
            found = find_fetched(on, rank, pool, request, whole)
        else:
            found = _found(on, rank, pool, requests, request, whole)
        context = found.context
        new = whole - context
        is_prompt = new > 1 or pool.prefill_first == 1 or lane.partial != NONE
        if on.has.pauses > 0 and is_held and is_prompt:
            # a prompt with one token to compute is a decode to vLLM, which holds back the others
            break
        if new > left:
            if pool.is_chunked == 0:
                break
            new = left
        held, needed = blocks_needed(row, pool, admits_whole, context + new, whole)
        is_waited = False
        if on.has.tiers > 0 and is_fetched:
            free_reserved(on, rank, pool, requests, request, found, whole)
        else:
            if on.has.tiers > 0 and has_tiers and found.reached > 0 and is_waited_for(on, rank, pool):
                is_waited = True
                needed = reserved_blocks(pool, requests, request)
            if needed - found.in_use > rank.free:
                break
            if is_preempted:
                rank.preempted = row.next_preempted
            else:
                rank.head = row.next_sent
        if on.has.tiers > 0 and is_waited:
            start_fetch(on, rank, pool, requests, request, found, needed, now_us)
            continue
        slot = take_slot(on, lane, rank, requests, request, held)
        if on.has.pools > 0 and pool.has_reserved > 0:
            rank.free += found.in_use
        if on.has.cache > 0 and pool.has_cache > 0:
            if not is_fetched:
                is_first = on.chains[request].found < 0
                hold_cached(on, rank, requests, request, found)
                if on.has.tiers > 0 and has_tiers and found.reached > found.blocks:
                    publish_fetched(on, rank, pool, request, found.blocks, found.reached)
                    all_us, before_us = fetch(on, rank, pool, request, is_first, now_us)
                    fetched_all_us = max(fetched_all_us, all_us)
                    fetched_before_us = max(fetched_before_us, before_us)
            publish_chunk(on, rank, pool, request, context, context + new)
        lane.cached_tokens += context
        left -= new
        chunks += 1
        prompt_tokens += new
        sums = with_chunk(sums, new, context)
        if on.has.windows > 0 and window > 0:
            in_window = with_request(in_window, new, context, window)
        if on.has.drafts > 0 and verified > 1 and pool.draft_window > 0:
            in_draft = with_request(in_draft, new, context, pool.draft_window)
        firsts = _note_chunk(on, lane, at, request, slot, context + new, whole, firsts)
    if on.has.order > 0 and not decodes_too and chunks == 0:
        decodes_too = True
        if pool.reserves_output == 0:
            _reserve_blocks(on, lane, rank, pool, requests, end_us, is_held)
    if on.has.pauses > 0 and pool.pause_steps > 0:
        carries = is_cut or prompt_tokens > chunks or lane.partial != NONE or pool.prefill_first == 1
        if carries and chunks > 0:
            lane.held_until = lane.steps + 1 + pool.pause_steps
        if pool.prefill_first == 0 and not is_held and not is_short:
            lane.is_backlogged = 1 if rank.waiting > 0 else 0
    decodes = lane.decodes if decodes_too else 0
    if decodes + chunks == 0:
        return 0.0
    of_all = StepSums(
        sums.decodes + decodes,
        sums.kv_sum + (lane.kv_sum if decodes_too else 0),
        sums.new_sum,
        sums.causal_pairs,
        sums.prefix_pairs,
        sums.prefix_sum,
    )
    host_us = _host_us(plan, on, lane, pool, at, sums.new_sum)
    draft_us = 0.0
    if on.has.drafts > 0 and verified > 1:
        seen_sum = in_window.kv_sum + (lane.window_sum if decodes_too else 0)
        in_window = WindowSums(seen_sum, in_window.causal_pairs, in_window.prefix_pairs, in_window.prefix_sum)
        kv_sum = lane.kv_sum if decodes_too else 0
        step_us, draft_us = drafted_step_us(
            arena, with_floor(plan, 0.0), pool, decodes, kv_sum, chunks, sums, in_window, in_draft
        )
    elif on.has.windows > 0 and window > 0:
        of_windows = WindowSums(
            in_window.kv_sum + (lane.window_sum if decodes_too else 0),
            in_window.causal_pairs,
            in_window.prefix_pairs,
            in_window.prefix_sum,
        )
        bare = with_floor(plan, 0.0)
        step_us = windowed_step_us(arena, bare, open_window(arena, 0), decodes + chunks, of_all, of_windows)
    else:
        step_us = summed_step_us(arena, with_floor(plan, 0.0), decodes + chunks, of_all)
    step_us = max(step_us * pool.time_scale, host_us)
    if on.has.drafts > 0 and verified > 1:
        step_us += draft_us * pool.time_scale
    if on.has.tiers > 0 and has_tiers and fetched_all_us > begins_us:
        layers = on.tiers[0].layers
        longer_us = waited_us(step_us, layers, begins_us, fetched_all_us, fetched_before_us)
        rank.step_wait_us += longer_us - step_us
        step_us = longer_us
    flight = on.flights[lane.flights_at + at]
    flight.step = lane.step if decodes_too else NONE
    flight.decodes, flight.firsts = decodes, firsts
    if on.has.drafts > 0:
        flight.more = 0
    flight.tokens, flight.new = decodes * verified + prompt_tokens, sums.new_sum
    flight.us, flight.host_us = step_us, host_us
    lane.in_flight += 1
    lane.steps += 1
    lane.mixed_steps += 1 if chunks > 0 and decodes > 0 else 0
    lane.prefill_steps += 1 if chunks > 0 and decodes == 0 else 0
    lane.prefill_tokens += prompt_tokens
    lane.decode_tokens += decodes
    rank.peak_running = max(rank.peak_running, rank.running)
    if on.has.stages > 0:
        lane.peak_running = max(lane.peak_running, lane.running)
    rank.least_free = min(rank.least_free, rank.free)
    if decodes_too:
        _advance_decodes(on, lane, pool, flight)
    if firsts > 0:
        _end_prompts(on, lane, pool, requests, at, firsts)
    return float(step_us)
