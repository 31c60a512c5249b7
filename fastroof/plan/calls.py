"""Calls over rows, timed at every number of tokens or sequences of a step.

Also decided here: which of two parallel paths takes longer, how many rows the ranks of attention data
parallelism have together, and which calls decode-only steps run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Longs
from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled.expert_rows import RankRules
from fastroof.compiled.grids import sum_rows
from fastroof.compiled.layout import is_plain
from fastroof.engines.data_parallel import ASSIGNMENTS, PADDINGS
from fastroof.models import Layout
from fastroof.models.execution import Execution
from fastroof.models.layers import LayerKind
from fastroof.operators.attention_work import PrefixUs
from fastroof.operators.calls import (
    AttentionCall,
    Call,
    Collective,
    Elementwise,
    MixerCall,
    Parallel,
    Role,
    RowOperator,
    Rows,
)
from fastroof.pack import SIZE_LIMIT
from fastroof.plan.curves import CurveSource, RowCurve
from fastroof.plan.plan_data import PlanData

ONCE = -1
"""The kind of calls that run once per step."""

Section = Literal["tokens", "decode_tokens", "sequences"]
"""Sections of an arena: all steps or those with prefill, decode-only steps, sequences."""

_OF_ALL_RANKS: Final = ("experts_gather",)
"""Roles of calls over a rank's own tokens whose time depends on the tokens of all ranks."""


class RowCall(NamedTuple):
    """A call with its latency and origin at every number of rows."""

    kind: int
    curve: RowCurve
    latency_us: Floats
    origin: Flags
    is_of_all_ranks: bool = False

    def is_in(self, section: Section) -> bool:
        """Whether a section of the arena includes it."""
        call = self.curve.operator
        if call.rows == "sequences" or section == "sequences":
            return call.rows == section
        return call.steps in ("all", "with_prefill" if section == "tokens" else "decode_only")

    def as_run(self, **changes: Any) -> RowCall:
        """Return the call with other fields of its operator, such as the steps that it runs in."""
        return self._replace(curve=replace(self.curve, operator=replace(self.curve.operator, **changes)))

    def timed(self, latency_us: Floats, origin: Flags, ranks: Ranks) -> RowCall:
        """Return the call with other times at every number of rows, each a node of its curve."""
        rows = ranks.rows(self.curve.operator, len(latency_us) - 1)
        at = np.r_[1, 1 : len(latency_us), len(latency_us) - 1]
        axis = np.r_[0.0, rows[1:], SIZE_LIMIT]
        curve = replace(self.curve, axis=axis, value=latency_us[at], flag=origin[at])
        return self._replace(curve=curve, latency_us=latency_us, origin=origin)


class RowSums(NamedTuple):
    """Summed times of calls over rows, us: one row per plan."""

    tokens_us: Floats
    decode_tokens_us: Floats
    logits_us: Floats
    expert_us: Floats | None = None
    decode_expert_us: Floats | None = None

    def of_plan(self, row: int) -> RowSums:
        """Return one plan's row."""
        tokens_us, decode_us = _rows_of(row, self.tokens_us, self.decode_tokens_us)
        sums = RowSums(tokens_us, decode_us, self.logits_us[row])
        if self.expert_us is None or self.decode_expert_us is None:
            return sums
        expert_us, decode_expert_us = _rows_of(row, self.expert_us, self.decode_expert_us)
        return sums._replace(expert_us=expert_us, decode_expert_us=decode_expert_us)


def _rows_of(row: int, one: Floats, other: Floats) -> tuple[Floats, Floats]:
    """A row of two arrays; one array stays one."""
    value = one[row]
    return value, value if other is one else other[row]


class Ranks(NamedTuple):
    """Ranks of attention data parallelism; ``imbalance`` is the most loaded rank's tokens over the mean."""

    dp: int
    imbalance: float

    @classmethod
    def of(cls, layout: Layout, execution: Execution) -> Ranks:
        """Return the ranks of a plan."""
        return cls(layout.dp, execution.dp_imbalance)

    def expert_tokens(self, tokens: Any) -> Any:
        """Return the tokens of all ranks, given those of the most loaded one."""
        if self.imbalance == 1.0:
            return tokens * self.dp
        return np.ceil(np.asarray(tokens) * (self.dp / self.imbalance)).astype(np.int64)

    def rows(self, call: RowOperator, limit: int) -> Longs:
        """Return a call's rows in steps of 0, 1, ... ``limit`` tokens or sequences."""
        steps = np.arange(limit + 1)
        return np.asarray(self.expert_tokens(steps) if call.rows == "expert_tokens" else steps)

    def of_step(self, tokens: int, sequences: int) -> dict[Rows, int]:
        """Return a call's rows in a step of the most loaded rank, by what it runs over."""
        return {
            "tokens": tokens,
            "sequences": sequences,
            "expert_tokens": int(self.expert_tokens(tokens)),
        }


