"""What the ranks hold of the model: of its layers those of their pipeline stage, of these the part of their tensor rank (pure)."""

from collections.abc import Sequence
from dataclasses import replace

from hpczero.model.shapes import Layer, Parameter, known
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.parallel.stages import estimated_costs, layers_of, parts
from hpczero.spec.schema import Spec

Chunks = tuple[tuple[Layer, ...], ...]


def chunks_of_stages(spec: Spec, layers: Sequence[Layer]) -> list[Chunks]:
    """For each stage the layers of each of its chunks. A layer that works with another stage's parameter (tied embeddings) has a copy of it."""
    stages = spec.parallel.pipeline
    if stages == 1:
        return [(tuple(layers),)]
    assert known(spec.model), f"how to cut {spec.model.family} into stages is not known without building it"
    cuts = parts(estimated_costs(spec.model), stages, spec.parallel.chunks)
    owner = {parameter.name: parameter for layer in layers for parameter in layer.parameters}
    held = []
    for stage in range(stages):
        own = [[layers[index] for index in part] for part in layers_of(cuts, stages, stage)]
        here = {parameter.name for chunk in own for layer in chunk for parameter in layer.parameters}
        held.append(tuple(tuple(_with_copies(layer, [owner[name] for name in layer.uses if name not in here]) for layer in chunk) for chunk in own))
    return held


def _with_copies(layer: Layer, elsewhere: Sequence[Parameter]) -> Layer:
    kept = tuple(name for name in layer.uses if name not in {parameter.name for parameter in elsewhere})
    return replace(layer, parameters=(*layer.parameters, *elsewhere), uses=kept) if elsewhere else layer


class Units:
    """The layouts of layers, of which those with the same shapes, most of a model, are made once."""

    def __init__(self, shards: int, tensor_ranks: int = 1) -> None:
        self.shards, self.tensor_ranks = shards, tensor_ranks
        self._made: dict[object, UnitLayout] = {}

    def of(self, layers: Sequence[Layer], tensor_rank: int = 0) -> list[UnitLayout]:
        """A layer that has no parameters of its own is no unit."""
        return [self._of(layer, tensor_rank) for layer in layers if layer.parameters]

    def _of(self, layer: Layer, tensor_rank: int) -> UnitLayout:
        key = tensor_rank, tuple((parameter.shape, parameter.split, parameter.grain) for parameter in layer.parameters)
        if key not in self._made:
            self._made[key] = unit_layout(layer, self.shards, self.tensor_ranks, tensor_rank)
        return self._made[key]
