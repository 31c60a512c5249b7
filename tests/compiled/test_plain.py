"""Loops as Python, if a process requests it before it imports one."""

from __future__ import annotations

import sys

import pytest

from fastroof.compiled import jit
from fastroof.compiled import layout as plain


def twice(x: float) -> float:
    return 2.0 * x


@pytest.mark.loops
def test_loops_run_as_python_from_before_the_first_import_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_chosen", [])
    assert not plain.run_plain(), "loops were imported as what is compiled"
    assert not plain.is_plain()
    monkeypatch.delitem(sys.modules, "fastroof.compiled.jit")
    assert plain.run_plain()
    assert plain.is_plain()
    for decorator in (jit.jit, jit.jit_inline, jit.jit_stateful, jit.jit_stateful_inline):
        assert decorator(twice) is twice
