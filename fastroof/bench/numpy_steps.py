"""Step times in NumPy: every lookup by searchsorted, without a plan and without compiled loops.

Only measured nodes come from fastroof, through public lookups; each interpolation is reimplemented
here, so that agreement of the two is evidence.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Floats
from fastroof.operators.attention import ATTENTION, ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.attention_grids import AttentionOperator
from fastroof.plan import StepPlan
from fastroof.run import StepBatch
from fastroof.tables import Tables

CHUNK: Final = 16_384
"""Steps per chunk, so that its arrays stay in the cache."""


def searched(axis: Floats, value: Floats, x: Array) -> Floats:
    """Interpolate linearly with searchsorted and gathers."""
    at = np.searchsorted(axis, x, side="right") - 1
    np.clip(at, 0, len(axis) - 2, out=at)
    low, left = value[at], axis[at]
    return np.asarray(low + (x - left) * ((value[at + 1] - low) / (axis[at + 1] - left)))


class NodeGrid(NamedTuple):
    """An attention table at its measured nodes; latency is linear in batch and in square x^2 + slope x."""

    batch: Floats
    x: Floats
    value: Floats
    square: float
    slope: float

    def position(self, x: Array) -> Floats:
        """Return the position of x on the axis in which latency is linear."""
        return np.asarray((self.square * x + self.slope) * x)

    def __call__(self, batch: Array, x: Array) -> Floats:
        """Return the values at points within the nodes, us."""
        i = np.searchsorted(self.batch, batch, side="right") - 1
        j = np.searchsorted(self.x, x, side="right") - 1
        np.clip(i, 0, len(self.batch) - 2, out=i)
        np.clip(j, 0, len(self.x) - 2, out=j)
        start = self.position(self.x[j])
        w = (self.position(x) - start) / (self.position(self.x[j + 1]) - start)
        low = self.value[i, j] + w * (self.value[i, j + 1] - self.value[i, j])
        high = self.value[i + 1, j] + w * (self.value[i + 1, j + 1] - self.value[i + 1, j])
        return np.asarray(low + (batch - self.batch[i]) / (self.batch[i + 1] - self.batch[i]) * (high - low))


class NumpySteps:
    """A plan's step times in NumPy, from the tables it was compiled from; its head shape was measured."""

    def __init__(self, plan: StepPlan, tables: Tables) -> None:
        self.layers = plan.model.num_layers
        self.decode_grid = _node_grid(plan, tables, ATTENTION_DECODE)
        self.prefill_grid = _node_grid(plan, tables, ATTENTION_PREFILL)
        self.prefix_us = ATTENTION_PREFILL.prefix_us(tables, plan.heads)
        self.searches: dict[str, list[tuple[Floats, Floats]]] = {"tokens": [], "sequences": []}
        # streaming kernels and similar curves need no search: together they are one straight line
        self.line = {"tokens": np.zeros(2), "sequences": np.zeros(2)}
        for curve in plan.row_curves:
            rows, value = curve.operator.rows, curve.operator.times * curve.value
            if len(curve.axis) == 2:
                slope = (value[1] - value[0]) / (curve.axis[1] - curve.axis[0])
                self.line[rows] += (value[0] - slope * curve.axis[0], slope)
            else:
                self.searches[rows].append((curve.axis, value))

    @staticmethod
    def serves(plan: StepPlan, tables: Tables) -> bool:
        """Return whether the plan has one measured head shape, without a window.

        Nodes of a substituted shape are not public, and steps here have one kind of attention.
        """
        if len(plan.attention) > 1 or plan.heads.window:
            return False
        if any(curve.operator.steps != "all" for curve in plan.row_curves):
            return False
        shape = tuple(plan.heads)
        return all(shape in tables.groups(name) for name in ATTENTION)

    def rows_us(self, rows: str, count: Array) -> Floats:
        """Return the time of all operators over tokens or over sequences, us."""
        intercept, slope = self.line[rows]
        total = intercept + slope * count
        for axis, value in self.searches[rows]:
            total += searched(axis, value, count)
        return np.asarray(total)

    def decode_us(self, batch_size: Array, kv_len: Array) -> Floats:
        """Like ``plan.decode_us``, in chunks."""
        out = np.empty(len(batch_size))
        for start in range(0, len(out), CHUNK):
            part = slice(start, start + CHUNK)
            batch, kv = batch_size[part].astype(np.float64), kv_len[part].astype(np.float64)
            attention = self.layers * self.decode_grid(batch, kv)
            out[part] = self.rows_us("tokens", batch) + self.rows_us("sequences", batch) + attention
        return out

    def prefill_us(self, new_tokens: Array, context_len: Array, batch_size: Array) -> Floats:
        """Like ``plan.prefill_us`` for chunks of more than one token, in chunks of steps."""
        out = np.empty(len(new_tokens))
        pair_us, token_us = self.prefix_us
        for start in range(0, len(out), CHUNK):
            part = slice(start, start + CHUNK)
            new, context, batch = (a[part].astype(np.float64) for a in (new_tokens, context_len, batch_size))
            attention = self.prefill_grid(batch, new)
            attention += pair_us * (batch * new * context) + token_us * (batch * context)
            rows = self.rows_us("tokens", batch * new) + self.rows_us("sequences", batch)
            out[part] = rows + self.layers * attention
        return out

    def step_us(self, batch: StepBatch) -> Floats:
        """Like ``plan.step_us`` for steps that all have requests: sum each step, then one lookup per step."""
        starts = batch.offsets[:-1]
        new, context = batch.new_tokens.astype(np.int64), batch.context_len.astype(np.int64)
        is_decode = (new == 1) & (context > 0)
        chunk = np.where(is_decode, 0, new)
        prefix = np.where(is_decode, 0, context)

        def summed(values: Array) -> Floats:
            return np.add.reduceat(values, starts).astype(np.float64)

        decodes, kv_sum = summed(is_decode), summed(np.where(is_decode, context + 1, 0))
        new_sum, pairs = summed(chunk), summed(chunk * (chunk + 1) // 2)
        tokens, seqs = decodes + new_sum, np.diff(batch.offsets).astype(np.float64)
        out = self.rows_us("tokens", tokens) + self.rows_us("sequences", seqs)
        some = np.flatnonzero(decodes)
        out[some] += self.layers * self.decode_grid(decodes[some], kv_sum[some] / decodes[some])
        some = np.flatnonzero(new_sum)
        q_len = 2.0 * pairs[some] / new_sum[some] - 1.0
        pair_us, token_us = self.prefix_us
        prefix_us = pair_us * summed(chunk * prefix)[some] + token_us * summed(prefix)[some]
        out[some] += self.layers * (self.prefill_grid(new_sum[some] / q_len, q_len) + prefix_us)
        return out

    def grid_us(self, batch_size: Array, kv_len: Array) -> Floats:
        """Evaluate every (batch_size, kv_len): one search per axis, then broadcasting."""
        batch, kv = batch_size.astype(np.float64), kv_len.astype(np.float64)
        grid = self.decode_grid
        i = np.clip(np.searchsorted(grid.batch, batch, side="right") - 1, 0, len(grid.batch) - 2)
        j = np.clip(np.searchsorted(grid.x, kv, side="right") - 1, 0, len(grid.x) - 2)
        along_batch = ((batch - grid.batch[i]) / (grid.batch[i + 1] - grid.batch[i]))[:, None]
        rows = grid.value[i] + along_batch * (grid.value[i + 1] - grid.value[i])
        along_kv = (kv - grid.x[j]) / (grid.x[j + 1] - grid.x[j])
        low = rows[:, j]
        attention = low + along_kv * (rows[:, j + 1] - low)
        per_row = self.rows_us("tokens", batch) + self.rows_us("sequences", batch)
        return np.asarray(per_row[:, None] + self.layers * attention)


def _node_grid(plan: StepPlan, tables: Tables, operator: AttentionOperator) -> NodeGrid:
    """Return the latency at every combination of measured sizes from public lookups, which fill holes."""
    heads = plan.heads
    rows = tables.rows(operator, tuple(heads))
    plain = operator.plain_rows(rows)
    batch, length = (np.unique(rows[name][plain]) for name in ("batch_size", operator.length_axis))
    sizes: dict[str, Any] = {"batch_size": batch[:, None], operator.length_axis: length}
    sizes |= {name: sizes[other] for name, other in operator.equal_axes.items()}
    lookup = tables.lookup(
        operator.name, num_q_heads=heads.num_q_heads, num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim, kv_dtype=heads.kv_dtype, window=heads.window, **sizes,
    )  # fmt: skip
    bound = operator.bound(heads, tables.gpu, 0.0)
    square, slope = (bound.square_us, bound.slope_us) if bound.square_us else (0.0, 1.0)
    return NodeGrid(batch.astype(np.float64), length.astype(np.float64), lookup.latency_us, square, slope)
