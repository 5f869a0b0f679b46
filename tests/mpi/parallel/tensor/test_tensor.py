"""Tensor and sequence parallelism give the serial model's loss and gradients, and send and keep
what they should.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpczero.comm.world import World
from hpczero.model import build, families, shapes
from hpczero.model.batch import MicroBatch
from hpczero.parallel.layout import shard_range, tensor_part
from hpczero.parallel.parallelize import apply_plan
from hpczero.parallel.tensor.linear import Residual
from hpczero.parallel.tensor.vocabulary import VocabularyLookup, likeliest, own_tokens
from hpczero.spec.schema import Model

pytestmark = pytest.mark.mpi

ODD = Model(
    layers=2, hidden=24, heads=6, ffn=45, vocab=257, seq_len=33
)  # nothing of it divides by 4


def parameters_of(model: Model) -> list[shapes.Parameter]:
    return [parameter for layer in families.layers(model) for parameter in layer.parameters]


def values_of(model: Model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Biases and norms that matter, too."""
    values = {}
    for parameter in parameters_of(model):
        described = replace(parameter, initial=shapes.Initial("normal", 0.1))
        values[parameter.name] = torch.empty(parameter.shape, dtype=dtype)
        build.initial_values(described, 3, 0, values[parameter.name])
        if parameter.initial.kind == "ones":
            values[parameter.name] += 1
    return values


