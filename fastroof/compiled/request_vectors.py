"""What :mod:`fastroof.compiled.request_lanes` sums in vectors, as instructions of LLVM; it imports numba."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastroof.compiled.intrinsics import array_data, tagged_load
from fastroof.compiled.layout import TILE

__all__ = ["bit_count", "lowest_bit", "request_lanes"]

# without types of their own
_types: Any = types
_cgutils: Any = cgutils

_BIT, _INT32, _INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_VECTOR_BITS: Final = 512


def _call(builder: Any, name: str, returns: Any, arguments: list[Any]) -> Any:
    """Call one of LLVM's own functions."""
    kind = ir.FunctionType(returns, [argument.type for argument in arguments])
    return builder.call(_cgutils.get_or_insert_function(builder.module, kind, name), arguments)


class _Lanes:
    """What is made of a vector of requests, and the sums so far: bits, contexts, room, high bits."""

    def __init__(self, builder: Any, element: Any, room: Any) -> None:
        self.builder, self.element = builder, element
        self.count: Final[int] = _VECTOR_BITS // element.width
        self.kind = ir.VectorType(element, self.count)
        self.masks = ir.VectorType(_BIT, self.count)
        self.one, self.none = self.all_of(ir.Constant(element, 1)), ir.Constant(self.kind, None)
        self.room = self.all_of(builder.trunc(room, element) if element.width < _INT64.width else room)
        self.name = f"v{self.count}i{element.width}"

    def all_of(self, value: Any) -> Any:
        """A vector of one value."""
        empty = ir.Constant(ir.VectorType(value.type, self.count), ir.Undefined)
        one = self.builder.insert_element(empty, value, _INT32(0))
        first = ir.Constant(ir.VectorType(_INT32, self.count), [0] * self.count)
        return self.builder.shuffle_vector(one, one, first)

    def added(self, sums: tuple[Any, ...], new: Any, context: Any, at: Any) -> tuple[Any, ...]:
        """The sums with a vector more, whose first request is number ``at``."""
        builder = self.builder
        bits, contexts, rooms, high = sums
        more = builder.sub(new, self.one)
        is_chunk = builder.or_(
            builder.icmp_signed("!=", more, self.none), builder.icmp_signed("==", context, self.none)
        )
        flags = builder.zext(builder.bitcast(is_chunk, ir.IntType(self.count)), _INT64)
        room = builder.sub(self.room, context)
        room = builder.select(builder.icmp_signed(">", room, self.none), room, self.none)
        any_high = builder.or_(builder.or_(more, context), builder.add(more, context))
        return (
            builder.or_(bits, builder.shl(flags, at)),
            builder.add(contexts, context),
            builder.add(rooms, room),
            builder.or_(high, any_high),
        )

    def total(self, sums: Any, operation: str) -> Any:
        """One int64 of a vector."""
        if operation == "add" and self.element.width < _INT64.width:
            sums = self.builder.sext(sums, ir.VectorType(_INT64, self.count))
            return _call(self.builder, f"llvm.vector.reduce.add.v{self.count}i64", _INT64, [sums])
        one = _call(self.builder, f"llvm.vector.reduce.{operation}.{self.name}", self.element, [sums])
        return self.builder.sext(one, _INT64) if self.element.width < _INT64.width else one


