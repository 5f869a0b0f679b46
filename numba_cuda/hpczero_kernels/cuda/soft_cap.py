"""Soft cap of logits (`hpczero_kernels.soft_cap`), each direction in one pass."""

import torch
from numba import float32, uint32

from hpczero_kernels.cpu import CODES
from hpczero_kernels.cuda.elementwise import tanh_of
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    NUMBER,
    THREADS,
    aligned,
    blocks,
    kernel,
)
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import EIGHT, fetch, load, own_column, store, widen


@kernel(ADDRESS, ADDRESS, CODE, COUNT, NUMBER, CODE)
def forward(x, y, precision, count, cap, is_aligned):
    numbers = cuda.local.array(EIGHT, float32)
    index = own_column()
    if index >= count:
        return
    left = count - index
    load(numbers, x, precision, index, left, is_aligned)
    for i in range(EIGHT):
        numbers[i] = cap * tanh_of(numbers[i] / cap)
    store(numbers, y, precision, index, left, is_aligned)


@kernel(ADDRESS, ADDRESS, ADDRESS, CODE, COUNT, NUMBER, CODE)
def backward(gradient, x, grad_x, precision, count, cap, is_aligned):
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    numbers = cuda.local.array(EIGHT, float32)
    g = cuda.local.array(EIGHT, float32)
    index = own_column()
    if index >= count:
        return
    left = count - index
    fetch(words, x, precision, index, left, is_aligned)
    fetch(more, gradient, precision, index, left, is_aligned)
    widen(numbers, words, precision)
    widen(g, more, precision)
    for i in range(EIGHT):
        t = tanh_of(numbers[i] / cap)
        g[i] -= g[i] * t * t
    store(g, grad_x, precision, index, left, is_aligned)


def soft_cap_forward(x: torch.Tensor, cap: float) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    forward.launch(
        (blocks(x.numel(), THREADS * EIGHT), 1), THREADS,
        x.data_ptr(), y.data_ptr(), CODES[x.dtype], x.numel(), cap, aligned(x, y),
    )  # fmt: skip
    return y


def soft_cap_backward(gradient: torch.Tensor, x: torch.Tensor, cap: float) -> torch.Tensor:
    gradient = gradient.contiguous()
    x = x.contiguous()
    grad_x = torch.empty_like(x)
    backward.launch(
        (blocks(x.numel(), THREADS * EIGHT), 1), THREADS,
        gradient.data_ptr(), x.data_ptr(), grad_x.data_ptr(), CODES[x.dtype], x.numel(), cap,
        aligned(gradient, x, grad_x),
    )  # fmt: skip
    return grad_x
