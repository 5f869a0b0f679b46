"""Every way to an engine's parameters from outside is right, or an error that says what to do,
before a step comes of it: at every stage, whether the ranks of a node share their states or not.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError
from tests.support.ways import (
    AROUND,
    INSIDE,
    REFUSED,
    REFUSED_EVERYWHERE,
    RIGHT,
    WIDTH,
    Caller,
    Net,
    plain,
)
from tests.support.writes import BY_PYTORCH, OF_GRADIENTS, READS, WRITES

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.usual(2),
    pytest.mark.usefixtures("poisoned_regions"),
]

LAYOUTS = [{"stage": stage, "shared": shared} for stage in range(4) for shared in (False, True)]
GATHERED, SHARED = LAYOUTS[6], LAYOUTS[3]  # stages 3 and 1
Case = dict[str, Any]


def on(*by_default: Case) -> pytest.MarkDecorator:
    """All layouts with --slow."""
    return pytest.mark.cases(of=lambda ranks, everything: LAYOUTS if everything else by_default)


WAYS_OUT = ("engine.", "zero.stage = 2", "hpczero.initialize", "train.grad_clip")
IN_GATHERED = ["p.mul_", "p.data.mul_", "p.data =", "foreach", "load_state_dict of the module"]
Rounds = list[tuple[float, float]]  # loss and norm of the gradient


def spec_of(case: Case) -> dict[str, Any]:
    return {
        "train": {"precision": "fp32", "steps": 4, "grad_clip": 0},
        "optimizer": {"lr": 1e-2, "eps": 1e-6},
        "zero": {"stage": case["stage"], "node_shared": case["shared"]},
    }


def inputs() -> torch.Tensor:
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(2))


def by_pytorch(loss_of: Callable[[Caller], torch.Tensor], net: Net, size: int) -> Rounds:
    """The gradient is that of a rank's part of the loss: half precision rounds it otherwise."""
    rounds = []
    for _ in range(2):
        net.zero_grad()
        loss = loss_of(Caller.of(net))
        (loss / size).backward()
        squares = [own.grad.square().sum() for own in net.parameters() if own.grad is not None]
        rounds.append((loss.item(), size * torch.stack(squares).sum().sqrt().item()))
    return rounds


def by_engine(loss_of: Callable[[Caller], torch.Tensor], engine: Any) -> Rounds:
    rounds = []
    for _ in range(2):
        loss = loss_of(Caller.engine(engine))
        engine.backward(loss / engine.size)
        rounds.append((loss.item(), engine.step(lr=1e-12).grad_norm))
    return rounds


def said_well(problem: HpczeroError) -> bool:
    """It names a parameter, or the function that cannot be, and a way out."""
    text = str(problem)
    names = [*dict(Net().named_parameters()), "extra", "torch.func", "parameters has moved"]
    return any(name in text for name in names) and any(way in text for way in WAYS_OUT)


def compared(
    name: str, expected: str, run: Callable[[], Rounds], reference: Rounds
) -> Iterator[str]:
    """Return what is wrong with it, if anything."""
    try:
        found = run()
    except HpczeroError as problem:
        if expected == RIGHT:
            yield f"{name}: refused: {problem}"
        elif not said_well(problem):
            yield f"{name}: refused without a name or a way out: {problem}"
        return
    except Exception as problem:
        if name in BY_PYTORCH and expected == REFUSED:
            return
        yield f"{name}: {type(problem).__name__}: {problem}"
        return
    if expected == REFUSED:
        yield f"{name}: not refused"
    elif found != [pytest.approx(each, rel=1e-4) for each in reference]:
        yield f"{name}: {found}, and PyTorch {reference}"


