"""Token files that can and cannot be trusted, and the three kinds of source."""

import fcntl
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpczero.data import dataset
from hpczero.data.build import Recipe, build_token_file
from hpczero.data.corpus import find
from hpczero.data.dataset import open_source
from hpczero.data.token_file import open_token_file
from hpczero.errors import HpczeroError, InputError
from hpczero.spec.schema import Data, Model, Paths, Spec, Train

TEXT = "".join(f"line {number} of the text\n" for number in range(40_000))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text(TEXT)
    build_token_file(
        find([str(folder / "text.txt")]),
        folder / "good.h5",
        Recipe("byte", 0.2),
        folder / "work",
        dataset.SilentListener(),
    )
    return folder / "good.h5"


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "tokens.h5"))


def spec(
    source: Path | str, seq_len: int = 32, vocab: int = 257, eval_batches: int = 1, **more: Any
) -> Spec:
    model, train = Model(seq_len=seq_len, vocab=vocab), Train(eval_batches=eval_batches)
    return Spec(model=model, data=Data(source=str(source)), train=train, **more)


def alone(value: Any) -> Any:
    return value


def test_windows_are_the_text(path: Path) -> None:
    source, file = open_source(spec(path), alone), open_token_file(path)
    assert source.vocabulary == 257
    out = np.empty(33, np.int64)
    for split in ("train", "validation"):
        tokens = np.asarray(file.splits[split].tokens)
        assert source.windows(split) == (len(tokens) - 1) // 32
        for window in (0, 1, source.windows(split) - 1):
            source.fill(split, window, out)
            assert np.array_equal(out, tokens[window * 32 : window * 32 + 33])
        with pytest.raises(AssertionError):
            source.fill(split, source.windows(split), out)
        shares = np.bincount(tokens) / len(tokens)
        assert source.unigram_entropy(split) == pytest.approx(
            -sum(share * math.log(share) for share in shares if share)
        )
    assert TEXT.startswith(bytes(file.splits["train"].tokens[:1000].astype(np.uint8)).decode())
    facts = source.describe()
    assert facts["path"] == str(path)
    assert sum(facts["tokens"].values()) == len(TEXT) + sum(facts["documents"].values())
    assert len(facts["fingerprint"]) == 32


def test_tokens_are_mapped_not_read(path: Path) -> None:
    tokens = open_token_file(path).splits["train"].tokens
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable
    assert tokens.offset % 4096 == 0  # type: ignore[attr-defined]


def test_the_model_must_have_room_for_every_token(path: Path) -> None:
    with pytest.raises(
        InputError,
        match=(
            r"model\.vocab = 256 is too small: .* holds token 256 .*set model\.vocab = 257 or "
            r"more"
        ),
    ):
        open_source(spec(path, vocab=256), alone)
    assert open_source(spec(path, vocab=1000), alone).vocabulary == 257


def test_a_split_must_hold_a_window(path: Path) -> None:
    with pytest.raises(InputError, match=r"tokens to train on, a sequence needs 5000001 "):
        open_source(spec(path, seq_len=5_000_000), alone)
    tokens = len(open_token_file(path).splits["validation"].tokens)
    with pytest.raises(
        InputError,
        match=(
            rf"has {tokens} tokens for validation, a sequence needs {tokens + 1} .*eval_batches "
            rf"= 0"
        ),
    ):
        open_source(spec(path, seq_len=tokens), alone)
    assert open_source(spec(path, seq_len=tokens, eval_batches=0), alone).windows("validation") == 0
    assert open_source(spec(path, seq_len=tokens - 1), alone).windows("validation") == 1


def replaced(name: str, **options: Any) -> Callable[[h5py.File], None]:
    """Puts another dataset in the place of one."""

    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return change


