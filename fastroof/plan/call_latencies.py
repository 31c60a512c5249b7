"""Look up every call of a step: curves of calls over rows, and blocks of attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.compiled.grids import grid_latency_us
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile, PrefillGraphs
from fastroof.engines.values import includes_newest
from fastroof.models import Layout, ModelSpec
from fastroof.models.execution import Execution
from fastroof.models.latent import LatentAttention
from fastroof.models.sparse import SparseLatentAttention
from fastroof.models.spec import StepCalls, step_calls
from fastroof.operators.calls import AttentionCall, Call, MixerCall, Parallel
from fastroof.plan.attention import modelled_block, scaled_block, step_attention
from fastroof.plan.calls import (
    ONCE,
    Floors,
    Ranks,
    RowCall,
    in_decodes,
    in_prompts,
    in_two_batches,
    interleaved,
    kv_gather,
    launches,
    row_calls,
    shared_prefix,
)
from fastroof.plan.curves import CurveSource
from fastroof.plan.plan_data import PlanAttention


def call_latencies(
    model: ModelSpec, layout: Layout, execution: Execution, curves: CurveSource, row_limit: int
) -> tuple[list[RowCall], list[PlanAttention]]:
    """Look up a step's calls over rows, and its attention."""
    if layout.cp > 1:
        return _in_shared_prompts(model, layout, execution, curves, row_limit)
    return _every_call(model, layout, execution, curves, row_limit)


def _every_call(
    model: ModelSpec,
    layout: Layout,
    execution: Execution,
    curves: CurveSource,
    row_limit: int,
    whole: Layout | None = None,
) -> tuple[list[RowCall], list[PlanAttention]]:
    """The same without context parallelism; ``whole`` is the layout whose GPUs share prompts, if any."""
    ranks = Ranks.of(layout, execution)
    rows: list[RowCall] = []
    attention: list[PlanAttention] = []
    for kind, call in _in_order(model, step_calls(model, layout, execution)):
        if isinstance(call, AttentionCall | MixerCall):
            for gather in kv_gather(model.kinds[kind], whole) if whole else ():
                rows += row_calls(curves, gather, kind, ranks, row_limit)
            decodes, prompts = (step_attention(call, is_decode) for is_decode in (True, False))
            prompt_block, prefix_us = curves.attention_block(prompts), curves.prefix_us(prompts)
            if isinstance(call, AttentionCall) and call.prompts is not None:
                prompt_block = modelled_block(prompt_block, 1.0 / call.prompts.share)
                prefix_us = prefix_us.times(1.0 / call.prompts.share)
            attention.append(
                PlanAttention(
                    kind,
                    call,
                    len(rows),
                    curves.attention_block(decodes),
                    prompt_block,
                    prefix_us,
                    (curves.attention_source(decodes), curves.attention_source(prompts)),
                )
            )
        else:
            rows += row_calls(curves, call, kind, ranks, row_limit)
    if execution.two_batches_from:
        return _in_two_batches(rows, attention, execution.two_batches_from, ranks)
    return rows, attention


