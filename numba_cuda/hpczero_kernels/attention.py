"""Attention: softmax(q k^T scale) v over the keys that a query may see.

A query sees the keys of its own document; `causal`: up to its own position alone, and no more than
`window` of them. Nothing makes a mask of seq x seq: the positions are cut into tiles, each with the
rows of some queries and the keys that they see.

A key's head serves heads / kv_heads queries' heads (Ainslie et al. 2023). With a `cap` the logits
are cap tanh(logits / cap) (Gemma 2).

Forward is PyTorch's flash attention (Dao et al. 2022), a tile at a time. PyTorch's backward on CPUs
works with small tiles in scalar code where a sequence is short. There, and where logits are
capped, this module computes the probabilities again, P = exp(logits - logsumexp), a few heads at a
time, and

    dv = P^T do;   dS = P (do v^T - rowsum(do o))
    dq = dS k scale;   dk = dS^T q scale

as batched products, which use the processor's bf16 units.

Legend: q [samples, heads, seq, head_dim], k and v [samples, kv_heads, seq, head_dim]. `documents`
has, for each sample, the ends of its documents, the last of them seq.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

Documents = Sequence[Sequence[int]]

_LONGEST = 256  # positions up to which the products were measured faster (docs/benchmarks.md)
_TILE = 1 << 18  # probabilities at a time: they stay in a core's cache
_ROWS = 1024  # queries of a tile whose logits are capped


@dataclass(frozen=True)
class Reach:
    """The keys that a query sees; `window` 0: all before it. `cap` 0: logits as they are.

    Not `causal`: those behind it, too, and there is no window.
    """

    documents: Documents | None
    window: int
    cap: float
    scale: float
    causal: bool = True

    def __call__(self, seq: int, device: torch.device) -> Tensor:
        """Return a mask, True where a query (row) sees a key: [samples or 1, 1, seq, seq]."""
        at = torch.arange(seq, dtype=torch.int64, device=device)
        sees = torch.ones(seq, seq, dtype=torch.bool, device=device)
        if self.causal:
            sees = sees.tril()
        if self.window:
            sees &= at[:, None] - at < self.window
        if self.documents is None:
            return sees[None, None]
        ends = [
            torch.tensor(list(of_sample), dtype=torch.int64, device=device)
            for of_sample in self.documents
        ]
        numbers = torch.stack([torch.bucketize(at, end, right=True) for end in ends])
        return sees & (numbers[:, None, :, None] == numbers[:, None, None, :])


@dataclass(frozen=True)
class Tile:
    """Queries `rows` of some samples, and the `keys` that they see, all or `window` of them."""

    samples: slice
    rows: slice
    keys: slice
    window: int = 0
    causal: bool = True

    def mask(self, q: Tensor) -> Tensor | None:
        """Return 0 where a row sees a key and -inf elsewhere.

        None: each sees those up to its own, or all of the tile's if that is not causal.
        """
        if not self.causal or (self.rows == self.keys and not self.window):
            return None
        return _band(
            self.rows.stop - self.rows.start,
            self.keys.stop - self.keys.start,
            self.window,
            q.dtype,
            q.device,
        )


def _band(rows: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of the last `rows` of `keys` positions; `window` 0: of any width."""
    row = torch.arange(keys - rows, keys, dtype=torch.int64, device=device)[:, None]
    key = torch.arange(keys, dtype=torch.int64, device=device)
    sees = key <= row
    if window:
        sees &= row - key < window
    return torch.zeros(rows, keys, dtype=dtype, device=device).masked_fill_(~sees, -inf)


def tiles(reach: Reach, samples: int, seq: int) -> Iterator[Tile]:
    """Yield tiles that hold each pair of a query and a key that it sees once."""
    if reach.documents is None:
        yield from _stretch(slice(0, samples), 0, seq, reach)
        return
    assert len(reach.documents) == samples, (len(reach.documents), samples)
    for sample, ends in enumerate(reach.documents):
        for begin, end in zip((0, *ends), ends, strict=False):
            yield from _stretch(slice(sample, sample + 1), begin, end, reach)


