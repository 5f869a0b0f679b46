"""The share of a model that the ranks of a grid hold: of its parameters a balanced share, as far as
layers can be dealt out so.
"""

from math import prod

import pytest

from hpczero.model import families
from hpczero.parallel.pipeline.partition import (
    LayoutCache,
    chunks_of_stages,
    handed_on,
    layers_that_run,
)
from hpczero.spec.schema import Model, Parallel, Spec

OF_SPEED = Model(
    layers=8, hidden=1024, heads=16, vocab=8192, seq_len=128
)  # scripts/bench_step.py's
LARGE = Model(layers=96, hidden=12288, heads=96, vocab=50257, seq_len=2048)


def held(model: Model, **parallel: int) -> list[list[int]]:
    """Parameters of each stage's tensor ranks."""
    spec = Spec(model=model, parallel=Parallel(**parallel))  # type: ignore[arg-type]
    units = LayoutCache(1, spec.parallel.tensor)
    layers = [
        [layer for chunk in chunks for layer in chunk]
        for chunks in chunks_of_stages(spec, families.layers(model))
    ]
    return [
        [
            sum(prod(place.shape) for unit in units.of(stage, rank) for place in unit.slots)
            for rank in range(spec.parallel.tensor)
        ]
        for stage in layers
    ]


def balanced_share(model: Model, tensor: int = 1, pipeline: int = 1) -> float:
    """The model's parameters, and the copies of what its first and last stage both need, dealt
    out evenly.
    """
    copies = model.vocab * model.hidden if model.tied_embeddings and pipeline > 1 else 0
    return (families.parameter_count(model) + copies) / (tensor * pipeline)


GRIDS = [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]


@pytest.mark.parametrize("grid", [*GRIDS, {"tensor": 4, "pipeline": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_the_benchmarks_model_is_balanced_within_one_percent(
    grid: dict[str, int], tied: bool
) -> None:
    model = OF_SPEED.model_copy(update={"tied_embeddings": tied})
    for stage in held(model, **grid):
        assert stage == pytest.approx([balanced_share(model, **grid)] * len(stage), rel=0.01)


@pytest.mark.parametrize(
    "grid", [*GRIDS, {"tensor": 8, "pipeline": 4}, {"tensor": 8, "pipeline": 8}], ids=str
)
def test_many_layers_are_balanced_within_five_percent(grid: dict[str, int]) -> None:
    for stage in held(LARGE, **grid):
        assert stage == pytest.approx([balanced_share(LARGE, **grid)] * len(stage), rel=0.05)


def test_a_vocabulary_of_several_blocks_cannot_be_balanced() -> None:
    """GPT-2's embedding has as many parameters as 5.4 blocks and costs nothing: stages take the
    same time, and hold what follows from that.
    """
    small = Model(layers=12, hidden=768, heads=12, vocab=50257, seq_len=1024)
    first, *_, last = (
        stage[0] / balanced_share(small, pipeline=4) for stage in held(small, pipeline=4)
    )
    assert first == pytest.approx(1.66, abs=0.01)
    assert last == pytest.approx(0.95, abs=0.01)


def test_together_the_ranks_hold_everything() -> None:
    for tied, tensor, pipeline in [(True, 2, 3), (False, 3, 2), (True, 1, 10), (False, 1, 1)]:
        model = OF_SPEED.model_copy(update={"tied_embeddings": tied})
        spec = Spec(model=model, parallel=Parallel(tensor=tensor, pipeline=pipeline))
        whole = sum(
            parameter.size
            for layer in families.layers(model)
            for parameter in layer.parameters
            if parameter.split is None
        ) * (tensor - 1)
        assert (
            sum(map(sum, held(model, tensor=tensor, pipeline=pipeline)))
            == balanced_share(model, 1, pipeline) * pipeline + whole
        )
        names = [
            layer.name
            for stage in chunks_of_stages(spec, families.layers(model))
            for layer in layers_that_run(stage)
        ]
        assert names == [layer.name for layer in families.layers(model)]


def test_what_is_handed_on() -> None:
    model = OF_SPEED.model_copy(update={"seq_len": 33})
    assert handed_on(Spec(model=model, parallel=Parallel(tensor=4)), 3, 33) == (33, 1024)
    shared = Spec(model=model, parallel=Parallel(tensor=4, sequence_parallel=True))
    assert [handed_on(shared, rank, 33) for rank in range(4)] == [
        (9, 1024),
        (8, 1024),
        (8, 1024),
        (8, 1024),
    ]
