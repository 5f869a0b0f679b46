"""The corpus that every machine has: the text of the running Python's library, built on first use into the cache."""

import contextlib
import fcntl
import os
import platform
import sys
import sysconfig
import time
from pathlib import Path

from hpczero import env
from hpczero.data.build import BUILDER, Recipe, build_in_one_go, build_token_file
from hpczero.data.corpus import Found, find
from hpczero.data.raw_files import writing
from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import make_folders, open_lock, remove_tree, temporary_folder
from hpczero.spec.schema import Spec

_PREFIX = ".building-"
_QUITE_NEW = 60.0  # seconds: a folder is made a moment before its lock
# not the library proper: tests and their data, what was installed into it, bundled copies, the editor
_LEFT_OUT = frozenset(["test", "tests", "site-packages", "dist-packages", "__pycache__", "_bundled", "idlelib", "lib2to3", "turtledemo"])


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
    final = cache.absolute() / f"stdlib-{python}-{recipe.tokenizer}-{recipe.validation_fraction}-{BUILDER}.h5"
    try:
        if final.exists():
            return final
        make_folders(cache)
        _remove_left(cache)
    except OSError as error:
        raise InputError(f"the cache folder {cache} cannot be used ({error.strerror}): set paths.cache to a folder that can be written") from error
    corpus = find([sysconfig.get_paths()["stdlib"]], _LEFT_OUT)
    print(f"building {final} from the running Python's library (once)", file=sys.stderr, flush=True)
    try:
        if not build_in_one_go(corpus, final, recipe, Silent()):
            _build_in_a_folder(corpus, final, recipe)
    except HpczeroError as error:
        raise InputError(f"building the stdlib corpus: {error} (paths.cache says where it goes)") from error
    return final


def _build_in_a_folder(corpus: Found, final: Path, recipe: Recipe) -> None:
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
