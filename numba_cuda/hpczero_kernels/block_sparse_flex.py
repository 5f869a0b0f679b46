"""Block-sparse attention on GPUs: PyTorch's flex attention, compiled (Dong et al. 2024).

Its kernels work with tiles of 128 positions, whatever the layout's blocks are. A tile in which all
pairs are visible is computed without a mask; one in which some are asks `visible`, which looks at
the layout's blocks and at the intervals of `block_sparse_plan`; the others are left out.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpczero_kernels.block_layout import BlockLayout
from hpczero_kernels.block_sparse_plan import Documents, ends_of, intervals

_TILE = 128
_LOG = logging.getLogger("hpczero_kernels")
_Mask = NDArray[np.bool_]
_MOST = 64  # cases that are compiled in a process
_taken: set[tuple[Any, ...]] = set()
_refused: set[tuple[Any, ...]] = set()  # of these, what flex attention has refused


def flex_block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    documents: Documents | None,
    cap: float,
    scale: float,
) -> Tensor | None:
    """Return block-sparse attention, or None where flex attention cannot do it.

    It compiles for each case, and a head_dim may ask for more shared memory than the GPU has; some
    PyTorch does not have it. What was refused once is not tried again, and past a number of cases
    PyTorch would not compile any more, but make the whole matrix of scores.
    """
    case = q.dtype, q.shape, k.shape[1], len(layout.patterns), cap, torch.is_grad_enabled()
    if case in _refused or (case not in _taken and len(_taken) == _MOST):
        return None
    compiles = nullcontext() if case in _taken else _with_backward()
    _taken.add(case)
    try:
        attention = _compiled()
        mask = mask_of(layout, q.shape[0], q.shape[2], documents, q.device)
        capped = _capped(cap) if cap else None
        grouped = q.shape[1] != k.shape[1]
        with compiles:
            return attention(q, k, v, capped, mask, scale, grouped)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler has a kind of its own for every reason
        _refused.add(case)
        _LOG.warning("block-sparse attention without flex attention: %s", error)
        return None


def _with_backward() -> AbstractContextManager[Any]:
    """Have backward compiled with forward, which shows at once that it is refused."""
    from torch._functorch import config

    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else nullcontext()


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, limit, max(getattr(config, limit), 4 * _MOST))
    return torch.compile(flex_attention, dynamic=False)


@cache
def _capped(cap: float) -> Callable[..., Tensor]:
    """Return the function that caps a score; the same one each time, for the compiler."""

    def capped(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def mask_of(
    layout: BlockLayout, samples: int, seq: int, documents: Documents | None, device: torch.device
) -> Any:
    """Return the layout as a BlockMask for flex attention, a kept one if there is one."""
    key = samples, seq, ends_of(documents, samples), device
    return layout.kept("mask", key, lambda: _made(layout, *key))


def _made(
    layout: BlockLayout, samples: int, seq: int, documents: Documents | None, device: torch.device
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    all_ends = [[seq]] if documents is None else documents
    shown = _shown(layout)
    some, whole = (np.stack(both) for both in zip(
        *(tiles_of(layout, shown, seq, *intervals(layout, seq, ends)) for ends in all_ends),
        strict=True,
    ))  # fmt: skip
    of_head = list(layout.of_head) if len(layout.patterns) > 1 else [0]
    few, all_pairs = (
        _numbers(torch.from_numpy(tiles[:, of_head]).to(device)) for tiles in (some & ~whole, whole)
    )
    visible = _visible(layout, shown, samples, seq, all_ends, device)
    return BlockMask.from_kv_blocks(
        *few, *all_pairs, BLOCK_SIZE=_TILE, mask_mod=visible, seq_lengths=(seq, seq)
    )


def _shown(layout: BlockLayout) -> _Mask:
    """Return which blocks of keys each block of queries sees: [patterns, blocks, blocks]."""
    blocks = len(layout.patterns[0])
    shown = np.zeros((len(layout.patterns), blocks, blocks), np.bool_)
    for number, pattern in enumerate(layout.patterns):
        for row, columns in enumerate(pattern):
            shown[number, row, list(columns)] = True
    return shown


def _numbers(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles a row has, and their numbers before all others."""
    order = tiles.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.to(torch.int32)


def tiles_of(
    layout: BlockLayout, shown: _Mask, seq: int, low: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[_Mask, _Mask]:
    """Return the tiles of which some pairs may be visible, and those of which all are.

    `shown`: [patterns, blocks, blocks]; both results: [patterns, tiles, tiles].
    """
    begin = np.arange(0, seq, _TILE, dtype=np.int64)
    last = np.minimum(begin + _TILE, seq) - 1
    first_block, end_block = begin // layout.block, last // layout.block + 1
    inside = np.stack([_counts(pattern, first_block, end_block) for pattern in shown])
    sizes = end_block - first_block
    some = (begin < high[last][:, None]) & (last >= low[begin][:, None])
    whole = (begin >= low[last][:, None]) & (last < high[begin][:, None])
    within = begin + _TILE <= seq  # a tile that juts out is masked, as create_block_mask has it
    whole &= within[:, None] & within
    return (inside > 0) & some, (inside == sizes[:, None] * sizes) & whole


def _counts(shown: _Mask, first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return how many blocks each tile shows, of rows and columns from `first` to `end`."""
    # sums over all blocks before a row and a column, so that those of a tile are four look-ups
    sums = np.pad(shown.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32), ((1, 0), (1, 0)))
    rows = sums[end] - sums[first]
    return rows[:, end] - rows[:, first]


def _visible(
    layout: BlockLayout, shown: _Mask, samples: int, seq: int, all_ends: Documents,
    device: torch.device,
) -> Callable[..., Tensor]:  # fmt: skip
    """Return the function that says which pairs are visible, of tensors of their indices."""
    block = layout.block
    blocks = torch.from_numpy(shown).to(device)
    patterns = torch.tensor(layout.of_head, dtype=torch.int64, device=device)
    of_samples = zip(*(intervals(layout, seq, ends) for ends in all_ends), strict=True)
    low, high = (
        torch.from_numpy(np.stack(both)).to(device, torch.int32).expand(samples, -1).contiguous()
        for both in of_samples
    )

    def visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        within = (key >= low[sample, query]) & (key < high[sample, query])
        return blocks[patterns[head], query // block, key // block] & within

    return visible
