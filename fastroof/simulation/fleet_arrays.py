"""From pools of plans and settings, a trace, routers, a link and rules to the arrays of the loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats, Ints, Longs
from fastroof.compiled.jit import uses_records
from fastroof.compiled.simulation import records as R
from fastroof.compiled.simulation.records import Features, Fleet, Rows
from fastroof.compiled.simulation.series import GAP_BINS, SERIES_BINS, SERIES_FIELDS
from fastroof.compiled.steps import WINDOW
from fastroof.engines.front_end import NO_FRONT_END, FrontEnd
from fastroof.errors import SimulationError
from fastroof.host import usable_memory_bytes
from fastroof.plan.calls import rank_rules
from fastroof.simulation.autoscaling import METRICS
from fastroof.simulation.drafts import draws
from fastroof.simulation.engine import check_time_scale
from fastroof.simulation.pools import ROUTERS, EnginePool, Link, engines_of
from fastroof.stopping import stop_flag
from fastroof.traces.prompt_tree import LRU, has_identities, prompt_tree
from fastroof.traces.trace import Trace
from fastroof.traces.trace_sessions import links_of, of_rows, with_ends
from fastroof.units import GIB, US_PER_S

FIRST_BIN_US: Final = 1000.0
"""Initial width of the series' bins, us."""

MOST_STATE_BYTES: Final = 4 * GIB
"""Memory that the state of all engines simulated together may take; more if it is free."""

FIRST_LIVES: Final = 1024
"""Replicas that are started before there must be room for more."""

_DRAWN_FROM: Final = 2**31 - 1


_NEW_REQUEST: Final = np.zeros(1, R.REQUEST)
for _name in ("next_sent", "next_preempted", "place", "engine"):
    _NEW_REQUEST[_name] = R.NONE
_NEW_REQUEST["first_us"] = _NEW_REQUEST["last_us"] = math.nan