def row_calls(
    curves: CurveSource, call: Call, kind: int, ranks: Ranks, row_limit: int
) -> tuple[RowCall, ...]:
    """Look up a call at every number of rows: no call for attention, several for parallel paths."""
    if isinstance(call, AttentionCall | MixerCall):
        return ()
    if isinstance(call, Parallel):
        paths = [[_row_call(curves, c, kind, ranks, row_limit) for c in path] for path in call.paths]
        return _longest_path(paths, ranks, call.most_tokens or row_limit)
    return (_row_call(curves, call, kind, ranks, row_limit),)


def _row_call(curves: CurveSource, call: RowOperator, kind: int, ranks: Ranks, row_limit: int) -> RowCall:
    most = ranks.of_step(row_limit, row_limit)[call.rows]
    curve = curves.row_curve(call, most)
    latency_us, origin = curves.row_values(call, most)
    if most > row_limit:
        rows = ranks.rows(call, row_limit)
        latency_us, origin = latency_us[rows], origin[rows]
    is_of_all = ranks.dp > 1 and (call.rows == "expert_tokens" or call.role in _OF_ALL_RANKS)
    row_call = RowCall(kind, curve, latency_us, origin, is_of_all)
    if not call.beyond:
        return row_call
    return row_call.timed(np.where(np.arange(row_limit + 1) > call.beyond, latency_us, 0.0), origin, ranks)


def _longest_path(paths: Sequence[Sequence[RowCall]], ranks: Ranks, most: int) -> tuple[RowCall, ...]:
    """Calls of parallel paths: up to ``most`` tokens, only those of the longest path have a time."""
    path_us = [np.sum([c.curve.operator.times * c.latency_us for c in path], axis=0) for path in paths]
    longest = np.argmax(path_us, axis=0)
    is_beyond = np.arange(len(longest)) > most
    is_of_all = any(part.is_of_all_ranks for path in paths for part in path)
    calls = []
    for number, path in enumerate(paths):
        for part in path:
            latency_us = np.where((longest == number) | is_beyond, part.latency_us, 0.0)
            calls.append(part.timed(latency_us, part.origin, ranks)._replace(is_of_all_ranks=is_of_all))
    return tuple(calls)


def plain_sum_rows(values: Floats, times: Floats, sums: Floats) -> None:
    """Sum operators by NumPy, to the bits of :func:`sum_rows`, which takes long as Python."""
    for row, factors in zip(sums, times, strict=True):
        for value, factor in zip(values, factors, strict=True):
            row += factor * value[: len(row)]


def sums_of(
    calls: Sequence[RowCall],
    counts: Sequence[Sequence[int]],
    max_num_batched_tokens: int,
    max_num_seqs: int,
    are_ranks_alike: bool = False,
) -> RowSums:
    """Sum the calls of plans with these numbers of layers of each kind, in the order of the step."""
    layers = np.c_[np.asarray(counts, np.float64), np.ones(len(counts))]  # ONCE is the last
    times = np.array([call.curve.operator.times for call in calls], np.float64)
    times = times * layers[:, [call.kind for call in calls]]

    def summed(section: Section, limit: int, is_of_all_ranks: bool = False) -> Floats:
        sizes = [
            i
            for i, call in enumerate(calls)
            if call.is_in(section) and (call.is_of_all_ranks or not is_of_all_ranks)
        ]
        sums = np.zeros((len(times), limit + 1))
        if not sizes:
            return sums
        add_up = plain_sum_rows if is_plain() else sum_rows
        add_up(np.stack([calls[i].latency_us for i in sizes]), times[:, sizes].copy(), sums)
        return sums

    tokens_us = summed("tokens", max_num_batched_tokens)
    same = all(call.curve.operator.steps == "all" for call in calls)
    decode_tokens_us = tokens_us if same else summed("decode_tokens", max_num_batched_tokens)
    sums = RowSums(tokens_us, decode_tokens_us, summed("sequences", max_num_seqs))
    of_all = [call for call in calls if call.is_of_all_ranks]
    if not are_ranks_alike or not of_all:
        return sums
    expert_us = summed("tokens", max_num_batched_tokens, is_of_all_ranks=True)
    same = all(call.curve.operator.steps == "all" for call in of_all)
    decode_us = expert_us if same else summed("decode_tokens", max_num_batched_tokens, is_of_all_ranks=True)
    return sums._replace(expert_us=expert_us, decode_expert_us=decode_us)


