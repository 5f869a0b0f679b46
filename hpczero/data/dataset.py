"""Where the samples of a run come from: a token file, the stdlib's text, or nothing at all (synthetic)."""

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
from typing import Any, Protocol

import numpy as np

from hpczero import env
from hpczero.data.build import BUILDER, Recipe, build_in_one_go, build_token_file
from hpczero.data.corpus import FoundText, find
from hpczero.data.raw_files import writing
from hpczero.data.token_file import TokenFile, open_token_file
from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import is_seen, make_folders, open_lock, remove_tree, temporary_folder
from hpczero.spec.schema import Spec


class TokenSource(Protocol):
    """Windows of seq_len + 1 tokens: window w starts at token w * seq_len, so that every token but the first is predicted once."""

    vocabulary: int  # ids are 0 .. vocabulary - 1

    def windows(self, split: str) -> int: ...

    def fill(self, split: str, window: int, out: np.ndarray) -> None:
        """Writes the window's tokens into `out` (int64 [seq_len + 1]); may be called from any thread."""

    def unigram_entropy(self, split: str) -> float:
        """Nats per token of the split's own distribution of ids: what a model has to beat to have learned anything about order."""

    def describe(self) -> dict[str, Any]: ...


def open_source(spec: Spec, share: Callable[[Any], Any], is_builder: bool = True) -> TokenSource:
    """What `data.source` names, checked against the model.

    Every rank calls it. `share(value)` hands every rank the value of the one rank that has `is_builder`; that rank builds
    what has to be built, the others wait for its verdict, and all raise the same error if it fails.
    """
    if spec.data.source == "synthetic":
        return SyntheticSource(spec.seed, spec.model.vocab, spec.model.seq_len)
    if spec.data.source != "stdlib":
        return _checked(open_token_file(Path(env.expand(spec.data.source)).absolute()), spec)
    verdict: dict[str, str] = {}
    if is_builder:
        try:
            verdict = {"path": str(token_file(spec))}
        except HpczeroError as error:
            verdict = {"error": str(error)}
    verdict = share(verdict)
    if "error" in verdict:
        raise InputError(verdict["error"])
    path = Path(verdict["path"])
    if not is_seen(path):
        raise InputError(
            f"{path} was built by rank 0, but is not seen here: set paths.cache to a folder that every node shares"
        )
    return _checked(open_token_file(path), spec)


def _checked(file: TokenFile, spec: Spec) -> TokenSource:
    refuse_unfit(file, spec)
    return FileSource(file, spec.model.seq_len)


def refuse_unfit(file: TokenFile, spec: Spec) -> None:
    """InputError if the model cannot be trained on it."""
    largest = max(split.largest for split in file.splits.values())
    if largest >= spec.model.vocab:
        raise InputError(
            f"model.vocab = {spec.model.vocab} is too small: {file.path} holds token {largest} "
            f"(tokenizer '{file.tokenizer}', {file.vocabulary} ids): set model.vocab = {file.vocabulary} or more"
        )
    needs = spec.model.seq_len + 1
    if len(file.splits["train"].tokens) < needs:
        tokens = len(file.splits["train"].tokens)
        raise InputError(
            f"{file.path} has {tokens} tokens to train on, a sequence needs {needs} (model.seq_len + 1): "
            "use more text, or a shorter model.seq_len"
        )
    if spec.train.eval_batches and len(file.splits["validation"].tokens) < needs:
        tokens = len(file.splits["validation"].tokens)
        raise InputError(
            f"{file.path} has {tokens} tokens for validation, a sequence needs {needs} (model.seq_len + 1): "
            f"build it with a larger validation fraction, or set train.eval_batches = 0 (it is {spec.train.eval_batches})"
        )


class FileSource:
    """The windows of a token file."""

    def __init__(self, file: TokenFile, seq_len: int) -> None:
        self._file, self._seq_len = file, seq_len
        self._blocks = file.blocks()
        self.vocabulary = file.vocabulary

    def windows(self, split: str) -> int:
        return max(0, len(self._file.splits[split].tokens) - 1) // self._seq_len

    def fill(self, split: str, window: int, out: np.ndarray) -> None:
        assert 0 <= window < self.windows(split), (split, window)
        start, held = window * self._seq_len, self._file.splits[split]
        out[:] = self._blocks[split].read(start, start + self._seq_len + 1)
        if (
            out.max() > held.largest
        ):  # the file's own counts say otherwise: it would index past the embedding
            raise InputError(
                f"{self._file.path} is damaged: window {window} of {split} holds token {out.max()}, "
                f"the counts say {held.largest} at most; build it again"
            )

    def unigram_entropy(self, split: str) -> float:
        return self._file.splits[split].entropy()

    def describe(self) -> dict[str, Any]:
        return self._file.describe()


