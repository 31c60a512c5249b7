"""The table's own lines: written, not timed."""

from __future__ import annotations

from benchmarks.table import ROWS, lines
from fastroof.bench import Setup


def test_lines_are_markdown(setup: Setup) -> None:
    head, rule, scalar = lines(setup, 1, ["one-step"])
    assert head.count("|") == rule.count("|") == scalar.count("|") == 6
    assert scalar.startswith("| plan.step_us of one step of ")


def test_names_are_distinguishable() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
