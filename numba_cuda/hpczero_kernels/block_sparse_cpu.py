"""Passes of block-sparse attention between its products, for CPUs, each over the items of a chunk.

They do what `block_sparse_passes.TorchPasses` does. Kernels get the addresses of tensors and of the
plan's arrays; an item's logits, probabilities and scores are [block, width * block].
"""

from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, uint16, uint64
from torch import Tensor

from hpczero_kernels.block_sparse_plan import Part, Plan
from hpczero_kernels.cpu import (
    CODES,
    FP32,
    add,
    address_of,
    bits_as,
    from_element,
    inner,
    kernel,
    load,
    pointer,
    store,
)
from hpczero_kernels.cpu_functions import exp_of_negative, tanh

_ZERO, _ONE = float32(0.0), float32(1.0)
_HIDDEN = float32(-np.inf)


@inner
def _ordered(bits):
    """Return bits of an fp32 as an integer that is as large as the number is; its own inverse."""
    return int32(bits ^ int32(int32(bits >> int32(31)) & int32(0x7FFFFFFF)))


@inner
def _largest(row, size):
    """Return the largest number, by integers: the compiler vectorises their maximum."""
    most = _ordered(bits_as(_HIDDEN, int32))
    for i in range(size):
        most = max(most, _ordered(bits_as(row[i], int32)))
    return bits_as(_ordered(most), float32)


@njit(error_model="numpy", nogil=True, fastmath={"reassoc"})
def _exponentiate(row, size, shift):
    """Set the row to exp(row - shift), and return the sum."""
    total = _ZERO
    for i in range(size):
        power = exp_of_negative(row[i] - shift)
        row[i] = power
        total += power
    return total


@inner
def _scale_and_cap(row, size, scale, cap):
    if cap > _ZERO:
        inverse = _ONE / cap
        for i in range(size):
            row[i] = tanh(row[i] * scale * inverse) * cap
    else:
        for i in range(size):
            row[i] *= scale


@inner
def _hide(row, value, keys, width, block, low, high):
    """Set what is outside of [low, high) to the value."""
    for j in range(width):
        begin = int64(keys[j]) * block
        first = min(max(low - begin, int64(0)), block)
        last = min(max(high - begin, int64(0)), block)
        if first == 0 and last == block:
            continue
        last = max(first, last)
        of_block = from_element(row, uint64(j) * uint64(block))
        for i in range(first):
            of_block[i] = value
        for i in range(last, block):
            of_block[i] = value


@inner
def _scores(row, gradient, size, scale, cap, logsumexp, row_sum):
    """Set a row of logits to probabilities, and their gradients to those of the products q k."""
    if cap > _ZERO:
        inverse = _ONE / cap
        for i in range(size):
            level = tanh(row[i] * scale * inverse)
            power = exp_of_negative(level * cap - logsumexp)
            row[i] = power
            gradient[i] = power * (gradient[i] - row_sum) * scale * (_ONE - level * level)
    else:
        for i in range(size):
            power = exp_of_negative(row[i] * scale - logsumexp)
            row[i] = power
            gradient[i] = power * (gradient[i] - row_sum) * scale


@inner
def _add_bias(row, bias, keys, width, block, low, high):
    """Add the bias of a row, bias[a key's position], to the logits that are visible."""
    for j in range(width):
        begin = int64(keys[j]) * block
        first = min(max(low - begin, int64(0)), block)
        last = min(max(high - begin, int64(0)), block)
        of_block = from_element(row, uint64(j) * uint64(block))
        of_keys = from_element(bias, uint64(begin))
        for i in range(first, last):
            of_block[i] += of_keys[i]


