"""Context parallelism of prefill: GPUs that share a prompt's new tokens, each with all keys and values.

SGLang's prefill context parallelism and vLLM's split what is new of a prompt over ``cp`` GPUs, gather keys
and values of each layer over them, and leave decodes as they are: every one of these GPUs has the whole cache
and runs the whole batch. Here, in steps with prefill:

* what depends on rows alone runs on a GPU's share of the tokens, rounded up; for the experts its tokens are
  those of a rank of its own, as if attention were data parallel;
* attention has its share of the pairs: prompts are cut so that early and late queries go together (zigzag),
  shares are equal, ``launch + (T - launch) / cp``; a prefix's pairs are shared, every GPU reads its tokens;
* keys and values are gathered once a layer, in bf16, as they are before they are cached.

Of decodes in a step with prefill, per-token work counts as shared too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastroof.columns import ORIGIN_MODELLED
from fastroof.errors import PlanError
from fastroof.models import Layout, ModelSpec
from fastroof.models.layers import LayerKind
from fastroof.operators.calls import Collective, Elementwise
from fastroof.operators.prefix_price import PrefixUs
from fastroof.plan.curves import RowCurve
from fastroof.plan.rows import Ranks, RowCall, every_row

__all__ = [
    "check_context_parallel",
    "in_decodes",
    "in_prompts",
    "interleaved",
    "kv_gather",
    "launches",
    "shared_prefix",
]


def check_context_parallel(
    model: ModelSpec, layout: Layout, engine: str, is_known: bool, overlaps: bool
) -> None:
    """Refuse what no engine shares so, or no plan times."""
    if layout.cp == 1:
        return
    reasons = []
    if not is_known:
        reasons.append(f"{engine} has no context parallelism of prefill: runtime 'sglang' or 'vllm'")
    if any(_passes_state(kind) for kind in model.kinds):
        reasons.append("a state passes from one part of a prompt to the next, so parts cannot run at once")
    if overlaps:
        reasons.append("no plan times it together with two batches: two_batch_overlap=False")
    if reasons:
        raise PlanError(f"{model.name} does not run with cp {layout.cp}: {'; '.join(reasons)}")


def _passes_state(kind: LayerKind) -> bool:
    """Whether what a sequence keeps in a layer goes from token to token, not only of its last ones."""
    return bool(kind.attention.state_bytes(Layout())) and getattr(kind.attention, "is_recurrent", True)


def kv_gather(kind: LayerKind, layout: Layout) -> list[Collective]:
    """What brings every GPU the keys and values of a prompt's new tokens, of one layer."""
    row_bytes = kind.attention.kv_bytes_per_token(layout, "bf16")
    if layout.cp == 1 or not row_bytes:
        return []
    gather = Collective(
        "kv_gather", "kv all-gather", 1, "all_gather", layout.cp, float(row_bytes), stride=layout.tp
    )
    return [gather]


def shared_prefix(price: PrefixUs, cp: int) -> PrefixUs:
    """Price of a prefix whose pairs are shared, and whose tokens every GPU reads."""
    return price._replace(pair=price.pair / cp, window_pair=price.window_pair / cp)


def in_decodes(calls: Sequence[RowCall]) -> list[tuple[RowCall, ...]]:
    """Calls in steps of decodes alone, and those over sequences in all."""
    made: list[tuple[RowCall, ...]] = []
    for call in calls:
        operator = call.curve.operator
        if operator.rows == "sequences":
            made.append((call,))
        elif operator.steps == "with_prefill":
            made.append(())
        else:
            curve = replace(call.curve, operator=replace(operator, steps="decode_only"))
            made.append((call._replace(curve=curve),))
    return made


def in_prompts(
    calls: Sequence[RowCall], layout: Layout, ranks: Ranks, limit: int
) -> list[tuple[RowCall, ...]]:
    """Calls in steps with prefill, by the tokens of a whole rank."""
    share = -(-np.arange(limit + 1) // layout.cp)
    made: list[tuple[RowCall, ...]] = []
    for call in calls:
        operator = call.curve.operator
        if operator.rows == "sequences" or operator.steps == "decode_only":
            made.append(())
            continue
        own = 1.0 if operator.rows == "expert_tokens" else 1.0 / layout.cp
        curve = replace(call.curve, operator=replace(operator, steps="with_prefill"), share=own)
        latency_us, origin = call.latency_us[share], call.origin[share]
        curve = every_row(curve, latency_us, origin, ranks)
        made.append((call._replace(curve=curve, latency_us=latency_us, origin=origin),))
    return made


def launches(kind: int, floor_us: float, layout: Layout, ranks: Ranks, limit: int) -> RowCall:
    """What sharing attention's time takes too much off: its launch is no smaller than one GPU's."""
    operator = Elementwise("prefill_attention", "attention launch, not shared", 1, 0.0, steps="with_prefill")
    latency_us = np.full(limit + 1, floor_us * (1.0 - 1.0 / layout.cp))
    origin = np.full(limit + 1, ORIGIN_MODELLED, np.uint8)
    curve = RowCurve(operator, latency_us, latency_us, origin, floor_us)
    return RowCall(kind, every_row(curve, latency_us, origin, ranks), latency_us, origin)


def interleaved(
    decodes: Sequence[Sequence[RowCall]],
    prompts: Sequence[Sequence[RowCall]],
    cuts: Sequence[tuple[int, int]],
) -> tuple[list[RowCall], list[int]]:
    """Put calls of both kinds of steps in one order."""
    made: list[RowCall] = []
    places: list[int] = []
    first = second = 0
    for one, other in (*cuts, (len(decodes), len(prompts))):
        made += itertools.chain(*decodes[first:one], *prompts[second:other])
        places.append(len(made))
        first, second = one, other
    return made, places[:-1]
