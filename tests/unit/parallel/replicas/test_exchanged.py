"""What replicas exchange by a spec, in numbers."""

from typing import Any

import pytest

from hpczero.parallel.replicas.exchanged import Exchanged
from hpczero.parallel.replicas.sizes import FORMS, part_of
from hpczero.planner.data_volumes import sent_in_exchanges
from hpczero.spec.optimizer import Outer
from hpczero.spec.schema import Comm, Optimizer, Spec

OWNED = [4096, 1000, 64]


def by(**tables: Any) -> Exchanged:
    return Exchanged.by(Spec(**tables))


def outer(every: int, **keys: Any) -> Exchanged:
    return by(optimizer=Optimizer(outer=Outer(every=every, **keys)))


SIGNS = by(optimizer=Optimizer(name="one_bit_adam", freeze=100))
COMPRESSED = by(comm=Comm(compress="int8"))


def test_gradients_are_summed_unless_the_spec_says_otherwise() -> None:
    plain = by()
    assert plain == Exchanged(None, 1, 0)
    assert plain.sums_at_first
    assert not plain.gradients_differ
    assert plain.kept(OWNED, 4) == plain.messages(OWNED, 4) == 0
    assert plain.saved(12, 4) == (12, 0)
    assert plain.in_words() == ""


def test_compressed_sums_keep_nothing() -> None:
    assert Exchanged(FORMS["int8"], 1, 0) == COMPRESSED
    assert not COMPRESSED.gradients_differ
    assert not COMPRESSED.sums_at_first
    assert COMPRESSED.kept(OWNED, 4) == 0
    assert COMPRESSED.saved(12, 4) == (12, 0)
    assert COMPRESSED.in_words() == "sums of gradients in int8"


def test_signs_come_after_sums() -> None:
    assert Exchanged(FORMS["1bit"], 1, 100, "steps") == SIGNS
    assert SIGNS.sums_at_first
    assert SIGNS.gradients_differ
    served = sum(part_of(FORMS["1bit"], elements, 2, 0).stop for elements in OWNED)
    assert SIGNS.kept(OWNED, 2) == 4 * (max(OWNED) + sum(OWNED) + served)
    assert SIGNS.saved(12, 2) == (12 + 4 + 8, 4 + 8), "of both replicas an error, and of averages"
    assert SIGNS.in_words() == "signs of 1-bit Adam's steps, after 100 steps"
    found = by(optimizer=Optimizer(name="one_bit_adam"))
    assert found.in_words() == "signs of 1-bit Adam's steps, after a warm-up"


def test_local_steps_exchange_weights_once_in_a_while() -> None:
    plain, small = outer(50), outer(20, precision="int4", fragments=2)
    assert plain == Exchanged(FORMS["fp32"], 50, 0, "weights")
    assert not plain.has_errors
    assert plain.kept(OWNED, 2) == 4 * (max(OWNED) + 2 * sum(OWNED))
    assert plain.saved(12, 3) == (8 + 3 * 12, 3 * 12)
    assert small.has_errors
    assert small.kept(OWNED, 2) > plain.kept(OWNED, 2) + 4 * sum(OWNED)
    assert plain.messages(OWNED, 2) == 3 * 4 * sum(OWNED)
    assert small.messages(OWNED, 2) == 3 * FORMS["int4"].message(4096), "of the largest fragment"
    assert plain.in_words() == "weights in fp32, in one of 50 steps"
    late = outer(50, begin=100)
    assert late.in_words() == "weights in fp32, in one of 50 steps, after 100 steps"
    assert late.sums_at_first
    assert not plain.sums_at_first
    assert small.in_words() == "weights in int4, in one of 20 steps, in 2 fragments"


@pytest.mark.parametrize("one", [SIGNS, COMPRESSED, outer(5)], ids=lambda one: one.of)
def test_one_replica_exchanges_with_nobody(one: Exchanged) -> None:
    assert one.kept(OWNED, 1) == one.messages(OWNED, 1) == 0
    assert one.saved(12, 1) == (12, 0)


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize("on_nodes", [(1, 1), (2, 1), (3,), (2, 2, 3), (1,) * 5])
def test_bytes_to_nodes_are_those_of_the_exchange(form: Any, on_nodes: tuple[int, ...]) -> None:
    ranks = sum(on_nodes)
    for elements in (64, 1000, 4096, 10_000):
        sent = list(sent_in_exchanges(form, elements, on_nodes, 3))
        apart = sent_in_exchanges(form, elements, (1,) * ranks, 1)
        for operations, alone in zip(sent, apart, strict=True):
            for name in ("all_to_all", "all_gather"):
                assert operations[name].inside + operations[name].between == 3 * alone[name].between
            assert (operations["all_to_all"].between > 0) <= (len(on_nodes) > 1)