class Shape(NamedTuple):
    """How many engines, ranks and lanes a pool has, and the slots, buckets and cells of each."""

    replicas: int
    engines_each: int
    ranks: int
    stages: int
    slots: int
    buckets: int
    cells: int

    @property
    def engines(self) -> int:
        """Number of engines."""
        return self.replicas * self.engines_each

    @classmethod
    def of_pool(cls, pool: EnginePool, count: int, longest: int, segments: int) -> Shape:
        """Return the shape of a pool that serves so many requests, the longest output of which is given."""
        rules, pp = rank_rules(pool.plan), pool.plan.layout.pp
        most = pool.settings.max_num_seqs
        if pp > 1 and pool.settings.order != "mixed":
            most = max(most // pp, 1)
        cells = segments + count + 1 if pool.prefix_cache == LRU else 0
        buckets = 1 << (longest + 4).bit_length()
        return cls(
            pool.most_replicas,
            engines_of(pool.plan),
            rules.together,
            pp,
            max(min(most, count), 1),
            buckets,
            cells,
        )


def features_of(pools: Sequence[EnginePool], trace: Trace, front_end: FrontEnd = NO_FRONT_END) -> Features:
    """Return what a fleet needs, in the smallest set that has it."""
    settings = [pool.settings for pool in pools]
    needs = Features(
        timeouts=int(any(one.timeout_s < math.inf for one in settings)),
        clients=int(trace.is_closed and not trace.has_parents),
        sessions=int(trace.has_parents),
        ranks=int(any(rank_rules(pool.plan).together > 1 for pool in pools)),
        stages=int(any(pool.plan.layout.pp > 1 for pool in pools)),
        pools=int(len(pools) > 1),
        scaler=int(any(pool.autoscaler is not None for pool in pools)),
        cache=int(any(pool.prefix_cache == LRU for pool in pools)),
        tiers=int(any(pool.tiers.tiers for pool in pools)),
        windows=int(any(pool.arena[WINDOW] > 0 for pool in pools)),
        order=int(any(one.order == "prefill_first" for one in settings)),
        pauses=int(any(one.pause_steps or one.min_free_slots_delay for one in settings)),
        front=int(not front_end.adds_nothing),
        drafts=int(any(pool.drafting is not None for pool in pools)),
    )
    for fewer in (R.PlainFeatures, R.CallerFeatures, R.CommonFeatures):
        if not any(getattr(needs, name) for name in fewer.FIXED):
            return fewer(*needs)
    return needs


def new_fleet(
    pools: Sequence[EnginePool],
    trace: Trace,
    served: Bools | None = None,
    *,
    link: Link | None = None,
    takes_us: Floats | None = None,
    front_end: FrontEnd = NO_FRONT_END,
    time_scale: float = 1.0,
    seed: int = 0,
    lives: int = FIRST_LIVES,
) -> Fleet:
    """Allocate a fleet that serves a trace, or some of its requests; others only take turns of its router."""
    check_time_scale(time_scale)
    which: Any = slice(None) if served is None else served
    input_tokens, output_tokens = trace.input_tokens[which], trace.output_tokens[which]
    count = len(input_tokens)
    tree = prompt_tree(trace, pools[0].settings.block_size) if pools[0].prefix_cache == LRU else None
    segments = np.zeros(0, R.SEGMENT) if tree is None else tree.segments
    requests = np.repeat(_NEW_REQUEST, len(pools) * count).reshape(len(pools), count)
    own = requests[0]
    own["arrival_us"] = trace.arrival_s[which] * US_PER_S
    own["input_tokens"], own["output_tokens"] = input_tokens, output_tokens
    chains = np.zeros(0, R.CHAIN)
    if (tree is None or not has_identities(trace)) and trace.cached_tokens.any():
        own["cached_tokens"] = trace.cached_tokens[which]
    if tree is not None:
        chains = np.zeros(count, R.CHAIN)
        chains["tail_parent"], chains["tail_start"] = tree.tail_parent[which], tree.tail_start[which]
        chains["found"] = R.NONE
    transfers = np.zeros(count if len(pools) > 1 else 0, R.TRANSFER)
    if link is not None:
        assert takes_us is not None
        again = link.first_token == "decode"
        transfers["goes_on"] = (output_tokens > 1) | again
        transfers["takes_us"] = takes_us
        transfers["ready_us"] = transfers["there_us"] = math.nan
        for name in ("home", "engine", "next_wanting"):
            transfers[name] = R.NONE
        own["output_tokens"] = 1
        then = requests[1]
        then["arrival_us"] = math.inf
        then["input_tokens"] = input_tokens + (not again)
        then["output_tokens"] = output_tokens - (not again)
        then["cached_tokens"] = input_tokens - again
    outputs = [output_tokens] if link is None else [requests[at]["output_tokens"] for at in range(len(pools))]
    longest = [int(each.max(initial=1)) for each in outputs]
    shapes = [
        Shape.of_pool(pool, count, most, len(segments)) for pool, most in zip(pools, longest, strict=True)
    ]
    _check_memory(pools, shapes, longest, count)
    parts = _engines_of(pools, shapes, time_scale, link is not None and link.back_pressure)
    line, followers, children = _line_of(trace, served, count, link)
    line["is_coupled"] = trace.is_closed or trace.has_parents
    if link is not None:
        is_timed = pools[0].settings.timeout_s < math.inf
        is_scaled = any(pool.autoscaler is not None for pool in pools)
        line["is_coupled"] |= is_timed or is_scaled or link.back_pressure or link.by_layer
        line["layers"] = pools[0].plan.model.num_layers if link.by_layer else 0
    scalers, wanted = _scalers_of(pools, own["arrival_us"])
    sent = [count, *(int(transfers["goes_on"].sum()) for _ in pools[1:])]
    parts["pools"]["turns_at"] = np.cumsum([0, *sent[:-1]])
    own_turns = np.arange(count) if served is None else np.flatnonzero(served)
    drawn = np.zeros((2, 0), np.int32)
    if any(pool.router == "power_of_two" for pool in pools):
        drawn_each = [_drawn(pool, each, seed) for pool, each in zip(pools, sent, strict=True)]
        drawn = np.concatenate(drawn_each, axis=1)
    tiers = pools[0].tiers
    has_front_end, servers = not front_end.adds_nothing, np.zeros(0, R.SERVER)
    line["leaves_us"] = math.inf
    if has_front_end:
        line["request_us"], line["token_us"], line["server_us"] = front_end.times_us
        line["servers_each"] = pools[0].plan.layout.dp
        servers = np.zeros(pools[0].most_replicas * pools[0].plan.layout.dp, R.SERVER)
        servers["leaves_us"] = math.inf
        for name in ("first", "last", "waits"):
            servers[name] = R.NONE
    ranks_in_all = len(parts["ranks"])
    is_sent = len(pools) > 1
    fleet = Fleet(
        has=features_of(pools, trace, front_end),
        **parts,
        requests=requests,
        chains=chains,
        segments=segments,
        tiers=_tier_rows(tiers),
        stores=np.zeros(ranks_in_all * len(tiers.tiers), R.STORE),
        tier_tokens=np.zeros((count if tiers.tiers else 0, len(tiers.tiers)), np.int32),
        followers=followers,
        children=children,
        transfers=transfers,
        coming=np.zeros(count if trace.has_parents else 0, np.int64),
        servers=servers,
        passing=np.zeros(count * has_front_end, R.PASSING),
        passed=np.zeros(count * has_front_end, np.int64),
        begins=np.zeros(count * is_sent, np.int64),
        ends=np.zeros(count * is_sent, np.int64),
        ready=np.zeros(len(parts["slots"]) * is_sent, np.int64),
        line=line,
        turns=np.concatenate([own_turns, *map(np.arange, sent[1:])]) if len(pools) > 1 else own_turns,
        drawn=drawn,
        scalers=scalers,
        lives=np.zeros(lives + sum(scalers["first"]) if len(scalers) else 0, R.LIFE),
        wanted=wanted,
        **draws([pool.drafting for pool in pools], own_turns, output_tokens, seed),
        gaps=np.zeros((len(pools), GAP_BINS), np.int64),
        series=np.zeros((len(pools), SERIES_BINS, SERIES_FIELDS)),
        width_us=np.full(len(pools), FIRST_BIN_US),
        stop=stop_flag(),
    )
    return _as_records(fleet) if uses_records() else fleet


class _Records(np.ndarray[Any, Any]):
    """An array whose fields are attributes, as Numba has it; recarray takes five times as long for each."""

    def __getattr__(self, name: str) -> Any:
        if name not in (self.dtype.names or ()):
            raise AttributeError(name)
        return self[name].view(np.ndarray)


@cache
def _row_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a record's type whose fields are attributes."""

    def field(name: str) -> property:
        return property(lambda row: row[name], lambda row, value: row.__setitem__(name, value))

    row = type("Row", (np.void,), {name: field(name) for name in dtype.names or ()})
    return np.dtype((row, dtype))


def _as_records(fleet: Fleet) -> Fleet:
    """Return the arrays as uncompiled loops read them."""
    arrays = {name: getattr(fleet, name) for name in fleet._fields[1:]}
    records = {name: of for name, of in arrays.items() if of.dtype.names}
    return fleet._replace(
        **{name: of.view(_row_type(of.dtype)).view(_Records) for name, of in records.items()}
    )


def _drawn_from(pool: EnginePool) -> int:
    """Return what a router's draws are below."""
    scaler = pool.autoscaler
    if scaler is None:
        return pool.replicas
    return scaler.max_replicas if scaler.max_replicas == scaler.min_replicas else _DRAWN_FROM


def _drawn(pool: EnginePool, count: int, seed: int) -> Ints:
    """Draw two replicas for each request, if the pool's router looks at them."""
    if pool.router != "power_of_two":
        return np.zeros((2, count), np.int32)
    return np.random.default_rng(seed).integers(0, _drawn_from(pool), (2, count), np.int32)


def _lane_bytes(pool: EnginePool, shape: Shape, longest: int, count: int) -> dict[str, int]:
    """Return the bytes of a lane's state, by what takes them."""
    columns = R.NUM_CELL_COLUMNS * (1 + len(pool.tiers.tiers)) + bool(pool.tiers.tiers)
    return {
        f"{shape.slots:,} running requests": shape.slots * (R.SLOT.itemsize + 3 * R.HELD_SLOT.itemsize),
        f"an output of {longest:,} tokens": shape.buckets * 8,
        f"block_size {pool.settings.block_size:,}": pool.settings.block_size * 4,
        f"a simulated prefix cache for {count:,} requests": shape.cells * columns * 4 // shape.stages,
    }


def state_bytes(pool: EnginePool, longest: int, count: int, segments: int = 0) -> int:
    """Return how much memory the state of a pool's engines takes, without that of requests."""
    shape = Shape.of_pool(pool, count, longest, segments)
    lanes = shape.engines * shape.ranks * shape.stages
    return lanes * sum(_lane_bytes(pool, shape, longest, count).values())


def _check_memory(
    pools: Sequence[EnginePool], shapes: Sequence[Shape], longest: Sequence[int], count: int
) -> None:
    """Raise an error if the state of all engines takes more memory than is free."""
    total = 0
    worst = (0, "")
    for pool, shape, most in zip(pools, shapes, longest, strict=True):
        lanes = shape.stages * shape.ranks * shape.engines
        each = _lane_bytes(pool, shape, most, count)
        total += lanes * sum(each.values())
        worst = max(worst, *((size * lanes, cause) for cause, size in each.items()))
    if total > MOST_STATE_BYTES and total > usable_memory_bytes():
        engines = sum(shape.engines * shape.ranks for shape in shapes)
        raise SimulationError(
            f"{engines:,} engines with {worst[1]} take {total / GIB:,.1f} GiB to simulate, more than "
            "is free; give fewer replicas, or less of that"
        )


def _engines_of(
    pools: Sequence[EnginePool], shapes: Sequence[Shape], time_scale: float, back_pressure: bool
) -> dict[str, Any]:
    """Return the arrays of pools, replicas, engines, ranks and lanes, by the names of a fleet's."""
    rows = np.zeros(len(pools), R.POOL)
    engines = np.zeros(sum(shape.engines for shape in shapes), R.ENGINE)
    replicas = np.zeros(sum(shape.replicas for shape in shapes), R.REPLICA)
    ranks = np.zeros(sum(shape.engines * shape.ranks for shape in shapes), R.RANK)
    lanes = np.zeros(sum(shape.engines * shape.ranks * shape.stages for shape in shapes), R.LANE)
    replica_at = engine_at = rank_at = lane_at = slots_at = calendar_at = due_at = cells_at = 0
    arena_at = rates_at = 0
    num_scalers = 0
    free_slots, depth = [], 1
    for at, (pool, shape) in enumerate(zip(pools, shapes, strict=True)):
        row, arena, settings = rows[at], pool.arena, pool.settings
        _set_options(rows, at, pool, shape, time_scale)
        row["has_reserved"] = back_pressure and at > 0
        row["has_next"] = at + 1 < len(pools)
        row["arena_at"], row["arena_size"] = arena_at, len(arena)
        arena_at += len(arena)
        row["rates_at"] = rates_at
        rates_at += len(pool.drafting.rates) if pool.drafting is not None else 0
        row["first_engine"], row["num_engines"] = engine_at, shape.engines
        row["first_replica"], row["num_replicas"] = replica_at, shape.replicas
        row["scaler"] = R.NONE
        if pool.autoscaler is not None:
            row["scaler"] = num_scalers
            num_scalers += 1
        depth = max(depth, int(row["depth"]), shape.stages)
        replicas[replica_at : replica_at + shape.replicas]["pool"] = at
        own = engines[engine_at : engine_at + shape.engines]
        own["pool"] = at
        own["replica"] = replica_at + np.arange(shape.engines) // shape.engines_each
        own["first_rank"] = rank_at + np.arange(shape.engines) * shape.ranks
        num_ranks = shape.engines * shape.ranks
        of_ranks = ranks[rank_at : rank_at + num_ranks]
        of_ranks["first_lane"] = lane_at + np.arange(num_ranks) * shape.stages
        for name in ("free", "num_blocks", "least_free"):
            of_ranks[name] = settings.num_gpu_blocks
        of_ranks["cells_at"] = cells_at + np.arange(num_ranks) * shape.cells
        of_ranks["tiers_at"] = (rank_at + np.arange(num_ranks)) * len(pool.tiers.tiers)
        num_lanes = num_ranks * shape.stages
        of_lanes = lanes[lane_at : lane_at + num_lanes]
        of_lanes["slots_at"] = slots_at + np.arange(num_lanes) * shape.slots
        of_lanes["calendar_at"] = calendar_at + np.arange(num_lanes) * shape.buckets
        of_lanes["mask"] = shape.buckets - 1
        of_lanes["due_at"] = due_at + np.arange(num_lanes) * settings.block_size
        next_free = slots_at + np.arange(1, num_lanes * shape.slots + 1)
        next_free[shape.slots - 1 :: shape.slots] = R.NONE
        free_slots.append(next_free)
        replica_at, engine_at = replica_at + shape.replicas, engine_at + shape.engines
        rank_at, lane_at = rank_at + num_ranks, lane_at + num_lanes
        slots_at, calendar_at = slots_at + num_lanes * shape.slots, calendar_at + num_lanes * shape.buckets
        due_at, cells_at = due_at + num_lanes * settings.block_size, cells_at + num_ranks * shape.cells
    for name in ("first_sent", "last_sent", "first_wanting", "last_wanting"):
        engines[name] = R.NONE
    engines["next_us"] = engines["least_us"] = math.inf
    for name in ("head", "tail", "arrived", "deadline", "preempted", "first_fetching", "last_fetching"):
        ranks[name] = R.NONE
    lanes["last"] = lanes["partial"] = R.NONE
    lanes["free_slot"] = lanes["slots_at"]
    lanes["flights_at"] = 2 * np.arange(len(lanes))
    slots = np.zeros(slots_at, R.SLOT)
    slots["request"] = R.NONE
    slots["order_next"] = np.concatenate(free_slots)
    shapes_in = shapes[0]
    most_ranks = max(shape.ranks for shape in shapes)
    most_stages = max(shape.stages for shape in shapes)
    num_tiers = len(pools[0].tiers.tiers)
    cells = np.zeros((cells_at, R.NUM_CELL_COLUMNS * (1 + num_tiers) + (num_tiers > 0)), np.int32)
    if cells_at:
        ends = np.arange(1, cells_at // shapes_in.cells + 1) * shapes_in.cells - 1
        for tier in range(num_tiers + 1):
            for column in (R.NEWER, R.OLDER):
                cells[ends, R.NUM_CELL_COLUMNS * tier + column] = ends
    arenas = [pool.arena for pool in pools]
    arena = arenas[0] if len(arenas) == 1 else np.concatenate(arenas)
    arena.flags.writeable = False  # as one pool's is: loops are compiled once
    return {
        "arena": arena,
        "pools": rows,
        "replicas": replicas,
        "engines": engines,
        "ranks": ranks,
        "lanes": lanes,
        "slots": slots,
        "calendar": np.full(calendar_at, R.NONE, np.int32),
        "filled": np.zeros(calendar_at if any(rows["window"] > 0) else 0, np.int32),
        "due": np.zeros(due_at, np.int32),
        "flights": np.zeros(2 * len(lanes), R.FLIGHT),
        "firsts": np.zeros((2, slots_at), R.HELD_SLOT),
        "fresh": np.zeros(slots_at if any(rows["prefill_first"] > 0) else 0, R.HELD_SLOT),
        "batches": np.zeros((len(engines), depth), R.BATCH),
        "parts": np.zeros((len(engines), depth, most_ranks), np.uint8),
        "stage_free_us": np.zeros((len(engines), most_stages)),
        "cells": cells,
    }


def _set_options(rows: Rows, at: int, pool: EnginePool, shape: Shape, time_scale: float) -> None:
    """Write how a pool's engines schedule steps."""
    settings, rules = pool.settings, rank_rules(pool.plan)
    size, is_mixed = settings.block_size, settings.order == "mixed"
    values = {
        "budget": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "block_size": size,
        "block_shift": size.bit_length() - 1 if size & (size - 1) == 0 else R.NONE,
        "is_chunked": settings.chunked_prefill,
        "admits_whole": settings.admit_whole_prompt,
        "reserves_output": settings.reserve_output,
        "prefill_first": not is_mixed,
        "pause_steps": settings.pause_steps,
        "min_free_slots": min(settings.min_free_slots_delay, settings.max_num_seqs),
        "depth": 2 if settings.async_scheduling and shape.stages == 1 else 1,
        "window": int(pool.arena[WINDOW]),
        "stages": shape.stages,
        # SGLang limits each batch to its share
        "shares_slots": is_mixed or shape.stages == 1,
        "ranks": shape.ranks,
        "in_lockstep": rules.in_lockstep,
        "assignment": rules.assignment,
        "balance_steps": rules.balance_steps,
        "prompt_padding": rules.prompt_padding,
        "decode_padding": rules.decode_padding,
        "graph_tokens": rules.graph_tokens,
        "idle_tokens": rules.idle_tokens,
        "has_cache": pool.prefix_cache == LRU,
        "num_tiers": len(pool.tiers.tiers),
        "rule": ROUTERS[pool.router],
        "engines_each": shape.engines_each,
        "num_blocks": settings.num_gpu_blocks,
        "timeout_us": settings.timeout_s * US_PER_S,
        "time_scale": time_scale,
        "verified": 1,
        "beyond": pool.beyond,
        "lookahead": pool.lookahead,
    }
    if pool.drafting is not None:
        loops = pool.drafting.loops
        values["verified"] = loops.tokens
        values["draft_window"] = 0 if loops.draft is None else int(loops.draft.arena[WINDOW])
    if shape.stages > 1 and not is_mixed:
        values["max_num_seqs"] = max(settings.max_num_seqs // shape.stages, 1)
    rows[at] = tuple(values.get(name, 0) for name in R.POOL.names or ())


def _line_of(trace: Trace, served: Bools | None, count: int, link: Link | None) -> tuple[Any, Any, Any]:
    """Return what is between engines, and who follows whom in sessions."""
    line = np.zeros(1, R.LINE)
    line["think_us"] = trace.think_s * US_PER_S
    followers, children = np.zeros(0, R.FOLLOWER), np.zeros(0, np.int32)
    if trace.parents is not None and trace.parent_offsets is not None and trace.delay_s is not None:
        links = trace.links
        if served is not None:
            kept = of_rows(np.flatnonzero(served), trace.parents, trace.parent_offsets)
            links = links_of(kept["parents"], kept["parent_offsets"])
        which: Any = slice(None) if served is None else served
        num_roots = len(links.roots)
        unended: list[Any] = [links.parents_each, [0]]
        delay_s: list[Any] = [trace.delay_s[which], [0.0]]
        if trace.clients is not None:
            # a session is over when all of its last requests are
            assert trace.session is not None
            links, last_each = with_ends(links, trace.session[which])
            unended.append(last_each)
            delay_s.append(np.full(len(last_each), trace.think_s))
        children = np.concatenate([links.roots, links.children])
        followers = np.zeros(sum(map(len, unended)), R.FOLLOWER)
        followers["children_at"][: count + 1] = num_roots + links.child_offsets
        followers["unended"] = np.concatenate(unended)
        followers["delay_us"] = np.concatenate(delay_s) * US_PER_S
        line["sessions"], line["num_roots"] = 1, min(num_roots, trace.clients or num_roots)
    elif trace.is_closed:
        line["clients"] = trace.clients
    else:
        line["num_roots"] = count
    if link is not None:
        line["is_shared"], line["reserves"] = link.is_shared, link.back_pressure
        line["latency_us"] = link.latency_us
    return line, followers, children


def _scalers_of(pools: Sequence[EnginePool], arrival_us: Floats) -> tuple[Any, Longs]:
    """Return the rules that start and stop replicas, and room for what they wanted at the last checks."""
    scaled = [pool for pool in pools if pool.autoscaler is not None]
    scalers = np.zeros(len(scaled), R.SCALER)
    wanted_at = 0
    for row, pool in zip(scalers, scaled, strict=True):
        rule = pool.autoscaler
        assert rule is not None
        row["metric"], row["target"] = METRICS.index(rule.metric), rule.target
        row["low"], row["tolerance"] = -1.0 if rule.low is None else rule.low, rule.tolerance
        row["least"], row["first"] = rule.min_replicas, max(pool.replicas, rule.min_replicas)
        row["interval_us"], row["startup_us"] = rule.interval_s * US_PER_S, rule.startup_s * US_PER_S
        row["start_us"] = arrival_us.min() if len(arrival_us) else 0.0
        row["drawn_from"] = _drawn_from(pool)
        row["wanted_at"], row["num_wanted"] = wanted_at, rule.lookback + 1
        wanted_at += rule.lookback + 1
    return scalers, np.zeros(wanted_at, np.int64)


def _tier_rows(tiers: Any) -> Any:
    """Return tiers as the loop reads them."""
    rows = np.zeros(len(tiers.tiers), R.TIER)
    names = ("blocks", "block_us", "latency_us", "writes", "fetches", "is_prompts", "layers")
    for at, name in enumerate(names if len(rows) else ()):
        rows[name] = tiers.rows.reshape(-1, len(names))[:, at]
    return rows
