"""Fitting what an engine adds to its kernels: few non-negative costs, relative errors, every data set equal.

A row's time per token is a mean over two steps, one of decodes alone and one that prefills too, so

    predicted = (1 - p) (D + step + sequence s_D) + p max(M + step + sequence s_M, floor L)

with the kernels D and M, the sequences s_D and s_M, the share p of steps that prefill and L layers. It is
linear in the costs but for the floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Bools, Floats
from fastroof.engines import CostForm

__all__ = [
    "COSTS",
    "KernelTimes",
    "are_told_apart",
    "equal_weights",
    "fit_costs",
    "predicted_us",
]


COSTS: Final = ("step_us", "sequence_us", "prefill_floor_layer_us")
"""The costs of an engine that can be fitted; a cost of prefilling steps did not carry over."""

_STEP, _SEQUENCE, _FLOOR = range(3)
MOST_ITERATIONS: Final = 60
MOST_HALVINGS: Final = 30
SMALLEST_MOVE_US: Final = 1e-3
SMALLEST_ANGLE: Final = 1e-3
"""Between two costs' shares of the rows, radians: closer ones are told apart by noise alone."""

SIDES: Final = (0.9, 0.97, 0.99, 1.01, 1.03, 1.1)
"""How far beside the best floor another valley is looked for."""

CLEARLY: Final = 1e-9
"""Relative difference of two losses that is more than rounding."""


class KernelTimes(NamedTuple):
    """Measured rows beside the kernels of the steps that they are a mean of, one entry a row.

    Attributes
    ----------
    measured_us : ndarray of float64
        Time per output token, as measured.
    decode_us, mixed_us : ndarray of float64
        Kernels of a step of decodes alone, and of one that prefills too.
    decode_sequences, mixed_sequences : ndarray of float64
        Requests of such a step whose logits it needs.
    mixed_share : ndarray of float64
        Share of the steps that prefill; 0 where the row has decodes alone.
    num_layers : ndarray of float64
        Layers of the row's model.
    """

    measured_us: Floats
    decode_us: Floats
    mixed_us: Floats
    decode_sequences: Floats
    mixed_sequences: Floats
    mixed_share: Floats
    num_layers: Floats

    def pick(self, rows: Bools) -> KernelTimes:
        """Return the chosen rows."""
        return KernelTimes(*(column[rows] for column in self))


def predicted_us(times: KernelTimes, costs: Mapping[str, float]) -> Floats:
    """Predict time per output token from kernels and costs, us.

    Examples
    --------
    >>> one = KernelTimes(*(np.array([us]) for us in (0.0, 100.0, 300.0, 2.0, 3.0, 0.25, 4.0)))
    >>> float(predicted_us(one, {"step_us": 10.0, "sequence_us": 1.0})[0])
    162.25
    >>> float(predicted_us(one, {"step_us": 10.0, "prefill_floor_layer_us": 100.0})[0])
    182.5
    """
    return _predicted(times, np.array([float(costs.get(name, 0.0)) for name in COSTS]))


def equal_weights(datasets: npt.NDArray[np.str_]) -> Floats:
    """Weight rows so that every data set has the same total.

    Examples
    --------
    >>> equal_weights(np.array(["a", "a", "b"])).tolist()
    [0.5, 0.5, 1.0]
    """
    _, which = np.unique(datasets, return_inverse=True)
    weights: Floats = 1.0 / np.bincount(which)[which]
    return weights


def fit_costs(times: KernelTimes, weights: Floats, form: CostForm) -> dict[str, float]:
    """Fit an engine's costs to measured rows.

    Parameters
    ----------
    times : KernelTimes
        The rows.
    weights : ndarray of float64
        Of each row's squared relative error.
    form : CostForm
        Which costs there are.

    Returns
    -------
    dict of str to float
        Each cost of the form, us, at least 0.

    Notes
    -----
    Gauss-Newton: each iteration solves the weighted non-negative least squares of the costs with the
    rows kept on their side of the floor. The floor makes many valleys, with kinks between them: it starts
    from several floors, and steps out of the best valley to both sides for as long as that helps.
    """
    free = [COSTS.index(name) for name in form.costs]

    def descend(start: Floats) -> tuple[Floats, float]:
        return _descend(times, weights, form.outlier, free, start)

    best, least = descend(np.zeros(len(COSTS)))
    if _FLOOR in free:
        for floor_us in _floors_us(times):
            costs, loss = descend(np.eye(len(COSTS))[_FLOOR] * floor_us)
            if loss < least * (1.0 - CLEARLY):
                best, least = costs, loss
        left = list(SIDES)
        while left:
            side = np.ones(len(COSTS))
            side[_FLOOR] = left.pop()
            costs, loss = descend(best * side)
            if loss < least * (1.0 - CLEARLY):
                best, least, left = costs, loss, list(SIDES)
    return {COSTS[i]: float(best[i]) for i in free}


