"""`hpczero data build` and `hpczero data show` as a user runs them."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from hpczero.cli import main
from tests.support.launch import Finished, hpczero, launch, on_a_terminal, start


def data(*arguments: str, folder: Path) -> Finished:
    return launch(hpczero("data", *arguments), 120, folder)


def refused(*arguments: str, folder: Path) -> str:
    """The one line that a wrong command ends with; it leaves everything as it was."""
    before = sorted(folder.rglob("*"))
    ended = data(*arguments, folder=folder)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert sorted(folder.rglob("*")) == before
    [line] = ended.err.splitlines()
    return line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number:02}.md").write_text(
            f"# Page {number}\n" + "Some words, and more of them.\n" * 300
        )
    (tmp_path / "text" / "records.jsonl").write_text('{"text": "eins"}\n{"text": "zwei"}\n')
    return tmp_path


def test_build_then_show_then_build_again(folder: Path) -> None:
    built = data("build", "-o", "corpus.h5", "text", folder=folder)
    assert (built.code, built.err) == (0, "")
    assert "\x1b" not in built.out
    assert " build read=" in built.out
    shown = data("show", "corpus.h5", folder=folder)
    assert built.out.endswith(shown.out)
    facts = json.loads(data("show", "corpus.h5", "--json", folder=folder).out)
    text = sum(path.stat().st_size for path in (folder / "text").glob("*.md")) + len("einszwei")
    assert sum(facts["tokens"].values()) == text + 42
    assert sum(facts["documents"].values()) == 42
    assert facts["documents"]["validation"] >= 1
    assert facts["vocabulary"] == 257
    assert 2 < facts["unigram_entropy"]["train"] < 4
    again = data("build", "-o", "corpus.h5", "text", folder=folder)
    assert (again.code, again.out) == (0, "corpus.h5 is up to date\n")
    assert "made from other text or with other parameters" in refused(
        "build", "-o", "corpus.h5", "text/00.md", folder=folder
    )
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.h5", "text"]


def test_wrong_commands_are_refused_in_one_line(folder: Path) -> None:
    (folder / "notes.h5").write_text("mine")
    (folder / "empty").mkdir()
    assert "nothing to read" in refused("build", "-o", "a.h5", "empty", folder=folder)
    assert "no such file or folder" in refused(
        "build", "-o", "a.h5", "text", "missing", folder=folder
    )
    assert "must end in .h5" in refused("build", "-o", "corpus.txt", "text", folder=folder)
    assert "none/here does not exist" in refused(
        "build", "-o", "none/here/a.h5", "text", folder=folder
    )
    assert "the output exists, and is left alone: " in refused(
        "build", "-o", "notes.h5", "text", folder=folder
    )
    assert "the output's folder /proc cannot be written" in refused(
        "build", "-o", "/proc/a.h5", "text", folder=folder
    )
    for fraction in ("1", "-0.1", "nan"):
        assert "less than 1" in refused(
            "build", "-o", "a.h5", "text", f"--validation-fraction={fraction}", folder=folder
        )
    assert "is not a token file" in refused("show", "notes.h5", folder=folder)
    assert "No such file" in refused("show", "missing.h5", folder=folder)


@pytest.mark.slow
def test_killed_by_the_system_the_same_command_goes_on_to_the_same_bytes(folder: Path) -> None:
    """Killed for real at moments of no choice of ours: as the output grows, and with time to
    reach a commit.
    """
    with open(folder / "text" / "long.txt", "w") as file:
        file.writelines(
            f"line {number} of a text that is long enough to be killed in\n"
            for number in range(1_700_000)
        )
    assert data("build", "-o", "whole.h5", "text", folder=folder).code == 0
    command = hpczero("data", "build", "-o", "killed.h5", "text")
    partial, said, killed = folder / "killed.h5.partial", "", 0
    for kill_at in (1, 10**7, 8 * 10**7, 13 * 10**7):
        process = start(command, folder)
        while process.poll() is None and size_of(partial / "train.tokens") < kill_at:
            time.sleep(0.002)
        process.kill()
        said += process.communicate(timeout=60)[0].decode()
        killed += process.returncode == -signal.SIGKILL
        assert (folder / "killed.h5").exists() == (process.returncode == 0)
    assert killed >= 2  # on a busy machine the last ones may come too late
    finished = data("build", "-o", "killed.h5", "text", folder=folder)
    assert finished.code == 0, finished
    assert "resuming after" in said + finished.out
    assert (folder / "killed.h5").read_bytes() == (folder / "whole.h5").read_bytes()
    assert not partial.exists()


def size_of(path: Path) -> int:
    """Return a file's bytes, 0 if there is none: a build that ends removes it at any moment."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_on_a_terminal_there_is_a_bar(folder: Path) -> None:
    seen = on_a_terminal(hpczero("data", "build", "-o", "a.h5", "text"), {"TERM": "xterm"}, folder)
    assert "━" in seen
    assert "fingerprint" in seen


def test_control_c_says_how_to_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpczero.commands.data.build_token_file", interrupted)
    assert main(["data", "build", "-o", str(folder / "a.h5"), str(folder / "text")]) == 75
    assert "the same command goes on where it was" in capsys.readouterr().err


def test_neither_verb_needs_torch_or_mpi(folder: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'mpi4py', 'numba'): sys.modules[name] = None\n"
        "from hpczero.cli import main\n"
        "assert main(['data', 'build', '-o', 'a.h5', 'text']) == 0\n"
        "assert main(['data', 'show', 'a.h5']) == 0\n"
    )
    ended = launch([sys.executable, "-c", program], 60, folder)
    assert ended.code == 0, ended.err
