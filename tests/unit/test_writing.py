"""One module opens files for writing, makes, renames and removes: nothing else does."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.launch import CHECKOUT

ROOM = "safe_files"
# module -> what it does, and why that is none of the module's business
EXCEPTIONS = {
    "hpczero/hdf5/image.py": {"h5py.File"},  # into memory: `ImagePages`
    "hpczero/data/write_token_file.py": {"h5py.File"},  # likewise
    "hpczero/train/trace_file.py": {"gzip.open"},  # into a file that the module has opened
    "scripts/measured.py": {"open"},  # the file that the caller named
    # a cgroup, which is no folder of files
    "scripts/bench_room.py": {
        *("tempfile.TemporaryDirectory", "own.mkdir", "own.rmdir", "?.write_text"),
    },
    # what is in a folder that it holds open, and removes
    "hpczero/checkpoint/open_folder.py": {"os.open", "os.unlink", "os.rmdir"},
    "hpczero/comm/stacks.py": {"os.open"},  # a pipe of another process, which is asked by it
    "hpczero/train/console.py": {"os.open"},  # a terminal that is there, to ask whether it is one
}
MODES = set("wax+")
FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND", "O_TMPFILE"}
OPENERS = {  # which argument the mode is
    "open": None,
    "File": 1,
    "GzipFile": 1,
    "FileIO": 1,
    "ZipFile": 1,
    "TarFile": 1,
    "memmap": 2,
    "open_memmap": 1,
}
METHODS = {
    *("write_text", "write_bytes", "touch", "unlink", "rename", "renames", "rmdir", "removedirs"),
    *("mkdir", "makedirs", "symlink_to", "hardlink_to", "symlink", "mkfifo", "mknod", "chmod"),
    *("rmtree", "copytree", "copyfile", "copy2", "move", "make_archive", "unpack_archive"),
    *("mkdtemp", "mkstemp", "mktemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory"),
    *("SpooledTemporaryFile", "tofile", "savez", "savez_compressed", "savetxt", "FileHandler"),
}
OF_MODULES = {  # names that are harmless elsewhere
    "os": {"remove", "replace", "link", "truncate", "chown"},
    "shutil": {"copy", "chown"},
    "np": {"save"},
    "torch": {"save"},
}


def offences(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything that opens a path for writing, or changes a folder."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile", "io"):
            names = {alias.name for alias in node.names}
            for name in names & (METHODS | set(OPENERS) | OF_MODULES.get(node.module, set())):
                yield node.lineno, f"from {node.module} import {name}"
        if isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in [_called(node)] if what)


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id if function.id == "open" and _writes(node, 1) else ""
    if not isinstance(function, ast.Attribute):
        return ""
    receiver = function.value.id if isinstance(function.value, ast.Name) else "?"
    name = f"{receiver}.{function.attr}"
    if receiver == ROOM:
        return ""
    if name == "os.open":
        return name if _flags(node) else ""
    if function.attr in OPENERS:
        return name if _writes(node, OPENERS[function.attr]) else ""
    if function.attr in METHODS or function.attr in OF_MODULES.get(receiver, ()):
        return name
    one_path = len(node.args) == 1 and not node.keywords
    return name if function.attr == "replace" and one_path else ""


def _writes(node: ast.Call, at: int | None) -> bool:
    """Return True if a mode is given that does not only read. It is argument `at`; None: any of
    them, as far as it can be seen to be one.
    """
    given = [word.value for word in node.keywords if word.arg == "mode"]
    if at is None:
        given += [one for one in node.args if isinstance(one, ast.Constant) and _is_mode(one.value)]
    else:
        given += node.args[at : at + 1]
    return any(
        not isinstance(mode, ast.Constant) or bool(MODES & set(str(mode.value))) for mode in given
    )


def _is_mode(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[rwaxbt+]{1,3}", value) is not None


def _flags(node: ast.Call) -> bool:
    if len(node.args) < 2:
        return True
    named = {inner.attr for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Attribute)}
    return bool(named & FLAGS) or not named


def _excepted(name: str) -> set[str]:
    """A benchmark may have a folder that vanishes with it, and that nobody else can write in."""
    of_scripts = {"tempfile.TemporaryDirectory"} if name.startswith("scripts/") else set()
    return EXCEPTIONS.get(name, of_scripts)


def test_only_one_module_writes_and_removes() -> None:
    wrong = []
    for folder in ("hpczero", "numba_cuda", "scripts"):
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            name = str(path.relative_to(CHECKOUT))
            if name == f"hpczero/{ROOM}.py":
                continue
            excepted = _excepted(name)
            found = offences(path.read_text())
            wrong += [f"{name}:{line}: {what}" for line, what in found if what not in excepted]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_needed() -> None:
    for name, excepted in EXCEPTIONS.items():
        found = {what for _, what in offences((CHECKOUT / name).read_text())}
        assert excepted <= found, name


@pytest.mark.parametrize(
    "line",
    [
        'open(path, "w")',
        'open(path, mode="ab")',
        "open(path, mode)",
        'path.open("x")',
        '(folder / name).open("r+b")',
        'io.open(path, "wb")',
        'gzip.open(path, "wt")',
        'h5py.File(path, "w")',
        'h5py.File(path, "r+")',
        'h5py.File(path, mode="a")',
        "os.open(path, os.O_WRONLY | os.O_DIRECT)",
        "os.open(path, os.O_RDWR)",
        "os.open(path, flags)",
        'path.write_text("")',
        'np.memmap(path, dtype, "r+")',
        "path.replace(other)",
        "os.replace(a, b)",
        "os.remove(a)",
        "path.unlink(missing_ok=True)",
        "(folder / name).unlink()",
        "shutil.rmtree(path)",
        "shutil.copy(a, b)",
        "tempfile.mkdtemp()",
        "path.mkdir()",
        "from os import unlink",
        "from shutil import rmtree",
        "values.tofile(path)",
        "np.save(path, values)",
    ],
)
def test_a_write_past_the_module_is_found(line: str) -> None:
    assert list(offences(line))


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        'open(path, "rb")',
        'path.open("rb")',
        'path.open(encoding="utf-8")',
        "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        'h5py.File(path, "r", locking=False)',
        'gzip.open(path, "rt")',
        'np.memmap(path, dtype, "r", offset)',
        'text.replace("a", "b")',
        "replace(spec, steps=5)",
        "numbers.remove(5)",
        "values.copy()",
        "safe_files.rename(a, b)",
        "Checkpoint.open(folder)",
    ],
)
def test_what_only_reads_is_not_found(line: str) -> None:
    assert not list(offences(line))
