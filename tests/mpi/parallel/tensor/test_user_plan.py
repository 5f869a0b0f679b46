"""Modules of users, cut by a tensor plan, train on many ranks as plain PyTorch trains them on one:
heads that the ranks share unevenly or must keep whole, fused maps, tied vocabularies, positions.
"""

from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError
from tests.support.tensor_plans import (
    BERT,
    GPT2,
    LAYERS,
    LENGTH,
    LLAMA,
    MODELS,
    SAMPLES,
    Mlp,
    alone,
    assert_same,
    bert,
    gpt2,
    llama,
    loss_of,
    made,
    spec_of,
    trained,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.usefixtures("poisoned_regions"),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.few(3)
def test_equals_pytorch(world: World, model: str, everything: bool) -> None:
    kind, plan = MODELS[model]
    expected = alone(kind)
    number = list(MODELS).index(model)
    for tensor in (2, world.size) if world.size == 4 else (world.size,):
        for stage in range(4) if everything else [number % 4]:
            found = trained(world, made(kind), plan, spec_of(tensor, stage))
            assert_same(expected, found, world.rank)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("model", ["bert", "gpt2", "llama 2", "qwen3"])
@pytest.mark.slow
def test_positions_are_shared(world: World, model: str, checkpointed: bool) -> None:
    kind, plan = MODELS[model]
    layers = LAYERS["llama" if model == "qwen3" else model.split()[0]]
    module = made(kind)
    if checkpointed:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    found = trained(
        world, module, {layers: "sequence", **plan}, spec_of(world.size, 3 * checkpointed, True)
    )
    assert_same(alone(kind), found, world.rank)


@pytest.mark.usual(2)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.slow
def test_attention_by_either_kernel_and_checkpointed(world: World, attention: str) -> None:
    def kind() -> nn.Module:
        return llama(2, attn_implementation=attention)

    module = made(kind)
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    assert_same(alone(kind), trained(world, module, LLAMA, spec_of(world.size, 3)), world.rank)


@pytest.mark.usual(2)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("kind", "plan"), [(gpt2, GPT2), (bert, BERT)], ids=["gpt2", "bert"])
@pytest.mark.few(1)
def test_dropout_is_the_same_outside_of_cut_regions(
    world: World, kind: Any, plan: Any, checkpointed: bool
) -> None:
    """The comparison of losses and gradients would end it; and recomputing draws the same."""

    def losses(checkpointed: bool) -> list[float]:
        module = made(lambda: kind(0.3))
        if checkpointed:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(world.rank)
        return trained(world, module, plan, spec_of(world.size, 1), 5)[0]

    first = losses(False)
    assert first != trained(world, made(lambda: kind(0.0)), plan, spec_of(world.size, 1), 5)[0]
    if checkpointed:
        assert losses(True) == pytest.approx(first, rel=1e-5)


@pytest.mark.usual(2)
def test_heads_of_ranks_drop_by_themselves(world: World) -> None:
    """Inside of a cut region each rank draws its own numbers; after it all go on alike."""
    plan = {"0.0": "column", "0.2": "row"}
    module = nn.Sequential(
        nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)), nn.Dropout(0.5)
    )
    inside: list[torch.Tensor] = []
    module[0][1].register_forward_hook(lambda _, __, out: inside.append(out == 0))
    torch.manual_seed(world.rank)
    with hpczero.initialize(module, spec_of(world.size, 0), world, tensor_plan=plan) as engine:
        masks, ends = [], []
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 8)).square().sum())
            engine.step()
            masks.append(inside[-1].sum())
            ends.append(torch.rand(1))
        assert len(set(world.everyone.stack(torch.stack(ends))[:, 0].flatten().tolist())) == 1
        assert ends[0] != ends[1]
        counts = world.everyone.stack(torch.stack(masks)).T.tolist()
        assert any(len(set(one)) > 1 for one in counts)


@pytest.mark.usual(3)
def test_the_values_are_rank_0s_and_only_parts_are_kept(world: World) -> None:
    with torch.device("cpu" if world.rank == 0 else "meta"):
        module = Mlp()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    plan = MODELS["mlp"][1]
    with hpczero.initialize(module, spec_of(world.size, 2), world, tensor_plan=plan) as engine:
        rows = engine.module.blocks[0][1].weight.shape[0]
        sizes = world.everyone.stack(torch.tensor([rows])).flatten().tolist()
        assert sum(sizes) == 37
        assert max(sizes) - min(sizes) <= 1
        state = engine.full_state_dict()
        if world.rank == 0:
            assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
        changed = {name: tensor + 1 for name, tensor in state.items()}
        engine.load_state_dict(changed)
        state = engine.full_state_dict()
        assert all(torch.equal(tensor, changed[name]) for name, tensor in state.items())
        norm = engine.module.blocks[1][0]
        with engine.gathered(norm.parameters(), modify=True), torch.no_grad():
            norm.weight.fill_(5.0 + world.rank)
        assert (norm.weight == 5.0).all()
        loss_of(engine, 0, slice(0, SAMPLES))


@pytest.mark.usual(2)
def test_several_backwards_lengths_and_evaluation(world: World) -> None:
    """Gradients of two halves add up; an evaluation in between changes nothing."""
    kind, plan = MODELS["llama 2"]
    norms = []
    for halves in (1, 2):
        spec = spec_of(world.size, 2)
        with hpczero.initialize(made(kind), spec, world, tensor_plan=plan) as engine:
            for half in range(halves):
                width = SAMPLES // halves
                loss = loss_of(engine, 0, slice(half * width, (half + 1) * width))
                engine.backward(loss / halves)
                engine.module.eval()
                with torch.no_grad():
                    engine(input_ids=torch.zeros(1, LENGTH - 3, dtype=torch.int64))
                engine.module.train()
            norms.append(engine.step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.usual(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_half_precision_is_near(world: World, precision: str) -> None:
    kind, plan = MODELS["llama 1"]
    spec = spec_of(world.size, 2, precision=precision)
    losses, _ = trained(world, made(kind), plan, spec, 8)
    assert losses == pytest.approx(alone(kind)[0][:8], rel=3e-2)


def test_after_the_end_the_module_is_as_it_was(world: World) -> None:
    kind, plan = MODELS["llama 2"]
    module: Any = made(kind)
    attention = module.model.layers[0].self_attn
    groups = attention.num_key_value_groups
    engine = hpczero.initialize(module, spec_of(world.size, 0), world, tensor_plan=plan)
    if world.size > 2:
        assert attention.num_key_value_groups == 1
    engine.close()
    assert attention.num_key_value_groups == groups
    assert "forward" not in vars(attention.q_proj)
    assert not attention.q_proj._forward_hooks
    with pytest.raises(HpczeroError, match="went when hpczero's engine was closed"):
        attention.q_proj.weight.sum()
    assert attention.config is not None
