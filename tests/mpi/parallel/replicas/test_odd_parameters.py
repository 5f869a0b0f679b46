"""Parameters without gradients, with gradients of zero, or of one element, among replicas."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.comm.world import World
from hpczero.train.initialize import Training
from tests.support.replicas import METHODS, own_spec_of
from tests.support.tensor_plans import Mlp
from tests.support.user_modules import made

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4), pytest.mark.usual(4)]

WIDTH, LR = 20, 1e-2
ADOPTS = {"lr": 1.0, "momentum": 0.0}  # the outer step takes over the mean of all weights
LOCAL = [name for name in METHODS if "local" in name]


class Chain(nn.Module):
    """Layers of which some may be left out; the last is in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x) * self.scale)
        return (x - 0.3).square().sum() / 20


class One(nn.Module):
    """A parameter of one element, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.tensor(0.5))

    def forward(self, wanted: Tensor) -> Tensor:
        return (self.only - wanted).pow(4).sum()


@contextmanager
def training(
    world: World, kind: Callable[[], nn.Module], spec: dict[str, Any]
) -> Iterator[Training]:
    """Yield an engine on nodes of two ranks; on two ranks, on two nodes."""
    nodes = world.part(range(world.size), 1 + (world.size > 2))
    with hpczero.initialize(made(kind), spec, nodes) as engine:
        yield engine
    nodes.close()


def spec_of(method: str, stage: int, **tables: Any) -> dict[str, Any]:
    """Return a spec whose outer steps adopt what replicas have made."""
    spec = own_spec_of(method, zero={"stage": stage}, **tables)
    if method in LOCAL:
        outer = spec["optimizer"]["outer"] | ADOPTS
        spec["optimizer"] = spec["optimizer"] | {"outer": outer}
    return spec


def here(engine: Training, *names: str) -> dict[str, Tensor]:
    """Return the weights of this rank's replica, of these names if any are given."""
    named = engine.module.named_parameters()
    wanted = {name: own for name, own in named if not names or name in names}
    with engine.gathered(wanted.values()):
        return {name: own.detach().clone() for name, own in wanted.items()}


def samples(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, generator=generator)


def one_step(engine: Training, step: int, factor: float = 1.0) -> None:
    loss = engine(samples(step, engine.rank).to(engine.dtype))
    engine.backward(loss * (factor / engine.size))
    assert engine.step(lr=LR).bad is None


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few(2)
def test_with_gradients_of_zero_weights_decay_and_do_no_more(
    world: World, method: str, stage: int
) -> None:
    with training(world, Chain, spec_of(method, stage)) as engine:
        first, steps = here(engine), 9
        for step in range(steps):
            one_step(engine, step, factor=0.0)
        found = here(engine)
        inner = engine.engine
        states = [list(inner.update.states(unit).values()) for unit in inner.units]
    assert all(state.isfinite().all() for of_unit in states for state in of_unit)
    for name, weights in first.items():
        decays = weights.dim() > 1 and "3" not in name
        expected = weights * (1 - LR * 0.1) ** (steps if decays else 0)
        if not decays:
            assert torch.equal(found[name], weights), name
        elif "int4" in method:  # what was sent is off by a fourteenth of the largest of a block
            off = (weights - expected).abs().max() / 7
            assert (found[name] - expected).abs().max() < off, name
        else:
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=0)


def wanted(step: int, rank: int) -> float:
    """Return what a rank wants the only parameter to be."""
    return 1.0 + 0.3 * rank - 0.1 * (step % 3)