@inner
def _scores_with_bias(
    row, gradient, bias, diagonals, keys, width, block, low, high, scale, cap, logsumexp, row_sum
):  # fmt: skip
    """Do what `_scores` does to what is visible, and add the bias's gradients to the diagonals."""
    inverse = _ONE / cap if cap > _ZERO else _ZERO
    for j in range(width):
        begin = int64(keys[j]) * block
        first = min(max(low - begin, int64(0)), block)
        last = min(max(high - begin, int64(0)), block)
        start = uint64(j) * uint64(block)
        logits, scores = from_element(row, start), from_element(gradient, start)
        of_keys = from_element(bias, uint64(begin))
        sums = from_element(diagonals, uint64(j) * uint64(2 * block - 1))
        if cap > _ZERO:
            for i in range(first, last):
                level = tanh(logits[i] * scale * inverse)
                power = exp_of_negative(level * cap + of_keys[i] - logsumexp)
                made = power * (scores[i] - row_sum)
                logits[i] = power
                scores[i] = made * scale * (_ONE - level * level)
                sums[i] += made
        else:
            for i in range(first, last):
                power = exp_of_negative(logits[i] * scale + of_keys[i] - logsumexp)
                made = power * (scores[i] - row_sum)
                logits[i] = power
                scores[i] = made * scale
                sums[i] += made


@inner
def _bias_of(biases, number, blocks, block, query):
    """Return the bias of a query of a block: number i is that of the key at position i."""
    address, heads, _ = biases
    distances = 2 * blocks * block - 1
    head = number // blocks % int64(heads)
    own = number % blocks * block + int64(query)
    first = head * distances + blocks * block - 1 - own
    return from_element(pointer(address, float32), uint64(first))


