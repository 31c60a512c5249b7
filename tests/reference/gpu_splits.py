"""Every way to share GPUs among models, written for reading."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def all_splits(models: int, total_gpus: int) -> list[tuple[int, ...]]:
    """All splits that give each model none, some or all of the GPUs."""
    every = itertools.product(range(total_gpus + 1), repeat=models)
    return [split for split in every if sum(split) <= total_gpus]


def best_split(ratios: Sequence[Sequence[float]], total_gpus: int) -> tuple[float, tuple[int, ...]]:
    """The largest smallest ratio of all splits, and among the splits that reach it the one of fewest GPUs."""

    def smallest(split: tuple[int, ...]) -> float:
        return min(each[gpus] for each, gpus in zip(ratios, split, strict=True))

    splits = all_splits(len(ratios), total_gpus)
    scale = max(map(smallest, splits))
    if scale <= 0.0:
        return 0.0, (0,) * len(ratios)
    return scale, min((split for split in splits if smallest(split) >= scale), key=sum)
