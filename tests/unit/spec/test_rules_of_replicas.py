"""Rules of replicas: local steps, one_bit_adam, shards among fewer ranks, compressed sums."""

from typing import Any

import pytest

from hpczero.spec.load import load
from hpczero.spec.optimizer import Outer
from hpczero.spec.rules import contradictions, unavailable, without_effect
from hpczero.spec.schema import Comm, Optimizer, Spec, Train, Zero
from tests.support.specs import Write, refusal

LOCAL = "optimizer.outer.every = 50\n"
SIGNS = 'optimizer.name = "one_bit_adam"\n'
NODE = 'zero.shard_ranks = "node"\n'


@pytest.mark.parametrize(
    "text",
    [
        LOCAL + NODE,
        SIGNS + NODE,
        SIGNS + "zero.shard_ranks = 1\nzero.stage = 0\noptimizer.freeze = 99",
        LOCAL + "zero.shard_ranks = 4\ncheckpoint.every = 0",
        LOCAL + NODE + "checkpoint.every = -1\noptimizer.outer.fragments = 50",
        LOCAL + NODE + "checkpoint.every = 150\noptimizer.outer.precision = 'int4'",
        'comm.compress = "int8"\n' + NODE,
        'comm.compress = "int8"\ntrain.precision = "fp32"\n' + NODE,
        LOCAL + NODE + "model.family = 'some.module:factory'",
        SIGNS + NODE + "parallel = { tensor = 2, pipeline = 2 }",
    ],
)
def test_what_goes_together(write: Write, text: str) -> None:
    spec = load(write(text)).spec
    assert without_effect(spec) == unavailable(spec) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            SIGNS + LOCAL + NODE,
            'spec.toml:2: optimizer.name = "one_bit_adam" and optimizer.outer.every = 50 are two '
            'ways to send less between replicas: choose one, by optimizer.name = "adamw" or '
            "optimizer.outer.every = 0 (optimizer.name: spec.toml:1)",
        ),
        (
            LOCAL,
            'spec.toml:1: zero.shard_ranks = "all" makes all data ranks one worker with one '
            "replica, and optimizer.outer.every = 50 is for several: zero.shard_ranks = "
            '"node" (the data ranks of a node are a worker) or a number (so many are one) '
            "(zero.shard_ranks: default)",
        ),
        (
            SIGNS,
            'with one replica, and optimizer.name = "one_bit_adam" is for several: '
            'zero.shard_ranks = "node" (the data ranks of a node',
        ),
        (
            LOCAL + NODE + 'comm.compress = "int8"',
            'spec.toml:3: comm.compress = "int8" is for gradients of every step; what is sent with '
            "optimizer.outer.every = 50 is compressed already (optimizer.outer.precision): "
            'comm.compress = "none", or optimizer.outer.every = 0',
        ),
        (
            SIGNS + NODE + 'comm.compress = "int8"',
            'optimizer.name = "one_bit_adam" is compressed already (sign bits): '
            'comm.compress = "none", or optimizer.name = "adamw"',
        ),
        (
            LOCAL + NODE + 'zero.offload = "cpu"',
            'spec.toml:3: zero.offload = "cpu" is not supported with optimizer.outer.every = 50: '
            'the states of replicas stay in memory: zero.offload = "none", or '
            "optimizer.outer.every = 0",
        ),
        (
            SIGNS + NODE + 'zero.offload = "nvme:/x"',
            'zero.offload = "nvme:/x" is not supported with optimizer.name = "one_bit_adam"',
        ),
        (
            "optimizer.outer = { every = 50, fragments = 51 }\n" + NODE,
            "spec.toml:1: optimizer.outer.fragments = 51 is more than optimizer.outer.every = 50, "
            "and each fragment has a step of its own: at most 50 fragments, or every = 51 or more",
        ),
        (
            "optimizer.outer.every = 30\n" + NODE,
            "spec.toml:1: checkpoint.every = 1000 is no multiple of optimizer.outer.every = 30, "
            "and checkpoints are taken at outer steps: checkpoint.every = 990, 1020 or "
            "0 (when the run ends) (checkpoint.every: default)",
        ),
        (
            LOCAL + NODE + "checkpoint.every = 20",
            "checkpoint.every = 50 or 0 (when the run ends)",
        ),
        (
            LOCAL + NODE + f"checkpoint.every = {10**15 - 1}",
            "checkpoint.every = 999999999999950, 1000000000000000 or 0 (when the run ends)",
        ),
        (
            SIGNS + NODE + "optimizer.freeze = 100",
            "spec.toml:3: optimizer.freeze = 100 of train.steps = 100 leaves no step that sends "
            "signs: at most 99 (0: found by itself), or at least train.steps = 101",
        ),
        (
            SIGNS + NODE + "optimizer.freeze = 9\ntrain.steps = 1",
            "at most 0 (0: found by itself), or at least train.steps = 10",
        ),
    ],
)
def test_a_contradiction_shows_all_numbers_and_the_way_out(
    write: Write, text: str, expected: str
) -> None:
    message = refusal(write(text))
    assert expected in message
    assert message.startswith("spec.toml:")
    assert "mistakes" not in message