def serial_model(model: Model, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = build.on_meta(model)
    build.install_parameters(
        module, {name: nn.Parameter(value) for name, value in values_of(model, dtype).items()}
    )
    return module


def parallel_model(
    world: World, model: Model, sequence_parallel: bool, dtype: torch.dtype = torch.float32
) -> nn.Module:
    group = world.group("tensor", range(world.size))
    module = build.on_meta(model)
    names = [name for name, _ in module.named_parameters()]
    layers = list(zip(module.layers(), families.layers(model), strict=True))
    apply_plan(layers, families.family(model), Residual(group, sequence_parallel))
    assert sorted(name for name, _ in module.named_parameters()) == sorted(names)
    values = values_of(model, dtype)
    own = {
        parameter.name: own_part(world, parameter, values[parameter.name])
        for parameter in parameters_of(model)
    }
    build.install_parameters(
        module, {name: nn.Parameter(value.clone()) for name, value in own.items()}
    )
    return module


def own_part(world: World, parameter: shapes.Parameter, value: torch.Tensor) -> torch.Tensor:
    return value[tensor_part(parameter, world.size, world.rank)].contiguous()


def batch_of(model: Model, samples: int) -> MicroBatch:
    text = torch.randint(
        0, model.vocab, (samples, model.seq_len + 1), generator=torch.Generator().manual_seed(5)
    )
    return MicroBatch(text[:, :-1], text[:, 1:], torch.arange(10, 10 + samples), step=2, seed=7)


def trained(module: nn.Module, *batches: MicroBatch) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of a step."""
    losses = []
    for batch in batches:
        loss = module(batch)
        (loss / 100).backward()
        losses.append(loss.item())
    return losses, {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm().clamp(min=1e-20)).item()


def assert_same(
    world: World,
    model: Model,
    serial: nn.Module,
    parallel: nn.Module,
    *batches: MicroBatch,
    tolerance: float = 1e-5,
) -> None:
    """The loss, and every gradient: of this rank's parts, and bitwise the same on all ranks
    where the parameter is not cut.
    """
    losses, gradients = trained(serial, *batches)
    own_losses, own_gradients = trained(parallel, *batches)
    assert own_losses == pytest.approx(losses, rel=tolerance)
    assert own_losses == world.broadcast_object(own_losses)
    assert (
        own_gradients.keys()
        == gradients.keys()
        == {parameter.name for parameter in parameters_of(model)}
    )
    for parameter in parameters_of(model):
        expected = own_part(world, parameter, gradients[parameter.name])
        assert own_gradients[parameter.name].shape == expected.shape
        assert distance(own_gradients[parameter.name], expected) < tolerance, parameter.name
        if parameter.split is None:
            same = own_gradients[parameter.name].clone()
            world.everyone.broadcast(same)
            assert torch.equal(same, own_gradients[parameter.name]), parameter.name


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tied", "dropout"), [(True, 0.0), (False, 0.2)])
def test_loss_and_gradients_of_the_serial_model(
    world: World, tied: bool, dropout: float, sequence_parallel: bool
) -> None:
    """Batch 5 in micro-batches of 2, 3 and 0 samples."""
    model = ODD.model_copy(update={"tied_embeddings": tied, "dropout": dropout})
    whole = batch_of(model, 5)
    batches = [part_of(whole, samples) for samples in (slice(0, 2), slice(2, 5), slice(5, 5))]
    assert_same(
        world, model, serial_model(model), parallel_model(world, model, sequence_parallel), *batches
    )


def part_of(batch: MicroBatch, samples: slice) -> MicroBatch:
    return replace(
        batch,
        tokens=batch.tokens[samples],
        targets=batch.targets[samples],
        samples=batch.samples[samples],
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("samples", [0, 1])
def test_ranks_that_have_nothing_of_something(
    world: World, samples: int, sequence_parallel: bool
) -> None:
    """Fewer tokens, columns and positions than ranks."""
    model = Model(layers=1, hidden=8, heads=4, ffn=3, vocab=3, seq_len=2, tied_embeddings=False)
    assert_same(
        world,
        model,
        serial_model(model),
        parallel_model(world, model, sequence_parallel),
        batch_of(model, samples),
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_evaluation_is_the_serial_one(world: World, sequence_parallel: bool) -> None:
    model = ODD.model_copy(update={"dropout": 0.5})
    serial, parallel = (
        serial_model(model).eval(),
        parallel_model(world, model, sequence_parallel).eval(),
    )
    with torch.no_grad():
        assert parallel(batch_of(model, 3)).item() == pytest.approx(
            serial(batch_of(model, 3)).item(), rel=1e-6
        )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_close(
    world: World, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """The gradients are as close to exact ones as the serial model's of that precision, up to a
    factor.
    """
    model = ODD.model_copy(update={"layers": 1, "dropout": 0.1})
    batch = batch_of(model, 2)
    rounded = serial_model(model, dtype).float()
    exact_loss, exact = trained(rounded, batch)
    _, serial = trained(serial_model(model, dtype), batch)
    loss, own = trained(parallel_model(world, model, sequence_parallel, dtype), batch)
    assert loss == pytest.approx(exact_loss, rel=1e-3)
    for parameter in parameters_of(model):
        expected = own_part(world, parameter, exact[parameter.name])
        usual = distance(own_part(world, parameter, serial[parameter.name]).float(), expected)
        assert distance(own[parameter.name].float(), expected) < 3 * usual + 1e-2, parameter.name


@pytest.mark.parametrize(
    "model", [ODD, ODD.model_copy(update={"seq_len": 36, "hidden": 48})], ids=["padded", "even"]
)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_the_ledger_has_the_bytes_of_the_formula(
    world: World, model: Model, precision: torch.dtype
) -> None:
    samples, ranks, layers = 3, world.size, model.layers
    norms = 2 * layers + 1
    whole = samples * model.seq_len * model.hidden * precision.itemsize
    padded = samples * -(-model.seq_len // ranks) * ranks * model.hidden * precision.itemsize
    targets = samples * model.seq_len * 4
    loss = 2 * (targets + 2 * targets)  # largest logit; sum of exponentials, and the target's logit
    expected = {
        False: {"all_reduce": (4 * layers + 2 + 2, (4 * layers + 2) * 2 * whole + loss)},
        True: {
            "all_gather": (6 * layers + 3, (6 * layers + 3) * padded),
            "reduce_scatter": (4 * layers + 2, (4 * layers + 2) * padded),
            "all_reduce": (2 + norms, loss + norms * 2 * 2 * model.hidden * precision.itemsize),
        },
    }
    for sequence_parallel, operations in expected.items():
        module = parallel_model(world, model, sequence_parallel, precision)
        world.ledger.reset()
        trained(module, batch_of(model, samples))
        sent = {
            name: (entry["count"], entry["bytes"])
            for name, entry in world.ledger.as_dict()["tensor"].items()
        }
        assert sent.keys() == operations.keys()
        for name, (count, size) in operations.items():
            assert sent[name][0] == count
            assert sent[name][1] == pytest.approx(size * (ranks - 1) / ranks, abs=count)


@contextmanager
def saved_bytes(parameters: Iterator[nn.Parameter]) -> Iterator[list[int]]:
    """Bytes that autograd keeps for backward, without parameters; memory that is kept several times
    counts once.
    """
    mine = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    seen: dict[int, torch.Tensor] = {}
    total: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in mine:
            seen[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(tensor.untyped_storage().nbytes() for tensor in seen.values()))


def kept_by_blocks(world: World, model: Model, sequence_parallel: bool, samples: int) -> int:
    """A model of two more blocks keeps so much more."""
    sizes = []
    for layers in (1, 3):
        module = parallel_model(
            world, model.model_copy(update={"layers": layers}), sequence_parallel
        )
        with saved_bytes(module.parameters()) as total:
            loss = module(batch_of(model, samples))
        sizes += total
        loss.backward()
    return (sizes[1] - sizes[0]) // 2


def test_sequence_parallelism_keeps_its_share_of_the_activations(world: World) -> None:
    """A block keeps its input, the residual in its middle and both norms' results (hidden each);
    query, key, value and attention's result (inner each) and the feed-forward part before and after
    its GELU: with sequence parallelism all of them are shared.
    """
    model, samples = Model(layers=1, hidden=48, heads=12, ffn=96, vocab=24, seq_len=36), 2

    def own(length: int) -> int:
        part = shard_range(length, 1, world.size, world.rank)
        return part.stop - part.start

    head_dim, heads, wide = model.hidden // model.heads, own(model.heads), own(model.ffn)
    # attention also keeps a number per head, norms two per position
    shared = 4 * (4 * heads * head_dim + heads + 2 * wide) * samples * model.seq_len
    stream = 4 * (4 * model.hidden + 4) * samples
    kept = {how: kept_by_blocks(world, model, how, samples) for how in (False, True)}
    assert kept[False] == pytest.approx(shared + stream * model.seq_len, rel=0.01)
    assert kept[True] == pytest.approx(shared + stream * own(model.seq_len), rel=0.01)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_number_outside_the_vocabulary_is_an_error(world: World, sequence_parallel: bool) -> None:
    module = parallel_model(world, ODD, sequence_parallel)
    for name, wrong in product(("tokens", "targets"), (-1, 257)):
        batch = batch_of(ODD, 2)
        changed = getattr(batch, name).clone()
        changed[1, 3] = wrong
        with pytest.raises(RuntimeError, match="outside of the vocabulary of 257"):
            module(replace(batch, **{name: changed}))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_lookup_without_learned_positions(world: World, sequence_parallel: bool) -> None:
    """A family may have none: vectors and gradients are the serial lookup's."""
    random = torch.Generator().manual_seed(3)
    whole = torch.randn(ODD.vocab, ODD.hidden, generator=random)
    gradient = torch.randn(2, ODD.seq_len, ODD.hidden, generator=random)
    tokens = torch.randint(ODD.vocab, (2, ODD.seq_len), generator=random)
    group = world.group("tensor", range(world.size))
    serial = nn.Module()
    serial.tokens = nn.Parameter(whole.clone())
    residual = Residual(group, sequence_parallel)
    residual.follow(ODD.seq_len)
    lookup = VocabularyLookup(serial, residual)
    own = own_tokens(ODD.vocab, group)
    lookup.tokens = nn.Parameter(whole[own].clone())
    found = lookup(tokens)
    found.backward(gradient[:, residual.layout.rows])
    expected = functional.embedding(tokens, serial.tokens)
    expected.backward(gradient)
    assert torch.equal(found, expected[:, residual.layout.rows])
    assert [name for name, _ in lookup.named_parameters()] == ["tokens"]
    torch.testing.assert_close(lookup.tokens.grad, serial.tokens.grad[own])


def test_the_likeliest_token_is_the_first_of_the_largest_logits(world: World) -> None:
    """Logits are whole numbers: several are the largest, on several ranks; of 40 numbers the first
    largest is mostly rank 0's, of 400 it may be any rank's.
    """
    random = torch.Generator().manual_seed(5)
    some = [torch.randint(most, (3, 50, ODD.vocab), generator=random) for most in (40, 400)]
    logits = torch.cat(some).float()
    group = world.group("tensor", range(world.size))
    found = likeliest(logits[..., own_tokens(ODD.vocab, group)], ODD.vocab, group)
    assert torch.equal(found, logits.argmax(-1))
    assert (found >= own_tokens(ODD.vocab, group).stop).any() or world.rank == world.size - 1


def test_ignored_targets_count_nothing(world: World) -> None:
    batch = batch_of(ODD, 2)
    targets = batch.targets.clone()
    targets[:, ::3] = -100
    batch = replace(batch, targets=targets)
    assert_same(world, ODD, serial_model(ODD), parallel_model(world, ODD, False), batch)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_blocks_have_the_same_gradients(world: World, sequence_parallel: bool) -> None:
    model = ODD.model_copy(update={"dropout": 0.2})
    module, batch = parallel_model(world, model, sequence_parallel), batch_of(model, 2)
    losses, gradients = trained(module, batch)
    again = parallel_model(world, model, sequence_parallel)
    for block in again.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    losses_again, gradients_again = trained(again, batch)
    assert losses == losses_again
    assert all(torch.equal(gradients_again[name], gradient) for name, gradient in gradients.items())


def test_backward_twice_is_an_error_not_wrong_gradients(world: World) -> None:
    """The first one has written over the logits."""
    loss = parallel_model(world, ODD, False)(batch_of(ODD, 1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_parameters_need_no_sums(world: World) -> None:
    """With embedding and first block frozen, the gradients of the others are as before, and
    nothing is sent for the frozen ones.
    """
    full, module = (parallel_model(world, ODD, False) for _ in range(2))
    module.embedding.requires_grad_(False)
    module.head.logits.requires_grad_(False)
    module.blocks[0].requires_grad_(False)
    world.ledger.reset()
    _, gradients = trained(module, batch_of(ODD, 2))
    count = world.ledger.as_dict()["tensor"]["all_reduce"]["count"]
    _, everything = trained(full, batch_of(ODD, 2))
    assert gradients.keys() == {
        name for name in everything if name.startswith(("blocks.1", "head.norm"))
    }
    assert all(torch.equal(gradient, everything[name]) for name, gradient in gradients.items())
    assert (
        count == 1 + 2 * 2 + 2 + 3
    )  # embedding, rows, loss; the columns behind a trained parameter