_SYNTHETIC_WINDOWS = {"train": 2**31, "validation": 2**20}
_SYNTHETIC_SALT = {"train": 1 << 63, "validation": 0}  # a seed has 63 bits


class SyntheticSource:
    """Uniformly random tokens, each a hash of (seed, split, position): needs no file, and cannot be learned beyond ln(vocab)."""

    def __init__(self, seed: int, vocabulary: int, seq_len: int) -> None:
        self._seed, self.vocabulary, self._seq_len = seed, vocabulary, seq_len

    def windows(self, split: str) -> int:
        return _SYNTHETIC_WINDOWS[split]

    def fill(self, split: str, window: int, out: np.ndarray) -> None:
        assert 0 <= window < self.windows(split), (split, window)
        start = window * self._seq_len
        positions = np.arange(start, start + self._seq_len + 1, dtype=np.uint64)
        key = _mix(np.array([self._seed ^ _SYNTHETIC_SALT[split]], dtype=np.uint64))
        out[:] = (
            (_mix(positions ^ key) >> np.uint64(32)) * np.uint64(self.vocabulary)
        ) >> np.uint64(32)

    def unigram_entropy(self, split: str) -> float:
        return math.log(self.vocabulary)

    def describe(self) -> dict[str, Any]:
        tokens = {
            split: windows * self._seq_len + 1 for split, windows in _SYNTHETIC_WINDOWS.items()
        }
        return {
            "path": "synthetic",
            "tokenizer": "none",
            "vocabulary": self.vocabulary,
            "tokens": tokens,
            "documents": dict.fromkeys(tokens, 1),
            "fingerprint": f"synthetic-{self._seed}-{self.vocabulary}",
        }


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's step for 64-bit lanes: one to one and well mixed."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


# The corpus that every machine has: the text of the running Python's library, built on first use into the cache.
_PREFIX = ".building-"
_QUITE_NEW = 60.0  # seconds: a folder is made a moment before its lock
# not the library proper: tests and their data, what was installed into it, bundled copies, the editor
_LEFT_OUT = frozenset(
    [
        "test",
        "tests",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_bundled",
        "idlelib",
        "lib2to3",
        "turtledemo",
    ]
)


class Silent:
    def said(self, line: str) -> None: ...

    def advanced(self, done: int, total: int) -> None: ...

    def copied(self, done: int, total: int) -> None: ...


def token_file(spec: Spec) -> Path:
    """The path of the stdlib's token file for this spec; builds it if it is not there yet.

    Several jobs may build at once: each in files without a name, each puts the same bytes in place.
    Where the file system has no such files each builds in a folder, which stays, if the builder is
    killed, until the next one comes.
    """
    cache = Path(env.expand(spec.paths.cache)) if spec.paths.cache else env.cache_folder()
    recipe = Recipe(spec.data.tokenizer, spec.data.validation_fraction)
    python = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    final = (
        cache.absolute()
        / f"stdlib-{python}-{recipe.tokenizer}-{recipe.validation_fraction}-{BUILDER}.h5"
    )
    try:
        if final.exists():
            return final
        make_folders(cache)
        _remove_left(cache)
    except OSError as error:
        raise InputError(
            f"the cache folder {cache} cannot be used ({error.strerror}): set paths.cache to a folder that can be written"
        ) from error
    corpus = find([sysconfig.get_paths()["stdlib"]], _LEFT_OUT)
    print(f"building {final} from the running Python's library (once)", file=sys.stderr, flush=True)
    try:
        if not build_in_one_go(corpus, final, recipe, Silent()):
            _build_in_a_folder(corpus, final, recipe)
    except HpczeroError as error:
        raise InputError(
            f"building the stdlib corpus: {error} (paths.cache says where it goes)"
        ) from error
    return final


def _build_in_a_folder(corpus: FoundText, final: Path, recipe: Recipe) -> None:
    with writing(final.parent):
        work = temporary_folder(final.parent, _PREFIX)
    try:
        build_token_file(corpus, final, recipe, work, Silent())
    finally:
        with contextlib.suppress(OSError):
            remove_tree(work)


def _remove_left(cache: Path) -> None:
    """Remove what killed builders left: folders whose lock nobody holds, not quite new."""
    for work in cache.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if work.is_symlink() or time.time() - work.stat().st_mtime < _QUITE_NEW:
                continue
            file = open_lock(work / "lock")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(work)
            finally:
                os.close(file)
