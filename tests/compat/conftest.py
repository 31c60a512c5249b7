"""Measured rows in the form of other methods, made once for the same tables and experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from fastroof.compat import compare
from fastroof.compat.compare_roofline_v2 import infersim_tree, roofline_v2_tree

once = functools.cache(infersim_tree)
v2_once = functools.cache(roofline_v2_tree)


def infersim_once(*given: Any, model: Any, **options: Any) -> Any:
    return once(*given, model=model if model.experts else None, **options)


@pytest.fixture(autouse=True, scope="module")
def trees_are_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "infersim_tree", infersim_once)
        patch.setattr(compare, "roofline_v2_tree", v2_once)
        yield
