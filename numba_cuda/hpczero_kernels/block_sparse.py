"""Block-sparse attention: softmax(q k^T scale) v over the blocks of keys that a layout shows.

A layout (`block_layout`) says which blocks of keys each block of queries sees; in a causal one a
query sees no key behind its own. It sees keys of its own document alone, and a row that sees
nothing gives 0. With a `cap` the logits are cap tanh(logits / cap), and a `bias` for each head and
distance is added to them (T5).

On CPUs the blocks of keys of a chunk of items (`block_sparse_plan`) are gathered, so that

    S = q k^T;  P = softmax(S);  o = P v                                              (forward)
    dP = do v^T;  dS = P (dP - rowsum(do o)) scale;  dq = dS k;  dk = dS^T q;  dv = P^T do

are batched products of what stays in a core's cache, with one pass between the products. P is
computed again from the logsumexp (Dao et al. 2022). Of half precision, S and dP are products in
fp32, for which see `attention`. Items of many keys go part by part; parts of o are merged by their
logsumexp, so that memory does not grow with a row. The gradients of keys are added up in fp32, in
the order of the chunks, whichever thread computes one: no number of threads changes a bit. So are
those of a bias: P (dP - rowsum(do o)), summed along the diagonals of each block.

On GPUs it is PyTorch's flex attention (`block_sparse_flex`), or the same chunks: always with a
bias, whose gradients flex attention would add up in any order.

Legend: q [samples, heads, seq, head_dim], k and v [samples, kv_heads, seq, head_dim]; in blocks
[samples * heads * blocks, block, head_dim]; bias [heads, distances], a distance being the position
of a key less that of a query, from 1 - seq to seq - 1.
"""

from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.block_layout import BlockLayout
from hpczero_kernels.block_sparse_plan import Documents, Plan, plan_of
from hpczero_kernels.block_sparse_work import Work
from hpczero_kernels.dispatch import FLEX, choose, upcast_half


def block_sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    documents: Documents | None = None,
    cap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    samples, heads, seq, head_dim = q.shape
    if not heads:
        return q + k + v if bias is None else q + k + v + bias.sum()
    scale = 1.0 / sqrt(head_dim) if scale is None else scale
    k, v = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (k, v))
    logits = upcast_half(q @ k.transpose(2, 3)) * scale
    if cap:
        logits = (logits / cap).tanh() * cap
    if bias is not None:
        at = torch.arange(seq, dtype=torch.int64, device=q.device)
        logits = logits + bias[:, at - at[:, None] + seq - 1].to(logits.dtype)
    hidden = ~_visible(layout, samples, seq, documents).to(q.device)
    blind = hidden.all(-1, keepdim=True)  # its softmax would be NaN, and so would its gradient
    weights = logits.masked_fill(hidden & ~blind, -inf).softmax(-1).masked_fill(blind, 0.0)
    return weights.to(v.dtype) @ v


def _visible(layout: BlockLayout, samples: int, seq: int, documents: Documents | None) -> Tensor:
    """Return a mask, True where a query (row) sees a key: [samples, heads, seq, seq]."""
    blocks = -(-seq // layout.block)
    shown = torch.zeros((len(layout.patterns), blocks, blocks), dtype=torch.bool)
    for number, pattern in enumerate(layout.patterns):
        for row, columns in enumerate(pattern):
            shown[number, row, list(columns)] = True
    at = torch.arange(seq, dtype=torch.int64)
    sees = shown[list(layout.of_head)][:, at // layout.block][:, :, at // layout.block]
    if layout.causal:
        sees = sees & (at[:, None] >= at)
    if documents is None:
        return sees.expand(samples, -1, -1, -1)
    ends = [torch.tensor(of_sample, dtype=torch.int64) for of_sample in documents]
    numbers = torch.stack([torch.bucketize(at, end, right=True) for end in ends])
    return sees & (numbers[:, None, :, None] == numbers[:, None, None, :])


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    documents: Documents | None = None,
    cap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return block_sparse_attention_reference of the same, up to rounding."""
    scale = 1.0 / sqrt(q.shape[-1]) if scale is None else scale
    if bias is None and choose("block_sparse", q) == FLEX and q.numel():
        from hpczero_kernels.block_sparse_flex import flex_block_sparse

        out = flex_block_sparse(q, k, v, layout, documents, cap, scale)
        if out is not None:
            return out
    samples, heads, seq, _ = q.shape
    plan = plan_of(layout, samples, heads, k.shape[1], seq, documents)
    return _BlockSparse.apply(q, k, v, bias, plan, scale, cap)


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, plan: Plan,
        scale: float, cap: float,
    ) -> Tensor:  # fmt: skip
        work = _work(plan, scale, cap, (q, k, v), bias)
        blocks, sums = work.forward()
        out, logsumexp = (_from_blocks(made, q) for made in (blocks, sums.unsqueeze(-1)))
        # laid out as the next product reads it, which then keeps nothing of its own
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        context.save_for_backward(q, k, v, bias, out, logsumexp)
        context.given = plan, scale, cap
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, logsumexp = context.saved_tensors
        plan, scale, cap = context.given
        work = _work(plan, scale, cap, (q, k, v), bias)
        above, out, logsumexp = (_in_blocks(one, plan) for one in (gradient, out, logsumexp))
        gradients, of_units = work.backward(above, out, logsumexp.squeeze(-1))
        of_inputs = map(_from_blocks, gradients, (q, k, v))
        of_bias = None if of_units is None else _of_heads(of_units, bias)
        return *of_inputs, of_bias, None, None, None


def _in_blocks(tensor: Tensor, plan: Plan) -> Tensor:
    """Return [samples, heads, seq, columns] as blocks, the last of a head with zeros at its end."""
    samples, heads, seq, columns = tensor.shape
    if seq < plan.blocks * plan.block:
        whole = tensor.new_zeros(samples, heads, plan.blocks * plan.block, columns)
        whole[:, :, :seq] = tensor
        tensor = whole
    return tensor.contiguous().view(samples * heads * plan.blocks, plan.block, columns)


def _work(
    plan: Plan, scale: float, cap: float, parts: tuple[Tensor, ...], bias: Tensor | None
) -> Work:
    q, k, v = (_in_blocks(tensor, plan) for tensor in parts)
    if bias is not None:  # of the distances within whole blocks; those that are not there have 0
        padding = (2 * plan.blocks * plan.block - 1 - bias.shape[1]) // 2
        wide = torch.promote_types(q.dtype, torch.float32)
        bias = functional.pad(bias.to(wide), (padding, padding)).contiguous()
    return Work(plan, scale, cap, q, k, v, bias)


def _of_heads(of_units: Tensor, bias: Tensor) -> Tensor:
    """Return a bias's gradient from those of each head of each sample, sample after sample."""
    heads, distances = bias.shape
    padding = (of_units.shape[1] - distances) // 2
    total = of_units.new_zeros(heads, distances)
    for first in range(0, len(of_units), max(1, heads)):
        total += of_units[first : first + heads, padding : padding + distances]
    return total.to(bias.dtype)


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Return blocks as [samples, heads, seq, columns], with the first three of another tensor."""
    samples, heads, seq = like.shape[:3]
    if not blocks.numel():
        return blocks.new_zeros(samples, heads, seq, blocks.shape[-1])
    return blocks.view(samples, heads, -1, blocks.shape[-1])[:, :, :seq]
