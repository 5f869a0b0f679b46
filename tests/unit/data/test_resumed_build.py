"""A build that was killed or interrupted goes on to the same bytes, or starts over and says so."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpczero.commands import data
from hpczero.errors import InputError
from tests.support.token_files import Heard, documents, in_child, make


@pytest.mark.parametrize(("commit_every", "stride"), [(1, 83), (60_000, 23)])
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    text: Path, tmp_path: Path, commit_every: int, stride: int
) -> None:
    heard = Heard()
    make(text, tmp_path / "whole.h5", heard, commit_every=2**30)
    whole = (tmp_path / "whole.h5").read_bytes()
    resumed = 0
    for after in [1, 2, *range(3, heard.advances, stride), heard.advances - 1]:
        output = tmp_path / "killed.h5"
        status = in_child(
            lambda: make(
                text,
                output,  # noqa: B023
                Heard(after, lambda: os.kill(os.getpid(), signal.SIGKILL)),  # noqa: B023
                commit_every=commit_every,
            )
        )
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert not output.exists()
        again = Heard()
        make(text, output, again, commit_every=commit_every)
        resumed += any("resuming after" in line for line in again.lines)
        assert output.read_bytes() == whole
        assert not (tmp_path / "killed.h5.partial").exists()
        output.unlink()
    assert resumed >= 3


def test_killed_many_times_in_a_row_it_still_comes_to_the_same_bytes(
    text: Path, tmp_path: Path
) -> None:
    make(text, tmp_path / "whole.h5")
    for _ in range(40):
        in_child(
            lambda: make(
                text,
                tmp_path / "a.h5",
                Heard(25, lambda: os.kill(os.getpid(), signal.SIGKILL)),
                commit_every=1,
            )
        )
        if (tmp_path / "a.h5").exists():
            break
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


@pytest.mark.parametrize("name", ["write_token_file", "replace_file"])
def test_killed_while_the_file_is_put_together_it_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make(text, tmp_path / "whole.h5")
    real = getattr(sys.modules["hpczero.data.build"], name)

    def killed(path: Path, *rest: object) -> None:
        if path.name == "assembled.h5":
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(f"hpczero.data.build.{name}", killed)
        assert os.WTERMSIG(in_child(lambda: make(text, tmp_path / "a.h5"))) == signal.SIGKILL
    heard = Heard()
    make(text, tmp_path / "a.h5", heard)
    assert heard.lines[0].startswith("resuming after")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def interrupted(text: Path, output: Path) -> Path:
    """A work folder with a journal in the middle of the text."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(text, output, Heard(30, stop), commit_every=1)
    return output.with_name(output.name + ".partial")


@pytest.mark.parametrize("change", ["content", "recipe", "journal", "raw files"])
def test_what_changed_meanwhile_starts_it_over_and_is_said(
    text: Path, tmp_path: Path, change: str
) -> None:
    work = interrupted(text, tmp_path / "a.h5")
    fraction = 0.1
    if change == "content":
        (text / "01.txt").write_text("something else")
    elif change == "recipe":
        fraction = 0.3
    elif change == "journal":
        (work / "journal.json").write_text('{"done": 3}')
    else:
        os.truncate(work / "train.tokens", 10)
    heard = Heard()
    make(text, tmp_path / "a.h5", heard, fraction=fraction)
    assert heard.lines[0].startswith("starting over: ")
    make(text, tmp_path / "b.h5", fraction=fraction)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_a_mistake_further_on_can_be_mended_without_starting_over(
    text: Path, tmp_path: Path
) -> None:
    with open(text / "z.jsonl", "w") as file:
        file.write('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(InputError, match=r"z\.jsonl:2: "):
        make(text, tmp_path / "a.h5")
    (text / "z.jsonl").write_text('{"text": "good"}\n{"text": "mended"}\n')
    heard = Heard()
    made = make(text, tmp_path / "a.h5", heard, commit_every=1)
    assert b"mended" in documents(made, "train") + documents(made, "validation")


def test_the_rate_of_a_build_that_goes_on_is_of_what_it_has_read_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins at 900 of 1000 bytes; 20 s later it has read them all."""
    clock = iter((0.0, 5.0, 25.0))
    monkeypatch.setattr(data, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    lines = data._Lines()
    lines.advanced(900, 1000)
    lines.advanced(1000, 1000)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.endswith("read=1000 total=1000 bytes_per_second=5")
