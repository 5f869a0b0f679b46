"""The work of a pipeline's parts for a micro-batch (pure).

Layers that are alike are counted, not listed: blocks differ in what is computed again in backward,
and in how many keys their queries see.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpczero.model.attention_layouts import LayoutRule, rule_of
from hpczero.model.families import family
from hpczero.model.shapes import Layer, number_of, window
from hpczero.model.work import Pass, WorkLayout
from hpczero.parallel.activations.choice import loss_rows, recomputed
from hpczero.parallel.pipeline.partition import Chunks, layers_that_run
from hpczero.planner.activations import element_bytes
from hpczero.planner.volumes import Batches
from hpczero.spec.model import Model
from hpczero.spec.schema import Memory, Spec


@dataclass(frozen=True)
class Batch:
    """The micro-batches of the busiest data rank, and how many samples one has on average."""

    micro_batches: int
    samples: float

    @classmethod
    def of(cls, batches: Batches) -> "Batch":
        count = sum(times for _, times in batches)
        return cls(count, sum(samples * times for samples, times in batches) / count)


Kind = tuple[str, str, LayoutRule | int]


class Alike(NamedTuple):
    """Layers that do the same: one of them, and how much of its forward backward repeats."""

    layer: Layer
    repeats: str  # "none", "selective" or "block"
    sees: LayoutRule | int  # what a query of a block sees: blocks, or how many keys; 0: all

    @property
    def kind(self) -> Kind:
        """What says of two that they do the same."""
        return self.layer.kind, self.repeats, self.sees


@dataclass(frozen=True)
class Part:
    """The layers that a stage's chunk runs: those that are alike, and how many."""

    layers: tuple[tuple[Alike, int], ...]

    @property
    def kinds(self) -> tuple[tuple[Kind, int], ...]:
        return tuple((alike.kind, count) for alike, count in self.layers)


def layout_of(spec: Spec, samples: float, kernels: frozenset[str]) -> WorkLayout:
    parallel = spec.parallel
    return WorkLayout(
        samples,
        spec.seq_len,
        element_bytes(spec),
        parallel.tensor,
        parallel.sequence_parallel and parallel.tensor > 1,
        kernels,
        bool(loss_rows(spec.memory, int(samples * spec.seq_len))),
    )


def passes(model: Model, alike: Alike, layout: WorkLayout) -> tuple[Pass, Pass]:
    """Return forward and backward of one of these layers."""
    work = family(model).work(model, alike.layer, layout)
    backward = work.gradients
    if alike.repeats == "block":
        backward = backward + work.forward
    elif alike.repeats == "selective":
        backward = backward + work.again
    return work.forward, backward


def parts_of(stage: Chunks, model: Model, memory: Memory) -> tuple[Part, ...]:
    """Return what each chunk of a stage runs."""
    return tuple(_part(chunk, model, memory) for chunk in stage)


def _part(chunk: Sequence[Layer], model: Model, memory: Memory) -> Part:
    counts = Counter[Kind]()
    examples: dict[Kind, Alike] = {}
    for layer in layers_that_run([chunk]):
        sees: LayoutRule | int = 0
        if layer.is_block:
            number = number_of(model, layer)
            sees = window(model, number)
            if rule := rule_of(model, number):
                sees = replace(rule, layer=0)  # other random blocks are as many
        alike = Alike(layer, recomputed(memory, layer), sees)
        counts[alike.kind] += 1
        examples.setdefault(alike.kind, alike)
    return Part(tuple((examples[kind], count) for kind, count in counts.items()))
