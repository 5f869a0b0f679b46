"""Memory by lifetime: what lives as long as the run comes from few large blocks, taken once, in order; nothing is freed, so nothing fragments.

A block's pages are touched by whoever writes them first, so memory is used (and placed on a NUMA node) only then.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from hpczero.device import CPU
from hpczero.parallel.layout import Gaps

_ALIGNMENT = 64  # bytes


class Arena:
    """One block a kind ("weights", "moments", ...). `blocks` are given from outside (a node's shared window); the others are allocated on the
    device of this name.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        blocks: Mapping[str, torch.Tensor] | None = None,
        place: torch.device = CPU.torch,
    ) -> None:
        self.sizes = dict(sizes)
        self._blocks = dict(blocks or {})
        for kind, size in sizes.items():
            if kind not in self._blocks:
                self._blocks[kind] = torch.empty(size, dtype=torch.uint8, device=place)
        self._taken = dict.fromkeys(sizes, 0)

    def take(self, kind: str, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        elements = shape if isinstance(shape, int) else prod(shape)
        start = self._taken[kind]
        size = elements * dtype.itemsize
        assert start + size <= self.sizes[kind], (
            f"the arena's block for {kind} has {self.sizes[kind]} bytes, {start} are taken, {size} are asked for"
        )
        self._taken[kind] = start + room(size)
        return self._blocks[kind][start : start + size].view(dtype).view(shape)


def room(size: int) -> int:
    """What a buffer of `size` bytes takes of its block."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# A buffer of constant size whose parts come and go: for what is in flight, whatever the size of the model.
class Region:
    """One flat tensor; first fit."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._gaps = Gaps(memory.numel())

    def take(self, elements: int) -> torch.Tensor | None:
        """A part of so many elements, or None where no gap is large enough."""
        first = self._gaps.take(elements)
        return None if first is None else self.memory[first : first + elements]

    def give_back(self, part: torch.Tensor) -> None:
        offset = self.offset_of(part)
        assert offset is not None
        self._gaps.give_back(offset)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """The element at which the tensor begins in the region; None if it lies elsewhere."""
        if (
            tensor.dtype != self.memory.dtype
            or tensor.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr()
        ):
            return None
        offset, rest = divmod(
            tensor.data_ptr() - self.memory.data_ptr(), self.memory.element_size()
        )
        assert not rest
        return offset if 0 <= offset < self.memory.numel() else None


# Parts of regions of constant size, each lent as memory whose users are counted.
#
# A part comes back when its borrower gives it back *and* nobody else sees it any more: a view that
# somebody has kept, wherever, keeps its values, as with any tensor.
@dataclass(eq=False)
class Loan:
    """`values` is a tensor with a storage of its own; None once it has been given back."""

    values: torch.Tensor | None
    storage: torch.UntypedStorage
    returned: Callable[[], None]

    @property
    def tensor(self) -> torch.Tensor:
        assert self.values is not None
        return self.values

    def fill_with(self, value: torch.Tensor) -> None:
        """Give all views of the memory this value, also after the loan was given back."""
        whole = value.new_empty(0).set_(self.storage)
        whole.fill_(value)


class Loans:
    def __init__(self, memory: torch.Tensor) -> None:
        self.regions = [Region(memory)]
        self.still_seen: list[Loan] = []  # given back, but somebody has views of them

    def take(self, elements: int) -> Loan | None:
        """A part of so many elements, or None where no gap is large enough."""
        self._collect()
        for region in self.regions:
            part = region.take(elements)
            if part is not None:
                return self._of_region(region, part)
        return None

    def lend(self, part: torch.Tensor, returned: Callable[[], None]) -> Loan:
        """A part that belongs to somebody, who is told when it comes back."""
        alias = torch._C._from_dlpack(torch._C._to_dlpack(part))
        return Loan(alias, alias.untyped_storage(), returned)

    def give_back(self, loan: Loan) -> None:
        loan.values = None
        self.still_seen.append(loan)
        self._collect()

    def sees(self, loan: Loan) -> bool:
        """Return True if the loan was given back, but somebody has views of it."""
        self._collect()
        return loan in self.still_seen

    def grow(self, memory: torch.Tensor) -> None:
        """More memory, for good."""
        self.regions.append(Region(memory))

    def _of_region(self, region: Region, part: torch.Tensor) -> Loan:
        return self.lend(part, lambda: region.give_back(part))

    def _collect(self) -> None:
        for loan in list(self.still_seen):
            if torch._C._storage_Use_Count(loan.storage._cdata) == 1:  # the loan's own
                self.still_seen.remove(loan)
                loan.returned()
