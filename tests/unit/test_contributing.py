"""The lists of CONTRIBUTING.md's "How to add …" are complete, and documents are 100 columns wide.

A list is held against the tree: every file that knows the members that a kind has today (the three
schedules, say) has to know the next one too, and so has to stand in the list. A file of the program
knows a kind if it names enough of its members; a test or a document if it lists them, that is, if
one table names most of them.
"""

import ast
import configparser
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpczero import verbs
from hpczero.batch.scheduler import SCHEDULERS
from hpczero.model.families import FAMILIES
from hpczero.parallel.pipeline import schedule
from hpczero.spec.keys import tables
from hpczero.spec.rules import AXES
from hpczero_kernels.table import TABLE
from tests.support.launch import CHECKOUT

PAGE = CHECKOUT / "CONTRIBUTING.md"
WIDEST = 100
ENDINGS = (".py", ".md", ".j2", ".sh", ".cfg", ".txt")
PROGRAM = ("hpczero", "numba_cuda", "templates")
# What was, and what is printed or kept: nobody edits these to add something.
NOT_LISTED = {"CONTRIBUTING.md", "CHANGELOG.md", "docs/log.md", "docs/benchmarks.md"} | {
    "tests/unit/test_contributing.py"
}
ROOMS = {path.parent.name for path in (CHECKOUT / "hpczero").glob("*/*.py")}
SITES = {path.stem for path in (CHECKOUT / "sites").glob("*.toml")} - {"generic"}


@dataclass(frozen=True)
class Kind:
    """Members of a kind that has a list, and how a file is recognised that knows the kind."""

    heading: str
    members: Collection[str]
    of_program: int = 1  # members that such a file of the program names
    in_table: int = 0  # members that one table of such a test or document has; 0: all
    before: str = ""  # words that come before a member in a document
    plain: bool = False  # documents name members without quotes
    another_meaning: Mapping[str, str] = field(default_factory=dict)  # file -> what it means there

    @property
    def most(self) -> int:
        return self.in_table or len(self.members)


def requirements() -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    extras = setup["options.extras_require"]
    text = setup["options"]["install_requires"] + extras["train"] + "\n" + extras["cuda"]
    return set(re.findall(r"^[\w-]+", text, re.MULTILINE))


