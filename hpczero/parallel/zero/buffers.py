"""Memory by lifetime: arenas for what lives as long as the run, regions for what comes and goes.

An arena is a few large blocks, taken once, in order; nothing is freed, so nothing fragments. A
block's pages are touched by whoever writes them first, so memory is used (and placed on a NUMA
node) only then. A region has constant size, whatever the size of the model. A stock has pieces for
tensors whose sizes change.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType

import torch

from hpczero.device import CPU
from hpczero.parallel.layout import ALIGNMENT, Gaps
from hpczero.parallel.states import PAGE

_ALIGNMENT = 64  # bytes


class Arena:
    """One block for each kind of states ("weights", "moments", ...)."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        blocks: Mapping[str, torch.Tensor] | None = None,
        device: torch.device = CPU.torch,
        in_file: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """`blocks`: memory from elsewhere (a node's shared window); the rest is allocated.

        `in_file`: blocks of a new file, full of zeros; what is taken of them begins at whole pages.
        """
        self.sizes = dict(sizes)
        self._blocks = {**(blocks or {}), **in_file}
        self.of_zeros = in_file.keys()
        for kind, size in sizes.items():
            if kind not in self._blocks:
                self._blocks[kind] = torch.empty(size, dtype=torch.uint8, device=device)
        self._taken = dict.fromkeys(sizes, 0)

    def take(self, kind: str, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        elements = shape if isinstance(shape, int) else prod(shape)
        start = self._taken[kind]
        size = elements * dtype.itemsize
        assert start + size <= self.sizes[kind], (
            f"the arena's block for {kind} has {self.sizes[kind]} bytes,"
            f" {start} are taken, {size} are asked for"
        )
        alignment = PAGE if kind in self.of_zeros else _ALIGNMENT
        self._taken[kind] = start + -(-size // alignment) * alignment
        return self._blocks[kind][start : start + size].view(dtype).view(shape)


class Region:
    """One flat tensor whose parts come and go; first fit."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._gaps = Gaps(memory.numel())

    def take(self, elements: int) -> torch.Tensor | None:
        """Return a part of so many elements; None if no gap is large enough."""
        first = self._gaps.take(elements)
        return None if first is None else self.memory[first : first + elements]

    def give_back(self, part: torch.Tensor) -> None:
        offset = self.offset_of(part)
        assert offset is not None
        self._gaps.give_back(offset)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the element of the region at which the tensor begins; None if it is elsewhere."""
        if (
            tensor.dtype != self.memory.dtype
            or tensor.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr()
        ):
            return None
        distance = tensor.data_ptr() - self.memory.data_ptr()
        offset, remainder = divmod(distance, self.memory.element_size())
        assert not remainder
        return offset if 0 <= offset < self.memory.numel() else None


@dataclass(eq=False)
class Loan:
    """Memory lent as a tensor with a storage of its own, so that its users are counted.

    `memory` is the same by the lender's storage. Who fills it may hold that a moment longer, as
    gloo's threads do, on each rank for another time: ranks must not differ in what they count.
    """

    values: torch.Tensor | None  # None once it has been given back
    memory: torch.Tensor
    storage: torch.UntypedStorage
    returned: Callable[[], None]

    @property
    def tensor(self) -> torch.Tensor:
        assert self.values is not None
        return self.values

    def fill_with(self, value: torch.Tensor) -> None:
        """Give all views of the memory this value, also after the loan was given back."""
        flat = value.new_empty(0).set_(self.storage)
        flat.fill_(value)


class Lender:
    """Memory that is lent, with its users counted.

    What is lent comes back when its borrower gives it back *and* no view of it is left: a view that
    somebody has kept, wherever, keeps its values, as with any tensor.
    """

    def __init__(self) -> None:
        self.still_seen = deque[Loan]()  # given back, but somebody has views of them

    def lend(self, part: torch.Tensor, returned: Callable[[], None]) -> Loan:
        """Lend memory of the caller's; `returned` is called when it comes back."""
        alias = torch._C._from_dlpack(torch._C._to_dlpack(part))
        return Loan(alias, part, alias.untyped_storage(), returned)

    def give_back(self, loan: Loan) -> None:
        loan.values = None
        self.still_seen.append(loan)
        self.collect()

    def sees(self, loan: Loan) -> bool:
        """Return True if the loan was given back, but somebody has views of it."""
        self.collect()
        return loan in self.still_seen

    def collect(self) -> None:
        for _ in range(len(self.still_seen)):
            loan = self.still_seen.popleft()
            if torch._C._storage_Use_Count(loan.storage._cdata) == 1:  # only the loan itself
                loan.returned()
            else:
                self.still_seen.append(loan)


class Loans(Lender):
    """Parts of regions, lent as the program asks for them and nothing else.

    A part that is given back is free at once. While somebody still sees its memory, whoever gets
    the part has other memory, which is kept for such cases. So what a rank alone has kept (or its
    garbage collector has not found yet) costs it memory, but all ranks gather alike.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.regions = [Region(memory)]
        self.instead: list[Region] = []  # of parts that were still seen
        self._free: dict[Loan, Callable[[], None]] = {}  # the part of each

    def take(self, elements: int) -> Loan | None:
        """Lend a part of so many elements; None if no gap is large enough."""
        for region in self.regions:
            part = region.take(elements)
            if part is not None:
                return self.lend_part(part, partial(region.give_back, part))
        return None

    def lend_part(self, part: torch.Tensor, free: Callable[[], None]) -> Loan:
        """Lend this part; `free` is called when it is given back."""
        self.collect()
        is_seen = any(_overlap(loan.memory, part) for loan in self.still_seen)
        loan = self._lend_instead(part) if is_seen else self.lend(part, lambda: None)
        self._free[loan] = free
        return loan

    def give_back(self, loan: Loan) -> None:
        self._free.pop(loan)()
        super().give_back(loan)

    def grow(self, memory: torch.Tensor) -> None:
        """Add memory, for good."""
        self.regions.append(Region(memory))

    def _lend_instead(self, part: torch.Tensor) -> Loan:
        for region in self.instead:
            memory = region.take(part.numel())
            if memory is not None:
                return self.lend(memory, partial(region.give_back, memory))
        whole = -(-part.numel() // ALIGNMENT) * ALIGNMENT
        self.instead.append(Region(part.new_empty(whole)))
        return self._lend_instead(part)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two flat tensors have memory in common."""
    return (
        one.data_ptr() < other.data_ptr() + other.nbytes
        and other.data_ptr() < one.data_ptr() + one.nbytes
    )


class Stock(Lender):
    """Pieces of memory that are lent again and again, for tensors whose sizes change.

    There are as many pieces as were lent at the same time. The smallest that is large enough is
    lent; where none is, a larger one takes the place of the largest that is free. So all stays as
    it is once the largest tensors were here.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        """`allocate` makes a piece of so many bytes."""
        super().__init__()
        self._allocate = allocate
        self._free: list[torch.Tensor] = []  # the smallest first
        self.size = 0  # bytes of all pieces

    def give_back(self, loan: Loan) -> None:
        """Take a loan back, at any moment: it may be lent from the next `take` on."""
        loan.values = None
        self.still_seen.append(loan)

    def take(self, size: int) -> Loan:
        """Lend a piece, of which the borrower uses so many bytes at the beginning."""
        self.collect()
        place = bisect_left(self._free, size, key=torch.Tensor.numel)
        if place == len(self._free):
            if self._free:
                self.size -= self._free.pop().numel()
            self._free.append(self._allocate(max(size, 1)))
            self.size += max(size, 1)
            place = -1
        piece = self._free.pop(place)
        return self.lend(piece, lambda: insort(self._free, piece, key=torch.Tensor.numel))
