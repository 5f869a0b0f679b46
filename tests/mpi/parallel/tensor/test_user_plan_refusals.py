"""Plans that cannot be are said before training; those that would give wrong numbers are an error
on all ranks.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from tests.support.tensor_plans import (
    LLAMA,
    MODELS,
    SAMPLES,
    Mlp,
    gpt2,
    llama,
    loss_of,
    made,
    spec_of,
)

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.usual(2)]


class Attention(nn.Module):
    """Attention with habits: a number of heads that is fixed, a gate of single heads, a gate of
    the stream, and a forgotten norm.
    """

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.habit = habit
        self.embedding = nn.Embedding(11, 16)
        self.num_heads = 4
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.first = self.query.weight[0, 0].item()
        self.norm = nn.LayerNorm(4)
        self.slopes = nn.Parameter(torch.arange(1.0, 5.0))
        self.out = nn.Linear(16, 16)
        self.beside = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        heads = 4 if self.habit == "fixed" else self.num_heads
        q, k, v = (
            part(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        is_cut = len(self.query.weight) < 16
        if self.habit == "one rank's" and is_cut and self.query.weight[0, 0] == self.first:
            raise ValueError("nobody else's")
        if self.habit == "norm":
            q = self.norm(q)
        if self.habit == "slopes":
            v = v * self.slopes[: self.num_heads, None, None]
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        if self.habit == "stream":
            y = y * x.mean(-1, keepdim=True)
        if self.habit == "beside":
            y = self.beside(y.unflatten(-1, (-1, 4))).flatten(-2)
        return x + self.out(y)


COLUMNS = {"query": "column", "key": "column", "value": "column"}
PLAN = {**COLUMNS, "out": "row"}


def step(world: World, module: nn.Module, plan: Any, differ: bool = False) -> float:
    spec = spec_of(world.size, 1)
    with hpczero.initialize(module, spec, world, tensor_plan=plan) as engine:
        first = world.rank if differ else 0
        tokens = (torch.arange(24).view(2, 12) + first) % 11
        engine.backward(engine(tokens).square().mean())
        return engine.step().grad_norm


def test_what_has_no_odd_habit_trains(world: World) -> None:
    module = made(Attention)
    loss = module(torch.arange(24).view(2, 12) % 11).square().mean()
    loss.backward()
    used = [own.grad.norm() for own in module.parameters() if own.grad is not None]
    expected = torch.stack(used).norm().item()
    assert step(world, made(Attention), PLAN) == pytest.approx(expected, rel=1e-5)
    norm = made(lambda: Attention("norm"))
    assert step(world, norm, {**PLAN, "norm": "replicated"}) > 0


@pytest.mark.parametrize(
    ("habit", "plan", "what"),
    [
        ("fixed", PLAN, r"does not compute what it computes whole: its output differs by"),
        ("slopes", PLAN, r"does not compute what it computes whole: its output differs by"),
        ("one rank's", PLAN, r"what it computes whole: it fails( on other ranks|: nobody else's)"),
        ("beside", PLAN, r"different gradients of beside\.(weight|bias), which all of them"),
        ("norm", PLAN, r"different gradients of norm\.weight, which all of them"),
        ("stream", PLAN, r"different gradients of embedding\.weight, which all of them"),
        ("", {**PLAN, "embedding": "replicated"}, "same gradient on all tensor ranks already"),
    ],
    ids=["fixed", "slopes", "one rank", "beside", "norm", "stream", "too much"],
)
def test_wrong_numbers_are_an_error(world: World, habit: str, plan: Any, what: str) -> None:
    with pytest.raises(HpczeroError, match=what):
        step(world, made(lambda: Attention(habit)), plan)


def test_ranks_of_a_group_need_the_same_samples(world: World) -> None:
    with pytest.raises(HpczeroError, match=r"have different inputs of .* same samples"):
        step(world, made(Attention), PLAN, differ=True)


def test_the_losses_of_a_group_are_compared(world: World) -> None:
    plan = MODELS["mlp"][1]
    with hpczero.initialize(made(Mlp), spec_of(world.size, 0), world, tensor_plan=plan) as engine:
        loss = loss_of(engine, 0)
        with pytest.raises(HpczeroError, match=r"have different losses .* same samples"):
            engine.backward(loss * (1 + world.rank))


class Direct(Mlp):
    """It runs its blocks past their hooks."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block.forward(x)
        return functional.cross_entropy(self.last(x), y)


def test_a_region_that_is_not_called_cannot_be_compared(world: World) -> None:
    plan = MODELS["mlp"][1]
    with (
        hpczero.initialize(made(Direct), spec_of(world.size, 0), world, tensor_plan=plan) as engine,
        pytest.raises(HpczeroError, match=r"blocks\.0 runs by its forward alone"),
    ):
        loss_of(engine, 0)


