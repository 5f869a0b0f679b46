"""A buffer of constant size whose parts come and go: for what is in flight, whatever the size of the model."""

import torch

_ALIGNMENT = 64  # elements


class Region:
    """First fit over one flat tensor; parts begin at multiples of 64 elements."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._taken: dict[int, int] = {}  # first element -> number of elements

    def take(self, elements: int) -> torch.Tensor | None:
        """A part of so many elements, or None where no gap is large enough."""
        length = -(-elements // _ALIGNMENT) * _ALIGNMENT
        end = 0
        for first in [*sorted(self._taken), self.memory.numel()]:
            if first - end >= length:
                self._taken[end] = length
                return self.memory[end : end + elements]
            end = first + self._taken.get(first, 0)
        return None

    def give_back(self, part: torch.Tensor) -> None:
        offset = self.offset_of(part)
        assert offset is not None
        del self._taken[offset]

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """The element at which the tensor begins in the region; None if it lies elsewhere."""
        if tensor.dtype != self.memory.dtype or tensor.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr():
            return None
        offset, rest = divmod(tensor.data_ptr() - self.memory.data_ptr(), self.memory.element_size())
        assert not rest
        return offset if 0 <= offset < self.memory.numel() else None
