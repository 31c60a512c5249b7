"""Which tests run: parts of the slow ones hold each of them once, with all its cases."""

from __future__ import annotations

from argparse import ArgumentTypeError
from types import SimpleNamespace
from typing import Any

import pytest

from tests.selection import _other_parts, _part


def an_item(name: str, case: str | None, *, is_slow: bool) -> Any:
    """What the selection reads of a collected test."""
    item = SimpleNamespace(
        nodeid=f"tests/test_some.py::{name}" + (f"[{case}]" if case else ""),
        get_closest_marker=lambda mark: mark if is_slow and mark == "slow" else None,
    )
    if case:
        item.callspec = SimpleNamespace(id=case)
    return item


@pytest.mark.parametrize("total", [1, 2, 4])
def test_each_slow_test_is_in_one_part_with_all_its_cases(total: int) -> None:
    slow = [an_item(f"test_{i}", case, is_slow=True) for i in range(40) for case in ("a", "b[c]")]
    slow += [an_item(f"test_{i}", None, is_slow=True) for i in range(40, 80)]
    quick = [an_item(f"test_{i}", "a", is_slow=False) for i in range(80, 99)]
    parts = []
    for number in range(1, total + 1):
        left_out = _other_parts([*slow, *quick], number, total)
        parts.append([item.nodeid for item in slow if item not in left_out])
        assert not any(item in left_out for item in quick)
    assert sorted(name for part in parts for name in part) == sorted(item.nodeid for item in slow)
    # of about the same size
    assert all(len(part) > len(slow) / total / 2 for part in parts)
    for part in parts:
        tests = {name.partition("[")[0] for name in part}
        assert {item.nodeid for item in slow if item.nodeid.partition("[")[0] in tests} == set(part)


def test_a_part_is_named_by_its_number_and_how_many_there_are() -> None:
    assert _part("2/4") == (2, 4)
    for wrong in ("5/4", "0/4", "1", "a/b", "1/4/2"):
        with pytest.raises(ArgumentTypeError, match="with I from 1 to N"):
            _part(wrong)