class InPlace(nn.Module):
    """It changes its input, as some feed-forward parts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 37), nn.Linear(37, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.mul_(0.5)).relu())


def test_a_region_may_change_its_input(world: World) -> None:
    def with_habit() -> nn.Module:
        module = Mlp()
        module.blocks = nn.ModuleList([InPlace()])
        return module

    expected = loss_of(made(with_habit), 0).item()
    plan = {"blocks.0.up": "column", "blocks.0.down": "row"}
    spec = spec_of(world.size, 0)
    with hpczero.initialize(made(with_habit), spec, world, tensor_plan=plan) as engine:
        assert loss_of(engine, 0).item() == pytest.approx(expected, rel=1e-6)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def with_part(name: str, part: nn.Module) -> nn.Module:
    module = made(Mlp)
    setattr(module, name, part)
    return module


def test_plans_that_cannot_be(world: World) -> None:
    mlp = MODELS["mlp"][1]
    tied = made(lambda: llama(1, tie_word_embeddings=True))
    untied = {key: role for key, role in LLAMA.items() if key != "lm_head"}
    no_row = {key: role for key, role in LLAMA.items() if key != "*.o_proj"}
    no_row.pop("*.self_attn.o_proj")
    cases: list[tuple[nn.Module, Any, str]] = [
        (made(Mlp), {"block.0.1": "column"}, "no module's name fits 'block.0.1': the nearest are"),
        (made(Mlp), {"blocks.0.1": "columns"}, "has the role 'columns'; it is \"column\""),
        (made(Mlp), {"blocks.0.2": "column"}, r"blocks\.0\.2 \(GELU\) cannot be \"column\""),
        (made(Mlp), {"blocks.*.1": "column"}, 'of 37 outputs without a "row"'),
        (made(Mlp), {"blocks.*.3": "row"}, 'is a "row" of 37 inputs, and no "column"'),
        (made(Mlp), {**mlp, "blocks.*.2": "replicated"}, "has no parameters"),
        (made(Mlp), {**mlp, "blocks.1.1": "replicated"}, r"'blocks\.1\.1' has no effect, as the"),
        (made(Mlp), ["last"], r"tensor_plan = \['last'\]: give a table of patterns and roles"),
        (torch.compile(made(Mlp)), {"*.last": "vocabulary"}, "is compiled, and a tensor plan"),
        (made(Mlp), {**mlp, "blocks.*": "sequence"}, "needs parallel.sequence_parallel = true"),
        (with_part("last", Scaled(24, 5)), {"last": "vocabulary"}, "with the forward of that"),
        (tied, untied, "no role that cuts it"),
        (made(lambda: llama(2)), no_row, 'without a "row"'),
        (
            made(gpt2),
            {"*.c_attn": "column", "*.attn.c_proj": "row"},
            r"3 x 4 heads: write hpczero.Column\(sections=3\)",
        ),
        (
            nn.Sequential(nn.MultiheadAttention(8, 2)),
            {"0.out_proj": "row"},
            "may use the weights of its parts without calling them",
        ),
        (
            made(lambda: llama(1, num_attention_heads=1, hidden_size=8)),
            LLAMA,
            "1 heads, and every tensor rank needs one",
        ),
    ]
    for module, plan, what in cases:
        with pytest.raises(InputError, match=what):
            hpczero.initialize(module, spec_of(world.size, 0), world, tensor_plan=plan)
    with pytest.raises(InputError, match=r"give hpczero\.initialize a tensor_plan"):
        hpczero.initialize(made(Mlp), spec_of(world.size, 0), world)
    other = {**mlp, **({"last": "replicated"} if world.rank else {})}
    with pytest.raises(InputError, match=r"tensor_plan is .* on rank 0 and .* on rank 1"):
        hpczero.initialize(made(Mlp), spec_of(world.size, 0), world, tensor_plan=other)


def test_cut_parameters_are_not_gathered_and_the_module_is_not_copied(world: World) -> None:
    import copy

    plan = MODELS["mlp"][1]
    with hpczero.initialize(made(Mlp), spec_of(world.size, 0), world, tensor_plan=plan) as engine:
        cut = engine.module.blocks[0][1].weight
        with (
            pytest.raises(HpczeroError, match=r"blocks\.0\.1\.weight is cut among the tensor"),
            engine.gathered([cut]),
        ):
            pass
        with pytest.raises(HpczeroError, match="copied or pickled"):
            copy.deepcopy(engine.module)
        engine.backward(loss_of(engine, 0, slice(0, SAMPLES)))
        engine.zero_grad()
        with pytest.raises(HpczeroError, match="backward comes before it"):
            engine.step()


def test_positions_that_the_ranks_do_not_divide(world: World) -> None:
    plan = {**LLAMA, "model.layers.?": "sequence"}
    spec = spec_of(world.size, 0, True)
    module = made(lambda: llama(2))
    with hpczero.initialize(module, spec, world, tensor_plan=plan) as engine:
        tokens = torch.zeros(1, 2 * world.size + 1, dtype=torch.int64)
        with pytest.raises(HpczeroError, match="pad the sequences to"):
            engine(input_ids=tokens, labels=tokens)
