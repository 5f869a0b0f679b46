"""Exchanges between replicas equal the formula, in plain torch on the tensors of all ranks; many
of them in flight, moved on in any order; what messages leave out is made up for.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hpczero.comm.world import World
from hpczero.parallel.replicas.codecs import codec_of
from hpczero.parallel.replicas.exchange import Errors, Exchange
from hpczero.parallel.replicas.sizes import FORMS, part_of
from hpczero.parallel.zero.data_axis import Replicas
from hpczero.planner.data_volumes import sent_in_exchanges

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

LENGTHS = (1, 7, 64, 2047, 5000)  # fewer blocks than replicas, and more
WITH_BLOCKS = [name for name, form in FORMS.items() if form.block]
MOST = {"int8": 127, "int4": 7}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def replicas_of(world: World) -> Replicas:
    ranks = range(world.size)
    return Replicas(world.group("replica", ranks), world.group("replica", ranks, "averages"))


def drawn(seed: int, rank: int, length: int) -> Tensor:
    """Return the values of a rank, which every rank can make; each block has a size of its own."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    sizes = 2.0 ** (torch.arange(length) // 256 % 5)
    return torch.randn(length, generator=generator) * sizes


def variance_of(length: int) -> Tensor:
    """Return a variance that is 0 for some elements."""
    return (torch.arange(length) * 7 % 5).float()


@dataclass
class Formula:
    """The average in plain torch: `sent` of each rank and `served` are what messages left out."""

    name: str
    sent: list[Tensor]
    served: Tensor
    variance: Tensor | None = None

    def message(self, total: Tensor) -> Tensor:
        """Return what a message says of the values."""
        if self.name in FLOATS:
            return total.to(FLOATS[self.name]).float()
        living = torch.ones(len(total)) if self.variance is None else self.variance
        said = torch.zeros_like(total)
        block = FORMS[self.name].block
        for start in range(0, len(total), block):
            part = slice(start, start + block)
            lives = living[part] != 0
            values = total[part].where(lives, 0.0)
            if self.name == "1bit":
                scale = values.double().abs().sum() / max(1, int(lives.sum()))
                said[part] = torch.copysign(scale.float(), values).where(lives, 0.0)
            else:
                scale = values.abs().max() / MOST[self.name]
                said[part] = torch.round(values * (1 / scale)) * scale
        return said

    def average(self, values: Sequence[Tensor]) -> Tensor:
        messages = []
        for number, own in enumerate(values):
            total = own.float() + self.sent[number]
            messages.append(self.message(total))
            self.sent[number] = total - messages[-1]
        total = torch.stack(messages).mean(0) + self.served
        average = self.message(total)
        self.served = total - average
        return average


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_equals_the_formula(world: World, name: str, dead: bool) -> None:
    """With what earlier messages left out, where that is kept.

    `dead`: some take no part; where that cannot be, values are in half precision.
    """
    replicas = replicas_of(world)
    form, ranks = FORMS[name], range(world.size)
    variance, errors = None, Errors()
    for number, length in enumerate(LENGTHS):
        left = [torch.zeros(length) for _ in [*ranks, "served"]]
        values = [drawn(number, rank, length) for rank in ranks]
        if dead and name == "1bit":
            variance = variance_of(length)
        if form.block:
            left = [drawn(number + 50, rank, length) / 10 for rank in (*ranks, 9)]
            own = part_of(form, length, world.size, world.rank)
            errors = Errors(left[world.rank].clone(), left[-1][own].clone())
        if dead and name != "1bit":
            values = [value.bfloat16() for value in values]
        given = values[world.rank].clone()
        exchange = Exchange(replicas, codec_of(form), given, errors, variance)
        exchange.wait()
        found = torch.full((length,), float("nan"))
        exchange.decode(found)
        formula = Formula(name, left[:-1], left[-1], variance)
        torch.testing.assert_close(found, formula.average(values), rtol=1e-5, atol=1e-6)
        assert torch.equal(given, values[world.rank])
        assert_same_bits(world, found)
        if errors.sent is not None:
            living = torch.ones(length) if variance is None else (variance != 0).float()
            expected = formula.sent[world.rank] * living, (formula.served * living)[own]
            torch.testing.assert_close((errors.sent, errors.served), expected, rtol=0, atol=1e-5)


def assert_same_bits(world: World, found: Tensor) -> None:
    assert all(torch.equal(found, other) for other in world.everyone.stack(found))


@pytest.mark.parametrize("per_node", [0, 1, 2])
def test_many_in_flight_come_to_their_ends_in_any_order(world: World, per_node: int) -> None:
    """Each rank polls, waits for and leaves alone others than the next rank does.

    Between nodes operations move on in the background, too.
    """
    nodes = world.part(range(world.size), per_node)
    replicas = replicas_of(nodes)
    complete_in_any_order(world, replicas, per_node)
    assert not replicas.first_passes
    nodes.close()


