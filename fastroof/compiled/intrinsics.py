"""The intrinsics of :mod:`fastroof.compiled.llvm`, as instructions of LLVM; they import numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastroof.compiled.layout import LANES

__all__ = [
    "array_data",
    "float_bits",
    "line_lanes",
    "output_store",
    "pointer_at",
    "prefetch",
    "stack_words",
    "table_load",
    "tagged_load",
]

# without types of their own
_types: Any = types
_cgutils: Any = cgutils

_INT32, _INT64, _DOUBLE = ir.IntType(32), ir.IntType(64), ir.DoubleType()


def _scopes(module: Any) -> tuple[Any, Any]:
    """Metadata lists of the scopes TABLE and OUTPUT in one domain, the same all over a module."""
    known = module.namedmetadata.get("fastroof.scopes")
    if known is not None:
        return known.operands[0], known.operands[1]
    domain = module.add_metadata([ir.MetaDataString(module, "fastroof")])
    table = module.add_metadata([module.add_metadata([ir.MetaDataString(module, "table"), domain])])
    output = module.add_metadata([module.add_metadata([ir.MetaDataString(module, "output"), domain])])
    named = module.add_named_metadata("fastroof.scopes")
    named.add(table)
    named.add(output)
    return table, output


def _tagged(builder: Any, instruction: Any, *, is_store: bool) -> Any:
    """Mark a load as one of a table, or a store as one to the output."""
    table, output = _scopes(builder.module)
    instruction.set_metadata("alias.scope", output if is_store else table)
    instruction.set_metadata("noalias", table if is_store else output)
    return instruction


def tagged_load(builder: Any, load: Any) -> Any:
    """Mark a load as one of a table."""
    return _tagged(builder, load, is_store=False)


def array_data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Pointer to the first element of an array argument."""
    return context.make_array(array_type)(context, builder, array).data


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Pointer to ``args[0][args[1]]``; negative indices do not wrap around."""
    index_type = signature.args[1]
    index = args[1]
    if index.type.width < _INT64.width:
        extend = builder.sext if index_type.signed else builder.zext
        index = extend(index, _INT64)
    array = array_data(context, builder, signature.args[0], args[0])
    return builder.gep(array, [index], inbounds=True)


def _intrinsic_table_load(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _tagged(builder, builder.load(_element(context, builder, signature, args)), is_store=False)

    return array.dtype(array, index), generate


def _intrinsic_output_store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store = builder.store(args[2], _element(context, builder, signature, args))
        _tagged(builder, store, is_store=True)
        return context.get_dummy_value()

    return types.void(array, index, array.dtype), generate


def _intrinsic_float_bits(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT64)

    return types.int64(types.float64), generate


def _intrinsic_prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # not inbounds: the address may lie beyond the end, and is never read
        element = builder.gep(array_data(context, builder, signature.args[0], args[0]), [args[1]])
        address = builder.bitcast(element, ir.IntType(8).as_pointer())
        arguments = [address, *(ir.Constant(_INT32, word) for word in (0, 0, 1))]  # read, not kept, data
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
        function = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, arguments)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _shuffled(builder: Any, a: Any, b: Any, order: Any) -> Any:
    lanes = list(order)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _intrinsic_line_lanes(
    typing_context: Any, lines: Any, at: Any, first: Any, x: Any, start: Any, out: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointer(array: int, index: Any, lanes_of: Any) -> Any:
            element = builder.gep(
                array_data(context, builder, signature.args[array], args[array]), [index], inbounds=True
            )
            return builder.bitcast(element, lanes_of.as_pointer())

        def load(array: int, index: Any, kind: Any, align: int) -> Any:
            return builder.load(pointer(array, index, kind), align=align)

        def load_table(array: int, index: Any, kind: Any, align: int) -> Any:
            return _tagged(builder, load(array, index, kind, align), is_store=False)

        pairs = []
        for lane in range(LANES):
            where = builder.add(args[2], ir.Constant(_INT64, lane))
            # no table: the loop before stored it
            offset = builder.zext(load(1, where, _INT32, 4), _INT64)
            pairs.append(load_table(0, offset, ir.VectorType(_DOUBLE, 2), 8))

        # (0, 2, 4, 6) and (1, 3, 5, 7): two unpacks then give the lanes in order
        def joined(odd: int) -> Any:
            low = _shuffled(builder, pairs[odd], pairs[odd + 2], range(4))
            high = _shuffled(builder, pairs[odd + 4], pairs[odd + 6], range(4))
            return _shuffled(builder, low, high, range(LANES))

        even, odd = joined(0), joined(1)
        at_zero = _shuffled(builder, even, odd, (0, 8, 2, 10, 4, 12, 6, 14))
        slope = _shuffled(builder, even, odd, (1, 9, 3, 11, 5, 13, 7, 15))
        integer = context.get_value_type(signature.args[3].dtype)
        width = integer.width // 8
        many = load_table(3, args[4], ir.VectorType(integer, LANES), width)
        lanes = ir.VectorType(_DOUBLE, LANES)
        value = builder.fadd(at_zero, builder.fmul(slope, builder.sitofp(many, lanes)))
        store = builder.store(value, pointer(5, args[4], lanes), align=8)
        _tagged(builder, store, is_store=True)
        return context.get_dummy_value()

    return types.void(lines, at, types.intp, x, types.intp, out), generate


def _intrinsic_pointer_at(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return _types.voidptr(address), generate


def _intrinsic_stack_words(typing_context: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _cgutils.alloca_once(builder, ir.ArrayType(_INT64, count.literal_value))
        return builder.bitcast(words, context.get_value_type(signature.return_type))

    return _types.voidptr(count), generate


table_load: Any = intrinsic(_intrinsic_table_load)
output_store: Any = intrinsic(_intrinsic_output_store)
float_bits: Any = intrinsic(_intrinsic_float_bits)
prefetch: Any = intrinsic(_intrinsic_prefetch)
line_lanes: Any = intrinsic(_intrinsic_line_lanes)

pointer_at: Any = intrinsic(_intrinsic_pointer_at)
"""``pointer_at(address)``: an address as a pointer, for ``numba.carray``; compiled code only."""

stack_words: Any = intrinsic(prefer_literal=True)(_intrinsic_stack_words)
"""``stack_words(8)``: a pointer to so many int64 that live as long as the call; compiled code only."""