def linked(name: str, link: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = link

    return change


def external(file: h5py.File) -> None:
    length = len(file["train/tokens"])
    del file["train/tokens"]
    file.create_dataset(
        "train/tokens", (length,), "<u2", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
    )


def virtual(file: h5py.File) -> None:
    length = len(file["train/tokens"])
    del file["train/tokens"]
    layout = h5py.VirtualLayout((length,), "<u2")
    layout[:] = h5py.VirtualSource("/tmp/elsewhere.h5", "tokens", (length,))
    file.create_virtual_dataset("train/tokens", layout)


def wrong_counts(file: h5py.File) -> None:
    file["train/counts"][65] += 1


def negative_counts(file: h5py.File) -> None:
    file["train/counts"][0:2] = [-(2**62), 2**62]


DAMAGE: dict[str, Callable[[h5py.File], object]] = {
    "attribute format = 'hpczero-tokens'": lambda file: file.attrs.__delitem__("format"),
    "version 2 .* reads version 1": lambda file: file.attrs.__setitem__("version", 2),
    "version None": lambda file: file.attrs.__setitem__("version", [1, 1]),
    "attribute vocabulary is missing or of another type": lambda file: file.attrs.__setitem__(
        "vocabulary", "many"
    ),
    "a vocabulary of -1 ids": lambda file: file.attrs.__setitem__("vocabulary", -1),
    "/train/tokens has type uint16 .* not uint32": lambda file: file.attrs.__setitem__(
        "vocabulary", 10**6
    ),
    "a vocabulary of 1099511627776 ids": lambda file: file.attrs.__setitem__("vocabulary", 2**40),
    "/validation is missing": lambda file: file.__delitem__("validation"),
    "/train/tokens is missing": lambda file: file["train"].__delitem__("tokens"),
    "/train/tokens is not stored as one piece.*": replaced(
        "train/tokens", data=np.zeros(100, "<u2"), chunks=(10,)
    ),
    "/train/tokens is not stored as one piece inside": external,
    "/train/tokens is not stored as one": virtual,
    "/ is missing, or not a group of this file: its links are not hpczero's": linked(
        "train", h5py.ExternalLink("/tmp/other.h5", "train")
    ),
    "/train is a link that leads on": linked("train", h5py.SoftLink("/validation")),
    "/train/tokens is a link that leads on": linked(
        "train/tokens", h5py.SoftLink("/validation/tokens")
    ),
    "/train/tokens has type float32": replaced("train/tokens", data=np.zeros(100, "f4")),
    "/train/tokens has type >u2": replaced("train/tokens", data=np.zeros(100, ">u2")),
    r"shape \(10, 10\)": replaced("train/tokens", data=np.zeros((10, 10), "<u2")),
    r"/train/tokens has 1000000000000000 values and would end at byte": replaced(
        "train/tokens", shape=(10**15,), dtype="<u2"
    ),
    "/train/documents does not run from 0 to the": replaced(
        "train/documents", data=np.array([0, 7])
    ),
    "/train/documents does not run from 0": replaced("train/documents", data=np.array([], "<i8")),
    "/validation/counts does not add up": replaced("validation/counts", data=np.zeros(3, "<i8")),
    "/train/counts does not add up": wrong_counts,
    "/train/counts does not add up to": negative_counts,
}


@pytest.mark.parametrize("says", DAMAGE)
def test_a_foreign_or_damaged_file_is_refused(path: Path, says: str) -> None:
    with h5py.File(path, "r+") as file:
        DAMAGE[says](file)
    with pytest.raises(InputError, match=says) as raised:
        open_source(spec(path), alone)
    assert str(path) in str(raised.value)


def test_missing_files_and_other_kinds_of_files_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("not HDF5")
    (tmp_path / "empty.h5").touch()
    expected = {
        "no.h5": "No such file",
        ".": "it is no plain file",
        "text.h5": "not HDF5, 8 bytes",
        "empty.h5": "not HDF5, 0 bytes",
    }
    for name, says in expected.items():
        with pytest.raises(InputError, match=says):
            open_source(spec(tmp_path / name), alone)


def test_a_truncated_file_is_refused_wherever_it_ends(path: Path) -> None:
    content = path.read_bytes()
    for length in [
        1,
        7,
        8,
        9,
        100,
        511,
        2048,
        *range(3000, len(content), len(content) // 20),
        len(content) - 1,
    ]:
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"truncated or damaged|not a token file"):
            open_source(spec(path), alone)


def test_flipped_bytes_in_the_head_never_raise_anything_else(path: Path) -> None:
    content = path.read_bytes()
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        changed = bytearray(content)
        for position in random.integers(0, 4096, size=4):
            changed[position] = random.integers(0, 256)
        path.write_bytes(changed)
        try:
            open_source(spec(path), alone)
        except InputError:
            refused += 1
    assert refused > 20


def test_a_token_that_the_counts_deny_is_found_when_it_is_read(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["train/tokens"][40] = 60_000
        del file["train/checksums"]  # as older versions wrote them
    source, out = open_source(spec(path), alone), np.empty(33, np.int64)
    source.fill("train", 0, out)
    with pytest.raises(
        InputError, match="window 1 of train holds token 60000, the counts say 256 at most"
    ):
        source.fill("train", 1, out)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(path: Path) -> None:
    source, out = open_source(spec(path), alone), np.empty(33, np.int64)
    source.fill("train", 0, out)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 8)
    source.fill("train", 0, out)
    with pytest.raises(
        InputError, match=r"tokens\.h5 was cut short while it was in use: it ends before byte \d+"
    ):
        source.fill("train", source.windows("train") - 1, out)


def test_synthetic_tokens_are_uniform_and_a_hash_of_seed_and_position() -> None:
    source = open_source(spec("synthetic", seq_len=10_000, vocab=50), alone)
    first, second = np.empty(10_001, np.int64), np.empty(10_001, np.int64)
    source.fill("train", 3, first)
    source.fill("train", 4, second)
    assert first[-1] == second[0]  # the same position
    assert abs(np.bincount(first, minlength=50) - 200).max() < 90
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    source.fill("train", 3, second)
    assert np.array_equal(first, second)
    assert (first.min(), first.max()) == (0, 49)
    for other, split in (
        (spec("synthetic", 10_000, 50, seed=2), "train"),
        (spec("synthetic", 10_000, 50), "validation"),
    ):
        open_source(other, alone).fill(split, 3, second)
        assert 100 < (first == second).sum() < 300  # by chance 200
    assert source.unigram_entropy("train") == pytest.approx(math.log(50))
    source.fill("train", source.windows("train") - 1, first)
    assert source.vocabulary == 50


@pytest.mark.parametrize(("vocab", "seed"), [(1, 0), (10**9, 2**63 - 1)])
def test_synthetic_tokens_stay_inside_any_vocabulary(vocab: int, seed: int) -> None:
    source, out = (
        open_source(spec("synthetic", 1000, vocab, seed=seed), alone),
        np.empty(1001, np.int64),
    )
    source.fill("validation", 0, out)
    assert 0 <= out.min() <= out.max() < vocab
    assert out.max() > vocab // 2 or vocab == 1


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library with little in it, and things that are no part of it."""
    library = tmp_path / "lib"
    for name in (
        "abc.py",
        "json/decoder.py",
        "test/test_abc.py",
        "site-packages/numpy/x.py",
        "json/tests/t.py",
        "__pycache__/abc.txt",
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n" * 500)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    return library


def test_the_librarys_text_is_built_once_and_said(
    small_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = spec("stdlib", eval_batches=0, paths=Paths(cache=str(tmp_path / "cache")))
    source = open_source(asked, alone)
    assert source.describe()["documents"] == {"train": 2, "validation": 0}
    assert capsys.readouterr().err.count("\n") == 1
    [made] = (tmp_path / "cache").iterdir()
    assert source.describe()["path"] == str(made)
    before = made.stat()
    open_source(asked, alone)
    assert (capsys.readouterr().err, made.stat()) == ("", before)
    other = asked.model_copy(update={"data": Data(validation_fraction=0.5)})
    assert open_source(other, alone).describe()["documents"] == {"train": 1, "validation": 1}
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_many_builders_at_once_do_no_harm(small_library: Path, tmp_path: Path) -> None:
    asked = spec("stdlib", eval_batches=0, paths=Paths(cache=str(tmp_path / "cache")))
    start, fingerprints = threading.Barrier(4), []

    def build() -> None:
        start.wait(10)
        fingerprints.append(open_source(asked, alone).describe()["fingerprint"])

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fingerprints) == 4
    assert len(set(fingerprints)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_one_rank_builds_and_the_others_wait_for_its_verdict(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec("stdlib", eval_batches=0, paths=Paths(cache=str(tmp_path / "cache")))
    said: list[Any] = []

    def share_of_rank_0(value: Any) -> Any:
        said.append(value)
        return value

    first = open_source(asked, share_of_rank_0, is_builder=True)
    with monkeypatch.context() as patched:
        patched.setattr(
            dataset, "library_token_file", lambda spec: pytest.fail("a second rank builds")
        )
        second = open_source(asked, lambda value: said[0], is_builder=False)
    assert first.describe() == second.describe()
    with pytest.raises(InputError, match=r"is not seen here: set paths\.cache"):
        open_source(
            asked, lambda value: {"path": str(tmp_path / "on another node.h5")}, is_builder=False
        )


def test_every_rank_gets_the_builders_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = spec("stdlib", paths=Paths(cache=str(tmp_path / "file" / "cache")))
    said: list[Any] = []
    with pytest.raises(
        InputError, match=r"file/cache cannot be used .*set paths\.cache"
    ) as builders:
        open_source(asked, lambda value: said.append(value) or value)
    with pytest.raises(InputError) as others:
        open_source(asked, lambda value: said[0], is_builder=False)
    assert str(others.value) == str(builders.value)


def test_a_failed_build_leaves_nothing(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise HpczeroError("no room")

    monkeypatch.setattr("hpczero.data.build.fill_token_file", full)
    with pytest.raises(InputError, match=r"no room \(paths\.cache"):
        open_source(spec("stdlib", paths=Paths(cache=str(tmp_path / "cache"))), alone)
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_killed_builders_left_is_removed_and_what_others_build_stays(
    small_library: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for name in (".building-dead", ".building-living", ".building-new"):
        (cache / name).mkdir(parents=True)
        (cache / name / "lock").touch()
        (cache / name / "train.tokens").write_bytes(b"1234")
        if name != ".building-new":
            os.utime(cache / name, (0, 0))
    with open(cache / ".building-living" / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        open_source(spec("stdlib", eval_batches=0, paths=Paths(cache=str(cache))), alone)
    left = sorted(path.name for path in cache.glob(".building-*"))
    assert left == [".building-living", ".building-new"]


_KILLED_AT = """
import os, signal, sys
from pathlib import Path
from hpczero.data import build, dataset
from hpczero.spec.schema import Paths, Spec
library, cache, moment = sys.argv[1:]
dataset.sysconfig.get_paths = lambda: {"stdlib": library}
owner = build.Reader if moment == "read" else build
whole = getattr(owner, moment)
def killed(*words):
    if moment == "read":
        whole(*words)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, moment, killed)
dataset.library_token_file(Spec(name="killed", paths=Paths(cache=cache)))
"""


@pytest.mark.parametrize("moment", ["read", "fill_token_file", "give_name"])
def test_a_killed_build_leaves_nothing(small_library: Path, tmp_path: Path, moment: str) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", _KILLED_AT, str(small_library), str(cache), moment]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(cache.iterdir()) == []


def test_without_nameless_files_the_same_bytes_are_made(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [spec("stdlib", paths=Paths(cache=str(tmp_path / name))) for name in ("a", "b")]
    one = dataset.library_token_file(asked[0])
    monkeypatch.setattr("hpczero.data.build.create_nameless", lambda folder: None)
    other = dataset.library_token_file(asked[1])
    assert one.read_bytes() == other.read_bytes()
    assert [path.name for path in (tmp_path / "b").iterdir()] == [other.name]