def complete_in_any_order(world: World, replicas: Replicas, seed: int) -> None:
    of_all, own = random.Random(seed), random.Random(f"{seed} {world.rank}")
    kinds = [(of_all.choice([*FORMS]), of_all.choice(LENGTHS)) for _ in range(40)]
    waiting: dict[int, Exchange] = {}
    made = 0
    while made < len(kinds) or waiting:
        if made < len(kinds) and (not waiting or own.random() < 0.4):
            name, length = kinds[made]
            errors = Errors(torch.zeros(length)) if FORMS[name].block else Errors()
            if name == "1bit":
                part = part_of(FORMS[name], length, world.size, world.rank)
                errors = Errors(torch.zeros(length), torch.zeros(part.stop - part.start))
            values = drawn(made, world.rank, length)
            waiting[made] = Exchange(replicas, codec_of(FORMS[name]), values, errors)
            made += 1
            continue
        if own.random() < 0.1:
            time.sleep(own.random() / 200)
        number = own.choice([*waiting])
        exchange = waiting[number]
        if own.random() < 0.05:
            exchange.wait()
        if exchange.poll():
            del waiting[number]
            assert_average(world, exchange, number, *kinds[number])


def assert_average(world: World, exchange: Exchange, seed: int, name: str, length: int) -> None:
    found = torch.empty(length)
    exchange.decode(found)
    zeros = [torch.zeros(length) for _ in range(world.size)]
    values = [drawn(seed, rank, length) for rank in range(world.size)]
    expected = Formula(name, zeros, torch.zeros(length)).average(values)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", WITH_BLOCKS)
@pytest.mark.few(6)
def test_what_is_left_out_is_made_up_for(world: World, name: str, length: int) -> None:
    """The averages of 20 rounds, and what is left then, are the means of all that was given."""
    replicas = replicas_of(world)
    form, rounds = FORMS[name], 20
    part = part_of(form, length, world.size, world.rank)
    errors = Errors(torch.zeros(length), torch.zeros(part.stop - part.start))
    averages, means = torch.zeros(2, length, dtype=torch.float64)
    for number in range(rounds):
        exchange = Exchange(replicas, codec_of(form), drawn(number, world.rank, length), errors)
        exchange.wait()
        found = torch.empty(length)
        exchange.decode(found)
        averages += found
        for rank in range(world.size):
            means += drawn(number, rank, length).double() / world.size
    assert errors.sent is not None
    assert errors.served is not None
    left = torch.zeros(length, dtype=torch.float64)
    left[part] = errors.served.double()
    left += errors.sent.double() / world.size
    world.everyone.all_reduce(left)
    torch.testing.assert_close(averages + left, means, rtol=0, atol=1e-4)
    apart = (averages - means).norm()
    assert apart > 0 or length == 1  # one number has a scale of its own
    assert apart < 5 * means.norm() / rounds**0.5  # of random numbers, the mean's norm is its root


@pytest.mark.parametrize("length", [1, 64, 5000, 9001])
@pytest.mark.parametrize("name", FORMS)
def test_bytes_are_those_that_are_computed(world: World, name: str, length: int) -> None:
    part = world.part(range(world.size))
    replicas = replicas_of(part)
    form = FORMS[name]
    own = part_of(form, length, world.size, world.rank)
    errors = Errors(torch.zeros(length), torch.zeros(own.stop - own.start))
    exchange = Exchange(replicas, codec_of(form), drawn(0, world.rank, length), errors)
    exchange.wait()
    entries = part.ledger.as_dict()["replica"]
    sent = {name: int(entry["inside"] + entry["between"]) for name, entry in entries.items()}
    part.close()
    foreseen = list(sent_in_exchanges(form, length, [1] * world.size, 1))[world.rank]
    assert sent == {name: operation.between for name, operation in foreseen.items()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.few(6)
def test_what_is_not_finite_never_becomes_a_number(world: World, name: str, bad: float) -> None:
    """It shows in its block on all ranks, and nowhere else; the last rank gives it."""
    replicas = replicas_of(world)
    length, form = 5000, FORMS[name]
    for place in (0, 3000, length - 1):
        own = part_of(form, length, world.size, world.rank)
        errors = Errors(torch.zeros(length), torch.zeros(own.stop - own.start))
        values = [drawn(place, rank, length) for rank in range(world.size)]
        values[-1][place] = bad
        given = values[world.rank]
        exchange = Exchange(replicas, codec_of(form), given, errors)
        exchange.wait()
        found = torch.zeros(length)
        exchange.decode(found)
        block = form.block or 1
        spoiled = torch.arange(length) // block == place // block
        assert torch.equal(found.isfinite(), ~spoiled)
        for value in values:
            value[spoiled] = 0
        zeros = [torch.zeros(length) for _ in values]
        expected = Formula(name, zeros, torch.zeros(length)).average(values)
        torch.testing.assert_close(found[~spoiled], expected[~spoiled], rtol=1e-5, atol=1e-6)


def test_elements_without_a_variance_take_no_part(world: World) -> None:
    """Not even where they are NaN: their block has the scale of the others, and they are 0."""
    replicas, form = replicas_of(world), FORMS["1bit"]
    length = 3000
    variance = variance_of(length)
    own = part_of(form, length, world.size, world.rank)
    errors = Errors(torch.zeros(length), torch.zeros(own.stop - own.start))
    values = [drawn(5, rank, length) for rank in range(world.size)]
    given = values[world.rank].masked_fill(variance == 0, float("nan"))
    exchange = Exchange(replicas, codec_of(form), given, errors, variance)
    exchange.wait()
    found = torch.full((length,), float("nan"))
    exchange.decode(found)
    zeros = [torch.zeros(length) for _ in values]
    expected = Formula("1bit", zeros, torch.zeros(length), variance).average(values)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not found[variance == 0].any()
    assert errors.sent is not None
    assert errors.sent.isfinite().all()
