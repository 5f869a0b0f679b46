"""The state of a user's module: buffers, gathered parameters, state dictionaries, and the initial
values of modules on meta.
"""

import time
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from tests.support.models import (
    Convolutions,
    Odd,
)
from tests.support.user_modules import (
    WAYS,
    made,
    of_images,
    of_tokens,
    spec_of,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usual(2),
    pytest.mark.usefixtures("poisoned_regions"),
]


def test_statistics_of_batches_stay_with_each_rank(world: World) -> None:
    for (stage, shared), precision in product(WAYS, ("fp32", "bf16")):
        with hpczero.initialize(
            made(lambda: Convolutions(True), world.rank), spec_of(stage, shared, precision), world
        ) as engine:
            before = engine.module.features[0][1].running_mean.clone()
            assert not before.any()
            engine.backward(of_images(engine, slice(world.rank, world.rank + 3)))
            assert engine.step().grad_norm > 0
            own = engine.module.features[0][1].running_mean.sum().double().view(1)
            sums = world.everyone.stack(own).flatten().tolist()
            assert len(set(sums)) == world.size
            state = engine.full_state_dict()
            if world.rank == 0:
                assert torch.equal(
                    state["features.0.1.running_mean"], engine.module.features[0][1].running_mean
                )
                assert state["features.0.1.num_batches_tracked"] == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.few(1)
def test_gathered_parameters_are_whole_and_what_rank_0_changes_is_everyones(
    world: World, precision: str
) -> None:
    for stage, shared in WAYS:
        with hpczero.initialize(made(Odd), spec_of(stage, shared, precision), world) as engine:
            engine.backward(of_tokens(engine, slice(0, 2)))
            engine.step()
            before = engine.full_state_dict()
            block, offset = engine.module.blocks[1], engine.module.offset
            with engine.gathered(block.parameters()):
                expected = world.everyone.stack(block.up.weight.detach().float().clone())
                assert all(torch.equal(each, expected[0]) for each in expected)
                if world.rank == 0:
                    assert torch.equal(
                        expected[0], before["blocks.1.up.weight"].to(engine.dtype).float()
                    )
            with engine.gathered([block.down.weight, offset], modify=True), torch.no_grad():
                block.down.weight[1, 2] = 3.0 if world.rank == 0 else 5.0
                offset.fill_(-2.0)
                assert of_tokens(engine, slice(0, 1)).isfinite()  # it may even run
            after = engine.full_state_dict()
            if world.rank == 0:
                assert after["blocks.1.down.weight"][1, 2] == 3.0
                assert after["offset"] == -2.0
                before["blocks.1.down.weight"][1, 2] = 3.0
                before["offset"] = torch.tensor(-2.0)
                assert all(torch.equal(tensor, before[name]) for name, tensor in after.items()), (
                    "what was not changed keeps its precision"
                )
            losses = world.everyone.stack(
                of_tokens(engine, slice(0, 1)).detach().float().view(1)
            ).flatten()
            assert (losses == losses[0]).all()
            if stage == 3 and not shared and world.size > 1:
                with pytest.raises(HpczeroError, match=r"blocks\.1\.down\.weight is used outside"):
                    block.down.weight.sum()


def test_a_state_is_taken_home_and_brought_back(world: World) -> None:
    for stage, shared in WAYS:
        with hpczero.initialize(made(Odd), spec_of(stage, shared), world) as engine:
            first = engine.full_state_dict()
            engine.backward(of_tokens(engine, slice(0, 2)))
            engine.step()
            changed = engine.full_state_dict()
            engine.load_state_dict(first)
            again = engine.full_state_dict()
            if world.rank == 0:
                assert not torch.equal(first["head.weight"], changed["head.weight"])
                assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
                made(Odd).load_state_dict(first)  # PyTorch takes it
            first = {
                "other" if name == "offset" else name: tensor for name, tensor in first.items()
            }
            with pytest.raises(
                InputError,
                match="rank 0 says more" if world.rank else "offset is missing; other is unknown",
            ):
                engine.load_state_dict(first)


def test_buffers_that_are_loaded_are_every_ranks(world: World) -> None:
    module = made(lambda: Convolutions(True), world.rank)
    with hpczero.initialize(module, spec_of(1, False), world) as engine:
        state = engine.full_state_dict()
        if world.rank == 0:
            state["features.0.1.running_mean"].fill_(7.0)
        engine.load_state_dict(state)
        assert (engine.module.features[0][1].running_mean == 7.0).all()


def test_weights_are_loaded_when_no_rank_of_the_node_reads_the_old_ones(world: World) -> None:
    """The last rank is late in its forward."""

    def late(*_: object) -> None:
        time.sleep(0.3 * (world.rank == world.size - 1))

    with hpczero.initialize(made(Odd), spec_of(1, True), world) as engine, torch.no_grad():
        before = of_tokens(engine, slice(0, 1)).clone()
        state = {name: torch.zeros_like(old) for name, old in engine.full_state_dict().items()}
        engine.module.blocks[1].register_forward_pre_hook(late)
        assert torch.equal(of_tokens(engine, slice(0, 1)), before)
        engine.load_state_dict(state)
        assert not torch.equal(of_tokens(engine, slice(0, 1)), before)


@pytest.mark.parametrize("meta", ["everywhere", "but on rank 0"])
@pytest.mark.few(1)
def test_modules_on_meta_get_the_same_values_in_every_layout(world: World, meta: str) -> None:
    states = []
    for stage, shared in WAYS:
        with torch.device("meta" if meta == "everywhere" or world.rank else "cpu"):
            module = made(
                lambda: nn.Sequential(
                    nn.Linear(20, 30),
                    nn.BatchNorm1d(30),
                    nn.MultiheadAttention(30, 2),
                    nn.Linear(30, 3),
                    nn.Linear(30, 3),
                )
            )
        with hpczero.initialize(module, spec_of(stage, shared), world) as engine:
            assert not any(
                tensor.is_meta for tensor in [*engine.module.parameters(), *engine.module.buffers()]
            )
            states.append(engine.full_state_dict())
    if world.rank == 0:
        first = states[0]
        assert all(
            torch.equal(tensor, other[name])
            for other in states[1:]
            for name, tensor in first.items()
        )
        assert first["0.weight"].std() == pytest.approx((1 / 20 / 3) ** 0.5, rel=0.2)
        assert not torch.equal(first["3.weight"], first["4.weight"])
        assert first["1.running_var"].eq(1).all()
        assert first["2.out_proj.bias"].eq(0).all()


def test_what_on_meta_has_no_values_is_named(whole: World) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    for stage, shared in WAYS:
        with torch.device("meta"):
            module = nn.ModuleDict({"fine": nn.Linear(3, 3), "bare": Bare()})
        with pytest.raises(
            InputError, match=r"no reset_parameters\(\) gives a value to bare\.weight"
        ):
            hpczero.initialize(module, spec_of(stage, shared), whole)


@pytest.mark.ranks(2)
def test_a_node_without_room_for_all_copies_gives_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights lay there once: room for one copy and a half is too little for two ranks."""
    module = made(Odd)
    engine = hpczero.initialize(module, spec_of(1, True), world)
    copy = sum(unit.weights.nbytes for unit in engine.engine.units)
    usable = SimpleNamespace(usable=3 * copy // 2)
    monkeypatch.setattr("hpczero.train.initialize.machine.memory", lambda: usable)
    engine.close()
    with pytest.raises(HpczeroError):
        module.offset.sum()
