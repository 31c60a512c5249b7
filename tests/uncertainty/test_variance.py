"""Errors at points of one table: at its nodes, between them, and beside nodes that were not measured."""

from __future__ import annotations

import numpy as np
import pytest

from fastroof.uncertainty.leave_one_out import REPEATABILITY, EdgeVariances, LocalErrors, relative_variance

SURE = np.zeros((3, 3))
BEYOND = EdgeVariances(np.zeros(3), np.zeros(3))


def table(first: float, second: float, holes: np.ndarray | None = None) -> LocalErrors:
    """A table of 3 x 3 nodes with the same error in all brackets of an axis, and none at nodes."""
    axes = (np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 40.0]))
    inside = (np.full((3, 3), first), np.full((3, 3), second))
    return LocalErrors(axes, SURE, inside, (BEYOND, BEYOND), holes)


def test_between_nodes_of_both_axes_the_worse_of_them_counts() -> None:
    x, y = np.array([1.5, 1.5, 2.0, 2.0]), np.array([15.0, 20.0, 15.0, 20.0])
    found = relative_variance(table(0.04, 0.09), (x, y))
    assert found.tolist() == pytest.approx([0.09, 0.04, 0.09, REPEATABILITY**2])


def test_one_node_that_was_not_measured_counts_whole_wherever_it_is_used() -> None:
    """The others that a point lies between were measured, and make the hole no better known."""
    holes = np.zeros((3, 3))
    holes[1, 1] = 0.25
    # within all four cells around it, on the lines to it, at it, and beside what does not use it
    x = np.array([1.5, 3.0, 1.5, 3.0, 1.5, 2.0, 2.0, 1.5, 1.0])
    y = np.array([15.0, 15.0, 30.0, 30.0, 20.0, 15.0, 20.0, 10.0, 15.0])
    added = relative_variance(table(0.04, 0.04, holes), (x, y)) - relative_variance(table(0.04, 0.04), (x, y))
    least = 0.25 - REPEATABILITY**2
    assert added.tolist() == pytest.approx([0.25] * 6 + [least] + [0.0] * 2)


def test_of_several_holes_the_worst_counts() -> None:
    holes = np.zeros((3, 3))
    holes[0, 0], holes[1, 1] = 0.01, 0.25
    at = (np.array([1.5]), np.array([15.0]))
    assert relative_variance(table(0.04, 0.04, holes), at)[0] == pytest.approx(0.29)


def test_a_way_beyond_one_end_adds_its_square() -> None:
    errors = table(0.04, 0.04)
    beyond = EdgeVariances(np.full(3, 0.01), np.full(3, 0.02))
    errors = LocalErrors(errors.axes, errors.nodes, errors.inside, (beyond, BEYOND), None)
    x = np.array([4.0, 8.0, 16.0, 0.25])
    found = relative_variance(errors, (x, np.full(4, 20.0)))
    assert found.tolist() == pytest.approx([REPEATABILITY**2, 0.02, 0.08, 0.04])
