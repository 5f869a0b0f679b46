"""Carries out a pipeline schedule: one stage runs its actions in order and exchanges activations and gradients with its neighbours.

Before an action its receives and those of the next few are started, so that what they bring travels while the stage computes; sends are waited for
at the end only. An activation arrives in a buffer that becomes the input of the part itself; the buffer is used again when the backward
is done. The shape of what arrives follows from the micro-batch: it is not sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from hpczero.comm.group import Group
from hpczero.comm.work import Work
from hpczero.errors import HpczeroError
from hpczero.model.batch import MicroBatch
from hpczero.parallel.messages import AHEAD, Step, steps
from hpczero.parallel.schedule import Result, forward_only, receiver, schedule

_UNSENT = 2  # outputs of an evaluation that a stage keeps until they are sent


class Parts(Protocol):
    """What runs the parts of a stage."""

    def forward(self, chunk: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Part `chunk` of this stage. The first part of the model gets no x, the last one returns the summed loss."""

    def backward(self, chunk: int, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        """From what forward returned and its gradient (None: the loss) to the gradients of the parameters and of x (in x.grad). `last`: no
        further backward of this chunk comes in this step.
        """


class Buffers:
    """Memory in which messages arrive: as many buffers as are in use at the same time, each used again and again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.made = 0
        self._dtype = dtype
        self._size = 0  # elements
        self._free: list[Tensor] = []

    def hold(self, elements: int) -> None:
        """From now on each holds at least so many elements. None is in use."""
        assert len(self._free) == self.made, f"{self.made - len(self._free)} buffers are in use"
        if elements > self._size:
            self._size, self.made = elements, 0
            self._free.clear()

    def take(self) -> Tensor:
        if self._free:
            return self._free.pop()
        self.made += 1
        return torch.empty(self._size, dtype=self._dtype)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return self.made * self._size * self._dtype.itemsize


class Pipeline:
    """Of one rank: its group's ranks are the stages. `shape_of` says what the parts hand on of a micro-batch."""

    def __init__(self, group: Group, kind: str, chunks: int, shape_of: Callable[[MicroBatch], Sequence[int]], dtype: torch.dtype) -> None:
        self.group = group
        self.kind, self.chunks = kind, chunks
        self.shape_of, self.dtype = shape_of, dtype
        self.buffers = Buffers(dtype)
        self._steps: dict[tuple[int, bool], tuple[Step, ...]] = {}

    def train(self, parts: Parts, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Forward and backward of all micro-batches, which every stage is given. On the last stage their losses; elsewhere none."""
        return _Pass(self, parts, batches, trains=True).run()

    def evaluate(self, parts: Parts, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Forward only. On the last stage the losses; elsewhere none."""
        with torch.no_grad():
            return _Pass(self, parts, batches, trains=False).run()

    def poll(self) -> None:
        """Moves the messages under way. Large ones move in MPI calls only: what runs a part calls this between its layers."""
        self.group.connection.progress.advance()

    def steps(self, micro_batches: int, trains: bool) -> tuple[Step, ...]:
        """What this stage does; its schedule is made once for each number of micro-batches."""
        found = self._steps.get((micro_batches, trains))
        if found is None:
            actions = schedule(self.kind, self.group.size, self.chunks, micro_batches)
            found = steps(actions if trains else forward_only(actions), self.chunks, self.group.rank, AHEAD)
            self._steps[micro_batches, trains] = found
        return found


@dataclass
class _Arrival:
    """A neighbouring part's result: on its way in a buffer, or made by this stage itself."""

    tensor: Tensor
    buffer: Tensor | None = None
    work: Work | None = None

    def not_here(self, tensor: Tensor) -> Tensor:
        """The same values outside of the buffer: what a part returns may be a view of what it was given."""
        shares = self.buffer is not None and tensor.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
        return tensor.clone() if shares else tensor


class _Pass:
    """The way of a step's micro-batches through this stage."""

    def __init__(self, pipeline: Pipeline, parts: Parts, batches: Sequence[MicroBatch], trains: bool) -> None:
        self.pipeline, self.parts, self.batches, self.trains = pipeline, parts, batches, trains
        self.group, self.buffers = pipeline.group, pipeline.buffers
        self.shapes = [tuple(pipeline.shape_of(batch)) for batch in batches]
        self.arrivals: dict[Result, _Arrival] = {}
        self.kept: dict[tuple[int, int], tuple[_Arrival | None, Tensor]] = {}  # chunk, micro-batch -> input and output
        self.sends: deque[tuple[Work, Tensor]] = deque()
        self.losses: list[Tensor] = []

    def run(self) -> list[Tensor]:
        carry_out = {"forward": self._forward, "backward": self._backward}
        self.buffers.hold(max(map(prod, self.shapes), default=0))
        for step in self.pipeline.steps(len(self.batches), self.trains):
            for result in step.posts:
                self._post(result)
            carry_out[step.action.kind](step)
            self.pipeline.poll()
            while self.sends and self.sends[0][0].done:
                self.sends.popleft()
        while self.sends:
            self._wait_for_oldest_send()
        assert not self.arrivals, list(self.arrivals)
        assert not self.kept, list(self.kept)
        return self.losses

    def _forward(self, step: Step) -> None:
        chunk, number = step.action.chunk, step.action.micro_batch
        arrival = self._arrived(step.needs)
        x = arrival.tensor.requires_grad_(self.trains) if arrival else None
        output = self.parts.forward(chunk, x, self.batches[number])
        if step.gives:
            self._check(step.gives, output)
            self._hand_on(step.gives, arrival, output.detach())
        else:
            self.losses.append(output.detach())
        if self.trains:
            self.kept[chunk, number] = arrival, output
        else:
            self._release(arrival)

    def _backward(self, step: Step) -> None:
        arrival, output = self.kept.pop((step.action.chunk, step.action.micro_batch))
        gradient = self._arrived(step.needs)
        self.parts.backward(step.action.chunk, output, gradient.tensor if gradient else None, step.last)
        if step.gives:
            assert arrival is not None
            x = arrival.tensor
            self._hand_on(step.gives, gradient, torch.zeros_like(x) if x.grad is None else x.grad)  # None: x was of no use
        self._release(gradient)
        self._release(arrival)

    def _post(self, result: Result) -> None:
        shape, buffer = self.shapes[result.micro_batch], self.buffers.take()
        tensor = buffer[: prod(shape)].view(shape)
        self.arrivals[result] = _Arrival(tensor, buffer, self.group.start_receive(tensor, result.part % self.group.size))

    def _arrived(self, result: Result | None) -> _Arrival | None:
        if result is None:
            return None
        arrival = self.arrivals.pop(result)
        if arrival.work:
            arrival.work.wait()
        return arrival

    def _hand_on(self, result: Result, arrival: _Arrival | None, tensor: Tensor) -> None:
        """`arrival` is what the tensor was made from, whose buffer is used again."""
        own = arrival.not_here(tensor) if arrival else tensor
        target = receiver(result, self.group.size)
        if target == self.group.rank:
            self.arrivals[result] = _Arrival(own)
            return
        own = own.contiguous()
        self.sends.append((self.group.start_send(own, target), own))
        if not self.trains and len(self.sends) > _UNSENT:
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        self.sends.popleft()[0].wait()

    def _release(self, arrival: _Arrival | None) -> None:
        if arrival and arrival.buffer is not None:
            self.buffers.give_back(arrival.buffer)

    def _check(self, result: Result, output: Tensor) -> None:
        shape = self.shapes[result.micro_batch]
        if tuple(output.shape) != shape or output.dtype is not self.pipeline.dtype:
            made = f"gives {output.dtype} {list(output.shape)} of micro-batch {result.micro_batch}"
            expected = f"the next part expects {self.pipeline.dtype} {list(shape)}: a model that is cut into parts passes on one shape throughout"
            raise HpczeroError(f"part {result.part} of the pipeline {made}; {expected}")
