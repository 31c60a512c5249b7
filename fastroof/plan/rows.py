"""Calls that depend on a number of rows alone, at every number of the step's tokens or sequences.

What a step is made of is settled here: which path of two parallel ones takes longer, how many rows the
ranks of attention data parallelism have together, and which calls steps of decodes alone run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats, Longs
from fastroof.compiled.rows import sum_rows
from fastroof.models import Layout
from fastroof.models.execution import Execution
from fastroof.operators.calls import AttentionCall, Call, MixerCall, Parallel, RowOperator, Rows
from fastroof.pack import SIZE_LIMIT
from fastroof.plan.curves import CurveSource, RowCurve

__all__ = ["ONCE", "Ranks", "RowCall", "RowSums", "every_row", "origins_of", "row_calls", "sums_of"]


ONCE = -1
"""The kind of calls that run once a step."""

Section = Literal["tokens", "decode_tokens", "sequences"]
"""Arrays of an arena: steps with prefill or of both, steps of decodes alone, sequences."""

_OF_ALL_RANKS: Final = ("experts_gather",)
"""Roles of calls over a rank's own tokens whose time follows those of all ranks."""


class RowCall(NamedTuple):
    """One call, looked up."""

    kind: int
    curve: RowCurve
    latency_us: Floats
    origin: Flags
    is_of_all_ranks: bool = False

    def is_in(self, section: Section) -> bool:
        """Whether an array of the arena holds it."""
        call = self.curve.operator
        if call.rows == "sequences" or section == "sequences":
            return call.rows == section
        return call.steps in ("all", "with_prefill" if section == "tokens" else "decode_only")


class RowSums(NamedTuple):
    """Times of the calls that depend on a number of rows alone, us: a row a plan."""

    tokens_us: Floats
    decode_tokens_us: Floats
    logits_us: Floats
    expert_us: Floats | None = None
    decode_expert_us: Floats | None = None

    def of_plan(self, row: int) -> RowSums:
        """Times of one plan: its row."""
        tokens_us, decode_us = _rows_of(row, self.tokens_us, self.decode_tokens_us)
        sums = RowSums(tokens_us, decode_us, self.logits_us[row])
        if self.expert_us is None or self.decode_expert_us is None:
            return sums
        expert_us, decode_expert_us = _rows_of(row, self.expert_us, self.decode_expert_us)
        return sums._replace(expert_us=expert_us, decode_expert_us=decode_expert_us)


def _rows_of(row: int, one: Floats, other: Floats) -> tuple[Floats, Floats]:
    """A row of two arrays, which stay one where they are."""
    own = one[row]
    return own, own if other is one else other[row]


class Ranks(NamedTuple):
    """Ranks of attention data parallelism, and how much more tokens the most loaded one has than the mean."""

    dp: int
    imbalance: float

    @classmethod
    def of(cls, layout: Layout, execution: Execution) -> Ranks:
        """Those of a plan."""
        return cls(layout.dp, execution.dp_imbalance)

    def expert_tokens(self, tokens: Any) -> Any:
        """Tokens of all ranks, where the most loaded one has so many."""
        if self.imbalance == 1.0:
            return tokens * self.dp
        return np.ceil(np.asarray(tokens) * (self.dp / self.imbalance)).astype(np.int64)

    def rows(self, call: RowOperator, limit: int) -> Longs:
        """Rows of a call in steps of 0, 1, ... ``limit`` tokens or sequences."""
        steps = np.arange(limit + 1)
        return np.asarray(self.expert_tokens(steps) if call.rows == "expert_tokens" else steps)

    def of_step(self, tokens: int, sequences: int) -> dict[Rows, int]:
        """How many rows a call has in a step of so many tokens and sequences on the most loaded rank."""
        return {
            "tokens": tokens,
            "sequences": sequences,
            "expert_tokens": int(self.expert_tokens(tokens)),
        }


def row_calls(
    curves: CurveSource, call: Call, kind: int, ranks: Ranks, row_limit: int
) -> tuple[RowCall, ...]:
    """Look a call up at every number of rows; none for attention, several for parallel paths."""
    if isinstance(call, AttentionCall | MixerCall):
        return ()
    if isinstance(call, Parallel):
        return _longest_path(
            [[_looked_up(curves, c, kind, ranks, row_limit) for c in path] for path in call.paths], ranks
        )
    return (_looked_up(curves, call, kind, ranks, row_limit),)


