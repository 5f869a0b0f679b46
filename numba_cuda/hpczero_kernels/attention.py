"""Causal attention. softmax(q k^T / sqrt(head_dim)) v over the positions up to one's own; q, k, v are [samples, heads, seq, head_dim].

Forward is PyTorch's flash attention (Dao et al. 2022). Its backward on CPUs works with small tiles in scalar code where a sequence is short: there
the probabilities are made again, P = exp(q k^T / sqrt(head_dim) - logsumexp), a few heads at a time, and

    dv = P^T do;   dS = P (do v^T - rowsum(do o));   dq = dS k / sqrt(head_dim);   dk = dS^T q / sqrt(head_dim)

as batched products, which use the processor's bf16 units. Long sequences, fp32 and other devices keep PyTorch's.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_LONGEST = 256  # positions up to which the products were measured faster (docs/benchmarks.md)
_TILE = 1 << 18  # probabilities at a time: they stay in a core's cache


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As attention_reference, up to rounding."""
    if not (torch.is_grad_enabled() and supports(q)):
        return attention_reference(q, k, v)
    return _Attention.apply(q, k, v)


def supports(q: Tensor) -> bool:
    fits = q.numel() > 0 and q.shape[2] <= _LONGEST
    return (
        fits
        and q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True
        )
        context.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *saved, logsumexp = context.saved_tensors
        samples, heads, seq, head_dim = gradient.shape
        q, k, v, out, above = (tensor.reshape(-1, seq, head_dim) for tensor in (*saved, gradient))
        shift, rows = (
            logsumexp.reshape(-1, seq, 1),
            (above.float() * out.float()).sum(-1, keepdim=True),
        )
        future = torch.full((seq, seq), float("-inf"), dtype=torch.float32).triu_(1)
        of_q, of_k, of_v = (torch.empty_like(q) for _ in range(3))
        scale, step = 1.0 / sqrt(head_dim), max(1, _TILE // (seq * seq))
        for start in range(0, samples * heads, step):
            some = slice(start, start + step)
            # these two in fp32, as forward has them: logits that were rounded do not fit to its logsumexp, nor do rounded ones below to `rows`
            logits = torch.bmm(q[some].float(), k[some].float().transpose(1, 2))
            probabilities = logits.mul_(scale).sub_(shift[some]).add_(future).exp_()
            torch.bmm(probabilities.to(q.dtype).transpose(1, 2), above[some], out=of_v[some])
            scores = (
                torch.bmm(above[some].float(), v[some].float().transpose(1, 2))
                .sub_(rows[some])
                .mul_(probabilities)
                .mul_(scale)
                .to(q.dtype)
            )
            torch.bmm(scores, k[some], out=of_q[some])
            torch.bmm(scores.transpose(1, 2), q[some], out=of_k[some])
        of_q, of_k, of_v = (
            tensor.view(samples, heads, seq, head_dim) for tensor in (of_q, of_k, of_v)
        )
        return of_q, of_k, of_v
