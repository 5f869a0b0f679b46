"""Signs of 64 fp32 numbers as the bits of a word, and back, by vectors of the compiler.

The first number's sign is the lowest bit, 1 where it is negative. The compiler has an instruction
or two for a vector register; a loop over the bits is not recognised.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

GROUP = 64  # numbers of a word
_WORD = ir.IntType(64)
_BITS = ir.VectorType(ir.IntType(1), GROUP)
_WORDS_OF_NUMBERS = ir.VectorType(ir.IntType(32), GROUP)
_NUMBERS = ir.VectorType(ir.FloatType(), GROUP)


def _place(builder, pointer, kind, group):
    return builder.gep(builder.bitcast(pointer, kind.as_pointer()), [group])


@intrinsic
def word_at(context, signs, group):
    """Return the word of a group; `signs` points to its bytes, at any address."""

    def generate(context, builder, signature, arguments):
        signs, group = arguments
        return builder.load(_place(builder, signs, _WORD, group), align=1)

    return types.uint64(signs, types.uint64), generate


@intrinsic
def put_word_at(context, signs, group, word):
    def generate(context, builder, signature, arguments):
        signs, group, word = arguments
        builder.store(word, _place(builder, signs, _WORD, group), align=1)
        return context.get_dummy_value()

    return types.void(signs, types.uint64, types.uint64), generate


@intrinsic
def sign_word(context, numbers, group):
    """Return the signs of a group of numbers, which a pointer gives."""

    def generate(context, builder, signature, arguments):
        numbers, group = arguments
        words = builder.load(_place(builder, numbers, _WORDS_OF_NUMBERS, group), align=4)
        negative = builder.icmp_signed("<", words, ir.Constant(_WORDS_OF_NUMBERS, None))
        return builder.bitcast(negative, _WORD)

    return types.uint64(numbers, types.uint64), generate


@intrinsic
def put_signed(context, numbers, group, signs, scale):
    """Set a group of numbers to a scale with the signs of a word."""

    def generate(context, builder, signature, arguments):
        numbers, group, signs, scale = arguments
        place = _place(builder, numbers, _NUMBERS, group)
        builder.store(_signed(builder, signs, scale), place, align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.uint64, types.uint64, types.float32), generate


@intrinsic
def add_signed(context, numbers, group, signs, scale):
    """Add a scale with the signs of a word to a group of numbers."""

    def generate(context, builder, signature, arguments):
        numbers, group, signs, scale = arguments
        place = _place(builder, numbers, _NUMBERS, group)
        total = builder.fadd(builder.load(place, align=4), _signed(builder, signs, scale))
        builder.store(total, place, align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.uint64, types.uint64, types.float32), generate


def _signed(builder, signs, scale):
    bits = builder.bitcast(signs, _BITS)
    return builder.select(bits, _all(builder, builder.fneg(scale)), _all(builder, scale))


def _all(builder, number):
    """Return a vector of which each element is the number."""
    undefined = ir.Constant(_NUMBERS, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), GROUP), None)
    return builder.shuffle_vector(first, undefined, zeros)
