"""Pools of engines that prefill and that decode, and transfers between them, in order of events.

At one instant: requests come, prefill engines end steps, transfers begin, transfers end, decode engines end
steps. A prompt that is computed is sent to a decode engine; its arrival there is when its transfer ends. What
ends in either pool lets clients and sessions go on. Clients give up when the engine that has their request
ends a step, or when its transfer ends.

With reservations a prompt keeps its blocks until it is sent, and its transfer begins when its decode engine
has a slot and blocks for it. Requests wait for that in order of arrival, and while no preempted one waits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats, Ints
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.preemption import drop_request
from fastroof.compiled.simulation.prefix_cache import find_blocks, hold_chain, release_chain
from fastroof.compiled.simulation.ranks import (
    FIRST_SENT,
    GROUP_FLIGHT_US,
    GROUP_IN_FLIGHT,
    GROUP_OLDEST,
    SENT,
    group_of,
    group_schedule,
    group_step_end,
    push_to_group,
    see_sent,
)
from fastroof.compiled.simulation.replicas import (
    Fleet,
    choose_replica,
    engine_in,
    next_engine,
    ranks_in,
    release_clients,
    restart_fleet,
    send_to_engine,
)
from fastroof.compiled.simulation.scheduling import blocks_needed
from fastroof.compiled.simulation.sessions import coming_us, end_parent, pop_coming
from fastroof.compiled.simulation.state import (
    BUCKET_NEXT,
    CODE_STOPPED,
    CODE_STUCK,
    DEADLINE,
    DECODES_NEXT,
    DONE_PLACE,
    FIRST_FIELDS,
    FIRST_REQUEST,
    FIRST_SLOT,
    FIRST_SLOT_OF,
    FLIGHT_FIRSTS,
    FLIGHT_STEP,
    FREE,
    GONE,
    HELD,
    NONE,
    OLDEST,
    PREEMPTED,
    REQUEST,
    RUNNING,
    TIMED_OUT,
    WAITING,
    WAITING_PLACE,
    EngineOptions,
    Record,
    Requests,
    Served,
    engine_of,
)
from fastroof.compiled.simulation.transfers import (
    BEGINNING,
    ENDED,
    ENDING,
    FIRST_WANTING,
    HANDED,
    LAST_WANTING,
    ON_THE_WAY,
    RELEASED,
    Line,
    LinkOptions,
    next_transfer_us,
    pop_transfer,
    push_transfer,
    send,
    send_layers,
)
from fastroof.compiled.steps import open_plan


class Pool(NamedTuple):
    """Engines of one kind, and what they serve; ``least_us[engine]`` is not after its first deadline."""

    arena: Floats
    options: EngineOptions
    fleet: Fleet
    requests: Requests
    served: Served
    record: Record
    replica_of: Ints
    least_us: Floats


@jit_stateful
def _end_request(prefill: Pool, link: LinkOptions, line: Line, request: int, now_us: float) -> None:
    """Let whoever waits for a request go on."""
    line.scalars[ENDED] += 1
    if link.clients > 0:
        released = line.scalars[RELEASED]
        line.scalars[RELEASED] = release_clients(prefill.requests, released, 1, now_us + link.think_us)
    if link.has_parents > 0:
        end_parent(prefill.requests, request, now_us)


@jit_stateful
def _route_until(prefill: Pool, link: LinkOptions, now_us: float) -> None:
    """Send every request that comes by now to a prefill engine."""
    requests = prefill.requests
    while coming_us(requests) <= now_us:
        request = pop_coming(requests)
        replica = choose_replica(prefill.fleet, prefill.options, requests, request, request)
        engine = engine_in(prefill.fleet, replica)
        send_to_engine(prefill.fleet, requests, engine, request)
        prefill.replica_of[request] = replica
        deadline_us = requests.arrival_us[request] + link.timeout_us
        prefill.least_us[engine] = min(prefill.least_us[engine], deadline_us)


@jit_stateful_inline
def _prompt_blocks(pool: Pool, request: int) -> int:
    """Count the blocks that a computed prompt holds, with those of its output where these are reserved."""
    tokens = pool.requests.input_tokens[request]
    return int(blocks_needed(pool.requests, pool.options, request, tokens, tokens)[0])


@jit_stateful
def _drop_due(
    prefill: Pool,
    pool: Pool,
    link: LinkOptions,
    line: Line,
    engine: int,
    now_us: float,
    is_strict: bool,
) -> None:
    """Drop an engine's requests whose deadline is before now or, unless ``is_strict``, now.

    Requests are not in order of their deadlines, so all that the engine has are looked at; that is rare, as
    none comes before ``least_us``.
    """
    if pool.least_us[engine] > now_us or link.timeout_us == math.inf:
        return
    requests, served, options = pool.requests, pool.served, pool.options
    ranks = ranks_in(pool.fleet, engine)
    ending_us = now_us if is_strict else math.nan
    least_us = math.inf
    for rank in range(ranks.scalars.shape[0]):
        state = engine_of(ranks, rank)
        scalars = state.scalars
        while scalars[DEADLINE] != NONE and served.place[scalars[DEADLINE]] == DONE_PLACE:
            scalars[DEADLINE] = requests.next_arrived[scalars[DEADLINE]]
        request = scalars[DEADLINE]
        while request != NONE:
            if served.place[request] != DONE_PLACE:
                deadline_us = prefill.requests.arrival_us[request] + link.timeout_us
                if deadline_us < now_us or (deadline_us == now_us and not is_strict):
                    is_new = served.preemptions[request] == 0 and served.place[request] == WAITING_PLACE
                    if options.has_reserved > 0 and is_new:
                        scalars[FREE] += _prompt_blocks(pool, request)
                    drop_request(state, options, requests, served, request, ending_us)
                    _end_request(prefill, link, line, request, now_us)
                else:
                    least_us = min(least_us, deadline_us)
            request = requests.next_arrived[request]
    request = pool.fleet.groups.scalars[engine, FIRST_SENT]
    while request != NONE:
        least_us = min(least_us, prefill.requests.arrival_us[request] + link.timeout_us)
        request = requests.next_arrived[request]
    pool.least_us[engine] = least_us


@jit_stateful
def _note_prompts(prefill: Pool, link: LinkOptions, line: Line, engine: int, now_us: float) -> int:
    """Note the prompts whose step ends now, and end those with one token. Returns how many are noted."""
    group, ranks = group_of(prefill.fleet.groups, engine), ranks_in(prefill.fleet, engine)
    count = ranks.scalars.shape[0]
    flight = group.scalars[GROUP_OLDEST]
    noted = 0
    for rank in range(count):
        if not group.takes_part[flight, rank]:
            continue
        state = engine_of(ranks, rank)
        own = state.scalars[OLDEST]
        for i in range(state.scalars[FLIGHT_FIRSTS + own]):
            row = FIRST_FIELDS * own
            request, slot = state.firsts[row + FIRST_REQUEST, i], state.firsts[row + FIRST_SLOT_OF, i]
            if prefill.served.status[request] == TIMED_OUT:
                continue
            if line.goes_on[request] == 0:
                _end_request(prefill, link, line, request, now_us)
                continue
            line.ready_us[request] = now_us
            line.step_us[request] = group.clock[GROUP_FLIGHT_US + flight]
            # its blocks are gone if it was preempted with its token in flight
            is_gone = link.reserves > 0 and state.slots[HELD, slot] == GONE
            line.home[request] = NONE if is_gone else engine * count + rank
            # where the heap grows next
            line.heaps[BEGINNING, line.scalars[BEGINNING] + noted] = request
            noted += 1
    return noted


@jit_stateful
def _take_noted(prefill: Pool, link: LinkOptions, line: Line, noted: int) -> None:
    """Let noted prompts begin to be sent; with reservations, they take back the blocks of their step."""
    first = line.scalars[BEGINNING]
    for at in range(first, first + noted):
        request = line.heaps[BEGINNING, at]
        if link.reserves > 0 and line.home[request] != NONE:
            state = engine_of(prefill.fleet.states, line.home[request])
            found = 0
            if prefill.options.has_cache > 0:
                found = find_blocks(state.cells, prefill.requests, request)[0]
            state.scalars[FREE] -= _prompt_blocks(prefill, request)
            if prefill.options.has_cache > 0:
                hold_chain(state, prefill.requests, request, found)
        push_transfer(line, BEGINNING, line.ready_us, request)


@jit_stateful
def _prefill_step_end(prefill: Pool, link: LinkOptions, line: Line, engine: int, now_us: float) -> None:
    """Let a prefill engine go to its next event, which may end a step."""
    options, requests, served, record = prefill.options, prefill.requests, prefill.served, prefill.record
    there, group = ranks_in(prefill.fleet, engine), group_of(prefill.fleet.groups, engine)
    noted = 0
    if group.scalars[GROUP_IN_FLIGHT] > 0:
        _drop_due(prefill, prefill, link, line, engine, now_us, True)
        noted = _note_prompts(prefill, link, line, engine, now_us)
    group_step_end(options, there, group, requests, served, record, now_us)
    _take_noted(prefill, link, line, noted)
    _route_until(prefill, link, now_us)
    see_sent(there, group, requests, now_us)
    _drop_due(prefill, prefill, link, line, engine, now_us, False)
    _route_until(prefill, link, now_us)


@jit_stateful
def _let_go(prefill: Pool, link: LinkOptions, line: Line, request: int) -> int:
    """Free the blocks of a prompt that was sent. Returns the prefill engine if it is idle, or NONE."""
    home = line.home[request]
    if link.reserves == 0 or home == NONE:
        return NONE
    line.home[request] = NONE
    state = engine_of(prefill.fleet.states, home)
    held = _prompt_blocks(prefill, request)
    if prefill.options.has_cache > 0:
        known = prefill.requests.input_tokens[request] // prefill.options.block_size
        release_chain(state, prefill.options, prefill.requests, request, held, known)
    else:
        state.scalars[FREE] += held
    engine = home // prefill.fleet.groups.takes_part.shape[2]
    if prefill.fleet.groups.scalars[engine, GROUP_IN_FLIGHT] > 0:
        return NONE
    return int(engine)


@jit_stateful
def _give_up(prefill: Pool, decode: Pool, link: LinkOptions, line: Line, request: int, now_us: float) -> int:
    """End a request between the pools whose client has given up. Returns what :func:`_let_go` does."""
    if link.reserves > 0:
        decode.fleet.router.pushed[line.engine[request]] -= 1
        decode.fleet.router.pushed_tokens[line.engine[request]] -= decode.requests.input_tokens[request]
    decode.served.status[request] = TIMED_OUT
    _end_request(prefill, link, line, request, now_us)
    return int(_let_go(prefill, link, line, request))


@jit_stateful
def _grant(prefill: Pool, decode: Pool, link: LinkOptions, line: Line, engine: int, now_us: float) -> int:
    """Send prompts that want to go to a decode engine, as far as it has room.

    Returns a prefill engine that must schedule before the next one is sent, or NONE.
    """
    options = decode.options
    scalars = ranks_in(decode.fleet, engine).scalars[0]
    wanting = line.wanting[:, engine]
    while wanting[FIRST_WANTING] != NONE:
        request = wanting[FIRST_WANTING]
        is_overdue = prefill.requests.arrival_us[request] + link.timeout_us <= now_us
        if not is_overdue:
            while scalars[PREEMPTED] != NONE and decode.served.status[scalars[PREEMPTED]] == TIMED_OUT:
                scalars[PREEMPTED] = decode.served.next_preempted[scalars[PREEMPTED]]
            taken = scalars[RUNNING] + scalars[WAITING] + decode.fleet.groups.scalars[engine, SENT]
            need = _prompt_blocks(decode, request)
            has_slot = taken + wanting[ON_THE_WAY] < options.max_seqs
            if scalars[PREEMPTED] != NONE or not has_slot or need > scalars[FREE]:
                return NONE
            scalars[FREE] -= need
            wanting[ON_THE_WAY] += 1
        wanting[FIRST_WANTING] = line.next_wanting[request]
        if is_overdue:
            idle = _give_up(prefill, decode, link, line, request, now_us)
            if idle != NONE:
                return int(idle)
        else:
            send(line, link, prefill.replica_of[request], request, now_us)
    return NONE


@jit_stateful
def _begin_transfer(prefill: Pool, decode: Pool, link: LinkOptions, line: Line) -> int:
    """Begin the next transfer or let its request want to be sent, to the decode engine returned, or NONE."""
    request = pop_transfer(line, BEGINNING, line.ready_us)
    replica = prefill.replica_of[request]
    if link.layers > 0:
        ranks = prefill.fleet.groups.takes_part.shape[2]
        send_layers(line, link, replica, ranks, request)
        return NONE
    if link.reserves == 0:
        send(line, link, replica, request, line.ready_us[request])
        return NONE
    turn = line.scalars[HANDED]
    line.scalars[HANDED] += 1
    to = choose_replica(decode.fleet, decode.options, decode.requests, request, turn)
    engine = engine_in(decode.fleet, to)
    decode.replica_of[request] = to
    decode.fleet.router.pushed[engine] += 1
    decode.fleet.router.pushed_tokens[engine] += decode.requests.input_tokens[request]
    line.engine[request] = engine
    line.next_wanting[request] = NONE
    wanting = line.wanting[:, engine]
    if wanting[FIRST_WANTING] == NONE:
        wanting[FIRST_WANTING] = request
    else:
        line.next_wanting[wanting[LAST_WANTING]] = request
    wanting[LAST_WANTING] = request
    return int(engine)


@jit_stateful
def _end_decodes(
    prefill: Pool, decode: Pool, link: LinkOptions, line: Line, engine: int, now_us: float
) -> None:
    """End the requests whose last token comes with an engine's step, which ends now."""
    group, ranks = group_of(decode.fleet.groups, engine), ranks_in(decode.fleet, engine)
    flight = group.scalars[GROUP_OLDEST]
    for rank in range(ranks.scalars.shape[0]):
        if not group.takes_part[flight, rank]:
            continue
        state = engine_of(ranks, rank)
        own = state.scalars[OLDEST]
        step = state.scalars[FLIGHT_STEP + own]
        if step != NONE:
            slot = state.calendar[FIRST_SLOT, step & (state.calendar.shape[1] - 1)]
            while slot != NONE:
                _end_request(prefill, link, line, state.slots[REQUEST, slot], now_us)
                slot = state.slots[BUCKET_NEXT, slot]
        for i in range(state.scalars[FLIGHT_FIRSTS + own]):
            row = FIRST_FIELDS * own
            request, slot = state.firsts[row + FIRST_REQUEST, i], state.firsts[row + FIRST_SLOT_OF, i]
            is_last = slot != NONE and state.firsts[row + DECODES_NEXT, i] == 0
            if is_last and decode.served.status[request] != TIMED_OUT:
                _end_request(prefill, link, line, request, now_us)


