"""What Numba cannot say and LLVM can: loads that no store changes, and a count of leading zeros.

A loop that reads tables and writes an output stays scalar in Numba: the store might change the table,
and there is no ``restrict``. ``table_load`` and ``output_store`` mark their instruction with the
metadata ``alias.scope`` / ``noalias`` of two scopes, TABLE and OUTPUT, after which LLVM vectorises the
loop. Every load of the loop has to be a ``table_load``, the streamed inputs' too, and the output must
not overlap any of them: a wrapper that lets the caller pass ``out`` checks that.

With NUMBA_DISABLE_JIT or NUMBA_BOUNDSCHECK set, each is the plain expression it stands for, so that
Python or Numba checks every index. Both forms give the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

from fastroof.compiled.jit import jit

__all__ = ["INT64", "PLAIN", "data_pointer", "leading_zeros", "output_store", "table_load", "tagged"]

_NO_JIT = bool(getattr(config, "DISABLE_JIT"))  # noqa: B009  numba sets its options the same way
PLAIN = _NO_JIT or bool(getattr(config, "BOUNDSCHECK"))  # noqa: B009
"""Whether indices have to be checked: plain expressions instead of the intrinsics."""

INT64 = ir.IntType(64)


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


def tagged(builder: Any, instruction: Any, *, is_store: bool) -> Any:
    """Mark a load as one of a table, or a store as one to the output."""
    table, output = _scopes(builder.module)
    instruction.set_metadata("alias.scope", output if is_store else table)
    instruction.set_metadata("noalias", table if is_store else output)
    return instruction


def data_pointer(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Pointer to the first element of an array argument."""
    return context.make_array(array_type)(context, builder, array).data


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Pointer to ``args[0][args[1]]``; negative indices do not wrap around."""
    index_type = signature.args[1]
    index = args[1]
    if index.type.width < INT64.width:
        extend = builder.sext if index_type.signed else builder.zext
        index = extend(index, INT64)
    array = data_pointer(context, builder, signature.args[0], args[0])
    return builder.gep(array, [index], inbounds=True)


def _intrinsic_table_load(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return tagged(builder, builder.load(_element(context, builder, signature, args)), is_store=False)

    return array.dtype(array, index), generate


def _intrinsic_output_store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store = builder.store(args[2], _element(context, builder, signature, args))
        tagged(builder, store, is_store=True)
        return context.get_dummy_value()

    return types.void(array, index, array.dtype), generate


def _intrinsic_leading_zeros(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint32(types.uint32), generate


def _plain_leading_zeros(x: Any) -> int:
    return 32 - int(x).bit_length()


@jit
def _plain_load(array: Any, index: Any) -> Any:
    return array[index]


@jit
def _plain_store(array: Any, index: Any, value: Any) -> None:
    array[index] = value


def _chosen(plain: Any, generated: Any, is_plain: bool) -> Any:
    return plain if is_plain else intrinsic(generated)


table_load = _chosen(_plain_load, _intrinsic_table_load, PLAIN)
"""``table_load(array, index)``: ``array[index]``, which no ``output_store`` of this loop changes."""

output_store = _chosen(_plain_store, _intrinsic_output_store, PLAIN)
"""``output_store(array, index, value)``: ``array[index] = value``, which no ``table_load`` reads."""

leading_zeros = _chosen(_plain_leading_zeros, _intrinsic_leading_zeros, _NO_JIT)
"""``leading_zeros(x)``: zero bits above the highest set bit of a uint32; 32 for 0."""
