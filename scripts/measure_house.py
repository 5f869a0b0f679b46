#!/usr/bin/env python3
"""Measure how large, how wide and how entangled the code is.

    python scripts/measure_house.py                 # this checkout
    python scripts/measure_house.py OTHER-CHECKOUT   # that one, beside this one
    python scripts/measure_house.py --rooms         # what each file is for, by its first line

Counts cover `hpczero/` and `numba_cuda/`. Tokens are Python's own, without comments and line
structure.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOMS = ("hpczero", "numba_cuda")
WIDEST = 100  # columns
EVASIVE = ("What", "Of", "As", "Whether", "Where")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass(frozen=True)
class House:
    files: int
    lines: int
    tokens: int
    longest_function: str
    longest_file: str
    wide_lines: int
    circles: int
    docstrings: int
    evasive_docstrings: int


def measure(checkout: Path) -> House:
    paths = sorted(path for room in ROOMS for path in (checkout / room).rglob("*.py"))
    texts = {path: path.read_text() for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    functions = [
        function
        for path, tree in trees.items()
        for function in _functions(path.relative_to(checkout), tree)
    ]
    lengths = {path: text.count("\n") for path, text in texts.items()}
    longest = max(paths, key=lambda path: lengths[path])
    docstrings = [text for tree in trees.values() for text in _docstrings(tree)]
    return House(
        files=len(paths),
        lines=sum(lengths.values()),
        tokens=sum(map(_tokens, texts.values())),
        longest_function="{1} ({0} lines)".format(*max(functions)),
        longest_file=f"{longest.relative_to(checkout)} ({lengths[longest]} lines)",
        wide_lines=sum(len(line) > WIDEST for text in texts.values() for line in text.splitlines()),
        circles=len(circles(imports(checkout, trees))),
        docstrings=len(docstrings),
        evasive_docstrings=sum(text.split(maxsplit=1)[0] in EVASIVE for text in docstrings),
    )


def _tokens(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _LAYOUT for token in tokens)


def _functions(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or 0) - node.lineno + 1, f"{path}: {node.name}"


def _docstrings(tree: ast.AST) -> Iterator[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def imports(checkout: Path, trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Return module -> modules of the project that it imports, wherever in the file."""
    names = {_name(checkout, path): tree for path, tree in trees.items()}
    found: dict[str, set[str]] = {}
    for name, tree in names.items():
        asked: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                asked |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = {f"{node.module}.{alias.name}" for alias in node.names}
                asked |= modules if modules <= names.keys() else {node.module, *modules}
        found[name] = {one for one in asked if one in names and one != name}
    return found


def _name(checkout: Path, path: Path) -> str:
    parts = path.relative_to(checkout).with_suffix("").parts
    parts = parts[1:] if parts[0] == "numba_cuda" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or not."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        waiting.append(name)
        for other in sorted(imported[name]):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in waiting:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            at = waiting.index(name)
            if len(waiting) - at > 1:
                found.append(sorted(waiting[at:]))
            del waiting[at:]

    for name in sorted(imported):
        if name not in order:
            visit(name)
    return found


def rooms(checkout: Path) -> Iterator[str]:
    """Yield the rooms, each with its files and their first lines."""
    room = None
    for path in sorted(path for name in ROOMS for path in (checkout / name).rglob("*.py")):
        if path.parent != room:
            room = path.parent
            yield f"\n{room.relative_to(checkout)}/"
        words = ast.get_docstring(ast.parse(path.read_text())) or ""
        yield f"  {path.name:24} {words.splitlines()[0] if words else '?'}"


def main() -> None:
    here = Path(__file__).resolve().parents[1]
    if sys.argv[1:] == ["--rooms"]:
        print("\n".join(rooms(here)).strip())
        return
    checkouts = [here, *map(Path, sys.argv[1:])]
    houses = [measure(checkout) for checkout in checkouts]
    for field in fields(House):
        values = [str(getattr(house, field.name)) for house in houses]
        print(f"{field.name.replace('_', ' '):20} {'   '.join(values)}")


if __name__ == "__main__":
    main()