def _stretch(samples: slice, begin: int, end: int, reach: Reach) -> Iterator[Tile]:
    length = end - begin
    window = reach.window if reach.window < length else 0
    rows = max(window, 128) if window else length
    if reach.cap:
        rows = min(rows, _ROWS)
    for first in range(begin, end, max(1, rows)):
        last = min(first + rows, end)
        first_key = max(begin, first - window + 1) if window else begin
        keys = slice(first_key, last if reach.causal else end)
        yield Tile(samples, slice(first, last), keys, window, reach.causal)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None = None,
    window: int = 0,
    cap: float = 0.0,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    if not q.shape[1]:  # no head on this tensor rank: PyTorch's attention may end the process
        return q + k + v
    groups = q.shape[1] // k.shape[1]
    if documents is None and not window and not cap:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    scale = 1.0 / sqrt(q.shape[-1]) if scale is None else scale
    logits = (q @ k.repeat_interleave(groups, 1).transpose(2, 3)).float() * scale
    if cap:
        logits = (logits / cap).tanh() * cap
    sees = Reach(documents, window, cap, scale, causal)(q.shape[2], q.device)
    probabilities = logits.masked_fill(~sees, -inf).softmax(-1).to(v.dtype)
    return probabilities @ v.repeat_interleave(groups, 1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None = None,
    window: int = 0,
    cap: float = 0.0,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Return attention_reference of the same, up to rounding."""
    assert causal or not window, f"a window of {window} keys behind and before a query"
    seq = q.shape[2]
    whole = documents is None or all(len(ends) == 1 for ends in documents)
    # a tensor rank without heads has nothing to mask, and PyTorch's flash attention ends on none
    plain = q.shape[1] == 0 or (whole and not cap and not 0 < window < seq)
    if plain and not (torch.is_grad_enabled() and supports(q)):
        return attention_reference(q, k, v, scale=scale, causal=causal)
    default = 1.0 / sqrt(q.shape[-1])
    scale = default if scale is None else scale
    reach = Reach(None if whole else documents, window, cap, scale, causal)
    return _Attention.apply(q, k, v, reach)


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
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> Tensor:
        compute = _capped if reach.cap else _flash
        pieces = list(tiles(reach, q.shape[0], q.shape[2]))
        if len(pieces) == 1:
            out, logsumexp = compute(*_of_tile(q, k, v, pieces[0]), pieces[0].mask(q), reach)
        else:
            # laid out as the next product reads it
            out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
            out = out.transpose(1, 2)
            logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
        for tile in pieces if len(pieces) > 1 else ():
            made, sums = compute(*_of_tile(q, k, v, tile), tile.mask(q), reach)
            out[tile.samples, :, tile.rows] = made
            logsumexp[tile.samples, :, tile.rows] = sums
        context.save_for_backward(q, k, v, out, logsumexp)
        context.reach = reach
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = context.saved_tensors
        reach = context.reach
        groups = q.shape[1] // k.shape[1]
        pieces = list(tiles(reach, q.shape[0], q.shape[2]))
        if len(pieces) == 1 and groups == 1:
            way = _by_products if reach.cap or supports(q) else _by_flash
            mask = pieces[0].mask(q)
            return *way(gradient, q, k, v, out, logsumexp, mask, reach), None
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(tensor) for tensor in (k, v))
        for tile in pieces:
            own = tile.samples, slice(None), tile.rows
            seen = tile.samples, slice(None), tile.keys
            part = _of_tile(q, k, v, tile)
            way = _by_products if reach.cap or supports(part[0]) else _by_flash
            for_q, *for_keys = way(
                gradient[own], *part, out[own], logsumexp[own], tile.mask(q), reach
            )
            grad_q[own] = for_q
            for total, made in zip((grad_k, grad_v), for_keys, strict=True):
                shared = made.unflatten(1, (-1, groups)).sum(2) if groups > 1 else made
                total[seen] += shared
        return grad_q, grad_k, grad_v, None


def _of_tile(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tile's queries, keys and values, those of a head for each head of q."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (tensor[tile.samples, :, tile.keys] for tensor in (k, v))
    if groups > 1:
        keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (keys, values))
    return q[tile.samples, :, tile.rows], keys, values


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, reach: Reach
) -> tuple[Tensor, Tensor]:
    """Return a tile's result and logsumexp by PyTorch's flash attention."""
    if q.device.type != "cpu":
        return _capped(q, k, v, mask, reach)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None and reach.causal, attn_mask=mask, scale=reach.scale
    )
    return out, sums


def _by_flash(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    mask: Tensor | None, reach: Reach,
) -> tuple[Tensor, ...]:  # fmt: skip
    if q.device.type != "cpu":
        return _by_products(gradient, q, k, v, out, sums, mask, reach)
    gradients: tuple[Tensor, ...] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            q,
            k,
            v,
            out,
            sums,
            0.0,
            mask is None and reach.causal,
            attn_mask=mask,
            scale=reach.scale,
        )
    )
    return gradients


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, reach: Reach) -> tuple[Tensor, Tensor]:
    """Return the logits of some heads in fp32, and the same before the mask.

    Both products to fp32, as in flash attention: rounded logits do not fit its logsumexp, nor do
    rounded products with v fit the row sums.
    """
    plain = torch.bmm(q.float(), k.float().transpose(1, 2)).mul_(reach.scale)
    if reach.cap:
        plain = plain.div_(reach.cap).tanh_().mul_(reach.cap)
    if mask is None and not reach.causal:
        return (plain.clone() if reach.cap else plain), plain
    rows, keys = plain.shape[1:]
    hidden = _band(rows, keys, 0, torch.float32, q.device) if mask is None else mask.float()
    return (plain + hidden if reach.cap else plain.add_(hidden)), plain


def _capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, reach: Reach
) -> tuple[Tensor, Tensor]:
    samples, heads, rows, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format).flatten(0, 1)
    sums = q.new_empty(samples * heads, rows, dtype=torch.float32)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    for chunk in _chunks(q, k):
        logits, _ = _logits(q[chunk], k[chunk], mask, reach)
        torch.logsumexp(logits, -1, out=sums[chunk])
        probabilities = logits.sub_(sums[chunk].unsqueeze(-1)).exp_()
        torch.bmm(probabilities.to(v.dtype), v[chunk], out=out[chunk])
    return out.unflatten(0, (samples, heads)), sums.unflatten(0, (samples, heads))


def _by_products(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
    mask: Tensor | None, reach: Reach,
) -> tuple[Tensor, ...]:  # fmt: skip
    shapes = q.shape[:2]
    q, k, v, out, grad_out = (tensor.flatten(0, 1) for tensor in (q, k, v, out, gradient))
    shift = sums.flatten(0, 1).unsqueeze(-1)
    row_sums = (grad_out.float() * out.float()).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)
    )
    for chunk in _chunks(q, k):
        logits, capped = _logits(q[chunk], k[chunk], mask, reach)
        probabilities = logits.sub_(shift[chunk]).exp_()
        torch.bmm(probabilities.to(q.dtype).transpose(1, 2), grad_out[chunk], out=grad_v[chunk])
        scores = torch.bmm(grad_out[chunk].float(), v[chunk].float().transpose(1, 2))
        scores = scores.sub_(row_sums[chunk]).mul_(probabilities).mul_(reach.scale)
        if reach.cap:
            scores.mul_(1.0 - (capped / reach.cap).square_())
        scores = scores.to(q.dtype)
        torch.bmm(scores, k[chunk], out=grad_q[chunk])
        torch.bmm(scores.transpose(1, 2), q[chunk], out=grad_k[chunk])
    return tuple(tensor.unflatten(0, shapes) for tensor in (grad_q, grad_k, grad_v))


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield the heads of a tile that are worked on together."""
    heads_at_once = max(1, _TILE // max(1, q.shape[1] * k.shape[1]))
    for start in range(0, len(q), heads_at_once):
        yield slice(start, start + heads_at_once)