def _intrinsic_request_lanes(
    typing_context: Any, new_tokens: Any, context_len: Any, first: Any, count: Any, room: Any
) -> Any:
    inputs = new_tokens.dtype, context_len.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = all(dtype.bitwidth == _INT32.width and dtype.signed for dtype in inputs)
        lanes = _Lanes(builder, _INT32 if narrow else _INT64, args[4])
        pointers = [
            builder.gep(array_data(context, builder, kind, array), [args[2]], inbounds=True)
            for kind, array in zip(signature.args[:2], args[:2], strict=True)
        ]

        def loaded(number: int, at: Any, mask: Any) -> Any:
            kind = ir.VectorType(ir.IntType(inputs[number].bitwidth), lanes.count)
            width = kind.element.width // 8
            place = builder.gep(pointers[number], [at], inbounds=True)
            place = builder.bitcast(place, kind.as_pointer())
            if mask is None:
                sizes = tagged_load(builder, builder.load(place, align=width))
            else:
                neutral = ir.Constant(kind, [1 - number] * lanes.count)
                name = f"llvm.masked.load.v{lanes.count}i{kind.element.width}.p0"
                sizes = _call(builder, name, kind, [place, ir.Constant(_INT32, width), mask, neutral])
            if kind.element.width == lanes.element.width:
                return sizes
            return (builder.sext if inputs[number].signed else builder.zext)(sizes, lanes.kind)

        def added(sums: tuple[Any, ...], at: Any, mask: Any = None) -> tuple[Any, ...]:
            return lanes.added(sums, loaded(0, at, mask), loaded(1, at, mask), at)

        width = ir.Constant(_INT64, lanes.count)
        rest = builder.and_(args[3], ir.Constant(_INT64, lanes.count - 1))
        whole = builder.sub(args[3], rest)
        start = builder.block
        body, last, tail, end = (builder.append_basic_block(name) for name in ("body", "last", "tail", "end"))
        zeros = (ir.Constant(_INT64, 0), lanes.none, lanes.none, lanes.none)
        builder.cbranch(builder.icmp_signed(">", whole, _INT64(0)), body, last)
        builder.position_at_end(body)
        at = builder.phi(_INT64)
        phis = tuple(builder.phi(zero.type) for zero in zeros)
        sums, following = added(phis, at), builder.add(at, width)
        for phi, zero, value in zip((at, *phis), (_INT64(0), *zeros), (following, *sums), strict=True):
            phi.add_incoming(zero, start)
            phi.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed("<", following, whole), body, last)
        builder.position_at_end(last)
        merged = tuple(builder.phi(zero.type) for zero in zeros)
        for phi, zero, value in zip(merged, zeros, sums, strict=True):
            phi.add_incoming(zero, start)
            phi.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed(">", rest, _INT64(0)), tail, end)
        builder.position_at_end(tail)
        numbers = ir.Constant(ir.VectorType(_INT32, lanes.count), list(range(lanes.count)))
        mask = builder.icmp_signed("<", numbers, lanes.all_of(builder.trunc(rest, _INT32)))
        with_tail = added(merged, whole, mask)
        builder.branch(end)
        builder.position_at_end(end)
        done = tuple(builder.phi(zero.type) for zero in zeros)
        for phi, value, more in zip(done, merged, with_tail, strict=True):
            phi.add_incoming(value, last)
            phi.add_incoming(more, tail)
        # lanes that are no requests: a new token without a context, each with all of the room
        padding = builder.and_(builder.neg(args[3]), ir.Constant(_INT64, lanes.count - 1))
        unused = builder.sub(ir.Constant(_INT64, TILE), args[3])
        bits = builder.and_(done[0], builder.lshr(ir.Constant(_INT64, -1), unused))
        zero = ir.Constant(_INT64, 0)
        a_room = builder.select(builder.icmp_signed(">", args[4], zero), args[4], zero)
        rooms = builder.sub(lanes.total(done[2], "add"), builder.mul(padding, a_room))
        values = [bits, lanes.total(done[1], "add"), rooms, lanes.total(done[3], "or")]
        return context.make_tuple(builder, signature.return_type, values)

    returns = _types.UniTuple(types.int64, 4)
    return returns(new_tokens, context_len, types.int64, types.int64, types.int64), generate


def _intrinsic_lowest_bit(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(_BIT, 0))

    return types.int64(types.int64), generate


def _intrinsic_bit_count(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.int64), generate


request_lanes: Any = intrinsic(_intrinsic_request_lanes)
lowest_bit: Any = intrinsic(_intrinsic_lowest_bit)
bit_count: Any = intrinsic(_intrinsic_bit_count)