def test_a_contradiction_is_said_once_for_both_ways(write: Write) -> None:
    lines = refusal(write(SIGNS + LOCAL)).splitlines()
    assert len(lines) == 3
    assert sum("zero.shard_ranks" in line for line in lines) == 1


def spec(shard_ranks: Any = "node", precision: Any = "bf16", **changes: Any) -> Spec:
    zero = {"shard_ranks": shard_ranks} | changes.pop("zero", {})
    return Spec(train=Train(precision=precision), zero=Zero(**zero), **changes)


@pytest.mark.parametrize(
    ("job", "notes"),
    [
        (
            spec(optimizer=Optimizer(freeze=5)),
            [
                'optimizer.freeze = 5 has no effect with optimizer.name = "adamw": '
                "only one_bit_adam freezes a moment"
            ],
        ),
        (
            spec(optimizer=Optimizer(outer=Outer(lr=1.0, fragments=2, precision="int8"))),
            [
                f"optimizer.outer.{setting} has no effect with optimizer.outer.every = 0: "
                "there are no outer steps"
                for setting in ("lr = 1.0", "fragments = 2", 'precision = "int8"')
            ],
        ),
        (
            spec("all", "fp32", comm=Comm(compress="int8")),
            [
                'comm.compress = "int8" has no effect with zero.shard_ranks = "all", where there '
                'are no replicas, and train.precision = "fp32": weights are not gathered in 8 bits'
            ],
        ),
        (
            spec("all", "bf16", comm=Comm(compress="int8"), zero={"stage": 0}),
            [
                'comm.compress = "int8" has no effect with zero.shard_ranks = "all", where there '
                "are no replicas, and zero.stage = 0: weights are not gathered in 8 bits"
            ],
        ),
        (spec("all", "bf16", comm=Comm(compress="int8")), []),
        (spec(2, "bf16", comm=Comm(compress="int8")), []),
        (spec(2, "fp32", comm=Comm(compress="int8")), []),
        (
            spec(1, zero={"stage": 3}),
            ["zero.stage = 3 has no effect with zero.shard_ranks = 1: each rank has all states"],
        ),
        (spec(1, zero={"stage": 0}), []),
        (spec(optimizer=Optimizer(outer=Outer(every=5, lr=1.0, momentum=0.0))), []),
        (spec(optimizer=Optimizer(name="one_bit_adam", freeze=5)), []),
    ],
)
def test_what_has_no_effect_is_said(job: Spec, notes: list[str]) -> None:
    assert without_effect(job) == notes


@pytest.mark.parametrize("ranks", ["all", "node", 1, 8, 1_000_000])
def test_data_ranks_that_share_the_states(write: Write, ranks: str | int) -> None:
    path = write("zero.stage = 0")
    assert load(path, [f"zero.shard_ranks={ranks}"]).spec.zero.shard_ranks == ranks


@pytest.mark.parametrize("ranks", ["0", "-1", "2.0", "true", "nodes", '"4"', "[1]", "1000001"])
def test_no_such_number_of_data_ranks(write: Write, ranks: str) -> None:
    message = refusal(write(""), f"zero.shard_ranks={ranks}")
    assert 'must be "all" or "node" or a whole number from 1 to 1_000_000' in message


def test_the_defaults_contradict_nothing() -> None:
    assert contradictions(Spec()) == without_effect(Spec()) == []
