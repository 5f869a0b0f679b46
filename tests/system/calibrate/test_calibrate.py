"""`hpczero calibrate` as a user runs it: alone and under mpirun."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpczero.planner.cluster import find
from tests.support.launch import Finished, hpczero, launch, mpirun


def calibrate(folder: Path, *options: str, ranks: int = 0) -> Finished:
    launcher = mpirun(ranks) if ranks else []
    done = launch([*launcher, *hpczero("calibrate", *options)], 120, folder)
    assert done.left == []
    return done


@pytest.mark.slow
def test_two_ranks_write_a_file_that_is_not_overwritten(tmp_path: Path) -> None:
    options = ("--name", "mine", "--seconds", "1", "--folder", str(tmp_path))
    done = calibrate(tmp_path, *options, ranks=2)
    assert done.code == 0, done
    assert [line.split()[1] for line in done.err.splitlines()] == ["measure"] * 7
    assert done.out.endswith("written: clusters/mine.toml (hpczero cluster show mine)\n")
    path = tmp_path / "clusters" / "mine.toml"
    cluster = find(str(path)).cluster
    cluster.need_links(2, 1)
    assert {"bf16", "fp32"} <= set(cluster.device.products)
    assert "2 ranks" in cluster.sources[0]
    before = path.read_bytes()
    again = calibrate(tmp_path, *options, ranks=2)
    assert (again.code, again.out, again.err.count("hpczero: ")) == (2, "", 1)
    assert "--overwrite" in again.err
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["clusters"]


@pytest.mark.slow
def test_a_rank_alone_says_nothing_of_links(tmp_path: Path) -> None:
    done = calibrate(tmp_path, "-o", "alone.toml", "--seconds", "1", "--json")
    assert done.code == 0, done
    data = json.loads(done.out)
    assert data["file"] == "alone.toml"
    assert data["findings"]["machine"]["ranks"] == 1
    assert "link_gb_s" not in find(str(tmp_path / "alone.toml")).cluster.node.model_fields_set


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--folder", "nowhere"), "--folder nowhere"),
        (("--seconds", "0.1"), "--seconds 0.1"),
        (("-o", "nowhere/x.toml"), "there is no folder nowhere"),
        (("-o", "x.json"), "ends in .toml"),
        (("--name", "../up"), "--name"),
        (("--base", "dgx-h100"), "--base is for --from"),
    ],
)
@pytest.mark.slow
def test_wrong_input_is_one_message_and_leaves_nothing(
    tmp_path: Path, options: Sequence[str], said: str
) -> None:
    done = calibrate(tmp_path, *options)
    assert (done.code, done.out, done.err.count("hpczero: ")) == (2, "", 1), done
    assert said in done.err
    assert not list(tmp_path.iterdir())
