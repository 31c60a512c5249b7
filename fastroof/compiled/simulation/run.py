"""The loop of a fleet: what comes from outside of engines, and engines up to then.

At one instant: checks of autoscalers, the front end goes on, requests come, the first pool's engines in
order, transfers begin, transfers end, the next pool's engines. What feeds nothing back lets the engines of a
pool run ahead up to the next thing that looks at them, one pool after the other. With feedback (clients,
sessions, time-outs between pools, reservations) an engine runs up to the next event of any other.

With reservations a prompt keeps its blocks until it is sent, and its transfer begins when its decode engine
has a slot and blocks for it. Requests wait for that in order of arrival, and while no preempted one waits.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.engine import prompt_blocks, run_engine
from fastroof.compiled.simulation.front_end import front_end_us, hand_on, queue_all, send_on
from fastroof.compiled.simulation.prefix_cache import release_chain
from fastroof.compiled.simulation.records import (
    CODE_STOPPED,
    CODE_STUCK,
    NONE,
    ROUND_ROBIN,
    SERVING,
    TIMED_OUT,
    Fleet,
    Row,
)
from fastroof.compiled.simulation.router import (
    choose_engine,
    count_pushed,
    parts_of,
    push_to_engine,
)
from fastroof.compiled.simulation.scaling import are_empty, check_now, close, launch_first, next_check_us
from fastroof.compiled.simulation.scheduler import first_preempted
from fastroof.compiled.simulation.transfers import (
    begin_us,
    coming_us,
    deadline_us,
    end_request,
    has_front_end,
    is_coupled,
    pop_begin,
    pop_coming,
    pop_there,
    release_clients,
    send,
    send_layers,
    there_us,
)

# -- pools with feedback -----------------------------------------------------------------------------


@jit_stateful
def _let_go(fleet: Fleet, request: int, now_us: float) -> int:
    """Free the blocks of a prompt that was sent. Returns its engine if it is idle, or NONE."""
    transfer, pool = fleet.transfers[request], fleet.pools[0]
    if fleet.line[0].reserves == 0 or transfer.home == NONE:
        return NONE
    rank = fleet.ranks[transfer.home]
    transfer.home = NONE
    held = prompt_blocks(pool, fleet.requests[0], request)
    if fleet.has.cache > 0 and pool.has_cache > 0:
        known = int(fleet.requests[0, request].input_tokens) // pool.block_size
        release_chain(parts_of(fleet), rank, pool, fleet.requests[0], request, held, known)
    else:
        rank.free += held
    return _if_idle(fleet, int(fleet.requests[0, request].engine), now_us)


@jit_stateful_inline
def _if_idle(fleet: Fleet, index: int, now_us: float) -> int:
    """Return an engine, which goes on now, if it has no step, or NONE."""
    engine = fleet.engines[index]
    if engine.in_flight > 0:
        return NONE
    engine.next_us = now_us
    return index


@jit_stateful
def _give_up(fleet: Fleet, request: int, now_us: float) -> int:
    """End a request between the pools whose client has given up. Returns what :func:`_let_go` does."""
    if fleet.line[0].reserves > 0:
        # it has got its turn
        fleet.ranks[fleet.engines[fleet.transfers[request].engine].first_rank].timed_out += 1
    fleet.requests[1, request].status = TIMED_OUT
    end_request(fleet, request, now_us)
    return int(_let_go(fleet, request, now_us))


@jit_stateful_inline
def _unseen(fleet: Fleet, engine: Row) -> int:
    """Count the requests that an engine of one rank has not seen."""
    unseen, request = 0, fleet.ranks[engine.first_rank].arrived
    while request != NONE:
        unseen += 1
        request = fleet.requests[1, request].next_sent
    return unseen


@jit_stateful
def _grant(fleet: Fleet, index: int, now_us: float) -> int:
    """Send prompts that want to go to a decode engine, as far as it has room.

    Returns a prefill engine that must go on before the next one is sent, or NONE.
    """
    pool, engine = fleet.pools[1], fleet.engines[index]
    rank = fleet.ranks[engine.first_rank]
    most = pool.max_num_seqs if pool.shares_slots > 0 else pool.max_num_seqs * pool.stages
    while engine.first_wanting != NONE:
        request = int(engine.first_wanting)
        is_overdue = deadline_us(fleet, request) <= now_us
        if not is_overdue:
            taken = rank.running + rank.waiting + _unseen(fleet, engine) + engine.on_the_way
            need = prompt_blocks(pool, fleet.requests[1], request)
            if first_preempted(parts_of(fleet), rank, fleet.requests[1]) != NONE:
                return NONE
            if taken >= most or need > rank.free:
                return NONE
            rank.free -= need
            engine.on_the_way += 1
        engine.first_wanting = fleet.transfers[request].next_wanting
        if is_overdue:
            idle = _give_up(fleet, request, now_us)
            if idle != NONE:
                return int(idle)
        else:
            send(fleet, request, now_us)
    return NONE


@jit_stateful
def _want(fleet: Fleet, request: int, now_us: float) -> int:
    """Let a prompt that is ready want to be sent to a decode engine, which is returned."""
    index = choose_engine(fleet, 1, request, now_us)
    engine, transfer = fleet.engines[index], fleet.transfers[request]
    count_pushed(fleet, 1, index, request)
    transfer.engine, transfer.next_wanting = index, NONE
    if engine.first_wanting == NONE:
        engine.first_wanting = request
    else:
        fleet.transfers[engine.last_wanting].next_wanting = request
    engine.last_wanting = request
    return index


@jit_stateful
def _begin_transfer(fleet: Fleet, now_us: float) -> int:
    """Begin the next transfer or let its request want to be sent, to the decode engine returned, or NONE."""
    request = pop_begin(fleet)
    if fleet.line[0].reserves > 0:
        return _want(fleet, request, now_us)
    if fleet.line[0].layers > 0:
        send_layers(fleet, request)
    else:
        send(fleet, request, now_us)
    return NONE


@jit_stateful
def _end_transfer(fleet: Fleet, now_us: float) -> tuple[int, int, int]:
    """Hand a request whose transfer ends to its decode engine.

    Returns what :func:`_let_go` does, the decode engine if it keeps the request's blocks, or NONE, and the
    request if it must be routed.
    """
    request, line = pop_there(fleet), fleet.line[0]
    transfer = fleet.transfers[request]
    if line.reserves > 0:
        fleet.engines[transfer.engine].on_the_way -= 1
    if fleet.has.timeouts > 0 and deadline_us(fleet, request) <= now_us:
        idle = _give_up(fleet, request, now_us)
        if line.reserves == 0:
            return idle, NONE, NONE
        rank = fleet.ranks[fleet.engines[transfer.engine].first_rank]
        rank.free += prompt_blocks(fleet.pools[1], fleet.requests[1], request)
        return idle, int(transfer.engine), NONE
    fleet.requests[1, request].arrival_us = now_us
    if line.reserves == 0:
        return NONE, NONE, request
    push_to_engine(fleet, 1, transfer.engine, request, now_us)
    return int(_let_go(fleet, request, now_us)), NONE, NONE


@jit_stateful_inline
def _is_up(fleet: Fleet, pool: Row, index: int) -> bool:
    """Whether an engine is one of a replica that serves or drains."""
    if fleet.has.scaler > 0 and pool.scaler != NONE:
        return bool(fleet.replicas[fleet.engines[index].replica].status >= SERVING)
    return True


@jit_stateful
def fleet_run(fleet: Fleet) -> int:
    """Serve a trace with a fleet, whose arrays are as new. Returns a code.

    There is one call of :func:`run_engine` and one of :func:`send_on`, so that the compiler inlines them.
    """
    line, num_pools = fleet.line[0], len(fleet.pools)
    coupled = is_coupled(fleet)
    if fleet.has.scaler > 0:
        launch_first(fleet)
    if fleet.has.clients > 0 and line.clients > 0:
        release_clients(fleet, line.clients, fleet.requests[0, 0].arrival_us)
    elif (
        not coupled
        and fleet.pools[0].scaler == NONE
        and len(fleet.engines) == 1
        and fleet.pools[0].ranks == 1
        and not (has_front_end(fleet) and fleet.has.timeouts > 0)
    ):
        queue_all(fleet)
    now_us, until_us, check_us = 0.0, -math.inf, math.inf
    # with feedback: the engine that goes on, the decode engine that may have room, and whether that goes on
    # before
    goes, then, then_goes = NONE, NONE, False
    # without: the pool that is served, and the next of its engines that may go on before the next thing from
    # outside
    at, cursor = 0, NONE
    while True:
        if fleet.stop[0] != 0:
            return CODE_STOPPED
        # the engine that runs now, and the request that a pool gets now
        index, request, to = NONE, NONE, 0
        if coupled:
            if goes == NONE and not then_goes:
                first, first_us, next_us = NONE, math.inf, math.inf
                for one in range(len(fleet.engines)):
                    at_us = fleet.engines[one].next_us
                    if at_us < first_us:
                        next_us, first_us, first = first_us, at_us, one
                    elif at_us < next_us:
                        next_us = at_us
                arrives_us, passes_us = coming_us(fleet), front_end_us(fleet)
                begins_us, ends_us = math.inf, math.inf
                if fleet.has.pools > 0:
                    begins_us, ends_us = begin_us(fleet), there_us(fleet)
                until_us = min(next_us, arrives_us, passes_us, begins_us, ends_us)
                now_us = min(first_us, until_us)
                if now_us == math.inf:
                    if fleet.has.scaler > 0:
                        close(fleet)
                    if fleet.has.pools > 0 and line.reserves > 0 and line.ended < fleet.requests.shape[1]:
                        return CODE_STUCK
                    return 0
                if fleet.has.scaler > 0:
                    check_us = next_check_us(fleet)
                    until_us = min(until_us, check_us)
                is_prefill = first_us == now_us and (fleet.has.pools == 0 or fleet.engines[first].pool == 0)
                if fleet.has.scaler > 0 and check_us <= now_us:
                    code = check_now(fleet)
                    if code != 0:
                        return int(code)
                elif passes_us == now_us:
                    hand_on(fleet, now_us)
                elif arrives_us == now_us:
                    request = pop_coming(fleet)
                elif is_prefill:
                    goes = first
                elif fleet.has.pools > 0 and begins_us == now_us:
                    then = _begin_transfer(fleet, now_us)
                elif fleet.has.pools > 0 and ends_us == now_us:
                    goes, then, request = _end_transfer(fleet, now_us)
                    to = 1
                    then_goes = then != NONE and _if_idle(fleet, then, now_us) != NONE
                elif fleet.has.pools > 0 and line.reserves > 0:
                    then, then_goes = first, True
                else:
                    goes = first
            if goes != NONE:
                index, goes = goes, NONE
            elif then_goes:
                index, then_goes = then, False
            if fleet.has.pools > 0 and line.reserves > 0:
                until_us = -math.inf
        else:
            pool = fleet.pools[at]
            stop = pool.first_engine + pool.num_engines
            is_scaled = fleet.has.scaler > 0 and pool.scaler != NONE
            if cursor == NONE:
                if fleet.has.scaler > 0 and is_scaled:
                    check_us = next_check_us(fleet)
                if fleet.has.pools > 0 and at > 0:
                    now_us = there_us(fleet)
                else:
                    now_us = coming_us(fleet)
                    passes_us = front_end_us(fleet)
                    while passes_us <= now_us and passes_us < check_us and pool.engines_each == 1:
                        # where no engine is looked at, the front end runs ahead
                        hand_on(fleet, passes_us)
                        passes_us = front_end_us(fleet)
                    now_us = min(now_us, passes_us)
                until_us = min(now_us, check_us)
                cursor = stop
                if (
                    until_us == math.inf
                    or check_us <= now_us
                    or pool.rule != ROUND_ROBIN
                    or pool.engines_each > 1
                    or (has_front_end(fleet) and fleet.has.timeouts > 0)
                ):
                    cursor = pool.first_engine
            while cursor < stop and index == NONE:
                if fleet.engines[cursor].next_us < until_us and _is_up(fleet, pool, cursor):
                    index = cursor
                cursor += 1
            if index == NONE:
                cursor = NONE
                if fleet.has.scaler > 0 and is_scaled and check_us <= now_us:
                    if now_us == math.inf and are_empty(fleet):
                        close(fleet)
                        return 0
                    code = check_now(fleet)
                    if code != 0:
                        return int(code)
                elif now_us < math.inf:
                    if fleet.has.pools > 0 and at > 0:
                        request, to = pop_there(fleet), at
                        fleet.requests[at, request].arrival_us = now_us
                    elif front_end_us(fleet) == now_us:
                        hand_on(fleet, now_us)
                    else:
                        request = pop_coming(fleet)
                elif at + 1 == num_pools:
                    return 0
                else:
                    # what this pool has computed, in the order in which it was ready
                    at += 1
                    while fleet.has.pools > 0 and line.begin_size > 0:
                        ready = pop_begin(fleet)
                        send(fleet, ready, fleet.transfers[ready].ready_us)
        if request != NONE:
            send_on(fleet, to, request, now_us)
        if index != NONE:
            code = run_engine(fleet, index, until_us)
            if code != 0:
                return int(code)
        if fleet.has.pools > 0 and then != NONE and not then_goes:
            # what waits may wait for blocks that are on their way
            goes = _grant(fleet, then, now_us)
            if goes == NONE:
                then = NONE
