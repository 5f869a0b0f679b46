"""Manifests that a stranger made, with checksums that fit, are refused in one line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint import manifest
from tests.support.checkpoints import seal
from tests.support.crafted import assert_refused, first_shard

pytestmark = pytest.mark.usefixtures("hdf5_in_this_process")


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "path out": lambda content: first_shard(content).update(file="../secret.h5"),
    "the same name elsewhere": lambda content: first_shard(content).update(
        file="../shard-00000.h5"
    ),
    "absolute path": lambda content: first_shard(content).update(file="/etc/passwd"),
    "hidden end": lambda content: first_shard(content).update(file="shard-00000.h5\n"),
    "size beyond": lambda content: first_shard(content).update(size=1 << 80),
    "huge elements": lambda content: first_shard(content)["ranks"][0].update(elements=1 << 61),
    "place that is not aligned": lambda content: first_shard(content)["ranks"][0].update(
        data=[1, 2, 3]
    ),
    "slots over each other": lambda content: first_shard(content)["ranks"][0].update(
        data=[4096] * 3
    ),
    "negative place": lambda content: first_shard(content)["ranks"][0].update(checksums=-8),
    "too few slots": lambda content: first_shard(content)["ranks"][0].update(data=[]),
    "many ranks": lambda content: content.update(ranks=1 << 61),
    "rank twice": lambda content: first_shard(content)["ranks"].append(
        first_shard(content)["ranks"][0]
    ),
    "file twice": lambda content: content["shards"].append({**first_shard(content), "ranks": []}),
    "no shards": lambda content: content.update(shards=[]),
    "another key": lambda content: content.update(more=1),
    "text for a number": lambda content: content.update(ranks="2"),
    "infinite scale": lambda content: content["state"].update(loss_scale=float("inf")),
    "step that is NaN": lambda content: content["state"].update(step=float("nan")),
    "format 0": lambda content: content.update(format=0),
}


@pytest.mark.parametrize("way", MANIFESTS)
def test_a_manifest_that_cannot_be_is_refused(
    crafted: Path, secret: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    seal(crafted, MANIFESTS[way])
    assert_refused(crafted, capsys, "MANIFEST.json")


def test_tensors_that_missed_updates_are_read_in_format_2_alone(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Format 1 has no place for them, so that an older hpczero refuses to go on without."""
    missed = {"blocks.0.qkv.weight": 3}
    seal(
        crafted, lambda content: (content["state"].update(missed=missed), content.update(format=2))
    )
    assert manifest.read(crafted).state.missed == missed
    seal(crafted, lambda content: content.update(format=1))
    assert_refused(crafted, capsys, "MANIFEST.json")


def test_a_newer_format_is_refused_with_a_clear_word(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(crafted, lambda content: content.update(format=5, shards={"in": "another way"}))
    assert_refused(
        crafted,
        capsys,
        "format 5 was written by a newer hpczero; this one reads up to format 4",
        code=2,
    )


NONE = [
    "",
    "{",
    "[]",
    '{"content": 3}',
    '{"content": {}}',
    "[" * 200_000,
    '{"content": {"format": ' + "9" * 5000 + "}}",
    "\ud800",
]


@pytest.mark.parametrize("text", NONE)
def test_a_manifest_that_is_none_is_refused(
    crafted: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (crafted / "MANIFEST.json").write_bytes(text.encode(errors="surrogatepass"))
    assert_refused(crafted, capsys, "MANIFEST.json")


def test_a_manifest_that_is_too_long_is_refused_unread(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(crafted / "MANIFEST.json", (64 << 20) + 1)
    assert_refused(crafted, capsys, "67,108,865 bytes are too many for a manifest")


@pytest.mark.parametrize("depth", [200, 500, 900, 990])
def test_a_deep_spec_is_refused_or_read_but_never_a_traceback(
    crafted: Path, capsys: pytest.CaptureFixture[str], depth: int
) -> None:
    content = (
        (crafted / "MANIFEST.json")
        .read_text()
        .replace('"name": "crafted"', '"name": ' + '{"d": ' * depth + "1" + "}" * depth)
    )
    (crafted / "MANIFEST.json").write_text(content)
    assert_refused(crafted, capsys, "MANIFEST.json")
