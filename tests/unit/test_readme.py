"""The README says of the program what the program does."""

import argparse
import re

import pytest

from hpczero import env
from hpczero.cli import _parser
from hpczero.errors import HpczeroError, InputError, Stopped
from tests.support.launch import CHECKOUT, hpczero, launch

README = (CHECKOUT / "README.md").read_text()


def test_every_page_is_linked_under_read_on() -> None:
    pages = {f"docs/{path.name}" for path in (CHECKOUT / "docs").glob("*.md")}
    assert set(re.findall(r"\]\((docs/[^)]*)\)", README.partition("## Read on")[2])) == pages


def test_the_picture_is_of_the_run_that_is_shown() -> None:
    picture = (CHECKOUT / "docs" / "quickstart.svg").read_text()
    (loss,) = re.findall(r"^loss: +([\d.]+) at the first step, ([\d.]+)", README, re.MULTILINE)
    (validation,) = re.findall(r"^validation: ([\d.]+)", README, re.MULTILINE)
    (steps,) = re.findall(r"tokens in (\d+) steps", README)
    first, last, validated = (f"{float(one):.2f}" for one in (*loss, validation))
    assert f"training: from {first} at 1 to {last} at {steps};" in picture
    assert f"to {validated} at {steps};" in picture


def test_the_exit_codes_are_these() -> None:
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)]
    assert codes == [0, HpczeroError.exit_code, InputError.exit_code, Stopped.exit_code]


def test_the_verbs_without_torch_and_mpi_are_all_but_these() -> None:
    (verbs,) = [
        action.choices
        for action in _parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    (said,) = re.findall(r"For\s+every\s+other\s+verb(.*?)\n\n", README, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", said)) == set(verbs) - {"run", "eval", "sample", "calibrate"}


def test_an_install_command_survives_the_shell() -> None:
    assert (
        env.install_command("/a b/python", "/c d", "train")
        == "'/a b/python' -m pip install '/c d[train]'"
    )
    assert (
        env.install_command("/python", "", "mpi")
        == "/python -m pip install '.[mpi]', in the folder of hpczero's source"
    )
    assert env.install("train").endswith(f" -m pip install '{CHECKOUT}[train]'")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["model.heads=3", "model.hidden=32"],
            (
                "note: model.heads = 3 does not divide model.hidden = 32: each head is 11 wide, "
                "33 in all"
            ),
        ),
        (["model.heads=4", "model.hidden=32"], ""),
        (["model.heads=3", "model.hidden=32", "model.head_dim=8"], ""),
    ],
)
def test_check_says_when_heads_do_not_divide_the_width(settings: list[str], said: str) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    done = launch(hpczero("check", "jobspecs/quickstart.toml", *words), 60)
    assert done.code == 0, done
    assert said in done.out
    assert ("does not divide" in done.out) == bool(said)