def origins_of(calls: Sequence[RowCall], section: Section, limit: int) -> Flags:
    """Return the largest origin of a section's calls, at every number of rows up to a limit."""
    flags = np.zeros(limit + 1, np.uint8)
    for call in calls:
        if call.is_in(section):
            np.maximum(flags, call.origin[: limit + 1], out=flags)
    return flags


OTHER_HALF: Final = "attention of the other half"
"""Name of the row in ``explain``: the floor of attention, which the second half pays again."""

_ON_THE_WAY: Final = ("experts_dispatch", "experts_combine")
_SHARED: Final = "shared_"

_Part = Literal["before", "dispatch", "routed", "shared", "combine"]


class Floors(NamedTuple):
    """Minimum time of a layer's attention, us."""

    decode_us: float
    prefill_us: float


def in_two_batches(
    calls: Sequence[RowCall], floors: Floors, starts: tuple[int, ...], ranks: Ranks
) -> list[tuple[RowCall, ...]]:
    """Return calls of one kind of layers as two halves of a batch run them."""
    if not any(_role(call) in _ON_THE_WAY for call in calls):
        return [*((call,) for call in calls), ()]
    sections = [
        _in_section(calls, floor_us, start, ranks, is_decode)
        for floor_us, start, is_decode in zip(floors, starts, (True, False), strict=True)
    ]
    return [tuple(part for section in pair for part in section) for pair in zip(*sections, strict=True)]


def _role(call: RowCall) -> Role:
    return call.curve.operator.role


def _part(call: RowCall) -> _Part:
    role = _role(call)
    if role in _ON_THE_WAY:
        return "dispatch" if role == "experts_dispatch" else "combine"
    if role == "experts":
        return "routed"
    return "shared" if role.startswith(_SHARED) else "before"


def _in_section(
    calls: Sequence[RowCall], floor_us: float, start: int, ranks: Ranks, is_decode: bool
) -> list[tuple[RowCall, ...]]:
    """Calls of decode-only steps or of steps with prefill."""
    steps: Literal["decode_only", "with_prefill"] = "decode_only" if is_decode else "with_prefill"
    tokens = np.arange(len(calls[0].latency_us))
    is_split = tokens >= max(start, 2)
    halves = (tokens + 1) // 2, tokens // 2
    run = [call.curve.operator.steps in ("all", steps) for call in calls]
    us: dict[_Part, list[Floats]] = {
        part: [np.zeros(len(tokens)) for _ in halves]
        for part in ("before", "dispatch", "routed", "shared", "combine")
    }
    for call, runs in zip(calls, run, strict=True):
        if runs:
            for number, half in enumerate(halves):
                us[_part(call)][number] += call.curve.operator.times * call.latency_us[half]
    before = [one + floor_us for one in us["before"]]
    routed, shared = us["routed"], us["shared"]
    in_parallel_us: dict[_Part, tuple[Floats, Floats]] = {
        "dispatch": (routed[1], before[0]),
        "combine": (shared[0] + before[1], shared[1] + routed[0]),
    }
    parts: list[tuple[RowCall, ...]] = []
    for call, runs in zip(calls, run, strict=True):
        if not runs:
            parts.append(())
            continue
        split_us = sum(call.latency_us[half] for half in halves)
        origin = np.maximum(call.origin[halves[0]], call.origin[halves[1]])
        part, name = _part(call), call.curve.operator.name
        if part in in_parallel_us:
            seen = sum(
                np.maximum(total_us - covered, 0.0)
                / np.maximum(total_us, np.finfo(float).tiny)
                * call.latency_us[half]
                for total_us, covered, half in zip(us[part], in_parallel_us[part], halves, strict=True)
            )
            split_us, origin = seen, np.full_like(origin, ORIGIN_MODELLED)
            name = f"{name}, not overlapped"
        latency_us = np.where(is_split, split_us, call.latency_us)
        origin = np.where(is_split, origin, call.origin).astype(np.uint8)
        parts.append((call.as_run(steps=steps, name=name).timed(latency_us, origin, ranks),))
    role: Role = "decode_attention" if is_decode else "prefill_attention"
    again = Elementwise(role, OTHER_HALF, 1, 0.0, steps=steps)
    return [*parts, (_floor_call(calls[0].kind, again, floor_us, floor_us, is_split, ranks),)]