@inner
def _at(queries, item, blocks, rows, block):
    """Return where the intervals of an item's queries begin."""
    number = pointer(queries, int64)[item]
    return (number // blocks // rows * blocks + number % blocks) * block


# `items`: the addresses of a chunk's starts and queries and of the plan's keys, then their number;
# `shape`: blocks of a head, units that share a row of intervals, width and block; `biases`: the
# address of the bias, or 0, its heads, and the address of sums along the diagonals of blocks.
@kernel(
    "void(uint64, uint64, int64, uint64, uint64, uint64, UniTuple(uint64, 3), uint64,"
    " UniTuple(int64, 4), UniTuple(uint64, 3), float32, float32)"
)
def _softmax(
    logits, probabilities, precision, sums, low, high, items, count, shape, biases, scale, cap
):  # fmt: skip
    """Set each row's probabilities and its logsumexp; of a row that sees nothing 0 and -inf."""
    starts, queries, plan_keys = items
    blocks, rows, width, block = shape
    size = uint64(width * block)
    for item in range(count):
        keys = from_element(pointer(plan_keys, int32), uint64(pointer(starts, int64)[item]))
        begin = _at(queries, item, blocks, rows, block)
        for query in range(uint64(block)):
            at = item * uint64(block) + query
            row = pointer(logits + uint64(4) * at * size, float32)
            _scale_and_cap(row, size, scale, cap)
            first = int64(pointer(low, int32)[begin + query])
            last = int64(pointer(high, int32)[begin + query])
            if biases[0]:
                number = pointer(queries, int64)[item]
                bias = _bias_of(biases, number, blocks, block, query)
                _add_bias(row, bias, keys, width, block, first, last)
            _hide(row, _HIDDEN, keys, width, block, first, last)
            most = _largest(row, size)
            shift = most if most > _HIDDEN else _ZERO
            total = _exponentiate(row, size, shift)
            pointer(sums, float32)[at] = shift + np.log(total)
            inverse = _ONE / total if total != _ZERO else _ZERO
            for i in range(size):
                row[i] *= inverse
            if precision != FP32:
                store(row, size, probabilities, precision, at * size)


@kernel(
    "void(uint64, uint64, uint64, uint64, int64, uint64, uint64, uint64, uint64,"
    " UniTuple(uint64, 3), uint64, UniTuple(int64, 4), UniTuple(uint64, 3), float32, float32)"
)
def _differentiate(
    logits, gradients, probabilities, scores, precision, sums, row_sums, low, high, items, count,
    shape, biases, scale, cap,
):  # fmt: skip
    """Set each row's probabilities again, and the gradients of the products q k."""
    starts, queries, plan_keys = items
    blocks, rows, width, block = shape
    size = uint64(width * block)
    for item in range(count):
        keys = from_element(pointer(plan_keys, int32), uint64(pointer(starts, int64)[item]))
        begin = _at(queries, item, blocks, rows, block)
        length = uint64(width * (2 * block - 1))
        diagonals = pointer(biases[2] + uint64(4) * item * length, float32)
        if biases[0]:
            for i in range(length):
                diagonals[i] = _ZERO
        for query in range(uint64(block)):
            at = item * uint64(block) + query
            row = pointer(logits + uint64(4) * at * size, float32)
            gradient = pointer(gradients + uint64(4) * at * size, float32)
            logsumexp = pointer(sums, float32)[at]
            row_sum = pointer(row_sums, float32)[at]
            first = int64(pointer(low, int32)[begin + query])
            last = int64(pointer(high, int32)[begin + query])
            if biases[0]:
                number = pointer(queries, int64)[item]
                bias = _bias_of(biases, number, blocks, block, query)
                # the last query of a block has the first of its distances to a block of keys
                own = from_element(diagonals, uint64(block) - uint64(1) - query)
                _scores_with_bias(
                    row, gradient, bias, own, keys, width, block, first, last,
                    scale, cap, logsumexp, row_sum,
                )  # fmt: skip
            else:
                _scores(row, gradient, size, scale, cap, logsumexp, row_sum)
            _hide(row, _ZERO, keys, width, block, first, last)
            _hide(gradient, _ZERO, keys, width, block, first, last)
            if precision != FP32:
                store(row, size, probabilities, precision, at * size)
                store(gradient, size, scores, precision, at * size)


@kernel(
    "void(uint64, int64, uint64, int64, UniTuple(uint64, 3), uint64, int64, UniTuple(int64, 4),"
    " uint64)"
)
def _gather(source, precision, target, target_precision, items, count, groups, shape, length):
    """Copy the blocks of the items' keys, of `length` elements each; to fp32, if that is said."""
    starts, queries, plan_keys = items
    blocks, _, width, _ = shape
    place = uint64(0)
    for item in range(count):
        keys = from_element(pointer(plan_keys, int32), uint64(pointer(starts, int64)[item]))
        first = pointer(queries, int64)[item] // blocks // groups * blocks
        for j in range(width):
            start = uint64(first + keys[j]) * length
            if target_precision == FP32:
                wide = pointer(target + uint64(4) * place, float32)
                load(wide, length, source, precision, start)
            else:
                halves = pointer(target + uint64(2) * place, uint16)
                found = pointer(source + uint64(2) * start, uint16)
                for i in range(length):
                    halves[i] = found[i]
            place += length


@kernel(
    "void(uint64, int64, uint64, UniTuple(uint64, 3), uint64, int64, UniTuple(int64, 4), uint64)"
)
def _scatter(gradients, precision, target, items, count, groups, shape, length):
    """Add the blocks of the items' gradients to those of the keys, in fp32, item after item."""
    starts, queries, plan_keys = items
    blocks, _, width, _ = shape
    place = uint64(0)
    for item in range(count):
        keys = from_element(pointer(plan_keys, int32), uint64(pointer(starts, int64)[item]))
        first = pointer(queries, int64)[item] // blocks // groups * blocks
        for j in range(width):
            wide = pointer(target + uint64(4) * uint64(first + keys[j]) * length, float32)
            add(wide, length, gradients, precision, place)
            place += length


@kernel("void(uint64, uint64, UniTuple(uint64, 3), uint64, UniTuple(int64, 4))")
def _add_diagonals(diagonals, target, items, count, shape):
    """Add the sums along the diagonals of the items' blocks to those of their units."""
    starts, queries, plan_keys = items
    blocks, _, width, block = shape
    length = 2 * block - 1
    place = uint64(0)
    for item in range(count):
        keys = from_element(pointer(plan_keys, int32), uint64(pointer(starts, int64)[item]))
        number = pointer(queries, int64)[item]
        of_unit = number // blocks * (2 * blocks * block - 1)
        for j in range(width):
            first = of_unit + (keys[j] - number % blocks + blocks - 1) * block
            wide = pointer(target + uint64(4) * uint64(first), float32)
            add(wide, uint64(length), diagonals, FP32, place)
            place += uint64(length)


class CpuPasses:
    """Passes by numba's kernels, in the calling thread."""

    def __init__(self, plan: Plan, scale: float, cap: float, bias: Tensor | None) -> None:
        self._plan = plan
        self._bias = bias
        self._numbers = scale, cap
        self._starts, self._queries, self._keys, self._low, self._high = (
            array.ctypes.data
            for array in (plan.starts, plan.queries, plan.keys, plan.low, plan.high)
        )

    def _work(self, part: Part) -> tuple[Any, int, Any]:
        first = 8 * part.first
        items = self._starts + first, self._queries + first, self._keys + 4 * part.begin
        shape = self._plan.blocks, self._plan.rows, part.width, self._plan.block
        return items, part.items, shape

    def gather(self, source: Tensor, target: Tensor, part: Part) -> None:
        """Set `target` [items, width * block, head_dim] to the keys' blocks of the source."""
        items, count, shape = self._work(part)
        _gather(
            address_of(source), CODES[source.dtype], address_of(target), CODES[target.dtype],
            items, count, self._plan.groups, shape, source[0].numel(),
        )  # fmt: skip

    def scatter(self, gradients: Tensor, target: Tensor, part: Part) -> None:
        """Add what belongs to the keys' blocks to the target, in fp32."""
        items, count, shape = self._work(part)
        _scatter(
            address_of(gradients), CODES[gradients.dtype], address_of(target),
            items, count, self._plan.groups, shape, target[0].numel(),
        )  # fmt: skip

    def softmax(
        self, logits: Tensor, probabilities: Tensor, sums: Tensor, part: Part
    ) -> None:  # fmt: skip
        """Set the probabilities and the logsumexp of the rows; fp32 probabilities are `logits`."""
        items, count, shape = self._work(part)
        _softmax(
            address_of(logits), address_of(probabilities), CODES[probabilities.dtype],
            address_of(sums), self._low, self._high, items, count, shape, self._biases(None),
            *self._numbers,
        )  # fmt: skip

    def differentiate(
        self, logits: Tensor, gradients: Tensor, probabilities: Tensor, scores: Tensor,
        sums: Tensor, row_sums: Tensor, part: Part, diagonals: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Set probabilities and scores; in fp32 they are `logits` and `gradients`.

        Of a bias, its gradients: sums along the diagonals of each block.
        """
        items, count, shape = self._work(part)
        _differentiate(
            address_of(logits), address_of(gradients), address_of(probabilities),
            address_of(scores), CODES[scores.dtype], address_of(sums), address_of(row_sums),
            self._low, self._high, items, count, shape, self._biases(diagonals), *self._numbers,
        )  # fmt: skip

    def add_diagonals(self, diagonals: Tensor, target: Tensor, part: Part) -> None:
        """Add sums along the diagonals of blocks to those of each unit, in fp32."""
        items, count, shape = self._work(part)
        _add_diagonals(address_of(diagonals), address_of(target), items, count, shape)

    def _biases(self, diagonals: Tensor | None) -> tuple[int, int, int]:
        if self._bias is None:
            return 0, 0, 0
        sums = 0 if diagonals is None else address_of(diagonals)
        return address_of(self._bias), len(self._bias), sums
