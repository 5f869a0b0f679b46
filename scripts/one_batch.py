"""Steps of one batch, for the scripts that compare the ways to take one."""

import time
from collections.abc import Mapping
from typing import Any


class Job:
    """An engine, and steps of the same batch."""

    def __init__(self, world: Any, values: Mapping[str, Any]) -> None:
        """`values`: the tables of a spec; the vocabulary is that of bytes."""
        from hpczero.comm.grid import Grid
        from hpczero.data.dataset import SyntheticSource
        from hpczero.parallel.parallelize import assemble
        from hpczero.planner.volumes import resolved
        from hpczero.spec.load import from_dict
        from hpczero.train.batches import Batches

        model = values["model"] | {"vocab": 257}
        spec = from_dict({**values, "model": model, "data": {"source": "synthetic"}}).spec
        grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
        self.runner = assemble(spec, world, grid, accumulates=False)
        self.engine = self.runner.engine
        source = SyntheticSource(1, spec.model.vocab, spec.seq_len)
        rank, ranks = grid.coordinate(world.rank, "data"), grid.size("data")
        (self.batch,) = Batches(spec, source, rank, ranks).training(0)

    def step(self) -> tuple[float, float]:
        """Return the seconds of the step, and of its forward."""
        begun = time.perf_counter()
        loss = self.runner._forward(self.batch)
        forward = time.perf_counter() - begun
        self.engine.backward(loss / 1000, True)
        self.engine.finish_step(1e-5)
        return time.perf_counter() - begun, forward
