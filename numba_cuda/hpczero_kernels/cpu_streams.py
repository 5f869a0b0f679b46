"""Stores of large results past the caches, which would read each line before they write it.

A result that no cache holds costs half as much memory traffic so. A small one had better stay in
the caches, where its reader finds it.
"""

from llvmlite import ir
from numba import types, uint64
from numba.extending import intrinsic
from torch import Tensor

from hpczero_kernels.cpu import FP32, address_in, inner, store

LINE = 64  # bytes that are stored at a time, at multiples of so many
_LARGE = 8 << 20  # bytes of a result
_WORDS = ir.VectorType(ir.IntType(32), LINE // 4)


def streams(result: Tensor) -> bool:
    """Return True if a kernel had better store a result past the caches."""
    return result.nbytes >= _LARGE and result.data_ptr() % LINE == 0


def past_the_caches(builder, store):
    """Mark a vector's store, which the compiler is generating."""
    one = ir.Constant(ir.IntType(32), 1)
    store.set_metadata("nontemporal", builder.module.add_metadata([one]))


@intrinsic
def _store_line(context, source, number, target):
    """Copy the line of this number from a pointer to an address, past the caches."""

    def generate(context, builder, signature, arguments):
        source, number, target = arguments
        lines = builder.bitcast(source, _WORDS.as_pointer())
        words = builder.load(builder.gep(lines, [number]), align=4)
        place = builder.gep(builder.inttoptr(target, _WORDS.as_pointer()), [number])
        past_the_caches(builder, builder.store(words, place, align=LINE))
        return context.get_dummy_value()

    return types.void(source, types.uint64, types.uint64), generate


@intrinsic
def finish_streams(context):
    """Make what was stored past the caches visible to other threads before what follows."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@inner
def store_past_caches(stretch, size, address, precision, start, staging):
    """Store as `cpu.store` does, past the caches; `start` begins a line.

    `stretch` and `staging`, of the same length, are pointers to fp32.
    """
    bytes_of_one = uint64(4) if precision == FP32 else uint64(2)
    lines = size * bytes_of_one // uint64(LINE)
    target = address + start * bytes_of_one
    if lines * uint64(LINE) != size * bytes_of_one:
        store(stretch, size, address, precision, start)
    elif precision == FP32:
        for line in range(lines):
            _store_line(stretch, line, target)
    else:
        store(stretch, size, address_in(staging), precision, uint64(0))
        for line in range(lines):
            _store_line(staging, line, target)
