"""Products and passes of block-sparse attention, chunk after chunk, on some threads.

Each thread takes the next chunk and carries it out alone, with PyTorch's operations on one thread:
what a chunk makes stays in its core's cache, and cores do not wait for each other after every
operation. Gradients of keys are added in the order of the chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from threading import Event, Lock

import torch
from torch import Tensor

from hpczero_kernels.block_sparse_cpu import CpuPasses
from hpczero_kernels.block_sparse_passes import TorchPasses
from hpczero_kernels.block_sparse_plan import Chunk, Part, Plan
from hpczero_kernels.cpu import pool_of_torch
from hpczero_kernels.dispatch import NUMBA, choose

_SINGLE = Lock()  # while it is held, PyTorch's operations have one thread each


class _Room:
    """The memory of one thread for a chunk, used again for the next one."""

    def __init__(self, plan: Plan, passes: CpuPasses | TorchPasses, like: Tensor) -> None:
        self.passes = passes
        self._plan = plan
        self._like = like
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        size = prod(shape)
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < size:
            kept = self._kept[name, dtype] = self._like.new_empty(size, dtype=dtype)
        return kept[:size].view(shape)

    def gathered(self, source: Tensor, dtype: torch.dtype, part: Part) -> Tensor:
        """Return the keys' blocks of some items, in this precision: [items, keys, head_dim]."""
        keys = part.width * self._plan.block
        target = self.take("keys", dtype, part.items, keys, source.shape[-1])
        self.passes.gather(source, target, part)
        return target

    def diagonals(self, dtype: torch.dtype, part: Part) -> Tensor:
        """Return a place for a sum along each diagonal of the items' blocks."""
        return self.take("diagonals", dtype, part.items, part.width, 2 * self._plan.block - 1)

    def product(self, name: str, rows: Tensor, source: Tensor, part: Part) -> Tensor:
        """Return the products of the rows with the blocks that belong to them, in their dtype."""
        keys = self.gathered(source, rows.dtype, part)
        product = self.take(name, rows.dtype, *rows.shape[:2], keys.shape[1])
        return torch.bmm(rows, keys.transpose(1, 2), out=product)


