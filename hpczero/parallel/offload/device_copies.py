"""Copies between a device and the computer's memory, for states that the CPU steps.

Gradients come while backward goes on, weights go while the next units are stepped: both in queues
of their own, beside the computation, and through pinned memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from hpczero.device import Device, Mark
from hpczero.parallel.states import SETS
from hpczero.parallel.zero.unit import Unit


class GradientsOnHost:
    """The summed gradients of all owned elements, on their way from the device."""

    def __init__(self, device: Device, units: Sequence[Unit]) -> None:
        self._queue = device.queue()
        sizes = [unit.gradient_to_step.nbytes for unit in units]
        memory = device.pinned(sum(sizes))
        self.size = memory.nbytes
        self._kept = {
            unit: part.view(unit.gradient_to_step.dtype)
            for unit, part in zip(units, memory.split(sizes), strict=True)
        }
        self._marks: dict[Unit, Mark] = {}

    def start(self, unit: Unit) -> None:
        """Copy the gradient of which all that makes it has been asked of the device."""
        self._queue.begins()
        self._queue.copy(self._kept[unit], unit.gradient_to_step)
        self._marks[unit] = self._queue.mark()

    def forget(self, units: Iterable[Unit]) -> None:
        """Take what was copied of these units for nothing."""
        for unit in units:
            self._marks.pop(unit, None)

    def start_missing(self, units: Sequence[Unit], again: Sequence[Unit]) -> None:
        """Copy the gradients that have not been, and those that have changed since."""
        for unit in units:
            if unit not in self._marks or unit in again:
                self.start(unit)

    def of(self, unit: Unit) -> Tensor:
        """Return the unit's gradient when it is here."""
        self._marks.pop(unit).wait_on_host()
        return self._kept[unit]


class WeightsToDevice:
    """New weights, which are made in one of a few buffers, and copied from there."""

    def __init__(self, device: Device, dtype: torch.dtype, elements: int) -> None:
        """`elements`: the most that are made at a time."""
        self._queue = device.queue()
        buffers = [device.pinned(elements * dtype.itemsize).view(dtype) for _ in range(SETS)]
        self.size = sum(buffer.nbytes for buffer in buffers)
        self._marks = [Mark() for _ in buffers]  # when each was copied
        self._turns: Iterator[int] = cycle(range(SETS))
        self._buffers = buffers
        self._number = 0

    def next_buffer(self) -> Tensor:
        """Return a buffer whose copies are done."""
        self._number = next(self._turns)
        self._marks[self._number].wait_on_host()
        return self._buffers[self._number]

    def send(self, weights: Tensor, made: Tensor) -> None:
        """Copy a part of the buffer to its place on the device."""
        self._queue.copy(weights, made)
        self._marks[self._number] = self._queue.mark()

    def mark(self) -> Mark:
        """Return the point at which all that was sent so far is there."""
        return self._queue.mark()
