"""States sharded inside a group of ranks and replicated over the others: a data axis is all it
takes.
"""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from hpczero.comm.grid import Grid
from hpczero.comm.group import Work, shard
from hpczero.comm.node_axis import LocalSum, ShardMessages
from hpczero.comm.world import World
from hpczero.model import build, families
from hpczero.model.batch import MicroBatch
from hpczero.parallel.zero.data_axis import DataAxis, Messages
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.engine_settings import EngineSettings
from hpczero.parallel.zero.weights import ModelParts
from hpczero.spec.schema import Model, Spec, Train, Zero

MODEL = Model(layers=2, hidden=24, heads=3, seq_len=7, vocab=33, ffn=40)


class ShardReplica:
    """The plainest way: every rank that owns a shard gets everyone's part of it."""

    replicas = None  # it sums over them by itself
    shared = False
    neighbours = 1

    def __init__(self, world: World, grid: Grid) -> None:
        self.group = world.group("data", grid.ranks(world.rank, "shard", "replica"))
        self.shards = world.group("shard", grid.ranks(world.rank, "shard"))
        self.rank, self.size, self.device = self.shards.rank, self.shards.size, self.group.device

    def allocate(self, once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, Tensor]:
        return {}

    def written(self, elements: int, sharded: bool) -> slice:
        return shard(elements, self.size, self.rank) if sharded else slice(0, elements)

    def reduce(self, tensor: Tensor, sums: LocalSum) -> Work:
        places = range(self.group.size)
        pieces = [tensor[shard(len(tensor), self.size, place % self.size)] for place in places]
        parts = [torch.empty_like(pieces[0]) for _ in places]
        self.group.all_to_all(parts, pieces)
        sums.into_shard(slice(0, len(parts[0])), parts, places)
        return self.group.start_barrier()

    def gather(
        self,
        tensor: Tensor,
        per_rank: bool = False,
        name: str = "",
        messages: ShardMessages | None = None,
    ) -> Work:
        assert messages is None
        own = tensor[shard(len(tensor), self.size, self.rank)]
        return self.shards.start_all_gather(tensor, own, name)

    def node_barrier(self) -> Work:
        return self.group.start_barrier()

    def close(self) -> None:
        pass


def trained(axis: DataAxis, stage: int, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Train three steps on this rank's batches; return the weights, of data rank 0."""
    spec = Spec(model=MODEL, train=Train(precision="fp32"), zero=Zero(stage=stage))  # type: ignore[arg-type]
    module = build.on_meta(MODEL)
    layers = list(zip(module.layers(), families.layers(MODEL), strict=True))
    names = [parameter.name for _, layer in layers for parameter in layer.parameters]
    settings = EngineSettings(spec.train, spec.optimizer, spec.zero, 1, True, own_model=True)
    engine = Engine(ModelParts(module, layers, None, {}, names), axis, settings)
    for batch in batches:
        engine.backward(engine(batch) / 28, last=True)
        engine.finish_step(0.01)
    weights = engine.full_state_dict()
    engine.close()
    return weights


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", range(4))
def test_a_data_axis_of_shards_and_replicas_trains_as_any_other(world: World, stage: int) -> None:
    grid = Grid.build(Spec().parallel, world.node_of_rank)
    divided = grid.divided("data", {"shard": world.size // 2, "replica": 2})
    text = torch.arange(3 * 8).view(3, 1, 8) * (world.rank + 3) % MODEL.vocab
    batches = [MicroBatch(row[:, :-1], row[:, 1:], torch.arange(1), 0, 1) for row in text]
    plain = Messages(world.everyone, world.group("world", range(world.size), "gathers"))
    expected = trained(plain, stage, batches)
    found = trained(ShardReplica(world, divided), stage, batches)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name.endswith("qkv.bias"):  # the gradient of the keys' bias is rounding alone
            values[1] = found[name][1]
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-7)