def alone(method: str, size: int, workers: int, steps: int) -> list[float]:
    """Return the mean of the workers' weights after each step, by the formulas, in Python.

    Of one number every message says all, but in fp32.
    """
    spec = own_spec_of(method)["optimizer"]
    beta1, beta2, eps = 0.9, 0.95, spec["eps"]
    outer = {"every": 0, "lr": 0.7, "momentum": 0.9, **spec.get("outer", {})}
    w, m, v = ([value] * workers for value in (0.5, 0.0, 0.0))
    common, speed, frozen, found = 0.5, 0.0, spec.get("freeze", 0), []
    for step in range(steps):
        per = size // workers
        ranks = [range(worker * per, (worker + 1) * per) for worker in range(workers)]
        slopes = [
            [4 * (w[worker] - wanted(step, rank)) ** 3 / size * workers for rank in of]
            for worker, of in enumerate(ranks)
        ]
        g = [sum(own) for own in slopes]
        if outer["every"] and step and step % outer["every"] == 0:
            d = common - sum(w) / workers
            speed = outer["momentum"] * speed + d
            common -= outer["lr"] * (d + outer["momentum"] * speed)
            w = [common] * workers
        elif not outer["every"]:
            g = [sum(g) / workers] * workers
        m = [beta1 * old + (1 - beta1) * slope for old, slope in zip(m, g, strict=True)]
        if not frozen or step < frozen:
            v = [beta2 * old + (1 - beta2) * slope**2 for old, slope in zip(v, g, strict=True)]
        done = min(step + 1, frozen) if frozen else step + 1
        for worker in range(workers):
            root = sqrt(v[worker] / (1 - beta2**done)) + eps
            w[worker] -= LR / (1 - beta1 ** (step + 1)) * m[worker] / root
        found.append(sum(w) / workers)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "local steps, int4"])
