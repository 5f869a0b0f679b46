"""Signs of eight fp32 numbers as the bits of a byte, and back, by vectors of the compiler.

The first number's sign is the lowest bit, 1 where it is negative. Numbers are given by their
address. The compiler has one instruction or two for each; a loop over the bits is not recognised.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_EIGHT_WORDS = ir.VectorType(ir.IntType(32), 8)
_EIGHT_NUMBERS = ir.VectorType(ir.FloatType(), 8)
_EIGHT_BITS = ir.VectorType(ir.IntType(1), 8)


@intrinsic
def sign_byte(context, address):
    """Return the signs of the eight numbers at an address."""

    def generate(context, builder, signature, arguments):
        words = builder.load(builder.inttoptr(arguments[0], _EIGHT_WORDS.as_pointer()), align=4)
        negative = builder.icmp_signed("<", words, ir.Constant(_EIGHT_WORDS, None))
        return builder.bitcast(negative, ir.IntType(8))

    return types.uint8(types.uint64), generate


@intrinsic
def put_signed(context, address, signs, scale):
    """Set the eight numbers at an address to a scale with the signs of a byte."""

    def generate(context, builder, signature, arguments):
        address, signs, scale = arguments
        place = builder.inttoptr(address, _EIGHT_NUMBERS.as_pointer())
        builder.store(_signed(builder, signs, scale), place, align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint8, types.float32), generate


@intrinsic
def add_signed(context, address, signs, scale):
    """Add a scale with the signs of a byte to the eight numbers at an address."""

    def generate(context, builder, signature, arguments):
        address, signs, scale = arguments
        place = builder.inttoptr(address, _EIGHT_NUMBERS.as_pointer())
        total = builder.fadd(builder.load(place, align=4), _signed(builder, signs, scale))
        builder.store(total, place, align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint8, types.float32), generate


def _signed(builder, signs, scale):
    return builder.select(
        builder.bitcast(signs, _EIGHT_BITS),
        _eight(builder, builder.fneg(scale)),
        _eight(builder, scale),
    )


def _eight(builder, number):
    """Return a vector of eight times the number."""
    first = builder.insert_element(
        ir.Constant(_EIGHT_NUMBERS, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(
        first,
        ir.Constant(_EIGHT_NUMBERS, ir.Undefined),
        ir.Constant(ir.VectorType(ir.IntType(32), 8), None),
    )
