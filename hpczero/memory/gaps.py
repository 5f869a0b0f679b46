"""Where parts lie in a space of constant size, as they come and go (pure)."""

_ALIGNMENT = 64


class Gaps:
    """First fit over elements 0 .. size - 1; parts begin at multiples of 64 elements."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[int, int] = {}  # first element -> number of elements

    def take(self, elements: int) -> int | None:
        """The first element of a part of so many, or None where no gap is large enough."""
        length = -(-elements // _ALIGNMENT) * _ALIGNMENT
        end = 0
        for first in [*sorted(self._taken), self.size]:
            if first - end >= length:
                self._taken[end] = length
                return end
            end = first + self._taken.get(first, 0)
        return None

    def give_back(self, first: int) -> None:
        del self._taken[first]
