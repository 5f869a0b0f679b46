"""Runners of a step's micro-batches: on one rank as a whole, or as the stages of a pipeline."""

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from hpczero.comm.trace import Trace
from hpczero.model.batch import MicroBatch
from hpczero.parallel.pipeline.executor import Pipeline
from hpczero.parallel.user_module import HeldLayer
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.unit import Unit

Call = Callable[[Tensor, MicroBatch], Tensor]  # a layer's forward
Later = Callable[[], float]  # reads a number that the device may not have made yet


class SingleStage:
    """The whole model on this rank."""

    stage = 0

    def __init__(self, engine: Engine, calls: Sequence[Call] | None = None) -> None:
        """`calls`: the layers as functions, in order; None: the module is one."""
        self.engine = engine
        self._calls = calls

    def train(self, batches: Sequence[MicroBatch], weight: float, trace: Trace) -> Later:
        """Run forward and backward of the step's batches; return a function that reads the loss.

        The gradient is that of the losses' sum divided by `weight`, the sum of the weights of all
        targets of the step: every cut of the global batch gives the same gradient.
        """
        losses = []
        batches = _on_device(batches, self.engine)
        # Empty batches run too: their collectives are also the other ranks'.
        for number, batch in enumerate(batches):
            with trace.span("forward", number):
                loss = self._forward(batch)
            with trace.span("backward", number):
                self.engine.backward(loss / weight, last=number + 1 == len(batches))
            losses.append(loss.detach())
        return _add_up(losses, self.engine)

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[list[float]]:
        """Return the losses of each batch: a single one, or with `by_sample` one per sample."""
        return _read_all(
            [self._forward(batch) for batch in _on_device(batches, self.engine)], self.engine
        )

    def _forward(self, batch: MicroBatch) -> Tensor:
        if self._calls is None:
            loss: Tensor = self.engine(batch)
            return loss
        with self.engine.running():
            x = batch.tokens
            for call in self._calls:
                x = call(x, batch)
        return x

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step, by kind."""
        return self.engine.memory()


class PipelineStage:
    """One stage; the losses are known on the last one, the others' are zero."""

    def __init__(
        self,
        engine: Engine,
        pipeline: Pipeline,
        chunks: Sequence[Sequence[HeldLayer]],
        calls: Sequence[Sequence[Call]],
    ) -> None:
        """`calls`: the layers of each chunk as functions, in the order in which they run."""
        self.engine = engine
        self.pipeline = pipeline
        self._calls = calls
        used = [{unit for _, layer in chunk for unit in engine.units_of(layer)} for chunk in chunks]
        if not engine.sharded.gradients:
            # Backward reaches the first chunk last: it completes units that later chunks use too.
            # Sharded gradients are summed in every backward, whichever chunk it is of.
            earlier: list[set[Unit]] = [set().union(*used[:chunk]) for chunk in range(len(chunks))]
            used = [units - others for units, others in zip(used, earlier, strict=True)]
        elif sum(map(len, used)) > len(set().union(*used)):
            engine.reduction.joins_at_end = True  # chunks that share a unit sum it one by one
        self._units = used
        self._weight = 1.0
        self._trace = Trace()

    @property
    def stage(self) -> int:
        """Return this stage's number."""
        return self.pipeline.group.rank

    def train(self, batches: Sequence[MicroBatch], weight: float, trace: Trace) -> Later:
        self._weight = weight
        self._trace = trace
        return _add_up(self.pipeline.train(self, _on_device(batches, self.engine)), self.engine)

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[list[float]]:
        """Return the losses as `SingleStage` on the last stage; elsewhere zeros, one per batch."""
        self._trace = Trace()
        losses = self.pipeline.evaluate(self, _on_device(batches, self.engine))
        return _read_all(losses, self.engine) if losses else [[0.0] for _ in batches]

    def memory(self) -> dict[str, int]:
        return self.engine.memory() | {"pipeline": self.pipeline.buffers.size}

    def forward(self, chunk: int, x: Tensor | None, batch: MicroBatch) -> Tensor:
        with self._trace.span("forward"), self.engine.running():
            out = batch.tokens if x is None else x
            for call in self._calls[chunk]:
                out = call(out, batch)
                self.pipeline.poll()
        return out

    def backward(self, chunk: int, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        if gradient is None:
            gradient = torch.full_like(output, self.engine.loss_scale.value / self._weight)
        with self._trace.span("backward"):
            self.engine.backward_of(self._units[chunk], output, gradient, last)


def _on_device(batches: Sequence[MicroBatch], engine: Engine) -> list[MicroBatch]:
    return [batch.on(engine.device) for batch in batches]


def _add_up(losses: Sequence[Tensor], engine: Engine) -> Later:
    if not losses:
        return lambda: 0.0
    read = _later(torch.stack([loss.reshape(()) for loss in losses]), engine)
    return lambda: sum(read())


def _read_all(losses: Sequence[Tensor], engine: Engine) -> list[list[float]]:
    if not losses:
        return []
    joined = torch.cat([loss.detach().reshape(-1).float() for loss in losses])
    figures = iter(_later(joined, engine)())
    return [list(islice(figures, loss.numel())) for loss in losses]


def _later(values: Tensor, engine: Engine) -> Callable[[], list[float]]:
    """Return a function that waits for the device and MPI, then gives the values."""
    read = engine.device.later(values)
    host_sync = engine.axis.group.connection.progress.snapshot()

    def read_after_sync() -> list[float]:
        host_sync()
        return read()

    return read_after_sync


StepRunner = SingleStage | PipelineStage
