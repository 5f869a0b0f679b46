"""A buffer of constant size whose parts come and go: for what is in flight, whatever the size of the model."""

import torch

from hpczero.memory.gaps import Gaps


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
        if tensor.dtype != self.memory.dtype or tensor.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr():
            return None
        offset, rest = divmod(tensor.data_ptr() - self.memory.data_ptr(), self.memory.element_size())
        assert not rest
        return offset if 0 <= offset < self.memory.numel() else None
