"""Operations of models, by the spec's word: hpczero's kernels where chosen ("auto"), or PyTorch's.

"torch" has PyTorch's operations alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.cross_entropy import cross_entropy, cross_entropy_reference
from hpczero_kernels.dispatch import TORCH
from hpczero_kernels.dropout import dropout
from hpczero_kernels.elementwise import (
    gelu,
    gelu_reference,
    rotary,
    rotary_reference,
    swiglu,
    swiglu_reference,
)
from hpczero_kernels.norm import (
    add_layer_norm,
    add_layer_norm_reference,
    add_rms_norm,
    add_rms_norm_reference,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)

# Causal attention: softmax(q k^T / sqrt(head_dim)) v over the positions up to the query's own.
#
# Legend: q, k, v [samples, heads, seq, head_dim].
#
# Forward is PyTorch's flash attention (Dao et al. 2022). PyTorch's backward on CPUs works with
# small tiles in scalar code where a sequence is short. There the backward of this module
# computes the probabilities again, P = exp(q k^T / sqrt(head_dim) - logsumexp), a few heads
# at a time, and
#
#     dv = P^T do;   dS = P (do v^T - rowsum(do o))
#     dq = dS k / sqrt(head_dim);   dk = dS^T q / sqrt(head_dim)
#
# as batched products, which use the processor's bf16 units. Long sequences, fp32 and other devices
# keep PyTorch's backward.
_LONGEST = 256  # positions up to which the products were measured faster (docs/benchmarks.md)
_TILE = 1 << 18  # probabilities at a time: they stay in a core's cache


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention_reference(q, k, v), up to rounding."""
    if not (torch.is_grad_enabled() and supports(q)):
        return attention_reference(q, k, v)
    return _Attention.apply(q, k, v)


def supports(q: Tensor) -> bool:
    """Return True if this module's backward is the faster one for such a q."""
    return (
        q.numel() > 0
        and q.shape[2] <= _LONGEST
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
        q, k, v, out, grad_out = (
            tensor.reshape(-1, seq, head_dim) for tensor in (*saved, gradient)
        )
        shift = logsumexp.reshape(-1, seq, 1)
        row_sums = (grad_out.float() * out.float()).sum(-1, keepdim=True)
        mask = torch.full((seq, seq), float("-inf"), dtype=torch.float32).triu_(1)
        grad_q, grad_k, grad_v = (torch.empty_like(q) for _ in range(3))
        scale = 1.0 / sqrt(head_dim)
        heads_at_once = max(1, _TILE // (seq * seq))
        for start in range(0, samples * heads, heads_at_once):
            chunk = slice(start, start + heads_at_once)
            # Both products to fp32, as in forward: rounded logits do not fit its logsumexp, nor do
            # rounded products with v fit `row_sums`.
            logits = torch.bmm(q[chunk].float(), k[chunk].float().transpose(1, 2))
            probabilities = logits.mul_(scale).sub_(shift[chunk]).add_(mask).exp_()
            torch.bmm(probabilities.to(q.dtype).transpose(1, 2), grad_out[chunk], out=grad_v[chunk])
            scores = torch.bmm(grad_out[chunk].float(), v[chunk].float().transpose(1, 2))
            scores = scores.sub_(row_sums[chunk]).mul_(probabilities).mul_(scale).to(q.dtype)
            torch.bmm(scores, k[chunk], out=grad_q[chunk])
            torch.bmm(scores.transpose(1, 2), q[chunk], out=grad_k[chunk])
        shape = gradient.shape
        return grad_q.view(shape), grad_k.view(shape), grad_v.view(shape)


@dataclass(frozen=True)
class Operations:
    attention: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    gelu: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    dropout: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    rotary: Callable[..., Tensor]


AUTO = Operations(
    attention,
    layer_norm,
    rms_norm,
    add_layer_norm,
    add_rms_norm,
    gelu,
    swiglu,
    dropout,
    cross_entropy,
    rotary,
)
PYTORCH = Operations(
    attention_reference,
    layer_norm_reference,
    rms_norm_reference,
    add_layer_norm_reference,
    add_rms_norm_reference,
    gelu_reference,
    swiglu_reference,
    partial(dropout, implementation=TORCH),
    cross_entropy_reference,
    rotary_reference,
)
OPERATIONS = {"auto": AUTO, "torch": PYTORCH}
