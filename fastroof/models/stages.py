"""Pipeline stages: which layers of a model each holds."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fastroof.models.layers import LayerGroup
from fastroof.models.spec import ModelSpec

__all__ = ["Stage", "stages_of"]


class Stage(NamedTuple):
    """One pipeline stage."""

    number: int
    stages: int
    counts: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the LM head, and sends nothing on."""
        return self.number == self.stages - 1

    def model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with this stage's layers alone."""
        groups = zip(model.layers, self.counts, strict=True)
        return replace(model, layers=tuple(LayerGroup(g.kind, count) for g, count in groups if count))


def stages_of(model: ModelSpec, stages: int) -> tuple[Stage, ...]:
    """Cut a model into stages."""
    places = [
        ((layer + 0.5) / group.count, kind)
        for kind, group in enumerate(model.layers)
        for layer in range(group.count)
    ]
    order = [kind for _, kind in sorted(places)]
    least, more = divmod(len(order), stages)
    made, start = [], 0
    for number in range(stages):
        held = order[start : start + least + (number < more)]
        start += len(held)
        made.append(Stage(number, stages, tuple(held.count(kind) for kind in range(len(model.layers)))))
    return tuple(made)
