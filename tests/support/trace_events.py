"""Events of a trace, made by hand."""

from hpczero.comm.trace import (
    OPERATION,
    SPAN,
    WAIT,
    Event,
    EventKind,
)


def span(name: str, begin: int, end: int, number: int = -1) -> Event:
    return Event(EventKind(SPAN, name), begin, end, 0, number)


def wait(axis: str, begin: int, end: int) -> Event:
    return Event(EventKind(WAIT, "all_reduce", axis), begin, end)


def operation(
    axis: str, begin: int, end: int, name: str = "all_reduce", peer: int = -1, number: int = 1
) -> Event:
    return Event(EventKind(OPERATION, name, axis, peer), begin, end, 8, number)
