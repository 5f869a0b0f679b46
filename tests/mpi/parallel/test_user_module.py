"""Modules of users, with unusual habits, train on many ranks as plain PyTorch trains them on one,
at every stage.
"""

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from hpczero.parallel.user_module import layers_of
from hpczero.spec.schema import Model, Spec
from hpczero.train.initialize import Training
from tests.support.models import (
    Again,
    Convolutions,
    Odd,
    Pair,
    Positions,
    TextModel,
    Tower,
)
from tests.support.training import train
from tests.support.user_modules import (
    SAMPLES,
    SHARE_HALVES,
    SHARE_SAMPLES,
    WAYS,
    Loss,
    alone,
    assert_same,
    made,
    of_images,
    of_skipping,
    of_tokens,
    of_vectors,
    spec_of,
    trained,
    ways,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usual(2),
    pytest.mark.usefixtures("poisoned_regions"),
]


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "convolutions": (lambda: Convolutions(False), of_images),
    "odd": (Odd, of_tokens),
    "odd, checkpointed": (lambda: Odd(checkpointed=True), of_tokens),
    "several layers in a checkpoint": (Tower, of_vectors),
    "views of weights, and work in place": (Positions, of_vectors),
}


@SHARE_HALVES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(4)
def test_every_way_equals_pytorch(world: World, case: str, everything: bool) -> None:
    kind, loss = CASES[case]
    expected = alone(kind, loss)
    how = ((1, True), (2, False))
    for stage, shared in ways(list(CASES).index(case) + 1, everything):
        for backwards, hint in how if everything else (how[stage % 2],):
            assert_same(
                expected,
                trained(world, kind, loss, spec_of(stage, shared), backwards, hint),
                world.rank,
            )


