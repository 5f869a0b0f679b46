"""The data order: a permutation per epoch, and every layout sees the same global batches."""

import itertools
from collections import Counter

import pytest

from hpczero.data.samples import micro_batch_counts, micro_batch_sizes, micro_batches_of, window


def micro_batches(global_batch: int, micro_batch: int, ranks: int) -> list[list[range]]:
    return [micro_batches_of(rank, global_batch, micro_batch, ranks) for rank in range(ranks)]


def epoch_order(seed: int, windows: int, epoch: int) -> list[int]:
    return [window(seed, windows, index) for index in range(epoch * windows, (epoch + 1) * windows)]


@pytest.mark.parametrize(
    "sizes", [range(1, 80), (255, 256, 257, 1023, 1025, 4096, 5000)], ids=["small", "around powers"]
)
def test_every_epoch_visits_every_window_once(sizes: range | tuple[int, ...]) -> None:
    for windows in sizes:
        for epoch in (0, 1, 7):
            assert sorted(epoch_order(3, windows, epoch)) == list(range(windows))


def test_a_large_corpus_is_permuted_too() -> None:
    assert len({window(1, 40_009, index) for index in range(40_009)}) == 40_009
    for windows in (2**31 - 1, 2**40 + 1, 10**15):
        seen = {window(1, windows, index) for index in range(5000)}
        assert len(seen) == 5000
        assert max(seen) < windows
        assert max(seen) > windows * 0.99
        assert min(seen) < windows * 0.01


def test_the_order_depends_on_seed_and_epoch_only_and_is_known() -> None:
    assert epoch_order(1, 1000, 0) == epoch_order(1, 1000, 0)
    orders = [
        epoch_order(seed, 1000, epoch) for seed in (0, 1, 2, 2**63 - 1) for epoch in (0, 1, 2)
    ]
    for first, second in itertools.combinations(orders, 2):
        assert (
            sum(a == b for a, b in zip(first, second, strict=True)) < 10
        )  # one is expected by chance
    # a run that goes on with a later version must read what it would have read: this order may
    # never change
    assert epoch_order(1, 10, 0) == [2, 3, 4, 0, 6, 1, 8, 9, 7, 5]
    assert [window(7, 10**6, index) for index in (0, 1, 999_999, 1_000_000)] == [
        244011,
        704552,
        52070,
        794996,
    ]


def test_small_permutations_are_all_about_equally_frequent() -> None:
    drawn = Counter(tuple(epoch_order(5, 4, epoch)) for epoch in range(4800))
    assert len(drawn) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in drawn.values())
    assert chi_square < 60  # 23 degrees of freedom: chance exceeds it once in 40,000


@pytest.mark.parametrize("windows", [2, 3, 5, 17, 64, 100])
def test_every_place_of_an_epoch_sees_every_window(windows: int) -> None:
    epochs = 100 * windows
    for place in (0, windows // 2, windows - 1):
        drawn = Counter(window(9, windows, epoch * windows + place) for epoch in range(epochs))
        chi_square = sum((drawn[value] - 100) ** 2 / 100 for value in range(windows))
        assert chi_square < windows + 6 * (2 * windows) ** 0.5 + 12


def test_neighbours_are_torn_apart() -> None:
    order = epoch_order(11, 10_000, 0)
    distances = [abs(a - b) for a, b in itertools.pairwise(order)]
    assert 3200 < sum(distances) / len(distances) < 3470  # a third of the range
    assert sum(distance == 1 for distance in distances) < 15


def test_micro_batches_cover_the_global_batch_once() -> None:
    for global_batch, micro_batch, ranks in itertools.product(
        range(1, 41), range(1, 12), range(1, 12)
    ):
        layout = micro_batches(global_batch, micro_batch, ranks)
        accumulation = -(-global_batch // (micro_batch * ranks))
        assert [len(part) for part in layout] == [accumulation] * ranks
        assert list(itertools.chain.from_iterable(itertools.chain.from_iterable(layout))) == list(
            range(global_batch)
        )
        sizes = [len(slot) for part in layout for slot in part]
        assert max(sizes) <= micro_batch
        assert max(sizes) - min(sizes) <= 1
        assert micro_batch_sizes(global_batch, micro_batch, ranks) == (
            accumulation,
            min(sizes),
            max(sizes),
        )
        totals = [sum(map(len, part)) for part in layout]
        assert max(totals) - min(totals) <= 1


def test_one_rank_of_very_many_is_instant() -> None:
    assert micro_batches_of(10**8, 10**9, 1, 10**9) == [range(10**8, 10**8 + 1)]
    assert micro_batches_of(5, 3, 4, 10**9) == [range(0)]
    assert micro_batch_sizes(3, 4, 10**9) == (1, 0, 1)


def test_any_number_of_ranks_sees_the_same_global_batches_and_restarts_anywhere() -> None:
    seed, windows, global_batch = 3, 37, 10

    def batch(step: int, ranks: int, micro_batch: int) -> list[int]:
        slots = [slot for part in micro_batches(global_batch, micro_batch, ranks) for slot in part]
        return [
            window(seed, windows, step * global_batch + position)
            for slot in slots
            for position in slot
        ]

    alone = [batch(step, 1, 10) for step in range(12)]
    for ranks, micro_batch in itertools.product((1, 2, 3, 4, 7, 16), (1, 2, 3, 8)):
        assert [batch(step, ranks, micro_batch) for step in range(12)] == alone
    assert batch(11, 3, 2) == alone[11]  # asked for alone, as after a restart
    assert sorted(list(itertools.chain.from_iterable(alone))[:windows]) == list(range(windows))


def test_micro_batches_are_counted_without_dealing_them_out() -> None:
    for global_batch, micro_batch, ranks in itertools.product(
        (1, 2, 5, 13, 32), (1, 2, 3, 8), (1, 2, 3, 5, 16)
    ):
        for rank, dealt in enumerate(micro_batches(global_batch, micro_batch, ranks)):
            assert micro_batch_counts(rank, global_batch, micro_batch, ranks) == Counter(
                map(len, dealt)
            )
    assert micro_batch_counts(7, 10**9, 1, 8) == {1: 10**9 // 8}
