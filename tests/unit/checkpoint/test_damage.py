"""A checkpoint that is not what was written: whatever changed is found, by `verify` and by
reading what it concerns.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hpczero.checkpoint
from hpczero.checkpoint import Damaged
from hpczero.checkpoint.shard_file import BLOCK, SLOTS, WIDTH
from hpczero.checkpoint.verify import Damage, Verification
from hpczero.cli import main
from tests.support.checkpoints import Grid, Wanted, look_without_a_process, make, parameters

FLIPS = 200
WANTED = Wanted(
    layers=parameters(large=(1100, 601), small=(40, 9), one=(), last=(3,))
)  # the first one has several blocks on each rank


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("whole"), Grid(tensor=2, per_file=1), WANTED)


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    look_without_a_process(monkeypatch)


def damages(folder: Path) -> list[Damage]:
    try:
        with Verification(folder) as verification:
            tasks = verification.tasks()
            return [one for task in tasks for one in verification.carry_out(task, lambda _: None)]
    except Damaged as error:
        return [Damage("MANIFEST.json", str(error))]


def read_all(folder: Path) -> dict[str, str]:
    """Return the parts that cannot be read, and why; "" stands for the whole."""
    failed = {}
    try:
        with hpczero.checkpoint.open(folder) as checkpoint:
            for name in checkpoint:
                try:
                    checkpoint[name].numpy()
                except Damaged as error:
                    failed[name] = str(error)
    except Damaged as error:
        failed[""] = str(error)
    return failed


def change(path: Path, action: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    action(content)
    path.write_bytes(content)


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def tensors_at(folder: Path, file: str, byte: int) -> set[str] | None:
    """Whose numbers share the block of this byte; None: it is no number's."""
    with hpczero.checkpoint.open(folder) as checkpoint:
        for shard in checkpoint.content.shards:
            for data in shard.ranks if shard.file == file else ():
                for slot, begin in enumerate(data.data):
                    if begin <= byte < begin + data.extent.length:
                        block = (byte - begin) >> 20
                        table = checkpoint.table
                        there = (
                            (table.rank == data.rank)
                            & (table.offset < (block + 1) << 18)
                            & (table.offset + table.sizes > block << 18)
                        )
                        return {
                            f"/{SLOTS[slot]}/{table.tensors[int(number)].name}"
                            for number in table.tensor[there]
                        }
    return None