@contextmanager
def quiet() -> Iterator[None]:
    """Stage 3 warns where it takes more memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_gathered(case: Case) -> bool:
    return case == GATHERED


@on(GATHERED)
def test_ways_inside_a_forward(world: World, case: Case) -> None:
    wrong = []
    ways = INSIDE | {name: (way, REFUSED) for name, way in REFUSED_EVERYWHERE.items()}
    for name, (way, if_gathered) in ways.items():
        net, theirs = Net(), Net()
        net.way = theirs.way = way
        if not is_gathered(case) and name not in REFUSED_EVERYWHERE:
            if_gathered = RIGHT
        reference = by_pytorch(lambda caller: caller.run(inputs()), theirs, world.size)
        with quiet(), hpczero.initialize(net, spec_of(case), world) as engine:
            run = lambda: by_engine(lambda caller: caller.run(inputs()), engine)  # noqa: E731
            wrong += compared(name, if_gathered, run, reference)
    assert not wrong, "\n".join(wrong)


@on(GATHERED)
def test_ways_around_a_forward(world: World, case: Case) -> None:
    wrong = []
    for name, (way, if_gathered) in AROUND.items():
        net, theirs = Net(), Net()
        for each in (net, theirs):
            each.blocks[4].requires_grad_(not name.startswith("unfrozen"))
        loss_of = lambda caller: way(caller, inputs())  # noqa: B023, E731
        expected = if_gathered if is_gathered(case) else RIGHT
        reference = by_pytorch(loss_of, theirs, world.size)
        with quiet(), hpczero.initialize(net, spec_of(case), world) as engine:
            run = lambda: by_engine(loss_of, engine)  # noqa: B023, E731
            wrong += compared(name, expected, run, reference)
    assert not wrong, "\n".join(wrong)


@on(GATHERED, SHARED)
def test_writes_from_outside_are_refused(world: World, case: Case) -> None:
    wrong = []
    for name, act in (WRITES | OF_GRADIENTS).items():
        with hpczero.initialize(Net(), spec_of(case), world) as engine:

            def run() -> Rounds:
                if name in WRITES:  # noqa: B023
                    act(engine)  # noqa: B023
                engine.backward(engine(inputs()))
                if name in OF_GRADIENTS:  # noqa: B023
                    act(engine)  # noqa: B023
                engine.step()
                return []

            wrong += compared(name, REFUSED, run, [])
            wrong += [f"{name}: a step was done"] if engine.steps else []
    assert not wrong, "\n".join(wrong)


@on(GATHERED)
def test_reading_from_outside_changes_nothing(world: World, case: Case) -> None:
    wrong = []
    reference = by_pytorch(lambda caller: caller.run(inputs()), Net(), world.size)
    for name, (read, if_gathered) in READS.items():
        with hpczero.initialize(Net(), spec_of(case), world) as engine:

            def run() -> Rounds:
                read(engine)  # noqa: B023
                return by_engine(lambda caller: caller.run(inputs()), engine)

            expected = if_gathered if is_gathered(case) else RIGHT
            wrong += compared(name, expected, run, reference)
    assert not wrong, "\n".join(wrong)


@on(GATHERED, SHARED)
def test_what_is_written_in_gathered_is_everyones(world: World, case: Case) -> None:
    for name in IN_GATHERED:
        with hpczero.initialize(Net(), spec_of(case), world) as engine:
            with engine.gathered(engine.module.parameters(), modify=True):
                WRITES[name](engine)
            engine.backward(engine(inputs()))
            engine.step(lr=1e-12)
            found, expected = engine.full_state_dict(), Net().state_dict()
            for key, tensor in found.items():
                torch.testing.assert_close(tensor, expected[key] / 2, msg=f"{name}: {key}")


@on(GATHERED, SHARED)
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_view_kept_from_step_to_step_is_never_of_old_values(
    world: World, case: Case, is_saved: bool
) -> None:
    """`is_saved`: autograd keeps the view for backward, which says that it is used."""
    net = Net()
    kept: list[torch.Tensor] = []

    def way(net: Net, x: torch.Tensor) -> torch.Tensor:
        kept.extend([] if kept else [net.first.weight.t()])
        product = net.body(x) @ kept[0] if is_saved else net.body(x @ kept[0])
        return product.square().sum()

    net.way = way
    with quiet(), hpczero.initialize(net, spec_of(case), world) as engine:
        engine.backward(engine(inputs()))
        engine.step(lr=0.1)
        if not is_gathered(case):
            with_old_view = engine(inputs()).item()
            kept.clear()
            assert with_old_view == engine(inputs()).item()
        elif is_saved:
            with pytest.raises(HpczeroError, match=r"first\.weight was made before the last step"):
                engine(inputs())
        else:
            assert engine(inputs()).isnan()


@on(GATHERED)
def test_forwards_alone_leave_no_notes(world: World, case: Case) -> None:
    """Gathers are counted during a backward only."""
    with hpczero.initialize(Net(), spec_of(case), world) as engine:
        for _ in range(3):
            engine(inputs())
        assert not engine.engine._gathers


@on(GATHERED, SHARED)
def test_a_backward_of_an_older_forward_is_an_error(world: World, case: Case) -> None:
    with hpczero.initialize(Net(), spec_of(case), world) as engine:
        old = engine(inputs())
        engine.backward(engine(inputs()))
        engine.step()
        kind = HpczeroError if is_gathered(case) else RuntimeError  # PyTorch's own
        with pytest.raises(kind, match=r"modified by an inplace|before the last step"):
            engine.backward(old)


@on(GATHERED, SHARED)
def test_a_closed_engines_module(world: World, case: Case) -> None:
    net = Net()
    with hpczero.initialize(net, spec_of(case), world) as engine:
        engine.backward(engine(inputs()))
        engine.step()
        trained = engine.full_state_dict()
    with pytest.raises(HpczeroError, match="this engine is closed"):
        engine(inputs())
    if is_gathered(case):
        with pytest.raises(HpczeroError, match=r"first\.weight went .* engine\.full_state_dict"):
            net.state_dict()
        with pytest.raises(HpczeroError, match=r"first\.weight went"):
            plain(net, inputs())
        return
    own = net.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in trained.items())
    plain(net, inputs()).backward()
    torch.optim.SGD(net.parameters(), lr=0.1 * (1 + world.rank)).step()  # each rank has its own
    assert type(net.first.weight) is torch.nn.Parameter
    sums = world.everyone.stack(net.first.weight.detach().double().sum().view(1)).flatten().tolist()
    assert len(set(sums)) == world.size


def test_ordinary_training_keeps_nothing_gathered(world: World) -> None:
    """No memory is added where nobody has views of weights beyond their layers."""
    with hpczero.initialize(Net(), spec_of(GATHERED), world) as engine:
        for _ in range(3):
            engine.backward(engine(inputs()))
            engine.step()
        loans = engine.engine.gatherer.loans
        assert len(loans.regions) == 1
        assert not loans.still_seen
