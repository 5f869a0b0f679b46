"""Sources of a run's samples: a token file, the Python library's text, or random tokens.

`data.source = "stdlib"` is the corpus that every machine has: the source text of the running
Python's library, built into a token file in the cache on first use.
"""

import contextlib
import fcntl
import math
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpczero import env
from hpczero.data.build import build_in_one_go, build_token_file
from hpczero.data.corpus import Corpus, find
from hpczero.data.documents import Cut, Pieces, cut_after, read_piece
from hpczero.data.hashes import below, mix_all
from hpczero.data.journal import BUILDER, Recipe
from hpczero.data.mixture import mixture_of
from hpczero.data.objective import objective_of
from hpczero.data.plain_formats import is_plain
from hpczero.data.plain_source import open_plain_source
from hpczero.data.raw_files import writing
from hpczero.data.token_file import TokenFile, open_token_file
from hpczero.data.token_source import NO_TOKENIZER, TokenSource
from hpczero.data.tokenizer import Tokenizer, tokenizer
from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import is_seen, make_folders, open_lock, remove_tree, temporary_folder
from hpczero.spec.schema import Spec

_SYNTHETIC_WINDOWS = {"train": 2**31, "validation": 2**20}
_SYNTHETIC_SALT = {"train": 1 << 63, "validation": 0}  # a seed has 63 bits
_WORK_PREFIX = ".building-"
_NEW_FOLDER = 60.0  # seconds: a work folder is made a moment before its lock
_LEFT_OUT = frozenset[str]().union(
    ("test", "tests", "idlelib", "lib2to3", "turtledemo"),  # tests, their data, the editor
    ("site-packages", "dist-packages", "__pycache__", "_bundled"),  # installed, bundled
)


def open_source(spec: Spec, share: Callable[[Any], Any], is_builder: bool = True) -> TokenSource:
    """Open the source that `data.source` names, or the mixture of `data.sources`. Collective.

    InputError if the model cannot be trained on it.

    `share(value)` broadcasts the value of the one rank with `is_builder`. That rank builds the
    token file if there is none; the others wait, and all raise the same error if it fails.
    """
    library = None
    if "stdlib" in spec.data.paths:  # before anything that may fail on one rank alone
        library = _shared_library(spec, share, is_builder)
    if spec.data.sources:
        opened = [_opened(spec.of_source(one), library) for one in spec.data.sources]
        source: TokenSource = mixture_of(spec, opened)
    else:
        source = _opened(spec, library)
    objective_of(spec, source)  # refuses what cannot be masked
    return source


def _opened(spec: Spec, library: Path | None) -> TokenSource:
    """Open the source that `data.source` names; `library`: the token file of "stdlib"."""
    if spec.data.source == "synthetic":
        return SyntheticSource(spec.seed, spec.model.vocab, spec.text_len)
    if spec.data.source == "stdlib":
        assert library
        return _checked(open_token_file(library), spec)
    path = Path(env.expand(spec.data.source)).absolute()
    if is_plain(path):
        return open_plain_source(path, spec)
    return _checked(open_token_file(path), spec)


def _shared_library(spec: Spec, share: Callable[[Any], Any], is_builder: bool) -> Path:
    """Return the token file of the library, which one rank builds. Collective."""
    verdict: dict[str, str] = {}
    if is_builder:
        try:
            verdict = {"path": str(library_token_file(spec))}
        except HpczeroError as error:
            verdict = {"error": str(error)}
    verdict = share(verdict)
    if "error" in verdict:
        raise InputError(verdict["error"])
    path = Path(verdict["path"])
    if not is_seen(path):
        raise InputError(
            f"{path} was built by rank 0, but is not seen here: "
            "set paths.cache to a folder that every node shares"
        )
    return path


def _checked(file: TokenFile, spec: Spec) -> TokenSource:
    refuse_unfit(file, spec)
    return FileSource(file, spec.text_len, spec.data.documents)