@jit_stateful
def _decode_step_end(
    prefill: Pool, decode: Pool, link: LinkOptions, line: Line, engine: int, now_us: float
) -> None:
    """Let a decode engine go to its next event, which may end a step."""
    options, requests, served, record = decode.options, decode.requests, decode.served, decode.record
    there, group = ranks_in(decode.fleet, engine), group_of(decode.fleet.groups, engine)
    if group.scalars[GROUP_IN_FLIGHT] > 0:
        _drop_due(prefill, decode, link, line, engine, now_us, True)
        _end_decodes(prefill, decode, link, line, engine, now_us)
    group_step_end(options, there, group, requests, served, record, now_us)
    see_sent(there, group, requests, now_us)
    _drop_due(prefill, decode, link, line, engine, now_us, False)


@jit_stateful
def _end_transfer(prefill: Pool, decode: Pool, link: LinkOptions, line: Line) -> tuple[int, int]:
    """Hand a request whose transfer ends to its decode engine.

    Returns what :func:`_let_go` does, and the decode engine if it keeps the request's blocks, or NONE.
    """
    request = pop_transfer(line, ENDING, line.there_us)
    now_us = line.there_us[request]
    fleet, requests = decode.fleet, decode.requests
    deadline_us = prefill.requests.arrival_us[request] + link.timeout_us
    engine = line.engine[request]
    if link.reserves > 0:
        line.wanting[ON_THE_WAY, engine] -= 1
    if deadline_us <= now_us:
        idle = int(_give_up(prefill, decode, link, line, request, now_us))
        if link.reserves == 0:
            return idle, NONE
        ranks_in(fleet, engine).scalars[0, FREE] += _prompt_blocks(decode, request)
        return idle, int(engine)
    requests.arrival_us[request] = now_us
    if link.reserves == 0:
        replica = choose_replica(fleet, decode.options, requests, request, line.scalars[HANDED])
        line.scalars[HANDED] += 1
        engine = engine_in(fleet, replica)
        decode.replica_of[request] = replica
        send_to_engine(fleet, requests, engine, request)
    else:
        push_to_group(group_of(fleet.groups, engine), requests, request)
    decode.least_us[engine] = min(decode.least_us[engine], deadline_us)
    return int(_let_go(prefill, link, line, request)), NONE


