"""Checkpoints read without hpczero: by the readers of docs/checkpoint-format.md, by h5dump and
h5ls. And the index of a very large job.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xxhash

from hpczero.checkpoint import index
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import INDEX, RankData, ShardFile
from hpczero.checkpoint.piece_table import RankShard, Table, Tensor
from hpczero.checkpoint.shard_file import SLOTS
from hpczero.model.families import layers, parameter_count
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.spec.schema import Model
from tests.support.checkpoints import Grid, Wanted, make, memory_at_most
from tests.support.launch import CHECKOUT

PAGE = CHECKOUT / "docs" / "checkpoint-format.md"
READERS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
has_tools = pytest.mark.skipif(
    not shutil.which("h5dump"), reason="h5dump is not installed (Debian and Ubuntu: hdf5-tools)"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made"), Grid(tensor=2, data=2, pipeline=2, per_file=2))


def run_reader(code: str, folder: Path, what: str) -> Any:
    """In a process that cannot import hpczero."""
    script = (
        f"import sys; sys.modules['hpczero'] = None\n{code}\nimport numpy as np\n"
        f"np.savez(sys.argv[2], **({what}))"
    )
    out = folder.parent / "out.npz"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(out)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(out))


def test_ten_lines_of_h5py_read_whole_tensors_and_what_is_missing_shows_as_nan(made: Path) -> None:
    assert len(READERS[0].strip().splitlines()) <= 10
    wanted = Wanted().values[0]
    found = run_reader(READERS[0], made, "{'.step': read(sys.argv[1])[0], **read(sys.argv[1])[1]}")
    assert found.pop(".step") == 100
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], values) for name, values in wanted.items())
    copy = Path(shutil.copytree(made, made.parent / "copy"))
    (copy / "shard-00001.h5").unlink()
    found = run_reader(READERS[0], copy, "read(sys.argv[1])[1]")
    missing = [name for name, values in found.items() if np.isnan(values).any()]
    assert 0 < len(missing) < len(found)
    assert all(
        np.array_equal(np.where(np.isnan(values), wanted[name], values), wanted[name])
        for name, values in found.items()
    )


def test_the_reader_by_the_piece_table_reads_all_slots(made: Path) -> None:
    for slot, values in zip(SLOTS, Wanted().values, strict=True):
        some = {name: values[name] for name in list(values)[::4]}
        found = run_reader(
            READERS[1],
            made,
            f"{{name: read_by_table(sys.argv[1], name, '{slot}') for name in {list(some)}}}",
        )
        assert all(np.array_equal(found[name], values) for name, values in some.items())


def test_every_checksum_is_what_the_page_says(made: Path) -> None:
    text = (made / "MANIFEST.json").read_text()
    whole = json.loads(text)
    content = whole["content"]
    assert whole["checksum"] == xxhash.xxh3_64_hexdigest(
        json.dumps(content, sort_keys=True).encode()
    )
    assert text == json.dumps(whole, indent=1, sort_keys=True) + "\n"
    assert content["index"]["checksum"] == xxhash.xxh3_64_hexdigest((made / INDEX).read_bytes())
    for shard in content["shards"]:
        raw = (made / shard["file"]).read_bytes()
        rest, place = b"", 0
        slots = [
            (begin, number, slot)
            for number, rank in enumerate(shard["ranks"])
            for slot, begin in enumerate(rank["data"])
        ]
        for begin, number, slot in sorted(slots):
            data = shard["ranks"][number]
            length = -(-data["elements"] * 4 // 4096) * 4096
            blocks = [
                raw[begin + at : begin + min(at + (1 << 20), length)]
                for at in range(0, length, 1 << 20)
            ]
            stored = np.frombuffer(
                raw, "<u8", len(blocks), data["checksums"] + 8 * slot * len(blocks)
            )
            assert [xxhash.xxh3_64_intdigest(block) for block in blocks] == list(stored)
            assert not any(raw[begin + data["elements"] * 4 : begin + length])
            rest, place = rest + raw[place:begin], begin + length
        assert shard["rest"] == xxhash.xxh3_64_hexdigest(rest + raw[place:])
        assert shard["size"] == len(raw)


@has_tools
def test_h5dump_and_h5ls_read_it(made: Path) -> None:
    def run(*command: str) -> str:
        return subprocess.run(
            command, cwd=made, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    for slot, values in zip(SLOTS, Wanted().values, strict=True):
        for name in ("embedding.lookup.tokens", "blocks.1.attention.qkv.weight", "head.norm.bias"):
            run(
                "h5dump",
                "-y",
                "-w",
                "1",
                "-m",
                "%.9g",
                "-o",
                "out.txt",
                "-d",
                f"/{slot}/{name}",
                INDEX,
            )
            text = (made / "out.txt").read_text().replace(",", " ").split()
            assert np.array_equal(
                np.array(text, np.float32).reshape(values[name].shape), values[name]
            )
    (made / "out.txt").unlink()
    assert "/model/blocks.2.feed_forward.up.weight Dataset {96, 24}" in run("h5ls", "-r", INDEX)
    assert "float" in run("h5ls", "-v", "shard-00000.h5/rank-00000/model")


def test_the_view_of_a_very_large_job_has_the_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_MOST_MAPPINGS", 50)
    made = make(tmp_path, Grid(tensor=2, data=2))
    with h5py.File(made / INDEX) as file:
        assert np.array_equal(
            file["model/head.norm.bias"][()], Wanted().values[0]["head.norm.bias"]
        )
        assert "optimizer" not in file
    with Checkpoint.open(made) as checkpoint:
        assert np.array_equal(
            checkpoint["/optimizer/moment2/head.norm.bias"].numpy(),
            Wanted().values[2]["head.norm.bias"],
        )


def test_the_index_of_a_job_with_a_trillion_parameters(tmp_path: Path) -> None:
    """8 tensor x 64 pipeline x 6 data ranks."""
    model, tensor, pipeline, data = (
        Model(layers=128, hidden=25600, heads=160, seq_len=2048, vocab=51200),
        8,
        64,
        6,
    )
    assert parameter_count(model) > 1e12
    whole, ranks = layers(model), tensor * pipeline * data
    per_stage = -(-len(whole) // pipeline)
    cut: dict[tuple[int, int], list[UnitLayout]] = {}

    def holding(rank: int) -> RankShard:
        stage, inside = divmod(rank, tensor * data)
        key = stage, inside % tensor
        if key not in cut:
            own = whole[stage * per_stage : (stage + 1) * per_stage]
            cut[key] = [
                unit_layout(layer, data, tensor, key[1]) for layer in own if layer.parameters
            ]
        return RankShard(cut[key], inside // tensor, key[1])

    with memory_at_most(200_000_000):
        table = Table.of(
            [Tensor(p.name, p.shape) for layer in whole for p in layer.parameters], ranks, holding
        )
        elements = table.elements(ranks)
        assert not table.problem(elements)
        shards = [
            ShardFile(
                file=f"shard-{n:05d}.h5",
                size=0,
                rest="0" * 16,
                ranks=[_nowhere(rank, elements[rank]) for rank in range(8 * n, 8 * n + 8)],
            )
            for n in range(ranks // 8)
        ]
        index.write(tmp_path / INDEX, table, shards, {}, {"format": 1})
    assert (tmp_path / INDEX).stat().st_size < 200_000_000
    with (tmp_path / INDEX).open("rb") as file:
        read = index.read(tmp_path / INDEX, file.fileno())
    assert np.array_equal(read.table.stop, table.stop)


def _nowhere(rank: int, elements: int) -> RankData:
    return RankData(rank=rank, elements=elements, data=[0, 0, 0], checksums=0)
