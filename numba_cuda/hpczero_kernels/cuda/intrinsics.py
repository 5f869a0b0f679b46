"""Device functions beyond Python: 128-bit accesses, bits of numbers, half precision, block sums.

No other module knows LLVM, PTX and warps. In numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1),
functions of the same names in `target` replace those here. Addresses are those of tensors
(`CPointer`, an int in the simulator); offsets count bytes. A Python float would make arithmetic
fp64, and a signed index would add wrap-around: hence the many float32(...) and uint64(...).
"""

from numba.core import types

from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.dispatch import SIMULATED

WARP = 32

if SIMULATED:
    from hpczero_kernels.cuda.target import (
        bits_of,
        block_max,
        block_sum,
        block_sums,
        erf,
        exp,
        from_fp16x2,
        inner,
        load1,
        load2,
        load4,
        load16,
        moved,
        number_of,
        product,
        sqrt,
        store1,
        store2,
        store4,
        store16,
        to_bf16x2,
        to_fp16x2,
        warp_max,
    )
else:
    import math
    from functools import partial

    from llvmlite import ir
    from numba import float32, int32, uint32
    from numba.cuda.extending import intrinsic

    inner = partial(cuda.jit, device=True, forceinline=True)
    exp, erf, sqrt = math.exp, math.erf, math.sqrt  # libdevice's, of the argument's type

    _WORD, _SINGLE, _HALF = ir.IntType(32), ir.FloatType(), ir.HalfType()
    _FOUR = types.UniTuple(types.uint32, 4)
    _PAIR = types.UniTuple(types.float32, 2)

    def _pointer(builder, address, offset, kind):
        return builder.bitcast(builder.gep(address, [offset]), kind.as_pointer())

    @intrinsic
    def moved(context, address, distance):
        """Return the address `distance` bytes further on."""

        def generate(context, builder, signature, arguments):
            return builder.gep(arguments[0], [arguments[1]])

        return address(address, types.uint64), generate

    @intrinsic
    def load16(context, address, offset):
        """Read four words by one access, at a multiple of 16 bytes."""

        def generate(context, builder, signature, arguments):
            vector = builder.load(_pointer(builder, *arguments, ir.VectorType(_WORD, 4)), align=16)
            words = [builder.extract_element(vector, ir.Constant(_WORD, lane)) for lane in range(4)]
            return context.make_tuple(builder, signature.return_type, words)

        return _FOUR(address, types.uint64), generate

    @intrinsic
    def store16(context, address, offset, words):
        def generate(context, builder, signature, arguments):
            address, offset, words = arguments
            vector = ir.Constant(ir.VectorType(_WORD, 4), ir.Undefined)
            for lane in range(4):
                vector = builder.insert_element(
                    vector, builder.extract_value(words, lane), ir.Constant(_WORD, lane)
                )
            builder.store(vector, _pointer(builder, address, offset, vector.type), align=16)
            return context.get_dummy_value()

        return types.void(address, types.uint64, _FOUR), generate

    def _loads(size):
        def generate(context, builder, signature, arguments):
            narrow = builder.load(_pointer(builder, *arguments, ir.IntType(8 * size)), align=size)
            return narrow if size == 4 else builder.zext(narrow, _WORD)

        return generate

    def _stores(size):
        def generate(context, builder, signature, arguments):
            address, offset, word = arguments
            narrow = word if size == 4 else builder.trunc(word, ir.IntType(8 * size))
            builder.store(narrow, _pointer(builder, address, offset, narrow.type), align=size)
            return context.get_dummy_value()

        return generate

    @intrinsic
    def load4(context, address, offset):
        return types.uint32(address, types.uint64), _loads(4)

    @intrinsic
    def load2(context, address, offset):
        """Read two bytes as the lower half of a word."""
        return types.uint32(address, types.uint64), _loads(2)

    @intrinsic
    def load1(context, address, offset):
        """Read a byte as the lowest one of a word."""
        return types.uint32(address, types.uint64), _loads(1)

    @intrinsic
    def store4(context, address, offset, word):
        return types.void(address, types.uint64, types.uint32), _stores(4)

    @intrinsic
    def store2(context, address, offset, word):
        return types.void(address, types.uint64, types.uint32), _stores(2)

    @intrinsic
    def store1(context, address, offset, word):
        return types.void(address, types.uint64, types.uint32), _stores(1)

    @intrinsic
    def number_of(context, bits):
        def generate(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], _SINGLE)

        return types.float32(types.uint32), generate

    @intrinsic
    def bits_of(context, number):
        def generate(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], _WORD)

        return types.uint32(types.float32), generate

    @intrinsic
    def product(context, left, right):
        """Return a product that is rounded by itself, as on CPUs; others may be fused with sums."""

        def generate(context, builder, signature, arguments):
            kind = ir.FunctionType(_SINGLE, [_SINGLE, _SINGLE])
            return builder.call(ir.InlineAsm(kind, "mul.rn.f32 $0, $1, $2;", "=f,f,f"), arguments)

        return types.float32(types.float32, types.float32), generate

    @intrinsic
    def from_fp16x2(context, word):
        """Return the lower and the upper half of a word."""

        def generate(context, builder, signature, arguments):
            pair = builder.bitcast(arguments[0], ir.VectorType(_HALF, 2))
            halves = [builder.extract_element(pair, ir.Constant(_WORD, lane)) for lane in range(2)]
            wide = [builder.fpext(half, _SINGLE) for half in halves]
            return context.make_tuple(builder, signature.return_type, wide)

        return _PAIR(types.uint32), generate

    def _packs(instruction):
        def generate(context, builder, signature, arguments):
            low, high = arguments
            kind = ir.FunctionType(_WORD, [_SINGLE, _SINGLE])
            assembly = ir.InlineAsm(kind, f"{instruction} $0, $1, $2;", "=r,f,f")
            return builder.call(assembly, [high, low])

        return generate

    @intrinsic
    def to_bf16x2(context, low, high):
        return types.uint32(types.float32, types.float32), _packs("cvt.rn.bf16x2.f32")

    @intrinsic
    def to_fp16x2(context, low, high):
        return types.uint32(types.float32, types.float32), _packs("cvt.rn.f16x2.f32")

    @inner
    def block_sums(first, second):
        """Return both sums over the threads of a block, on all of them, added in a fixed order.

        A block has whole warps, and 1024 threads at most.
        """
        warp_sums = cuda.shared.array((2, WARP), float32)
        first = _warp_sum(first)
        second = _warp_sum(second)
        thread = cuda.threadIdx.x
        warps = cuda.blockDim.x // WARP
        cuda.syncthreads()  # the last sums have been read
        if thread % WARP == 0:
            warp_sums[0, thread // WARP] = first
            warp_sums[1, thread // WARP] = second
        cuda.syncthreads()
        lane = thread % WARP
        first = warp_sums[0, lane] if lane < warps else float32(0.0)
        second = warp_sums[1, lane] if lane < warps else float32(0.0)
        return _warp_sum(first), _warp_sum(second)

    @inner
    def block_sum(value):
        warp_values = cuda.shared.array(WARP, float32)
        value = _warp_sum(value)
        thread = cuda.threadIdx.x
        warps = cuda.blockDim.x // WARP
        cuda.syncthreads()
        if thread % WARP == 0:
            warp_values[thread // WARP] = value
        cuda.syncthreads()
        lane = thread % WARP
        return _warp_sum(warp_values[lane] if lane < warps else float32(0.0))

    @inner
    def block_max(value):
        warp_values = cuda.shared.array(WARP, float32)
        value = _warp_max(value)
        thread = cuda.threadIdx.x
        warps = cuda.blockDim.x // WARP
        cuda.syncthreads()
        if thread % WARP == 0:
            warp_values[thread // WARP] = value
        cuda.syncthreads()
        lane = thread % WARP
        return _warp_max(warp_values[lane] if lane < warps else float32(-math.inf))

    @inner
    def warp_max(word):
        """Return the largest word, below 2^31, of a warp's threads, on all of them."""
        word = int32(word)
        for step in range(5):
            word = max(word, cuda.shfl_xor_sync(0xFFFFFFFF, word, 16 >> step))
        return uint32(word)

    @inner
    def _warp_sum(value):
        for step in range(5):
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, 16 >> step)
        return value

    @inner
    def _warp_max(value):
        for step in range(5):
            value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 16 >> step))
        return value
