"""Intrinsics for LLVM, each compiled by itself: marks of loads and stores, elements, eight lines at once."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llvmlite import binding, ir
from numba.core import types

from fastroof.compiled import intrinsics
from fastroof.compiled.intrinsics import _scopes
from fastroof.compiled.layout import LANES

pytestmark = pytest.mark.loops

WIDTHS = {types.int8: 8, types.uint8: 8, types.int32: 32, types.uint32: 32, types.int64: 64, types.intp: 64}
DOUBLES, UINT32 = types.float64[::1], types.uint32[::1]


def test_a_module_has_one_scope_of_tables_and_one_of_outputs():
    module = ir.Module()
    table, output = _scopes(module)
    assert table is not output
    again = _scopes(module)
    assert again[0] is table
    assert again[1] is output
    assert "table" in str(table.operands[0].operands[0])
    assert "output" in str(output.operands[0].operands[0])


class Context:
    """As much of a target as our code needs: an array is the address of its first element."""

    def make_array(self, array_type: Any) -> Any:
        return lambda context, builder, array: SimpleNamespace(data=array)

    def get_value_type(self, kind: Any) -> ir.Type:
        return ir.DoubleType() if kind == types.float64 else ir.IntType(WIDTHS[kind])

    def get_dummy_value(self) -> None:
        return None


def line_aligned(count: int, at: int) -> Any:
    """An array of -1 whose element at a place begins a cache line."""
    raw = np.full(count + LANES, -1.0)
    shift = -(raw.ctypes.data // raw.itemsize + at) % LANES
    return raw[shift : shift + count]


def called(intrinsic: Any, kinds: list[Any], *arguments: Any) -> float | None:
    """Compile an intrinsic of such arguments by itself, and call it: arrays by address."""
    signature, generate = intrinsic(None, *kinds)
    context, module = Context(), ir.Module()

    def lowered(kind: Any) -> ir.Type:
        is_array = isinstance(kind, types.Array)
        return context.get_value_type(kind.dtype).as_pointer() if is_array else context.get_value_type(kind)

    is_void = signature.return_type == types.void
    returned = ir.VoidType() if is_void else lowered(signature.return_type)
    function = ir.Function(module, ir.FunctionType(returned, list(map(lowered, kinds))), "called")
    builder = ir.IRBuilder(function.append_basic_block())
    value = generate(context, builder, signature, function.args)
    if is_void:
        builder.ret_void()
    else:
        builder.ret(value)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    with binding.create_mcjit_compiler(
        parsed, binding.Target.from_default_triple().create_target_machine()
    ) as engine:
        engine.finalize_object()
        given = {8: ctypes.c_int8, 32: ctypes.c_int32, 64: ctypes.c_int64}
        taken = [
            ctypes.c_void_p if isinstance(kind, types.Array)
            else ctypes.c_double if kind == types.float64
            else given[WIDTHS[kind]]
            for kind in kinds
        ]  # fmt: skip
        kind = ctypes.CFUNCTYPE(None if is_void else ctypes.c_double, *taken)
        passed = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        answer: float | None = kind(engine.get_function_address("called"))(*passed)
    return answer


@pytest.mark.parametrize("index", [types.uint8, types.int8, types.int32, types.uint32, types.int64])
def test_an_element_is_that_of_the_index_whatever_its_type(index):
    table = np.arange(300.0)
    largest = min(2 ** (WIDTHS[index] - index.signed) - 1, 299)
    for at in (0, 1, 77, largest):
        assert called(intrinsics._intrinsic_table_load, [DOUBLES, index], table, at) == at
        out = np.zeros(300)
        called(intrinsics._intrinsic_output_store, [DOUBLES, index, types.float64], out, at, 2.5)
        assert (out[at], out.sum()) == (2.5, 2.5)


@pytest.mark.parametrize("integer", [np.int64, np.int32])
@pytest.mark.parametrize("form", [intrinsics._intrinsic_line_lanes, intrinsics._intrinsic_streamed_lanes])
def test_eight_lines_at_once_are_eight_lines(integer, form):
    rng = np.random.default_rng(1)
    lines = rng.random(60)
    # a line is two numbers, wherever they begin; none is another's
    at = (2 * rng.permutation(25)[:20]).astype(np.uint32)
    x = rng.integers(1, 10_000, 30).astype(integer)
    first, start = 5, 11
    out = line_aligned(30, start)
    kinds = [
        DOUBLES,
        UINT32,
        types.intp,
        types.int64[::1] if integer is np.int64 else types.int32[::1],
        types.intp,
        DOUBLES,
    ]
    called(form, kinds, lines, at, first, x, start, out)
    called(intrinsics._intrinsic_store_fence, [])
    where = at[first : first + LANES].astype(int)
    expected = lines[where] + lines[where + 1] * x[start : start + LANES]
    assert out[start : start + LANES].tolist() == expected.tolist()
    assert (np.delete(out, np.s_[start : start + LANES]) == -1.0).all()