class Branches(nn.Module):
    """Layers beside each other; gradients come in the reverse of the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, last_first: bool) -> torch.Tensor:
        order = reversed(range(4)) if last_first else range(4)
        of_layer = {number: self.layers[number](x) for number in order}
        return sum(of_layer[number].square().sum() for number in range(4))


@SHARE_SAMPLES
def test_gradients_that_come_in_other_orders_on_other_ranks(world: World) -> None:
    def loss(module: Any, part: slice) -> torch.Tensor:
        x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(2))[part]
        return module(x, world.rank % 2 == 1) / 100

    expected = alone(Branches, loss)
    for stage in (1, 2):  # at stage 3 weights are gathered in one order
        assert_same(expected, trained(world, Branches, loss, spec_of(stage, False)), world.rank)


@SHARE_HALVES
@pytest.mark.parametrize("case", ["convolutions", "odd"])
@pytest.mark.few(1)
def test_a_rank_ahead_waits_before_it_writes_what_others_read(world: World, case: str) -> None:
    """The gradient of a parameter outside the layers comes early in a backward, while its sum of
    the previous backward is still in flight.
    """
    kind, loss = CASES[case]

    def late(module: Any, part: slice) -> torch.Tensor:
        time.sleep(0.02 * (world.rank % 2))
        return loss(module, part)

    expected = alone(kind, loss)
    for stage, shared in product((2, 3), (False, True)):
        assert_same(
            expected, trained(world, kind, late, spec_of(stage, shared), backwards=2), world.rank
        )


@SHARE_SAMPLES
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.slow
def test_a_model_from_transformers(world: World, checkpointed: bool) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install hpczero[test]"
    )

    def kind() -> nn.Module:
        sizes = {
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        model: nn.Module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=40, tie_word_embeddings=True, **sizes)
        )
        if checkpointed:
            enable = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        return model.train()

    def loss(module: Any, part: slice) -> torch.Tensor:
        tokens = torch.randint(40, (SAMPLES, 9), generator=torch.Generator().manual_seed(2))[part]
        return module(input_ids=tokens, labels=tokens).loss * tokens.shape[0] / SAMPLES

    expected = alone(kind, loss)
    for stage, shared in ((2, True), (3, False)):
        assert_same(expected, trained(world, kind, loss, spec_of(stage, shared)), world.rank)


@SHARE_SAMPLES
def test_layers_that_only_some_ranks_use(world: World, everything: bool) -> None:
    """Every rank must run the same layers only where weights are gathered by messages."""
    expected = alone(Odd, of_skipping)
    for stage, shared in ways(0, everything):
        if (stage, shared) != (3, False):
            found = trained(world, Odd, of_skipping, spec_of(stage, shared))
            assert_same(expected, found, world.rank)


@SHARE_SAMPLES
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(1)
def test_stages_are_bitwise_equal_in_half_precision(
    world: World, case: str, precision: str, everything: bool
) -> None:
    kind, loss = CASES[case]
    first, *others = (
        trained(world, kind, loss, spec_of(stage, shared, precision), accumulates=False)
        for stage, shared in ways(list(CASES).index(case), everything)
    )
    for other in others:
        assert first[0] == other[0]
        assert all(torch.equal(tensor, other[1][name]) for name, tensor in first[1].items())


@pytest.mark.parametrize(("stage", "shared"), WAYS)
@pytest.mark.few(3)
def test_a_layer_that_runs_may_leave_a_parameter_without_gradient(
    world: World, stage: int, shared: bool
) -> None:
    with hpczero.initialize(
        made(lambda: nn.Sequential(*(Pair() for _ in range(6)))),
        spec_of(stage, shared),
        world,
        accumulates=False,
    ) as engine:
        engine.module[3].skips = world.rank > 0
        norms = []
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 16)).mean(), last=True)
            norms.append(engine.step().grad_norm)
        assert all(norm > 0 for norm in norms)
        assert len(set(world.everyone.stack(torch.tensor(norms)).sum(1).tolist())) == 1


def test_what_was_computed_inside_a_backward_has_a_gradient(world: World) -> None:
    norms = set()
    for stage, shared in WAYS:
        with hpczero.initialize(made(Again), spec_of(stage, shared), world) as engine:
            engine.backward(engine(torch.ones(2, 16)))
            engine.backward(engine.module.kept)
            norms.add(f"{engine.step().grad_norm:.5g}")
    (norm,) = norms
    assert float(norm) > 0


@pytest.mark.ranks(3, 4)
def test_nodes_that_share_their_weights(world: World) -> None:
    """2 + 1 and 2 x 2 ranks on simulated nodes."""
    expected, nodes = alone(Odd, of_tokens), world.part(range(world.size), 2)
    for stage in range(4):
        assert_same(expected, trained(nodes, Odd, of_tokens, spec_of(stage, True)), world.rank)
        with hpczero.initialize(made(Odd), spec_of(stage, True), nodes) as engine:
            with engine.gathered([engine.module.offset], modify=True), torch.no_grad():
                engine.module.offset.fill_(4.0 + world.rank)
            assert engine.module.offset == 4.0
    nodes.close()


def test_mistakes_in_the_loop_are_said(whole: World) -> None:
    spec = spec_of(1, False, "bf16")
    engine: Training = hpczero.initialize(made(Odd), spec, whole)
    with pytest.raises(HpczeroError, match="backward comes before it"):
        engine.step()
    engine.backward(of_tokens(engine, slice(0, 1)), last=True)
    with pytest.raises(HpczeroError, match="said to be the last"):
        engine.backward(of_tokens(engine, slice(0, 1)))
    engine.step(lr=0.5)
    with (
        pytest.raises(HpczeroError, match="none of the engine's parameters"),
        engine.gathered([torch.ones(3)]),
    ):
        pass
    engine.close()
    engine.close()
    with pytest.raises(InputError, match=r"the dictionary given: zero\.stage = 7"):
        hpczero.initialize(made(Odd), {"zero": {"stage": 7}}, whole)


def test_the_trainer_trains_what_a_name_leads_to(world: World) -> None:
    model = Model(
        family="tests.support.models:TextModel", layers=2, hidden=24, seq_len=17, vocab=61
    )
    base = {**spec_of(0, False), "data": {"source": "synthetic"}}
    base["train"] = {
        **base["train"],
        "global_batch": 2 * world.size,
        "micro_batch": 1,
        "eval_batches": 1,
    }
    serial = world.part([world.rank])
    expected = train(serial, Spec.model_validate(base).model_copy(update={"model": model}))
    serial.close()
    for stage, shared in WAYS:
        spec = Spec.model_validate({**base, "zero": spec_of(stage, shared)["zero"]}).model_copy(
            update={"model": model}
        )
        record = train(world, spec)
        assert record.losses == pytest.approx(expected.losses, rel=1e-5)
        assert all(
            (tensor - record.weights[name]).norm() <= 1e-4 * tensor.norm()
            for name, tensor in expected.weights.items()
        )


def test_layers_are_the_larger_parts() -> None:
    def names(module: nn.Module) -> dict[str, list[str]]:
        return {
            layer.name: [parameter.name for parameter in layer.parameters]
            for _, layer in layers_of(module)
            if layer.parameters
        }

    found = names(made(Odd))
    assert found["the model"] == ["offset", "gains.0", "gains.1"]
    assert {
        "embedding",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "recurrent",
        "attention",
    } <= found.keys()
    assert "blocks.3" not in found
    assert len(found["attention"]) >= 4, (
        "attention is not cut: it uses its parts' weights without calling them"
    )
    assert sum(map(len, found.values())) == sum(
        own.is_floating_point() for own in Odd().parameters()
    )
    assert list(names(TextModel(Model(layers=3, hidden=32)))) == [
        "embedding",
        "body.0",
        "body.1",
        "body.2",
        "head",
    ]
    assert list(names(nn.Linear(3, 3))) == ["the model"]
    deep = names(nn.Sequential(nn.Sequential(nn.Sequential(*(nn.Linear(9, 9) for _ in range(20))))))
    assert len(deep) >= 16, deep.keys()
    assert len(names(nn.Sequential(*(nn.Linear(9, 9) for _ in range(200))))) <= 20, (
        "small neighbours go together"
    )
    with pytest.raises(InputError, match="nothing to train"):
        layers_of(nn.ReLU())
