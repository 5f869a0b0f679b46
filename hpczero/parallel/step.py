"""How an engine's model runs the micro-batches of a step: on one rank as a whole, or as the stages of a pipeline."""

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from hpczero.comm.trace import Trace
from hpczero.model.batch import MicroBatch
from hpczero.parallel.pipeline.executor import Pipeline
from hpczero.parallel.user_module import Part
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.unit import Unit

Call = Callable[[Tensor, MicroBatch], Tensor]  # what a layer does
Later = Callable[[], float]  # a number that the device may not have made yet


class SingleStage:
    """The whole model on this rank."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def train(self, batches: Sequence[MicroBatch], tokens: int, trace: Trace) -> Later:
        """The gradient of the losses' sum over `tokens`, the step's; what reads the losses' sum. The loss is weighted by tokens, so that every way
        to cut the global batch gives the same gradient.
        """
        losses, batches = [], _on_device(batches, self.engine)
        for number, batch in enumerate(
            batches
        ):  # empty ones too: their collectives are the others' as well
            with trace.span("forward", number):
                loss = self.engine(batch)
            with trace.span("backward", number):
                self.engine.backward(loss / tokens, last=number + 1 == len(batches))
            losses.append(loss.detach())
        return _sum(losses, self.engine)

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[list[float]]:
        """The losses of each batch: one for all of it, or, of a model that knows `by_sample`, one for each sample."""
        return _all([self.engine(batch) for batch in _on_device(batches, self.engine)], self.engine)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step, by kind."""
        return self.engine.memory()


class PipelineStage:
    """One stage; the losses are known on the last one, the others' are zero."""

    def __init__(
        self,
        engine: Engine,
        pipeline: Pipeline,
        chunks: Sequence[Sequence[Part]],
        calls: Sequence[Sequence[Call]],
    ) -> None:
        """`calls`: what the layers of each chunk do, one after the other."""
        self.engine, self.pipeline, self._calls = engine, pipeline, calls
        used = [{unit for _, layer in chunk for unit in engine.units_of(layer)} for chunk in chunks]
        before: list[set[Unit]] = [set().union(*used[:chunk]) for chunk in range(len(chunks))]
        # The last backward of a chunk is the last of what earlier ones do not use; where gradients are sharded every backward is summed.
        self._units = (
            used
            if engine.sharded.gradients
            else [own - earlier for own, earlier in zip(used, before, strict=True)]
        )
        self._tokens, self._trace = 1, Trace()

    def train(self, batches: Sequence[MicroBatch], tokens: int, trace: Trace) -> Later:
        self._tokens, self._trace = tokens, trace
        return _sum(self.pipeline.train(self, _on_device(batches, self.engine)), self.engine)

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[list[float]]:
        """Return the losses as above on the last stage; elsewhere zeros, one for each batch."""
        self._trace = Trace()
        losses = self.pipeline.evaluate(self, _on_device(batches, self.engine))
        return _all(losses, self.engine) if losses else [[0.0] for _ in batches]

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
            gradient = torch.full_like(output, self.engine.loss_scale.value / self._tokens)
        with self._trace.span("backward"):
            self.engine.backward_of(self._units[chunk], output, gradient, last)


def _on_device(batches: Sequence[MicroBatch], engine: Engine) -> list[MicroBatch]:
    return [batch.on(engine.device) for batch in batches]


def _sum(losses: Sequence[Tensor], engine: Engine) -> Later:
    if not losses:
        return lambda: 0.0
    read = _later(torch.stack([loss.reshape(()) for loss in losses]), engine)
    return lambda: sum(read())


def _all(losses: Sequence[Tensor], engine: Engine) -> list[list[float]]:
    if not losses:
        return []
    found = iter(
        _later(torch.cat([loss.detach().reshape(-1).float() for loss in losses]), engine)()
    )
    return [list(islice(found, loss.numel())) for loss in losses]


def _later(values: Tensor, engine: Engine) -> Callable[[], list[float]]:
    read, settle = engine.device.later(values), engine.axis.group.connection.progress.snapshot()

    def settled() -> list[float]:
        settle()
        return read()

    return settled


StepRunner = SingleStage | PipelineStage