def refuse_unfit(file: TokenFile, spec: Spec) -> None:
    """Raise InputError if the model cannot be trained on the file."""
    largest = max(split.largest for split in file.splits.values())
    if largest >= spec.model.vocab:
        raise InputError(
            f"model.vocab = {spec.model.vocab} is too small: {file.path} holds token {largest} "
            f"(tokenizer '{file.tokenizer}', {file.vocabulary} ids): "
            f"set model.vocab = {file.vocabulary} or more"
        )
    train, validation = (file.splits[split] for split in ("train", "validation"))
    if spec.data.documents == "padded":
        needs = "a sequence needs a document of 2 or more"
        can_train, can_validate = (
            len(split.tokens) > split.documents for split in (train, validation)
        )
        shorter = ""
    else:
        length = "data.seq_len" if spec.data.seq_len else "model.seq_len"
        needs = f"a sequence needs {spec.text_len + 1} for {length} = {spec.seq_len}"
        can_train, can_validate = (
            len(split.tokens) > spec.text_len for split in (train, validation)
        )
        shorter = f", or a shorter {length}"
    if not can_train:
        raise InputError(
            f"{file.path} has {len(train.tokens)} tokens to train on, {needs}: "
            f"use more text{shorter}"
        )
    if spec.train.eval_batches and not can_validate:
        raise InputError(
            f"{file.path} has {len(validation.tokens)} tokens for validation, {needs}: "
            "build it with a larger validation fraction, "
            f"or set train.eval_batches = 0 (it is {spec.train.eval_batches})"
        )


class FileSource(TokenSource):
    """The windows of a token file, and the documents in them (`data.documents`)."""

    def __init__(self, file: TokenFile, seq_len: int, documents: str = "packed") -> None:
        self._file = file
        self._seq_len = seq_len
        self._documents = documents
        self._blocks = file.blocks()
        self._pieces: dict[str, Pieces] = {}
        if documents == "padded":
            for name, split in file.splits.items():
                self._pieces[name] = Pieces(file, split, name, seq_len)
        self.vocabulary = file.vocabulary

    def of_length(self, seq_len: int) -> "FileSource":
        return FileSource(self._file, seq_len, self._documents)

    def windows(self, split: str) -> int:
        if self._pieces:
            return len(self._pieces[split])
        return max(0, len(self._file.splits[split].tokens) - 1) // self._seq_len

    def targets(self, split: str) -> int:
        if self._pieces:
            return self._pieces[split].targets
        targets = self.windows(split) * self._seq_len
        if self._documents != "masked":
            return targets
        return targets - int(np.searchsorted(self._file.splits[split].ends[1:], targets, "right"))

    def fill(self, split: str, window: int, out: np.ndarray) -> Cut | None:
        assert 0 <= window < self.windows(split), (split, window)
        last = self._file.end_of_document
        cut = None
        if self._pieces:
            cut = read_piece(self._blocks[split], self._pieces[split][window], last, out)
        else:
            start = window * self._seq_len
            out[:] = self._blocks[split].read(start, start + self._seq_len + 1)
            cut = cut_after(out, last) if self._documents == "masked" else None
        largest = self._file.splits[split].largest
        if out.max() > largest:  # it would index past the embedding
            raise InputError(
                f"{self._file.path} is damaged: window {window} of {split} "
                f"holds token {out.max()}, the counts say {largest} at most; build it again"
            )
        return cut

    def unigram_entropy(self, split: str) -> float:
        return self._file.splits[split].entropy()

    def tokenizer(self) -> Tokenizer:
        return self._file.made_with()

    def describe(self) -> dict[str, Any]:
        return self._file.describe()


