"""Parts of regions of constant size, each lent as memory whose users are counted.

A part comes back when its borrower gives it back *and* nobody else sees it any more: a view that
somebody has kept, wherever, keeps its values, as with any tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpczero.memory.region import Region


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
