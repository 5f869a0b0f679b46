"""Thousands of files changed at random: whoever reads them ends by itself, soon, with little
memory.

Each is read in a process forked for it: no signal, no exception but hpczero's own, ten seconds of
processor time, 200 MB of memory beyond what is stored. The checksums of an index and of a manifest
are made to fit ("sealed"): only then does anybody look at what they say.
"""

import contextlib
import copy
import io
import random as plain_random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpczero.checkpoint import hdf5_process, manifest
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.shard_file import Damaged
from hpczero.cli import main
from hpczero.data import dataset
from hpczero.data.build import build_token_file
from hpczero.data.corpus import find
from hpczero.data.dataset import FileSource
from hpczero.data.journal import Recipe
from hpczero.data.token_file import SPLITS, open_token_file
from hpczero.errors import InputError
from tests.support.checkpoints import Grid, Wanted, make, parameters, seal
from tests.support.mutants import Ended, in_process, mutated

WANTED = Wanted(layers=parameters(a=(30, 7), b=(11,)), spec={"name": "crafted"})
LOOKED_AT = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGXCPU"}  # of a process for it
SEQ_LEN = 32

Counts = Counter[str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("whole"), Grid(data=2, per_file=1), WANTED)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"text {number}\n" * 40)
    found = find([str(folder)])
    build_token_file(
        found,
        folder / "a.h5",
        Recipe(validation_fraction=0.3),
        folder / "work",
        dataset.SilentListener(),
    )
    return folder / "a.h5"


def judged(counts: Counts, ended: Ended, what: str, seed: int) -> int:
    assert not ended.wrong, f"{what}, seed {seed}: {ended.wrong}"
    counts[f"{what} {('good', 'refused')[min(ended.result, 1)]}"] += 1
    return ended.result


# -- indexes ------------------------------------------------------------------------------------


def read_all(folder: Path) -> int:
    """Read it as a run that resumes does."""
    try:
        with Checkpoint.open(folder) as opened:
            for name in opened:
                opened[name].numpy()
    except Damaged:
        return 1
    return 0


def looked_at(folder: Path) -> int:
    """Do what `verify` has done in a process of its own."""
    return min(len(hdf5_process.answer(folder, manifest.read(folder), -1)), 1)


def indexes(folder: Path, seeds: range, every: int) -> Counts:
    """`every`: of how many that are read one is verified as users do, by the real process."""
    good, counts = (folder / "index.h5").read_bytes(), Counts()
    for seed in seeds:
        changed = mutated(good, np.random.default_rng(seed))
        (folder / "index.h5").write_bytes(changed)
        seal(folder)
        size = len(changed)
        if judged(counts, in_process(lambda: read_all(folder), size), "index", seed):
            continue
        ended = in_process(lambda: looked_at(folder), size)
        crashed = ended.result < 0 and ended.wrong.split()[2] in LOOKED_AT
        counts["its own process crashed"] += crashed
        if not crashed:
            judged(counts, ended, "view", seed)
        if crashed or seed % every == 0:
            expected = 1 if crashed or ended.result else 0
            assert main(["ckpt", "verify", str(folder)]) == expected, seed
            counts["verified as users do"] += 1
    (folder / "index.h5").write_bytes(good)
    return counts


def test_mutated_indexes_are_read_or_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    print(indexes(folder, range(20), every=1000))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_thousand_mutated_indexes(checkpoint: Path, tmp_path: Path, part: int) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    counts = indexes(folder, range(200 * part, 200 * (part + 1)), every=40)
    print(counts)
    assert counts["index good"] + counts["index refused"] == 200
    assert counts["index good"] > 20


# -- token files --------------------------------------------------------------------------------


def read_tokens(path: Path) -> int:
    """All that a run and `data verify` read."""
    try:
        file = open_token_file(path)
        source, out = FileSource(file, SEQ_LEN), np.empty(SEQ_LEN + 1, np.int64)
        for split in SPLITS:
            for window in range(source.windows(split)):
                source.fill(split, window, out)
            source.unigram_entropy(split)
        return 1 if list(file.damages()) else 0
    except InputError:
        return 1


def token_files(original: Path, path: Path, seeds: range) -> Counts:
    good, counts = original.read_bytes(), Counts()
    head = good[:4096]
    for seed in seeds:
        random = np.random.default_rng(seed)
        whole = mutated(good, random) if seed % 4 == 0 else mutated(head, random) + good[4096:]
        path.write_bytes(whole)
        judged(counts, in_process(lambda: read_tokens(path), len(whole)), "token file", seed)
    return counts


