"""Kernels are compiled once on a computer, whoever comes first, and lie where nobody else can
write.
"""

import gc
import importlib
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpczero import kernel_cache
from hpczero.errors import InputError
from hpczero_kernels import sources

pytest.importorskip("llvmlite")
ONE = """
import sys, time
from pathlib import Path
from hpczero.kernel_cache import once_per_computer
folder = Path(sys.argv[1])
def compiles():
    with (folder / "compiled").open("a") as file:
        file.write("x")
    time.sleep(0.3)
once_per_computer(folder, "done", compiles)
assert (folder / "compiled").read_text() == "x"
"""


def test_one_process_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", ONE, str(tmp_path)]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "compiled").read_text() == "x"


def test_what_failed_is_tried_again_by_the_next(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        kernel_cache.once_per_computer(tmp_path, "done", lambda: 1 // 0)
    assert kernel_cache.once_per_computer(tmp_path, "done", lambda: None)
    assert not kernel_cache.once_per_computer(tmp_path, "done", lambda: 1 // 0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "local").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    return tmp_path / "local" / f"hpczero-{os.getuid()}"


def test_the_folder_is_this_users_alone(cache: Path) -> None:
    assert kernel_cache._own_folder("key") == cache / "key"
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o770)
    assert kernel_cache._own_folder("key") is None
    cache.chmod(0o700)
    cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to("elsewhere")
    assert kernel_cache._own_folder("key") is None


def test_a_new_computer_takes_what_another_has_compiled(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def compiled(name: str) -> object:
        made.append(name)
        (folder / "kernel.nbc").write_text("code")
        return object()

    monkeypatch.setattr(kernel_cache.importlib, "import_module", compiled)
    kept = tmp_path / "home" / "hpczero" / "kernels" / "key"
    for number in range(2):
        folder = tmp_path / f"computer{number}" / "key"
        folder.mkdir(parents=True)
        kernel_cache._fill(folder, kept)
        assert (folder / "kernel.nbc").read_text() == "code"
    assert made == ["hpczero.train.run"]
    assert [path.name for path in kept.parent.iterdir()] == ["key"]


def test_the_key_and_the_kernels_names_follow_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "cuda" / "vectors.py"
    source.parent.mkdir()
    found = []
    for text in ("one", "one", "two"):
        source.write_text(text)
        monkeypatch.setattr(sources, "sources_hash", lambda: sources.hash_of(tmp_path))

        def kernel() -> None: ...

        found.append((kernel_cache._key(), sources.named_by_sources(kernel).__qualname__))
    assert found[0] == found[1]
    assert all(first != last for first, last in zip(found[1], found[2], strict=True))


WHERE = """
import os, sys
from hpczero import kernel_cache
module = kernel_cache.load("hpczero_kernels.random")
folder = os.environ["NUMBA_CACHE_DIR"]
assert "hpczero-" in folder
for kernel in (module._fill_words, module._fill_normal):
    assert kernel._cache.cache_path.startswith(folder), kernel._cache.cache_path
"""


def test_kernels_are_kept_on_the_computer_and_not_beside_their_sources() -> None:
    """The first one, too: numba asks for its folder when it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    subprocess.run([sys.executable, "-c", WHERE], check=True, timeout=120, env=environment)


def test_the_collector_of_garbage_works_again_after_an_import() -> None:
    for name in ("hpczero_kernels.random", "hpczero_kernels.missing"):
        with suppress(ImportError):
            kernel_cache.load(name)
        assert gc.isenabled()


def test_every_kernel_that_numba_keeps_is_named_by_the_sources() -> None:
    """numba looks at the file that a kernel is in alone: what an edit of another has changed
    would be taken from the cache.
    """
    dispatcher = pytest.importorskip("numba.core.registry").CPUDispatcher
    names = ["adamw", "dropout", "random", "cpu", "reduce"]
    names += ["glu", "rms_norm_cpu", "rotary", "soft_cap", "signs", "quantised"]
    names += ["frozen_adamw", "lamb", "lion", "block_sparse_cpu"]
    modules = [vars(importlib.import_module(f"hpczero_kernels.{name}")) for name in names]
    made = [
        value for module in modules for value in module.values() if isinstance(value, dispatcher)
    ]
    kept = {
        kernel.py_func.__name__: kernel._cache._impl.filename_base
        for kernel in made
        if hasattr(kernel._cache, "_impl")
    }
    wanted = {"_adamw", "_sum", "_fill_keep", "_fill_normal", "_fill_words"}
    wanted |= {"_glu_forward", "_glu_backward", "_turn_rows", "_rms_forward", "_rms_backward"}
    wanted |= {"_cap_forward", "_cap_backward", "_pack_signs", "_average_signs"}
    wanted |= {"_own_steps", "_take_steps", "_lamb_moments", "_lamb_step", "_lion"}
    wanted |= {"_softmax", "_differentiate", "_gather", "_scatter", "_add_diagonals"}
    assert wanted | {"_quantise", "_average_integers"} == set(kept)
    assert all(sources.sources_hash() in base for base in kept.values()), kept


def test_kernels_for_gpus_are_kept_as_well(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second computer loads what the first has compiled, beside what it has itself."""
    compiled = []

    def compile_one() -> None:
        compiled.append(1)
        (folder / "gelu").mkdir(exist_ok=True)
        (folder / "gelu" / "forward.nbc").write_text("code")

    launch = SimpleNamespace(all_kernels=lambda: [SimpleNamespace(compile=compile_one)])
    monkeypatch.setattr("hpczero_kernels.dispatch.on_gpus", lambda: True)
    monkeypatch.setitem(sys.modules, "hpczero_kernels.cuda.launch", launch)
    for computer in ("first", "second"):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / computer))
        folder = tmp_path / computer / cache.name / "key"
        folder.mkdir(parents=True)
        (folder / "own.nbc").write_text(computer)
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
        kernel_cache.load_gpu_kernels((9, 0))
        assert (folder / "gelu" / "forward.nbc").read_text() == "code"
        assert (folder / "own.nbc").read_text() == computer
        assert (folder / "cuda-90").exists()
    assert compiled == [1]
    kernel_cache.load_gpu_kernels((8, 0))
    assert compiled == [1, 1]


@pytest.mark.parametrize(
    ("broken", "said"),
    [("launch", "No module named 'cuda'"), ("compile", "libnvvm.so cannot be found")],
)
def test_a_gpu_whose_kernels_cannot_be_compiled_is_said(
    broken: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_it() -> None:
        raise OSError(said)

    def imported(name: str) -> object:
        if name.endswith("dispatch"):
            return SimpleNamespace(on_gpus=lambda: True)
        if broken == "launch":
            raise ModuleNotFoundError(said)
        return SimpleNamespace(all_kernels=lambda: [SimpleNamespace(compile=compile_it)])

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache.importlib, "import_module", imported)
    with pytest.raises(
        InputError, match=f"cannot be compiled: {said}; .*CUDA_HOME.*HPCZERO_KERNELS=torch"
    ):
        kernel_cache.load_gpu_kernels((9, 0))


def test_where_pytorch_does_the_work_nothing_of_cuda_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpczero_kernels.dispatch.on_gpus", lambda: False)
    monkeypatch.setitem(sys.modules, "hpczero_kernels.cuda.launch", None)
    kernel_cache.load_gpu_kernels((7, 0))