def are_told_apart(times: KernelTimes, form: CostForm, costs: Mapping[str, float]) -> bool:
    """Whether rows tell an engine's costs from each other: none is a mix of the others in every row."""
    slopes = _slopes(times, np.array([float(costs.get(name, 0.0)) for name in COSTS]))
    moving = slopes[:, [i for i, name in enumerate(COSTS) if name in form.costs and slopes[:, i].any()]]
    relative = moving / times.measured_us[:, None]
    relative /= np.linalg.norm(relative, axis=0)
    return bool(np.linalg.matrix_rank(relative, tol=SMALLEST_ANGLE) == relative.shape[1])


def _floors_us(times: KernelTimes) -> Floats:
    """Floors to start from: what the kernels of prefilling steps take a layer."""
    prefills = times.mixed_share > 0.0
    if not prefills.any():
        return np.empty(0)
    return np.quantile((times.mixed_us / times.num_layers)[prefills], (0.2, 0.5, 0.8))


def _added_us(times: KernelTimes, costs: Floats) -> tuple[Floats, Floats]:
    """Decode and mixed steps with what the engine adds, the floor left out."""
    decode_us = times.decode_us + costs[_STEP] + costs[_SEQUENCE] * times.decode_sequences
    mixed_us = times.mixed_us + costs[_STEP] + costs[_SEQUENCE] * times.mixed_sequences
    return decode_us, mixed_us


def _predicted(times: KernelTimes, costs: Floats) -> Floats:
    decode_us, mixed_us = _added_us(times, costs)
    mixed_us = np.maximum(mixed_us, costs[_FLOOR] * times.num_layers)
    mean_us: Floats = (1.0 - times.mixed_share) * decode_us + times.mixed_share * mixed_us
    return mean_us


def _loss(times: KernelTimes, weights: Floats, outlier: float, costs: Floats) -> float:
    error = _predicted(times, costs) / times.measured_us - 1.0
    if outlier:
        return float(weights @ (2.0 * outlier**2 * (np.sqrt(1.0 + (error / outlier) ** 2) - 1.0)))
    return float(weights @ error**2)


def _descend(
    times: KernelTimes, weights: Floats, outlier: float, free: list[int], costs: Floats
) -> tuple[Floats, float]:
    """Costs and loss at the bottom of the valley that costs lie in."""
    loss = _loss(times, weights, outlier, costs)
    for _ in range(MOST_ITERATIONS):
        move = _newton_costs(times, weights, outlier, free, costs) - costs
        for _ in range(MOST_HALVINGS):
            tried = costs + move
            tried_loss = _loss(times, weights, outlier, tried)
            if tried_loss < loss:
                break
            move = move / 2.0
        else:
            break
        costs, loss = tried, tried_loss
        if np.abs(move).max() < SMALLEST_MOVE_US:
            break
    return costs, loss


def _slopes(times: KernelTimes, costs: Floats) -> Floats:
    """What a microsecond of each cost adds to each row, on its side of the floor."""
    share, unbound = times.mixed_share, _added_us(times, costs)[1] >= costs[_FLOOR] * times.num_layers
    above = share * unbound
    return np.stack(
        [
            (1.0 - share) + above,
            (1.0 - share) * times.decode_sequences + above * times.mixed_sequences,
            (share - above) * times.num_layers,
        ],
        axis=1,
    )


def _newton_costs(
    times: KernelTimes, weights: Floats, outlier: float, free: list[int], costs: Floats
) -> Floats:
    """Best costs if every row stays on its side of the floor and counts what it counts here."""
    slopes = _slopes(times, costs)
    predicted = _predicted(times, costs)
    fixed = predicted - slopes[:, free] @ costs[free]
    if outlier:
        weights = weights / np.sqrt(1.0 + ((predicted / times.measured_us - 1.0) / outlier) ** 2)
    root = np.sqrt(weights)
    # a cost that moves no row stays where it is
    moving = [i for i in free if slopes[:, i].any()]
    left = fixed + slopes[:, [i for i in free if i not in moving]] @ np.array(
        [costs[i] for i in free if i not in moving]
    )
    matrix = slopes[:, moving] * (root / times.measured_us)[:, None]
    best = costs.copy()
    best[moving] = _non_negative_least_squares(matrix, (1.0 - left / times.measured_us) * root)
    return best


def _non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Solve it by trying every set of positive unknowns: there are at most three."""
    unknowns = matrix.shape[1]
    best, least = np.zeros(unknowns), float(target @ target)
    for size in range(1, unknowns + 1):
        for chosen in combinations(range(unknowns), size):
            part = matrix[:, chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            if (solution < 0.0).any():
                continue
            off = part @ solution - target
            # where two costs cannot be told apart, the first takes all
            if float(off @ off) < least * (1.0 - CLEARLY):
                best, least = np.zeros(unknowns), float(off @ off)
                best[list(chosen)] = solution
    return best
