"""The average of a tensor over the replicas, in messages of one form.

Protocol, for R replicas: the tensor is cut into R parts (`sizes.part_of`).

1. Each replica encodes its parts, and sends part r to replica r (all_to_all).
2. A replica averages the messages of its own part, encodes the average, and sends it to all
   (all_gather).
3. All decode the same messages, and so have the same bits.

The first pass is on its way when an `Exchange` is made. The second begins in `poll` or `wait`, of
this exchange or of a later one. All ranks make exchanges in one order, and second passes begin in
that order. Each pass has a group of its own, as their interleaving differs between ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hpczero.comm.group import Work
from hpczero.parallel.replicas.codecs import Codec
from hpczero.parallel.replicas.sizes import part_of
from hpczero.parallel.zero.data_axis import Replicas


@dataclass(frozen=True)
class Errors:
    """What messages have left out so far: of this replica's tensor, and of its part's average."""

    sent: Tensor | None = None
    served: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.sent, self.served) if tensor is not None)


class Exchange:
    """One exchange; it does not change the values, of which it needs none once it is made."""

    def __init__(
        self,
        replicas: Replicas,
        codec: Codec,
        values: Tensor,
        errors: Errors,
        variance: Tensor | None = None,
    ) -> None:
        """`values`: flat; `variance`: see `Codec`."""
        self._replicas = replicas
        self._codec = codec
        self._errors = errors
        self._variance = variance
        self._elements = values.numel()
        self._device = values.device
        count, number = replicas.count, replicas.number
        messages = [self._encoded(values, other) for other in range(count)]
        length = messages[number].numel()
        self._arriving = self._empty(count, -(-length // 4) * 4)[:, :length]  # scales are aligned
        self._first = replicas.group.start_all_to_all(list(self._arriving), messages)
        self._second: Work | None = None
        self._gathered: Tensor | None = None
        replicas.first_passes.append(self)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def _encoded(self, values: Tensor, other: int) -> Tensor:
        part = self._part(other)
        message = self._empty(self._codec.form.message(part.stop - part.start))
        error = None if self._errors.sent is None else self._errors.sent[part]
        if message.numel():
            self._codec.encode(values[part], error, self._living(part), message)
        return message

    def _part(self, number: int) -> slice:
        """Return the elements of which a replica makes the average."""
        return part_of(self._codec.form, self._elements, self._replicas.count, number)

    def _living(self, part: slice) -> Tensor | None:
        return None if self._variance is None else self._variance[part]

    def poll(self) -> bool:
        """Move on what can move on; return True once all messages are here."""
        waiting = self._replicas.first_passes
        while waiting and waiting[0]._first.poll():
            waiting.popleft()._start_second()
        return self._second is not None and self._second.poll()

    def wait(self) -> None:
        """Return once all messages are here."""
        waiting = self._replicas.first_passes
        while self._second is None:
            waiting[0]._first.wait()
            waiting.popleft()._start_second()
        assert self._second
        self._second.wait()

    def _start_second(self) -> None:
        replicas, codec = self._replicas, self._codec
        part = self._part(replicas.number)
        average = torch.zeros(part.stop - part.start, dtype=torch.float32, device=self._device)
        if average.numel():
            codec.average(self._arriving, average)
        length = codec.form.message(codec.form.part(self._elements, replicas.count))
        self._gathered = self._empty(replicas.count, length)
        own = self._gathered[replicas.number]
        message = own[: codec.form.message(average.numel())]
        if average.numel():
            codec.encode(average, self._errors.served, self._living(part), message)
        own[message.numel() :].zero_()
        self._second = replicas.averages.start_all_gather(self._gathered, own)

    def decode(self, values: Tensor) -> None:
        """Write the result, of any precision, to `values`, which may be those given."""
        assert self._gathered is not None
        for number, message in enumerate(self._gathered):
            part = self._part(number)
            if part.start < part.stop:
                self._codec.decode(message, self._living(part), values[part])
