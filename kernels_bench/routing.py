"""Which experts the tokens of a step take: drawn from a seed, by the distributions that tables name.

``balanced``
    Experts as equally loaded as whole assignments can be.
``uniform``
    Each token takes ``topk`` of the experts at random.
``power_law_A``
    Loads fall off as a power law: their density goes with ``load ** -A`` between 1 and 0.8 x tokens where
    there are more assignments than experts, else between 0.01 and 2. They are scaled to all assignments
    and rounded. None exceeds the tokens, since a token takes an expert once: what is above goes to the
    least loaded. So do published tables draw them, with A 1.01 and 1.2
    (ai-dynamo/aiconfigurator, collector/helper.py@006afd7, Apache-2.0). They draw each expert by itself,
    here each comes from its own slice of equal probability, so that every size of a table has the
    distribution's shape and not the luck of its draw.

Experts are spread over GPUs in equal runs of their numbers. The GPU that is measured is the most loaded
one, as a step continues when the last has its result: its experts are numbered first.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.errors import MeasureError

DISTRIBUTIONS: Final = ("balanced", "uniform", "power_law_1.01", "power_law_1.2")
LARGEST_SHARE: Final = 0.8
"""Of the tokens, that the densest power law reaches before it is scaled."""
FEW: Final = 0.01, 2.0
"""If there are no more assignments than experts."""


def expert_loads(num_tokens: int, topk: int, num_experts: int, distribution: str, seed: int) -> Longs:
    """Draw how many tokens each expert takes.

    >>> expert_loads(3, 2, 4, "balanced", seed=0).tolist()
    [2, 1, 2, 1]
    """
    if not (0 < topk <= num_experts and num_tokens > 0):
        raise MeasureError(f"{num_tokens} tokens at {topk} of {num_experts} experts: nothing can be routed")
    assignments = num_tokens * topk
    if distribution == "balanced":
        chosen = np.arange(assignments) * num_experts // assignments
        return np.bincount(chosen, minlength=num_experts).astype(np.int64)
    random = np.random.default_rng(seed)
    if distribution == "uniform":
        drawn = np.argsort(random.random((num_tokens, num_experts)), axis=1)[:, :topk]
        return np.bincount(drawn.ravel(), minlength=num_experts).astype(np.int64)
    exponent = _exponent(distribution)
    low, high = (1.0, LARGEST_SHARE * num_tokens) if assignments > num_experts else FEW
    slices = (random.permutation(num_experts) + random.random(num_experts)) / num_experts
    shares = _power_law(slices, exponent, low, high)
    return _whole(shares * (assignments / shares.sum()), assignments, num_tokens)


def route(num_tokens: int, topk: int, num_experts: int, moe_ep: int, distribution: str, seed: int) -> Longs:
    """Draw which experts each token takes."""
    if moe_ep < 1 or num_experts % moe_ep:
        raise MeasureError(f"{num_experts} experts do not divide by {moe_ep} GPUs")
    by_gpu = expert_loads(num_tokens, topk, num_experts, distribution, seed).reshape(moe_ep, -1)
    most = int(by_gpu.sum(axis=1).argmax())
    by_gpu[[0, most]] = by_gpu[[most, 0]]
    loads = by_gpu.ravel()
    # Assignment j is of token j mod tokens: an expert's lie in a row, no more than there are tokens, and so
    # never twice at one token.
    order = np.argsort(-loads, kind="stable")
    taken = np.repeat(order, loads[order]).reshape(topk, num_tokens).T
    return np.random.default_rng([seed, 1]).permutation(taken).astype(np.int64)


def _exponent(distribution: str) -> float:
    found = re.fullmatch(r"power_law_(\d+(?:\.\d+)?)", distribution)
    if found is None or float(found[1]) == 1.0:
        raise MeasureError(f"unknown distribution {distribution!r}; valid are {', '.join(DISTRIBUTIONS)}")
    return float(found[1])


def _power_law(quantiles: Floats, exponent: float, low: float, high: float) -> Floats:
    """Invert the share of a power law's probability that lies below a load."""
    power = 1.0 - exponent
    loads: Floats = (low**power + quantiles * (high**power - low**power)) ** (1.0 / power)
    return loads


def _whole(loads: Floats, total: int, most: int) -> Longs:
    """Round to whole loads of a given sum: the least get what is missing, the largest give what is over."""
    whole = np.minimum(np.rint(loads).astype(np.int64), most)
    missing = total - int(whole.sum())
    sign = 1 if missing > 0 else -1
    # Raising the least to a common level is lowering the largest of the negatives.
    heights = whole * sign
    ceiling = most if missing > 0 else 0
    level = _level(heights, abs(missing), ceiling)
    raised = np.maximum(heights, level)
    at_level = np.flatnonzero(raised == level)
    raised[at_level[: abs(missing) - int((raised - heights).sum())]] += 1
    signed: Longs = raised * sign
    return signed


def _level(heights: Longs, room: int, ceiling: int) -> int:
    """Highest level that the lower heights can be raised to with so much in all."""
    low, high = int(heights.min()), ceiling
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.maximum(middle - heights, 0).sum()) <= room:
            low = middle
        else:
            high = middle - 1
    return low
