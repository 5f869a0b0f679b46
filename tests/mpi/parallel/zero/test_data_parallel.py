"""Data parallelism gives the serial result, whatever the number of ranks and however the batch
is cut.
"""

import pytest
import torch

from hpczero.comm.world import World
from hpczero.spec.schema import Data, Model, Optimizer, Spec, Train
from tests.support.training import assert_same, distance, train

pytestmark = [pytest.mark.mpi, pytest.mark.many_ranks]


def spec_of(
    global_batch: int,
    micro_batch: int,
    dropout: float = 0.0,
    precision: str = "fp32",
    steps: int = 20,
    **train: object,
) -> Spec:
    return Spec(
        model=Model(layers=2, hidden=24, heads=3, seq_len=33, vocab=61, dropout=dropout),
        data=Data(source="synthetic"),
        train=Train(
            steps=steps,
            global_batch=global_batch,
            micro_batch=micro_batch,
            precision=precision,
            eval_batches=2,
            eval_every=9,
            **train,
        ),
        optimizer=Optimizer(lr=1e-2, eps=1e-6),
    )


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "dropout"), [(8, 8, 0.0), (5, 2, 0.0), (2, 4, 0.2), (7, 1, 0.2)]
)
@pytest.mark.few(2)
def test_equal_to_the_serial_run(
    world: World, global_batch: int, micro_batch: int, dropout: float
) -> None:
    spec = spec_of(global_batch, micro_batch, dropout)
    alone = world.part([world.rank])
    serial = train(alone, spec)
    alone.close()
    parallel = train(world, spec)
    assert serial.losses[-1] < serial.losses[0] - 0.1
    assert_same(serial, parallel)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.few(1)
def test_the_same_spec_twice_is_bitwise_equal(world: World, precision: str) -> None:
    spec = spec_of(5, 2, dropout=0.1, precision=precision, steps=6)
    one, other = train(world, spec), train(world, spec)
    assert one.losses == other.losses
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.few(1)
def test_half_precision_stays_close_to_fp32(world: World, precision: str) -> None:
    exact = train(world, spec_of(6, 2, steps=10))
    half = train(world, spec_of(6, 2, precision=precision, steps=10))
    assert half.losses == pytest.approx(exact.losses, rel=2e-2)
    assert half.losses[-1] < half.losses[0]


def test_every_rank_ends_with_the_same_weights(world: World) -> None:
    record = train(world, spec_of(5, 2, precision="bf16", steps=4))
    flat = torch.cat([record.weights[name].flatten() for name in sorted(record.weights)])
    theirs = flat.clone()
    world.everyone.broadcast(theirs, 0)
    assert torch.equal(flat, theirs)


def test_clipping_limits_the_update_not_the_reported_norm(world: World) -> None:
    free, clipped = (train(world, spec_of(4, 2, steps=1, grad_clip=clip)) for clip in (0.0, 1e-3))
    assert clipped.metrics_seen[0]["grad_norm"] == free.metrics_seen[0]["grad_norm"] > 1e-3
    assert distance(free.weights, clipped.weights) > 0


@pytest.mark.parametrize("bad_rank", [0, -1])
def test_a_bad_gradient_is_skipped_on_all_ranks_and_named(
    world: World, bad_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's gradient of one tensor is made infinite in the second step."""
    from hpczero.parallel.zero.engine import Unit

    bad_rank %= world.size
    complete, calls = Unit.complete, []

    def spoil(unit: Unit) -> None:
        if unit.layout.name == "blocks.1":
            calls.append(1)
            if world.rank == bad_rank and len(calls) == 2:
                unit.part(unit.buffer, unit.layout.slots[4]).view(-1)[3] = float("inf")
        complete(unit)

    monkeypatch.setattr(Unit, "complete", spoil)
    record = train(world, spec_of(8, 2, steps=3))
    assert [metrics.get("skipped", False) for metrics in record.metrics_seen] == [
        False,
        True,
        False,
    ]
    warnings = [values["where"] for name, values in record.events if name == "WARN"]
    assert set(warnings) == {f"first in blocks.1.attention.output.weight of data rank {bad_rank}"}


def test_fp16_overflow_halves_the_scale_and_skips_on_all_ranks(world: World) -> None:
    spec = spec_of(4, 2, precision="fp16", steps=4, loss_scale=2.0**40)
    record = train(world, spec)
    scales = [metrics["loss_scale"] for metrics in record.metrics_seen]
    assert scales == [2.0**40 / 2**step for step in range(4)]
    assert all(metrics["skipped"] for metrics in record.metrics_seen)