def test_what_takes_several_reads_is_read_whole(tmp_path: Path) -> None:
    """A tensor of 11 blocks, of which a read takes four."""
    wanted = Wanted(layers=parameters(large=(11 * BLOCK // WIDTH,)))
    with hpczero.checkpoint.open(make(tmp_path, Grid(), wanted)) as checkpoint:
        assert np.array_equal(checkpoint[f"{SLOTS[0]}/large"].numpy(), wanted.values[0]["large"])


def test_a_flipped_bit_anywhere_is_found(whole: Path) -> None:
    random, sizes = (
        np.random.default_rng(5),
        {path.name: path.stat().st_size for path in whole.iterdir()},
    )
    names = sorted(sizes)
    structure = 0
    for number in range(FLIPS):
        name = names[number % len(names)]
        bit = int(
            random.integers(0, (sizes[name] if number % 3 else min(sizes[name], 4096)) * 8)
        )  # often where HDF5 has its structure
        wanted = tensors_at(whole, name, bit // 8)
        flip(whole / name, bit)
        found, unread = damages(whole), read_all(whole)
        flip(whole / name, bit)
        assert {damage.file for damage in found} == {name}, (name, bit)
        assert all(name in said for said in unread.values())
        if wanted is None:
            structure += 1
            assert unread
        else:
            assert len(found) == 1
            assert set(found[0].tensors) == unread.keys() == wanted, (name, bit)
            assert all(tensor.strip("/") in said for tensor, said in unread.items())
    assert 30 < structure < FLIPS - 30
    assert not damages(whole)
    assert not read_all(whole)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def remove(folder: Path) -> None:
    (folder / "shard-00001.h5").unlink()


def truncate(folder: Path) -> None:
    change(folder / "shard-00001.h5", lambda content: content.__delitem__(slice(-1, None)))


def lengthen(folder: Path) -> None:
    change(folder / "shard-00001.h5", lambda content: content.extend(b"\0"))


def exchange(folder: Path) -> None:
    (folder / "shard-00000.h5").rename(folder / "x")
    (folder / "shard-00001.h5").rename(folder / "shard-00000.h5")
    (folder / "x").rename(folder / "shard-00001.h5")


def take_another_step_s(folder: Path) -> None:
    other = make(
        folder.parent / "other", Grid(tensor=2, per_file=1), Wanted(layers=WANTED.layers, seed=1)
    )
    shutil.copy(other / "shard-00001.h5", folder / "shard-00001.h5")


@pytest.mark.parametrize("action", [remove, truncate, lengthen, exchange, take_another_step_s])
def test_a_shard_that_is_not_the_one_written_is_found_and_its_tensors_are_named(
    copy: Path, action: Callable[[Path], None]
) -> None:
    action(copy)
    found, unread = damages(copy), read_all(copy)
    assert (
        "shard-00001.h5"
        in {damage.file for damage in found}
        <= {"shard-00000.h5", "shard-00001.h5"}
    )
    named = {tensor for damage in found for tensor in damage.tensors}
    assert named >= unread.keys() >= {f"/{slot}/large" for slot in SLOTS}
    assert all(
        "shard-0000" in said and tensor.strip("/") in said for tensor, said in unread.items()
    )


@pytest.mark.parametrize("name", ["MANIFEST.json", "index.h5"])
def test_without_its_manifest_or_index_it_is_no_checkpoint(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / name).unlink()
    assert main(["ckpt", "verify", str(copy)]) == 1
    assert name in capsys.readouterr().out
    with pytest.raises(Damaged, match=name):
        hpczero.checkpoint.load.Checkpoint.open(copy)


def test_all_damages_are_listed_and_the_exit_code_is_1(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (5000, 2_000_000):
        change(
            copy / "shard-00000.h5",
            lambda content, place=place: content.__setitem__(place, content[place] ^ 1),
        )
    remove(copy)
    assert main(["ckpt", "verify", str(whole), str(copy)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{whole}: good")
    assert [line.split(":")[0].strip() for line in lines[2:]] == [
        "shard-00000.h5",
        "shard-00000.h5",
        "shard-00001.h5",
    ]
    assert "/model/large" in lines[2]
    assert "/optimizer/moment1/large" in lines[3]


def test_damaged_blocks_are_one_damage_only_if_they_follow_each_other(tmp_path: Path) -> None:
    folder = make(tmp_path, Grid(), Wanted(layers=parameters(large=(1100, 1201))))  # six blocks
    place = Verification(folder).content.shards[0].ranks[0].data[1]
    for block in (0, 1, 3, 5):
        change(
            folder / "shard-00000.h5",
            lambda content, at=place + (block << 20) + 9: content.__setitem__(at, content[at] ^ 1),
        )
    size = 4 * 1100 * 1201 + (-4 * 1100 * 1201) % 4096
    wanted = [(0, 2 << 20), (3 << 20, 4 << 20), (5 << 20, size)]
    said = [
        f"damaged at bytes {place + begin} to {place + end - 1}, data of rank 0"
        for begin, end in wanted
    ]
    assert [damage.what for damage in damages(folder)] == said


def test_what_is_damaged_stays_damaged_when_it_is_asked_for_again(copy: Path) -> None:
    flip(copy / "shard-00000.h5", 9 * 8)
    with hpczero.checkpoint.open(copy) as checkpoint:
        for _ in range(2):
            with pytest.raises(Damaged, match=r"shard-00000\.h5: it is damaged outside"):
                checkpoint["/model/small"].numpy()


def test_the_tensor_behind_a_damage_is_not_named(tmp_path: Path) -> None:
    """One fills a block of checksums, the next begins where the block ends."""
    block = 1 << 18
    made = make(tmp_path / "c", wanted=Wanted(layers=parameters(a=(block,), b=(block,))))
    with hpczero.checkpoint.open(made) as checkpoint:
        (shard,) = checkpoint.content.shards
        first = shard.ranks[0].data[0]
        assert sorted(checkpoint.table.offset) == [0, block]
    flip(made / shard.file, 8 * (first + 4 * block - 1))
    (damage,) = damages(made)
    assert damage.tensors == ("/model/a",)


def test_a_place_that_the_disk_has_lost_is_a_damage(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, lost = os.pread, 8192

    def pread(file: int, length: int, offset: int) -> bytes:
        if offset <= lost < offset + length and "shard-00001" in os.readlink(
            f"/proc/self/fd/{file}"
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, length, offset)

    assert damages(whole) == []
    monkeypatch.setattr(os, "pread", pread)
    assert {damage.file for damage in damages(whole)} == {"shard-00001.h5"}