def _looked_up(curves: CurveSource, call: RowOperator, kind: int, ranks: Ranks, row_limit: int) -> RowCall:
    most = ranks.of_step(row_limit, row_limit)[call.rows]
    curve = curves.row_curve(call, most)
    latency_us, origin = curves.row_values(call, most)
    if most > row_limit:
        rows = ranks.rows(call, row_limit)
        latency_us, origin = latency_us[rows], origin[rows]
    is_of_all = ranks.dp > 1 and (call.rows == "expert_tokens" or call.role in _OF_ALL_RANKS)
    return RowCall(kind, curve, latency_us, origin, is_of_all)


def _longest_path(paths: Sequence[Sequence[RowCall]], ranks: Ranks) -> tuple[RowCall, ...]:
    """Calls of parallel paths: at each number of rows those of the longest path keep their time."""
    path_us = [np.sum([c.curve.operator.times * c.latency_us for c in path], axis=0) for path in paths]
    longest = np.argmax(path_us, axis=0)
    is_of_all = any(part.is_of_all_ranks for path in paths for part in path)
    calls = []
    for number, path in enumerate(paths):
        for part in path:
            latency_us = np.where(longest == number, part.latency_us, 0.0)
            curve = every_row(part.curve, latency_us, part.origin, ranks)
            calls.append(part._replace(curve=curve, latency_us=latency_us, is_of_all_ranks=is_of_all))
    return tuple(calls)


def every_row(curve: RowCurve, latency_us: Floats, origin: Flags, ranks: Ranks) -> RowCurve:
    """A curve with a node at every number of rows that a step can have."""
    axis = np.r_[0.0, ranks.rows(curve.operator, len(latency_us) - 1)[1:], SIZE_LIMIT]
    nodes = np.r_[1, 1 : len(latency_us), len(latency_us) - 1]
    return RowCurve(
        curve.operator, axis, latency_us[nodes], origin[nodes], curve.launch_us, curve.source, curve.share
    )


def sums_of(
    calls: Sequence[RowCall],
    counts: Sequence[Sequence[int]],
    max_tokens: int,
    max_seqs: int,
    are_ranks_alike: bool = False,
) -> RowSums:
    """Sum the calls of plans with these numbers of layers of each kind, in the order of the step."""
    layers = np.c_[np.asarray(counts, np.float64), np.ones(len(counts))]  # ONCE is the last
    times = np.array([call.curve.operator.times for call in calls], np.float64)
    times = times * layers[:, [call.kind for call in calls]]

    def summed(section: Section, limit: int, is_of_all_ranks: bool = False) -> Floats:
        of = [
            i
            for i, call in enumerate(calls)
            if call.is_in(section) and (call.is_of_all_ranks or not is_of_all_ranks)
        ]
        sums = np.zeros((len(times), limit + 1))
        if not of:
            return sums
        sum_rows(np.stack([calls[i].latency_us for i in of]), times[:, of].copy(), sums)
        return sums

    tokens_us = summed("tokens", max_tokens)
    same = all(call.curve.operator.steps == "all" for call in calls)
    decode_tokens_us = tokens_us if same else summed("decode_tokens", max_tokens)
    sums = RowSums(tokens_us, decode_tokens_us, summed("sequences", max_seqs))
    of_all = [call for call in calls if call.is_of_all_ranks]
    if not are_ranks_alike or not of_all:
        return sums
    expert_us = summed("tokens", max_tokens, is_of_all_ranks=True)
    same = all(call.curve.operator.steps == "all" for call in of_all)
    decode_us = expert_us if same else summed("decode_tokens", max_tokens, is_of_all_ranks=True)
    return sums._replace(expert_us=expert_us, decode_expert_us=decode_us)


def origins_of(calls: Sequence[RowCall], section: Section, limit: int) -> Flags:
    """Largest origin of the calls of a section, at every number of rows up to a limit."""
    made = np.zeros(limit + 1, np.uint8)
    for call in calls:
        if call.is_in(section):
            np.maximum(made, call.origin[: limit + 1], out=made)
    return made
