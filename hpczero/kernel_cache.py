"""Where compiled kernels lie: compiled once per computer, by the first process that needs them; the others wait, and load.

numba compiles when a module of kernels is imported, which takes seconds, and keeps what it made in a folder. That is one on the computer itself
(in $TMPDIR, else /tmp), of this user alone, so that a thousand ranks do not read it over the network. It is filled from the user's cache
(~/.cache/hpczero), if that has the same, else compiled, and then put there for the next computer, the next job. Folders are named by what the
machine code depends on: processor, versions, the kernels' sources. NUMBA_CACHE_DIR, where set, is used as it is.
"""

import fcntl
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

_USERS = "hpczero.train.run"  # imports every kernel that training needs on CPUs


def load(module: str) -> ModuleType:
    """Imports a module that needs kernels."""
    if "numba" not in sys.modules and find_spec("llvmlite"):
        given, key = env.numba_cache(), _key()
        kept = env.cache_folder() / "kernels" / key
        folder = Path(given) if given else _own_folder(key) or kept
        env.use_numba_cache(folder)
        once(
            folder,
            f"complete-{key}",
            lambda: _fill(folder, None if given or folder == kept else kept),
        )
    return importlib.import_module(module)


def of_gpu(capability: tuple[int, int]) -> None:
    """Those for the GPU that this process has made its own, unless PyTorch does all their work."""
    registry = importlib.import_module("hpczero_kernels.dispatch")
    if not registry.on_gpus():
        return
    folder = env.numba_cache()
    try:
        launch = importlib.import_module("hpczero_kernels.cuda.launch")
        if folder:
            name = f"cuda-{capability[0]}{capability[1]}"
            once(
                Path(folder),
                name,
                lambda: _fill_for_gpu(
                    Path(folder),
                    name,
                    lambda: [kernel.compile() for kernel in launch.all_kernels()],
                ),
            )
    except (
        Exception
    ) as error:  # whatever lacks: packages, the toolkit's libraries, a driver that fits
        way_out = "numba-cuda wants CUDA's compiler (a toolkit that CUDA_HOME names, or pip install 'numba-cuda[cu13]', of the driver's release)"
        raise InputError(
            f"the kernels for GPUs cannot be compiled: {error}; {way_out}; HPCZERO_KERNELS=torch does without them"
        ) from error


def once(folder: Path, name: str, action: Callable[[], object]) -> bool:
    """The first process on this computer to come here carries the action out, others wait for it; whether this is it. `name`: of the file that says
    that it was done.
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
    """`kept`: the same in the user's cache."""
    if kept and safe_files.is_seen(kept):
        with suppress(OSError):
            _copy_missing(kept, folder)
            return
    importlib.import_module(_USERS)
    _keep(folder, kept)


def _fill_for_gpu(folder: Path, name: str, compile_all: Callable[[], object]) -> None:
    """As _fill, while others may read what is there already."""
    kept = (
        env.cache_folder() / "kernels" / f"{folder.name}-{name}"
        if folder.parent == env.node_folder()
        else None
    )
    if kept and safe_files.is_seen(kept):
        with suppress(OSError):
            _copy_missing(kept, folder)
            return
    compile_all()
    _keep(folder, kept)


def _keep(folder: Path, kept: Path | None) -> None:
    if kept:
        made = kept.with_name(f".{kept.name}-{os.uname().nodename}-{os.getpid()}")
        with suppress(OSError):  # no room there, or another computer was faster
            _copy_missing(folder, made)
            safe_files.rename(made, kept)
        with suppress(OSError):
            safe_files.remove_tree(made)


def _copy_missing(source: Path, target: Path) -> None:
    for path in [path for path in source.rglob("*") if path.is_file() and path.name != "lock"]:
        copy = target / path.relative_to(source)
        if not copy.exists():
            safe_files.make_folders(copy.parent)
            made = copy.with_name(f".{copy.name}-{os.uname().nodename}-{os.getpid()}")
            safe_files.remove(made)
            safe_files.copy(path, made)
            safe_files.rename(made, copy)


def _own_folder(key: str) -> Path | None:
    """On this computer. Code is loaded from there: None if it could be anybody else's."""
    whole = env.node_folder()
    try:
        safe_files.own_folder(whole, mode=0o700)
        found = whole.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return None
        safe_files.own_folder(whole / key)
    except (OSError, InputError):
        return None
    return whole / key


def _key() -> str:
    """Names the machine code."""
    binding, sources = (
        importlib.import_module("llvmlite.binding"),
        importlib.import_module("hpczero_kernels.cpu"),
    )
    facts = blake2b(digest_size=8)
    versions = [
        metadata.version(name)
        for name in ("numba", "numba-cuda")
        if any(metadata.distributions(name=name))
    ]
    for part in (
        sys.version,
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
        *versions,
    ):
        facts.update(part.encode())
    facts.update(str(Path(str(sources.__file__)).parent).encode())  # numba's own names have it, too
    facts.update(sources.stamp().encode())
    return facts.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Where no lock can be had, everybody compiles."""
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
