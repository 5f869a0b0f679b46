"""Carries out a pipeline schedule: one stage runs its actions in order and exchanges activations and gradients with its neighbours.

Before an action its receives and those of the next few are started, so that what they bring travels while the stage computes; sends are waited for
at the end only. An activation arrives in a buffer that becomes the input of the part itself; the buffer is used again when the backward
is done. The shape of what arrives follows from the micro-batch: it is not sent, but for a model whose shapes nobody knows. Of such a one the first
micro-batch of each shape brings a header in front of each activation, which says its shape, and receives are started when they are needed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from hpczero.comm.group import Group
from hpczero.comm.progress import Work
from hpczero.device import CPU
from hpczero.errors import InputError
from hpczero.model.batch import MicroBatch
from hpczero.parallel.pipeline.schedule import (
    AHEAD,
    PartResult,
    Step,
    forward_only,
    receiver,
    schedule,
    steps,
)

_UNSENT = 2  # outputs of an evaluation that a stage keeps until they are sent
_MOST_DIMENSIONS = 64  # of a tensor


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

    def __init__(self, dtype: torch.dtype, place: torch.device = CPU.torch) -> None:
        self.made = 0
        self._dtype, self._place = dtype, place
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
        return torch.empty(self._size, dtype=self._dtype, device=self._place)

    def alone(self, elements: int) -> Tensor:
        """One that is not kept."""
        return torch.empty(elements, dtype=self._dtype, device=self._place)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return self.made * self._size * self._dtype.itemsize


class Pipeline:
    """Of one rank: its group's ranks are the stages. `shape_of` says what the parts hand on of a micro-batch; None: they tell each other, once for
    each shape of micro-batches.
    """

    def __init__(
        self,
        group: Group,
        kind: str,
        chunks: int,
        shape_of: Callable[[MicroBatch], Sequence[int]] | None,
        dtype: torch.dtype,
    ) -> None:
        self.group = group
        self.kind, self.chunks = kind, chunks
        self.shape_of, self.dtype = shape_of, dtype
        self.buffers = Buffers(dtype, group.device.torch)
        self._told: dict[
            tuple[int, torch.Size], tuple[int, ...]
        ] = {}  # part and micro-batch's shape -> shape of the part's output
        self._steps: dict[tuple[int, bool, int], tuple[Step, ...]] = {}

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

    def shape(self, part: int, batch: MicroBatch) -> tuple[int, ...] | None:
        """Of a part's output; None as long as it is not known."""
        return (
            tuple(self.shape_of(batch))
            if self.shape_of
            else self._told.get((part, batch.tokens.shape))
        )

    def told(self, part: int, batch: MicroBatch, shape: Sequence[int]) -> None:
        self._told[part, batch.tokens.shape] = tuple(shape)

    def shapes_here(self, batches: Sequence[MicroBatch]) -> list[tuple[int, ...] | None]:
        """Of all that this stage's parts take and give."""
        own = range(self.group.rank, self.group.size * self.chunks, self.group.size)
        made_by = {
            number
            for part in own
            for number in (part - 1, part)
            if 0 <= number < self.group.size * self.chunks - 1
        }
        return [self.shape(part, batch) for part in made_by for batch in batches]

    def steps(self, micro_batches: int, trains: bool, ahead: int = AHEAD) -> tuple[Step, ...]:
        """What this stage does; its schedule is made once for each number of micro-batches."""
        found = self._steps.get((micro_batches, trains, ahead))
        if found is None:
            actions = schedule(self.kind, self.group.size, self.chunks, micro_batches)
            found = steps(
                actions if trains else forward_only(actions), self.chunks, self.group.rank, ahead
            )
            self._steps[micro_batches, trains, ahead] = found
        return found


@dataclass
class _Arrival:
    """A neighbouring part's result: on its way in a buffer, or made by this stage itself."""

    tensor: Tensor
    buffer: Tensor | None = None
    work: Work | None = None

    def not_here(self, tensor: Tensor) -> Tensor:
        """The same values outside of the buffer: what a part returns may be a view of what it was given."""
        shares = (
            self.buffer is not None
            and tensor.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
        )
        return tensor.clone() if shares else tensor


