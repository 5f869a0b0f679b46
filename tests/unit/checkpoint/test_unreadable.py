"""A checkpoint that cannot be read is not damaged: it is neither passed over nor pruned, and
says what to do.
"""

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpczero.checkpoint
from hpczero.checkpoint import Damaged, Unreadable, manifest, shards
from hpczero.cli import main
from hpczero.errors import InputError
from tests.support.checkpoints import Grid, Wanted, make, parameters, seal

RANKS = 100
WANTED = Wanted(layers=parameters(a=(RANKS * 64,)))


@contextmanager
def descriptors(more: int) -> Iterator[None]:
    """No more than so many beyond those that are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (number for number in count() if not Path(f"/proc/self/fd/{number}").exists())
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_checkpoint_of_many_files_needs_few_descriptors(tmp_path: Path) -> None:
    made = make(tmp_path, Grid(data=RANKS, per_file=1), WANTED)
    with descriptors(70), hpczero.checkpoint.open(made) as checkpoint:
        for _ in range(2):
            assert np.array_equal(checkpoint["/model/a"].numpy(), WANTED.values[0]["a"])
        before = len(os.listdir("/proc/self/fd"))
    assert before - len(os.listdir("/proc/self/fd")) == 2 * shards._OPEN


def test_a_file_that_is_opened_again_is_held_against_its_checksum_again_if_it_changed(
    tmp_path: Path,
) -> None:
    made = make(tmp_path, Grid(data=RANKS, per_file=1), WANTED)
    with hpczero.checkpoint.open(made) as checkpoint:
        checkpoint["/model/a"].numpy()
        raw = (made / "shard-00000.h5").read_bytes()
        (made / "shard-00000.h5").write_bytes(raw[:9] + b"x" + raw[10:])
        with pytest.raises(Damaged, match="damaged outside of its data"):
            checkpoint["/model/a"].numpy()


def test_what_is_closed_stays_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with hpczero.checkpoint.open(make(tmp_path, Grid(), WANTED)) as checkpoint:
        tensor = checkpoint["/model/a"]
        tensor.numpy()
    with pytest.raises(ValueError, match="has been closed"):
        tensor.numpy()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("more", range(4))
def test_too_many_open_files_are_no_damage(tmp_path: Path, more: int) -> None:
    made = make(tmp_path, Grid(data=4, per_file=1), WANTED)
    np.random.default_rng()  # a library that is loaded late needs a descriptor too
    with hpczero.checkpoint.open(made) as checkpoint:
        checkpoint["/model/a"].numpy()
    with (
        descriptors(more),
        pytest.raises(Unreadable, match="Too many open files"),
        hpczero.checkpoint.open(made) as checkpoint,
    ):
        checkpoint["/model/a"].numpy()
    if not more:
        with descriptors(0), pytest.raises(Unreadable, match="Too many open files"):
            hpczero.checkpoint.open(made)
    assert issubclass(Unreadable, InputError)


FAILING: dict[str, Callable[[pytest.MonkeyPatch, OSError], None]] = {
    "open": lambda patch, error: patch.setattr(os, "open", failing(os.open, error)),
    "pread": lambda patch, error: patch.setattr(os, "pread", failing(os.pread, error)),
    "preadv": lambda patch, error: patch.setattr(os, "preadv", failing(os.preadv, error)),
}


def failing(real: Callable[..., Any], error: OSError) -> Callable[..., Any]:
    """For descriptors, and for paths of checkpoints."""

    def fail(what: Any, *more: Any, **named: Any) -> Any:
        if isinstance(what, int) or "step-" in str(what):
            raise error
        return real(what, *more, **named)

    return fail


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOMEM])
@pytest.mark.parametrize("call", FAILING)
def test_what_the_system_refuses_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    made = make(tmp_path, Grid(), WANTED)
    FAILING[call](monkeypatch, OSError(number, os.strerror(number)))
    with (
        pytest.raises(Unreadable, match=os.strerror(number)),
        hpczero.checkpoint.open(made) as checkpoint,
    ):
        checkpoint["/model/a"].numpy()


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "prune --keep 1"])
def test_a_folder_that_may_not_be_looked_into_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    make(tmp_path / "checkpoints", Grid(), WANTED)
    monkeypatch.setattr(
        Path,
        "is_file",
        failing(Path.is_file, PermissionError(errno.EACCES, "Permission denied", "there")),
    )
    assert main(["ckpt", *verb.split()[:1], str(tmp_path), *verb.split()[1:]]) == 2
    said = capsys.readouterr().err
    assert "Permission denied" in said
    assert said.count("\n") == 1


def test_prune_leaves_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        make(tmp_path / "checkpoints", Grid(), Wanted(layers=WANTED.layers, step=step))
        for step in range(1, 5)
    ]
    seal(made[0], lambda content: content.update(format=manifest.FORMAT + 1))
    (made[2] / "shard-00000.h5").unlink()
    opened = os.open

    def no_permission(path: Any, *more: Any, **named: Any) -> int:
        if str(path) == f"{made[1]}/MANIFEST.json":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *more, **named)

    monkeypatch.setattr(os, "open", no_permission)
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == [
        "newer",
        "unreadable",
        "damaged",
        "complete",
    ]
    assert (
        main(
            [
                "ckpt",
                "prune",
                str(tmp_path),
                "--keep",
                "1",
                "--damaged",
                "--incomplete",
                "--set-aside",
            ]
        )
        == 0
    )
    assert [path.exists() for path in made] == [True, True, False, True]


def test_verify_says_what_it_could_not_read_and_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path, Grid(data=3, per_file=1), WANTED)
    opened = os.open

    def no_permission(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith("shard-00001.h5"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *more, **named)

    monkeypatch.setattr(os, "open", no_permission)
    assert main(["ckpt", "verify", str(made)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("NOT READ")
    assert "shard-00001.h5: Permission denied" in lines[1]
    assert len(lines) == 2
    (made / "shard-00002.h5").unlink()
    assert main(["ckpt", "verify", str(made), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)[0]
    assert [damage["file"] for damage in found["damages"]] == ["shard-00002.h5"]
    assert len(found["unreadable"]) == 1
