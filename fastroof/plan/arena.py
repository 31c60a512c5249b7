"""Parts of a plan's arena: grid blocks of all layers and kinds, tables of decodes and drafts, validation.

A packed attention cell is a polynomial of its offsets from its lower corner, so kinds add up on the union of
their axes: the sum of two lookups to 4e-16, at the cost of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_INTERPOLATED
from fastroof.compiled import decode_lines as line_loops
from fastroof.compiled import grids, steps
from fastroof.compiled import verification as loops
from fastroof.compiled.grids import cells_of
from fastroof.compiled.layout import FORM_LATENCY
from fastroof.errors import FastroofError, PlanError
from fastroof.pack.keys import axis_guide, key_columns
from fastroof.plan.attention_times import attention_times
from fastroof.plan.curves import row_values
from fastroof.plan.plan_data import PlanData


class _Grid(NamedTuple):
    """The parts of a block."""

    form: int
    y_axis: Floats
    x_axis: Floats
    cells: Floats
    flags: Floats


def scaled_block(block: Floats, num_layers: float) -> Floats:
    """Scale a block of one call to all layers, or to a share; cells are latencies, or work / latency."""
    scaled = block.copy()
    cells = scaled[grids.cells_of(scaled)]
    if block[grids.FORM] == FORM_LATENCY:
        cells *= num_layers
    else:
        cells /= num_layers
    return scaled


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
    draft_steps: int = 0,
    draft: PlanData | None = None,
) -> Floats:
    """Return the arena followed by what :mod:`fastroof.compiled.verification` reads."""
    head = _head_us(plan)
    bounds = np.array([_bound(plan, number) for number in range(len(plan.attention))])
    head_at = len(plan.arena) + loops.SPECULATION_HEADER
    bounds_at = head_at + len(head)
    draft_at = 0 if draft is None else bounds_at + bounds.size
    header = np.zeros(loops.SPECULATION_HEADER)
    header[[loops.TOKENS, loops.ACCEPTED, loops.DRAFT_STEPS]] = tokens, accepted, draft_steps
    header[[loops.HEAD_AT, loops.HEAD_LAST]] = head_at, len(head) - 1
    header[[loops.BOUNDS_AT, loops.BOUNDS, loops.DRAFT_AT]] = bounds_at, len(bounds), draft_at
    parts = [plan.arena, header, head, bounds.ravel()]
    arena = np.concatenate(parts if draft is None else [*parts, draft.arena])
    arena[steps.SPECULATION_AT] = len(plan.arena)
    arena.flags.writeable = False
    return arena


def _head_us(plan: PlanData) -> Floats:
    """The LM head at every number of tokens of a step; the plan's own values up to max_seqs."""
    own = plan.arena[int(plan.arena[steps.LOGITS_AT]) :][: plan.max_seqs + 1]
    head = np.zeros(max(plan.max_tokens, plan.max_seqs) + 1)
    for curve in plan.row_curves:
        if curve.operator.rows == "sequences":
            head += curve.operator.times * row_values(curve, len(head) - 1)[0]
    head[: len(own)] = own
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
_BLOCKS: Final = {
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
    for name, slot in _BLOCKS.items():
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
