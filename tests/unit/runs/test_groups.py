"""Runs that differ by their seed alone, and the keys in which groups differ."""

from pathlib import Path

import pytest

from hpczero.runs.groups import Group, differences, groups_of, names_of
from hpczero.runs.record import Run, read_run
from tests.support.made_runs import Made


def runs_in(folder: Path, **made: tuple[int, dict[str, str]]) -> list[Run]:
    """Return runs by their names, of a seed and settings each; "__" in a name is a folder's end."""
    return [
        read_run(Made(settings=settings, seed=seed).write(folder / name.replace("__", "/")))
        for name, (seed, settings) in made.items()
    ]


def test_seeds_make_a_group_and_settings_another(tmp_path: Path) -> None:
    fast = {"optimizer.lr": "0.1"}
    runs = runs_in(
        tmp_path, **{"fast-2": (2, fast), "slow": (1, {}), "fast-1": (1, fast), "fast-9": (9, fast)}
    )
    assert groups_of(runs) == [Group("fast", (2, 0, 3), (1, 2, 9)), Group("slow", (1,), (1,))]
    assert groups_of(runs)[0].seeds_in_words == "1-2, 9"
    assert [group.name for group in groups_of(runs, each=True)] == [run.name for run in runs]
    (found,) = differences(runs, groups_of(runs))
    assert (found.key, found.is_site) == ("optimizer.lr", False)
    assert found.values == ((0.1,), (0.0003,))


def test_what_only_says_where_it_ran_makes_no_group_and_comes_last(tmp_path: Path) -> None:
    here = {"output": '"here"', "train.eval_batches": "2"}
    there = {"output": '"there"', "zero.stage": "2", "train.eval_batches": "4"}
    runs = runs_in(tmp_path, a=(1, here), b=(2, {**here, "train.eval_batches": "3"}), c=(1, there))
    groups = groups_of(runs)
    assert [group.members for group in groups] == [(0, 1), (2,)]
    found = {one.key: (one.is_site, one.values) for one in differences(runs, groups)}
    assert list(found) == ["zero.stage", "train.eval_batches"]
    assert found["train.eval_batches"] == (True, ((2, 3), (4,)))


def test_the_same_seed_again_is_no_other_draw(tmp_path: Path) -> None:
    runs = runs_in(tmp_path, **{"a-1": (1, {}), "a-2": (2, {}), "again-1": (1, {})})
    assert [group.seeds for group in groups_of(runs)] == [(1, 2), (1,)]


def test_a_spec_that_cannot_be_read_is_a_group_of_its_own(tmp_path: Path) -> None:
    runs = runs_in(tmp_path, a=(1, {"zero.stage": "7"}), b=(1, {"zero.stage": "8"}), c=(1, {}))
    assert [group.seeds for group in groups_of(runs)] == [(), (), (1,)]
    assert differences(runs, groups_of(runs)) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("lamb-0.02-1", "lamb-0.02-2"), "lamb-0.02"),
        (("gpt_seed1", "gpt_seed2"), "gpt"),
        (("gpt.s10", "gpt.s11"), "gpt"),
        (("loss-1", "loss-2"), "loss"),
        (("1", "2"), "1"),
        (("one", "two"), "one"),
        (("lions1", "lions2"), "lions"),
    ],
)
def test_a_groups_name_is_what_its_runs_names_have_in_common(
    names: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    runs = runs_in(tmp_path, **{name: (seed, {}) for seed, name in enumerate(names)})
    assert [group.name for group in groups_of(runs)] == [said]


def test_names_that_are_alike_get_what_tells_them_apart(tmp_path: Path) -> None:
    runs = runs_in(
        tmp_path,
        old__run=(1, {}),
        new__run=(1, {"zero.stage": "2"}),
        other=(1, {"zero.stage": "3"}),
    )
    assert names_of(runs) == ["old/run", "new/run", "other"]
    alike = runs_in(tmp_path, **{"x-1": (1, {}), "x-2": (2, {}), "x": (1, {"zero.stage": "2"})})
    assert [group.name for group in groups_of(alike)] == ["x-1", "x"]