@pytest.mark.few(2)
def test_a_parameter_of_one_element_follows_the_formulas(
    world: World, method: str, stage: int
) -> None:
    """Gradients of the workers differ, by their wishes and by their weights."""
    spec = own_spec_of(method, zero={"stage": stage})
    found, steps = [], 12
    with training(world, One, spec) as engine:
        for step in range(steps):
            engine.backward(engine(torch.tensor([wanted(step, engine.rank)])) / engine.size)
            engine.step(lr=LR)
            weights = here(engine)["only"].view(1).double()
            world.everyone.all_reduce(weights)
            found.append(weights.item() / world.size)
        replicas = engine.engine.axis.replicas
        workers = replicas.count if replicas else 1
    assert workers == (3 if world.size == 3 else 2)
    assert found == pytest.approx(alone(method, world.size, workers, steps), rel=2e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few(2)
def test_frozen_and_unused_parameters_stay_as_they_are(
    world: World, method: str, stage: int
) -> None:
    """A layer that is in no loss; one that is frozen for some steps, in which its moments stay."""
    with training(world, Chain, spec_of(method, stage)) as engine:
        first, inner = here(engine), engine.engine
        for step in range(5):
            one_step(engine, step)
        engine.module.layers[1].requires_grad_(False)
        moments = moments_of(engine, "layers.1")
        for step in range(5, 10):  # the replicas' outer weights have met
            one_step(engine, step)
        before = here(engine)
        for step in range(10, 15):
            one_step(engine, step)
        after, left = here(engine), moments_of(engine, "layers.1")
        engine.module.layers[1].requires_grad_(True)
        one_step(engine, 15)
        moved = here(engine)
        assert inner.absent.missed["layers.1.weight"] == 10
        assert inner.absent.missed["layers.3.bias"] == 16
    for name, weights in first.items():
        if name.startswith("layers.3"):
            assert torch.equal(moved[name], weights), name
        elif name.startswith("layers.1"):
            if "int4" not in method:  # what was left out of messages comes later
                assert torch.equal(before[name], after[name]), name
            assert not torch.equal(weights, before[name])
            assert not torch.equal(moved[name], after[name])
        else:
            assert not torch.equal(before[name], after[name]), name
    assert any(world.all_gather_objects(any(bool(own.any()) for own in moments.values())))
    assert all(torch.equal(moments[name], left[name]) for name in moments)


def moments_of(engine: Training, layer: str) -> dict[str, Tensor]:
    """Return copies of the moments of the owned elements of a layer's parameters."""
    found = {}
    inner = engine.engine
    for unit in inner.units:
        states = inner.update.states(unit) | inner.update.own_states(unit)
        first = unit.owned.start
        for slot, part in unit.layout.spans(first, unit.owned.stop):
            for name in ("moment1", "moment2"):
                if slot.parameter.name.startswith(layer):
                    key = f"{slot.parameter.name} {name}"
                    found[key] = states[name][part.start - first : part.stop - first].clone()
    return found


class Two(nn.Module):
    """Parameters of one element, each a layer; a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.late = made(One), made(One)

    def forward(self, wanted: Tensor, uses_late: bool) -> Tensor:
        return self.always(wanted) + (self.late(wanted) if uses_late else 0)


@pytest.mark.parametrize("method", ["sums", "one_bit_adam"])
def test_updates_of_a_parameter_are_counted_for_it(world: World, method: str) -> None:
    """One that joins in the warm-up, and misses steps after it, has corrections of its own.

    Its learning rate may be its own, too.
    """
    own = {} if method == "sums" else {"freeze": 6}
    spec = own_spec_of(method, optimizer=own, zero={"stage": 2})
    used = [step in (2, 4, 5, 7, 8, 11) for step in range(14)]
    found = []
    with training(world, Two, spec) as engine:
        for step, uses_late in enumerate(used):
            loss = engine(torch.tensor([wanted(step, engine.rank)]), uses_late)
            engine.backward(loss / engine.size)
            engine.step(lr={"late.*": 3 * LR, "*": LR} if step % 2 else LR)
            found.append(list(map(float, here(engine).values())))
    expected = [
        followed(used=[True] * 14, rates=[LR] * 14, freeze=own.get("freeze", 99), size=world.size),
        followed(used, [LR, 3 * LR] * 7, own.get("freeze", 99), world.size),
    ]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected).T, rtol=2e-6, atol=0)


def followed(used: list[bool], rates: list[float], freeze: int, size: int) -> list[float]:
    """Return a parameter after each step, by AdamW whose second moment stays from `freeze` on."""
    w, m, v, first, second, found = 0.5, 0.0, 0.0, 0, 0, []
    for step, uses in enumerate(used):
        if uses:
            g = sum(4 * (w - wanted(step, rank)) ** 3 for rank in range(size)) / size
            m, first = 0.9 * m + 0.1 * g, first + 1
            if step < freeze:
                v, second = 0.95 * v + 0.05 * g * g, second + 1
            w -= rates[step] / (1 - 0.9**first) * m / (sqrt(v / (1 - 0.95**second)) + 1e-6)
        found.append(w)
    return found


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.head(self.embedding(tokens)) - 1).square().sum()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("method", ["sums", "one_bit_adam"])
@pytest.mark.few(4)
def test_what_has_no_gradient_in_the_warm_up_never_moves(
    world: World, method: str, stage: int
) -> None:
    """Rows of an embedding that are looked up later; by AdamW they move."""
    spec = own_spec_of(method, zero={"stage": stage}, optimizer={"weight_decay": 0.0})
    with training(world, Rows, spec) as engine:
        first = here(engine)["embedding.weight"]
        for step in range(8):
            rows = range(12) if step >= 1 else range(0, 12, 2)
            tokens = torch.tensor([row for row in rows if row % engine.size <= engine.rank])
            engine.backward(engine(tokens) / engine.size)
            engine.step(lr=LR)
        moved = (here(engine)["embedding.weight"] != first).all(1)
    expected = torch.ones(12, dtype=torch.bool)
    if method == "one_bit_adam":
        expected[1::2] = False
    assert torch.equal(moved, expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["sums", "one_bit_adam"])
@pytest.mark.few(1)
def test_what_tensor_ranks_have_in_common_never_moves_either(world: World, method: str) -> None:
    """Columns of the first map, whose inputs are zero in the warm-up; they are sent as they are."""
    tables: dict[str, Any] = {"optimizer": {"weight_decay": 0.0}, "parallel": {"tensor": 2}}
    spec = own_spec_of(method, **tables)
    nodes = world.part(range(4), 2)
    plan = {"blocks.*.1": "column", "blocks.*.3": "row"}
    with hpczero.initialize(made(Mlp), spec, nodes, tensor_plan=plan) as engine:
        first = here(engine, "first.weight")["first.weight"]
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + engine.rank)
            x = torch.randn(6, 16, generator=generator)
            x[:, 8:] *= step >= 1
            engine.backward(engine(x, torch.arange(6) % 5) / engine.size)
            engine.step(lr=LR)
        moved = (here(engine, "first.weight")["first.weight"] != first).all(0)
    nodes.close()
    expected = torch.ones(16, dtype=torch.bool)
    expected[8:] = method != "one_bit_adam"
    assert torch.equal(moved, expected)
