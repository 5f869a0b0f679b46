"""The command line's answer to each way in which a verb can end."""

from collections.abc import Callable

import pytest

from hpczero.cli import main
from hpczero.commands import sweep
from hpczero.errors import HpczeroError, InputError, Stopped


def ends_with(error: BaseException) -> Callable[[object], int]:
    def verb(options: object) -> int:
        raise error

    return verb


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (HpczeroError("the disk is full"), 1, "hpczero: the disk is full\n"),
        (InputError("no such key"), 2, "hpczero: no such key\n"),
        (Stopped("to be continued"), 75, "hpczero: to be continued\n"),
        (KeyboardInterrupt(), 1, "hpczero: interrupted\n"),
    ],
)
def test_an_end_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(sweep, "check", ends_with(error))
    assert main(["check", "spec.toml"]) == code
    assert capsys.readouterr() == ("", said)
