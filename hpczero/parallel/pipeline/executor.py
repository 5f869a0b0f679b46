"""Run a pipeline schedule: a stage carries out its actions and exchanges tensors with neighbours.

Before an action its receives and those of the next few are started, so that messages travel while
the stage computes. A stage waits for its sends at the end only. An activation arrives in a buffer
that becomes the input of the part itself; the buffer is used again when the backward is done.

The shape of a message follows from the micro-batch, so it is not sent. A user module's shapes are
unknown: there the first micro-batch of each shape brings a header in front of each activation,
which says its shape, and receives are started when they are needed.
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
    RECEIVED_AHEAD,
    PartResult,
    ScheduledAction,
    forward_only,
    receiver,
    schedule,
    scheduled_actions,
)

_UNSENT = 2  # outputs of an evaluation that a stage keeps until they are sent
_MOST_DIMENSIONS = 64  # of a tensor


class Parts(Protocol):
    """The code that runs the parts of a stage."""

    def forward(self, chunk: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Run part `chunk` of this stage and return its output.

        The first part of the model gets no x; the last one returns the summed loss.
        """

    def backward(self, chunk: int, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        """Compute the gradients of the parameters and of x (in x.grad).

        `output` is what forward returned and `gradient` its gradient (None: output is the loss).
        `last`: no further backward of this chunk comes in this step.
        """


class Buffers:
    """A pool of equal buffers in which messages arrive: as many as are in use at the same time."""

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU.torch) -> None:
        self.made = 0
        self._dtype = dtype
        self._device = device
        self._elements = 0  # of each buffer
        self._free: list[Tensor] = []

    def reserve(self, elements: int) -> None:
        """Make every later buffer hold at least this many elements; no buffer is in use."""
        assert len(self._free) == self.made, f"{self.made - len(self._free)} buffers are in use"
        if elements > self._elements:
            self._elements = elements
            self.made = 0
            self._free.clear()

    def take(self) -> Tensor:
        if self._free:
            return self._free.pop()
        self.made += 1
        return torch.empty(self._elements, dtype=self._dtype, device=self._device)

    def outside_pool(self, shape: Sequence[int]) -> Tensor:
        """Return a new tensor that is not given back."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return self.made * self._elements * self._dtype.itemsize


class Pipeline:
    """The pipeline as one rank sees it: the ranks of its group are the stages.

    `shape_of` returns the shape of the activation that parts hand on of a micro-batch. Where it is
    None, stages tell each other, once for each shape of micro-batches.
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
        self.kind = kind
        self.chunks = chunks
        self.shape_of = shape_of
        self.dtype = dtype
        self.buffers = Buffers(dtype, group.device.torch)
        # part and shape of the micro-batch -> shape of the part's output
        self._learned_shapes: dict[tuple[int, torch.Size], tuple[int, ...]] = {}
        self._scheduled: dict[tuple[int, bool, int], tuple[ScheduledAction, ...]] = {}

    def train(self, parts: Parts, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run forward and backward of all micro-batches. Collective; every stage gets the same.

        Return their losses on the last stage, an empty list elsewhere.
        """
        return _Pass(self, parts, batches, trains=True).run()

    def evaluate(self, parts: Parts, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run the forwards only. Return the losses on the last stage, an empty list elsewhere."""
        with torch.no_grad():
            return _Pass(self, parts, batches, trains=False).run()

    def poll(self) -> None:
        """Advance the messages in flight; call it between the layers of a part.

        Large messages move only inside MPI calls.
        """
        self.group.connection.progress.advance()

    def shape(self, part: int, batch: MicroBatch) -> tuple[int, ...] | None:
        """Return the shape of a part's output, or None while it is unknown."""
        if self.shape_of:
            return tuple(self.shape_of(batch))
        return self._learned_shapes.get((part, batch.tokens.shape))

    def learn_shape(self, part: int, batch: MicroBatch, shape: Sequence[int]) -> None:
        self._learned_shapes[part, batch.tokens.shape] = tuple(shape)

    def message_shapes(self, batches: Sequence[MicroBatch]) -> list[tuple[int, ...] | None]:
        """Return the shapes of all activations that this stage's parts receive and send."""
        stages = self.group.size
        parts = stages * self.chunks
        sources = {
            source
            for part in range(self.group.rank, parts, stages)
            for source in (part - 1, part)
            if 0 <= source < parts - 1
        }
        return [self.shape(source, batch) for source in sources for batch in batches]

    def scheduled(
        self, micro_batches: int, trains: bool, ahead: int = RECEIVED_AHEAD
    ) -> tuple[ScheduledAction, ...]:
        """Return this stage's actions; they are made once for each number of micro-batches."""
        actions_here = self._scheduled.get((micro_batches, trains, ahead))
        if actions_here is None:
            actions = schedule(self.kind, self.group.size, self.chunks, micro_batches)
            used = actions if trains else forward_only(actions)
            actions_here = scheduled_actions(used, self.chunks, self.group.rank, ahead)
            self._scheduled[micro_batches, trains, ahead] = actions_here
        return actions_here


@dataclass
class _Arrival:
    """The result of a neighbouring part: in flight to a buffer, or made by this stage itself."""

    tensor: Tensor
    buffer: Tensor | None = None
    work: Work | None = None

    def copied_if_inside(self, tensor: Tensor) -> Tensor:
        """Return the same values outside of the buffer.

        The output of a part may be a view of its input.
        """
        shares = (
            self.buffer is not None
            and tensor.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
        )
        return tensor.clone() if shares else tensor


class _Pass:
    """The passage of a step's micro-batches through this stage."""

    def __init__(
        self, pipeline: Pipeline, parts: Parts, batches: Sequence[MicroBatch], trains: bool
    ) -> None:
        self.pipeline = pipeline
        self.parts = parts
        self.batches = batches
        self.trains = trains
        self.group = pipeline.group
        self.buffers = pipeline.buffers
        self.arrivals: dict[PartResult, _Arrival] = {}
        # chunk and micro-batch -> input and output of a forward, for its backward
        self.kept: dict[tuple[int, int], tuple[_Arrival | None, Tensor]] = {}
        self.sends: deque[tuple[Work, Tensor]] = deque()
        self.losses: list[Tensor] = []

    def run(self) -> list[Tensor]:
        carry_out = {"forward": self._forward, "backward": self._backward}
        shapes = self.pipeline.message_shapes(self.batches)
        known = [prod(shape) for shape in shapes if shape is not None]
        self.buffers.reserve(max(known, default=0))
        self.all_known = len(known) == len(shapes)
        ahead = RECEIVED_AHEAD if self.all_known else 0
        for scheduled in self.pipeline.scheduled(len(self.batches), self.trains, ahead):
            for result in scheduled.posts:
                self._post(result)
            carry_out[scheduled.action.kind](scheduled)
            self.pipeline.poll()
            while self.sends and self.sends[0][0].done:
                self.sends.popleft()
        while self.sends:
            self._wait_for_oldest_send()
        assert not self.arrivals, list(self.arrivals)
        assert not self.kept, list(self.kept)
        return self.losses

    def _forward(self, scheduled: ScheduledAction) -> None:
        chunk = scheduled.action.chunk
        number = scheduled.action.micro_batch
        arrival = self._arrived(scheduled.needs)
        x = arrival.tensor.requires_grad_(self.trains) if arrival else None
        output = self.parts.forward(chunk, x, self.batches[number])
        if scheduled.gives:
            self._check(scheduled.gives, output)
            self._hand_on(scheduled.gives, arrival, output.detach())
        else:
            self.losses.append(output.detach())
        if self.trains:
            self.kept[chunk, number] = arrival, output
        else:
            self._release(arrival)

    def _backward(self, scheduled: ScheduledAction) -> None:
        chunk = scheduled.action.chunk
        arrival, output = self.kept.pop((chunk, scheduled.action.micro_batch))
        gradient = self._arrived(scheduled.needs)
        self.parts.backward(chunk, output, gradient.tensor if gradient else None, scheduled.last)
        if scheduled.gives:
            assert arrival is not None
            x = arrival.tensor
            x_gradient = torch.zeros_like(x) if x.grad is None else x.grad  # None: x was not used
            self._hand_on(scheduled.gives, gradient, x_gradient)
        self._release(gradient)
        self._release(arrival)

    def _post(self, result: PartResult) -> None:
        """Start the receive of a neighbour's result."""
        source = result.part % self.group.size
        shape = self._shape(result)
        if shape is None:
            shape = self._receive_header(result, source)
        buffer: Tensor | None = None
        if self.all_known:
            buffer = self.buffers.take()
            tensor = buffer[: prod(shape)].view(shape)
        else:
            tensor = self.buffers.outside_pool(shape)
        work = self.group.start_receive(tensor, source)
        self.arrivals[result] = _Arrival(tensor, buffer, work)

    def _shape(self, result: PartResult) -> tuple[int, ...] | None:
        source = result.part if result.name == "output" else result.part - 1
        return self.pipeline.shape(source, self.batches[result.micro_batch])

    def _receive_header(self, result: PartResult, source: int) -> tuple[int, ...]:
        header = torch.empty(1 + _MOST_DIMENSIONS, dtype=torch.int64)
        self.group.start_receive(header, source).wait()
        count, *sizes = header.tolist()
        shape = tuple(sizes[:count])
        self.pipeline.learn_shape(result.part, self.batches[result.micro_batch], shape)
        return shape

    def _send_header(self, result: PartResult, shape: Sequence[int], target: int) -> None:
        self.pipeline.learn_shape(result.part, self.batches[result.micro_batch], shape)
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
        """Start the send of a result; `tensor` was made from `arrival`, whose buffer is reused."""
        if arrival:
            tensor = arrival.copied_if_inside(tensor)
        target = receiver(result, self.group.size)
        if self._shape(result) is None:
            self._send_header(result, tensor.shape, target)
        if target == self.group.rank:
            self.arrivals[result] = _Arrival(tensor)
            return
        tensor = tensor.contiguous()
        self.sends.append((self.group.start_send(tensor, target), tensor))
        if not self.trains and self.all_known and len(self.sends) > _UNSENT:
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        self.sends.popleft()[0].wait()

    def _release(self, arrival: _Arrival | None) -> None:
        if arrival and arrival.buffer is not None:
            self.buffers.give_back(arrival.buffer)

    def _check(self, result: PartResult, output: Tensor) -> None:
        shape = tuple(output.shape)
        expected = self._shape(result)
        if expected is None:
            expected = shape
        if shape != expected or output.dtype is not self.pipeline.dtype:
            raise InputError(
                f"part {result.part} of the pipeline gives {output.dtype} {list(shape)} of "
                f"micro-batch {result.micro_batch}; the next part expects {self.pipeline.dtype} "
                f"{list(expected)}: an output has the dtype of train.precision, and one shape for "
                "all micro-batches of the same shape, in training and evaluation"
            )
