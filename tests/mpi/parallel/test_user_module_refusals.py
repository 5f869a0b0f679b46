"""Refusals of what a module, or the loop that trains it, cannot have: said in one message, and
nothing is left behind.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from hpczero.parallel.parallelize import assemble
from hpczero.planner.volumes import resolved
from hpczero.train.checkpointing import Checkpoints
from tests.support.models import Convolutions, Odd
from tests.support.saving import spec_of as checkpoint_spec
from tests.support.user_modules import (
    SHARE_SAMPLES,
    WAYS,
    alone,
    assert_same,
    made,
    of_images,
    of_tokens,
    spec_of,
    trained,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]


@pytest.mark.parametrize(("stage", "shared"), WAYS)
@pytest.mark.few(2)
def test_a_refused_backward_changes_nothing(world: World, stage: int, shared: bool) -> None:
    norms = []
    for asked in (False, True):
        with hpczero.initialize(
            made(Odd), spec_of(stage, shared, "bf16"), world, accumulates=False
        ) as engine:
            for _ in range(2):
                engine.backward(of_tokens(engine, slice(0, 1)), last=True)
                if asked:
                    with pytest.raises(HpczeroError, match="accumulates=False"):
                        engine.backward(of_tokens(engine, slice(0, 1)))
                norms.append(engine.step().grad_norm)
    assert norms[:2] == norms[2:]


def test_what_a_loop_cannot_have_is_refused(whole: World) -> None:
    spec = spec_of(0, False)
    for more, what in [
        ({"parallel": {"tensor": 2}}, r"parallel\.tensor = \d+: nothing says how the layers"),
        ({"parallel": {"pipeline": 2}}, r"parallel\.pipeline = 2: .* train by `hpczero run`"),
        (
            {"train": {**spec["train"], "trace": True}},
            r"train\.trace = true: traces are of the steps of `hpczero run`",
        ),
        ({"memory": {"recompute": "block"}}, r'memory\.recompute = "block": nothing is known'),
        ({"memory": {"loss_chunk": 64}}, r"memory\.loss_chunk = 64: nothing is known of this"),
    ]:
        with pytest.raises(InputError, match=what):
            hpczero.initialize(made(Odd), spec | more, whole)
    with pytest.raises(
        InputError, match=r"0 has max_norm = 2, and changes its weight in every forward"
    ):
        hpczero.initialize(nn.Sequential(nn.Embedding(4, 4, max_norm=2.0)), spec, whole)


class DTensor(nn.Parameter):
    """Stands for a parameter of PyTorch's own sharding, which needs a process group."""


def of_others() -> Iterator[tuple[nn.Module, str]]:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    yield torch.jit.script(inner), "is a module of TorchScript"
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Linear(2, 2)
    yield nn.Sequential(wrapper), r"0 is a DistributedDataParallel, .* \(\.module\)"
    cut = nn.Linear(2, 2)
    cut.weight.__class__ = DTensor
    yield nn.Sequential(nn.Linear(2, 2), cut), r"1 is cut into parts .* \(DTensor\)"


def test_modules_of_other_engines_are_refused(whole: World) -> None:
    for module, what in of_others():
        with pytest.raises(InputError, match=what):
            hpczero.initialize(module, spec_of(0, False), whole)


def test_parameters_that_cannot_be_trained_are_named(whole: World) -> None:
    complex_one = nn.Linear(2, 2)
    complex_one.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with_buffer = nn.Linear(2, 2)
    with_buffer.register_buffer("edges", torch.eye(2).to_sparse(), persistent=False)
    for module, what in [
        (nn.Sequential(nn.LazyLinear(3)), r"0\.weight has no shape yet: run the module once"),
        (complex_one, r"weight is torch\.complex64: hpczero trains real"),
        (with_buffer, "Linear has the buffer edges, which is sparse or quantized"),
        (nn.ReLU(), "ReLU has no parameters of a floating-point type"),
    ]:
        with pytest.raises(InputError, match=what):
            hpczero.initialize(module, spec_of(1, False), whole)


def test_calls_in_a_wrong_order_are_said(whole: World) -> None:
    engine = hpczero.initialize(made(Odd), spec_of(1, False), whole)
    with pytest.raises(HpczeroError, match=r"a loss of one element, and got one of shape \[2\]"):
        engine.backward(of_tokens(engine, slice(0, 1)).expand(2))
    engine.close()
    for call in (engine.save, engine.resume, engine.should_stop, engine.step, engine.zero_grad):
        with pytest.raises(HpczeroError, match=r"this engine is closed"):
            call()


@SHARE_SAMPLES
@pytest.mark.parametrize("how", ["around", "inside", "method"])
@pytest.mark.few(1)
def test_compiled_modules_train_where_parameters_stay(world: World, how: str) -> None:
    def kind() -> nn.Module:
        torch.compiler.reset()
        module = Convolutions(False)
        if how == "method":
            module.compile(backend="aot_eager")
        if how == "inside":
            module.features[1] = torch.compile(module.features[1], backend="aot_eager")
        return torch.compile(module, backend="aot_eager") if how == "around" else module  # type: ignore[return-value]

    expected = alone(kind, of_images)
    for stage, shared in ((0, False), (2, True)):
        assert_same(expected, trained(world, kind, of_images, spec_of(stage, shared)), world.rank)
    with pytest.raises(
        InputError, match=r"is compiled, and zero\.stage = 3 gathers parameters layer by layer"
    ):
        hpczero.initialize(kind(), spec_of(3, False), world)


def test_a_module_larger_than_any_machine_is_refused_before_it_has_memory(whole: World) -> None:
    for stage, shared in WAYS:
        with torch.device("meta"):
            module = nn.Sequential(*(nn.Linear(10**6, 10**6) for _ in range(4)))
        with pytest.raises(
            InputError,
            match=rf"zero\.stage = {stage} needs [\d.]+ GB on .* are available .*moments",
        ):
            hpczero.initialize(module, spec_of(stage, shared), whole)


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(world: World) -> None:
    spec = checkpoint_spec("runs", "alone" if world.size == 1 else "data 2")
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    engine = assemble(spec, world, grid, accumulates=True).engine
    Checkpoints(spec, world, grid, engine)
    engine.module.register_buffer("frequencies", torch.ones(4, dtype=torch.complex64))
    with pytest.raises(
        InputError,
        match=(
            r"a checkpoint cannot hold this model: buffer frequencies: numbers of type complex64 "
            r".*every = -1"
        ),
    ):
        Checkpoints(spec, world, grid, engine)
    Checkpoints(
        spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"every": -1})}),
        world,
        grid,
        engine,
    )
    engine.close()
