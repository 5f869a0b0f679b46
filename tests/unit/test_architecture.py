"""The directions of imports (docs/architecture.md), no circles, and the sizes of what people
read.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from scripts.measure_house import ROOMS, circles, imports, measure
from tests.support.launch import CHECKOUT
from tests.support.rooms import ALLOWED, WITHOUT_TORCH

KERNELS = CHECKOUT / "numba_cuda" / "hpczero_kernels"

IMPORTERS_OF_MPI4PY = ("comm",)
READERS_OF_THE_ENVIRONMENT = ("env",)
KERNELS_MAY_IMPORT = {"numba", "llvmlite", "numpy", "torch", "hpczero_kernels"} | {
    "cuda"
}  # cuda.core, by which numba-cuda launches
LONGEST_FUNCTION, LONGEST_FILE, WIDEST = 50, 400, 100


@cache
def modules() -> dict[str, Path]:
    """Every module of the package: "comm.grid" -> its file; a package's __init__ has the
    package's name, hpczero's own is "".
    """
    found = {}
    for path in sorted((CHECKOUT / "hpczero").rglob("*.py")):
        parts = path.relative_to(CHECKOUT / "hpczero").with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def python_files() -> list[Path]:
    return [
        path
        for folder in ("hpczero", "numba_cuda", "scripts", "tests")
        for path in sorted((CHECKOUT / folder).rglob("*.py"))
    ]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Full name of everything imported, at the top or inside functions, and its line."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def lies_in(module: str, rooms: tuple[str, ...] | set[str]) -> bool:
    return any(module == room or (room and module.startswith(room + ".")) for room in rooms)


def room_of(module: str) -> str:
    """The most precise entry of ALLOWED that a module belongs to."""
    entries = [room for room in ALLOWED if lies_in(module, {room})]
    assert entries, (
        f"hpczero.{module} belongs to no room: enter it in docs/architecture.md and in this test"
    )
    return max(entries, key=len)


def target(name: str) -> str:
    """The module that an imported name of hpczero lies in: "hpczero.comm.grid.Grid" ->
    "comm.grid", "hpczero.__version__" -> "".
    """
    module = name.partition(".")[2]
    known = modules()
    while module not in known:
        module = module.rpartition(".")[0]
    return module


def offences(modules_to_read: dict[str, Path], *packages: str) -> list[str]:
    """Places at which these modules import one of the packages."""
    return [
        f"{path.relative_to(CHECKOUT)}:{line}: imports {name}"
        for path in modules_to_read.values()
        for name, line in imported_names(path)
        if name.split(".")[0] in packages
    ]


def test_imports_point_the_right_way() -> None:
    wrong = []
    for module, path in modules().items():
        may_import = ALLOWED[room_of(module)] | {module.split(".")[0]}
        for name, line in imported_names(path):
            package = name.split(".")[0]
            if package not in ("hpczero", "hpczero_kernels"):
                continue
            imported = target(name) if package == "hpczero" else package
            if not lies_in(imported, may_import):
                wrong.append(
                    f"{path.relative_to(CHECKOUT)}:{line}: imports {name}; may import "
                    f"{sorted(may_import)}"
                )
    assert not wrong, "\n".join(wrong)


def test_every_file_says_in_its_first_line_what_it_is_for() -> None:
    files = [*modules().values(), *KERNELS.rglob("*.py")]
    lines = {path: (ast.get_docstring(tree_of(path)) or "") for path in files}
    assert not [path for path, text in lines.items() if not text.partition("\n")[0].strip()]


def test_no_files_import_each_other_in_a_circle() -> None:
    files = [path for name in ROOMS for path in (CHECKOUT / name).rglob("*.py")]
    trees = {path: tree_of(path) for path in files}
    assert not circles(imports(CHECKOUT, trees))


def test_only_comm_imports_mpi4py() -> None:
    assert not offences(
        {
            module: path
            for module, path in modules().items()
            if not lies_in(module, IMPORTERS_OF_MPI4PY)
        },
        "mpi4py",
    )


def test_pure_modules_import_no_torch() -> None:
    pure = {module: path for module, path in modules().items() if lies_in(module, WITHOUT_TORCH)}
    assert len(pure) > 10
    assert not offences(pure, "torch", "numba", "hpczero_kernels")


def test_the_verbs_of_login_nodes_are_among_them() -> None:
    """`doctor` looks for torch, and does without it."""
    tables = [path.read_text() for path in map(modules().get, ("verbs", "verb_groups")) if path]
    found = {name for text in tables for name in re.findall(r'"hpczero\.([\w.]+):\w+"', text)}
    others = {f"commands.{name}" for name in ("run", "evaluate", "sample", "doctor")}
    assert others < found
    assert {name for name in found if not lies_in(name, WITHOUT_TORCH)} == others


def test_only_env_reads_the_environment() -> None:
    wrong = [
        f"{path.relative_to(CHECKOUT)}:{node.lineno}: os.{node.attr}"
        for module, path in modules().items()
        if not lies_in(module, READERS_OF_THE_ENVIRONMENT)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "environb", "getenv", "putenv", "expandvars")
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_know_nothing_of_hpczero() -> None:
    files = sorted(KERNELS.rglob("*.py"))
    assert files
    outside = {
        f"{path.name}:{line}: {name}"
        for path in files
        for name, line in imported_names(path)
        if name.split(".")[0] not in KERNELS_MAY_IMPORT and not is_standard(name)
    }
    assert not outside


def is_standard(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names


def test_an_init_file_holds_something() -> None:
    files = [
        path
        for folder in ("hpczero", "numba_cuda")
        for path in (CHECKOUT / folder).rglob("__init__.py")
    ]
    assert files
    assert not [path for path in files if not path.read_text().strip()]


def test_numba_cuda_is_no_regular_package() -> None:
    """NVIDIA's package has the same import name; see design of the folder in
    docs/architecture.md.
    """
    assert not (CHECKOUT / "numba_cuda" / "__init__.py").exists()


def test_nothing_is_pickled_and_no_shell_is_asked() -> None:
    pickled = offences(modules(), "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")
    shells = [
        f"{path.relative_to(CHECKOUT)}:{node.lineno}"
        for path in modules().values()
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.keyword) and node.arg == "shell")
        or (isinstance(node, ast.Attribute) and node.attr in ("system", "popen"))
    ]
    assert not pickled + shells


def test_every_verb_leads_to_a_function_that_exists() -> None:
    files = [CHECKOUT / "hpczero" / name for name in ("verbs.py", "verb_groups.py")]
    places = [
        node.value
        for node in chain.from_iterable(ast.walk(tree_of(path)) for path in files)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("hpczero.")
    ]
    assert len(places) >= 7
    known = modules()
    for place in places:
        module, function = place.removeprefix("hpczero.").split(":")
        assert module in known, f"{place}: no such module"
        body = ast.parse(known[module].read_text()).body
        assert function in [node.name for node in body if isinstance(node, ast.FunctionDef)], (
            f"{place}: no such function"
        )


def test_functions_fit_a_screen_and_files_a_sitting() -> None:
    long = []
    for path in python_files():
        name = path.relative_to(CHECKOUT)
        text = path.read_text()
        if (lines := text.count("\n")) > LONGEST_FILE:
            long.append(f"{name}: {lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_no_line_is_wider_than_a_page() -> None:
    wide = [
        f"{path.relative_to(CHECKOUT)}:{number}"
        for name in ROOMS
        for path in sorted((CHECKOUT / name).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > WIDEST
    ]
    assert not wide, "\n".join(wide)


def test_docstrings_say_the_contract() -> None:
    """They begin with an imperative or a noun; one in twenty may be a clause."""
    house = measure(CHECKOUT)
    assert house.evasive_docstrings < house.docstrings / 20


@pytest.mark.parametrize("word", ["utils", "helpers", "manager", "misc", "common"])
def test_names_explain_themselves(word: str) -> None:
    assert not [path for path in python_files() if word in path.stem.split("_")]


def test_the_rules_of_this_test_can_fail() -> None:
    """The reading of the imports sees what it must: inside functions, of submodules, of names."""
    assert target("hpczero.comm.grid.Grid") == "comm.grid"
    assert target("hpczero.__version__") == ""
    assert not lies_in("comm.world", ALLOWED["spec.rules"])
    assert lies_in("model.families", ALLOWED["spec.rules"])
    assert room_of("spec.rules") == "spec.rules"
    assert room_of("spec.schema") == "spec"


def test_folders_of_tests_mirror_the_rooms() -> None:
    """And no test imports another: what they share lies in tests/support."""
    rooms = {str(path.relative_to(CHECKOUT / "hpczero")) for path in folders(CHECKOUT / "hpczero")}
    for kind in ("unit", "mpi", "system"):
        found = {
            str(path.parent.relative_to(CHECKOUT / "tests" / kind))
            for path in (CHECKOUT / "tests" / kind).rglob("test_*.py")
        }
        assert found <= rooms | {"support", "scripts"}, kind
    for path in (CHECKOUT / "tests").rglob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) (tests[.\w]*)", path.read_text(), re.MULTILINE)
        assert all(name.startswith("tests.support") for name in imported), path


def folders(path: Path) -> set[Path]:
    return {path} | {file.parent for file in path.rglob("*.py")}
