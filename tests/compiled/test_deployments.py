"""Loops of deployments called directly: metrics to maximize."""

from __future__ import annotations

import numpy as np
import pytest

from fastroof.compiled import closed_loops, deployments

pytestmark = pytest.mark.loops


@pytest.mark.parametrize(
    ("objective", "column", "sign"),
    [
        (deployments.PER_GPU_HIGH, closed_loops.PER_GPU, 1.0),
        (deployments.PER_USER_HIGH, closed_loops.PER_USER, 1.0),
        (deployments.COST_LOW, closed_loops.COST, -1.0),
        (deployments.GOODPUT, closed_loops.TOKENS_PER_S, 1.0),
    ],
)
def test_each_objective_is_of_its_own_answer(objective, column, sign):
    answer = np.arange(2.0, 2.0 + closed_loops.ANSWERS)
    assert deployments._objective(answer, objective) == sign * answer[column]