def kv_gather(kind: LayerKind, layout: Layout) -> list[Collective]:
    """Return the all-gather of a prompt's new keys and values, of one layer."""
    row_bytes = kind.attention.kv_bytes_per_token(layout, "bf16")
    if layout.cp == 1 or not row_bytes:
        return []
    gather = Collective(
        "kv_gather", "kv all-gather", 1, "all_gather", layout.cp, float(row_bytes), stride=layout.tp
    )
    return [gather]


def shared_prefix(price: PrefixUs, cp: int) -> PrefixUs:
    """Time of a prefix whose pairs are shared, and whose tokens every GPU reads."""
    return price._replace(pair=price.pair / cp, window_pair=price.window_pair / cp)


def in_decodes(calls: Sequence[RowCall]) -> list[tuple[RowCall, ...]]:
    """Return calls of decode-only steps, and those over sequences of all steps."""
    parts: list[tuple[RowCall, ...]] = []
    for call in calls:
        operator = call.curve.operator
        if operator.rows == "sequences":
            parts.append((call,))
        else:
            parts.append(() if operator.steps == "with_prefill" else (call.as_run(steps="decode_only"),))
    return parts


def in_prompts(
    calls: Sequence[RowCall], layout: Layout, ranks: Ranks, limit: int
) -> list[tuple[RowCall, ...]]:
    """Return calls of steps with prefill, by the tokens of a whole rank."""
    share = -(-np.arange(limit + 1) // layout.cp)
    parts: list[tuple[RowCall, ...]] = []
    for call in calls:
        operator = call.curve.operator
        if operator.rows == "sequences" or operator.steps == "decode_only":
            parts.append(())
            continue
        per_rank = 1.0 if operator.rows == "expert_tokens" else 1.0 / layout.cp
        shared = call.as_run(steps="with_prefill").timed(call.latency_us[share], call.origin[share], ranks)
        parts.append((shared._replace(curve=replace(shared.curve, share=per_rank)),))
    return parts


def launches(kind: int, floor_us: float, layout: Layout, ranks: Ranks, limit: int) -> RowCall:
    """Return the attention launch that sharing divides too: it stays as long as on one GPU."""
    operator = Elementwise("prefill_attention", "attention launch, not shared", 1, 0.0, steps="with_prefill")
    again_us = floor_us * (1.0 - 1.0 / layout.cp)
    return _floor_call(kind, operator, again_us, floor_us, np.full(limit + 1, True), ranks)


def _floor_call(
    kind: int, operator: RowOperator, again_us: float, floor_us: float, runs: Bools, ranks: Ranks
) -> RowCall:
    """A floor of ``floor_us`` that is paid again, at some numbers of rows."""
    latency_us, origin = np.where(runs, again_us, 0.0), np.where(runs, ORIGIN_MODELLED, 0).astype(np.uint8)
    curve = RowCurve(operator, latency_us, latency_us, origin, floor_us)
    return RowCall(kind, curve, latency_us, origin).timed(latency_us, origin, ranks)


def interleaved(
    decodes: Sequence[Sequence[RowCall]],
    prompts: Sequence[Sequence[RowCall]],
    cuts: Sequence[tuple[int, int]],
) -> tuple[list[RowCall], list[int]]:
    """Merge calls of decode-only steps and of steps with prefill into one order; return the cuts' places."""
    calls: list[RowCall] = []
    places: list[int] = []
    first = second = 0
    for one, other in (*cuts, (len(decodes), len(prompts))):
        calls += itertools.chain(*decodes[first:one], *prompts[second:other])
        places.append(len(calls))
        first, second = one, other
    return calls, places[:-1]


def rank_rules(plan: PlanData) -> RankRules:
    """Return how the ranks of a plan step together in its engine, as loops read it."""
    rules, ranks = plan.profile.data_parallel, int(plan.layout.dp)
    return RankRules(
        ranks=ranks,
        in_lockstep=int(ranks > 1 and (rules.lockstep == "all" or plan.model.has_experts)),
        prompt_padding=PADDINGS.index(rules.prompt_tokens),
        decode_padding=PADDINGS.index(rules.decode_tokens),
        graph_tokens=rules.largest_graph(plan.gpu.name),
        idle_tokens=rules.idle_tokens,
        assignment=ASSIGNMENTS.index(rules.assignment),
        balance_steps=rules.balance_steps,
    )
