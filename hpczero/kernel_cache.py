"""Compiled kernels: compiled once per computer by the first process that needs them.

The other processes wait, and load them. numba compiles when a module of kernels is imported, which
takes seconds, and keeps the result in a folder. That folder lies on the computer itself (in
$TMPDIR, else /tmp), for this user alone, so that a thousand ranks do not read it over the network.
It is filled from the user's cache (~/.cache/hpczero) if that has the same kernels. Else they are
compiled, and copied to the cache for the next computer and the next job. Folders are named by what
the machine code depends on: processor, versions, the kernels' sources. NUMBA_CACHE_DIR, where set,
is used as it is.
"""

import fcntl
import gc
import importlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from hpczero import env, safe_files
from hpczero.errors import InputError

_USERS = "hpczero.train.run"  # imports all kernels that training needs on CPUs


def load(module: str) -> ModuleType:
    """Import a module that needs kernels."""
    if "numba" not in sys.modules and find_spec("llvmlite"):
        given = env.numba_cache()
        key = _key()
        in_cache = env.cache_folder() / "kernels" / key
        folder = Path(given) if given else _own_folder(key) or in_cache
        kept = None if given or folder == in_cache else in_cache
        env.use_numba_cache(folder)
        once_per_computer(folder, f"complete-{key}", lambda: _fill(folder, kept))
    with _nothing_collected():
        return importlib.import_module(module)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Leave out the collector of garbage, of which imports make none: a fifth of their time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def load_gpu_kernels(capability: tuple[int, int]) -> None:
    """Compile or load the kernels for this process's GPU, unless PyTorch does all their work."""
    registry = importlib.import_module("hpczero_kernels.dispatch")
    if not registry.on_gpus():
        return
    folder = env.numba_cache()
    try:
        launch = importlib.import_module("hpczero_kernels.cuda.launch")
        if folder:
            _once_for_gpu(Path(folder), f"cuda-{capability[0]}{capability[1]}", launch)
    except Exception as error:  # missing packages, libraries of the toolkit, an unfit driver
        raise InputError(
            f"the kernels for GPUs cannot be compiled: {error}; numba-cuda wants CUDA's compiler "
            "(a toolkit that CUDA_HOME names, or pip install 'numba-cuda[cu13]', of the driver's "
            "release); HPCZERO_KERNELS=torch does without them"
        ) from error


def _once_for_gpu(folder: Path, name: str, launch: ModuleType) -> None:
    def compile_all() -> None:
        for kernel in launch.all_kernels():
            kernel.compile()

    once_per_computer(folder, name, lambda: _fill_for_gpu(folder, name, compile_all))


def once_per_computer(folder: Path, name: str, action: Callable[[], object]) -> bool:
    """Carry out the action in the first process on this computer to come here; return True there.

    The others wait for it. The file `name` in the folder records that it was done.
    """
    if safe_files.is_seen(folder / name):
        return False
    with _locked(folder / "lock"):
        if safe_files.is_seen(folder / name):
            return False
        action()
        with suppress(OSError):
            safe_files.make_folders(folder)
            safe_files.touch(folder / name)
    return True


def _fill(folder: Path, kept: Path | None) -> None:
    """Fill a folder with the kernels for CPUs; `kept` is the same folder in the user's cache."""
    _copy_or_make(folder, kept, lambda: importlib.import_module(_USERS))


def _fill_for_gpu(folder: Path, name: str, compile_all: Callable[[], object]) -> None:
    """Add the kernels for a GPU to a folder that other processes may be reading."""
    kept = None
    if folder.parent == env.node_folder():
        kept = env.cache_folder() / "kernels" / f"{folder.name}-{name}"
    _copy_or_make(folder, kept, compile_all)


def _copy_or_make(folder: Path, kept: Path | None, compile_all: Callable[[], object]) -> None:
    if kept and safe_files.is_seen(kept):
        with suppress(OSError):
            _copy_missing(kept, folder)
            return
    compile_all()
    if kept:
        _keep(folder, kept)


def _keep(folder: Path, kept: Path) -> None:
    copied = _temporary(kept)
    with suppress(OSError):  # no space there, or another computer was faster
        _copy_missing(folder, copied)
        safe_files.rename(copied, kept)
    with suppress(OSError):
        safe_files.remove_tree(copied)


def _copy_missing(source: Path, target: Path) -> None:
    for path in [path for path in source.rglob("*") if path.is_file() and path.name != "lock"]:
        copy = target / path.relative_to(source)
        if not copy.exists():
            safe_files.make_folders(copy.parent)
            written = _temporary(copy)
            safe_files.remove(written)
            safe_files.copy(path, written)
            safe_files.rename(written, copy)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}-{os.uname().nodename}-{os.getpid()}")


def _own_folder(key: str) -> Path | None:
    """Make the folder on this computer; None if others could put code in it."""
    parent = env.node_folder()
    try:
        safe_files.make_own_folder(parent, mode=0o700)
        facts = parent.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            return None
        safe_files.make_own_folder(parent / key)
    except (OSError, InputError):
        return None
    return parent / key


def _key() -> str:
    """Return the name of the machine code: a digest of what it depends on."""
    binding = importlib.import_module("llvmlite.binding")
    sources = importlib.import_module("hpczero_kernels.sources")
    packages = [name for name in ("numba", "numba-cuda") if any(metadata.distributions(name=name))]
    facts = [
        sys.version,
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
        *map(metadata.version, packages),
        str(Path(str(sources.__file__)).parent),  # which is in numba's own names, too
        sources.sources_hash(),
    ]
    return blake2b("".join(facts).encode(), digest_size=8).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock; without one where the file system has none, so that every process compiles."""
    try:
        handle = safe_files.open_lock(path)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
