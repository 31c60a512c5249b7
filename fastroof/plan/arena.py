"""A plan's arena: grid blocks of all layers and kinds, lookups in them, validation.

A packed attention cell is a polynomial of its offsets from its lower corner, so kinds add up on the union of
their axes: the sum of two lookups to 4e-16, at the cost of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Ints, Longs
from fastroof.columns import ORIGIN_INTERPOLATED, ORIGIN_MODELLED
from fastroof.compiled import decode_lines as line_loops
from fastroof.compiled import grids, steps
from fastroof.compiled import verification as loops
from fastroof.compiled.grids import cells_of, grid_latency_us
from fastroof.compiled.layout import FORM_LATENCY
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.errors import FastroofError, PlanError
from fastroof.models.draft_heads import Passes, head_of
from fastroof.operators.attention_work import pairs_within
from fastroof.operators.calls import AttentionCall, MixerCall
from fastroof.pack.keys import axis_guide, key_columns
from fastroof.plan.curves import row_values
from fastroof.plan.plan_data import PlanData
from fastroof.run.batch import StepBatch
from fastroof.units import NS_PER_US


class AttentionTimes(NamedTuple):
    """Attention of one kind's layers in some steps, us, without the time of prefixes.

    ``launch_us`` is the smallest call of one layer.
    """

    own_us: Floats
    origin: Flags
    launch_us: float


class WindowPoints(NamedTuple):
    """Where layers with a window are looked up for requests of different lengths.

    ``is_other`` are the steps whose sizes differ from those of all other layers.
    """

    batch: Floats
    x: Floats
    is_other: Bools


def window_points(
    window: int, is_decode: bool, batch: Any, x: Any, new_sum: Any, seen_sum: Any
) -> WindowPoints:
    """Find where layers with a window are looked up, for decode steps or steps of chunks."""
    batch, x = np.asarray(batch, np.float64), np.asarray(x, np.float64)
    new, attended = np.asarray(new_sum, np.float64), np.asarray(seen_sum, np.float64)
    if is_decode:
        mean_seen = attended / new
        is_other = mean_seen != np.minimum(x, window)
        return WindowPoints(batch, np.where(is_other, mean_seen, x), is_other)
    is_other = batch * pairs_within(x, window) != attended
    # as fastroof.compiled.request_sums.window_chunks
    q_len = 2.0 * attended / new - 1.0
    long = q_len > window
    short_of_window = np.where(long, window - attended / new, 1.0)
    q_len = np.where(long, 0.5 * window * (window - 1.0) / short_of_window, q_len)
    return WindowPoints(np.where(is_other, new / q_len, batch), np.where(is_other, q_len, x), is_other)


class AttentionMeans(NamedTuple):
    """Where attention of steps' decodes or prompts is looked up: by the means of each step that has some."""

    is_busy: Bools
    batch: Floats
    x: Floats
    within: WindowPoints | None


def per_step(batch: StepBatch, of_requests: Any) -> Longs:
    """Sum integers of requests over each step of a batch."""
    running = np.r_[0, np.cumsum(of_requests)]
    return np.asarray(running[batch.offsets[1:]] - running[batch.offsets[:-1]])


def are_decodes(batch: StepBatch) -> Bools:
    """Mark the requests that decode: one new token after a context."""
    return np.asarray((batch.new_tokens == 1) & (batch.context_len > 0))


