"""The turns of fragments (pure): which units make one, and after which update it has its turn."""

from collections.abc import Sequence


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Cut units, by their numbers in order, into so many fragments of about equal size.

    Where there are more fragments than units, some are empty.
    """
    fragments: list[list[int]] = [[] for _ in range(count)]
    total = sum(sizes)
    before = 0
    for number, size in enumerate(sizes):
        middle = before + size / 2
        fragments[min(int(middle * count / total), count - 1)].append(number)
        before += size
    return fragments


def fragment_of_update(number: int, every: int, fragments: int) -> int | None:
    """Return the fragment that has its turn after update `number` (from 1), if one has.

    Turns are spread evenly; the last fragment has its turn when `every` divides the number.
    """
    if number < 1:
        return None
    place = (number - 1) % every + 1
    for fragment in range(fragments):
        if place == every * (fragment + 1) // fragments:
            return fragment
    return None
