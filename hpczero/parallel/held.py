"""What the ranks hold of the model: of its layers those of their pipeline stage, of these the part of their tensor rank (pure)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from hpczero.model.shapes import Layer, Parameter, known
from hpczero.parallel.layout import UnitLayout, share, unit_layout
from hpczero.parallel.pipeline.partition import estimated_costs, layers_of, parts
from hpczero.spec.schema import Spec


class Tied(Layer):
    """Not a layer that runs, but a parameter that layers of several stages work with: on each of them a unit of its own, so that it is cut alike."""


Chunks = tuple[tuple[Layer, ...], ...]


def chunks_of_stages(spec: Spec, layers: Sequence[Layer]) -> list[Chunks]:
    """For each stage the layers of each of its chunks. What a layer shares with other stages (tied embeddings) comes before it, on each of them."""
    stages = spec.parallel.pipeline
    if stages == 1:
        return [(tuple(layers),)]
    assert known(spec.model), f"how to cut {spec.model.family} into stages is not known without building it"
    cuts = parts(estimated_costs(spec.model), stages, spec.parallel.chunks)
    used = {name for layer in layers for name in layer.uses}
    tied = {parameter.name: parameter for layer in layers for parameter in layer.parameters if parameter.name in used}
    return [apart([[layers[index] for index in part] for part in layers_of(cuts, stages, stage)], tied) for stage in range(stages)]


def apart(chunks: Sequence[Sequence[Layer]], tied: Mapping[str, Parameter]) -> Chunks:
    """A stage's chunks of layers, which only use what is tied, behind what the stage does not have yet of that."""
    missing = dict(tied)
    return tuple(tuple(chain.from_iterable(_apart(layer, tied, missing) for layer in chunk)) for chunk in chunks)


def layers_that_run(chunks: Iterable[Sequence[Layer]]) -> list[Layer]:
    """The layers that run."""
    return [layer for chunk in chunks for layer in chunk if not isinstance(layer, Tied)]


def _apart(layer: Layer, tied: Mapping[str, Parameter], missing: dict[str, Parameter]) -> Iterator[Layer]:
    for name in [name for name in missing if name in layer.names]:
        yield Tied(name, (missing.pop(name),))
    own = tuple(parameter for parameter in layer.parameters if parameter.name not in tied)
    yield replace(layer, parameters=own, uses=tuple(dict.fromkeys((*layer.uses, *(name for name in tied if name in layer.names)))))


def handed_on(spec: Spec, tensor_rank: int) -> tuple[int, int]:
    """What a part of the model hands on to the next one of a sequence: [positions, hidden], with sequence parallelism the rank's own positions."""
    ranks = spec.parallel.tensor if spec.parallel.sequence_parallel else 1
    rows = share(spec.model.seq_len, 1, ranks, tensor_rank if ranks > 1 else 0)
    return rows.stop - rows.start, spec.model.hidden


class Units:
    """The layouts of layers, of which those with the same shapes, most of a model, are made once."""

    def __init__(self, shards: int, tensor_ranks: int = 1) -> None:
        self.shards, self.tensor_ranks = shards, tensor_ranks
        self._made: dict[object, UnitLayout] = {}

    def of(self, layers: Sequence[Layer], tensor_rank: int = 0) -> list[UnitLayout]:
        """A layer that has no parameters of its own is no unit. The names in a layout may be those of an equal layer."""
        return [self._of(layer, tensor_rank) for layer in layers if layer.parameters]

    def _of(self, layer: Layer, tensor_rank: int) -> UnitLayout:
        key = tensor_rank, tuple((parameter.shape, parameter.split, parameter.grain) for parameter in layer.parameters)
        if key not in self._made:
            self._made[key] = unit_layout(layer, self.shards, self.tensor_ranks, tensor_rank)
        return self._made[key]