def _in_shared_prompts(
    model: ModelSpec, layout: Layout, execution: Execution, curves: CurveSource, row_limit: int
) -> tuple[list[RowCall], list[PlanAttention]]:
    """The same with context parallelism."""
    ranks, cp = Ranks.of(layout, execution), layout.cp
    calls, attention = _every_call(model, layout, execution, curves, row_limit)
    shares, theirs = _every_call(
        model, layout.of_prompts, execution, curves, -(-row_limit // cp), whole=layout
    )
    prompts = in_prompts(shares, layout, ranks, row_limit)
    for part in theirs:
        # after all that runs before it
        floor = launches(part.kind, _least_us(part.prefill_block), layout, ranks, row_limit)
        prompts[part.before - 1] = (*prompts[part.before - 1], floor)
    cuts = list(zip(_cuts(calls, attention), _cuts(shares, theirs), strict=True))
    rows, places = interleaved(in_decodes(calls), prompts, [(one[0], other[0]) for one, other in cuts])
    before = [place for place, (one, _) in zip(places, cuts, strict=True) if one[1]]
    return rows, [
        part._replace(
            before=place,
            prefill_block=scaled_block(part.prefill_block, 1.0 / cp),
            prefix_us=shared_prefix(part.prefix_us, cp),
        )
        for part, place in zip(attention, before, strict=True)
    ]


def _cuts(rows: Sequence[RowCall], attention: Sequence[PlanAttention]) -> list[tuple[int, bool]]:
    """Places of attention, and of the first calls of each kind of layers."""
    starts = [place for place in range(1, len(rows)) if rows[place].kind != rows[place - 1].kind]
    return sorted([*((place, False) for place in starts), *((part.before, True) for part in attention)])


def _in_two_batches(
    rows: Sequence[RowCall], attention: Sequence[PlanAttention], starts: tuple[int, ...], ranks: Ranks
) -> tuple[list[RowCall], list[PlanAttention]]:
    """Calls of every kind as two halves of a batch run them."""
    result: list[RowCall] = []
    places = [0]
    for kind, group in itertools.groupby(rows, lambda call: call.kind):
        calls = list(group)
        if kind == ONCE:
            parts = [*((call,) for call in calls), ()]
        else:
            least_us = [
                (_least_us(part.decode_block), _least_us(part.prefill_block))
                for part in attention
                if part.kind == kind
            ]
            floors = (
                Floors(*(sum(us) * 1.0 for us in zip(*least_us, strict=True)))
                if least_us
                else Floors(0.0, 0.0)
            )
            parts = in_two_batches(calls, floors, starts, ranks)
        for part in parts[:-1]:
            result += part
            places.append(len(result))
        result += parts[-1]
        places[-1] = len(result)
    return result, [part._replace(before=places[part.before]) for part in attention]


def _least_us(block: Floats) -> float:
    """Latency of a block's smallest attention, us."""
    value, flag = np.empty(1), np.empty(1, np.uint8)
    grid_latency_us(block, np.ones(1), np.ones(1), value, flag)
    return float(value[0])


def _in_order(model: ModelSpec, step: StepCalls) -> Iterator[tuple[int, Call]]:
    """Calls in the order of the step, with the number of their kind; several kinds are part of the name."""
    yield from ((ONCE, call) for call in step.before)
    for number, (kind, calls) in enumerate(zip(model.kinds, step.layers, strict=True)):
        yield from ((number, _named(call, kind.name) if len(model.layers) > 1 else call) for call in calls)
    yield from ((ONCE, call) for call in step.after)


def _named(call: Call, kind: str) -> Call:
    if isinstance(call, Parallel):
        return replace(call, paths=tuple(tuple(_named(c, kind) for c in path) for path in call.paths))  # type: ignore[misc]
    return replace(call, name=f"{call.name} ({kind})")


class PaddedSteps(NamedTuple):
    """Number of tokens to which steps with prefill are padded, because the engine replays captured graphs.

    ``most`` are the tokens of prompts that the layers of each group run on at most; 0 for all.
    """

    tokens: Longs
    most: tuple[int, ...]

    @property
    def limit(self) -> int:
        """Maximum number of tokens that a step runs."""
        return int(self.tokens[-1])

    def calls(
        self, rows: Sequence[RowCall], attention: Sequence[PlanAttention], ranks: Ranks
    ) -> tuple[list[RowCall], list[PlanAttention]]:
        """Return a step's calls, split into decode-only and padded prefill ones; attention is not padded."""
        calls: list[RowCall] = []
        places = [0]
        is_padded = not np.array_equal(self.tokens, np.arange(len(self.tokens)))
        for call in rows:
            operator = call.curve.operator
            most = 0 if call.kind == ONCE else self.most[call.kind]
            if operator.rows == "sequences" or operator.steps == "decode_only" or not (is_padded or most):
                calls.append(call)
            else:
                if operator.steps == "all":
                    calls.append(call.as_run(steps="decode_only"))
                at = np.minimum(self.tokens, most) if most else self.tokens
                padded = call.as_run(steps="with_prefill").timed(call.latency_us[at], call.origin[at], ranks)
                calls.append(padded)
            places.append(len(calls))
        return calls, [part._replace(before=places[part.before]) for part in attention]


def captured_prompts(
    model: ModelSpec, layout: Layout, execution: Execution, engine: EngineProfile, gpu: GpuSpec
) -> PrefillGraphs | None:
    """Return the graphs in which an engine runs a plan's steps with prefill; None if it launches kernels."""
    graphs = next((one for one in engine.kernels.prefill_graphs if includes_newest(one.versions)), None)
    if graphs is None or layout.pp > 1 or layout.cp > 1 or execution.two_batches_from:
        return None
    has = {"dp": layout.dp > 1 and model.has_experts, "alltoall": execution.exchange.alltoall == "always"}
    if any(has[name] for name in has if name in graphs.not_with):
        return None
    if graphs.is_eager(model.architecture, gpu.name, model.vision is not None):
        return None
    kinds = [kind.attention for kind in model.kinds]
    limits = ((graphs.latent_tokens, LatentAttention), (graphs.sparse_tokens, SparseLatentAttention))
    most = min(
        (tokens for tokens, made in limits if any(isinstance(one, made) for one in kinds)), default=None
    )
    return graphs if most is None else graphs.up_to(most)


def padded_steps(
    model: ModelSpec, layout: Layout, graphs: PrefillGraphs | None, row_limit: int
) -> PaddedSteps | None:
    """Return how steps with prefill differ in tokens; None if not, and for ranks, which are not padded."""
    most = tuple(getattr(kind.attention, "most_new", 0) for kind in model.kinds)
    if layout.world_size != layout.tp or (graphs is None and not any(most)):
        return None
    tokens = range(row_limit + 1)
    return PaddedSteps(np.array(tokens if graphs is None else [graphs.padded(one) for one in tokens]), most)
