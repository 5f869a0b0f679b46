"""The path of docs/how-a-step-runs.md is the path that a run takes."""

import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path

from tests.support.launch import CHECKOUT, launch

PAGE = (CHECKOUT / "docs" / "how-a-step-runs.md").read_text()
STOPS = re.findall(r"^## \d+\. .*: `(\S+\.py)`, `([\w.]+)`$", PAGE, re.MULTILINE)
MOST_FILES, MOST_LINES, MOST_UNNAMED = 16, 3500, 2

SPEC = """
name = "followed"
[model]
layers = 1
hidden = 8
heads = 1
seq_len = 4
vocab = 16
[data]
source = "synthetic"
[train]
steps = 1
global_batch = 1
micro_batch = 1
eval_batches = 0
"""

FOLLOWED = """
import json, sys
root, stops = sys.argv[1], [tuple(stop) for stop in json.loads(sys.argv[2])]
files, found = {file for file, _ in stops}, {}

def file_of(frame):
    return frame.f_code.co_filename.removeprefix(root + "/")

def note(frame, event, argument):
    stop = file_of(frame), frame.f_code.co_qualname
    if event == "call" and stop in stops and stop not in found:
        unnamed, caller = 0, frame.f_back
        while caller and file_of(caller) not in files:
            unnamed, caller = unnamed + 1, caller.f_back
        found[stop] = unnamed, caller is not None

from hpczero.cli import main
sys.setprofile(note)
code = main(["run", "spec.toml", "--progress", "lines"])
sys.setprofile(None)
print(json.dumps([code, [[*stop, *facts] for stop, facts in found.items()]]))
"""


def code_lines(path: Path) -> int:
    """Lines that hold code: no blanks, comments and docstrings."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def test_a_run_takes_the_path_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    command = [sys.executable, "-c", FOLLOWED, str(CHECKOUT), json.dumps(STOPS)]
    done = launch(command, seconds=120, folder=tmp_path)
    assert done.code == 0, done
    code, found = json.loads(done.out.splitlines()[-1])
    assert code == 0
    assert [tuple(stop[:2]) for stop in found] == STOPS, "not these stops, or not in this order"
    assert all(is_called_from_a_stop for *_, is_called_from_a_stop in found[1:])
    assert [stop for stop in found[1:] if stop[2] > MOST_UNNAMED] == []


def test_the_path_is_short() -> None:
    files = {file for file, _ in STOPS}
    assert len(STOPS) >= 14
    assert len(files) <= MOST_FILES
    assert sum(code_lines(CHECKOUT / file) for file in files) <= MOST_LINES


def test_what_the_page_says_of_a_rank_s_end_exists() -> None:
    section = PAGE.partition("\n## When a rank dies, hangs or leaves\n")[2]
    files = set(re.findall(r"`(hpczero/[\w/]+\.py)`", section))
    assert len(files) > 8
    defined = set()
    for file in files:
        for node in ast.parse((CHECKOUT / file).read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                inside = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                defined |= {f"{node.name}.{each.name}" for each in inside}
                defined |= {each.name for each in inside}
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", section))
    named |= set(re.findall(r"^\d+\. `\S+\.py`, `([\w.]+)`", section, re.MULTILINE))
    assert len(named) > 10
    assert not named - defined
