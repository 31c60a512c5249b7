"""State of a fleet: records with named fields in flat arrays, and the set of features a loop is compiled for.

A *pool* is equal replicas behind one router. A *replica* is engines that step independently, mostly one. An
*engine* is ranks that step together. A *rank* is a queue and KV blocks. A *lane* is what runs together on a
rank: one for each batch in pipeline stages, else one. Slots, buckets, blocks that fall due and cells are
ragged: a lane or rank has the place where its own begin.

A running request has a slot, which is not touched while it decodes: every decode advances by one token per
step, so all of it follows from the number of the decode step. The request has ``offset + step`` computed
tokens. It needs a block in the steps with one remainder by the block size, and ``due`` counts requests by
remainder. Its last token comes in a known step, and until then it waits in that step's bucket of the
calendar. With draft tokens decodes advance by several (``drafts``).

Numba takes records as arguments and returns none: write ``lane = fleet.lanes[i]`` where the array is at hand.
A function that is not inlined and takes a :class:`Fleet` costs 30 to 40 ns a call.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Ints, Longs

Row = Any
"""One record: assigning to its fields writes the array."""

Rows = Any
"""An array of records."""

NONE = -1
"""No request, no slot, no step."""

GONE = -2
"""``held`` of a slot whose blocks are freed and whose last token is in flight."""

GOES_ON = -2
"""A slot in ``firsts`` whose request goes on to decode is stored as this minus the slot."""

WAITING_PLACE, DONE_PLACE, FETCHING_PLACE = -1, -2, -3
"""``place`` of a request without a slot."""

FINISHED, TIMED_OUT, REJECTED = 0, 1, 2
"""Status of a request."""

CODE_STUCK = 1
"""Requests wait, none runs, and the first has no room: it never will."""

CODE_STOPPED = 2
"""Another thread set ``Fleet.stop``: the results are incomplete."""

CODE_FULL = 4
"""More replicas were started than there are rows for."""

CODE_MANY_CHECKS = 8
"""The run is not over after MOST_CHECKS checks of an autoscaler."""

RUN_ALL, HOLD_NEW, HOLD_PROMPTS = range(3)
"""Which prompts a step holds back: none, those that have not started, or cut ones too."""

WAITING_WEIGHT = 4
"""How many running requests a waiting one counts as when loads are compared."""

ROUND_ROBIN, LEAST_OUTSTANDING, LEAST_LOAD, LEAST_KV, POWER_OF_TWO, PREFIX_AWARE = range(6)
"""Rules of routers. PREFIX_AWARE: where the fewest blocks come together."""

OFF, STARTING, SERVING, DRAINING = range(4)
"""States of a replica."""

QUEUE, CONCURRENCY, KV, RATE = range(4)
"""What an autoscaler looks at, of all that serve: requests that wait, or wait and run, the KV cache in use in
caches, requests/s since the last check."""

WRITE_THROUGH, WRITE_BACK = 0, 1
WAITED_FOR, BEFORE_STEP, BY_LAYER = 0, 1, 2
"""How a tier's blocks are fetched: while their request waits, before its step begins, or layer by layer."""


def _record(integers: str, reals: str = "", small: str = "") -> np.dtype[Any]:
    """Return a record of 8-byte reals and integers, then 4-byte integers."""
    kinds = [("f8", reals), ("i8", integers), ("i4", small)]
    return np.dtype([(name, kind) for kind, names in kinds for name in names.split()], align=True)


POOL = _record(
    "budget max_num_seqs block_size block_shift is_chunked admits_whole reserves_output prefill_first "
    "pause_steps min_free_slots has_reserved depth window stages shares_slots ranks in_lockstep "
    "assignment balance_steps prompt_padding decode_padding graph_tokens idle_tokens has_next has_cache "
    "num_tiers arena_at arena_size rule turn turns_at first_engine num_engines engines_each first_replica "
    "num_replicas num_blocks scaler verified lookahead beyond draft_window "
    "rates_at",
    "timeout_us time_scale",
)
"""Equal replicas: how their engines schedule steps, with flags of 0 or 1, and how requests get to them.

``pause_steps`` is how many steps after one with prompts are of decodes alone, ``min_free_slots`` how many
slots must be free before prompts start. With ``has_reserved`` requests arrive with the blocks of their
prompts taken, and start before preempted ones. ``window`` is that of the plan's windowed layers, or 0.
``shares_slots`` is 1 if the requests of all pipeline batches are limited together, 0 if those of each are.
``turns_at`` is where the pool's part of ``turns`` and ``drawn`` begins; ``scaler`` its autoscaler, or NONE.
With draft tokens a decode verifies ``verified`` tokens, the last chunks of a prompt take blocks for
``lookahead`` more tokens, and decodes for ``beyond`` more than one; ``verified`` is 1 without.
"""

REPLICA = _record("pool status life given passing passing_tokens", "link_free_us")
"""``given`` requests that were sent into its front end, of which ``passing`` are there."""

