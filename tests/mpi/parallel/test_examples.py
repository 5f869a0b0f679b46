"""The programs in examples/ against plain PyTorch: at every stage, resumed, on any layout."""

import importlib.util
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.world import World
from tests.support.launch import CHECKOUT
from tests.support.plain_training import Plain
from tests.support.user_modules import WAYS, ways

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usual(2),
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.filterwarnings("ignore:something outside of hpczero:UserWarning"),
]

FOLDER = CHECKOUT / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
OF_TRANSFORMERS = ("causal_lm", "bert", "t5")


def program(name: str) -> ModuleType:
    if name in OF_TRANSFORMERS:
        reason = "transformers is not installed: pip install hpczero[test]"
        pytest.importorskip("transformers", reason=reason)
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def builders(example: ModuleType) -> list[Any]:
    if hasattr(example, "build"):
        return [example.build]
    return [example.build_generator, example.build_discriminator]


def spec_of(example: ModuleType, folder: str, number: int, way: tuple[int, bool]) -> dict[str, Any]:
    stage, shared = way
    name = f"{example.SPEC.get('name', 'gan')}.{number}"
    zero = {"stage": stage, "node_shared": shared}
    return {**example.SPEC, "name": name, "output": folder, "zero": zero}


def engines(example: ModuleType, world: World, folder: str, way: tuple[int, bool]) -> list[Any]:
    made = []
    for number, build in enumerate(builders(example)):
        with torch.random.fork_rng():
            torch.manual_seed(17 + number)
            module = build()
        made.append(hpczero.initialize(module, spec_of(example, folder, number, way), world))
    return made


def losses(example: ModuleType, of_ranks: list[Any], world: World | None = None) -> list[float]:
    """Return the losses of each step, over all ranks."""
    found = torch.tensor([as_list(part) for part in example.loop(*of_ranks)], dtype=torch.float64)
    if world:
        world.everyone.all_reduce(found)
    values: list[float] = found.flatten().tolist()
    return values


def as_list(part: Any) -> list[float]:
    return list(part) if isinstance(part, tuple) else [part]


def plain(example: ModuleType, initial: list[dict[str, torch.Tensor]]) -> list[float]:
    of_one = []
    for build, state in zip(builders(example), initial, strict=True):
        module: nn.Module = build()
        if any(own.is_meta for own in chain(module.parameters(), module.buffers())):
            module = module.to_empty(device="cpu")
        module.load_state_dict(state)
        of_one.append(Plain(module, example.SPEC))
    return losses(example, of_one)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(3)
def test_every_stage_equals_plain_pytorch(
    world: World, shared_folder: str, name: str, everything: bool
) -> None:
    example = program(name)
    expected: list[float] = []
    number = NAMES.index(name)
    chosen = WAYS if everything else ways(number, False)[number % 2 :: 2]
    for way in chosen:
        of_ranks = engines(example, world, shared_folder, way)
        if not expected:
            initial = [engine.full_state_dict() for engine in of_ranks]
            found = plain(example, initial) if world.rank == 0 else []
            expected = world.broadcast_object(found)
            assert expected[0] != pytest.approx(expected[-1], rel=1e-3), "it learns nothing"
        assert losses(example, of_ranks, world) == pytest.approx(expected, rel=1e-5, abs=1e-7), way
        for engine in of_ranks:
            engine.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(1)
def test_it_goes_on_to_the_bit_and_elsewhere_as_close_as_grids_are(
    world: World, shared_folder: str, name: str
) -> None:
    example = program(name)
    number = NAMES.index(name)
    way, other = WAYS[number % len(WAYS)], WAYS[(number + 3) % len(WAYS)]
    of_ranks = engines(example, world, shared_folder, way)
    half = of_ranks[0].spec.train.steps // 2
    whole = []
    for part in example.loop(*of_ranks):
        whole.append(as_list(part))
        if of_ranks[0].steps == half:
            for engine in of_ranks:
                engine.save(folder=f"{shared_folder}/half.{of_ranks.index(engine)}")
    for engine in of_ranks:
        engine.close()
    again = parts_from_half(example, world, shared_folder, way)
    assert again == whole[half:], "this rank's losses, to the bit"
    elsewhere = torch.tensor(
        parts_from_half(example, world, shared_folder, other), dtype=torch.float64
    )
    expected = torch.tensor(whole[half:], dtype=torch.float64)
    for values in (elsewhere, expected):
        world.everyone.all_reduce(values)
    torch.testing.assert_close(elsewhere, expected, rtol=1e-5, atol=1e-7)
    if world.size > 1:
        alone = world.part([world.rank])
        one = parts_from_half(example, alone, shared_folder, (0, False))
        alone.close()
        torch.testing.assert_close(
            torch.tensor(one, dtype=torch.float64), expected, rtol=1e-5, atol=1e-7
        )


def parts_from_half(
    example: ModuleType, world: World, folder: str, way: tuple[int, bool]
) -> list[list[float]]:
    of_ranks = engines(example, world, folder, way)
    for number, engine in enumerate(of_ranks):
        engine.load(f"{folder}/half.{number}")
    found = [as_list(part) for part in example.loop(*of_ranks)]
    for engine in of_ranks:
        engine.close()
    return found
