"""AdamW on states that lie elsewhere: a GPU's in the computer's memory, or any rank's in a file.

It needs the gradient's norm, and so cannot begin before backward has ended; but a layer needs its
new weights only when it runs. So a thread steps unit by unit while the next forward begins, and
whoever needs one waits for it (`complete`). A step that changes nothing moves nothing. One that
fails leaves some units stepped and others not: what is asked for after it fails in the same way.

A unit is stepped in pieces. The states of a piece come from the file and go back to it, or are in
memory; its gradient has come from the device, its new weights go there, or both are in memory. The
average of the weights follows piece by piece, while their master weights are at hand.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from hpczero.device import CPU, Mark
from hpczero.parallel.offload.device_copies import GradientsOnHost, WeightsToDevice
from hpczero.parallel.offload.state_file import StateFile
from hpczero.parallel.offload.stream import Piece, Stream
from hpczero.parallel.states import PIECE
from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.kernel_update import AdamWSpan, AdamWUpdate
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.update import Step
from hpczero.parallel.zero.weights import Weights
from hpczero_kernels.adamw import AdamWBuffers

_WIDTH = 4  # bytes of an element
_PATIENCE = 0.001  # seconds between two looks at what other ranks wait for


@dataclass(frozen=True)
class _Stretch:
    """Owned elements of a unit, and where their states are in the file."""

    elements: slice
    piece: Piece


class OffloadedAdamW(AdamWUpdate):
    """AdamW by hpczero's kernel on the CPU, behind the computation."""

    def __init__(
        self, weights: Weights, absent: AbsentGradients, file: StateFile | None = None
    ) -> None:
        """`file`: in which the moments, and separate master weights, are."""
        device = weights.device
        super().__init__(weights, absent, CPU)
        self._file = file
        self._stretches = {unit: list(self._stretches_of(unit)) for unit in self.units}
        longest = min(PIECE, max(unit.master.numel() for unit in self.units))
        self._stream: Stream | None = None
        if file:
            self._stream = Stream(file, len(self._in_file(self.units[0])), _WIDTH * longest)
        self._gradients: GradientsOnHost | None = None
        self._outgoing: WeightsToDevice | None = None
        if device.has_queues:
            self._gradients = GradientsOnHost(device, self.units)
            self._outgoing = WeightsToDevice(device, self.units[0].weights.dtype, longest)
        self._advance = weights.axis.group.connection.progress.advance
        self._thread = ThreadPoolExecutor(1, "hpczero-step")
        self._steps: dict[Unit, Future[Mark]] = {}  # behind
        self._failure: BaseException | None = None

    def _in_file(self, unit: Unit) -> list[Tensor]:
        moments = [self.moment1[unit], self.moment2[unit]]
        return [unit.master, *moments] if unit.has_separate_master else moments

    def _stretches_of(self, unit: Unit) -> Iterator[_Stretch]:
        count = unit.master.numel()
        for start in range(0, count, PIECE):
            elements = slice(start, min(start + PIECE, count))
            places: list[int] = []
            if self._file:
                places = [self._file.place_of(state[elements]) for state in self._in_file(unit)]
            yield _Stretch(elements, Piece(tuple(places), _WIDTH * (elements.stop - start)))

    # -- what the engine asks for

    def reads_on_host(self) -> bool:
        return True

    def take_gradient(self, unit: Unit, is_last: bool) -> None:
        if self._gradients and is_last:
            self._gradients.start(unit)
        elif self._gradients:
            self._gradients.forget([unit])

    def drop_gradients(self) -> None:
        if self._gradients:
            self._gradients.forget(self.units)

    def begin(self, step: Step) -> None:
        norm, _ = step.read_norms()
        on_host = torch.tensor([norm], dtype=torch.float64)
        super().begin(replace(step, norm=on_host[0]))
        if not isfinite(norm):
            self.drop_gradients()
            return
        if self._gradients:
            self._gradients.start_missing(self.units, step.changed)
        if self._file and self._stream:
            self._file.let_pages_go()
            self._stream.begin([one.piece for unit in self.units for one in self._stretches[unit]])
        for unit in self.units:
            spans = self.spans_to_step(unit, self.absent.of(unit))
            self._steps[unit] = self._thread.submit(self._step_behind, unit, spans)

    def step(self, unit: Unit) -> None:
        """Leave it to the thread."""

    @property
    def is_behind(self) -> bool:
        return bool(self._steps)

    def complete(self, unit: Unit) -> None:
        self.refuse_after_failure()
        future = self._steps.pop(unit, None)
        if future is None:
            return
        while not future.done():
            self._advance()  # other ranks may wait for what this one has to send
            wait([future], timeout=_PATIENCE)
        future.result().order()

    def refuse_after_failure(self) -> None:
        if self._failure:
            raise self._failure

    def follow_average(self) -> None:
        """Leave it to the thread."""

    def memory(self) -> dict[str, int]:
        """Return the bytes of the buffers that it has, by kind."""
        kinds = {
            "offload": self._stream,
            "gradients on the host": self._gradients,
            "weights on the host": self._outgoing,
        }
        return {kind: buffers.size for kind, buffers in kinds.items() if buffers}

    def close(self) -> None:
        self._thread.shutdown()
        if self._stream:
            self._stream.close()

    # -- what the thread does

    def _step_behind(self, unit: Unit, spans: Sequence[AdamWSpan]) -> Mark:
        """Step a unit; return the point at which its new weights are there."""
        self.refuse_after_failure()
        try:
            gradient = self._gradients.of(unit) if self._gradients else unit.gradient_to_step
            for stretch in self._stretches[unit]:
                self._step_stretch(unit, stretch.elements, spans, gradient)
            if self._stream and unit is self.units[-1]:
                self._stream.finish()
        except BaseException as error:
            self._failure = error
            raise
        return self._outgoing.mark() if self._outgoing else Mark()

    def _step_stretch(
        self, unit: Unit, elements: slice, spans: Sequence[AdamWSpan], gradient: Tensor
    ) -> None:
        master, moment1, moment2 = self._states_at_hand(unit, elements)
        made = self._outgoing.next_buffer() if self._outgoing else None
        for span in spans:
            first = max(span.elements.start, elements.start)
            last = min(span.elements.stop, elements.stop)
            if first >= last:
                continue
            here = slice(first - elements.start, last - elements.start)
            weights = span.state.weights
            if weights is not None:
                weights = weights[first - span.elements.start : last - span.elements.start]
            target = weights if weights is None or made is None else made[here]
            part = AdamWBuffers(
                master[here], moment1[here], moment2[here], gradient[first:last], target
            )
            self.step_span(replace(span, state=part))
            if self._outgoing and weights is not None and target is not None:
                self._outgoing.send(weights, target)
        if self.average:
            self.follow(self.average[unit][elements], master)
        if self._stream:
            self._stream.put_back()

    def _states_at_hand(self, unit: Unit, elements: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return master weights and moments of these elements."""
        in_memory = unit.master, self.moment1[unit], self.moment2[unit]
        if not self._stream:
            master, moment1, moment2 = (state[elements] for state in in_memory)
            return master, moment1, moment2
        *master_read, moment1, moment2 = (one.view(torch.float32) for one in self._stream.take())
        return (master_read[0] if master_read else unit.master[elements]), moment1, moment2
