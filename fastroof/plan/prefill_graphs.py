"""Steps with prompts whose tokens an engine pads to those of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fastroof.arrays import Longs
from fastroof.engines import EngineProfile
from fastroof.models import Layout, ModelSpec
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.execution import Execution
from fastroof.plan.call_latencies import LayerAttention
from fastroof.plan.calls import Ranks, RowCall, every_row


class PaddedSteps(NamedTuple):
    """To how many tokens steps with prompts are padded."""

    tokens: Longs

    @property
    def limit(self) -> int:
        """Most tokens that a step runs."""
        return int(self.tokens[-1])

    def calls(
        self, rows: Sequence[RowCall], attention: Sequence[LayerAttention], ranks: Ranks
    ) -> tuple[list[RowCall], list[LayerAttention]]:
        """Calls of a step, those over tokens apart by whether it holds prompts; attention is not padded."""
        made: list[RowCall] = []
        places = [0]
        for call in rows:
            operator = call.curve.operator
            if operator.rows == "sequences" or operator.steps == "decode_only":
                made.append(call)
            else:
                if operator.steps == "all":
                    curve = replace(call.curve, operator=replace(operator, steps="decode_only"))
                    made.append(call._replace(curve=curve))
                latency_us, origin = call.latency_us[self.tokens], call.origin[self.tokens]
                curve = replace(call.curve, operator=replace(operator, steps="with_prefill"))
                curve = every_row(curve, latency_us, origin, ranks)
                made.append(RowCall(call.kind, curve, latency_us, origin))
            places.append(len(made))
        return made, [part._replace(before=places[part.before]) for part in attention]


def padded_steps(
    model: ModelSpec, layout: Layout, execution: Execution, engine: EngineProfile, row_limit: int
) -> PaddedSteps | None:
    """Find how an engine pads a plan's steps with prompts; None where it replays none of them."""
    graphs = next((one for one in engine.kernels.prefill_graphs if not one.versions), None)
    is_grouped = all(isinstance(kind.attention, GroupedQueryAttention) for kind in model.kinds)
    is_alone = layout.world_size == layout.tp and execution.exchange.alltoall != "always"
    if graphs is None or model.vision is not None or not is_grouped or not is_alone:
        return None
    return PaddedSteps(np.array([graphs.padded(tokens) for tokens in range(row_limit + 1)]))
