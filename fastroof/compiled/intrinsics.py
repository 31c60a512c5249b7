"""The intrinsics of :mod:`fastroof.compiled.llvm` as LLVM instructions; this module imports numba."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastroof.compiled.layout import LANES, LINE_BYTES, TILE

# without types of their own
_types: Any = types
_cgutils: Any = cgutils

_INT32, _INT64, _DOUBLE = ir.IntType(32), ir.IntType(64), ir.DoubleType()


def _scopes(module: Any) -> tuple[Any, Any]:
    """Return metadata lists of the scopes TABLE and OUTPUT, the same throughout a module."""
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
    return _line_lanes(lines, at, x, out, is_streamed=False)


def _intrinsic_streamed_lanes(
    typing_context: Any, lines: Any, at: Any, first: Any, x: Any, start: Any, out: Any
) -> Any:
    return _line_lanes(lines, at, x, out, is_streamed=True)


def _line_lanes(lines: Any, at: Any, x: Any, out: Any, *, is_streamed: bool) -> Any:
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
        store = builder.store(value, pointer(5, args[4], lanes), align=LINE_BYTES if is_streamed else 8)
        _tagged(builder, store, is_store=True)
        if is_streamed:
            store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(lines, at, types.intp, x, types.intp, out), generate


def _intrinsic_store_fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return _types.void(), generate


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
streamed_lanes: Any = intrinsic(_intrinsic_streamed_lanes)
store_fence: Any = intrinsic(_intrinsic_store_fence)

pointer_at: Any = intrinsic(_intrinsic_pointer_at)
"""``pointer_at(address)``: an address as a pointer, for ``numba.carray``; compiled code only."""

stack_words: Any = intrinsic(prefer_literal=True)(_intrinsic_stack_words)
"""``stack_words(8)``: a pointer to 8 int64 that live as long as the call; compiled code only."""


# without types of their own

_BIT = ir.IntType(1)
_VECTOR_BITS: Final = 512


def _call(builder: Any, name: str, returns: Any, arguments: list[Any]) -> Any:
    """Call an LLVM intrinsic function."""
    kind = ir.FunctionType(returns, [argument.type for argument in arguments])
    return builder.call(_cgutils.get_or_insert_function(builder.module, kind, name), arguments)


class _Lanes:
    """Sums over vectors of requests: bits, contexts, room, high bits."""

    def __init__(self, builder: Any, element: Any, room: Any) -> None:
        self.builder, self.element = builder, element
        self.count: Final[int] = _VECTOR_BITS // element.width
        self.kind = ir.VectorType(element, self.count)
        self.masks = ir.VectorType(_BIT, self.count)
        self.one, self.none = self.all_of(ir.Constant(element, 1)), ir.Constant(self.kind, None)
        self.room = self.all_of(builder.trunc(room, element) if element.width < _INT64.width else room)
        self.name = f"v{self.count}i{element.width}"

    def all_of(self, value: Any) -> Any:
        """Return a vector with one value in every lane."""
        empty = ir.Constant(ir.VectorType(value.type, self.count), ir.Undefined)
        one = self.builder.insert_element(empty, value, _INT32(0))
        first = ir.Constant(ir.VectorType(_INT32, self.count), [0] * self.count)
        return self.builder.shuffle_vector(one, one, first)

    def added(self, sums: tuple[Any, ...], new: Any, context: Any, at: Any) -> tuple[Any, ...]:
        """Add a vector, whose first request is number ``at``, to the sums."""
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
        """Sum a vector to one int64."""
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
        # lanes without a request: a new token without a context, each with all of the room
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