def test_mutated_token_files_are_read_or_refused(tokens: Path, tmp_path: Path) -> None:
    print(token_files(tokens, tmp_path / "x.h5", range(20)))


@pytest.mark.slow
def test_a_thousand_mutated_token_files(tokens: Path, tmp_path: Path) -> None:
    counts = token_files(tokens, tmp_path / "x.h5", range(1000))
    print(counts)
    assert sum(counts.values()) == 1000
    assert counts["token file refused"] > 300


# -- manifests ----------------------------------------------------------------------------------

TELLING: list[Any] = [
    *(0, -1, 1, 2, 4095, 4096, 2**31, 2**32, 2**53, 2**61, 2**62, 2**63, 2**64, 10**400),
    *(True, None, 0.5, 1e29, 1e308, "", "x", "\x1b[2J\x1b]0;x\x07", "\u202e", "a" * 5000, "\ud800"),
    *("../x", "/etc/passwd", "shard-00000.h5", "index.h5", "\n", [], {}, [[]], {"a": 1}),
    *([0, 0, 0], [4096] * 3, {"\x1b[2J": 1}, {"a" * 9000: 2}, [[[[[[[[1]]]]]]]]),
]


def changed_content(content: dict[str, Any], random: plain_random.Random) -> None:
    """One to three values become telling ones, or go, or another key comes."""
    for _ in range(random.randint(1, 3)):
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = random.choice(keys)
            if isinstance(place[key], dict | list) and random.random() < 0.8:
                place = place[key]
                continue
            _change(place, key, random)
            break


def _change(place: Any, key: Any, random: plain_random.Random) -> None:
    kind = random.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[str(random.choice(TELLING))] = place[key]
    elif kind == 2 and type(place[key]) is int:
        place[key] += random.choice([-4096, -8, -1, 1, 8, 4096])
    else:
        place[key] = copy.deepcopy(random.choice(TELLING))


def asked(folder: Path) -> int:
    """By the verbs that look; what they say is fit for a terminal."""
    codes = []
    for verb, *more in (["ls"], ["show"], ["stats"], ["show", "--pieces"], ["verify"]):
        out, err = io.StringIO(), io.StringIO()
        where = folder.parent if verb == "ls" else folder
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            codes.append(main(["ckpt", verb, str(where), *more]))
        said = out.getvalue() + err.getvalue()
        assert all(char.isprintable() or char == "\n" for char in said), (verb, said)
        assert max(map(len, said.split("\n"))) < 1500, (verb, said)
        assert codes[-1] in (0, 1, 2), (verb, codes)
    return max(codes)


def manifests(folder: Path, seeds: range) -> Counts:
    path, counts = folder / "MANIFEST.json", Counts()
    good = path.read_bytes()
    for seed in seeds:
        path.write_bytes(good)
        if seed % 5 == 0:  # not sealed
            path.write_bytes(mutated(good, np.random.default_rng(seed)))
        else:
            random = plain_random.Random(seed)
            seal(folder, lambda content: changed_content(content, random))  # noqa: B023
        judged(counts, in_process(lambda: asked(folder), 0), "manifest", seed)
    return counts


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(self: hdf5_process.Hdf5Process, shard: int = -1) -> list[str]:
        return hdf5_process.answer(self.folder, self.content, shard)

    monkeypatch.setattr(hdf5_process.Hdf5Process, "problems", problems)


@pytest.mark.usefixtures("looking")
def test_mutated_manifests_are_read_or_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    print(manifests(folder, range(12)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.usefixtures("looking")
def test_five_hundred_mutated_manifests(checkpoint: Path, tmp_path: Path, part: int) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    counts = manifests(folder, range(50 * part, 50 * (part + 1)))
    print(counts)
    assert sum(counts.values()) == 50


@pytest.mark.slow
def test_a_process_that_takes_too_much_is_found() -> None:
    """The judge itself."""
    assert in_process(lambda: 0, 0) == Ended(0, "")
    assert "bytes of memory" in in_process(lambda: np.ones(50_000_000).size * 0, 0).wrong
    assert "ZeroDivisionError" in in_process(lambda: 1 // 0, 0).wrong