ENGINE = _record(
    "pool replica first_rank in_flight oldest pushed pushed_tokens given sent first_sent last_sent "
    "held_steps in_a_row held_until first_wanting last_wanting on_the_way",
    "now_us end_us next_us busy_us least_us",
)
"""Ranks that step together. ``sent`` requests are not yet assigned to a rank; ``busy_us`` is the sum of its
ranks' steps, or how long each of its pipeline stages computes; ``least_us`` is not after its first deadline;
``wanting`` requests want to be sent to it. ``held_steps`` are those that prompts have waited for those of
other ranks, ``in_a_row`` steps since all ranks were idle, ``held_until`` the number from which prompts are
free."""

RANK = _record(
    "first_lane head tail arrived deadline preempted waiting running free num_blocks least_free "
    "peak_running peak_waiting preemptions finished timed_out fetching first_fetching last_fetching "
    "waits_ended is_arriving queued evictions looked_up_tokens found_tokens found_again_tokens "
    "given_up_tokens cells_at tiers_at",
    "fetched_by_us wait_us step_wait_us",
)
"""A queue and KV blocks. ``queued`` are blocks in the queue of the prefix cache, ``fetching`` requests that
wait for blocks from a tier, or gave up while they did, ``is_arriving`` 1 if blocks that the request looked at
last found in the GPU are on their way."""

LANE = _record(
    "step decodes kv_sum below window_sum free_slot last partial partial_computed partial_whole fresh "
    "running in_flight oldest steps mixed_steps prefill_steps prefill_tokens decode_tokens cached_tokens "
    "peak_running held_until is_backlogged slots_at calendar_at mask due_at flights_at "
    "kept_drafts",
    "last_decode_us",
)
"""Requests that run together: ``step`` is the next decode step, ``kv_sum`` the sum of its kv_len. ``below``
are decodes with fewer tokens than the window. ``partial`` is the slot of the prompt that was cut; prompts
wait until ``held_until`` steps were made; ``is_backlogged`` is 1 if requests waited after the last step that
prompts were free to join."""

SLOT = _record(
    "request offset finish entered bucket_next bucket_previous order_next order_previous held fresh_at kept"
)
"""``finish`` is the decode step with the last token, NONE if the prompt's step makes it.

With draft tokens ``kept`` are the tokens that its last step keeps. A step that keeps several moves ``offset``
ahead and ``finish`` back; ``held`` counts its blocks, and it is in no bucket before its last step.
"""

FLIGHT = _record("step decodes firsts tokens new more", "us host_us")
"""One of a lane's two steps in flight: its decode step, or NONE; decodes that get a token; prompts that end
in it; tokens, and prompt tokens without chunks that are timed as decodes; draft tokens that are kept;
``host_us`` is its minimum time."""

DRAFTED = _record("key kept_end")
"""Which draft tokens of a request are kept: drawn with its key, or given up to a place in ``kept``."""

HELD_SLOT = _record("request slot")
"""A request and its slot, of prompts that a step completes or that ended since the last decode step."""

BATCH = _record("lane", "end_us us")
"""A step of an engine: in flight from ``Engine.oldest`` on, a ring."""

REQUEST = _record(
    "",
    "arrival_us first_us last_us",
    "input_tokens output_tokens cached_tokens next_sent next_preempted sent preemptions place engine status",
)
"""A request as one pool sees it: 64 bytes. ``sent`` are tokens made before a preemption, ``place`` its slot
or one of the places above; ``next_preempted`` also links requests that wait for a fetch."""

CHAIN = _record("", "fetched_us", "tail_parent tail_start shared found reached _")
"""Where a prompt's blocks are in the prefix cache: the last segment of its chain, the block at which its own
blocks begin, blocks of the chain that it found or filled, tokens that it found at its first admission, blocks
that it has once its fetch ends."""

SEGMENT = _record("", "", "parent start stop _")
"""A run of blocks of prompts, and the one before it."""

STORE = _record("resident most_resident fetched written lost found_there wanted", "link_free_us")
"""A tier of one rank: blocks there, and the most; blocks fetched, written and lost; tokens found at first
admissions; blocks that the request looked at last has there; when its link is free."""

TIER = _record("blocks writes fetches is_prompts layers", "block_us latency_us")

FOLLOWER = _record("", "delay_us", "children_at unended")
"""A request of a session: where its children begin in ``children``, and parents that have not ended."""

TRANSFER = _record("goes_on home engine next_wanting", "takes_us ready_us step_us there_us")
"""A prompt on its way to the next pool: ``home`` is the rank that holds its blocks, ``engine`` the one that
it goes to, ``next_wanting`` the next that wants to be sent there."""

SERVER = _record("first last waits count", "now_us got_us leaves_us")
"""An API server: the requests in it, in order of sending, and the first of them that has not given up. Its
thread has given ``got_us`` to one that was there all the time; ``leaves_us`` is when the first leaves."""

PASSING = _record("replica", "sent_us received_us due_us")
"""A request in a front end: when it was sent, ``got_us`` of its server then and, once it has left its server,
when it reaches its engine or gives up."""