class _Pass:
    """The way of a step's micro-batches through this stage."""

    def __init__(
        self, pipeline: Pipeline, parts: Parts, batches: Sequence[MicroBatch], trains: bool
    ) -> None:
        self.pipeline, self.parts, self.batches, self.trains = pipeline, parts, batches, trains
        self.group, self.buffers = pipeline.group, pipeline.buffers
        self.arrivals: dict[PartResult, _Arrival] = {}
        self.kept: dict[
            tuple[int, int], tuple[_Arrival | None, Tensor]
        ] = {}  # chunk, micro-batch -> input and output
        self.sends: deque[tuple[Work, Tensor]] = deque()
        self.losses: list[Tensor] = []

    def run(self) -> list[Tensor]:
        carry_out = {"forward": self._forward, "backward": self._backward}
        shapes = self.pipeline.shapes_here(self.batches)
        known = [prod(shape) for shape in shapes if shape is not None]
        self.buffers.hold(max(known, default=0))
        self.all_known = len(known) == len(shapes)
        for step in self.pipeline.steps(
            len(self.batches), self.trains, AHEAD if self.all_known else 0
        ):
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
        self.parts.backward(
            step.action.chunk, output, gradient.tensor if gradient else None, step.last
        )
        if step.gives:
            assert arrival is not None
            x = arrival.tensor
            self._hand_on(
                step.gives, gradient, torch.zeros_like(x) if x.grad is None else x.grad
            )  # None: x was of no use
        self._release(gradient)
        self._release(arrival)

    def _post(self, result: PartResult) -> None:
        source, shape = result.part % self.group.size, self._shape(result)
        if shape is None:
            shape = self._receive_header(result, source)
        buffer = self.buffers.take() if self.all_known else self.buffers.alone(prod(shape))
        tensor = buffer[: prod(shape)].view(shape)
        self.arrivals[result] = _Arrival(
            tensor, buffer if self.all_known else None, self.group.start_receive(tensor, source)
        )

    def _shape(self, result: PartResult) -> tuple[int, ...] | None:
        made_by = result.part if result.name == "output" else result.part - 1
        return self.pipeline.shape(made_by, self.batches[result.micro_batch])

    def _receive_header(self, result: PartResult, source: int) -> tuple[int, ...]:
        header = torch.empty(1 + _MOST_DIMENSIONS, dtype=torch.int64)
        self.group.start_receive(header, source).wait()
        count, *sizes = header.tolist()
        self.pipeline.told(result.part, self.batches[result.micro_batch], sizes[:count])
        return tuple(sizes[:count])

    def _send_header(self, result: PartResult, shape: Sequence[int], target: int) -> None:
        self.pipeline.told(result.part, self.batches[result.micro_batch], shape)
        if target != self.group.rank:
            header = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64)
            header[: 1 + len(shape)] = torch.tensor([len(shape), *shape], dtype=header.dtype)
            self.sends.append((self.group.start_send(header, target), header))

    def _arrived(self, result: PartResult | None) -> _Arrival | None:
        if result is None:
            return None
        arrival = self.arrivals.pop(result)
        if arrival.work:
            arrival.work.wait()
        return arrival

    def _hand_on(self, result: PartResult, arrival: _Arrival | None, tensor: Tensor) -> None:
        """`arrival` is what the tensor was made from, whose buffer is used again."""
        own = arrival.not_here(tensor) if arrival else tensor
        target = receiver(result, self.group.size)
        if self._shape(result) is None:
            self._send_header(result, own.shape, target)
        if target == self.group.rank:
            self.arrivals[result] = _Arrival(own)
            return
        own = own.contiguous()
        self.sends.append((self.group.start_send(own, target), own))
        if not self.trains and self.all_known and len(self.sends) > _UNSENT:
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        self.sends.popleft()[0].wait()

    def _release(self, arrival: _Arrival | None) -> None:
        if arrival and arrival.buffer is not None:
            self.buffers.give_back(arrival.buffer)

    def _check(self, result: PartResult, output: Tensor) -> None:
        known, own = self._shape(result), tuple(output.shape)
        shape = own if known is None else known
        if own != shape or output.dtype is not self.pipeline.dtype:
            made = f"gives {output.dtype} {list(output.shape)} of micro-batch {result.micro_batch}"
            expected = f"the next part expects {self.pipeline.dtype} {list(shape)}"
            rule = "what parts hand on is of train.precision, and of one shape for all micro-batches of a shape, in training and evaluation"
            raise InputError(f"part {result.part} of the pipeline {made}; {expected}: {rule}")
