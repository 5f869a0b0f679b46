"""`hpczero show attention`: the picture and the figures are those of the layout."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hpczero.cli import main
from hpczero.commands.show import cells

SPEC = """
[model]
layers = 2
heads = 4
seq_len = {positions}
[model.attention]
kind = ["dense", "strided"]
block = 16
window = 3
heads = "different"
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.format(positions=100))
    return str(path)


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["show", "attention", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_figures_are_those_of_the_blocks(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seven blocks, the last with 4 positions: counted one by one."""
    near, apart = facts(capsys, spec), facts(capsys, spec, "--head", "3")
    assert near["rows"] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    assert apart["rows"] == [[0], [1], [2], [0, 3], [1, 4], [2, 5], [0, 3, 6]]
    pairs = [
        sum(
            min(16, 100 - 16 * row) * min(16, 100 - 16 * key)
            for row, keys in enumerate(rows)
            for key in keys
        )
        for rows in (near["rows"], apart["rows"])
    ]
    assert near["computed_pairs"] == apart["computed_pairs"] == sum(pairs) / 2
    assert (near["layer"], near["patterns"], near["dense_pairs"]) == (1, 2, 5050)
    assert near["density"] == near["computed_pairs"] / 5050


def test_the_picture_in_letters(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "attention", spec, "--layer", "1", "--head", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layer 1: strided, 100 positions in 7 blocks of 16; 2 patterns of heads"
    assert lines[3:] == ["#", " #", "  #", "#  #", " #  #", "  #  #", "#  #  #"]


def test_the_streams_of_t5_have_layouts_of_their_own(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """62 and 14 positions: the encoder sees both ways, the decoder back."""
    keys = "family='t5'", "seq_len=76", "vocab=359", "attention.kind='local'"
    sets = [word for one in keys for word in ("--set", f"model.{one}")]
    found = [facts(capsys, spec, *sets, "--layer", number) for number in ("0", "1")]
    assert found[0]["rows"] == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]
    assert found[1]["rows"] == [[0]]
    assert [one["positions"] for one in found] == [62, 14]
    assert [one["stream"] for one in found] == ["encoder", "decoder"]
    assert [one["dense_pairs"] for one in found] == [62 * 62, 14 * 15 // 2]
    assert main(["show", "attention", spec, *sets, "--layer", "1"]) == 0
    assert capsys.readouterr().out.startswith("layer 1 (decoder): local, 14 positions in 1 blocks")
    assert main(["check", spec, *sets]) == 0
    hidden = 2 * 16 * (16 + 14 + 14)  # of the encoder; the decoder computes a whole block
    share = (62 * 62 - hidden + 14 * 14) / (62 * 62 + 14 * 15 // 2)
    assert f"local in 2 of 2 layers: {share:.1%} of dense" in capsys.readouterr().out


def test_a_cell_of_several_blocks_is_shaded_by_how_many_are_seen() -> None:
    pattern = [[row] for row in range(256)]
    rows = [*cells(pattern)]
    # 4 of a cell's 16 blocks, which is a quarter: the first of four shades
    assert rows == [" " * at + "." + " " * (63 - at) for at in range(64)]


def test_the_drawing_has_a_mark_for_each_run_of_blocks(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "seen.svg"
    assert main(["show", "attention", spec, "--svg", str(path)]) == 0
    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}rect")
    tips = [rect[0].text for rect in found if len(rect)]
    assert tips[0] == "block 0 sees 0 to 0"
    assert tips[-1] == "block 6 sees 4 to 6"
    assert len(tips) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "0"], "layer 0 is dense"),
        (["--layer", "2"], "--layer 2: the model has layers 0 to 1"),
        (["--head", "4"], "--head 4: a layer has heads 0 to 3"),
        (["--set", 'model.attention.kind="dense"'], "all layers are dense"),
    ],
)
def test_what_is_not_there(
    spec: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "attention", spec, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_check_says_what_is_left_of_the_work(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", spec, "--set", "model.seq_len=4096"]) == 0
    blocks = sum(min(row + 1, 3) + row // 3 + 1 for row in range(256)) / 2
    share = (1 + blocks * 16**2 / (4096 * 4097 / 2)) / 2
    said = capsys.readouterr().out
    assert f"  attention strided in 1 of 2 layers: {share:.1%} of dense attention's pairs; " in said