OTHER_MODELS = ("scripts/bench_memory.py", "scripts/bench_gpu.py")
OPTIMIZERS = {"one_bit_adam", "lamb", "lion", "muon"}
# without words that are used for other things, too
KERNELS = set(TABLE) - {"sum", "norm", "dropout", "lamb", "lion"}
KINDS = [
    *(
        Kind(
            "A key of the spec",
            list(keys),
            of_program=4,
            in_table=max(4, len(keys) // 3),
            another_meaning=dict.fromkeys(OTHER_MODELS, "a model of its own"),
        )
        for keys in tables().values()
    ),
    Kind(
        "A kernel",
        KERNELS,
        in_table=3,
        another_meaning={
            "hpczero/spec/optimizer.py": "the optimizer's name",
            "hpczero/spec/rules_of_optimizers.py": "the optimizer's name",
            "hpczero/parallel/zero/muon_update.py": "an optimizer whose states it takes over",
            "hpczero/train/restored_states.py": "the optimizer of an old checkpoint",
            "hpczero/spec/model.py": "the name of an activation",
            "hpczero/huggingface/conversions.py": "the name of an activation",
            "hpczero/huggingface/architectures.py": "the name of an activation",
        },
    ),
    Kind("An optimizer", OPTIMIZERS),
    Kind("A family of models", FAMILIES),
    Kind("An axis of the grid", AXES, of_program=2),
    Kind("A schedule of pipelines", schedule.KINDS),
    Kind("A scheduler of batch jobs", SCHEDULERS),
    Kind("A collective operation", ("all_reduce", "reduce_scatter", "all_gather"), of_program=2),
    Kind("A verb", verbs.VERBS, len(verbs.VERBS) // 2, before="hpczero "),
    Kind("A verb", verbs.CHECKPOINT_VERBS, before="hpczero ckpt ", of_program=5),
    Kind("A verb", verbs.DATA_VERBS, before="hpczero data ", of_program=3),
    Kind("A verb", verbs.SITE_VERBS, before="hpczero site ", of_program=3),
    Kind("A site", SITES, plain=True),
    Kind("A requirement", requirements(), of_program=3, plain=True),
    Kind("A folder of the package", ROOMS, of_program=8, plain=True),
]


# ------------------------------------------------------------------------------ the page's lists


def lists() -> dict[str, str]:
    """Return the text under each heading of "How to add …"."""
    section = PAGE.read_text().partition("\n## How to add …\n")[2].partition("\n## ")[0]
    _, *parts = re.split(r"^### (.*)\n", section, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def listed(heading: str) -> list[str]:
    """Return the files of a list; NAME stands for the new member's name."""
    items = re.findall(r"^\d+\. (.*?):(?:\s|$)", lists()[heading], re.MULTILINE | re.DOTALL)
    assert items, f"{heading}: no list"
    return [name for item in items for name in re.findall(r"`([^`\s]+)`", item)]


def is_listed(name: str, kind: Kind) -> bool:
    files = listed(kind.heading)
    return any(name in {file, *(file.replace("NAME", m) for m in kind.members)} for file in files)


# ------------------------------------------------------------------------------- what a file knows


@functools.cache
def sources() -> list[str]:
    folders = ("docs", "hpczero", "numba_cuda", "scripts", "templates", "tests")
    paths = [path for folder in folders for path in (CHECKOUT / folder).rglob("*")]
    paths += [CHECKOUT / name for name in ("README.md", "setup.cfg", "constraints.txt")]
    names = [str(path.relative_to(CHECKOUT)) for path in paths if path.is_file()]
    return [name for name in names if name.endswith(ENDINGS) and "/golden/" not in name]


def _words(node: ast.AST | None) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


@functools.cache
def tables_in(name: str) -> list[set[str]]:
    """Return the texts of each tuple, list, set and dict, where they are elements or keys.

    Of a pair, as in [("gpipe", 1), ("1f1b", 1)], it is the first.
    """
    found = []
    for node in ast.walk(ast.parse((CHECKOUT / name).read_text())):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            pairs = [e.elts[0] for e in node.elts if isinstance(e, ast.Tuple) and e.elts]
            found.append(set().union(*map(_words, [*node.elts, *pairs])))
        elif isinstance(node, ast.Dict):
            found.append(set().union(*map(_words, node.keys)))
    return found


@functools.cache
def names_in(name: str) -> set[str]:
    """Return all texts of the code, but docstrings, and the functions that it defines."""
    nodes = list(ast.walk(ast.parse((CHECKOUT / name).read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return found.union(*(_words(node) for node in nodes if id(node) not in docstrings))


def most_members_in(name: str, kind: Kind) -> int:
    """Return how many of the members a file names, or if it is a test, the longest of its tables.

    A site's partition is written "site/partition".
    """
    members = set(kind.members)
    if not name.endswith(".py"):
        text = (CHECKOUT / name).read_text(errors="replace")
        return sum(bool(re.search(_pattern(each, kind), text, re.M | re.I)) for each in members)
    if name.startswith(PROGRAM):
        return len(members & {text.partition("/")[0] for text in names_in(name)})
    return max((len(members & table) for table in tables_in(name)), default=0)


def _pattern(member: str, kind: Kind) -> str:
    word = re.escape(member)
    if kind.plain:
        return rf"(?<![\w-]){word}(?![\w-])"
    return rf"[`\"']{word}[`\"']" + (rf"|(?:^|`){kind.before}{word}\b" if kind.before else "")


def files_that_know(kind: Kind) -> Iterator[str]:
    for name in sources():
        if name in NOT_LISTED or name in kind.another_meaning:
            continue
        enough = kind.of_program if name.startswith(PROGRAM) else kind.most
        if most_members_in(name, kind) >= enough:
            yield name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.heading}-{min(kind.members)}")
def test_a_list_names_every_file_that_knows_the_kind(kind: Kind) -> None:
    missing = [name for name in files_that_know(kind) if not is_listed(name, kind)]
    assert not missing, f'CONTRIBUTING, "{kind.heading}": not in the list: {", ".join(missing)}'


def test_the_module_of_every_verb_is_listed() -> None:
    files = [CHECKOUT / "hpczero" / name for name in ("verbs.py", "verb_groups.py")]
    text = "".join(path.read_text() for path in files)
    modules = set(re.findall(r'"(hpczero\.[\w.]+):\w+"', text))
    assert len(modules) > 5
    files = {module.replace(".", "/") + ".py" for module in modules}
    assert not files - set(listed("A verb"))


def test_the_files_of_the_lists_exist() -> None:
    names = {name for heading in lists() for name in listed(heading)}
    assert len(names) > 50
    assert not [n for n in sorted(names) if "NAME" not in n and not (CHECKOUT / n).is_file()]


def test_a_new_place_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readings of the files see what they must."""
    folder = tmp_path / "hpczero"
    folder.mkdir()
    (folder / "chooser.py").write_text('"""gpipe"""\nif kind == "interleaved":\n    pass\n')
    (folder / "other.py").write_text('"""gpipe"""\ninterleaved = 1\n')
    (tmp_path / "tests.py").write_text('cases = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]\n')
    (tmp_path / "one.py").write_text('assert run("gpipe")\nassert run("1f1b", "interleaved")\n')
    (tmp_path / "page.md").write_text("`gpipe`, `1f1b` and `interleaved`\n")
    names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")]
    monkeypatch.setattr(f"{__name__}.CHECKOUT", tmp_path)
    monkeypatch.setattr(f"{__name__}.sources", lambda: names)
    kind = next(kind for kind in KINDS if kind.heading == "A schedule of pipelines")
    assert set(files_that_know(kind)) == {"hpczero/chooser.py", "tests.py", "page.md"}


# ----------------------------------------------------------------------------------- the documents


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page that are neither code nor of a table."""
    fenced, code, before = False, False, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            before = ""
            continue
        code = line.startswith("    ") and (code or not before.strip())
        if not (fenced or code or line.lstrip().startswith("|")):
            yield number, line
        before = line


def test_prose_is_as_wide_as_code() -> None:
    """But for the page that the program prints, and for addresses."""
    pages = [*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")]
    assert len(pages) > 15
    wide = [
        f"{page.relative_to(CHECKOUT)}:{number}"
        for page in pages
        if page.name != "spec.md"
        for number, line in prose(page.read_text())
        if len(line) > WIDEST and "://" not in line
    ]
    assert not wide, "\n".join(wide)


def test_code_and_tables_are_no_prose() -> None:
    text = "a\n```\nb\n```\n\n    c\n\n- d\n    e\n\n| f |\n# g\n"
    assert [line for _, line in prose(text) if line] == ["a", "- d", "    e", "# g"]


LIMITS = CHECKOUT / "docs" / "what-does-not-work.md"


def promised(text: str) -> list[tuple[str, str]]:
    """File and test (none: all of the file) of each line of a table whose last column has them."""
    return re.findall(r"\| `(tests/[\w/.]+)(?:::(\w+))?` \|$", text, re.MULTILINE)


def promises() -> list[tuple[str, str]]:
    section = PAGE.read_text().partition("### What shows what")[2].partition("\n## ")[0]
    return promised(section)


EVERYTHING_PROMISED = list(dict.fromkeys([*promises(), *promised(LIMITS.read_text())]))


@pytest.mark.parametrize(("file", "test"), EVERYTHING_PROMISED, ids=str)
def test_a_promise_has_a_test_that_the_readmes_command_runs(file: str, test: str) -> None:
    tree = ast.parse((CHECKOUT / file).read_text())
    wanted = {
        node.name: [ast.unparse(mark) for mark in node.decorator_list]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (node.name == test if test else node.name.startswith("test_"))
    }
    assert wanted
    assert any("pytest.mark.slow" not in marks for marks in wanted.values())
    assert "slow" not in "".join(
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )


def test_every_line_of_the_promises_is_read() -> None:
    section = PAGE.read_text().partition("### What shows what")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len(promises()) == len(lines) - 2 > 40
    rows = [line for line in LIMITS.read_text().splitlines() if line.startswith("|")]
    assert len(promised(LIMITS.read_text())) == len(rows) - 2 * 4 > 30, "four tables"
