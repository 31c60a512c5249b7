"""What marks loads and stores for LLVM."""

from __future__ import annotations

import pytest
from llvmlite import ir

from fastroof.compiled.intrinsics import _scopes

pytestmark = pytest.mark.loops


def test_a_module_has_one_scope_of_tables_and_one_of_outputs():
    module = ir.Module()
    table, output = _scopes(module)
    assert table is not output
    again = _scopes(module)
    assert again[0] is table
    assert again[1] is output
    assert "table" in str(table.operands[0].operands[0])
    assert "output" in str(output.operands[0].operands[0])
