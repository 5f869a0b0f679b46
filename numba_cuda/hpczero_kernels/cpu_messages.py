"""Messages of signs and integers in vectors of the compiler, 64 numbers at a time, on CPUs.

A group is 64 numbers. Of a loop over bits, or over half bytes, the compiler does not see that it
has an instruction or two for a register full of them. An average of several workers stays in
registers until it is complete.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hpczero_kernels.cpu_streams import past_the_caches

GROUP = 64
_INT, _WORD, _NUMBER = ir.IntType(32), ir.IntType(64), ir.FloatType()
_NUMBERS = ir.VectorType(_NUMBER, GROUP)
_BITS, _BYTES, _INTS = (ir.VectorType(ir.IntType(bits), GROUP) for bits in (1, 8, 32))
_PAIRS, _SHORTS = (ir.VectorType(ir.IntType(bits), GROUP // 2) for bits in (8, 16))
_HALVES = ir.VectorType(ir.IntType(16), GROUP)


@intrinsic
def put_signs(context, signs, numbers, group):
    """Store the signs of a group of numbers, the first in the lowest bit; both are pointers."""

    def generate(context, builder, signature, arguments):
        signs, numbers, group = arguments
        words = builder.load(_place(builder, numbers, _INTS, group), align=4)
        negative = builder.icmp_signed("<", words, ir.Constant(_INTS, None))
        builder.store(builder.bitcast(negative, _WORD), _place(builder, signs, _WORD, group), 1)
        return context.get_dummy_value()

    return types.void(signs, numbers, types.uint64), generate


@intrinsic
def put_average_of_signs(
    context, numbers, group, packed, row, scales, scales_row, workers, factor, streamed
):
    """Set a group of numbers, which a pointer gives, to the sum of the workers' times a factor.

    `packed` and `scales` are the addresses of the first worker's signs and scale of the group; the
    rows are the bytes from one worker's to the next one's. If `streamed`, the numbers lie at a
    multiple of 64 bytes, and are stored past the caches.
    """

    def generate(context, builder, signature, arguments):
        numbers, group, packed, row, scales, scales_row, workers, factor, streamed = arguments

        def sent(worker):
            signs = _element(builder, packed, row, worker, _WORD)
            scale = _element(builder, scales, scales_row, worker, _NUMBER)
            negative = _all(builder, builder.fneg(scale))
            return builder.select(builder.bitcast(signs, _BITS), negative, _all(builder, scale))

        total = builder.fmul(_sum(builder, workers, sent), _all(builder, factor))
        _store(builder, total, _place(builder, numbers, _NUMBERS, group), streamed)
        return context.get_dummy_value()

    return types.void(numbers, *_OF_WORKERS), generate


@intrinsic(prefer_literal=True)
def put_average_of_integers(
    context, numbers, group, packed, row, scales, scales_row, workers, factor, streamed, bits
):
    """Set a group of numbers as put_average_of_signs does; `bits` is the constant 8 or 4.

    `numbers` is a pointer to fp32, or to the bits of bf16 (uint16), to which they are then rounded.
    """
    are_halves = numbers == types.CPointer(types.uint16)

    def generate(context, builder, signature, arguments):
        numbers, group, packed, row, scales, scales_row, workers, factor, streamed, _ = arguments

        def sent(worker):
            if bits.literal_value == 8:
                integers = _element(builder, packed, row, worker, _BYTES)
            else:
                integers = _halves(builder, _element(builder, packed, row, worker, _PAIRS))
            scale = _element(builder, scales, scales_row, worker, _NUMBER)
            wide = builder.sitofp(builder.sext(integers, _INTS), _NUMBERS)
            return builder.fmul(wide, _all(builder, scale))

        total = builder.fmul(_sum(builder, workers, sent), _all(builder, factor))
        if are_halves:
            total = _to_bf16(builder, total)
        _store(builder, total, _place(builder, numbers, total.type, group), streamed)
        return context.get_dummy_value()

    if isinstance(bits, types.IntegerLiteral):
        return types.void(numbers, *_OF_WORKERS, bits), generate
    return None


_ADDRESS_AND_ROW = (types.uint64, types.uint64)
_OF_WORKERS = (
    types.uint64,
    *_ADDRESS_AND_ROW,
    *_ADDRESS_AND_ROW,
    types.uint64,
    types.float32,
    types.boolean,
)


def _place(builder, pointer, kind, group):
    return builder.gep(builder.bitcast(pointer, kind.as_pointer()), [group])


def _element(builder, address, row, worker, kind):
    """Return what lies at an address in a worker's row."""
    address = builder.add(address, builder.mul(worker, row))
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _sum(builder, workers, sent):
    """Return the sum of what the workers sent, in their order."""
    with builder.goto_entry_block():
        total = builder.alloca(_NUMBERS)
    builder.store(ir.Constant(_NUMBERS, None), total)
    with cgutils.for_range(builder, workers, intp=_WORD) as loop:
        builder.store(builder.fadd(builder.load(total), sent(loop.index)), total)
    return builder.load(total)


def _store(builder, vector, place, streamed):
    with builder.if_else(streamed) as (past_caches, usual):
        with past_caches:
            past_the_caches(builder, builder.store(vector, place, align=64))
        with usual:
            builder.store(vector, place, align=2)


def _to_bf16(builder, numbers):
    """Return the bits of numbers as `cpu.to_bf16` rounds them."""
    bits = builder.bitcast(numbers, _INTS)
    half, nan, one, upper = (
        ir.Constant(_INTS, [number] * GROUP) for number in (0x7FFF, 0x7FC0, 1, 16)
    )
    odd = builder.and_(builder.lshr(bits, upper), one)
    rounded = builder.lshr(builder.add(builder.add(bits, half), odd), upper)
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    return builder.trunc(builder.select(is_nan, nan, rounded), _HALVES)


def _halves(builder, pairs):
    """Return the halves of bytes, the lower one first, as bytes in two's complement."""
    wide = builder.zext(pairs, _SHORTS)
    four = ir.Constant(_SHORTS, [4] * (GROUP // 2))
    apart = builder.bitcast(builder.or_(wide, builder.shl(wide, four)), _BYTES)
    low, eight = (ir.Constant(_BYTES, [number] * GROUP) for number in (15, 8))
    return builder.sub(builder.xor(builder.and_(apart, low), eight), eight)


def _all(builder, number):
    """Return a vector of which each element is the number."""
    undefined = ir.Constant(_NUMBERS, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, None))
