"""Sizes of the messages in which weights are gathered in 8 bits."""

from itertools import chain, product

import pytest

from hpczero.comm.grid import Grid
from hpczero.model import families
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.parallel.zero.gather_sizes import exact_parts, gathers_in_8_bits, message_sizes
from hpczero.spec.schema import Comm, Model, Parallel, Spec, Train, Zero

GPT = Model(layers=2, hidden=24, heads=4, seq_len=17, vocab=67)
LLAMA = Model(family="llama", layers=2, hidden=24, heads=4, vocab=67, tied_embeddings=False)


def units(model: Model, shards: int, tensor: int = 1, rank: int = 0) -> list[UnitLayout]:
    layers = [layer for layer in families.layers(model) if layer.parameters]
    return [unit_layout(layer, shards, tensor, rank) for layer in layers]


@pytest.mark.parametrize("shards", [1, 2, 5, 64])
def test_a_message_is_half_a_shard_and_its_scales(shards: int) -> None:
    for unit in units(GPT, shards):
        blocks = sum(1 for _ in range(0, unit.shard_size, 256))
        assert message_sizes([unit], 1) == {unit.size: unit.shard_size + 4 * blocks}
        assert exact_parts(unit, 1) == {}


@pytest.mark.parametrize(
    ("model", "shards", "tensor"), list(product((GPT, LLAMA), (1, 3, 8), (2, 4)))
)
def test_what_tensor_ranks_have_in_common_follows(model: Model, shards: int, tensor: int) -> None:
    """Counted element by element."""
    for unit in chain.from_iterable(units(model, shards, tensor, rank) for rank in range(tensor)):
        found = exact_parts(unit, tensor)
        common = {
            element
            for slot in unit.slots
            if not slot.is_split
            for element in range(slot.offset, slot.stop)
        }
        listed = [
            number * unit.shard_size + element
            for number, parts in found.items()
            for part in parts
            for element in range(part.start, part.stop)
        ]
        assert sorted(listed) == sorted(common)
        longest = max(
            len(common.intersection(range(*unit.shard(number).indices(unit.size))))
            for number in range(shards)
        )
        size = unit.shard_size + 4 * -(-unit.shard_size // 256) + 2 * longest
        size += -size % 4
        expected = {unit.size: size} if size < 2 * unit.shard_size else {}
        assert message_sizes([unit], tensor) == expected


def test_units_of_one_size_have_messages_of_one_size() -> None:
    """By their size alone the planner knows what is gathered."""
    embedding, *_, head = units(LLAMA, 8, 2)
    assert embedding.size == head.size
    alone = [message_sizes([unit], 2).get(unit.size, 0) for unit in (embedding, head)]
    assert alone[0] != alone[1]
    together = message_sizes([embedding, head], 2)
    assert together == ({head.size: max(alone)} if min(alone) else {})


@pytest.mark.parametrize(
    ("shard_ranks", "per_node", "expected"),
    [("all", 4, False), ("all", 2, True), ("node", 2, False), (2, 2, False), (2, 3, True)],
)
def test_all_workers_gather_alike(shard_ranks: int | str, per_node: int, expected: bool) -> None:
    """With nodes of 3 ranks and of 1 only the second of two workers has ranks on both."""
    spec = Spec(
        train=Train(precision="bf16"),
        zero=Zero(stage=1, shard_ranks=shard_ranks),
        comm=Comm(compress="int8"),
    )
    grid = Grid.build(Parallel(), [rank // per_node for rank in range(4)])
    assert gathers_in_8_bits(spec, grid) is expected
    plain = spec.model_copy(update={"comm": Comm()})
    assert not gathers_in_8_bits(plain, grid)