LINE = _record(
    "coming_size next_root num_roots sessions clients ended ready_size begin_size end_size passing_size "
    "servers_each is_shared layers reserves num_lives is_coupled",
    "think_us latency_us request_us token_us server_us leaves_us",
)
"""What is between engines: requests to come, clients, prompts that are ready, both heaps of transfers; how
prompts are sent. ``layers`` are sent one by one, 0 if all are sent together; ``servers_each`` are a replica's
API servers, 0 without a front end, ``leaves_us`` is when the next thing happens in one; ``is_coupled`` is 1
if what engines do feeds back to others."""

SCALER = _record(
    "metric least most first drawn_from checks starting serving routed wanted_at num_wanted",
    "target low tolerance interval_us startup_us start_us",
)
"""A rule that starts and stops replicas: see :mod:`fastroof.compiled.simulation.scaling`."""

LIFE = _record("pool", "replica ordered_us ready_us drained_us stopped_us")

ROOT = -1
"""Parent of the first segment of a chain."""

CACHED, HOLDERS, NEWER, OLDER = range(4)
"""Columns of cells: blocks of a segment that are cached, running requests and held segments after it that
hold it, neighbours in the queue; with tiers the same number for each, and a last one, which wait it arrives
with."""
NUM_CELL_COLUMNS = 4

LOW, HIGH = 0, 1
"""In place of CACHED and HOLDERS in a tier's columns: the run of blocks that the tier has."""


class Features(NamedTuple):
    """What a fleet needs, 1 each, or 0: loops are compiled without what a class fixes (``dispatcher.py``).

    Loops test a feature, then the option of a pool: any larger set answers the same.
    """

    timeouts: int
    clients: int
    sessions: int
    ranks: int
    stages: int
    pools: int
    scaler: int
    cache: int
    tiers: int
    windows: int
    order: int
    pauses: int
    front: int
    drafts: int


class CallerFeatures(Features):
    """What callers in C may ask for, and one pool of plain engines under any load of single requests."""

    __slots__ = ()
    FIXED: ClassVar = dict.fromkeys(
        ("sessions", "ranks", "stages", "pools", "scaler", "cache", "tiers", "pauses", "drafts"), 0
    )


class CommonFeatures(Features):
    """Engines of any kind under any load of single requests, without simulated caches."""

    __slots__ = ()
    FIXED: ClassVar = dict.fromkeys(("sessions", "scaler", "cache", "tiers", "drafts"), 0)


class PlainFeatures(Features):
    """Open loops with pools of plain engines, which most runs are."""

    __slots__ = ()
    FIXED: ClassVar = {name: 0 for name in Features._fields if name not in ("front", "pools")}


class Fleet(NamedTuple):
    """All of a run; see the records for what an element is.

    ``calendar`` and ``filled`` are by bucket: the newest slot whose last token falls due in a step, and
    decodes whose window fills then. ``firsts[flight, slot]``; ``fresh[slot]`` are requests that prefilled
    since the last decode step, ``batches[engine, step in flight]``, ``parts[engine, step in flight, rank]`` 1
    if the rank has requests in it, ``stage_free_us[engine, stage]``, ``requests[pool, request]``. ``coming``,
    ``passed``, ``begins`` and ``ends`` are heaps of requests, ``ready`` prompts whose step ends now.
    ``turns`` and ``drawn`` are, by request, the place among those that clients sent and two random
    replicas. ``rates`` are acceptance rates by position times 2^32, from a pool's ``rates_at`` on, ``kept``
    the tokens that a step keeps, where they are given, by what remains of an output. ``gaps[pool, bin]``,
    ``series[pool, bin, field]``, ``width_us[pool]``.
    """

    has: Features
    arena: Floats
    pools: Rows
    replicas: Rows
    engines: Rows
    ranks: Rows
    lanes: Rows
    slots: Rows
    calendar: Ints
    filled: Ints
    due: Ints
    flights: Rows
    firsts: Rows
    fresh: Rows
    batches: Rows
    parts: Ints
    stage_free_us: Floats
    requests: Rows
    chains: Rows
    segments: Rows
    cells: Ints
    tiers: Rows
    stores: Rows
    tier_tokens: Ints
    followers: Rows
    children: Ints
    transfers: Rows
    coming: Longs
    servers: Rows
    passing: Rows
    passed: Longs
    begins: Longs
    ends: Longs
    ready: Longs
    line: Rows
    turns: Longs
    drawn: Ints
    scalers: Rows
    lives: Rows
    wanted: Longs
    drafted: Rows
    rates: Longs
    kept: Ints
    gaps: Longs
    series: Floats
    width_us: Floats
    stop: Longs


class Parts(NamedTuple):
    """What lanes and ranks keep in flat arrays, for functions of one lane."""

    has: Features
    slots: Rows
    calendar: Ints
    filled: Ints
    due: Ints
    flights: Rows
    firsts: Rows
    fresh: Rows
    chains: Rows
    segments: Rows
    cells: Ints
    tiers: Rows
    stores: Rows
    tier_tokens: Ints
    drafted: Rows
    rates: Longs
    kept: Ints