@dataclass(frozen=True)
class Work:
    """One call's work: a plan, numbers, q, k and v in blocks, and a bias of their distances."""

    plan: Plan
    scale: float
    cap: float
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # [heads, distances within whole blocks], in fp32

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output in blocks, and logsumexp; of rows that see nothing 0 and -inf."""
        out = torch.zeros_like(self.q)
        sums = torch.full(self.q.shape[:2], -inf, dtype=self._wide, device=self.q.device)

        def carry_out(number: int, room: _Room) -> None:
            chunk = self.plan.chunks[number]
            rows = self._rows(chunk)
            made, shifts = out[rows], sums[rows]  # views, if `rows` is a slice
            self._forward_of(chunk, self.q[rows], made, shifts, room)
            if not isinstance(rows, slice):
                out[rows], sums[rows] = made, shifts

        self._each(carry_out)
        return out, sums

    def _forward_of(self, chunk: Chunk, q: Tensor, out: Tensor, sums: Tensor, room: _Room) -> None:
        wide_q = q.to(self._wide)
        parts = self.plan.parts(chunk)
        merged: tuple[Tensor, Tensor] | None = None
        for part in parts:
            logits = room.product("logits", wide_q, self.k, part)
            probabilities = room.take("logits", q.dtype, *logits.shape)
            room.passes.softmax(logits, probabilities, sums, part)
            torch.bmm(probabilities, room.gathered(self.v, q.dtype, part), out=out)
            if len(parts) > 1:
                merged = _merged(merged, out.to(self._wide, copy=True), sums.clone())
        if merged is not None:
            out.copy_(merged[0])
            sums.copy_(merged[1])

    def backward(
        self, gradient: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the gradients of q, k and v, in blocks; and of the bias, of each unit."""
        grad_q = torch.zeros_like(self.q)
        totals = [torch.zeros_like(one, dtype=self._wide) for one in (self.k, self.v)]
        of_bias = None
        if self.bias is not None:
            units = len(self.q) // self.plan.blocks
            of_bias = self.bias.new_zeros(units, self.bias.shape[1])
        added = [Event() for _ in self.plan.chunks]

        def carry_out(number: int, room: _Room) -> None:
            chunk = self.plan.chunks[number]
            before = [added[earlier] for earlier in chunk.after]
            try:
                rows = self._rows(chunk)
                made = grad_q[rows]  # a view, if `rows` is a slice
                given = [tensor[rows] for tensor in (self.q, gradient, out, sums)]
                self._backward_of(chunk, given, made, totals, of_bias, before, room)
                if not isinstance(rows, slice):
                    grad_q[rows] = made
            finally:  # whatever happens: others wait for it
                added[number].set()

        self._each(carry_out)
        return [grad_q, *(total.to(self.k.dtype) for total in totals)], of_bias

    def _backward_of(
        self, chunk: Chunk, given: list[Tensor], grad_q: Tensor, totals: list[Tensor],
        of_bias: Tensor | None, before: list[Event], room: _Room,
    ) -> None:  # fmt: skip
        q, gradient, out, sums = given
        wide_q, wide_gradient = q.to(self._wide), gradient.to(self._wide)
        row_sums = (wide_gradient * out).sum(-1)
        parts = self.plan.parts(chunk)
        total_q = torch.zeros_like(wide_q) if len(parts) > 1 else None
        for part in parts:
            logits = room.product("logits", wide_q, self.k, part)
            scores = room.product("scores", wide_gradient, self.v, part)
            probabilities = room.take("logits", q.dtype, *logits.shape)
            rounded = room.take("scores", q.dtype, *logits.shape)
            diagonals = None if of_bias is None else room.diagonals(of_bias.dtype, part)
            room.passes.differentiate(
                logits, scores, probabilities, rounded, sums, row_sums, part, diagonals
            )
            keys = room.gathered(self.k, q.dtype, part)
            torch.bmm(rounded, keys, out=grad_q)
            if total_q is not None:
                total_q += grad_q
            addends = [room.take(name, q.dtype, *keys.shape) for name in ("of keys", "of values")]
            torch.bmm(rounded.transpose(1, 2), q, out=addends[0])
            torch.bmm(probabilities.transpose(1, 2), gradient, out=addends[1])
            for event in before:
                event.wait()
            for total, addend in zip(totals, addends, strict=True):
                room.passes.scatter(addend, total, part)
            if of_bias is not None and diagonals is not None:
                room.passes.add_diagonals(diagonals, of_bias, part)
        if total_q is not None:
            grad_q.copy_(total_q)

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def _passes(self) -> CpuPasses | TorchPasses:
        by_numba = choose("block_sparse", self.q) == NUMBA
        given = self.plan, self.scale, self.cap, self.bias
        return CpuPasses(*given) if by_numba else TorchPasses(*given, self.q.device)

    def _rows(self, chunk: Chunk) -> slice | Tensor:
        """Return the chunk's blocks of queries, as a slice where no other lies between them."""
        numbers = self.plan.queries[chunk.first : chunk.last]
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first == len(numbers) - 1:
            return slice(first, last + 1)
        return torch.from_numpy(numbers).to(self.q.device)

    def _each(self, carry_out: Callable[[int, _Room], None]) -> None:
        """Call carry_out for the number of each chunk, on as many threads as operations have."""
        pool = pool_of_torch()
        passes = self._passes()
        numbers = iter(range(len(self.plan.chunks)))  # each is taken by one thread
        inference = torch.is_inference_mode_enabled()  # of the calling thread alone

        def some(start: int, stop: int) -> None:
            with torch.inference_mode(inference), torch.no_grad():
                room = _Room(self.plan, passes, self.q)
                for number in numbers:
                    carry_out(number, room)

        if self.q.device.type != "cpu" or pool.threads == 1:
            some(0, 1)
            return

        def alone(start: int, stop: int) -> None:
            torch.set_num_threads(1)  # of this thread
            some(start, stop)

        with _SINGLE:
            try:
                pool.run(alone, pool.threads, 1, 1)
            finally:
                torch.set_num_threads(pool.threads)


def _merged(
    before: tuple[Tensor, Tensor] | None, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output and logsumexp over the keys of two parts."""
    if before is None:
        return out, sums
    total = torch.logaddexp(before[1], sums)
    shift = total.masked_fill(total == -inf, 0.0)  # of rows that see nothing so far
    shares = [(one - shift).exp_().unsqueeze(-1) for one in (before[1], sums)]
    return before[0] * shares[0] + out * shares[1], total
