"""Fixtures: a token file that a test may change, and a folder of text to build one from."""

import json
import shutil
from pathlib import Path

import pytest

from hpczero.data import dataset
from hpczero.data.build import build_token_file
from hpczero.data.corpus import find
from hpczero.data.journal import Recipe
from tests.support.token_files import TEXT


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text(TEXT)
    build_token_file(
        find([str(folder / "text.txt")]),
        folder / "good.h5",
        Recipe(validation_fraction=0.2),
        folder / "work",
        dataset.SilentListener(),
    )
    return folder / "good.h5"


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A token file that a test may change."""
    return Path(shutil.copy(original, tmp_path / "tokens.h5"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of short, long, empty and damaged documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(
            f"document {number} äöü\n" * (50 + 37 * number), encoding="utf-8"
        )
    (folder / "long.md").write_text(
        "".join(f"line {number} of a long file\n" for number in range(30_000))
    )
    with open(folder / "lines.jsonl", "w") as file:
        for number in range(200):
            print(json.dumps({"text": f"record {number}\n" * (number % 40)}), file=file)
        print(json.dumps({"text": "long\n" * 100_000}), file=file)
    (folder / "damaged.txt").write_bytes(b"caf\xe9 " * 100)
    return folder
