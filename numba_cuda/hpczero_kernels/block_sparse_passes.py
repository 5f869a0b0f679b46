"""Passes of block-sparse attention between its products, in PyTorch's operations, on any device.

They are the reference of `block_sparse_cpu`. Results go into tensors that are given.
"""

from math import inf

import torch
from torch import Tensor

from hpczero_kernels.block_sparse_plan import Part, Plan
from hpczero_kernels.relative_attention import along_diagonals


class TorchPasses:
    """Passes over the items of a chunk, or over a part of their blocks of keys."""

    def __init__(
        self, plan: Plan, scale: float, cap: float, bias: Tensor | None, device: torch.device
    ) -> None:
        self._plan = plan
        self._scale = scale
        self._cap = cap
        self._bias = bias
        self._starts, self._queries, self._keys, self._low, self._high = (
            torch.from_numpy(array).to(device)
            for array in (plan.starts, plan.queries, plan.keys, plan.low, plan.high)
        )

    def gather(self, source: Tensor, target: Tensor, part: Part) -> None:
        """Set `target` [items, width * block, head_dim] to the keys' blocks of the source."""
        found = source.index_select(0, self._keys_of(part)[0].flatten())
        target.copy_(found.view_as(target))

    def scatter(self, gradients: Tensor, target: Tensor, part: Part) -> None:
        """Add what belongs to the keys' blocks to the target, in fp32."""
        addends = gradients.to(target.dtype).view(-1, *target.shape[1:])
        target.index_add_(0, self._keys_of(part)[0].flatten(), addends)

    def softmax(
        self, logits: Tensor, probabilities: Tensor, sums: Tensor, part: Part
    ) -> None:  # fmt: skip
        """Set the rows' probabilities and logsumexp; of a row that sees nothing 0 and -inf."""
        capped, _ = self._capped(logits)
        if self._bias is not None:
            capped += self._bias_of(self._bias, part)
        capped = capped.masked_fill_(self._hidden(part), -inf)
        sums.copy_(capped.logsumexp(-1))
        shift = sums.masked_fill(sums == -inf, 0.0).unsqueeze(-1)
        probabilities.copy_(capped.sub_(shift).exp_())

    def differentiate(
        self, logits: Tensor, gradients: Tensor, probabilities: Tensor, scores: Tensor,
        sums: Tensor, row_sums: Tensor, part: Part, diagonals: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Set the probabilities again, and the scores: gradients of the products q k.

        Of a bias, its gradients: sums along the diagonals of each block.
        """
        capped, slope = self._capped(logits)
        if self._bias is not None:
            capped += self._bias_of(self._bias, part)
        hidden = self._hidden(part)
        powers = capped.sub_(sums.unsqueeze(-1)).exp_().masked_fill_(hidden, 0.0)
        made = (gradients - row_sums.unsqueeze(-1)).mul_(powers)
        if diagonals is not None:
            of_blocks = made.unflatten(2, (part.width, -1)).transpose(1, 2).flatten(0, 1)
            diagonals.copy_(along_diagonals(of_blocks).view_as(diagonals))
        probabilities.copy_(powers)
        scores.copy_(made.mul_(slope))

    def add_diagonals(self, diagonals: Tensor, target: Tensor, part: Part) -> None:
        """Add sums along the diagonals of blocks to those of each unit, in fp32."""
        units = self._queries[part.first : part.last] // self._plan.blocks
        places = self._distances(part) + (units * target.shape[1])[:, None, None]
        target.view(-1).index_add_(0, places.flatten(), diagonals.flatten())

    def _capped(self, logits: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the logits, scaled and capped, and their derivative by the products q k."""
        if not self._cap:
            return logits * self._scale, self._scale
        level = (logits * (self._scale / self._cap)).tanh_()
        return level * self._cap, (1.0 - level.square()) * self._scale

    def _keys_of(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return the blocks of each item among all heads' blocks, and within a head."""
        items = slice(part.first, part.last)
        places = torch.arange(part.begin, part.end, dtype=torch.int64, device=self._keys.device)
        own = self._keys[self._starts[items, None] + places].long()
        units = self._queries[items] // self._plan.blocks // self._plan.groups
        return own + (units * self._plan.blocks)[:, None], own

    def _distances(self, part: Part) -> Tensor:
        """Return the numbers of the distances in each block: [items, width, 2 block - 1]."""
        block, blocks = self._plan.block, self._plan.blocks
        rows = self._queries[part.first : part.last, None] % blocks
        first = (self._keys_of(part)[1] - rows + blocks - 1) * block
        within = torch.arange(2 * block - 1, dtype=torch.int64, device=self._keys.device)
        return first[..., None] + within

    def _bias_of(self, bias: Tensor, part: Part) -> Tensor:
        """Return the bias of each pair: [items, block, width * block]."""
        heads = self._queries[part.first : part.last] // self._plan.blocks % len(bias)
        of_blocks = bias[heads[:, None, None], self._distances(part)]
        # the last query of a block has the first of its distances to a block of keys
        rows = of_blocks.unfold(2, self._plan.block, 1).flip(2)
        return rows.transpose(1, 2).flatten(2)

    def _hidden(self, part: Part) -> Tensor:
        """Return a mask, True where a query does not see a key: [items, block, width * block]."""
        block = self._plan.block
        within = torch.arange(block, dtype=torch.int64, device=self._keys.device)
        keys = (self._keys_of(part)[1][..., None] * block + within).flatten(1)[:, None]
        queries = self._queries[part.first : part.last]
        row = queries // self._plan.blocks // self._plan.rows
        at = (queries % self._plan.blocks * block)[:, None] + within
        low, high = (one[row[:, None], at][..., None] for one in (self._low, self._high))
        return (keys < low) | (keys >= high)
