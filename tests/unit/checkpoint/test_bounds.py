"""Manifests that are made to be hard to read, or that speak of data which is not there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpczero.checkpoint
from hpczero.checkpoint import Damaged, manifest
from hpczero.cli import main
from tests.support.checkpoints import Grid, Wanted, make, parameters, seal
from tests.support.mutants import in_process

WANTED = Wanted(layers=parameters(a=(30, 7), b=(11,)), spec={"name": "crafted"})


@pytest.fixture
def crafted(tmp_path: Path) -> Path:
    return make(tmp_path, Grid(data=2, per_file=1), WANTED)


def _of_items(content: dict[str, Any], key: str, item: str) -> bytes:
    """A manifest as long as one may be, with one of its tables or lists full of something."""
    text = json.dumps({"content": content | {key: "HERE"}, "checksum": "0" * 16})
    count = ((32 << 20) - len(text)) // (len(item) + 1)
    items = ",".join([item] * count)
    return text.replace('"HERE"', f"[{items}]").encode()


def _of_keys(content: dict[str, Any], value: str) -> bytes:
    keys = ",".join(f'"{number}":{value}' for number in range(2_000_000))
    text = json.dumps({"content": content | {"grid": "HERE"}, "checksum": "0" * 16})
    return text.replace('"HERE"', "{" + keys + "}").encode()


HARD_TO_READ: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "lists": lambda content: _of_items(content, "spec", "[]"),
    "tables": lambda content: _of_items(content, "spec", "{}"),
    "shards that are none": lambda content: _of_items(content, "shards", "0"),
    "few shards that are none": lambda content: _of_items(content, "shards", "0" + " " * 99),
    "axes": lambda content: _of_keys(content, "1"),
    "axes that are none": lambda content: _of_keys(content, '""'),
    "letters of four bytes": lambda content: ("\U0001f600" * (8 << 20)).encode(),
    "depth": lambda content: b'{"content":' * (3 << 20),
}


@pytest.mark.parametrize("way", HARD_TO_READ)
@pytest.mark.few(1)
def test_a_manifest_that_is_hard_to_read_is_refused_in_no_time(crafted: Path, way: str) -> None:
    path = crafted / "MANIFEST.json"
    raw = HARD_TO_READ[way](json.loads(path.read_text())["content"])
    path.write_bytes(raw)

    def read() -> int:
        with pytest.raises(Damaged):
            manifest.read(crafted)
        return 0

    ended = in_process(read, len(raw))
    assert ended.result == 0, ended.wrong


@pytest.mark.parametrize("size", [1 << 40, 1 << 60])
def test_data_that_only_the_manifest_has_takes_no_memory(crafted: Path, size: int) -> None:
    def change(content: dict[str, Any]) -> None:
        length, shard_file = size // 4 // 4096 * 4096, content["shards"][0]
        rank = {"rank": 0, "elements": length // 4, "checksums": 4096 + 3 * length}
        rank["data"] = [4096 + slot * length for slot in range(3)]
        end = rank["checksums"] + 8 * 3 * -(-length // (1 << 20))
        shard_file |= {"size": end, "ranks": [rank]}
        content |= {"shards": [shard_file], "ranks": 1}

    seal(crafted, change)
    ended = in_process(lambda: main(["ckpt", "verify", str(crafted)]), 0)
    assert ended.result == 1, ended.wrong


@pytest.mark.parametrize("name", ["names", "shapes"])
@pytest.mark.few(1)
def test_an_index_of_lists_without_end_takes_no_memory(crafted: Path, name: str) -> None:
    raw = b"[" + b",".join([b"[]"] * (5 << 20)) + b"]"
    with h5py.File(crafted / "index.h5", "r+") as file:
        del file[f"pieces/{name}"]
        file.create_dataset(f"pieces/{name}", data=np.frombuffer(raw, np.uint8))
    seal(crafted)

    def read() -> int:
        with pytest.raises(Damaged, match="more than 250,000 tensors"):
            hpczero.checkpoint.open(crafted)
        return 0

    ended = in_process(read, len(raw))
    assert ended.result == 0, ended.wrong
