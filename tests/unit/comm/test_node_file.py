"""Files of a node's ranks are read again; those that a stranger wrote are nothing."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.comm import node_file
from hpczero.comm.node_file import NOTHING, NodeFile, path_of, read, write, write_whole
from hpczero.comm.status import Operation, RankState
from tests.support.json_values import json_values

STARTED = {"77": [Operation(number, 5 * number, "all_reduce", 9, 1.5) for number in range(1, 41)]}
WAITS = RankState(10, 20, 3, 12, 4.0, 2.5, "all_reduce (number 40 along data)", STARTED, "77", 40)
COMPUTES = RankState(11, 20, 4, -1, 4.0, None, "")
FILE = NodeFile(
    1e9, "asked", {0: replace(WAITS, axis="data"), 3: COMPUTES}, {3: "main"}, {3: "ok"}, {3: 9}
)


def test_what_is_written_is_read_again_with_the_last_operations(tmp_path: Path) -> None:
    path = path_of(tmp_path / "watch", 7)
    write(path, FILE, 3)
    found = read(path)
    assert path.name == "node-0007.json"
    last = STARTED["77"][-node_file._MOST_OPERATIONS :]
    state = replace(FILE.states[0], started={"77": last})
    assert found == replace(FILE, states={0: state, 3: COMPUTES})
    assert [one.name for one in path.parent.iterdir()] == ["node-0007.json"]


def test_a_state_grows_older(tmp_path: Path) -> None:
    assert (WAITS.older(2).waited, WAITS.older(2).idle) == (4.5, 6.0)
    assert (COMPUTES.older(2).waited, COMPUTES.older(2).resting) == (None, 6.0)


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    write(path_of(tmp_path / "file", 0), FILE, 0)
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "node-0000.json").mkdir()
    write(path_of(tmp_path / "watch", 0), FILE, 0)
    assert (tmp_path / "file").read_text() == "kept"
    assert read(path_of(tmp_path / "watch", 0)) == NOTHING


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    for name in ("node-0000.txt", ".node-0000.txt.5"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    write_whole(tmp_path / "node-0000.txt", "said", 5)
    assert (tmp_path / "mine").read_text() == "kept"
    assert (tmp_path / "node-0000.txt").read_text() == "said"


def facts() -> dict[str, Any]:
    states = {rank: asdict(state) for rank, state in FILE.states.items()}
    of_ranks = {"states": states, "stacks": {}, "notes": {}}
    facts: dict[str, Any] = json.loads(json.dumps({"at": 1.0, "reason": "x", **of_ranks}))
    return facts


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "7", "NaN", "{}", "[" * 100_000, '{"at": ' * 50_000, "9" * 5000),
        *("\0" * 100, '{"at": 1, "reason": "", "states": {}, "stacks": {}}'),
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_a_file_with_anything_else_is_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "node-0000.json").write_text(text)
    assert read(tmp_path / "node-0000.json") == NOTHING


@pytest.mark.parametrize("value", [1e999, -1e999, float("nan"), 1e300, 10**400, "x", None, [], {}])
@pytest.mark.parametrize("name", ["at", "idle", "waited", "ago", "pid", "step", "number"])
def test_a_number_that_cannot_be_is_nothing(tmp_path: Path, name: str, value: object) -> None:
    written = facts()
    state = written["states"]["0"]
    places = {"at": written, "ago": state["started"]["77"][-1]}
    places.get(name, state)[name] = value
    (tmp_path / "f").write_text(json.dumps(written))
    found = read(tmp_path / "f")
    whole = type(value) is int or (name in ("pid", "step", "number") and value == 1e300)
    allowed = (name == "waited" and value is None) or (whole and name in ("pid", "step", "number"))
    assert (found == NOTHING) == (not allowed)


@pytest.mark.parametrize("size", [-1, 1 << 60, 10**400, 1e999, "x", None, []])
def test_a_size_that_cannot_be_is_nothing(tmp_path: Path, size: object) -> None:
    (tmp_path / "f").write_text(json.dumps({**facts(), "resident": {"0": size}}))
    assert read(tmp_path / "f") == NOTHING
    (tmp_path / "f").write_text(json.dumps({**facts(), "resident": {"0": 5}}))
    assert read(tmp_path / "f").resident == {0: 5}


@given(st.sampled_from(["at", "reason", "states", "stacks", "notes", "resident"]), json_values)
def test_any_value_in_the_file_raises_nothing(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_text(json.dumps({**facts(), name: value}))
    types_of(read(path))


@given(st.sampled_from(sorted(asdict(WAITS))), json_values)
def test_any_value_in_a_state_raises_nothing(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    written = facts()
    written["states"]["0"][name] = value
    path.write_text(json.dumps(written))
    types_of(read(path))


def types_of(file: NodeFile) -> None:
    """Assert that everything has the type that readers rely on."""
    assert isinstance(file.reason, str)
    assert abs(file.at) < 1e13
    for rank, state in file.states.items():
        assert isinstance(rank, int)
        assert {type(one) for one in (state.pid, state.step, state.number, state.stacks)} == {int}
        assert {type(one) for one in (state.waits_in, state.group, state.axis)} == {str}
        assert abs(state.idle) < 1e13
        assert state.waited is None or abs(state.waited) < 1e13
        for operations in state.started.values():
            assert all(type(one.number) is int and type(one.label) is str for one in operations)
    assert all(type(size) is int and 0 <= size < 1 << 60 for size in file.resident.values())
    for texts in (file.stacks, file.notes):
        assert all(isinstance(text, str) for text in texts.values())


def test_what_is_no_plain_file_or_too_large_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "circle", "zero", "none"):
        assert read(tmp_path / name) == NOTHING, name
    write(tmp_path / "large", FILE, 0)
    assert read(tmp_path / "large") != NOTHING
    monkeypatch.setattr(node_file, "_MOST", 1000)
    assert read(tmp_path / "large") == NOTHING
