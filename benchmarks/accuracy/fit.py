"""Fit an engine's costs: few, non-negative, by relative errors, every data set weighted equally.

A row's TPOT is a mix of two steps, decode-only (D) and mixed (M):

    predicted = n_D (D + added_D) + n_M max(M + added_M, floor_M)

D and M are kernel times, n_D and n_M steps per token. Added times and the floor are sums of costs times their
counts (1, sequences, layers, all-reduces), so the model is linear in the costs except at the floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Bools, Floats
from fastroof.evidence.kernel_times import FLOOR, OWN_LAYERS, Columns, KernelTimes, columns_of, mean_us

MOST_ITERATIONS: Final = 60
MOST_HALVINGS: Final = 30
SMALLEST_MOVE_US: Final = 1e-3
SMALLEST_ANGLE: Final = 1e-3
"""Minimum angle between two costs' columns, radians; closer ones are not distinguished."""

SIDES: Final = (0.9, 0.97, 0.99, 1.01, 1.03, 1.1)
"""Distances from the best floor at which other minima are searched."""

CLEARLY: Final = 1e-9
"""Relative difference of losses beyond rounding."""


def equal_weights(datasets: npt.NDArray[Any], fewest: int = 1) -> Floats:
    """Weight rows so that every data set has the same total weight."""
    _, which = np.unique(datasets, return_inverse=True)
    weights: Floats = 1.0 / np.maximum(np.bincount(which), fewest)[which]
    return weights


def fit_costs(times: KernelTimes, weights: Floats, costs: Sequence[str]) -> dict[str, float]:
    """Fit an engine's costs to measured rows."""
    names = _names(times, costs)
    if not names:
        return {}
    columns = columns_of(times, names)

    def descend(start: Floats) -> tuple[Floats, float]:
        return _descend(times, weights, columns, start)

    best, least = descend(np.zeros(len(names)))
    floor = names.index(FLOOR) if FLOOR in names else None
    if floor is not None:
        for floor_us in _floors_us(times):
            found, loss = descend(np.eye(len(names))[floor] * floor_us)
            if loss < least * (1.0 - CLEARLY):
                best, least = found, loss
        left = list(SIDES)
        while left:
            side = np.ones(len(names))
            side[floor] = left.pop()
            found, loss = descend(best * side)
            if loss < least * (1.0 - CLEARLY):
                best, least, left = found, loss, list(SIDES)
    return {name: float(us) for name, us in zip(names, best, strict=True)}


def are_distinguishable(times: KernelTimes, costs: Mapping[str, float]) -> bool:
    """Return whether rows distinguish the costs: none is a linear mix of the others in every row."""
    slopes = _slopes(times, columns_of(times, list(costs)), np.array([*costs.values()], np.float64))
    relative = slopes[:, slopes.any(axis=0)] / times.measured_us[:, None]
    relative /= np.linalg.norm(relative, axis=0)
    return bool(np.linalg.matrix_rank(relative, tol=SMALLEST_ANGLE) == relative.shape[1])


def _names(times: KernelTimes, costs: Sequence[str]) -> list[str]:
    """Return all costs of a fit, architecture-specific ones last."""
    own = 0 if times.own_layers is None else times.own_layers.shape[1]
    return [*costs, *(f"{OWN_LAYERS}.{i}" for i in range(own))]


def _floors_us(times: KernelTimes) -> Floats:
    """Return start values of the floor: kernel time of a mixed step per layer."""
    prefills = times.mixed_steps > 0.0
    if not prefills.any():
        return np.empty(0)
    return np.quantile((times.mixed_us / times.num_layers)[prefills], (0.2, 0.5, 0.8))


def _descend(times: KernelTimes, weights: Floats, columns: Columns, costs: Floats) -> tuple[Floats, float]:
    """Return costs and loss at the nearest local minimum."""

    def loss_at(tried: Floats) -> float:
        return float(weights @ (mean_us(times, columns, tried) / times.measured_us - 1.0) ** 2)

    loss = loss_at(costs)
    for _ in range(MOST_ITERATIONS):
        move = _newton_costs(times, weights, columns, costs) - costs
        for _ in range(MOST_HALVINGS):
            tried = costs + move
            tried_loss = loss_at(tried)
            if tried_loss < loss:
                break
            move = move / 2.0
        else:
            break
        costs, loss = tried, tried_loss
        if np.abs(move).max() < SMALLEST_MOVE_US:
            break
    return costs, loss


def _slopes(times: KernelTimes, columns: Columns, costs: Floats) -> Floats:
    """Return the derivative of each row by each cost, on its side of the floors."""

    unbound: Bools = times.mixed_us + columns.mixed @ costs >= columns.mixed_floor @ costs
    mixed = np.where(unbound[:, None], columns.mixed, columns.mixed_floor)
    slopes: Floats = times.decode_steps[:, None] * columns.decode + times.mixed_steps[:, None] * mixed
    return slopes


def _newton_costs(times: KernelTimes, weights: Floats, columns: Columns, costs: Floats) -> Floats:
    """Return the best costs if every row stays on its side of the floor."""
    slopes = _slopes(times, columns, costs)
    predicted = mean_us(times, columns, costs)
    root = np.sqrt(weights)
    fixed = predicted - slopes @ costs
    matrix = slopes * (root / times.measured_us)[:, None]
    best = non_negative_least_squares(matrix, (1.0 - fixed / times.measured_us) * root)
    # a cost without effect on any row stays unchanged
    return np.where(slopes.any(axis=0), best, costs)


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Solve non-negative least squares by Lawson and Hanson's active sets; 0 for columns of zeros."""
    moving = matrix.any(axis=0)
    found = np.zeros(matrix.shape[1])
    if moving.any():
        found[moving] = _of_unit_columns(matrix[:, moving], target)
    return found


def _of_unit_columns(matrix: Floats, target: Floats) -> Floats:
    length = np.linalg.norm(matrix, axis=0)
    unit = matrix / length
    gram, pull = unit.T @ unit, unit.T @ target
    free = np.zeros(len(length), bool)
    best = np.zeros(len(length))
    for _ in range(3 * len(length)):
        slope = np.where(free, -np.inf, pull - gram @ best)
        if free.all() or slope.max() <= CLEARLY * np.abs(pull).max():
            break
        free[int(slope.argmax())] = True
        while True:
            tried = np.zeros(len(length))
            tried[free] = np.linalg.lstsq(gram[np.ix_(free, free)], pull[free], rcond=1e-12)[0]
            falling = free & (tried <= 0.0)
            if not falling.any():
                break
            # step until a cost reaches 0, where it stays
            way = float(np.min(best[falling] / (best[falling] - tried[falling] + 1e-300)))
            best += way * (tried - best)
            free &= ~(falling & (best <= CLEARLY * np.abs(tried).max()))
            best[~free] = 0.0
            if not free.any():
                break
        if not free.any():
            break
        best = tried
    return np.asarray(best / length)
