"""Memory stays as it is where the lengths of sequences change from step to step, once each was
there.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from hpczero.comm.grid import Grid
from hpczero.comm.trace import Trace
from hpczero.comm.world import World
from hpczero.data.dataset import SyntheticSource
from hpczero.parallel.activations.away import Lent
from hpczero.parallel.parallelize import assemble
from hpczero.parallel.zero.buffers import Stock
from hpczero.planner.volumes import resolved
from hpczero.spec.load import from_dict
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches
from hpczero.train.malloc import given_out

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

LONGEST = 512
LENGTHS = [LONGEST, 31, 448, 63, 256, 384, 127, 200]
STEPS = 300
WAYS: dict[str, dict[str, Any]] = {
    "gathered": {"zero": {"stage": 3}, "memory": {"recompute": "selective", "loss_chunk": 100}},
    "in files": {"zero": {"stage": 1, "offload": "nvme:FOLDER"}},
    "cut": {
        "parallel": {"tensor": 2},
        "memory": {"recompute": "block", "partition_activations": True},
    },
    "on the host": {
        "zero": {"stage": 2, "node_shared": False},
        "memory": {"offload_activations": "cpu"},
    },
}


def spec_of(way: dict[str, Any], folder: str) -> Spec:
    model = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 257, "seq_len": LONGEST}
    data = {"source": "synthetic"}
    train = {"precision": "bf16", "global_batch": 1 if "parallel" in way else 2, "micro_batch": 1}
    spec = from_dict({"model": model, "data": data, "train": train} | way).spec
    offload = spec.zero.offload.replace("FOLDER", folder)
    return spec.model_copy(update={"zero": spec.zero.model_copy(update={"offload": offload})})


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_memory_is_flat(
    world: World,
    there: World,
    way: str,
    shared_folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stocks: set[Stock] = set()
    taken = Lent.__init__

    def noted(lent: Lent, stock: Stock, size: int) -> None:
        stocks.add(stock)
        taken(lent, stock, size)

    monkeypatch.setattr(Lent, "__init__", noted)
    ranks = there if way == "on the host" else world
    spec = spec_of(WAYS[way], shared_folder)
    grid = Grid.build(resolved(spec, ranks.node_of_rank), ranks.node_of_rank)
    runner = assemble(spec, ranks, grid, accumulates=False)
    source = SyntheticSource(1, 257, LONGEST)
    place = grid.coordinate(ranks.rank, "data"), grid.size("data")
    order = random.Random(7)
    lengths = [*LENGTHS, *order.choices(LENGTHS, k=STEPS - len(LENGTHS))]
    sizes: list[int] = []
    stocked: list[int] = []
    for step, length in enumerate(lengths):
        batches = [
            replace(batch, tokens=batch.tokens[:, :length], targets=batch.targets[:, :length])
            for batch in Batches(spec, source, *place).training(step)
        ]
        runner.train(batches, 2 * length, Trace())
        runner.engine.finish_step(1e-4)
        runner.engine.wait_for_weights()
        size = given_out()
        assert size, "this needs glibc's malloc"
        sizes.append(size)
        stocked.append(sum(stock.size for stock in stocks))
    runner.engine.close()
    known = slice(len(LENGTHS), None)
    assert len(set(stocked[known])) == 1
    assert (max(stocked) > 0) == (way in ("cut", "on the host"))
    assert max(sizes[known]) <= 1.02 * min(sizes[known])