class SyntheticSource(TokenSource):
    """Uniformly random tokens, each a hash of (seed, split, position).

    It needs no file; no model reaches a loss below ln(vocab).
    """

    def __init__(self, seed: int, vocabulary: int, seq_len: int) -> None:
        self._seed = seed
        self.vocabulary = vocabulary
        self._seq_len = seq_len

    def of_length(self, seq_len: int) -> "SyntheticSource":
        return SyntheticSource(self._seed, self.vocabulary, seq_len)

    def windows(self, split: str) -> int:
        return _SYNTHETIC_WINDOWS[split]

    def targets(self, split: str) -> int:
        return self.windows(split) * self._seq_len

    def fill(self, split: str, window: int, out: np.ndarray) -> None:
        assert 0 <= window < self.windows(split), (split, window)
        start = window * self._seq_len
        positions = np.arange(start, start + self._seq_len + 1, dtype=np.uint64)
        key = mix_all(np.array([self._seed ^ _SYNTHETIC_SALT[split]], dtype=np.uint64))
        out[:] = below(mix_all(positions ^ key), self.vocabulary)

    def unigram_entropy(self, split: str) -> float:
        return math.log(self.vocabulary)

    def describe(self) -> dict[str, Any]:
        tokens = {
            split: windows * self._seq_len + 1 for split, windows in _SYNTHETIC_WINDOWS.items()
        }
        return {
            "path": "synthetic",
            "tokenizer": NO_TOKENIZER,
            "vocabulary": self.vocabulary,
            "tokens": tokens,
            "documents": dict.fromkeys(tokens, 1),
            "fingerprint": f"synthetic-{self._seed}-{self.vocabulary}",
        }


# The Python library's text.


class SilentListener:
    """A `build.Listener` that ignores everything."""

    def said(self, line: str) -> None: ...

    def advanced(self, done: int, total: int) -> None: ...

    def copied(self, done: int, total: int) -> None: ...


def library_token_file(spec: Spec) -> Path:
    """Return the path of the library's token file for this spec; build it if there is none yet.

    Several jobs may build at once: each works in files without a name, and all put the same bytes
    in place. If the file system does not support such files, each works in a folder of its own. A
    killed builder's folder stays until the next builder removes it.
    """
    cache = Path(env.expand(spec.paths.cache)) if spec.paths.cache else env.cache_folder()
    recipe = Recipe(tokenizer(spec.data.tokenizer), spec.data.validation_fraction)
    python = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    name = f"stdlib-{python}-{recipe.tokenizer.name}-{recipe.validation_fraction}-{BUILDER}.h5"
    final = cache.absolute() / name
    try:
        if final.exists():
            return final
        make_folders(cache)
        _remove_abandoned(cache)
    except OSError as error:
        raise InputError(
            f"the cache folder {cache} cannot be used ({error.strerror}): "
            "set paths.cache to a folder that can be written"
        ) from error
    corpus = find([sysconfig.get_paths()["stdlib"]], _LEFT_OUT)
    print(f"building {final} from the running Python's library (once)", file=sys.stderr, flush=True)
    try:
        if not build_in_one_go(corpus, final, recipe, SilentListener()):
            _build_in_a_folder(corpus, final, recipe)
    except HpczeroError as error:
        raise InputError(
            f"building the stdlib corpus: {error} (paths.cache says where it goes)"
        ) from error
    return final


def _build_in_a_folder(corpus: Corpus, final: Path, recipe: Recipe) -> None:
    with writing(final.parent):
        work = temporary_folder(final.parent, _WORK_PREFIX)
    try:
        build_token_file(corpus, final, recipe, work, SilentListener())
    finally:
        with contextlib.suppress(OSError):
            remove_tree(work)


def _remove_abandoned(cache: Path) -> None:
    """Remove the folders of killed builders: those that nobody has locked and that are not new."""
    for work in cache.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(OSError):
            if work.is_symlink() or time.time() - work.stat().st_mtime < _NEW_FOLDER:
                continue
            file = open_lock(work / "lock")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(work)
            finally:
                os.close(file)