@jit_stateful
def _schedule(pool: Pool, engine: int, now_us: float, tries: int) -> int:
    """Schedule an engine's next steps, in several tries if it is stuck. Returns a code."""
    plan = open_plan(pool.arena)
    options, requests, served, record = pool.options, pool.requests, pool.served, pool.record
    there, group = ranks_in(pool.fleet, engine), group_of(pool.fleet.groups, engine)
    code = CODE_STUCK
    while code == CODE_STUCK and tries > 0:
        code = group_schedule(pool.arena, plan, options, there, group, requests, served, record, now_us)
        tries -= 1
    return int(code)


@jit_stateful
def pools_run(prefill: Pool, decode: Pool, link: LinkOptions, line: Line) -> int:
    """Serve a trace with both pools. Returns a code.

    All engines schedule here: Numba optimizes the code of a step again in every function that leads to it.
    """
    restart_fleet(prefill.fleet)
    restart_fleet(decode.fleet)
    requests = prefill.requests
    # the only running request may have lost its blocks: others start with those that they have
    decode_tries = 1 + (link.reserves > 0)
    if link.clients > 0:
        line.scalars[RELEASED] = release_clients(requests, 0, link.clients, requests.arrival_us[0])
    while True:
        if prefill.options.stop[0] != 0:
            return CODE_STOPPED
        arrives_us = coming_us(requests)
        prefill_engine, prefill_us = next_engine(prefill.fleet, prefill.options, requests, prefill.served)
        begins_us = next_transfer_us(line, BEGINNING, line.ready_us)
        ends_us = next_transfer_us(line, ENDING, line.there_us)
        decode_engine, decode_us = next_engine(decode.fleet, decode.options, decode.requests, decode.served)
        now_us = min(arrives_us, prefill_us, begins_us, ends_us, decode_us)
        if now_us == math.inf:
            return 0 if line.scalars[ENDED] == len(requests.arrival_us) else CODE_STUCK
        # the prefill engine that goes on, the decode engine that may have room, and whether it goes on
        first, then, goes_on = NONE, NONE, False
        if arrives_us == now_us:
            _route_until(prefill, link, now_us)
        elif prefill_us == now_us:
            first = prefill_engine
        elif begins_us == now_us:
            then = _begin_transfer(prefill, decode, link, line)
        elif ends_us == now_us:
            first, then = _end_transfer(prefill, decode, link, line)
            goes_on = then != NONE and decode.fleet.groups.scalars[then, GROUP_IN_FLIGHT] == 0
        else:
            then, goes_on = decode_engine, True
        code = 0
        while first != NONE or then != NONE:
            if first != NONE:
                _prefill_step_end(prefill, link, line, first, now_us)
                code = _schedule(prefill, first, now_us, 1)
            if goes_on:
                _decode_step_end(prefill, decode, link, line, then, now_us)
                code = _schedule(decode, then, now_us, decode_tries)
                goes_on = False
            if link.reserves == 0:
                break
            # what waits may wait for blocks that are on their way
            first = NONE if then == NONE else _grant(prefill, decode, link, line, then, now_us)
            if first == NONE:
                break
        if code == CODE_STUCK and link.reserves == 0:
            return CODE_STUCK