def attention_means(plan: PlanData, batch: StepBatch, is_decode: bool) -> AttentionMeans:
    """Find where attention of the decodes or prompts of ragged steps is looked up."""
    new, context = batch.new_tokens.astype(np.int64), batch.context_len.astype(np.int64)
    chosen = are_decodes(batch) == is_decode
    tokens = per_step(batch, chosen * new)
    busy, window = tokens > 0, int(plan.arena[steps.WINDOW])
    size = new_sum = tokens[busy].astype(np.float64)
    if is_decode:
        x = per_step(batch, chosen * (context + 1))[busy] / new_sum
        seen = np.minimum(context + 1, window)
    else:
        x = 2.0 * per_step(batch, chosen * (new * (new + 1) // 2))[busy] / new_sum - 1.0
        size, seen = new_sum / x, pairs_within(new, window)
    within = None
    if window:
        attended = per_step(batch, chosen * seen)[busy]
        within = window_points(window, is_decode, size, x, new_sum, attended)
    return AttentionMeans(busy, size, x, within)


def attention_times(
    plan: PlanData, number: int, is_decode: bool, batch: Any, x: Any, within: WindowPoints | None = None
) -> AttentionTimes:
    """Look up one kind's attention at (batch, kv_len or q_len)."""
    part = plan.attention[number]
    block = part.decode_block if is_decode else part.prefill_block
    if block is None:
        slot = steps.DECODE_AT if is_decode else steps.PREFILL_AT
        block = plan.arena[int(plan.arena[slot]) :]
    own_us, origin = _look_up(block, np.r_[np.asarray(batch, np.float64), 0.0], np.r_[np.asarray(x), 1.0])
    launch_us = float(own_us[-1]) / part.call.times
    own_us, origin = own_us[:-1], origin[:-1]
    if part.call.window and within is not None and within.is_other.any():
        # as the step loops do: all layers' sizes, plus the difference of two lookups within the window
        found = _look_up(block, within.batch, within.x)
        instead = np.minimum(x, part.call.window) if is_decode else np.asarray(x)
        more_us = found[0] - _look_up(block, np.asarray(batch), instead)[0]
        own_us = own_us + np.where(within.is_other, more_us, 0.0)
        origin = np.where(within.is_other, np.maximum(origin, found[1]), origin)
    return AttentionTimes(own_us, origin, launch_us)


def _look_up(block: Floats, batch: Any, x: Any) -> tuple[Floats, Flags]:
    own_us, origin = np.empty(len(batch)), np.empty(len(batch), np.uint8)
    grid_latency_us(block, batch.astype(np.float64), x.astype(np.float64), own_us, origin)
    return own_us, origin


def mixed_kv_us(
    calls: Sequence[AttentionCall | MixerCall], engine: EngineProfile, gpu: GpuSpec
) -> tuple[float, float]:
    """Minimum us per KV token of decodes in a step with prefill: (full, windowed) layers."""
    full_us = windowed_us = 0.0
    for call in calls:
        ns = 0.0
        if isinstance(call, AttentionCall):
            ns = engine.kernels.mixed_attention_ns(gpu.kernel_name, call.head_dim, call.kv_dtype)
        if ns == 0.0 or not isinstance(call, AttentionCall):
            return 0.0, 0.0
        price_us = ns / NS_PER_US * call.num_q_heads * call.times
        if call.window:
            windowed_us += price_us
        else:
            full_us += price_us
    return full_us, windowed_us


def shared_launch_us(
    call: AttentionCall | MixerCall, launch_us: Iterable[float], engine: EngineProfile, gpu: GpuSpec
) -> float:
    """The shorter of both launches of a kind, us, which decodes and chunks in one call save."""
    if not isinstance(call, AttentionCall) or gpu.kernel_name not in engine.kernels.one_attention_call:
        return 0.0
    return min(launch_us)


def block_launch_us(block: Floats) -> float:
    """Launch of a block's calls, all layers, us."""
    return float(_look_up(block, np.zeros(1), np.ones(1))[0][0])


def kinds_beside_decodes(plan: PlanData, kinds: Sequence[AttentionTimes]) -> list[AttentionTimes]:
    """Prefill attention of each kind of layers in one step that also decodes."""
    found = []
    for number, kind in enumerate(kinds):
        call = plan.attention[number].call
        launches = (
            attention_times(plan, number, is_decode, [], []).launch_us * call.times
            for is_decode in (True, False)
        )
        saved_us = shared_launch_us(call, launches, plan.profile, plan.gpu)
        found.append(kind._replace(own_us=kind.own_us - saved_us) if saved_us else kind)
    return found


def kinds_beside_prefill(
    plan: PlanData, kv_len: Ints, kinds: Sequence[AttentionTimes]
) -> list[AttentionTimes]:
    """Decode attention of each kind of layers in one step that also prefills."""
    least_us = []
    for part in plan.attention:
        full_us, windowed_us = mixed_kv_us([part.call], plan.profile, plan.gpu)
        if full_us == windowed_us == 0.0:
            return list(kinds)
        attended = np.minimum(kv_len, part.call.window) if part.call.window else kv_len
        least_us.append((full_us + windowed_us) * float(attended.sum()))
    if sum(least_us) <= sum(float(kind.own_us[0]) for kind in kinds):
        return list(kinds)
    return [
        kind._replace(own_us=np.array([least]), origin=np.full_like(kind.origin, ORIGIN_MODELLED))
        for kind, least in zip(kinds, least_us, strict=True)
    ]


class _Grid(NamedTuple):
    """The parts of a block."""

    form: int
    y_axis: Floats
    x_axis: Floats
    cells: Floats
    flags: Floats


def sum_blocks(blocks: Sequence[Floats], like: Floats | None = None) -> Floats:
    """Add up blocks of the same form."""
    if len(blocks) == 1 and like is None:
        return blocks[0]
    opened = [_open(block) for block in blocks]
    axes = opened if like is None else [_open(like)]
    y_axis = np.unique(np.concatenate([grid.y_axis for grid in axes]))
    x_axis = np.unique(np.concatenate([grid.x_axis for grid in axes]))
    parts = [_on_axes(grid, y_axis, x_axis) for grid in opened]
    form = opened[0].form
    if form == FORM_LATENCY:
        cells = np.sum([cells for cells, _ in parts], axis=0)
    elif any(grid.cells[..., 1:].any() for grid in opened):
        raise PlanError(
            "method='linear_mfu' takes one kind of layers, and this model has several; "
            "use roofline, nearest or floor"
        )
    else:
        # work / latency without slopes: latencies add up
        cells = np.zeros_like(parts[0][0])
        cells[..., 0] = 1.0 / np.sum([1.0 / part[..., 0] for part, _ in parts], axis=0)
    flags = np.max([flags for _, flags in parts], axis=0)
    return _block(_Grid(form, y_axis, x_axis, cells, flags))


def _open(block: Floats) -> _Grid:
    ny, nx = int(block[grids.Y]), int(block[grids.X])
    place = grids.cells_of(block)
    y_axis = block[grids.BLOCK_HEADER : grids.BLOCK_HEADER + ny]
    cells = block[place].reshape(ny, nx, 6)
    flags = block[place.stop : place.stop + ny * nx].reshape(ny, nx)
    return _Grid(int(block[grids.FORM]), y_axis, grids.x_axis_of(block), cells, flags)


def _block(grid: _Grid) -> Floats:
    head: list[float] = []
    guides = []
    for axis in (grid.y_axis, grid.x_axis):
        guide = axis_guide(axis)
        head += [len(axis), guide.shift, guide.first, len(guide.cells)]
        guides.append(guide.cells)
    parts: list[Any] = [
        [*head, grid.form],
        grid.y_axis,
        grid.x_axis,
        *guides,
        grid.cells.ravel(),
        grid.flags.ravel(),
    ]
    return np.concatenate(parts, dtype=np.float64)


def _on_axes(grid: _Grid, y_axis: Floats, x_axis: Floats) -> tuple[Floats, Floats]:
    """Cells and flags at the nodes of finer axes: each polynomial moved to its new corner."""
    # all axes start at 0
    i = np.searchsorted(grid.y_axis, y_axis, side="right") - 1
    j = np.searchsorted(grid.x_axis, x_axis, side="right") - 1
    v = (y_axis - grid.y_axis[i])[:, None]
    u = (x_axis - grid.x_axis[j])[None, :]
    c = np.moveaxis(grid.cells[np.ix_(i, j)], 2, 0)
    low = (c[0] + u * (c[1] + u * c[2]), c[1] + 2.0 * u * c[2], c[2])
    rise = (c[3] + u * (c[4] + u * c[5]), c[4] + 2.0 * u * c[5], c[5])
    cells = np.stack([*(a + v * b for a, b in zip(low, rise, strict=True)), *rise], axis=2)
    above_i, above_j = np.minimum(i + 1, len(grid.y_axis) - 1), np.minimum(j + 1, len(grid.x_axis) - 1)
    off_row, off_column = v > 0.0, u > 0.0
    flags = grid.flags[np.ix_(i, j)]
    for rows, columns, used in (
        (i, above_j, off_column & (v == v)),
        (above_i, j, off_row & (u == u)),
        (above_i, above_j, off_row & off_column),
    ):
        seen = np.maximum(grid.flags[np.ix_(rows, columns)], ORIGIN_INTERPOLATED)
        flags = np.where(used, np.maximum(flags, seen), flags)
    return cells, flags


def decode_lines(arena: Floats) -> Floats | None:
    """Tabulate equal decode steps (:mod:`fastroof.compiled.decode_lines`), if the block's axis allows it."""
    block = arena[int(arena[steps.DECODE_AT]) :]
    if block[grids.FORM] != FORM_LATENCY:
        return None
    columns = key_columns(grids.x_axis_of(block))
    if columns is None:
        return None
    max_batch = int(min(arena[steps.MAX_TOKENS], arena[steps.MAX_SEQS]))
    # the row of batch size 0 is neither read nor written: its pages cost nothing
    lines = np.zeros(line_loops.LINES_HEADER + 2 * len(columns.starts) * (max_batch + 1))
    lines[: line_loops.FIRST_KEY + 1] = (max_batch, len(columns.starts), columns.shift, columns.first)
    line_loops.fill_decode_lines(arena, columns.starts, lines)
    lines.flags.writeable = False
    return lines


def verification_arena(
    plan: PlanData,
    tokens: int = 1,
    accepted: float = 1.0,
    draft: PlanData | None = None,
    joined: PlanData | None = None,
) -> Floats:
    """Return the arena followed by what :mod:`fastroof.compiled.verification` reads.

    ``joined`` is the plan of a draft head with what the target's step runs for it, of which ``draft`` is
    the rest.
    """
    head = _head_us(plan)
    bounds = np.array([_bound(plan, number) for number in range(len(plan.attention))])
    head_at = len(plan.arena) + loops.SPECULATION_HEADER
    bounds_at = head_at + len(head)
    draft_at = 0 if draft is None else bounds_at + bounds.size
    header = np.zeros(loops.SPECULATION_HEADER)
    drafted = None if draft is None else head_of(draft.model)
    passes = Passes.of(drafted, tokens - 1)
    header[[loops.TOKENS, loops.ACCEPTED, loops.DRAFT_STEPS]] = tokens, accepted, passes.steps
    header[[loops.HEAD_AT, loops.HEAD_LAST]] = head_at, len(head) - 1
    header[[loops.BOUNDS_AT, loops.BOUNDS, loops.DRAFT_AT]] = bounds_at, len(bounds), draft_at
    parts = [plan.arena, header, head, bounds.ravel()]
    if draft is not None:
        own = draft.arena if drafted is None else verification_arena(draft)
        parts += [np.array(passes[1:], np.float64), own]
    arena = np.concatenate(parts)
    arena[steps.SPECULATION_AT] = len(plan.arena)
    if drafted is not None and draft is not None and joined is not None:
        _add_joined(arena, draft_at + loops.PASSES, draft, joined, tokens - 1)
    arena.flags.writeable = False
    return arena


def _add_joined(arena: Floats, own_at: int, draft: PlanData, joined: PlanData, drafted: int) -> None:
    """Add what a target's step runs for its draft head, and the Markov head of each draft token."""
    for slot in {int(arena[steps.TOKENS_AT]), int(arena[steps.DECODE_TOKENS_AT])}:
        size = min(int(arena[steps.MAX_TOKENS]), draft.max_num_batched_tokens) + 1
        more_us = _section(joined, steps.TOKENS_AT, size) - _section(draft, steps.TOKENS_AT, size)
        more_us[0] = 0.0
        arena[slot : slot + size] += more_us
    markov_us = _section(joined, steps.LOGITS_AT, draft.max_num_seqs + 1)
    markov_us = markov_us - _section(draft, steps.LOGITS_AT, len(markov_us))
    header = own_at + int(arena[own_at + steps.SPECULATION_AT])
    at, last = own_at + int(arena[header + loops.HEAD_AT]), int(arena[header + loops.HEAD_LAST])
    # one call after another, each of the sequences
    of_each = np.interp(np.arange(last + 1) / drafted, np.arange(len(markov_us)), markov_us)
    arena[at : at + last + 1] += drafted * of_each


def _section(plan: PlanData, slot: int, size: int) -> Floats:
    return plan.arena[int(plan.arena[slot]) :][:size].copy()


def _head_us(plan: PlanData) -> Floats:
    """The LM head at every number of tokens of a step; the plan's own values up to max_num_seqs."""
    logits = plan.arena[int(plan.arena[steps.LOGITS_AT]) :][: plan.max_num_seqs + 1]
    head = np.zeros(max(plan.max_num_batched_tokens, plan.max_num_seqs) + 1)
    for curve in plan.row_curves:
        if curve.operator.rows == "sequences":
            head += curve.operator.times * row_values(curve, len(head) - 1)[0]
    head[: len(logits)] = logits
    return head


def _bound(plan: PlanData, number: int) -> tuple[float, ...]:
    """Roofline terms of one kind's decode attention, all layers, in the order of the loops' slots."""
    part = plan.attention[number]
    times = part.call.times
    launch_us = attention_times(plan, number, True, [], []).launch_us
    bound = part.phase(True).query_bound(plan.gpu)
    return times * launch_us, times * bound.pair, times * bound.query, times * bound.kv, bound.window


MOST_US: Final = 1e12
"""Maximum time of a part of a step (eleven days), so that sums stay finite."""

_MOST_OF_A_NODE: Final = 1e60
"""Maximum of attention nodes: padding lies far beyond any step, at 1e22 us and 1e34."""

_LEAST_US: Final = 1e-30
"""Minimum time of what runs per token; a stage without the LM head has none per sequence."""

_ORIGIN: Final = "its tables, GPU or engine profile hold an impossible number"
_ROWS: Final = {
    "what runs for each token": (steps.TOKENS_AT, steps.MAX_TOKENS, _LEAST_US),
    "what runs for each token of a decode-only step": (steps.DECODE_TOKENS_AT, steps.MAX_TOKENS, _LEAST_US),
    "what runs for the tokens of all ranks": (steps.EXPERT_AT, steps.MAX_TOKENS, _LEAST_US),
    "what runs for the tokens of all ranks in a decode-only step": (
        steps.DECODE_EXPERT_AT,
        steps.MAX_TOKENS,
        _LEAST_US,
    ),
    "what runs for each sequence": (steps.LOGITS_AT, steps.MAX_SEQS, 0.0),
}
BLOCKS: Final = {
    "decode attention": steps.DECODE_AT,
    "prefill attention": steps.PREFILL_AT,
    "decode attention within a window": steps.WINDOW_DECODE_AT,
    "prefill attention within a window": steps.WINDOW_PREFILL_AT,
}
_PRICES: Final = {
    "a pair of tokens of a prefix": steps.PREFIX_PAIR_US,
    "a token of a prefix": steps.PREFIX_TOKEN_US,
    "a pair of tokens of a prefix within a window": steps.WINDOW_PAIR_US,
    "a token of a prefix within a window": steps.WINDOW_TOKEN_US,
    "a KV token beside prefill": steps.MIXED_KV_US,
    "a KV token within a window beside prefill": steps.MIXED_WINDOW_KV_US,
    "the launch that decodes share with prefill": steps.SHARED_LAUNCH_US,
    "the engine's least time of a step with prefill": steps.PREFILL_FLOOR_US,
}
_CORRECTIONS: Final = {
    "what the engine adds to a step": steps.STEP_US,
    "what the engine adds to a sequence": steps.SEQUENCE_US,
    "what the engine adds to a step with prefill": steps.PREFILL_US,
}


def validate_arena(arena: Floats, what: str, error: type[FastroofError] = PlanError) -> None:
    """Refuse an arena with infinities, NaN, or times below 0 or impossibly large."""
    header = arena[: steps.HEADER_SIZE].tolist()
    for name, slot in _CORRECTIONS.items():
        _check(header[slot], header[slot], name, what, error, least=-MOST_US)
    for name, slot in _PRICES.items():
        _check(header[slot], header[slot], name, what, error)
    for name, (slot, limit, least) in _ROWS.items():
        if header[slot] == 0.0:
            continue
        # the first row is of 0 tokens
        rows = arena[int(header[slot]) + 1 :][: int(header[limit])]
        _check(rows.min(), rows.max(), name, what, error, least)
    for name, slot in BLOCKS.items():
        block = arena[int(header[slot]) :]
        # the first of a cell's six coefficients is the value at its node: us, or work / us
        values = block[cells_of(block)][::6]
        _check(values.min(), values.max(), name, what, error, most=_MOST_OF_A_NODE)
    if not np.isfinite(arena).all():
        raise error(f"{what} holds a number that is not finite; {_ORIGIN}")


def _check(
    low: float,
    high: float,
    name: str,
    what: str,
    error: type[FastroofError],
    least: float = 0.0,
    most: float = MOST_US,
) -> None:
    # NaN is in no range
    if not (least <= low and high <= most):
        wrong = low if not least <= low else high
        raise error(f"{what}: {name} takes {wrong:g} us, must be {least:g} to {most:g}; {_ORIGIN}")
